"""Prompts -> sampled responses, by a Hugging Face causal LM with a KV cache.

One batch is decoded at a time: left-padded prompts go through the model once, then one token per row and forward. The
device produces `sync_every` tokens, the host reads them, decides which rows are finished and takes those out of the
batch. What a row draws depends on its prompt and its coordinates alone (`sampling.uniform`), never on its batch mates.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf.config import SamplingConfig
from rlhf.data.collate import left_pad
from rlhf.models.backbone import base_of
from rlhf.models.build import check_length_fits
from rlhf.ops import position_ids_from_mask, transform_logits
from rlhf.rollout.cache import BufferCache
from rlhf.rollout.sampling import sample_tokens, uniform
from rlhf.rollout.stopping import StopRule

# Tokens produced between two looks of the host at the batch: a look costs an accelerator a pipeline stall and the CPU
# nothing, while a finished row costs up to that many wasted tokens.
SYNC_EVERY_CPU = 1
SYNC_EVERY_ACCELERATOR = 8


@dataclass(frozen=True)
class Response:
    """One sampled response."""

    token_ids: list[int]
    """Tokens, the stop token (or the tokens of the stop string) included; at least one."""
    logprobs: list[float]
    """Of each token under the distribution it was drawn from, in nats; 0 for greedy decoding."""
    stopped: bool
    """Whether a stop token or stop string ended it, and not the length limit."""


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

    Returns:
        One response per prompt, in their order.

    Raises:
        ValueError: an empty prompt, a prompt too long for the model, arguments of different length, a stop id of
            `sampling` missing, or stop strings without a tokenizer.
        FloatingPointError: the model's logits are not finite.
    """
    _check_rows(prompts, uids=uids, sample_ids=sample_ids)
    _check_positive(max_new_tokens=max_new_tokens, batch_size=batch_size, sync_every=sync_every)
    if prompts:
        check_length_fits(cast(Any, base_of(model)).config, max(map(len, prompts)) + max_new_tokens)
    if missing := sorted(set(sampling.stop_token_ids) - set(stop_token_ids)):
        raise ValueError(f"stop_token_ids={list(stop_token_ids)} lack {missing} of sampling.stop_token_ids. Add them.")
    device = next(model.parameters()).device
    step_model = _StepModel(model, all_ranks_running)
    stops = StopRule(
        token_ids=frozenset(stop_token_ids),
        strings=tuple(sampling.stop_strings),
        tokenizer=tokenizer,
    )
    chooser = _Chooser(sampling, tuple(stop_token_ids))
    if sync_every is None:
        sync_every = SYNC_EVERY_CPU if device.type == "cpu" else SYNC_EVERY_ACCELERATOR
    report = _Progress(progress, progress_every)
    # Longest first: prompts of like length share a batch, and a batch that does not fit memory fails at once.
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    responses: dict[int, Response] = {}
    with inference(model):
        for first in range(0, len(order), batch_size):
            chosen = order[first : first + batch_size]
            batch = _Batch(
                [prompts[i] for i in chosen],
                uniform_BR=uniform(
                    seed,
                    step,
                    [uids[i] for i in chosen],
                    [sample_ids[i] for i in chosen],
                    positions=range(max_new_tokens),
                ),
                pad_id=pad_id,
                device=device,
            )
            batch.decode(step_model, chooser, stops, sync_every=sync_every, report=report)
            responses.update(zip(chosen, batch.responses(), strict=True))
        step_model.wait_for_other_ranks(pad_id, device)
    return [responses[i] for i in range(len(prompts))]


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Run the block without gradients and in eval mode; each module's own mode comes back, whatever happens.

    Eval mode also switches gradient checkpointing off: transformers recomputes only modules that are training.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def _check_rows(prompts: Sequence[Sequence[int]], *, uids: Sequence[int], sample_ids: Sequence[int]) -> None:
    if not len(prompts) == len(uids) == len(sample_ids):
        raise ValueError(
            f"prompts, uids and sample_ids must have one entry per row, got {len(prompts)}, {len(uids)}, "
            f"{len(sample_ids)}."
        )
    for row, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {row} has no token. Give it at least a bos token or drop the row.")


