from collections.abc import Callable

import pytest
import torch

from rlhf.data.batching import Batching
from rlhf.sharing import Sharing
from step3_ppo.algorithm import GAEConfig, KLConfig, Method, UpdateConfig, choose_method
from step3_ppo.experience import Experience, ScoredSequence, gather_sequences, right_pad, sequence_mask, to_experience

Make = Callable[..., ScoredSequence]
ALONE = Sharing()
LENGTHS = (3, 1, 5, 2, 4, 1, 7)


def experience_of(sequences: list[ScoredSequence], *, kl_coef: float = 0.1) -> Experience:
    score_B = torch.tensor([s.score for s in sequences])
    ppo = choose_method("ppo", UpdateConfig(minibatch_size=1), KLConfig(), group_size=1, max_response_tokens=8)
    return to_experience(sequences, score_B, kl_coef=kl_coef, method=ppo, gae_config=GAEConfig(gamma=1.0, lam=1.0))


def test_hand_worked_example(sequence: Make) -> None:
    """Two responses, of 2 and 1 tokens; gamma = lambda = 1, no penalty: the return of every token is the score."""
    zero, value = torch.zeros(2), torch.tensor([0.25, 0.5])
    rows = [
        sequence((0, 0), 2, score=1.0, old_logprob_R=zero, ref_logprob_R=zero, old_value_R=value),
        sequence((1, 0), 1, score=-1.0, old_logprob_R=zero[:1], ref_logprob_R=zero[:1], old_value_R=torch.zeros(1)),
    ]
    found = experience_of(rows)
    assert found.mask_BR.tolist() == [[True, True], [True, False]]
    torch.testing.assert_close(found.reward_BR, torch.tensor([[0.0, 1.0], [-1.0, 0.0]]))
    torch.testing.assert_close(found.return_BR, torch.tensor([[1.0, 1.0], [-1.0, 0.0]]))
    # Advantages .75, .5, -1 before whitening: mean 1/12, population deviation .772.
    raw = torch.tensor([0.75, 0.5, -1.0])
    expected = (raw - raw.mean()) / raw.std(correction=0)
    torch.testing.assert_close(found.advantage_BR, torch.tensor([[expected[0], expected[1]], [expected[2], 0.0]]))


