"""What is measured: the registry of names, the accumulator that means are taken in, and the sinks they are written to.

A mean is a sum over a count, both over all ranks and micro-batches, divided once (never a mean of means). The record of
a run is `metrics.jsonl`; `docs/metrics.md` is written from METRICS by `python -m rlhf.metrics`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from rlhf import distributed, records

Number = int | float
Stat = tuple[Tensor | Number, Tensor | Number]
Stats = dict[str, Stat]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One entry of the registry."""

    unit: str
    """Unit; "" for a plain number."""
    direction: Literal["up", "down", "none"]
    """Where better is: up, down, or neither."""
    definition: str
    """One line."""
    per_source: bool = False
    """Also logged as `<name>/<source>`, over the rows of one data source."""


def _metric(
    unit: str, direction: Literal["up", "down", "none"], definition: str, *, per_source: bool = False
) -> Metric:
    return Metric(unit=unit, direction=direction, definition=definition, per_source=per_source)


METRICS: dict[str, Metric] = {
    # Supervised stages, training.
    "train/loss": _metric("nats", "down", "Training loss: per target token in step 1, per preference pair in step 2."),
    "train/lr": _metric("", "none", "Learning rate of the step (the actor's in step 3)."),
    "train/grad_norm": _metric("", "none", "Global L2 norm of the gradient before clipping (the actor's in step 3)."),
    "train/token_accuracy": _metric("fraction", "up", "Target tokens that are the model's most likely token."),
    "train/pair_accuracy": _metric("fraction", "up", "Pairs whose chosen response scores above the rejected one."),
    "train/margin": _metric("score", "up", "Mean score of the chosen response minus that of the rejected one."),
    # Where the time goes. Seconds are wall seconds of the slowest rank.
    "time/step_seconds": _metric(
        "s", "down", "Wall seconds of one step, evaluation and compiling excluded; mean since the last line."
    ),
    "time/input_seconds": _metric("s", "down", "Seconds of waiting for the rows of a step since the last line."),
    "time/rollout_seconds": _metric("s", "down", "Seconds of generating responses since the last line."),
    "time/score_seconds": _metric("s", "down", "Seconds of scoring responses (four models) since the last line."),
    "time/update_seconds": _metric("s", "down", "Seconds of forward, backward and optimiser since the last line."),
    "time/eval_seconds": _metric("s", "down", "Seconds of evaluation since the last line."),
    "time/compile_seconds": _metric(
        "s", "down", "Seconds of torch.compile's compiling since the last line, in none of the other phases."
    ),
    "time/other_seconds": _metric("s", "down", "Seconds since the last line outside the other phases."),
    "time/cpu_seconds": _metric(
        "s", "down", "Processor seconds of all ranks' processes since the last line, evaluation excluded."
    ),
    "speed/tokens_per_second": _metric(
        "tokens/s",
        "up",
        "Real tokens of all ranks (no padding) per wall second of training: no evaluation, start-up or compiling.",
    ),
    "speed/model_flops_per_second": _metric(
        "FLOP/s",
        "up",
        "FLOPs that the algorithm needs for the real tokens, per wall second of training and rank.",
    ),
    "speed/bubble_frac": _metric(
        "fraction",
        "down",
        "Part of the time of a step's micro-batches in which a pipeline's rank computes nothing, mean of the ranks.",
    ),
    "memory/weights_bytes": _metric(
        "bytes", "down", "Weights of all models on the rank that holds most, without the optimiser's own copy."
    ),
    "memory/gradients_bytes": _metric(
        "bytes", "down", "Gradients of the trained models at the update, on the rank that holds most."
    ),
    "memory/optimizer_bytes": _metric(
        "bytes", "down", "What optimisers keep, their copies of the weights included, on the rank that holds most."
    ),
    "memory/peak_bytes": _metric(
        "bytes", "down", "Most memory so far on one rank: the accelerator's, or the process's resident set without one."
    ),
    "memory/rollout_planned_bytes": _metric(
        "bytes", "none", "Memory of one rank that the first rollout was planned to take beside what was there before."
    ),
    "memory/rollout_peak_bytes": _metric(
        "bytes",
        "down",
        "Memory that the first rollout took at its peak on the rank that took most: of the accelerator, or the rise of "
        "the process's resident set without one.",
    ),
    "data/padding_frac": _metric("fraction", "down", "Positions of the micro-batches that hold padding."),
    "speed/micro_batch_tokens": _metric("tokens", "none", "Real tokens of a micro-batch of the update, mean."),
    "speed/columns_per_token": _metric(
        "",
        "down",
        "Columns that go through the model in the update for each real token: less where prompts are shared.",
    ),
    "speed/target_frac": _metric("fraction", "none", "Real tokens of step 1 that have a loss."),
    # Held-out rows.
    "eval/loss": _metric("nats", "down", "Held-out loss, per target token (step 1) or pair (step 2).", per_source=True),
    "eval/perplexity": _metric("", "down", "exp of the token-weighted held-out loss, taken once.", per_source=True),
    "eval/token_accuracy": _metric(
        "fraction", "up", "Held-out target tokens that are the model's most likely token.", per_source=True
    ),
    "eval/stop_frac": _metric("fraction", "up", "Answers to held-out prompts that end with a stop token or string."),
    "eval/pair_accuracy": _metric(
        "fraction", "up", "Held-out pairs (ties left out) whose chosen response scores higher.", per_source=True
    ),
    "eval/tie_frac": _metric(
        "fraction", "none", "Held-out pairs of equal rank, or made identical by cutting.", per_source=True
    ),
    "eval/calibration_error": _metric(
        "fraction", "down", "Mean gap between sigmoid(margin) and the observed share, weighted by bin.", per_source=True
    ),
    "eval/length_correlation": _metric(
        "", "none", "Pearson correlation of score with response length in tokens.", per_source=True
    ),
    "eval/margin": _metric("score", "up", "Mean held-out score difference, chosen minus rejected.", per_source=True),
    "eval/score_low": _metric("score", "none", "Lowest score of a held-out response of step 2."),
    "eval/score_high": _metric("score", "none", "Highest score of a held-out response of step 2."),
    "eval/gold": _metric("gold", "up", "Mean of the gold rule on answers to held-out prompts."),
    "eval/score": _metric("score", "up", "Mean reward-model score of answers to held-out prompts."),
    "eval/distinct_frac": _metric("fraction", "up", "Different answers as a share of all answers to held-out prompts."),
    "eval/repeat_frac": _metric(
        "fraction", "down", "4-grams of tokens that stood in the same answer before, of those of all answers."
    ),
    "eval/response_length": _metric(
        "tokens", "none", "Mean length of answers to held-out prompts, stop token included."
    ),
    "eval/entropy": _metric("nats", "none", "Mean entropy of the sampling distribution per token of held-out answers."),
    "eval/kl_ref": _metric("nats", "down", "KL to the reference per held-out answer (k1, summed over its tokens)."),
    # Rollouts of step 3.
    "ppo/score": _metric("score", "up", "Mean score of the step's responses, before clipping and penalties."),
    "ppo/reward": _metric("score", "up", "Mean sum of per-token rewards of a response: shaped score minus KL penalty."),
    "ppo/kl_ref": _metric("nats", "down", "KL to the reference per response (k1, summed over its tokens)."),
    "ppo/kl_coef": _metric("", "none", "Weight of the KL penalty."),
    "ppo/entropy": _metric(
        "nats", "none", "Mean entropy of the sampling distribution per response token, over the update's minibatches."
    ),
    "ppo/response_length": _metric("tokens", "none", "Mean response length, stop token included."),
    "ppo/stop_frac": _metric("fraction", "up", "Responses that end with a stop token or string."),
    "ppo/distinct_frac": _metric("fraction", "up", "Different responses as a share of the step's responses."),
    "ppo/repeat_frac": _metric(
        "fraction", "down", "4-grams of tokens that stood in the same response before, of those of all responses."
    ),
    "ppo/model_score": _metric("score", "up", "Mean score of the reward model alone, without a rule and weights."),
    "ppo/logprob_gap": _metric(
        "nats",
        "down",
        "Mean difference per response token of log-probs from decoding and from the update's forward, same weights.",
    ),
    "ppo/flat_groups_frac": _metric(
        "fraction", "down", "Prompts of the step whose responses all got one shaped score, of all that were drawn."
    ),
    "ppo/draws": _metric("", "down", "Rollouts of the step: 1, and one for each time that prompts were made up for."),
    "ppo/trained_groups": _metric("", "up", "Prompts of the step whose responses are trained on."),
    "ppo/gold": _metric("gold", "up", "Mean of the gold rule on the step's responses; never trained on."),
    "speed/decode_tokens_per_second": _metric(
        "tokens/s", "up", "Response tokens of all ranks per second of the rank that decoded longest."
    ),
    "speed/decode_occupancy": _metric("fraction", "up", "Slots that drew a token, mean over the decoders' forwards."),
    "speed/decode_tail_frac": _metric("fraction", "down", "Decoders' forwards with less than half of the slots busy."),
    "speed/decode_prefill_frac": _metric("fraction", "none", "Share of decoding seconds that went into prompts."),
    "speed/decode_idle_frac": _metric(
        "fraction", "down", "Share of decoding seconds in which a rank waited for others."
    ),
    "policy/loss": _metric(
        "", "none", "Clipped policy loss, over tokens or responses as the algorithm takes its mean; no KL, no entropy."
    ),
    "policy/kl_ref": _metric(
        "nats", "down", "KL to the reference per response token in the loss, by the estimator of the loss."
    ),
    "policy/clip_frac": _metric(
        "fraction", "none", "Response tokens whose policy ratio is clipped and has no gradient."
    ),
    "policy/kl_old": _metric("nats", "down", "KL to the rollout policy per response token (k3)."),
    "policy/skipped_frac": _metric(
        "fraction", "none", "Minibatches left out because policy/kl_old was over the target."
    ),
    "value/loss": _metric("score^2", "down", "Clipped value loss per response token."),
    "value/clip_frac": _metric("fraction", "none", "Response tokens whose value is outside the clipping interval."),
    "value/explained_variance": _metric(
        "", "up", "1 - var(return - value) / var(return), rollout values; 1 is perfect."
    ),
    "critic/lr": _metric("", "none", "Learning rate of the critic."),
    "critic/grad_norm": _metric("", "none", "Global L2 norm of the critic's gradient before clipping."),
}
"""Every name that may be logged."""


