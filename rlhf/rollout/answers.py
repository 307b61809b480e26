"""Answering rows of a data set with the policy: the ranks share the rows, every rank gets all answers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf.config import SamplingConfig
from rlhf.data.dataset import PromptRow
from rlhf.data.template import ChatTemplate
from rlhf.distributed import Group, all_gather_objects, rank, world_size
from rlhf.engine import FrozenEngine, NonFiniteError, TrainEngine
from rlhf.models.lora import merged_state_dict
from rlhf.rollout.decode import PREFILL_TOKENS, Response, RolloutStats, generate
from rlhf.rollout.job import Request
from rlhf.rollout.plain import generate_plain
from rlhf.rollout.plan import MemoryPlan
from rlhf.rollout.vllm import VLLMEngine
from rlhf.rollout.weights import Lending, lend_weights


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One response to one row."""

    index: int
    """Row of the data set."""
    prompt: str
    """Text of the prompt as a person reads it."""
    prompt_ids: list[int]
    text: str
    """Decoded response without special tokens."""
    response_ids: list[int]
    """Stop token included."""
    stopped: bool
    meta: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Voice:
    """How responses are drawn, whoever speaks: what stays the same from one rollout to the next."""

    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate
    sampling: SamplingConfig
    max_new_tokens: int
    batch_size: int
    """Sequences decoded side by side on one rank; a group of ranks takes as many for each of its ranks."""
    lending: Lending = field(default_factory=Lending)
    """How the policy's weights come to the decoder."""
    plan: MemoryPlan | None = None
    """What a rollout will take of a rank's memory, if that was asked."""
    plain: bool = False
    """Decode by Hugging Face's generate, for a model on which ours was found to differ from it."""
    vllm: VLLMEngine | None = None
    """Decode by vLLM."""
    prefill_tokens: int = PREFILL_TOKENS
    """Most prompt tokens in one forward."""
    pack_weights: bool | None = None
    """Decode on copies of the weights in the order of the CPU's kernels; None: where the weights are whole."""
    graphs: bool = False
    """Replay the forwards that decode from captured graphs."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The template's stop token and the configured ones."""
        return (self.template.stop_token_id, *self.sampling.stop_token_ids)


def draw_responses(
    engine: TrainEngine | FrozenEngine,
    voice: Voice,
    prompts: Sequence[PromptRow],
    *,
    sample_ids: Sequence[int],
    seed: int,
    step: int,
    on_stats: Callable[[RolloutStats], None] | None = None,
) -> list[Response]:
    """Sample one response to each of this rank's prompts. Collective.

    Args:
        engine: holds the policy.
        voice: how it speaks.
        prompts: this rank's; may be empty on some ranks.
        sample_ids: number of the sample for each prompt, so that several samples of one prompt differ.
        seed: of the run.
        step: of training; a prompt met again at another step gets another response.
        on_stats: gets what this rank's rollout did, unless Hugging Face's generate or vLLM did it; of a group, its
            first rank alone tells.

    Raises:
        NonFiniteError: on all ranks, the model's logits are not finite on one.
    """
    with _finite_on_all_ranks(engine):
        requests = [
            Request(list(map(int, row.prompt_ids)), row.uid, sample_id)
            for row, sample_id in zip(prompts, sample_ids, strict=True)
        ]
        shared: dict[str, Any] = {
            "sampling": voice.sampling,
            "stop_token_ids": voice.stop_token_ids,
            "max_new_tokens": voice.max_new_tokens,
            "seed": seed,
            "step": step,
        }
        if voice.vllm is not None:
            with lend_weights(engine, voice.lending) as lent:
                voice.vllm.push_weights(merged_state_dict(lent.model.state_dict(), lent.model).items())
            try:
                return voice.vllm.generate(**_columns(requests), **shared)
            finally:
                voice.vllm.rest()
        with lend_weights(engine, voice.lending) as lent:
            all_requests, mine = _of_group(requests, lent.group)
            shared.update(
                _columns(all_requests),
                pad_id=voice.tokenizer.pad_token_id,
                batch_size=voice.batch_size * (lent.group.size if lent.group else 1),
                tokenizer=voice.tokenizer,
                all_ranks_running=lent.all_ranks_running,
            )
            if voice.plain:
                return generate_plain(lent.model, **shared)[mine]
            tells = lent.group is None or lent.group.rank == 0
            return generate(
                lent.model,
                prefill_tokens=voice.prefill_tokens,
                pack_weights=voice.pack_weights,
                graphs=voice.graphs,
                on_stats=on_stats if tells else None,
                **shared,
            )[mine]


@contextmanager
def _finite_on_all_ranks(engine: TrainEngine | FrozenEngine) -> Iterator[None]:
    """A FloatingPointError of the block on one rank is a NonFiniteError on all. Collective."""
    error: FloatingPointError | None = None
    try:
        yield
    except FloatingPointError as caught:
        error = caught
    failed = [number for number, has_failed in enumerate(all_gather_objects(error is not None)) if has_failed]
    if failed:
        raise NonFiniteError(
            step=engine.step_count if isinstance(engine, TrainEngine) else 0,
            rank=failed[0],
            role=engine.role,
            what="the logits of a rollout are not finite",
            accumulated=False,
        ) from error


def _columns(requests: Sequence[Request]) -> dict[str, Any]:
    """Requests as the decoders' arguments."""
    return {
        "prompts": [request.prompt for request in requests],
        "uids": [request.uid for request in requests],
        "sample_ids": [request.sample_id for request in requests],
    }


def _of_group(requests: list[Request], group: Group | None) -> tuple[list[Request], slice]:
    """The requests of all ranks that decode together, and which of them are this rank's."""
    if group is None:
        return requests, slice(None)
    parts = group.gather_objects(requests)
    first = sum(map(len, parts[: group.rank]))
    return [request for part in parts for request in part], slice(first, first + len(requests))


def answer_rows(
    engine: TrainEngine | FrozenEngine, voice: Voice, rows: Sequence[PromptRow], *, seed: int
) -> list[Answer]:
    """One answer to each row, on every rank and in the order of the rows; a collective."""
    mine = list(rows)[rank() :: world_size()]
    responses = draw_responses(engine, voice, mine, sample_ids=[0] * len(mine), seed=seed, step=0)
    local = [
        Answer(
            index=row.index,
            prompt=row.text,
            prompt_ids=list(map(int, row.prompt_ids)),
            text=voice.template.decode_response(response.token_ids),
            response_ids=response.token_ids,
            stopped=response.stopped,
            meta=row.meta,
        )
        for row, response in zip(mine, responses, strict=True)
    ]
    return sorted((a for part in all_gather_objects(local) for a in part), key=lambda answer: answer.index)
