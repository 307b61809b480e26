"""Rollout by vLLM inside the rank's process: weights pushed in place, token ids in and out, our choice of tokens.

vLLM computes logits with its own kernels, paged KV cache and continuous batching. The token is chosen by us, in a
logits processor that leaves one token possible, so that the contract of sampling is the one of `decode.generate`: the
token is a function of the logits and of (seed, step, prompt, sample, position), and its log-probability that of the
distribution it was drawn from. How to install vLLM and what is special about it in one process: docs/vllm.md.
"""

import copy
import gc
import importlib
import math
import os
import random
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase

from rlhf import distributed
from rlhf.config import SamplingConfig, VLLMConfig
from rlhf.models.build import check_length_fits
from rlhf.rollout.decode import Response
from rlhf.rollout.job import check_positive, check_rows
from rlhf.rollout.sampling import TokenChooser, uniform
from rlhf.rollout.stopping import StopRule
from rlhf.rollout.vllm_tokens import ROW, Draws, processor_class


class VLLMEngine:
    """A vLLM engine of one rank. Its weights are arbitrary until the first `push_weights`.

    It lives as long as the process: vLLM's own shutdown would destroy the process group of the training.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        options: VLLMConfig,
        max_num_seqs: int,
        dtype: torch.dtype,
        max_model_len: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """Build the model with arbitrary weights and allocate the KV cache; a collective.

        Args:
            config: of the Hugging Face causal LM whose weights will be pushed, vocabulary as grown.
            options: what it may take of the machine.
            max_num_seqs: sequences decoded side by side on one rank.
            dtype: of weights and KV cache.
            max_model_len: tokens of the longest prompt and response together.
            tokenizer: needed for stop strings; vLLM itself gets none.

        Raises:
            ModuleNotFoundError: vLLM is not installed.
            ValueError: the model has no max_model_len positions, vLLM does not implement it, sleep was asked for on a
                CPU, or an environment variable contradicts what this module needs.
        """
        check_length_fits(config, max_model_len)
        if options.sleep and distributed.device_type() == "cpu":
            raise ValueError("vllm.sleep is true, but vLLM cannot sleep on a CPU. Set it to false.")
        self.max_model_len = max_model_len
        self.tokenizer = tokenizer
        self._draws: Draws | None = None
        self._sleeps = options.sleep
        self._asleep = False
        architecture = cast(type, AutoModelForCausalLM._model_mapping[type(config)]).__name__
        vllm = _import_vllm()
        importlib.import_module("vllm.v1.sample.logits_processor")
        _check_implemented(vllm, architecture)
        distributed.init()  # else vLLM would make a process group of its own the default one
        self._sampling_params, self._output_kind = vllm.SamplingParams, vllm.sampling_params.RequestOutputKind
        with tempfile.TemporaryDirectory() as folder, _undisturbed():
            self._checkpoint = _Checkpoint.of(config)
            written = copy.deepcopy(config)
            written.architectures = [architecture]  # what vLLM picks its model by
            written.save_pretrained(folder)
            self._llm = vllm.LLM(
                folder,
                load_format="dummy",
                model_impl="vllm",
                skip_tokenizer_init=True,
                generation_config="vllm",
                dtype=str(dtype).removeprefix("torch."),
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max(options.prefill_tokens, max_num_seqs),
                gpu_memory_utilization=options.gpu_memory_share,
                kv_cache_memory_bytes=options.kv_cache_bytes,
                enforce_eager=not options.compiled,
                enable_sleep_mode=options.sleep,
                # The position of a token is read off the tokens so far, which are late under asynchronous scheduling.
                async_scheduling=False,
                logits_processors=[
                    processor_class(vllm.v1.sample.logits_processor.LogitsProcessor, self._current_draws)
                ],
                # With several ranks: take the process group that exists, and the device of the rank.
                distributed_executor_backend="external_launcher" if distributed.world_size() > 1 else "uni",
                disable_log_stats=True,
            )
            # At the exit and when the engine is collected this finalizer would destroy the default process group.
            self._llm.llm_engine.engine_core._finalizer.detach()
            gc.unfreeze()  # vLLM exempts all objects from collection that exist by now, the trainer's too

    def push_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load new weights in place, from memory; wakes the engine up.

        Args:
            named_tensors: whole tensors under their Hugging Face names, on any device and of any float type:
                `lora.merged_state_dict(model.state_dict(), model).items()` inside `lend_weights`.

        Raises:
            ValueError: a weight is missing, unknown or of another shape.
        """
        if self._asleep:
            self._llm.wake_up(tags=["weights"])
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": self._checkpoint.check(named_tensors)})
        self._llm.apply_model(_repack)
        if self._asleep:
            self._llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        self._llm.reset_prefix_cache()  # keys and values of the old weights

    def rest(self) -> None:
        """Free weights and KV cache until the next `push_weights`, if the options say so."""
        if self._sleeps:
            self._llm.sleep(level=2)
            self._asleep = True

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        uids: Sequence[int],
        sample_ids: Sequence[int],
        sampling: SamplingConfig,
        stop_token_ids: Sequence[int],
        max_new_tokens: int,
        seed: int,
        step: int,
    ) -> list[Response]:
        """Answer each prompt once; the arguments are those of `decode.generate`. No collective.

        Raises:
            ValueError: an empty prompt, a row longer than max_model_len, arguments of different length, or stop strings
                without a tokenizer.
            RuntimeError: the engine sleeps.
            FloatingPointError: the model's logits are not finite.
        """
        if self._asleep:
            raise RuntimeError("vLLM sleeps and has no weights. Call push_weights before generate.")
        _check_rows(prompts, uids, sample_ids, max_new_tokens=max_new_tokens, max_model_len=self.max_model_len)
        if missing := sorted(set(sampling.stop_token_ids) - set(stop_token_ids)):
            raise ValueError(
                f"stop_token_ids={list(stop_token_ids)} lack {missing} of sampling.stop_token_ids. Add them."
            )
        stops = StopRule(
            token_ids=frozenset(stop_token_ids), strings=tuple(sampling.stop_strings), tokenizer=self.tokenizer
        )
        if not prompts:
            return []
        device = distributed.device()
        uniform_BR = uniform(seed, step, uids, sample_ids, positions=range(max_new_tokens)).to(device)
        self._draws = Draws(
            chooser=TokenChooser(sampling, tuple(stop_token_ids)),
            uniform_BR=uniform_BR,
            logprob_BR=torch.zeros(uniform_BR.shape, device=device),
        )
        with _undisturbed():
            ended = self._decode(prompts, stops, max_new_tokens=max_new_tokens)
        logprobs = self._draws.logprob_BR.tolist()
        self._draws = None
        return [_response(ended[row], logprobs[row]) for row in range(len(prompts))]

    def _current_draws(self) -> Draws:
        assert self._draws is not None, "vLLM decodes outside of generate"
        return self._draws

    def _decode(
        self, prompts: Sequence[Sequence[int]], stops: StopRule, *, max_new_tokens: int
    ) -> dict[int, tuple[list[int], bool]]:
        """Tokens of each row, and whether the row stopped."""
        engine = self._llm.llm_engine
        # Only stop strings have to be looked for while a row grows; vLLM knows the stop tokens.
        kind = self._output_kind.CUMULATIVE if stops.strings else self._output_kind.FINAL_ONLY
        num_seen = [0] * len(prompts)
        ended: dict[int, tuple[list[int], bool]] = {}
        try:
            for row, prompt in enumerate(prompts):
                params = self._sampling_params(
                    temperature=0,  # the processor has left one token, which is then the most likely one
                    max_tokens=max_new_tokens,
                    stop_token_ids=sorted(stops.token_ids),
                    ignore_eos=True,
                    detokenize=False,
                    output_kind=kind,
                    extra_args={ROW: row},
                )
                engine.add_request(str(row), {"prompt_token_ids": list(prompt)}, params)
            while len(ended) < len(prompts):
                for output in engine.step():
                    row, token_ids = int(output.request_id), list(output.outputs[0].token_ids)
                    end = stops.end(token_ids, num_seen=num_seen[row])
                    num_seen[row] = len(token_ids)
                    if end is not None and not output.finished:
                        engine.abort_request([output.request_id])
                    if end is not None or output.finished:
                        ended[row] = token_ids[:end], end is not None
        finally:
            engine.abort_request([str(row) for row in range(len(prompts)) if row not in ended])
        return ended


