"""What a rollout is asked for, what it answers and what it counts; shared by the two ways of decoding."""

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlhf.models.attention import Layout
from rlhf.models.backbone import base_of, layout_arguments
from rlhf.rollout.cache import BufferCache, SlotCache
from rlhf.rollout.sampling import TokenChooser
from rlhf.rollout.stopping import StopRule


@dataclass(frozen=True)
class Response:
    """One sampled response."""

    token_ids: list[int]
    """Tokens, the stop token (or the tokens of the stop string) included; at least one."""
    logprobs: list[float]
    """Of each token under the distribution it was drawn from, in nats; 0 for greedy decoding."""
    stopped: bool
    """Whether a stop token or stop string ended it, and not the length limit."""


@dataclass(frozen=True)
class RolloutStats:
    """What one call of `generate` did on this rank."""

    tokens: int
    """Of the responses."""
    forwards: int
    """Of the model, prefills included; those that only kept other ranks company are left out."""
    occupancy: float
    """Rows that drew a token, over the slots there were, mean over forwards; 0 without forwards."""
    tail_frac: float
    """Share of forwards with less than half of the slots busy, [0, 1]."""
    prefill_tokens: int
    """Prompt tokens computed; padding, where there is any, included."""
    prefill_seconds: float
    """A forward that holds prompts and decoding rows counts by its tokens."""
    decode_seconds: float
    """All else but the packing of weights: decoding, sampling, looking for stops."""