def _check_positive(**numbers: int | None) -> None:
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}.")


class _StepModel:
    """The model's forward as decoding needs it: last logits of each row, arguments by family, ranks in step."""

    def __init__(self, model: nn.Module, all_ranks_running: Callable[[bool], bool] | None) -> None:
        self.model = model
        self.all_ranks_running = all_ranks_running
        accepted = inspect.signature(base_of(model).forward).parameters
        # BLOOM has no position ids: it derives its ALiBi distances from the attention mask.
        self.takes_position_ids = "position_ids" in accepted
        self.constants: dict[str, Any] = {"use_cache": True, "return_dict": True}
        if "logits_to_keep" in accepted:
            self.constants["logits_to_keep"] = 1

    def __call__(
        self, token_ids_BT: Tensor, attention_mask_BT: Tensor, position_ids_BT: Tensor, cache: BufferCache
    ) -> Tensor:
        """Logits of the last column, logits_BV."""
        if self.all_ranks_running is not None:
            self.all_ranks_running(True)
        positions = {"position_ids": position_ids_BT} if self.takes_position_ids else {}
        output = self.model(
            input_ids=token_ids_BT,
            attention_mask=attention_mask_BT,
            past_key_values=cache,
            **positions,
            **self.constants,
        )
        logits_BV: Tensor = output.logits[:, -1]
        return logits_BV

    def wait_for_other_ranks(self, pad_id: int, device: torch.device) -> None:
        """Forward a dummy row as long as another rank decodes, since its forwards need this rank's shards."""
        dummy_11 = torch.full((1, 1), pad_id, device=device)
        while self.all_ranks_running is not None and self.all_ranks_running(False):
            self.model(input_ids=dummy_11, attention_mask=torch.ones_like(dummy_11), use_cache=False)


@dataclass(frozen=True)
class _Chooser:
    """Logits -> tokens and their log-probabilities."""

    sampling: SamplingConfig
    stop_token_ids: tuple[int, ...]

    def __call__(self, logits_BV: Tensor, position: int, u_B: Tensor) -> tuple[Tensor, Tensor]:
        position_B = torch.full((logits_BV.shape[0],), position, device=logits_BV.device)
        logits_BV = transform_logits(
            logits_BV, self.sampling, response_position_S=position_B, stop_token_ids=self.stop_token_ids
        )
        return sample_tokens(logits_BV, u_B)


@dataclass
class _Progress:
    callback: Callable[[int, int], None] | None
    every: int
    tokens: int = 0
    finished: int = 0
    reported: int = 0

    def add(self, *, tokens: int, finished: int) -> None:
        self.tokens += tokens
        self.finished += finished
        if self.callback is not None and self.tokens - self.reported >= self.every:
            self.reported = self.tokens
            self.callback(self.tokens, self.finished)


