"""Models built, loaded and trained under ZeRO-3 on two ranks; all thresholds are 0, so weights really are released."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf import distributed, ds_config, engine
from rlhf.config import LoRAConfig, ModelConfig
from rlhf.models.build import build_causal_lm, build_reward_model, train_bpe
from rlhf.models.lora import merged_state_dict
from rlhf.models.policy import Policy
from rlhf.models.scalar_head import ScalarModel
from rlhf.ops import position_ids_from_mask
from tests.distributed.harness import Ranks
from tests.distributed.tiny import DEFAULT_THRESHOLDS, engine_of

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}
OPT = {"model_type": "opt", "hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 64, "num_attention_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "opt": {**OPT, "word_embed_proj_dim": 32},
    "opt_350m_kind": {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 16},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4},
    "gpt_neox": {
        "model_type": "gpt_neox",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    },
    "bloom": {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "llama": LLAMA,
    "qwen2": {**LLAMA, "model_type": "qwen2", "tie_word_embeddings": True},
}
# Rank 0 has three chunks of 6 targets, rank 1 no target at all, as with an empty micro-batch.
LENGTHS = ((7, 1, 9), (1, 1))
CHUNK = 6
COUNT = 14


def tokenizer(text: str = "please answer politely") -> Any:
    return train_bpe([text] * 3, vocab_size=300)


def wrapped(kind: str, cfg: ModelConfig, tokens: Any, *, sharded: bool) -> Policy | ScalarModel:
    build = build_causal_lm if kind == "policy" else build_reward_model
    with engine.zero3_init(ds_config.load("cpu_zero3") if sharded else ds_config.load("cpu_zero0")):
        model = build(cfg, tokens, seed=1)
    is_base = [hasattr(p, "ds_id") for name, p in model.named_parameters() if "lora_" not in name]
    assert any(is_base) if sharded else not any(is_base)
    return Policy(model, chunk_tokens=CHUNK) if kind == "policy" else ScalarModel(model)


def loss_sum(model: Any, kind: str, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.tensor(LENGTHS[rank])
    token_ids_BT = torch.randint(4, 250, (len(lengths), int(lengths.max())), generator=generator)
    mask_BT = torch.arange(token_ids_BT.shape[1]) < lengths[:, None]
    batch = {
        "token_ids_BT": token_ids_BT,
        "attention_mask_BT": mask_BT,
        "position_ids_BT": position_ids_from_mask(mask_BT),
    }
    target_mask_BT = mask_BT & (torch.arange(mask_BT.shape[1]) > 0)
    if kind == "policy":
        out = model(**batch, target_mask_BT=target_mask_BT)
        return 0.1 * out.entropy_BT.sum() - out.logprob_BT.sum()
    return torch.where(target_mask_BT, model(**batch) - 1, 0).square().sum()


def plain_steps(model: nn.Module, kind: str, num_steps: int) -> list[float]:
    """Mean losses by torch alone, both ranks' rows on this process."""
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0
    )
    losses = []
    for _ in range(num_steps):
        loss = torch.stack([loss_sum(model, kind, rank) for rank in range(2)]).sum() / COUNT
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def training_job(cases: list[tuple[str, str, int]]) -> dict[Any, tuple[float, float, float]]:
    """For each case the largest difference to plain torch: of the weights before, the losses, and the weights after."""
    engine.setup(timeout_seconds=60)
    tokens = tokenizer()
    found = {}
    for family, kind, rank in cases:
        cfg = ModelConfig(config=FAMILIES[family], dropout=0.0, lora=LoRAConfig(rank=rank))
        plain = wrapped(kind, cfg, tokens, sharded=False)
        trained = engine_of(wrapped(kind, cfg, tokens, sharded=True), "cpu_zero3")
        before = difference(trained.full_state_dict(), plain)
        losses = []
        for _ in range(3):
            loss = loss_sum(trained, kind, distributed.rank())
            trained.accumulate(loss, count=COUNT, last=True)
            trained.step()
            losses.append(distributed.all_sum(loss.detach()).item() / COUNT)
        expected = plain_steps(plain, kind, 3)
        state = trained.full_state_dict()
        after = difference(state, plain)
        if state is not None and rank:
            inner = {key.removeprefix("model."): value for key, value in state.items()}
            merged = merged_state_dict(inner, plain.model)
            own = merged_state_dict(plain.model.state_dict(), plain.model)
            assert merged.keys() == own.keys()
            after = max(after, max((merged[key] - own[key]).abs().max().item() for key in own))
        worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        assert losses[-1] < losses[0]
        found[family, kind, rank] = (before, worst, after)
    return found


def difference(state: dict[str, Tensor] | None, model: nn.Module) -> float:
    if state is None:
        return 0.0
    own = model.state_dict()
    assert state.keys() == own.keys()
    return max((state[key] - own[key]).abs().max().item() for key in own)