def lookup(name: str) -> Metric:
    """Entry of a logged name, `<name>/<source>` included.

    Raises:
        ValueError: the name is not registered.
    """
    if name in METRICS:
        return METRICS[name]
    group_and_name = "/".join(name.split("/", 2)[:2])
    entry = METRICS.get(group_and_name)
    if entry is not None and entry.per_source and name[len(group_and_name) + 1 :]:
        return entry
    raise ValueError(f"metric {name!r} is not registered. Use a name of METRICS in rlhf/metrics.py, or add it there.")


@dataclass(frozen=True)
class Reduced:
    """What one collective brought together; equal on all ranks."""

    means: dict[str, float]
    """Sum / count of every name that was added on any rank with a count above 0, and the values that were set."""
    totals: dict[str, float]
    """Sums over ranks."""
    maxima: dict[str, float]
    """Largest value of any rank."""


class Accumulator:
    """(sum, count) pairs that stay on their device until `reduce` adds them over ranks in one collective.

    The layout of the collective is the registry (and `source_names`), not what a rank happened to add, so ranks that
    added different names cannot mix their numbers up.
    """

    def __init__(self, source_names: Iterable[str] = ()) -> None:
        sources = list(source_names)
        self._names = [*METRICS, *(f"{name}/{s}" for name, m in METRICS.items() if m.per_source for s in sources)]
        self._index = {name: i for i, name in enumerate(self._names)}
        self._stats: dict[str, Stat] = {}
        self._values: dict[str, Tensor | Number] = {}

    def add(self, stats: Mapping[str, Stat]) -> None:
        """Add local sums and counts; no synchronisation, gradients are cut.

        Raises:
            ValueError: a name is not registered.
        """
        for name, (value, count) in stats.items():
            self._check(name)
            old_value, old_count = self._stats.get(name, (0.0, 0.0))
            self._stats[name] = (old_value + _wide(value), old_count + _wide(count))

    def set(self, values: Mapping[str, Tensor | Number]) -> None:
        """Keep values that are equal on all ranks, such as a learning rate; the last one before `reduce` counts."""
        for name, value in values.items():
            self._check(name)
            self._values[name] = value.detach() if isinstance(value, Tensor) else value

    def reduce(
        self, *, totals: Mapping[str, Tensor | Number] | None = None, maxima: Mapping[str, float] | None = None
    ) -> Reduced:
        """Means over all ranks since the last call, with one collective; starts the next window.

        Args:
            totals: local numbers to add over ranks; the same keys on every rank.
            maxima: local numbers to take the largest of; the same keys on every rank.
        """
        totals, maxima = totals or {}, maxima or {}
        num, world, rank = len(self._names), distributed.world_size(), distributed.rank()
        # A sum gives maxima too, when each rank fills its own slots and leaves the others' 0.
        slots = [0.0] * (world * len(maxima))
        slots[rank * len(maxima) : (rank + 1) * len(maxima)] = list(maxima.values())
        vector = torch.tensor([0.0] * (2 * num + len(totals)) + slots, dtype=_dtype(distributed.device()))
        vector = vector.to(distributed.device())
        for name, pair in self._stats.items():
            for offset, number in zip((0, num), pair, strict=True):
                vector[self._index[name] + offset] = number
        for i, number in enumerate(totals.values()):
            vector[2 * num + i] = number
        numbers = distributed.all_sum(vector).tolist()
        means = {name: numbers[i] / numbers[num + i] for i, name in enumerate(self._names) if numbers[num + i] != 0}
        means.update({name: float(value) for name, value in self._values.items()})
        tail = numbers[2 * num + len(totals) :]
        self._stats, self._values = {}, {}
        return Reduced(
            means=means,
            totals=dict(zip(totals, numbers[2 * num :], strict=False)),
            maxima={name: max(tail[i :: len(maxima)]) for i, name in enumerate(maxima)},
        )

    def state_dict(self) -> dict[str, Any]:
        """What was added and set since the last `reduce`, on this rank, as JSON; the window stays open."""

        def plain(value: Tensor | Number) -> float | str:
            number = float(value)
            return number if math.isfinite(number) else str(number)

        return {
            "stats": {name: [plain(number) for number in pair] for name, pair in self._stats.items()},
            "values": {name: plain(value) for name, value in self._values.items()},
        }

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Open the window where `state_dict` left it, of one rank or of several together."""
        self._stats, self._values = {}, {}
        for state in states:
            self.add({name: (float(value), float(count)) for name, (value, count) in state["stats"].items()})
            self.set({name: float(value) for name, value in state["values"].items()})

    def _check(self, name: str) -> None:
        if name not in self._index:
            lookup(name)
            raise ValueError(f"metric {name!r} is of a source that this accumulator was not given. Pass source_names.")


def _dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no float64


def _wide(value: Tensor | Number) -> Tensor | Number:
    """Detached and in the type that sums are kept in: bf16 stops counting at 256."""
    return value.detach().to(_dtype(value.device)) if isinstance(value, Tensor) else value


class Sink(Protocol):
    """Where lines go; only rank 0 has any."""

    def write(self, step: int, split: str, values: Mapping[str, float], *, time: float) -> None:
        """Write the values of one step."""

    def close(self) -> None:
        """Flush and let go."""


class JsonlSink:
    """`metrics.jsonl`: one JSON object a line, complete after each write."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, step: int, split: str, values: Mapping[str, float], *, time: float) -> None:
        """Append one line; a value that is not finite is null, and `notes` says what it was."""
        line: dict[str, Any] = {"step": step, "split": split, "time": round(time, 3)}
        finite, notes = split_finite(values)
        line.update(finite)
        if notes:
            line["notes"] = notes
        records.append(self.path, line)

    def close(self) -> None:
        """Nothing is kept open."""