def test_whitening_is_over_all_tokens_of_the_step(sequence: Make) -> None:
    """Not over rows, and not over padding; the order of the sequences does not matter."""
    rows = [sequence((i, 0), length, score=float(i)) for i, length in enumerate(LENGTHS)]
    found = experience_of(rows)
    tokens = found.advantage_BR[found.mask_BR]
    assert len(tokens) == sum(LENGTHS)
    assert tokens.mean().item() == pytest.approx(0, abs=1e-6)
    assert tokens.std(correction=0).item() == pytest.approx(1, abs=1e-4)
    assert found.advantage_BR[~found.mask_BR].abs().sum() == 0
    backwards = experience_of(rows[::-1])
    for i in range(len(rows)):
        torch.testing.assert_close(backwards.advantage_BR[-1 - i], found.advantage_BR[i], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_minibatches_hold_the_same_sequences_on_any_number_of_ranks(sequence: Make, world_size: int) -> None:
    """D12: each sequence once an epoch; equally many micro-batches on every rank, empty ones where rows run out."""
    rows = [sequence((i, 0), length) for i, length in enumerate(LENGTHS)]
    found = experience_of(rows)

    def plan(ranks: int, rank: int, seed: int = 4) -> list[list[list[int]]]:
        arguments = {
            "minibatch_size": 3,
            "batching": Batching(max_rows=2),
            "rank": rank,
            "world_size": ranks,
            "seed": seed,
        }
        return list(found.minibatches(**arguments))

    alone = [sorted(i for micro in minibatch for i in micro) for minibatch in plan(1, 0)]
    shares = [plan(world_size, rank) for rank in range(world_size)]
    together = [sorted(i for share in shares for micro in share[m] for i in micro) for m in range(len(alone))]
    assert together == alone
    assert sorted(i for minibatch in alone for i in minibatch) == list(range(len(rows)))
    assert [len(minibatch) for minibatch in alone] == [3, 3, 1]
    for m in range(len(alone)):
        assert len({len(share[m]) for share in shares}) == 1, "ranks make the same number of calls"
    assert all(len(micro) <= 2 for share in shares for minibatch in share for micro in minibatch)
    other = [sorted(i for micro in minibatch for i in micro) for minibatch in plan(1, 0, seed=5)]
    assert other != alone


def test_sharing_prompts_changes_no_minibatch(sequence: Make) -> None:
    """Four samples a prompt: the same sequences in each minibatch, packed with shared prompts or padded."""
    rows = [sequence((prompt, i), 1 + (prompt + i) % 5) for prompt in range(4) for i in range(4)]
    found = experience_of(rows)

    def minibatches(batching: Batching) -> list[list[int]]:
        plan = found.minibatches(minibatch_size=8, batching=batching, rank=0, world_size=1, seed=3)
        return [sorted(i for micro in minibatch for i in micro) for minibatch in plan]

    assert minibatches(Batching(max_rows=1, max_tokens=12)) == minibatches(Batching(max_rows=2))
    (all_of_it,) = found.minibatches(
        minibatch_size=16, batching=Batching(max_rows=1, max_tokens=25), rank=0, world_size=1, seed=3
    )
    prompts = [{rows[i].key[0] for i in micro} for micro in all_of_it]
    assert sum(map(len, prompts)) < 4 + len(prompts), "samples of one prompt lie together"


def test_sequences_are_in_one_order_whatever_rank_made_them(sequence: Make) -> None:
    rows = [sequence((3, 0), 1), sequence((1, 1), 2), sequence((1, 0), 3)]
    assert [s.key for s in gather_sequences(rows, ALONE)] == [(1, 0), (1, 1), (3, 0)]


def test_mask_and_padding(sequence: Make) -> None:
    rows = [sequence((0, 0), 1), sequence((1, 0), 3)]
    assert sequence_mask(rows).tolist() == [[True, False, False], [True, True, True]]
    padded = right_pad([torch.tensor([1.0]), torch.tensor([2.0, 3.0, 4.0])])
    assert padded.tolist() == [[1.0, 0.0, 0.0], [2.0, 3.0, 4.0]]


def grouped(sequence: Make) -> list[ScoredSequence]:
    """Two prompts with two responses each; k1 of the reference is .5 per token of the first response, else 0."""
    rows = []
    for prompt, sample, length, score in ((0, 0, 2, 1.0), (0, 1, 1, 3.0), (4, 0, 3, -1.0), (4, 1, 1, -1.0)):
        ref = torch.full((length,), -0.5 if (prompt, sample) == (0, 0) else 0.0)
        zero = torch.zeros(length)
        rows.append(sequence((prompt, sample), length, score=score, old_logprob_R=zero, ref_logprob_R=ref))
    return rows


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        # With a penalty of .2 x .5 a token, responses 0 and 1 get .8 and 3.
        ("rloo", -2.2, 2.2),
        # The KL is in the loss: 1 and 3, mean 2, deviation 1.
        ("dr_grpo", -1.0, 1.0),
        ("grpo", -1.0 / 1.0001, 1.0 / 1.0001),
        ("gspo", -1.0 / 1.0001, 1.0 / 1.0001),
    ],
)
def test_a_response_is_compared_with_its_group(
    sequence: Make, method: Callable[..., Method], name: str, first: float, second: float
) -> None:
    """One advantage for all tokens of a response; the group of equal scores gets none; no values, no whitening."""
    rows = grouped(sequence)
    scores = torch.tensor([s.score for s in rows])
    found = to_experience(rows, scores, kl_coef=0.2, method=method(name, group_size=2), gae_config=GAEConfig(gamma=0.5))
    expected = torch.tensor([[first, first, 0.0], [second, 0.0, 0.0], [0.0] * 3, [0.0] * 3])
    torch.testing.assert_close(found.advantage_BR, expected)
    assert found.return_BR.abs().max() == 0
    assert found.reward_BR[0].sum().item() == pytest.approx(0.8 if name == "rloo" else 1.0)
    torch.testing.assert_close(found.ref_logprob_BR[0], torch.tensor([-0.5, -0.5, 0.0]))
    share = {"rloo": 7.0, "grpo": 4.0, "gspo": 4.0, "dr_grpo": 32.0}[name]
    assert found.share_BR.sum().item() == pytest.approx(share)
    assert found.weight_BR[0].tolist() == ([0.5, 0.5, 0.0] if name in ("grpo", "gspo") else [1.0, 1.0, 0.0])


def test_rewards_to_go_are_whitened_over_the_step(sequence: Make, method: Callable[..., Method]) -> None:
    """REINFORCE++: (.8, .9), 3, (-1, -1, -1), -1 over 7 tokens; no group, no value, no discount."""
    rows = grouped(sequence)
    found = to_experience(
        rows, torch.tensor([s.score for s in rows]), kl_coef=0.2, method=method("reinforce_pp"), gae_config=GAEConfig()
    )
    raw = torch.tensor([0.8, 0.9, 3.0, -1.0, -1.0, -1.0, -1.0])
    expected = (raw - raw.mean()) / raw.std(correction=0)
    torch.testing.assert_close(found.advantage_BR[found.mask_BR], expected)


def test_a_micro_batch_holds_what_the_loss_needs(sequence: Make, method: Callable[..., Method]) -> None:
    """The same rows of every tensor; a micro-batch without rows weighs nothing."""
    rows = grouped(sequence)
    scores = torch.tensor([s.score for s in rows])
    found = to_experience(rows, scores, kl_coef=0.2, method=method("grpo", group_size=2), gae_config=GAEConfig())
    micro = found.micro_batch([2, 0], pad_id=0, device=torch.device("cpu"), packed=False)
    for name in ("ref_logprob", "weight", "share", "advantage", "old_logprob"):
        assert torch.equal(getattr(micro, f"{name}_SR"), getattr(found, f"{name}_BR")[[2, 0]]), name
    empty = found.micro_batch([], pad_id=0, device=torch.device("cpu"), packed=False)
    assert empty.share_SR.sum() == 0 and empty.weight_SR.sum() == 0 and not empty.mask_SR.any()
