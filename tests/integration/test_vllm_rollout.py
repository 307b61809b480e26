"""The real vLLM as the rollout engine: the tokens and log-probs of our decoder, after every push of weights."""

import copy
import gc
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlhf import distributed, engine
from rlhf.config import LoRAConfig, SamplingConfig, VLLMConfig
from rlhf.models.build import train_bpe
from rlhf.models.lora import add_lora, merged_state_dict
from rlhf.models.policy import Policy
from rlhf.ops import transform_logits
from rlhf.rollout.decode import Response, generate
from rlhf.rollout.selfcheck import compare_greedy
from rlhf.rollout.vllm import VLLMEngine
from rlhf.rollout.weights import Lending, lend_weights
from step1_sft.train import train as train_sft
from step2_reward.train import train as train_reward
from step3_ppo.train import train as train_ppo
from tests.distributed.harness import Ranks
from tests.distributed.tiny import engine_of
from tests.stages import ppo_config, result, reward_config, series, sft_config, write_rows, yes_rows

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed; docs/vllm.md says how"
)

EOS = 1
VOCAB = 300
STOPS = (EOS, *range(20, 60))
# Ragged, one of length 1, eos (= pad) inside a prompt, one longer than a forward's prefill_tokens.
PROMPTS = [[5, 9, EOS, 7], [3], [8] * 11, [EOS, 140], list(range(100, 140)), [5, 9, EOS, 7]]
SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "opt": {**SHAPE, "ffn_dim": 128, "word_embed_proj_dim": 64, "dropout": 0.3},
    # Grouped-query attention, an output layer of its own.
    "llama": {**SHAPE, "intermediate_size": 128, "num_key_value_heads": 1},
    # The output layer is the embedding, in two modules.
    "qwen2": {**SHAPE, "intermediate_size": 128, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64},
}
SAMPLINGS = {
    "plain": SamplingConfig(),
    "greedy": SamplingConfig(temperature=0),
    "all_transforms": SamplingConfig(temperature=1.3, top_k=40, top_p=0.8, min_new_tokens=3),
}