class TensorBoardSink:
    """TensorBoard event files; evaluation values carry their `eval/` group already."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  optional
        except ImportError as error:
            raise ImportError(
                f"run.tensorboard is true, but {error}. pip install tensorboard, or set it false."
            ) from error
        self._writer = SummaryWriter(log_dir=str(folder))

    def write(self, step: int, split: str, values: Mapping[str, float], *, time: float) -> None:
        """Add one scalar for each value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=time)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandbSink:
    """A Weights & Biases run; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, folder: Path, *, project: str, name: str, config: Mapping[str, Any]) -> None:
        try:
            import wandb  # noqa: PLC0415  optional
        except ImportError as error:
            raise ImportError(
                f"run.wandb_project is {project!r}, but {error}. pip install wandb, or set it null."
            ) from error
        self._run = wandb.init(project=project, name=name, dir=str(folder), config=dict(config))
        # Evaluation and training lines share steps, and W&B's own counter only goes up once for each call.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, split: str, values: Mapping[str, float], *, time: float) -> None:
        """Log the values against their own step."""
        self._run.log({**values, "step": step})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def split_finite(values: Mapping[str, float]) -> tuple[dict[str, float | None], dict[str, str]]:
    """JSON-ready values with null for what is not finite, and notes that say what that was."""
    finite: dict[str, float | None] = {}
    notes: dict[str, str] = {}
    for name, value in values.items():
        if math.isfinite(value):
            finite[name] = value
        else:
            finite[name] = None
            notes[name] = str(float(value))
    return finite, notes


def markdown() -> str:
    """Text of `docs/metrics.md`."""
    better = {"up": "higher", "down": "lower", "none": "-"}
    lines = [
        "# Metrics",
        "",
        "Written from `METRICS` in `rlhf/metrics.py` by `python -m rlhf.metrics > docs/metrics.md`; edit the registry.",
        "",
        "`metrics.jsonl` in a stage's folder holds one JSON object a line: `step` (0: before training), `split`",
        "(`train` or `eval`), `time` (Unix seconds), then the names below. A mean is one sum over one count, over all",
        "ranks and micro-batches since the last line. A value that does not exist is left out; one that is not finite",
        "is `null`, and `notes` says whether it was `nan`, `inf` or `-inf`. `<source>` is the name of a data source.",
        "",
        "| Name | Unit | Better | Definition |",
        "|---|---|---|---|",
    ]
    for name, metric in METRICS.items():
        shown = f"`{name}`" + (f", `{name}/<source>`" if metric.per_source else "")
        lines.append(f"| {shown} | {metric.unit or '-'} | {better[metric.direction]} | {metric.definition} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    import sys

    sys.stdout.write(markdown())
