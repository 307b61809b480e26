"""Learning-rate multiplier as a pure function of the step. No torch."""

import math
from typing import Literal


def lr_multiplier(
    step: int,
    *,
    num_steps: int,
    schedule: Literal["cosine", "linear", "constant"],
    warmup_frac: float,
    min_lr_frac: float = 0.0,
) -> float:
    """Factor on the peak learning rate for optimiser step `step`, counted from 0; never 0.

    With w = ceil(warmup_frac num_steps) warm-up steps the factor is (step + 1) / w while step < w, so that the first
    step already moves the weights and step w - 1 has the peak. After that it falls from 1 to min_lr_frac along a half
    cosine or a line; the position runs over (0, 1) and reaches neither end, so that every step of a schedule that ends
    at 0 still learns. Steps past num_steps keep the last step's factor.

    Args:
        step: optimiser steps taken before this one.
        num_steps: length of the schedule.
        schedule: shape after the warm-up.
        warmup_frac: share of num_steps, [0, 1).
        min_lr_frac: limit of the decay as a share of the peak, [0, 1].

    Raises:
        ValueError: step is negative or num_steps is not positive.
    """
    if step < 0 or num_steps < 1:
        raise ValueError(f"schedule needs step >= 0 and num_steps >= 1, got {step} and {num_steps}.")
    num_warmup = min(math.ceil(warmup_frac * num_steps), num_steps)
    if step < num_warmup:
        return (step + 1) / num_warmup
    if schedule == "constant":
        return 1.0
    step = min(step, num_steps - 1)
    # num_steps - num_warmup steps remain; they sit at 1/(n+1), ..., n/(n+1) of the way down.
    progress = (step - num_warmup + 1) / (num_steps - num_warmup + 1)
    share = 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1 - progress
    return min_lr_frac + (1 - min_lr_frac) * share
