"""The choice of tokens inside vLLM: a logits processor that leaves each row the one token that it draws.

vLLM makes the processor, tells it which request each line of its batch is, and hands it the model's logits. Nothing
here needs vLLM until the class is made for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf.rollout.sampling import TokenChooser

ROW = "rlhf_row"
"""Extra argument under which a request carries its row through vLLM."""


@dataclass(frozen=True)
class Draws:
    """What the rows of one rollout draw, and the log-probabilities of what was drawn."""

    chooser: TokenChooser
    uniform_BR: Tensor
    logprob_BR: Tensor
    """Written as tokens are chosen."""

    def choose(self, logits_SV: Tensor, row_S: Tensor, position_S: Tensor) -> Tensor:
        """Logits under which only the token is possible that the row of each slot draws at its position.

        A slot may be asked for the same position again (a prompt in several parts, a request that was put off): it then
        draws the same token from the logits of that time.
        """
        token_S, logprob_S = self.chooser(logits_SV, position_S, self.uniform_BR[row_S, position_S])
        self.logprob_BR[row_S, position_S] = logprob_S
        return torch.full_like(logits_SV, -torch.inf).scatter_(1, token_S[:, None], 0.0)


class Slots:
    """Which row each line of vLLM's batch is, and how many tokens that row has."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, list[int]]] = {}

    def update(self, batch_update: Any) -> None:
        """Follow a change of the batch (vLLM's BatchUpdate), in the order that vLLM prescribes."""
        if batch_update is None:
            return
        for slot in batch_update.removed:
            self._held.pop(slot, None)
        for slot, params, _, output_ids in batch_update.added:
            self._held[slot] = params.extra_args[ROW], output_ids  # a list that vLLM goes on to fill
        for source, to, direction in batch_update.moved:
            moved, replaced = self._held.pop(source, None), self._held.pop(to, None)
            if moved is not None:
                self._held[to] = moved
            if replaced is not None and direction.name == "SWAP":
                self._held[source] = replaced

    def rows_and_positions(self, num_slots: int) -> tuple[list[int], list[int]]:
        """Row of each slot, and the response position of the token that it gets next."""
        held = [self._held[slot] for slot in range(num_slots)]
        return [row for row, _ in held], [len(output_ids) for _, output_ids in held]


class Processor:
    """The methods of vLLM's LogitsProcessor."""

    current_draws: Callable[[], Draws]

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:  # noqa: FBT001
        self.slots = Slots()

    def is_argmax_invariant(self) -> bool:
        """No: it decides what the largest logit is."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Called before each forward."""
        self.slots.update(batch_update)

    def apply(self, logits: Tensor) -> Tensor:
        """Called after each forward with the float32 logits of all lines of the batch."""
        rows, positions = self.slots.rows_and_positions(len(logits))
        row_S, position_S = torch.tensor([rows, positions], device=logits.device)
        return self.current_draws().choose(logits, row_S, position_S)


def processor_class(base: type, current_draws: Callable[[], Draws]) -> type:
    """A subclass of vLLM's LogitsProcessor, which takes classes and makes the instance by itself."""
    return type("RolloutProcessor", (Processor, base), {"current_draws": staticmethod(current_draws)})
