"""Continuous batching: a row that is finished makes room for the next prompt at once.

Each row has a slot of the cache. A forward takes the newest token of every decoding row and, where slots have become
free, the prompts that move in, as one packed row; so no forward computes a finished row, padding, or the logits of a
token that nothing is drawn from. Rows with the same prompt and uid compute it once and copy its keys and values.

The host knows every length without asking the device: all rows grow by one token a step.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlhf.rollout.cache import SlotCache
from rlhf.rollout.graphs import StepGraphs
from rlhf.rollout.job import Job, Meter, Request, Response, StepModel, check_finite
from rlhf.rollout.layout import SlotLayout
from rlhf.rollout.sampling import uniform

# A prompt as it can be shared: rows with other uids are other rows of the data, whatever their tokens.
Key = tuple[int, tuple[int, ...]]
# What it costs to move a token's keys and values, in reads of them: into a copy and back.
REORDER_READS = 4


def decode_in_slots(model: StepModel, requests: Sequence[Request], job: Job, meter: Meter) -> list[Response]:
    """Answer the requests, in their order."""
    if not requests:
        return []
    slots = _Slots(model, requests, job, meter)
    while slots.unfinished:
        slots.advance()
    return [slots.responses[i] for i in range(len(requests))]


@dataclass
class _Occupant:
    """A row in its slot."""

    index: int
    """Of its request."""
    prompt: list[int]
    started: int
    """Steps done when it moved in: it has drawn one token in each since."""


@dataclass
class _Entrants:
    """Rows that move in with the next forward."""

    fresh: dict[Key, int] = field(default_factory=dict)
    """Slot of each prompt that the forward computes, in the order of its row."""
    followers: dict[Key, list[int]] = field(default_factory=dict)
    """Slots that get their keys and values from one of these afterwards."""
    known: dict[int, Tensor] = field(default_factory=dict)
    """Slots that hold a prompt computed before, and the logits after it, logits_V."""

    @property
    def slots(self) -> set[int]:
        """All slots that are moved into."""
        return {*self.fresh.values(), *(slot for slots in self.followers.values() for slot in slots), *self.known}

    @property
    def num_prompt_tokens(self) -> int:
        """Of the prompts that are computed."""
        return sum(len(prompt) for _, prompt in self.fresh)


@dataclass
class _Rows:
    """The rows in their slots as the device sees them, from one change of rows to the next."""

    slots: list[int]
    slot_A: Tensor
    count_A: Tensor
    """Tokens drawn."""
    place_A: Tensor
    """Of the newest token in its slot, which is its position too."""
    token_A: Tensor | None = None
    """The newest tokens; None: they stand in the record."""
    layout: SlotLayout | None = None
    excess: int = 0
    """What a forward reads because of empty slots among the others, in bytes."""


class _Slots:
    """All state of a rollout. Tensors with S rows stay for its whole length and are indexed by slot."""

    def __init__(self, model: StepModel, requests: Sequence[Request], job: Job, meter: Meter) -> None:
        self.model, self.job, self.meter, self.requests = model, job, meter, requests
        self.keys: list[Key] = [(request.uid, tuple(request.prompt)) for request in requests]
        first_with: dict[Key, int] = {}
        for i, key in enumerate(self.keys):
            first_with.setdefault(key, i)
        # Longest first: what does not fit memory fails at once, and slots start in order. Equal prompts in a row.
        self.queue = sorted(
            range(len(requests)), key=lambda i: (len(requests[i].prompt), -first_with[self.keys[i]], -i)
        )
        self.waiting = Counter(self.keys)
        num_slots = min(job.num_slots, len(requests))
        longest = max(len(request.prompt) for request in requests)
        # A row's last token is drawn and never read, so no row writes to the last place.
        self.cache = SlotCache(num_slots=num_slots, capacity=longest + job.max_new_tokens)
        self.graphs = StepGraphs(model, self.cache, device=job.device) if job.graphs else None
        self.occupants: list[_Occupant | None] = [None] * num_slots
        self.holds: list[Key | None] = [None] * num_slots
        """Prompt whose keys and values stand in each slot, also after its row has finished."""
        self.known: dict[Key, Tensor] = {}
        """Logits after prompts that rows still wait with, logits_V."""
        shape = (num_slots, job.max_new_tokens)
        self.uniform_SR = torch.zeros(shape, dtype=torch.float64, device=job.device)
        self.token_SR = torch.zeros(shape, dtype=torch.int64, device=job.device)
        self.logprob_SR = torch.zeros(shape, dtype=torch.float32, device=job.device)
        self.stop_ids = torch.tensor(sorted(job.stops.token_ids), dtype=torch.int64, device=job.device)
        self.now = 0
        self.debt = 0
        """What empty slots among the others have cost since they were last closed up, in bytes."""
        self.rows: _Rows | None = None
        self.responses: dict[int, Response] = {}

    @property
    def unfinished(self) -> bool:
        """Whether a request is not yet answered."""
        return len(self.responses) < len(self.requests)

    def advance(self) -> None:
        """Let rows move in, draw a token or a few of every row, and let finished rows go."""
        entrants = self._admit()
        moved_in = entrants.slots
        if moved_in:
            self.rows = None
        elif self.debt:
            self._tidy()
        self.rows = rows = self.rows or self._make_rows()
        num_left = min(self.job.max_new_tokens - self._count(slot) for slot in rows.slots)
        drawn = []
        for i in range(min(self.job.sync_every, num_left)):
            logits_AV = self._enter(entrants, rows) if i == 0 and moved_in else self._step(rows)
            drawn.append(self._draw(logits_AV, rows))
        self._let_go(drawn, rows)
        self.meter.lap(
            prompt_tokens=entrants.num_prompt_tokens,
            decode_tokens=len(drawn) * len(rows.slots) - len(moved_in),
        )

    def _count(self, slot: int) -> int:
        """Tokens that a slot's row has drawn."""
        occupant = self.occupants[slot]
        assert occupant is not None
        return self.now - occupant.started

    def _length(self, slot: int) -> int:
        """Tokens of a slot's row, the newest included."""
        occupant = self.occupants[slot]
        assert occupant is not None
        return len(occupant.prompt) + self.now - occupant.started

    def _admit(self) -> _Entrants:
        """Give free slots to waiting rows, as far as the budget of prompt tokens goes."""
        entrants = _Entrants()
        budget = self.job.prefill_tokens
        free = [slot for slot, occupant in enumerate(self.occupants) if occupant is None]
        first = len(self.queue)
        while free and self.queue:
            index = self.queue[-1]
            key = self.keys[index]
            holder = self.holds.index(key) if key in self.known and key in self.holds else None
            if key not in entrants.fresh and holder is None:
                if entrants.fresh and len(key[1]) > budget:
                    break
                budget -= len(key[1])
            # A slot that holds the prompt already is best, one whose prompt nobody waits for is next.
            slot = min(free, key=lambda s: (self.holds[s] != key, self._is_wanted(self.holds[s]), s))
            free.remove(slot)
            self.queue.pop()
            self.waiting[key] -= 1
            if key in entrants.fresh:
                entrants.followers.setdefault(key, []).append(slot)
            elif holder is not None:
                if holder != slot:
                    self.cache.copy(holder, [slot], length=len(key[1]))
                entrants.known[slot] = self.known[key]
            else:
                entrants.fresh[key] = slot
            self.holds[slot] = key
            self.occupants[slot] = _Occupant(index, self.requests[index].prompt, self.now)
        if len(self.queue) < first:
            self._draw_uniforms(entrants.slots)
        return entrants

    def _is_wanted(self, key: Key | None) -> bool:
        """Whether rows wait with this prompt."""
        return key is not None and self.waiting[key] > 0

    def _draw_uniforms(self, slots: set[int]) -> None:
        order = sorted(slots)
        requests = [self.requests[occupant.index] for slot in order if (occupant := self.occupants[slot])]
        self.uniform_SR[order] = uniform(
            self.job.seed,
            self.job.step,
            [request.uid for request in requests],
            [request.sample_id for request in requests],
            positions=range(self.job.max_new_tokens),
        ).to(self.job.device)

    def _make_rows(self) -> _Rows:
        slots = [slot for slot, occupant in enumerate(self.occupants) if occupant is not None]
        slot_A, count_A, place_A = torch.tensor(
            [slots, [self._count(slot) for slot in slots], [self._length(slot) - 1 for slot in slots]],
            device=self.job.device,
        )
        return _Rows(slots, slot_A, count_A.clone(), place_A.clone())

    def _enter(self, entrants: _Entrants, rows: _Rows) -> Tensor:
        """The forward that prompts come in with; logits_AV of all rows."""
        old = [i for i, slot in enumerate(rows.slots) if slot not in entrants.slots]
        prompts = [key[1] for key in entrants.fresh]
        lengths = [len(prompt) for prompt in prompts]
        outputs: list[Tensor] = []
        if old or prompts:
            old_A = torch.tensor(old, dtype=torch.int64, device=self.job.device)
            fresh_N, place_N, slot_N = (
                torch.tensor(values, dtype=torch.int64, device=self.job.device)
                for values in (
                    [token for prompt in prompts for token in prompt],
                    [place for length in lengths for place in range(length)],
                    [
                        slot
                        for slot, length in zip(entrants.fresh.values(), lengths, strict=True)
                        for _ in range(length)
                    ],
                )
            )
            slot_O, place_O = rows.slot_A[old_A], rows.place_A[old_A]
            layout = SlotLayout(
                self.cache,
                slots=[rows.slots[i] for i in old],
                lengths=[self._length(rows.slots[i]) for i in old],
                prompt_lengths=lengths,
                device=self.job.device,
            )
            self.cache.aim(torch.cat([slot_O, slot_N]), torch.cat([place_O, place_N]))
            ends = torch.tensor(lengths, dtype=torch.int64, device=self.job.device).cumsum(0) + len(old) - 1
            outputs.append(
                self.model.packed(
                    torch.cat([self.token_SR[slot_O, rows.count_A[old_A] - 1], fresh_N]),
                    torch.cat([place_O, place_N]),
                    self.cache,
                    layout,
                    keep_M=torch.cat([torch.arange(len(old), device=self.job.device), ends]),
                )
            )
            self.meter.forward(busy=len(rows.slots), prompt_tokens=len(fresh_N))
        # Where each row's logits stand: after the old rows', the computed prompts', then those known before.
        source = {rows.slots[i]: n for n, i in enumerate(old)}
        for n, (key, slot) in enumerate(entrants.fresh.items(), start=len(old)):
            followers = entrants.followers.get(key, [])
            source.update({s: n for s in (slot, *followers)})
            if followers:
                self.cache.copy(slot, followers, length=len(key[1]))
            if self.waiting[key]:
                self.known[key] = outputs[0][n]
        for n, (slot, logits_V) in enumerate(entrants.known.items(), start=len(old) + len(prompts)):
            source[slot] = n
            outputs.append(logits_V[None])
        for key in [key for key in self.known if not self.waiting[key]]:
            del self.known[key]
        logits_MV = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        order = [source[slot] for slot in rows.slots]
        return logits_MV if order == list(range(len(logits_MV))) else logits_MV[order]

    def _step(self, rows: _Rows) -> Tensor:
        """A forward of decoding rows alone, logits_AV."""
        if rows.layout is None:
            lengths = [self._length(slot) for slot in rows.slots]
            rows.layout = SlotLayout(self.cache, slots=rows.slots, lengths=lengths, device=self.job.device)
            rows.excess = rows.layout.excess()
        else:
            rows.layout.advance()
        if rows.token_A is None:
            rows.token_A = self.token_SR[rows.slot_A, rows.count_A - 1]
        self.debt += rows.excess
        if self.graphs is not None:
            logits_AV = self.graphs.forward(rows.layout, rows.token_A, rows.place_A)
        else:
            self.cache.aim(rows.slot_A, rows.place_A)
            logits_AV = self.model.packed(rows.token_A, rows.place_A, self.cache, rows.layout, keep_M=None)
        self.meter.forward(busy=len(rows.slots), prompt_tokens=0)
        return logits_AV

    def _draw(self, logits_AV: Tensor, rows: _Rows) -> tuple[Tensor, Tensor]:
        """Draw and record the next token of every row: token_A and logprob_A."""
        at = (rows.slot_A, rows.count_A)
        token_A, logprob_A = self.job.choose(logits_AV, rows.count_A, self.uniform_SR[at])
        self.token_SR[at], self.logprob_SR[at] = token_A, logprob_A
        rows.count_A, rows.place_A, rows.token_A = rows.count_A + 1, rows.place_A + 1, token_A
        self.now += 1
        return token_A, logprob_A

    def _let_go(self, drawn: list[tuple[Tensor, Tensor]], rows: _Rows) -> None:
        """Answer the requests whose rows stopped or are full; their slots become free."""
        token_AB, logprob_AB = (torch.stack(tensors, dim=1) for tensors in zip(*drawn, strict=True))
        finite_A = torch.isfinite(logprob_AB).all(dim=1)
        if not bool(finite_A.all()):
            check_finite(False, self._count(rows.slots[int(finite_A.int().argmin())]) - len(drawn))  # noqa: FBT003
        ends = self._ends(token_AB, rows.slots)
        num_tokens = len(drawn) * len(rows.slots)
        finished = 0
        for slot in rows.slots if ends or self._any_full(rows.slots) else ():
            count, end = self._count(slot), ends.get(slot)
            if end is None and count < self.job.max_new_tokens:
                continue
            length = count if end is None else end
            occupant = self.occupants[slot]
            assert occupant is not None
            self.responses[occupant.index] = Response(
                self.token_SR[slot, :length].tolist(), self.logprob_SR[slot, :length].tolist(), end is not None
            )
            self.occupants[slot] = None
            num_tokens -= count - length
            finished += 1
            self.rows = None
        self.meter.add(tokens=num_tokens, finished=finished)

    def _any_full(self, slots: list[int]) -> bool:
        return max(map(self._count, slots)) >= self.job.max_new_tokens

    def _ends(self, token_AB: Tensor, slots: list[int]) -> dict[int, int]:
        """Length of the response in each slot where one of the newest tokens ended it."""
        num_new = token_AB.shape[1]
        if self.job.stops.strings:
            found = {}
            for slot in slots:
                count = self._count(slot)
                token_ids = self.token_SR[slot, :count].tolist()
                end = self.job.stops.end(token_ids, num_seen=count - num_new)
                if end is not None:
                    found[slot] = end
            return found
        stop_AB = torch.isin(token_AB, self.stop_ids)
        if not bool(stop_AB.any()):
            return {}
        first_A = stop_AB.int().argmax(dim=1).tolist()
        return {
            slot: self._count(slot) - num_new + first + 1
            for slot, stopped, first in zip(slots, stop_AB.any(dim=1).tolist(), first_A, strict=True)
            if stopped
        }

    def _tidy(self) -> None:
        """Close the slots up once that costs less than the gaps have cost.

        So gaps never cost more than twice what they cost if closed at the best moment (the ski rental rule).
        """
        slots = [slot for slot, occupant in enumerate(self.occupants) if occupant is not None]
        longest = max(map(self._length, slots))
        if self.debt <= REORDER_READS * len(slots) * longest * self.cache.bytes_per_token:
            return
        self.debt, self.rows = 0, None
        self.cache.reorder(slots, length=longest)
        for tensor in (self.uniform_SR, self.token_SR, self.logprob_SR):
            tensor[: len(slots)] = tensor[slots]
        num_free = len(self.occupants) - len(slots)
        self.occupants = [*(self.occupants[slot] for slot in slots), *[None] * num_free]
        self.holds = [*(self.holds[slot] for slot in slots), *[None] * num_free]
