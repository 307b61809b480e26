import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM, OPTForSequenceClassification

from rlhf.config import SamplingConfig
from rlhf.data.collate import collate_responses
from rlhf.models.policy import Policy
from rlhf.models.scalar_head import ScalarModel
from rlhf.rollout.decode import RolloutStats
from step3_ppo.rollout import describe_decoding, estimate_values, score_tokens

PROMPTS = [[4, 9, 3], [7], [5, 5, 8, 6, 9]]
RESPONSES = [[8, 1], [1], [6, 4, 9, 7]]  # 1 is eos and pad


@pytest.fixture
def config() -> OPTConfig:
    return OPTConfig(
        vocab_size=11, hidden_size=16, word_embed_proj_dim=16, num_hidden_layers=2, ffn_dim=16, num_attention_heads=2,
        max_position_embeddings=32, dropout=0.0, init_std=0.5, pad_token_id=None, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip


class Voice:
    """What scoring reads of a voice."""

    sampling = SamplingConfig(temperature=0.5)
    stop_token_ids = (1,)


@torch.no_grad()
def test_scores_of_ragged_responses_equal_single_rows(config: OPTConfig) -> None:
    """A8, A17, A19, D9: log-prob and entropy of responses at the sampling temperature, by plain Hugging Face rows."""
    torch.manual_seed(0)
    model = OPTForCausalLM(config).eval()
    batch = collate_responses(PROMPTS, RESPONSES, pad_id=1, device="cpu", packed=False)
    found = score_tokens(Policy(model), batch, Voice(), num_columns=4)  # type: ignore[arg-type]
    for i, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        logits_TV = model(input_ids=torch.tensor([prompt + response])).logits[0] / 0.5
        logprob_TV = logits_TV[len(prompt) - 1 : -1].log_softmax(-1)
        expected = logprob_TV.gather(-1, torch.tensor(response)[:, None]).squeeze(-1)
        torch.testing.assert_close(found.logprob_SR[i, : len(response)], expected, atol=1e-5, rtol=0)
        entropy = -(logprob_TV.exp() * logprob_TV).sum(-1)
        torch.testing.assert_close(found.entropy_SR[i, : len(response)], entropy, atol=1e-5, rtol=0)
        assert found.logprob_SR[i, len(response) :].abs().sum() == 0
        assert found.entropy_SR[i, len(response) :].abs().sum() == 0
    assert (found.entropy_SR >= 0).all()


@torch.no_grad()
def test_a_value_is_the_estimate_before_its_token(config: OPTConfig) -> None:
    """The value of the first response token is the head's output on the prompt alone."""
    torch.manual_seed(0)
    config.num_labels = 1
    model = OPTForSequenceClassification(config).eval()
    batch = collate_responses(PROMPTS, RESPONSES, pad_id=1, device="cpu", packed=False)
    value_SR = estimate_values(ScalarModel(model), batch, num_columns=4)  # type: ignore[arg-type]
    for i, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        for t in range(len(response)):
            expected = model(input_ids=torch.tensor([prompt + response[:t]])).logits[0, 0]
            torch.testing.assert_close(value_SR[i, t], expected, atol=1e-5, rtol=0)


def test_decoding_of_two_ranks_by_hand() -> None:
    """30 and 10 tokens in 2 s and 1 s: 40 / 2; of 4 + 1 forwards; the second rank idles 1 of 4 rank-seconds."""
    one = RolloutStats(
        tokens=30, forwards=4, occupancy=0.75, tail_frac=0.25, prefill_tokens=9, prefill_seconds=0.5, decode_seconds=1.5
    )
    two = RolloutStats(
        tokens=10,
        forwards=1,
        occupancy=0.25,
        tail_frac=1.0,
        prefill_tokens=3,
        prefill_seconds=0.25,
        decode_seconds=0.75,
    )
    assert describe_decoding([one, two]) == pytest.approx(
        {
            "speed/decode_tokens_per_second": 20.0,
            "speed/decode_occupancy": (3.0 + 0.25) / 5,
            "speed/decode_tail_frac": (1.0 + 1.0) / 5,
            "speed/decode_prefill_frac": 0.25,
            "speed/decode_idle_frac": 0.25,
        }
    )
    assert describe_decoding([]) == {}