def _import_vllm() -> Any:
    """The vllm package, set up for one engine inside this process."""
    needed = {
        # The engine in this process: weights are handed over as tensors, and the logits processor is our object.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # The second runner has another interface of logits processors.
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
    for name, value in needed.items():
        if os.environ.setdefault(name, value) != value:
            raise ValueError(
                f"{name}={os.environ[name]} is set, but vLLM as the rollout engine needs {value}. Unset it."
            )
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        return importlib.import_module("vllm")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"rollout.engine is vllm, but {error.name} is not installed. Run `pip install 'rlhf-deepspeed[vllm]'` for "
            "GPUs, or see docs/vllm.md for CPUs, or set rollout.engine to another value.",
            name=error.name,
        ) from error


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Keep the trainer's random states and number of threads, which vLLM sets for itself."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    devices = [] if distributed.device_type() == "cpu" else [torch.accelerator.current_device_index()]
    try:
        with torch.random.fork_rng(devices, device_type=distributed.device_type()):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_num_threads = set_num_threads  # on CPUs vLLM replaces it by a function that does nothing
        torch.set_num_threads(num_threads)


def _check_implemented(vllm: Any, architecture: str) -> None:
    """Only models that vLLM implements: for others it changes transformers' class in place, the trainer's too."""
    known = vllm.ModelRegistry.models.get(architecture)
    if known is None or getattr(known, "class_name", "").startswith("Transformers"):
        raise ValueError(
            f"vLLM {vllm.__version__} has no implementation of its own of {architecture}, and its use of transformers' "
            "would change the class of the model in training. Set rollout.engine to another value."
        )