def build_model(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        family, vocab_size=VOCAB, pad_token_id=EOS, eos_token_id=EOS, bos_token_id=0, **FAMILIES[family]
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    return model.to(dtype)


def build_engine(model: PreTrainedModel, *, dtype: torch.dtype = torch.float32, **changes: Any) -> VLLMEngine:
    options = VLLMConfig(kv_cache_bytes=1 << 25, prefill_tokens=16)
    return VLLMEngine(model.config, options=options, max_num_seqs=4, dtype=dtype, max_model_len=64, **changes)


Build = Callable[..., tuple[VLLMEngine, PreTrainedModel]]


@pytest.fixture(scope="module")
def loaded(one_rank: None) -> Iterator[Build]:
    """An engine of each family with the weights of a model; seconds each, so they are shared."""
    engines: dict[tuple[str, torch.dtype], VLLMEngine] = {}

    def load(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[VLLMEngine, PreTrainedModel]:
        model = build_model(family, dtype=dtype, seed=seed)
        if (family, dtype) not in engines:
            engines[family, dtype] = build_engine(model, dtype=dtype)
        engines[family, dtype].push_weights(model.state_dict().items())
        return engines[family, dtype], model

    yield load


def arguments_of(rows: list[int] | None = None, **changes: Any) -> dict[str, Any]:
    rows = list(range(len(PROMPTS))) if rows is None else rows
    return {
        "uids": [100 + row if row < 5 else 100 for row in rows],  # the last prompt is the first one again
        "sample_ids": [0 if row < 5 else 1 for row in rows],
        "sampling": SamplingConfig(),
        "stop_token_ids": STOPS,
        "max_new_tokens": 20,
        "seed": 3,
        "step": 4,
        **changes,
    }


def ours(model: torch.nn.Module, **changes: Any) -> list[Response]:
    return generate(model, PROMPTS, **arguments_of(**changes), pad_id=EOS, batch_size=3)


def assert_equal(responses: list[Response], wanted: list[Response]) -> None:
    assert [r.token_ids for r in responses] == [r.token_ids for r in wanted]
    assert [r.stopped for r in responses] == [r.stopped for r in wanted]
    for one, two in zip(responses, wanted, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(two.logprobs), atol=1e-4, rtol=0)


def rescore(model: PreTrainedModel, responses: list[Response], sampling: SamplingConfig) -> list[list[float]]:
    """Log-probs by one forward of the model on each row alone."""
    rows = []
    for prompt, response in zip(PROMPTS, responses, strict=True):
        with torch.no_grad():
            logits_TV = model(torch.tensor([prompt + response.token_ids])).logits[0, len(prompt) - 1 : -1].float()
        token_R = torch.tensor(response.token_ids)
        logits_RV = transform_logits(
            logits_TV,
            sampling,
            response_position_S=torch.arange(len(token_R)),
            stop_token_ids=STOPS,
            keep_token_S=token_R,
        )
        rows.append(logits_RV.log_softmax(-1).gather(1, token_R[:, None])[:, 0].tolist())
    return rows


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_our_decoder(loaded: Build, family: str, sampling: str) -> None:
    vllm, model = loaded(family)
    responses = vllm.generate(PROMPTS, **arguments_of(sampling=SAMPLINGS[sampling]))
    assert_equal(responses, ours(model, sampling=SAMPLINGS[sampling]))
    if sampling != "greedy":
        assert responses[0] != responses[5], "two samples of one prompt differ"


@pytest.mark.parametrize("family", FAMILIES)
def test_follows_the_weights(loaded: Build, family: str) -> None:
    """Every weight counts, and what was computed with the old ones is gone: the same prompts again."""
    vllm, model = loaded(family)
    before = vllm.generate(PROMPTS, **arguments_of())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    vllm.push_weights(model.state_dict().items())
    after = vllm.generate(PROMPTS, **arguments_of())
    assert after != before
    assert_equal(after, ours(model))
    pointers = [p.data_ptr() for p in vllm._llm.apply_model(lambda module: list(module.parameters()))[0]]
    vllm.push_weights(model.state_dict().items())
    assert [p.data_ptr() for p in vllm._llm.apply_model(lambda module: list(module.parameters()))[0]] == pointers, (
        "in place"
    )
    assert vllm.generate(PROMPTS, **arguments_of()) == after


def test_greedy_passes_the_self_check(loaded: Build) -> None:
    vllm, model = loaded("opt")
    responses = vllm.generate(PROMPTS, **arguments_of(sampling=SAMPLINGS["greedy"]))
    check = compare_greedy(
        [r.token_ids for r in responses], model, PROMPTS, stop_token_ids=STOPS, max_new_tokens=20, pad_id=EOS
    )
    assert check.ok, check.message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["opt", "qwen2"])
def test_logprobs_equal_a_rescoring_forward(loaded: Build, family: str, dtype: torch.dtype) -> None:
    vllm, model = loaded(family, dtype=dtype)
    sampling = SamplingConfig(temperature=0.7, min_new_tokens=2)
    responses = vllm.generate(PROMPTS, **arguments_of(sampling=sampling))
    scored = rescore(model.eval(), responses, sampling)
    gaps = [abs(a - b) for r, row in zip(responses, scored, strict=True) for a, b in zip(r.logprobs, row, strict=True)]
    assert max(gaps) < (1e-4 if dtype == torch.float32 else 0.2)
    assert sum(gaps) / len(gaps) < (1e-5 if dtype == torch.float32 else 0.03)


def test_batch_mates_and_calls_do_not_matter(loaded: Build) -> None:
    vllm, _ = loaded("llama")
    together = vllm.generate(PROMPTS, **arguments_of())
    for row in (0, 2, 4):
        (alone,) = vllm.generate([PROMPTS[row]], **arguments_of([row]))
        assert alone.token_ids == together[row].token_ids
    reversed_rows = list(range(len(PROMPTS)))[::-1]
    backwards = vllm.generate([PROMPTS[row] for row in reversed_rows], **arguments_of(reversed_rows))
    assert [r.token_ids for r in backwards[::-1]] == [r.token_ids for r in together]
    assert vllm.generate(PROMPTS, **arguments_of(seed=4)) != together
    assert vllm.generate(PROMPTS, **arguments_of(step=5)) != together


def test_stop_strings(one_rank: None) -> None:
    """The strings of our rule; vLLM has no tokenizer and never sees a text."""
    tokenizer = train_bpe(["hello world, this is a text about words"] * 9, vocab_size=VOCAB)
    model = build_model("opt")
    vllm = build_engine(model, tokenizer=tokenizer)
    vllm.push_weights(model.state_dict().items())
    sampling = SamplingConfig(stop_strings=["a", "e", "o", "1"])
    responses = vllm.generate(PROMPTS, **arguments_of(sampling=sampling))
    assert_equal(responses, ours(model, sampling=sampling, tokenizer=tokenizer))
    ended = [r for r in responses if r.stopped and r.token_ids[-1] not in STOPS]
    assert ended, "no row ended at a stop string: the test shows nothing"


def test_an_engine_that_is_dropped_leaves_the_process_group(one_rank: None) -> None:
    model = build_model("opt")
    vllm = build_engine(model)
    set_num_threads = torch.set_num_threads
    assert not vllm._llm.llm_engine.engine_core._finalizer.alive, (
        "it would destroy the group, at the exit at the latest"
    )
    del vllm
    gc.collect()
    assert int(distributed.all_sum(torch.ones((), dtype=torch.int64))) == 1
    assert torch.set_num_threads is set_num_threads and set_num_threads.__module__ != "vllm.v1.worker.cpu_worker"
    vllm = build_engine(model)
    vllm.push_weights(model.state_dict().items())
    assert_equal(vllm.generate(PROMPTS, **arguments_of()), ours(model))


def test_adapters_are_merged(loaded: Build) -> None:
    vllm, model = loaded("opt", seed=7)
    adapted = add_lora(copy.deepcopy(model), LoRAConfig(rank=4))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(3))
    vllm.push_weights(merged_state_dict(adapted.state_dict(), adapted).items())
    responses = vllm.generate(PROMPTS, **arguments_of())
    assert_equal(responses, ours(adapted))
    assert responses != ours(model)


