"""The vLLM engine over a stand-in for vLLM that reorders its batch; the real one is in tests/integration."""

import random
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from rlhf import distributed
from rlhf.config import SamplingConfig, VLLMConfig
from rlhf.models.build import train_bpe
from rlhf.ops import transform_logits
from rlhf.rollout.decode import Response
from rlhf.rollout.sampling import sample_tokens, uniform
from rlhf.rollout.vllm import VLLMEngine

VOCAB = 300
EOS = 1
STOPS = (EOS, *range(20, 50))
# Ragged, one of length 1, eos (= pad) inside a prompt.
PROMPTS = [[5, 9, EOS, 7], [3], [8] * 11, [EOS, 60], [12, 13, 14], [99, 98]]
EMBEDDING = "model.decoder.embed_tokens.weight"
SWAP, ONE_WAY = SimpleNamespace(name="SWAP"), SimpleNamespace(name="UNIDIRECTIONAL")


class FakeLLM:
    """Two lines of batch, which swap in every step; next-token logits are a row of a table, the embedding pushed last.

    Each prompt takes two steps: like a prompt in two parts, the first one's token is thrown away.
    """

    def __init__(self, folder: str, **arguments: Any) -> None:
        self.arguments = arguments
        self.config = AutoConfig.from_pretrained(folder)
        self.processor = arguments["logits_processors"][0](None, torch.device("cpu"), False)
        self.finalizer = SimpleNamespace(detached=0)
        self.finalizer.detach = lambda: setattr(self.finalizer, "detached", self.finalizer.detached + 1)
        self.llm_engine = self
        self.engine_core = SimpleNamespace(_finalizer=self.finalizer)
        self.table_VV = torch.zeros(VOCAB, VOCAB)
        self.events: list[Any] = []
        self.waiting: list[SimpleNamespace] = []
        self.running: dict[int, SimpleNamespace] = {}
        self.removed: list[int] = []
        torch.set_num_threads = lambda num: None  # type: ignore[assignment, misc]
        torch.manual_seed(0), random.seed(0), np.random.seed(0)

    def collective_rpc(self, method: str, *, kwargs: dict[str, Any]) -> None:
        assert method == "reload_weights"
        tensors = dict(kwargs["weights_iterator"])
        self.events.append("load")
        self.table_VV = tensors[EMBEDDING].float() @ torch.eye(VOCAB)[: tensors[EMBEDDING].shape[1]]

    def apply_model(self, function: Callable[[Any], None]) -> None:
        function(torch.nn.Linear(1, 1))

    def reset_prefix_cache(self) -> None:
        self.events.append("reset")

    def sleep(self, level: int) -> None:
        self.events.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.events.append(f"wake {tags[0]}")

    def add_request(self, request_id: str, prompt: dict[str, list[int]], params: Any) -> None:
        assert params.temperature == 0
        self.waiting.append(
            SimpleNamespace(id=request_id, prompt=prompt["prompt_token_ids"], params=params, output=[], prefilled=False)
        )

    def abort_request(self, ids: list[str]) -> None:
        self.waiting = [request for request in self.waiting if request.id not in ids]
        self._remove([slot for slot, request in self.running.items() if request.id in ids])

    def _remove(self, slots: list[int]) -> None:
        for slot in slots:
            del self.running[slot]
        self.removed += slots

    def step(self) -> list[Any]:
        added, moved = [], []
        for slot in range(2):
            if slot not in self.running and self.waiting:
                request = self.running[slot] = self.waiting.pop(0)
                added.append((slot, request.params, request.prompt, request.output))
        if set(self.running) == {1}:
            self.running[0] = self.running.pop(1)
            moved = [(1, 0, ONE_WAY)]
        elif len(self.running) == 2:
            self.running[0], self.running[1] = self.running[1], self.running[0]
            moved = [(0, 1, SWAP)]
        self.processor.update_state(SimpleNamespace(removed=self.removed, added=added, moved=moved))
        self.removed = []
        tokens = [(self.running[slot].output or self.running[slot].prompt)[-1] for slot in sorted(self.running)]
        chosen_SV = self.processor.apply(self.table_VV[tokens])
        outputs, finished_slots = [], []
        for slot, token in zip(sorted(self.running), chosen_SV.argmax(-1).tolist(), strict=True):
            request = self.running[slot]
            if not request.prefilled:
                request.prefilled = True
                continue
            request.output.append(token)
            finished = token in request.params.stop_token_ids or len(request.output) == request.params.max_tokens
            finished_slots += [slot] if finished else []
            # Two tokens at a time where each is asked for.
            if finished or (request.params.output_kind == "cumulative" and len(request.output) % 2 == 0):
                completion = SimpleNamespace(token_ids=tuple(request.output))
                outputs.append(SimpleNamespace(request_id=request.id, outputs=[completion], finished=finished))
        self._remove(finished_slots)
        return outputs


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A stand-in for the package."""
    package: Any = ModuleType("vllm")
    processors: Any = ModuleType("vllm.v1.sample.logits_processor")
    processors.LogitsProcessor = type("LogitsProcessor", (), {})
    package.__version__ = "0"
    package.LLM = FakeLLM
    package.SamplingParams = SimpleNamespace
    package.sampling_params = SimpleNamespace(
        RequestOutputKind=SimpleNamespace(CUMULATIVE="cumulative", FINAL_ONLY="final")
    )
    package.v1 = SimpleNamespace(sample=SimpleNamespace(logits_processor=processors))
    package.ModelRegistry = SimpleNamespace(
        models={
            "OPTForCausalLM": SimpleNamespace(class_name="OPTForCausalLM"),
            "GPTNeoXForCausalLM": SimpleNamespace(class_name="TransformersForCausalLM"),
        }
    )
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.v1.sample.logits_processor", processors)
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.setenv(name, "0")
    for name in ("VLLM_NO_USAGE_STATS", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    package.inits = 0
    monkeypatch.setattr(distributed, "init", lambda: setattr(package, "inits", package.inits + 1))
    yield package


def config(**changes: Any) -> PreTrainedConfig:
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": VOCAB,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "ffn_dim": 8,
        "max_position_embeddings": 64,
        "word_embed_proj_dim": VOCAB,
        "pad_token_id": EOS,
        "eos_token_id": EOS,
    }
    return AutoConfig.for_model("opt", **{**fields, **changes})


def build(**changes: Any) -> VLLMEngine:
    arguments: dict[str, Any] = {
        "options": VLLMConfig(kv_cache_bytes=1),
        "max_num_seqs": 2,
        "dtype": torch.float32,
        "max_model_len": 64,
    }
    return VLLMEngine(config(), **{**arguments, **changes})


def weights(engine: VLLMEngine, table_VV: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: table_VV if name == EMBEDDING else torch.zeros(s) for name, s in engine._checkpoint.shapes.items()}


def table(seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))


def expected(table_VV: torch.Tensor, row: int, *, arguments: dict[str, Any]) -> Response:
    """One row alone, token by token, from the definitions; without stop strings."""
    sampling, stops = arguments["sampling"], arguments["stop_token_ids"]
    token, token_ids, logprobs = PROMPTS[row][-1], [], []
    for position in range(arguments["max_new_tokens"]):
        coordinates = [arguments["uids"][row]], [arguments["sample_ids"][row]]
        u_B1 = uniform(arguments["seed"], arguments["step"], *coordinates, positions=[position])
        logits_1V = transform_logits(
            table_VV[token][None], sampling, response_position_S=torch.tensor([position]), stop_token_ids=stops
        )
        token_1, logprob_1 = sample_tokens(logits_1V, u_B1[:, 0])
        token = int(token_1)
        token_ids.append(token)
        logprobs.append(float(logprob_1))
        if token in stops:
            return Response(token_ids, logprobs, True)
    return Response(token_ids, logprobs, False)


def arguments_of(**changes: Any) -> dict[str, Any]:
    return {
        "uids": [100 + i // 2 for i in range(len(PROMPTS))],
        "sample_ids": [i % 2 for i in range(len(PROMPTS))],
        "sampling": SamplingConfig(),
        "stop_token_ids": STOPS,
        "max_new_tokens": 12,
        "seed": 3,
        "step": 4,
        **changes,
    }


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(),
        SamplingConfig(temperature=0),
        SamplingConfig(temperature=1.3, top_k=40, top_p=0.8, min_new_tokens=3, stop_token_ids=[20]),
    ],
    ids=["plain", "greedy", "all_transforms"],
)
def test_rows_get_their_own_tokens(vllm: ModuleType, sampling: SamplingConfig) -> None:
    engine = build()
    engine.push_weights(weights(engine, table()).items())
    arguments = arguments_of(sampling=sampling)
    responses = engine.generate(PROMPTS, **arguments)
    for row, response in enumerate(responses):
        wanted = expected(table(), row, arguments=arguments)
        assert (response.token_ids, response.stopped) == (wanted.token_ids, wanted.stopped)
        torch.testing.assert_close(torch.tensor(response.logprobs), torch.tensor(wanted.logprobs), atol=1e-5, rtol=0)
    assert len({len(response.token_ids) for response in responses}) > 1, "rows end at different times"
    alone = engine.generate(PROMPTS[2:3], **{**arguments, "uids": [101], "sample_ids": [0]})
    assert alone[0].token_ids == responses[2].token_ids, "batch mates do not matter"


def test_new_weights_give_new_tokens(vllm: ModuleType) -> None:
    engine = build()
    engine.push_weights(weights(engine, table()).items())
    before = engine.generate(PROMPTS, **arguments_of())
    engine.push_weights(weights(engine, table(1)).items())
    assert engine.generate(PROMPTS, **arguments_of()) != before
    assert engine._llm.events == ["load", "reset"] * 2, "keys and values of old weights are forgotten"


def test_stop_strings_end_a_row_early(vllm: ModuleType) -> None:
    tokenizer = train_bpe(["aaaa bbbb abab"] * 9, vocab_size=VOCAB)
    a, b = (tokenizer.convert_tokens_to_ids(letter) for letter in "ab")
    # From any token to a, from a to b, from b to a: "abab...".
    table_VV = torch.full((VOCAB, VOCAB), -50.0)
    table_VV[:, a] = 0.0
    table_VV[a] = -50.0
    table_VV[a, b] = 0.0
    engine = build(tokenizer=tokenizer)
    engine.push_weights(weights(engine, table_VV).items())
    sampling = SamplingConfig(temperature=0, stop_strings=["ba"])
    responses = engine.generate(PROMPTS, **arguments_of(sampling=sampling, stop_token_ids=(EOS,)))
    assert [response.token_ids for response in responses] == [[a, b, a]] * len(PROMPTS)
    assert all(response.stopped and len(response.logprobs) == 3 for response in responses)
    assert not engine._llm.running and not engine._llm.waiting
    again = engine.generate(PROMPTS[:1], **arguments_of(uids=[1], sample_ids=[0], stop_token_ids=(b,)))
    assert again[0].token_ids == [a, b], "requests that were ended leave nothing behind"


def test_an_error_leaves_no_request_behind(vllm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build()
    monkeypatch.setattr(engine._llm, "step", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, **arguments_of())
    assert not engine._llm.waiting


def test_logits_that_are_not_finite(vllm: ModuleType) -> None:
    engine = build()
    engine.push_weights(weights(engine, torch.full((VOCAB, VOCAB), torch.nan)).items())
    with pytest.raises(FloatingPointError, match="not finite"):
        engine.generate(PROMPTS, **arguments_of())


def test_no_prompts(vllm: ModuleType) -> None:
    assert build().generate([], **arguments_of(uids=[], sample_ids=[])) == []


def test_weights_that_do_not_fit(vllm: ModuleType) -> None:
    engine = build()
    complete = weights(engine, table())
    engine.push_weights([*complete.items(), ("lm_head.weight", table())])  # the second name of a tied weight
    with pytest.raises(ValueError, match=r"got no model\.decoder\.embed_tokens\.weight \(1 of"):
        engine.push_weights((name, tensor) for name, tensor in complete.items() if name != EMBEDDING)
    with pytest.raises(ValueError, match=r"embed_tokens.weight has shape \(0,\).*ZeRO-3"):
        engine.push_weights({**complete, EMBEDDING: torch.empty(0)}.items())
    with pytest.raises(ValueError, match=r"unknown weight base_model\.x"):
        engine.push_weights({**complete, "base_model.x": torch.empty(0)}.items())


def test_the_trainer_is_not_disturbed(vllm: ModuleType) -> None:
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    wanted = torch.rand(2).tolist(), random.random(), np.random.rand()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    engine = build()
    assert (torch.rand(2).tolist(), random.random(), np.random.rand()) == wanted
    assert torch.set_num_threads is set_num_threads and torch.get_num_threads() == num_threads
    assert engine._llm.finalizer.detached == 1, "else vLLM destroys the process group"
    assert vllm.inits == 1, "else vLLM makes the process group"


def test_what_vllm_is_told(vllm: ModuleType) -> None:
    options = VLLMConfig(kv_cache_bytes=99, gpu_memory_share=0.25, prefill_tokens=50, compiled=True)
    engine = build(options=options, max_num_seqs=7, dtype=torch.bfloat16)
    told = engine._llm.arguments
    assert engine._llm.config.architectures == ["OPTForCausalLM"]
    assert told["dtype"] == "bfloat16"
    assert (told["max_num_seqs"], told["max_num_batched_tokens"], told["kv_cache_memory_bytes"]) == (7, 50, 99)
    assert told["gpu_memory_utilization"] == 0.25
    assert not told["enforce_eager"]
    assert (told["load_format"], told["model_impl"], told["async_scheduling"]) == ("dummy", "vllm", False)


def test_sleep_and_wake(vllm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build()
    engine.rest()
    assert engine._llm.events == [], "only where the options say so"
    engine._sleeps = True  # which a CPU refuses
    engine.rest()
    with pytest.raises(RuntimeError, match="push_weights before generate"):
        engine.generate(PROMPTS, **arguments_of())
    engine.push_weights(weights(engine, table()).items())
    assert engine._llm.events == ["sleep 2", "wake weights", "load", "wake kv_cache", "reset"]
    engine.generate(PROMPTS, **arguments_of())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 65}, "max_position_embeddings=64"),
        ({"options": VLLMConfig(sleep=True)}, "cannot sleep on a CPU"),
    ],
)
def test_engine_that_cannot_be(vllm: ModuleType, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**changes)


@pytest.mark.parametrize("family", ["gpt_neox", "bloom"])
def test_model_that_vllm_does_not_implement(vllm: ModuleType, family: str) -> None:
    with pytest.raises(ValueError, match=r"no implementation of its own of (GPTNeoX|Bloom)ForCausalLM"):
        VLLMEngine(
            AutoConfig.for_model(family), options=VLLMConfig(), max_num_seqs=1, dtype=torch.float32, max_model_len=9
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"uids": [1]}, "one entry per row"),
        ({"max_new_tokens": 0}, "max_new_tokens must be >= 1"),
        ({"max_new_tokens": 54}, r"prompt 2 has 11 tokens.*max_model_len=64"),
        ({"sampling": SamplingConfig(stop_token_ids=[200])}, r"lack \[200\]"),
        ({"sampling": SamplingConfig(stop_strings=["x"])}, "need the tokenizer"),
    ],
)
def test_rows_that_cannot_be(vllm: ModuleType, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build().generate(PROMPTS, **arguments_of(**changes))


def test_empty_prompt(vllm: ModuleType) -> None:
    with pytest.raises(ValueError, match="prompt 1 has no token"):
        build().generate([[3], []], **arguments_of(uids=[0, 1], sample_ids=[0, 0]))


@pytest.mark.parametrize("changes", [{"prefill_tokens": 0}, {"gpu_memory_share": 1.0}, {"kv_cache_bytes": 0}])
def test_options_that_cannot_be(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"vllm.{next(iter(changes))}"):
        VLLMConfig(**changes)


def test_not_installed(vllm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install.*docs/vllm.md"):
        build()


def test_environment_that_contradicts(vllm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(ValueError, match="VLLM_ENABLE_V1_MULTIPROCESSING=1 is set"):
        build()
