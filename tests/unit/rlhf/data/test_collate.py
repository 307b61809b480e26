from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812
from transformers import OPTConfig, OPTForCausalLM

from rlhf.data.collate import ResponseBatch, collate_preferences, collate_responses, collate_sft, left_pad
from rlhf.data.dataset import PreferenceRow, SFTRow
from rlhf.distributed import Group
from rlhf.ops import to_columns

EOS = 2


def sft(ids: list[int], num_prompt: int, source: int = 0) -> SFTRow:
    return SFTRow(np.array(ids, np.int32), np.arange(len(ids)) >= num_prompt, source, 0)


def preference(prompt: list[int], responses: list[list[int]], ranks: list[float], **fields: Any) -> PreferenceRow:
    defaults = {"margin": 0.0, "source": 0, "index": 0}
    arrays = [np.array(response, np.int32) for response in responses]
    return PreferenceRow(np.array(prompt, np.int32), arrays, ranks, **{**defaults, **fields})


def test_hand_worked_sft_batch() -> None:
    """Ragged, one row of one token, pad id == eos id."""
    batch = collate_sft([sft([2, 7, 8, EOS], 2, source=1), sft([5], 0)], pad_id=EOS, device="cpu", packed=False)
    assert batch.sequences.token_ids_BT.tolist() == [[2, 7, 8, 2], [5, 2, 2, 2]]
    assert batch.sequences.attention_mask_BT.tolist() == [[True] * 4, [True, False, False, False]]
    assert batch.sequences.position_ids_BT.tolist() == [[0, 1, 2, 3], [0, 0, 0, 0]]
    assert batch.loss_mask_BT.tolist() == [[False, False, True, True], [False] * 4]
    assert batch.source_S.tolist() == [1, 0]
    assert batch.sequences.token_ids_BT.dtype == torch.int64 and batch.loss_mask_BT.dtype == torch.bool


def test_the_true_eos_has_a_loss_when_pad_is_eos() -> None:
    """A4: the mask comes from lengths, so the stop token is trained on and the padding behind it is not."""
    batch = collate_sft([sft([2, 7, EOS], 1), sft([2, 7, 8, 9, EOS], 1)], pad_id=EOS, device="cpu", packed=False)
    assert batch.loss_mask_BT[0].tolist() == [False, True, True, False, False]
    assert batch.loss_mask_BT[1].tolist() == [False, True, True, True, True]


def test_the_first_token_never_has_a_loss() -> None:
    batch = collate_sft([sft([2, 7, EOS], 0)], pad_id=1, device="cpu", packed=False, loss_on="all")
    assert batch.loss_mask_BT.tolist() == [[False, True, True]]
    batch = collate_sft([sft([2, 7, EOS], 2)], pad_id=1, device="cpu", packed=False, loss_on="all")
    assert batch.loss_mask_BT.tolist() == [[False, True, True]]


def test_a_padded_row_has_the_loss_of_the_bare_row() -> None:
    """A1: 3 real tokens padded to 512 by a long neighbour, on a real OPT; padding counts in no loss."""
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=32, word_embed_proj_dim=16,
        max_position_embeddings=512, dropout=0.0,
    )  # fmt: skip
    model = OPTForCausalLM(config).eval()

    def loss(rows: list[SFTRow]) -> torch.Tensor:
        batch = collate_sft(rows, pad_id=EOS, device="cpu", packed=False)
        with torch.no_grad():
            logits_BTV = model(
                batch.sequences.token_ids_BT,
                attention_mask=batch.sequences.attention_mask_BT,
                position_ids=batch.sequences.position_ids_BT,
            ).logits
        loss_BT = F.cross_entropy(
            logits_BTV[:, :-1].transpose(1, 2), batch.sequences.token_ids_BT[:, 1:], reduction="none"
        )
        return (loss_BT * batch.loss_mask_BT[:, 1:])[0].sum()

    bare = sft([2, 7, EOS], 1)
    long = sft([2, *range(3, 30)] * 18 + [4] * 8, 1)
    assert len(long.token_ids) == 512
    torch.testing.assert_close(loss([bare]), loss([bare, long]), atol=1e-5, rtol=1e-6)


def test_prompts_are_left_padded_in_order() -> None:
    """A12: lengths 3, 1 and 5; order kept, last column real, pad id may stand in a prompt."""
    token_ids_BP, attention_mask_BP = left_pad([[4, 1, 5], [1], [6, 7, 8, 9, 3]], pad_id=1, device="cpu")
    assert token_ids_BP.tolist() == [[1, 1, 4, 1, 5], [1, 1, 1, 1, 1], [6, 7, 8, 9, 3]]
    assert attention_mask_BP.int().tolist() == [[0, 0, 1, 1, 1], [0, 0, 0, 0, 1], [1, 1, 1, 1, 1]]
    assert attention_mask_BP[:, -1].all()
    with pytest.raises(ValueError, match=r"lengths \[1, 0\]"):
        left_pad([[1], []], pad_id=0, device="cpu")
    with pytest.raises(ValueError, match="every prompt needs a token"):
        left_pad([], pad_id=0, device="cpu")