def train_step(trained: engine.TrainEngine) -> None:
    """One update that makes a prompt likelier; the same on every rank."""
    token_ids_BT = torch.tensor([PROMPTS[4]])
    mask_BT = torch.ones_like(token_ids_BT, dtype=torch.bool)
    target_BT = mask_BT.clone()
    target_BT[:, 0] = False
    output = trained(token_ids_BT, mask_BT, torch.arange(token_ids_BT.shape[1])[None], target_BT)
    trained.accumulate(-output.logprob_BT.sum(), count=int(target_BT.sum()) * distributed.world_size(), last=True)
    trained.step()


def two_rank_job(name: str) -> list[tuple[list[Response], list[Response]]]:
    """vLLM's and our responses on this rank, which has other work than the other one, before and after an update."""
    engine.setup(timeout_seconds=60)
    model = build_model("opt")
    config = model.config
    trained = engine_of(Policy(model), name, lr=3e-2)
    options = VLLMConfig(kv_cache_bytes=1 << 25, prefill_tokens=16)
    vllm = VLLMEngine(config, options=options, max_num_seqs=4, dtype=torch.float32, max_model_len=64)
    rows = [[0, 2, 4], [1], []][distributed.rank()]
    prompts = [PROMPTS[row] for row in rows]
    found = []
    for _ in range(2):
        with lend_weights(trained, Lending()) as lent:
            vllm.push_weights(merged_state_dict(lent.model.state_dict(), lent.model).items())
            wanted = generate(lent.model, prompts, **arguments_of(rows), pad_id=EOS, batch_size=2)
        found.append((vllm.generate(prompts, **arguments_of(rows)), wanted))
        train_step(trained)  # collectives of the training's group, after vLLM's
    return found


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    server = Ranks()
    yield server
    server.close()


@pytest.mark.parametrize("name", ["cpu_zero3", "cpu_zero2"])
def test_ranks_with_an_engine_each(ranks: Ranks, name: str) -> None:
    """Each rank decodes its own rows on whole weights; vLLM leaves the training's process group alone."""
    for before, after in ranks(two_rank_job, timeout=150, name=name):
        for responses, wanted in (before, after):
            assert_equal(responses, wanted)
        assert before[0] != after[0], "the update changed nothing"


def test_step3_by_vllm(tmp_path: Path, one_rank: None) -> None:
    """The stage as a recipe asks for it: vLLM's log-probs stay the actor's own, also after an update."""
    rows = write_rows(tmp_path / "rows.jsonl", yes_rows(40))
    no_eval = {"eval__max_rows": 0, "eval__generate_rows": 0}
    model = {
        "model_type": "opt",
        **FAMILIES["opt"],
        "max_position_embeddings": 96,
    }  # vLLM's kernels know head sizes from 32 on
    train_sft(sft_config(tmp_path / "sft", rows, max_steps=4, model__config=model, **no_eval))
    train_reward(reward_config(tmp_path / "rm", rows, base=tmp_path / "sft/model", **no_eval))
    cfg = ppo_config(
        tmp_path / "ppo",
        rows,
        actor=tmp_path / "sft/model",
        reward=tmp_path / "rm/model",
        max_steps=3,
        rollout__engine="vllm",
        rollout__vllm__kv_cache_bytes=1 << 26,
        rollout__old_logprobs="rescore",
        update__importance_cap=2.0,
        actor_optim__lr=1e-2,
    )
    train_ppo(cfg)
    gaps = series(tmp_path / "ppo", "ppo/logprob_gap")
    assert len(gaps) == 3 and max(gaps) < 1e-5
    assert series(tmp_path / "ppo", "ppo/kl_ref")[-1] != pytest.approx(0.0, abs=1e-3), "the actor has moved"
    assert result(tmp_path / "ppo")["status"] == "done"
