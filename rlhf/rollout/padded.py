"""Decoding for models that do not take a layout (BLOOM): one left-padded batch at a time.

Left-padded prompts go through the model once, then one token per row and forward. The device produces `sync_every`
tokens, the host reads them, decides which rows are finished and takes those out of the batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from rlhf.data.collate import left_pad
from rlhf.ops import position_ids_from_mask
from rlhf.rollout.cache import BufferCache
from rlhf.rollout.job import Job, Meter, Request, Response, StepModel, check_finite
from rlhf.rollout.sampling import uniform


def decode_padded(model: StepModel, requests: Sequence[Request], job: Job, meter: Meter) -> list[Response]:
    """Answer the requests, in their order."""
    # Longest first: prompts of like length share a batch, and a batch that does not fit memory fails at once.
    order = sorted(range(len(requests)), key=lambda i: -len(requests[i].prompt))
    responses: dict[int, Response] = {}
    for first in range(0, len(order), job.num_slots):
        chosen = order[first : first + job.num_slots]
        batch = _Batch([requests[i] for i in chosen], job)
        batch.decode(model, meter)
        responses.update(zip(chosen, batch.responses(), strict=True))
    return [responses[i] for i in range(len(requests))]


@dataclass
class _Row:
    """A response in the making, on the host."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False


class _Batch:
    """Rows decoded side by side. Slots (rows of the device tensors) hold the unfinished rows and are closed up."""

    def __init__(self, requests: Sequence[Request], job: Job) -> None:
        self.job = job
        self.token_ids_BP, mask_BP = left_pad(
            [request.prompt for request in requests], pad_id=job.pad_id, device=job.device
        )
        assert bool(mask_BP[:, -1].all()), "prompts are left-padded"
        self.num_prompt_tokens = mask_BP.shape[1]
        # The mask of the whole length: each forward takes as many columns as there are tokens by then.
        self.mask_BT = nn.functional.pad(mask_BP.bool(), (0, job.max_new_tokens), value=True)
        self.next_position_B1 = mask_BP.sum(1, keepdim=True)
        self.uniform_BR = uniform(
            job.seed,
            job.step,
            [request.uid for request in requests],
            [request.sample_id for request in requests],
            positions=range(job.max_new_tokens),
        ).to(job.device)
        self.cache = BufferCache(capacity=self.num_prompt_tokens + job.max_new_tokens)
        self.rows = [_Row() for _ in requests]
        self.slots = list(self.rows)

    def decode(self, model: StepModel, meter: Meter) -> None:
        """Produce tokens until every row is finished."""
        mask_BP = self.mask_BT[:, : self.num_prompt_tokens]
        logits_BV = model.padded(self.token_ids_BP, mask_BP, position_ids_from_mask(mask_BP), self.cache)
        meter.forward(busy=len(self.slots), prompt_tokens=mask_BP.numel())
        meter.lap(prompt_tokens=mask_BP.numel(), decode_tokens=0)
        position = 0
        while True:
            block: list[tuple[Tensor, Tensor]] = []
            while True:
                position_B = torch.full((len(logits_BV),), position, device=logits_BV.device)
                block.append(self.job.choose(logits_BV, position_B, self.uniform_BR[:, position]))
                position += 1
                if len(block) == self.job.sync_every or position == self.job.max_new_tokens:
                    break
                logits_BV = self._forward(model, block[-1][0], position, meter)
            finished, num_tokens = self._read(block)
            meter.add(tokens=num_tokens, finished=len(finished))
            meter.lap(prompt_tokens=0, decode_tokens=num_tokens)
            if len(finished) == len(self.slots) or position == self.job.max_new_tokens:
                return
            token_B = block[-1][0]
            if finished:
                token_B = self._remove(finished, token_B)
            logits_BV = self._forward(model, token_B, position, meter)

    def responses(self) -> list[Response]:
        """The decoded rows, in the order of the prompts."""
        return [Response(row.token_ids, row.logprobs, row.stopped) for row in self.rows]

    def _forward(self, model: StepModel, token_B: Tensor, position: int, meter: Meter) -> Tensor:
        """Logits after token_B, which is the last of `position` response tokens."""
        mask_BT = self.mask_BT[:, : self.num_prompt_tokens + position]
        logits_BV = model.padded(token_B[:, None], mask_BT, self.next_position_B1, self.cache)
        self.next_position_B1 = self.next_position_B1 + 1
        meter.forward(busy=len(self.slots), prompt_tokens=0)
        return logits_BV

    def _read(self, block: list[tuple[Tensor, Tensor]]) -> tuple[list[int], int]:
        """Append a block of tokens to the rows on the host; slots that finished, and the number of tokens kept."""
        token_lists = torch.stack([token_B for token_B, _ in block], 1).tolist()
        logprob_lists = torch.stack([logprob_B for _, logprob_B in block], 1).tolist()
        finished, num_tokens = [], 0
        for slot, (row, token_ids, logprobs) in enumerate(zip(self.slots, token_lists, logprob_lists, strict=True)):
            num_seen = len(row.token_ids)
            check_finite(math.isfinite(sum(logprobs)), num_seen)
            row.token_ids.extend(token_ids)
            row.logprobs.extend(logprobs)
            end = self.job.stops.end(row.token_ids, num_seen=num_seen)
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