def scoring(prompts: list[list[int]], responses: list[list[int]], **options: Any) -> ResponseBatch:
    return collate_responses(prompts, responses, **{"pad_id": EOS, "device": "cpu", "packed": False, **options})


def test_hand_worked_scoring_batch() -> None:
    """The stop token is in the mask; prompts are right-padded with their responses, without padding between them."""
    batch = scoring([[2, 5], [2]], [[7, EOS], [8, 9, EOS]])
    assert batch.sequences.token_ids_BT.tolist() == [[2, 5, 7, 2], [2, 8, 9, 2]]
    assert batch.response_mask_BT.tolist() == [[False, False, True, True], [False, True, True, True]]
    assert batch.response_position_BT.tolist() == [[0, 0, 0, 1], [0, 0, 1, 2]]
    assert batch.prompt_length_S.tolist() == [2, 1] and batch.response_length_S.tolist() == [2, 3]
    assert batch.first_response_S.tolist() == [2, 5]
    batch = scoring([[2, 5], [2]], [[], [8]])
    assert batch.response_mask_BT.tolist() == [[False, False], [False, True]]
    with pytest.raises(ValueError, match="prompt 1 has no token"):
        scoring([[2], []], [[1], [1]], pad_id=0)


def test_hand_worked_packed_row() -> None:
    """The same sequences in one row: nothing is padding, positions start again, places count through the row."""
    batch = scoring([[2, 5], [2]], [[7, EOS], [8, 9, EOS]], packed=True)
    sequences = batch.sequences
    assert sequences.token_ids_BT.tolist() == [[2, 5, 7, 2, 2, 8, 9, 2]]
    assert sequences.position_ids_BT.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]
    assert sequences.attention_mask_BT is None
    assert sequences.layout is not None and sequences.layout.lengths == [4, 4]
    assert batch.response_mask_BT.int().tolist() == [[0, 0, 1, 1, 0, 1, 1, 1]]
    assert batch.response_position_BT.tolist() == [[0, 0, 0, 1, 0, 0, 1, 2]]
    assert (sequences.first_S.tolist(), sequences.last_S.tolist()) == ([0, 4], [3, 7])
    assert batch.first_response_S.tolist() == [2, 5]
    assert sequences.num_tokens == sequences.num_columns == 8


def test_hand_worked_shared_prompt() -> None:
    """Samples 0 and 2 answer the same prompt, which stands once; they stay samples 0 and 2. Stop = pad = 2."""
    batch = scoring([[2, 5], [6], [2, 5]], [[7, EOS], [8], [9, 9, EOS]], packed=True)
    sequences = batch.sequences
    assert sequences.token_ids_BT.tolist() == [[2, 5, 7, 2, 9, 9, 2, 6, 8]]
    assert sequences.position_ids_BT.tolist() == [[0, 1, 2, 3, 2, 3, 4, 0, 1]]
    assert batch.response_mask_BT.int().tolist() == [[0, 0, 1, 1, 1, 1, 1, 0, 1]]
    assert batch.response_position_BT.tolist() == [[0, 0, 0, 1, 0, 1, 2, 0, 0]]
    assert batch.first_response_S.tolist() == [2, 8, 4] and batch.response_length_S.tolist() == [2, 1, 3]
    assert sequences.first_S.tolist() == [0, 7, 0] and sequences.last_S.tolist() == [3, 8, 6]
    assert (sequences.num_tokens, sequences.num_columns, sequences.num_padding) == (4 + 2 + 5, 9, 0)
    number_BT = torch.arange(9)[None]
    before_SR = to_columns(sequences.before(number_BT), batch.first_response_S, batch.response_length_S, 3)
    assert before_SR.tolist() == [[1, 2, 0], [7, 0, 0], [1, 4, 5]]


def test_before_looks_along_padded_rows() -> None:
    batch = scoring([[2, 5], [2]], [[7, EOS], [8, 9, EOS]])
    number_BT = torch.arange(8).view(2, 4)
    before_SR = to_columns(batch.sequences.before(number_BT), batch.first_response_S, batch.response_length_S, 3)
    assert before_SR.tolist() == [[1, 2, 0], [4, 5, 6]]


