"""Prompts -> sampled responses, by a Hugging Face causal LM with a KV cache.

Models that take a layout (`models.attention`) are decoded in slots with continuous batching (`slots`), others as one
left-padded batch after another (`padded`). What a row draws depends on its prompt and its coordinates alone
(`sampling.uniform`), never on its batch mates.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf.config import SamplingConfig
from rlhf.models import attention
from rlhf.models.backbone import base_of
from rlhf.models.build import check_length_fits
from rlhf.models.compiled import uncompiled
from rlhf.models.float8 import without_float8
from rlhf.rollout.job import (
    Job,
    Meter,
    Request,
    Response,
    RolloutStats,
    StepModel,
    check_positive,
    check_rows,
)
from rlhf.rollout.packed import packed_linears
from rlhf.rollout.padded import decode_padded
from rlhf.rollout.sampling import TokenChooser
from rlhf.rollout.slots import decode_in_slots
from rlhf.rollout.stopping import StopRule

__all__ = ["PREFILL_TOKENS", "Response", "RolloutStats", "generate", "inference"]

# Tokens produced between two looks of the host at the rows: a look costs an accelerator a pipeline stall and the CPU
# nothing, while a finished row costs up to that many wasted tokens.
SYNC_EVERY_CPU = 1
SYNC_EVERY_ACCELERATOR = 8
# Prompt tokens that go through the model at once: products are at full speed from a few hundred on, and what a layer
# holds of them stays below that of the weights.
PREFILL_TOKENS = 4096


def generate(  # noqa: PLR0913  the coordinates of sampling are named one by one, so that none is forgotten
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    uids: Sequence[int],
    sample_ids: Sequence[int],
    sampling: SamplingConfig,
    stop_token_ids: Sequence[int],
    max_new_tokens: int,
    seed: int,
    step: int,
    pad_id: int,
    batch_size: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    all_ranks_running: Callable[[bool], bool] | None = None,
    progress: Callable[[int, int], None] | None = None,
    progress_every: int = 10_000,
    sync_every: int | None = None,
    prefill_tokens: int = PREFILL_TOKENS,
    pack_weights: bool | None = None,
    graphs: bool = False,
    on_stats: Callable[[RolloutStats], None] | None = None,
) -> list[Response]:
    """Answer each prompt once, without gradients and dropout.

    Args:
        model: Hugging Face causal LM (peft included) whose weights can be used as they are, or which gathers them in
            its forward (then `all_ranks_running` is needed). Its train or eval mode is restored.
        prompts: token ids, each non-empty, of any length.
        uids: identity of each prompt; with the sample id it selects the random numbers.
        sample_ids: which response to its prompt each row is.
        sampling: transforms; temperature 0 takes the most likely token.
        stop_token_ids: all ids that end a response, those of `sampling` included: the list that the scorer gets.
        max_new_tokens: limit on the response, stop token included.
        seed: of the run.
        step: PPO step, or another counter of rollouts.
        pad_id: any valid id; it never influences a row.
        batch_size: rows decoded side by side; changes speed and memory, not tokens.
        tokenizer: needed for `sampling.stop_strings`.
        all_ranks_running: for a model whose forward is a collective (sharded ZeRO-3): called before each forward with
            True and, once this rank is done, with False until it returns False. It returns whether any rank gave True.
            All ranks then make the same number of forwards, also those without prompts.
        progress: called with (tokens produced, responses finished) about every `progress_every` tokens.
        progress_every: tokens between two calls of `progress`.
        sync_every: tokens between two looks of the host at the batch; None: 1 on CPUs, 8 on accelerators.
        prefill_tokens: most prompt tokens in one forward, unless one prompt alone has more; changes speed and memory.
            Left-padded batches go through the model at once whatever it says.
        pack_weights: compute on copies of the weights in the order of the CPU's kernels, adapters merged
            (`packed.packed_linears`); None: where the weights are whole, that is without `all_ranks_running`.
        graphs: replay forwards without prompts from captured graphs (`rollout.graphs`), on accelerators that have them.
        on_stats: called once at the end with what was done.

    Returns:
        One response per prompt, in their order.

    Raises:
        ValueError: an empty prompt, a prompt too long for the model, arguments of different length, a stop id of
            `sampling` missing, stop strings without a tokenizer, `pack_weights` or `graphs` for sharded weights.
        FloatingPointError: the model's logits are not finite.
    """
    check_rows(prompts, uids=uids, sample_ids=sample_ids)
    check_positive(
        max_new_tokens=max_new_tokens, batch_size=batch_size, sync_every=sync_every, prefill_tokens=prefill_tokens
    )
    if prompts:
        check_length_fits(cast(Any, base_of(model)).config, max(map(len, prompts)) + max_new_tokens)
    if missing := sorted(set(sampling.stop_token_ids) - set(stop_token_ids)):
        raise ValueError(f"stop_token_ids={list(stop_token_ids)} lack {missing} of sampling.stop_token_ids. Add them.")
    if pack_weights and all_ranks_running is not None:
        raise ValueError(
            "pack_weights=True needs whole weights, but these are sharded. Set rollout.weights=gathered, so that they "
            "are gathered for the rollout, or leave pack_weights unset."
        )
    if graphs and all_ranks_running is not None:
        raise ValueError(
            "graphs=True needs whole weights, but these are sharded. Set rollout.weights=gathered, so that they are "
            "gathered for the rollout, or rollout.graphs=false."
        )
    device = next(model.parameters()).device
    if sync_every is None:
        sync_every = SYNC_EVERY_CPU if device.type == "cpu" else SYNC_EVERY_ACCELERATOR
    job = Job(
        choose=TokenChooser(sampling, tuple(stop_token_ids)),
        stops=StopRule(token_ids=frozenset(stop_token_ids), strings=tuple(sampling.stop_strings), tokenizer=tokenizer),
        max_new_tokens=max_new_tokens,
        seed=seed,
        step=step,
        pad_id=pad_id,
        num_slots=batch_size,
        prefill_tokens=prefill_tokens,
        sync_every=sync_every,
        device=device,
        graphs=graphs,
    )
    requests = [
        Request(list(prompt), uid, sample_id) for prompt, uid, sample_id in zip(prompts, uids, sample_ids, strict=True)
    ]
    step_model = StepModel(model, all_ranks_running)
    decode = decode_in_slots if attention.is_installed(model) else decode_padded
    pack = pack_weights if pack_weights is not None else all_ranks_running is None and bool(prompts)
    with inference(model), packed_linears(model) if pack else nullcontext():
        meter = Meter(num_slots=min(batch_size, max(1, len(prompts))), progress=progress, every=progress_every)
        try:
            responses = decode(step_model, requests, job, meter)
        except FloatingPointError:
            step_model.wait_for_other_ranks(pad_id, device)
            raise
        step_model.wait_for_other_ranks(pad_id, device)
    if on_stats is not None:
        on_stats(meter.stats())
    return responses


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Run the block without gradients, in eval mode, uncompiled and without float8; after, whatever happens, as before.

    Eval mode also switches gradient checkpointing off: transformers recomputes only modules that are training. A
    compiled layer would have to do without weights in the order of the kernels (docs/design/002-rollout.md).
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), uncompiled(model), without_float8(model):
            yield
    finally:
        for module, training in modes:
            module.training = training
