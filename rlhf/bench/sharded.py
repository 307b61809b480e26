"""What ZeRO-3 takes of wide layers: the bytes that it gathers, copies and reduces, and its optimiser.

Beside what its hooks take of a layer of any width, ZeRO-3 moves every weight: into a gathered tensor that is new each
time (on a CPU every page of it is, too), its gradient into a bucket and from there into the rank's shard; and its
optimiser makes new tensors of all gradients. Measured as it happens, messages included, on models whose tensors are as
large as those of real ones: an allocator gives small ones back without a new page.
"""

import statistics
import time

from rlhf.bench.trial import (
    ATTEMPTS,
    HEAD_SIZE,
    VOCABULARY,
    WIDE,
    accumulate,
    disturbed,
    make_batch,
    make_engine,
    zero_json,
)
from rlhf.bench.workload import opt
from rlhf.distributed import all_gather_objects, barrier, device_type, synchronise, world_size
from rlhf.plan.layer import optimizer_bytes
from rlhf.plan.layout import OURS
from rlhf.plan.shapes import shape_of
from rlhf.plan.step import moved_bytes

_HIDDEN, _HIDDEN_CPU = 4096, 1024
_TOKENS = 64
"""In all: as few as leave the computing small beside what is measured."""
_ROUNDS = 7
"""Updates whose median counts; two before them do not."""


def measure_sharded(gather_layer: float) -> dict[str, float]:
    """`Measured.gather_gb_s` and `sharded_optimizer_gb_s` of all ranks. Collective.

    Args:
        gather_layer: seconds that ZeRO-3 adds to a layer of next to no width.

    Raises:
        RuntimeError: more layers took less time than few, again and again.
    """
    on_cpu = device_type() == "cpu"
    hidden, width = (_HIDDEN_CPU, 4.0) if on_cpu else (_HIDDEN, 2.0)
    for _ in range(ATTEMPTS):
        few, many = (_seconds(hidden, layers) for layers in WIDE)
        layers, weights = WIDE[1] - WIDE[0], many[0] - few[0]
        plain, sharded, update = ((b - a) for a, b in zip(few[1:], many[1:], strict=True))
        if sharded > plain > 0 and update > 0:
            break
    else:
        raise disturbed(f"{WIDE[1]} layers of width {hidden} under ZeRO-3 took less time than {WIDE[0]}")
    # Where it costs next to nothing, noise could take it all.
    added = max(sharded - plain - layers * gather_layer, 0.02 * sharded)
    share = optimizer_bytes(weights / world_size(), OURS)
    return {
        "gather_gb_s": moved_bytes(weights, weights, width, OURS) / added / 1e9,
        "sharded_optimizer_gb_s": share / update / 1e9,
    }


def _seconds(hidden: int, layers: int) -> tuple[float, float, float, float]:
    """(weights; seconds of a forward and backward pass at ZeRO-0 and at ZeRO-3, in turns; of ZeRO-3's update)."""
    config = opt(hidden, layers, hidden // HEAD_SIZE, VOCABULARY, 128)
    engines = [make_engine(config, zero_json(stage)) for stage in (0, 3)]
    batch = make_batch([_TOKENS // 4] * 4)
    passes: list[list[float]] = [[], []]
    updates: list[list[float]] = [[], []]
    for _ in range(_ROUNDS + 2):
        for engine, before, behind in zip(engines, passes, updates, strict=True):
            synchronise()
            barrier()
            start = time.perf_counter()
            accumulate(engine, batch)
            synchronise()
            middle = time.perf_counter()
            engine.step()
            synchronise()
            before.append(middle - start)
            behind.append(time.perf_counter() - middle)
    medians = [statistics.median(times[2:]) for times in (*passes, updates[1])]
    plain, sharded, update = (max(each) for each in zip(*all_gather_objects(medians), strict=True))
    return float(shape_of(config).parameters), plain, sharded, update