@dataclass(frozen=True)
class _Checkpoint:
    """The weights that make up a causal LM."""

    shapes: dict[str, tuple[int, ...]]
    """Of each weight; of weights that share storage only the first name."""
    names: frozenset[str]
    """All names, of buffers too."""

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "_Checkpoint":
        with torch.device("meta"):
            model = cast(Any, AutoModelForCausalLM).from_config(config)
        return cls({name: tuple(p.shape) for name, p in model.named_parameters()}, frozenset(model.state_dict()))

    def check(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The weights among the tensors: no second name of a tied one, no buffer, and none missing."""
        missing = dict(self.shapes)
        for name, tensor in named_tensors:
            shape = missing.pop(name, None)
            if shape is None:
                if name not in self.names:
                    raise ValueError(
                        f"push_weights got the unknown weight {name}. Pass the state dict of the causal LM, adapters "
                        "merged, under Hugging Face's names."
                    )
                continue
            if tuple(tensor.shape) != shape:
                raise ValueError(
                    f"weight {name} has shape {tuple(tensor.shape)}, vLLM's model {shape}. Under ZeRO-3 push gathered "
                    "weights, and build VLLMEngine from the config of the model that is pushed."
                )
            yield name, tensor.detach()
        if missing:
            raise ValueError(
                f"push_weights got no {', '.join(sorted(missing)[:5])} ({len(missing)} of {len(self.shapes)} weights "
                "missing). Pass the whole state dict, adapters merged, under Hugging Face's names."
            )


def _repack(model: nn.Module) -> None:
    """Renew the packed copy of weights that are used in two modules.

    On CPUs vLLM computes linear layers from packed copies. Its reload packs a tied weight for the embedding only, and
    the output layer would go on with its first one.
    """
    for module in cast(Iterator[Any], model.modules()):
        if hasattr(module, "cpu_linear") and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)


def _check_rows(
    prompts: Sequence[Sequence[int]],
    uids: Sequence[int],
    sample_ids: Sequence[int],
    *,
    max_new_tokens: int,
    max_model_len: int,
) -> None:
    check_rows(prompts, uids=uids, sample_ids=sample_ids)
    check_positive(max_new_tokens=max_new_tokens)
    for row, prompt in enumerate(prompts):
        if len(prompt) + max_new_tokens > max_model_len:
            raise ValueError(
                f"prompt {row} has {len(prompt)} tokens, which with max_new_tokens={max_new_tokens} do not fit "
                f"max_model_len={max_model_len}. Build VLLMEngine with a larger one."
            )


def _response(ended: tuple[list[int], bool], logprobs: list[float]) -> Response:
    token_ids, stopped = ended
    logprobs = logprobs[: len(token_ids)]
    if not math.isfinite(sum(logprobs)):
        raise FloatingPointError(
            "the logits of vLLM's model are not finite. Its weights or activations overflowed: look at the last "
            "training step, or use bfloat16 or float32."
        )
    return Response(token_ids=token_ids, logprobs=logprobs, stopped=stopped)