@pytest.mark.parametrize("families", [["opt", "opt_350m_kind", "gpt_neox"], ["bloom", "llama", "qwen2"]])
def test_random_models_and_their_training_equal_plain_torch(ranks: Ranks, families: list[str]) -> None:
    """Ragged numbers of chunks, none on one rank: the calls of the head are equal all the same, or this would hang.

    Random weights of the same seed are bit-equal with and without ZeRO-3 (C19 among them: the reward head).
    """
    cases = [(family, kind, 0) for family in families for kind in ("policy", "reward")]
    cases += [("opt", "policy", 2), ("opt", "reward", 2)] if "opt" in families else []
    for case, (before, losses, after) in ranks(training_job, timeout=120, cases=cases)[0].items():
        assert before == 0, (case, before)
        assert losses < 1e-5, (case, losses)
        assert after < 1e-3, (case, after)  # where a gradient is near 0, Adam turns its rounding into a step of 1e-3


def recomputing_job(cases: list[tuple[str, str, int]], zero: dict[str, Any]) -> dict[Any, list[bool]]:
    """For each case, whether weights after three steps equal those of kept activations, by what is recomputed."""
    engine.setup(timeout_seconds=60)
    tokens, found = tokenizer(), {}
    for family, kind, rank in cases:
        states = []
        for options in ({}, {"recompute": "selective"}, {"recompute": "full", "recompute_budget": 0.5}):
            cfg = ModelConfig(config=FAMILIES[family], dropout=0.0, lora=LoRAConfig(rank=rank), **options)
            trained = engine_of(
                wrapped(kind, cfg, tokens, sharded=True), "cpu_zero3", changes={"zero_optimization": zero}
            )
            for _ in range(3):
                trained.eval()
                with torch.no_grad():
                    loss_sum(trained, kind, distributed.rank())
                trained.train()
                trained.accumulate(loss_sum(trained, kind, distributed.rank()), count=COUNT, last=True)
                trained.step()
            states.append(trained.full_state_dict() or {})
        found[family, kind, rank] = [
            all(torch.equal(other[key], value) for key, value in states[0].items()) for other in states[1:]
        ]
    return found


@pytest.mark.parametrize("zero", [{}, DEFAULT_THRESHOLDS])
def test_recomputed_activations_change_nothing(ranks: Ranks, zero: dict[str, Any]) -> None:
    """Weights are released after the forward pass and gathered again for the second one. Biases become other than 0.

    By DeepSpeed's own thresholds gathers are not the same in both.
    """
    cases = [(family, "policy", 0) for family in FAMILIES if family != "gpt2"]
    cases += [("llama", "reward", 0), ("opt", "policy", 2)]
    found = ranks(recomputing_job, timeout=120, cases=cases, zero=zero)[0]
    assert found == dict.fromkeys(cases, [True, True])


def gpt2_job() -> dict[str, float]:
    engine.setup(timeout_seconds=60)
    trained = engine_of(wrapped("policy", ModelConfig(config=FAMILIES["gpt2"]), tokenizer(), sharded=True), "cpu_zero3")
    state = trained.full_state_dict()
    return {key: value.std().item() for key, value in (state or {}).items() if value.ndim == 2}


def test_gpt2_starts_with_sane_weights(ranks: Ranks) -> None:
    """transformers draws GPT-2's residual layers anew from their parent, which ZeRO-3 hides from it: std 0.02 there."""
    spreads = ranks(gpt2_job)[0]
    assert len(spreads) > 8
    for key, std in spreads.items():
        assert 0.015 < std < 0.025, (key, std)


def loading_job(folders: dict[str, str]) -> dict[Any, float]:
    """Largest difference of loaded weights to those loaded without ZeRO-3; vocabulary kept, and grown."""
    engine.setup(timeout_seconds=60)
    found = {}
    for family, folder in folders.items():
        for kind in ("policy", "reward"):
            for grown in (False, True):
                tokens = tokenizer("the quick brown fox jumps over the lazy dog") if grown else tokenizer()
                cfg = ModelConfig(path=folder)
                plain = wrapped(kind, cfg, tokens, sharded=False)
                trained = engine_of(wrapped(kind, cfg, tokens, sharded=True), "cpu_zero3")
                assert trained.module.config.vocab_size == len(tokens)
                found[family, kind, grown] = difference(trained.full_state_dict(), plain)
                loss_sum(trained, kind, distributed.rank()).backward()
    return found


def test_a24_loading_and_growing_the_vocabulary_equal_those_without_zero3(ranks: Ranks, tmp_path: Path) -> None:
    folders = {}
    for family in ("opt_350m_kind", "llama"):
        folders[family] = str(tmp_path / family)
        build_causal_lm(ModelConfig(config=FAMILIES[family]), tokenizer(), seed=3).save_pretrained(folders[family])
    assert len(tokenizer()) < len(tokenizer("the quick brown fox jumps over the lazy dog"))
    found = ranks(loading_job, timeout=120, folders=folders)[0]
    assert len(found) == 8 and not any(found.values()), found


def refusal_job() -> str:
    engine.setup(timeout_seconds=60)
    cfg = ModelConfig(config={**FAMILIES["opt"], "layerdrop": 0.1})
    with pytest.raises(ValueError, match="layerdrop") as refused, engine.zero3_init(ds_config.load("cpu_zero3")):
        build_causal_lm(cfg, tokenizer(), seed=1)
    return str(refused.value)


def test_layers_skipped_at_random_are_refused_under_zero3(ranks: Ranks) -> None:
    assert all("Set model.dropout" in message for message in ranks(refusal_job))