def test_packed_and_padded_batches_hold_the_same_sequences() -> None:
    """Ragged, one of one token, pad id == eos id: found by their places, tokens, positions and masks are equal."""
    rows = [sft([2, 7, 8, EOS], 2, source=1), sft([5], 0), sft([EOS, EOS, 4], 1)]
    packed, padded = (collate_sft(rows, pad_id=EOS, device="cpu", packed=p) for p in (True, False))
    assert padded.sequences.num_tokens == packed.sequences.num_tokens == packed.sequences.num_columns == 8
    assert (packed.sequences.num_padding, padded.sequences.num_padding) == (0, 4)
    for read in (
        lambda batch: batch.sequences.token_ids_BT,
        lambda batch: batch.sequences.position_ids_BT,
        lambda batch: batch.loss_mask_BT,
    ):
        one, two = (to_columns(read(b), b.sequences.first_S, b.sequences.length_S, 4) for b in (packed, padded))
        assert torch.equal(one, two)


def test_hand_worked_packed_preferences() -> None:
    """Each prompt stands once, its responses after it; a response's positions go on where the prompt ends."""
    rows = [
        preference([2, 5], [[7, EOS], [8, 9, 9, EOS]], [0.0, 1.0]),
        preference([2], [[7], [8]], [1.0, 0.0]),
    ]
    sequences = collate_preferences(rows, pad_id=EOS, device="cpu", packed=True).sequences
    assert sequences.token_ids_BT.tolist() == [[2, 5, 7, 2, 8, 9, 9, 2, 2, 7, 8]]
    assert sequences.position_ids_BT.tolist() == [[0, 1, 2, 3, 2, 3, 4, 5, 0, 1, 1]]
    assert sequences.first_S.tolist() == [0, 0, 8, 8] and sequences.last_S.tolist() == [3, 7, 9, 10]
    assert sequences.length_S.tolist() == [4, 6, 2, 2]
    assert (sequences.num_tokens, sequences.num_columns, sequences.num_padding) == (14, 11, 0)


def test_hand_worked_preference_batch() -> None:
    rows = [
        preference([2, 5], [[7, EOS], [8, 9, 9, EOS]], [0.0, 1.0], margin=0.5, source=1),
        preference([2], [[7], [8]], [1.0, 0.0]),
    ]
    batch = collate_preferences(rows, pad_id=EOS, device="cpu", packed=False)
    assert batch.sequences.token_ids_BT.tolist() == [
        [2, 5, 7, 2, 2, 2],
        [2, 5, 8, 9, 9, 2],
        [2, 7, 2, 2, 2, 2],
        [2, 8, 2, 2, 2, 2],
    ]
    assert batch.sequences.first_S.tolist() == [0, 6, 12, 18]
    assert batch.sequences.last_S.tolist() == [3, 11, 13, 19]
    assert batch.response_length_S.tolist() == [2, 4, 1, 1]
    assert batch.source_S.tolist() == [1, 1, 0, 0]
    assert (batch.chosen_N.tolist(), batch.rejected_N.tolist()) == ([1, 2], [0, 3])
    assert (batch.margin_N.tolist(), batch.source_N.tolist()) == ([0.5, 0.0], [1, 0])
    assert (batch.num_ties, batch.num_truncated_ties) == (0, 0)


def test_the_score_is_read_at_the_last_token_whatever_ids_stand_there() -> None:
    """A5, A21: eos inside the prompt, eos == pad, no bos: the index is length - 1."""
    rows = [preference([EOS, EOS, 5], [[7, EOS], [EOS]], [1.0, 0.0]), preference([9], [[EOS, EOS], [4]], [1.0, 0.0])]
    for pad_id in (EOS, 0, 9):
        batch = collate_preferences(rows, pad_id=pad_id, device="cpu", packed=False)
        assert (batch.sequences.last_S - batch.sequences.first_S).tolist() == [4, 3, 2, 1]
        assert batch.sequences.attention_mask_BT.sum(1).tolist() == [5, 4, 3, 2]


def test_four_answers_give_six_pairs_in_one_batch_of_four() -> None:
    """C15: K ranked answers are K rows, not 2 x 6."""
    batch = collate_preferences(
        [preference([2], [[3], [4], [5], [6]], [0.0, 3.0, 2.0, 1.0])], pad_id=0, device="cpu", packed=False
    )
    assert batch.sequences.token_ids_BT.shape == (4, 2)
    pairs = set(zip(batch.chosen_N.tolist(), batch.rejected_N.tolist(), strict=True))
    assert pairs == {(1, 0), (2, 0), (3, 0), (1, 2), (1, 3), (2, 3)}