@dataclass
class _Row:
    """A response in the making, on the host."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False


class _Batch:
    """Rows decoded side by side. Slots (rows of the device tensors) hold the unfinished rows and are closed up."""

    def __init__(self, prompts: list[Sequence[int]], *, uniform_BR: Tensor, pad_id: int, device: torch.device) -> None:
        self.max_new_tokens = uniform_BR.shape[1]
        self.token_ids_BP, mask_BP = left_pad([list(prompt) for prompt in prompts], pad_id=pad_id, device=device)
        assert bool(mask_BP[:, -1].all()), "prompts are left-padded"
        self.num_prompt_tokens = mask_BP.shape[1]
        # The mask of the whole length: each forward takes as many columns as there are tokens by then.
        self.mask_BT = nn.functional.pad(mask_BP.bool(), (0, self.max_new_tokens), value=True)
        self.next_position_B1 = mask_BP.sum(1, keepdim=True)
        self.uniform_BR = uniform_BR.to(device)
        self.cache = BufferCache(capacity=self.num_prompt_tokens + self.max_new_tokens)
        self.rows = [_Row() for _ in prompts]
        self.slots = list(self.rows)

    def decode(
        self, model: _StepModel, choose: _Chooser, stops: StopRule, *, sync_every: int, report: _Progress
    ) -> None:
        """Produce tokens until every row is finished."""
        mask_BP = self.mask_BT[:, : self.num_prompt_tokens]
        logits_BV = model(self.token_ids_BP, mask_BP, position_ids_from_mask(mask_BP), self.cache)
        position = 0
        while True:
            block: list[tuple[Tensor, Tensor]] = []
            while True:
                block.append(choose(logits_BV, position, self.uniform_BR[:, position]))
                position += 1
                if len(block) == sync_every or position == self.max_new_tokens:
                    break
                logits_BV = self._forward(model, block[-1][0], position)
            finished, num_tokens = self._read(block, stops)
            report.add(tokens=num_tokens, finished=len(finished))
            if len(finished) == len(self.slots) or position == self.max_new_tokens:
                return
            token_B = block[-1][0]
            if finished:
                token_B = self._remove(finished, token_B)
            logits_BV = self._forward(model, token_B, position)

    def responses(self) -> list[Response]:
        """The decoded rows, in the order of the prompts."""
        return [Response(row.token_ids, row.logprobs, row.stopped) for row in self.rows]

    def _forward(self, model: _StepModel, token_B: Tensor, position: int) -> Tensor:
        """Logits after token_B, which is the last of `position` response tokens."""
        mask_BT = self.mask_BT[:, : self.num_prompt_tokens + position]
        logits_BV = model(token_B[:, None], mask_BT, self.next_position_B1, self.cache)
        self.next_position_B1 = self.next_position_B1 + 1
        return logits_BV

    def _read(self, block: list[tuple[Tensor, Tensor]], stops: StopRule) -> tuple[list[int], int]:
        """Append a block of tokens to the rows on the host; slots that finished, and the number of tokens kept."""
        token_lists = torch.stack([token_B for token_B, _ in block], 1).tolist()
        logprob_lists = torch.stack([logprob_B for _, logprob_B in block], 1).tolist()
        finished, num_tokens = [], 0
        for slot, (row, token_ids, logprobs) in enumerate(zip(self.slots, token_lists, logprob_lists, strict=True)):
            if not math.isfinite(sum(logprobs)):
                raise FloatingPointError(
                    f"the model's logits are not finite at response token {len(row.token_ids)} of a row. Its weights "
                    "or activations overflowed: look at the last training step, or use bfloat16 or float32."
                )
            num_seen = len(row.token_ids)
            row.token_ids.extend(token_ids)
            row.logprobs.extend(logprobs)
            end = stops.end(row.token_ids, num_seen=num_seen)
            if end is not None:
                row.stopped = True
                del row.token_ids[end:], row.logprobs[end:]
                finished.append(slot)
            num_tokens += len(row.token_ids) - num_seen
        return finished, num_tokens

    def _remove(self, finished: list[int], token_B: Tensor) -> Tensor:
        """Close the finished slots by moving the last unfinished ones into them; token_B of the slots that stay."""
        done = set(finished)
        num_left = len(self.slots) - len(finished)
        holes = [slot for slot in finished if slot < num_left]
        movers = [slot for slot in range(num_left, len(self.slots)) if slot not in done]
        for hole, mover in zip(holes, movers, strict=True):
            self.slots[hole] = self.slots[mover]
        del self.slots[num_left:]
        to = torch.tensor(holes, dtype=torch.int64, device=token_B.device)
        source = torch.tensor(movers, dtype=torch.int64, device=token_B.device)

        def close(tensor: Tensor) -> Tensor:
            if movers:
                tensor[to] = tensor[source]
            return tensor[:num_left]

        self.mask_BT = close(self.mask_BT)
        self.next_position_B1 = close(self.next_position_B1)
        self.uniform_BR = close(self.uniform_BR)
        self.cache.close(to, source, num_left=num_left)
        return close(token_B)