@dataclass(frozen=True)
class Request:
    """A prompt to be answered once."""

    prompt: list[int]
    uid: int
    sample_id: int


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all requests of a rollout share."""

    choose: TokenChooser
    stops: StopRule
    max_new_tokens: int
    seed: int
    step: int
    pad_id: int
    num_slots: int
    """Rows decoded side by side."""
    prefill_tokens: int
    """Most prompt tokens in one forward, unless one prompt alone has more."""
    sync_every: int
    """Tokens between two looks of the host at the rows."""
    device: torch.device
    graphs: bool = False
    """Replay forwards without prompts from captured graphs."""


class Meter:
    """Counts forwards, tokens and seconds, and reports progress."""

    def __init__(self, *, num_slots: int, progress: Callable[[int, int], None] | None, every: int) -> None:
        """See `generate` for `progress` and `every`."""
        self.num_slots = num_slots
        self.progress = progress
        self.every = every
        self.tokens = self.finished = self.reported = 0
        self.busy: list[int] = []
        self.prefill_tokens = 0
        self.prefill_seconds = self.decode_seconds = 0.0
        self._mark = time.perf_counter()

    def forward(self, *, busy: int, prompt_tokens: int) -> None:
        """Count a forward after which `busy` rows draw a token."""
        self.busy.append(busy)
        self.prefill_tokens += prompt_tokens

    def lap(self, *, prompt_tokens: int, decode_tokens: int) -> None:
        """Divide the time since the last call by the tokens of the forwards in it."""
        now = time.perf_counter()
        share = prompt_tokens / max(1, prompt_tokens + decode_tokens)
        self.prefill_seconds += share * (now - self._mark)
        self.decode_seconds += (1 - share) * (now - self._mark)
        self._mark = now

    def add(self, *, tokens: int, finished: int) -> None:
        """Count tokens of responses, and responses that are finished; report where due."""
        self.tokens += tokens
        self.finished += finished
        if self.progress is not None and self.tokens - self.reported >= self.every:
            self.reported = self.tokens
            self.progress(self.tokens, self.finished)

    def stats(self) -> RolloutStats:
        """The counts so far."""
        forwards = len(self.busy)
        return RolloutStats(
            tokens=self.tokens,
            forwards=forwards,
            occupancy=sum(self.busy) / (forwards * self.num_slots) if forwards else 0.0,
            tail_frac=sum(2 * busy < self.num_slots for busy in self.busy) / forwards if forwards else 0.0,
            prefill_tokens=self.prefill_tokens,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
        )


class StepModel:
    """The model's forward as decoding needs it: last logits of each row, arguments by family, ranks in step."""

    def __init__(self, model: nn.Module, all_ranks_running: Callable[[bool], bool] | None) -> None:
        """See `generate` for the arguments."""
        self.model = model
        self.all_ranks_running = all_ranks_running
        accepted = inspect.signature(base_of(model).forward).parameters
        # BLOOM has no position ids: it derives its ALiBi distances from the attention mask.
        self.takes_position_ids = "position_ids" in accepted
        self.takes_logits_to_keep = "logits_to_keep" in accepted

    def padded(
        self, token_ids_BT: Tensor, attention_mask_BT: Tensor, position_ids_BT: Tensor, cache: BufferCache
    ) -> Tensor:
        """Logits of the last column of left-padded rows, logits_BV."""
        kwargs: dict[str, Any] = {"position_ids": position_ids_BT} if self.takes_position_ids else {}
        if self.takes_logits_to_keep:
            kwargs["logits_to_keep"] = 1
        logits_BTV = self._forward(
            input_ids=token_ids_BT, attention_mask=attention_mask_BT, past_key_values=cache, **kwargs
        )
        return logits_BTV[:, -1]

    def packed(
        self, token_ids_N: Tensor, position_N: Tensor, cache: SlotCache, layout: Layout, *, keep_M: Tensor | None
    ) -> Tensor:
        """Logits after some tokens of a packed row, logits_MV.

        Args:
            token_ids_N: tokens.
            position_N: of each in its own sequence.
            cache: aimed at where the tokens belong.
            layout: of the same tokens.
            keep_M: indices of the tokens; None: all.
        """
        kwargs: dict[str, Any] = {}
        if keep_M is not None and self.takes_logits_to_keep:
            kwargs["logits_to_keep"] = keep_M
        logits_1MV = self._forward(
            input_ids=token_ids_N[None],
            position_ids=position_N[None],
            past_key_values=cache,
            **layout_arguments(layout, token_ids_N.device),
            **kwargs,
        )
        if keep_M is not None and not self.takes_logits_to_keep:
            logits_1MV = logits_1MV[:, keep_M]
        return logits_1MV[0]

    def _forward(self, **kwargs: Any) -> Tensor:
        if self.all_ranks_running is not None:
            self.all_ranks_running(True)
        logits_BTV: Tensor = self.model(use_cache=True, return_dict=True, **kwargs).logits
        return logits_BTV

    def wait_for_other_ranks(self, pad_id: int, device: torch.device) -> None:
        """Forward a dummy row as long as another rank decodes, since its forwards need this rank's shards."""
        dummy_11 = torch.full((1, 1), pad_id, device=device)
        while self.all_ranks_running is not None and self.all_ranks_running(False):
            self.model(input_ids=dummy_11, attention_mask=torch.ones_like(dummy_11), use_cache=False)


def check_finite(finite: bool, position: int) -> None:  # noqa: FBT001  the fact that is checked
    """Check that the log-probabilities drawn from a response position on were finite.

    Raises:
        FloatingPointError: they were not.
    """
    if not finite:
        raise FloatingPointError(
            f"the model's logits are not finite at response token {position} of a row. Its weights or activations "
            "overflowed: look at the last training step, or use bfloat16 or float32."
        )


def check_rows(prompts: Sequence[Sequence[int]], *, uids: Sequence[int], sample_ids: Sequence[int]) -> None:
    """Check what is asked of each row.

    Raises:
        ValueError: the arguments differ in length, or a prompt is empty.
    """
    if not len(prompts) == len(uids) == len(sample_ids):
        raise ValueError(
            f"prompts, uids and sample_ids must have one entry per row, got {len(prompts)}, {len(uids)}, "
            f"{len(sample_ids)}."
        )
    for row, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {row} has no token. Give it at least a bos token or drop the row.")


def check_positive(**numbers: int | None) -> None:
    """Check that the numbers that are given are at least 1.

    Raises:
        ValueError: one is not.
    """
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}.")