def test_ties_and_pairs_equal_after_truncation_are_counted_and_left_out() -> None:
    batch = collate_preferences(
        [preference([2], [[3], [4], [3], [5]], [1.0, 1.0, 0.0, 0.0])], pad_id=0, device="cpu", packed=False
    )
    assert (batch.num_ties, batch.num_truncated_ties) == (2, 1)
    assert set(zip(batch.chosen_N.tolist(), batch.rejected_N.tolist(), strict=True)) == {(0, 3), (1, 2), (1, 3)}


def test_answers_that_differ_at_once_and_in_length_have_one_score_each() -> None:
    """C1, C2: no common first token, lengths 5 and 50; the loss has no gradient at padding or inner tokens."""
    rows = [preference([], [[7] * 5, [8] * 50], [1.0, 0.0]), preference([3], [[4], [5] * 9], [0.0, 1.0])]
    batch = collate_preferences(rows, pad_id=7, device="cpu", packed=False)
    value_BT = torch.randn(
        batch.sequences.token_ids_BT.shape, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    score_B = value_BT.flatten()[batch.sequences.last_S]
    (-F.logsigmoid(score_B[batch.chosen_N] - score_B[batch.rejected_N])).sum().backward()
    assert value_BT.grad is not None
    assert (value_BT.grad != 0).nonzero().tolist() == [[0, 4], [1, 49], [2, 1], [3, 9]]


def test_micro_batches_without_rows_make_the_same_calls() -> None:
    """B19, D12: one token that attention may look at, without a loss or a pair."""
    batch = collate_sft([], pad_id=1, device="cpu", packed=False)
    assert batch.sequences.token_ids_BT.tolist() == [[1]]
    assert batch.sequences.attention_mask_BT.tolist() == [[True]]
    assert batch.loss_mask_BT.tolist() == [[False]]
    assert batch.source_S.tolist() == [0]
    assert batch.sequences.num_tokens == 0
    for packed in (False, True):
        answers = scoring([], [], pad_id=1, packed=packed)
        assert (answers.sequences.token_ids_BT.tolist(), answers.response_mask_BT.tolist()) == ([[1]], [[False]])
        assert answers.prompt_length_S.tolist() == [1] and answers.response_length_S.tolist() == [0]
    preferences = collate_preferences([], pad_id=1, device="cpu", packed=False)
    assert preferences.sequences.token_ids_BT.tolist() == [[1]]
    assert preferences.sequences.last_S.tolist() == [0]
    assert preferences.response_length_S.tolist() == [0]
    assert preferences.chosen_N.shape == preferences.rejected_N.shape == preferences.margin_N.shape == (0,)
    assert preferences.chosen_N.dtype == torch.int64


def test_padding_side_of_the_tokenizer_does_not_matter(opt_tokenizer: Any) -> None:
    """A23: no tokenizer pads here, so one that pads left gives the same batch."""
    from rlhf.data.schema import Message
    from rlhf.data.template import load_template

    batches = []
    for side in ("left", "right"):
        opt_tokenizer.padding_side = side
        template = load_template("auto", opt_tokenizer)
        rows = []
        for text in ("a", "b b b b"):
            ids, mask = template.encode_conversation([Message("user", "q"), Message("assistant", text)])
            rows.append(SFTRow(np.array(ids, np.int32), np.array(mask), 0, 0))
        batches.append(collate_sft(rows, pad_id=opt_tokenizer.pad_token_id, device="cpu", packed=False))
    assert torch.equal(batches[0].sequences.token_ids_BT, batches[1].sequences.token_ids_BT)
    assert torch.equal(batches[0].loss_mask_BT, batches[1].loss_mask_BT)
    assert batches[0].sequences.attention_mask_BT[0].tolist() == sorted(
        batches[0].sequences.attention_mask_BT[0].tolist(), reverse=True
    )


@pytest.mark.parametrize("packed", [True, False])
def test_targets_are_those_of_the_stage_that_predicts(packed: bool) -> None:  # noqa: FBT001
    """Stages of a pipeline read the same rows; each target is in one stage's mask."""
    rows = [SFTRow(np.arange(n, dtype=np.int32), np.arange(n) >= 2, source=0, index=0) for n in (5, 1, 3)]
    whole = collate_sft(rows, pad_id=0, device="cpu", packed=packed)
    groups = [Group(rank, 3, None, by_layers=True) for rank in range(3)]
    parts = [collate_sft(rows, pad_id=0, device="cpu", packed=packed, group=group) for group in groups]
    assert [part.num_targets for part in parts] == [0, 0, whole.num_targets] and whole.num_targets == 4
    assert [part.loss_mask_BT.sum().item() for part in parts] == [0, 0, 4]
    for part in parts:
        assert part.sequences.token_ids_BT.equal(whole.sequences.token_ids_BT)
        assert part.sequences.num_tokens == 9 and part.sequences.num_sharers == 1
