"""What a contestant is given to do, and what is read from what it left. No torch."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlhf.bench.process import Finished
from rlhf.bench.record import Sample
from rlhf.bench.workload import Lengths, Sizes, rows_of
from rlhf.plan import flops
from rlhf.plan.shapes import shape_of

Dtype = Literal["fp32", "bf16"]
Kind = Literal["sft", "long", "pairs", "ppo", "rollout"]
MICRO_BATCH = 16


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a contestant is given to do."""

    kind: Kind
    dtype: Dtype = "fp32"
    ranks: int = 1
    zero3: bool = False
    rows: int
    """Rows of one step on one rank."""
    answer: int = 0
    """Tokens of each response, in units of the full benchmark; 0: until the model stops."""
    large_vocabulary: bool = False

    @property
    def micro_batch(self) -> int:
        """Rows of one forward of an update, on one rank."""
        return min(self.rows, MICRO_BATCH)

    @property
    def actor(self) -> str:
        """The policy's folder."""
        if self.kind in ("ppo", "rollout") and not self.answer:
            return "actor_stops"
        return "actor_large" if self.large_vocabulary else "actor"

    @property
    def reward(self) -> str:
        """The reward model's folder."""
        return "reward_large" if self.large_vocabulary else "reward"

    def steps(self, sizes: Sizes) -> tuple[int, int]:
        """(warm-up steps, measured steps)."""
        if self.kind in ("ppo", "rollout"):
            return sizes.ppo_warmup_steps, sizes.ppo_steps
        return sizes.warmup_steps, sizes.steps


def read_stage(folder: Path, *, rows: int, warmup: int, finished: Finished) -> Sample:
    """Sample from a stage's metrics.jsonl; one line a step.

    Raises:
        ValueError: there are no lines after the warm-up.
    """
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [line for line in map(json.loads, text.splitlines()) if line["split"] == "train"]
    if len(lines) <= warmup:
        raise ValueError(f"{folder}/metrics.jsonl has {len(lines)} train lines, but more than {warmup} are needed.")
    kept = lines[warmup:]
    steps = [line["time/step_seconds"] for line in kept]
    # A stage leaves compiling out of its steps; what is compiled after the warm-up is no warm-up.
    compiling = sum(line.get("time/compile_seconds", 0.0) for line in kept)
    first_seconds = lines[0]["time/step_seconds"] + lines[0].get("time/compile_seconds", 0.0)
    paddings = [line["data/padding_frac"] for line in kept if "data/padding_frac" in line]
    phases = {
        name: sum(line.get(f"time/{name}_seconds", 0.0) for line in kept)
        for name in ("rollout", "score", "update", "compile", "other")
    }
    return Sample(
        wall_seconds=sum(steps) + compiling,
        cpu_seconds=sum(line["time/cpu_seconds"] for line in kept),
        steps=len(kept),
        tokens=sum(line["speed/tokens_per_second"] * s for line, s in zip(kept, steps, strict=True)),
        rows=rows * len(kept),
        padding_frac=sum(paddings) / len(paddings) if paddings else None,
        phases={name: value for name, value in phases.items() if value},
        peak_rss_bytes=finished.peak_rss_bytes,
        startup_seconds=lines[0]["time"] - first_seconds - finished.started,
        process_seconds=finished.wall_seconds,
        compile_seconds=sum(line.get("time/compile_seconds", 0.0) for line in lines),
    )


def model_flops(sizes: Sizes, work: Work, sample: Sample) -> float:
    """Model FLOPs of a sample's real tokens and rows.

    Which rows a step drew is not recorded, so a supervised step counts the file's FLOPs per token; a PPO step counts
    the rows at their mean lengths, which for ragged answers leaves a little of the attention term out.
    """
    actor = shape_of(sizes.actor(large_vocabulary=work.large_vocabulary))
    reward = shape_of(sizes.reward(large_vocabulary=work.large_vocabulary))
    if work.kind in ("ppo", "rollout"):
        prompt = _mean_prompt(rows_of(sizes)["prompts"])
        if work.kind == "rollout":  # its tokens are the response's
            return sample.rows * flops.rollout_row(actor, prompt, sample.tokens / sample.rows)
        return sample.rows * flops.ppo_row(actor, reward, prompt, sample.tokens / sample.rows - prompt)
    rows = rows_of(sizes)[work.kind]
    if work.kind == "pairs":
        total = sum(flops.preference_row(reward, row.prompt, *row.answers) for row in rows)
        tokens = sum(2 * row.prompt + sum(row.answers) for row in rows)
    else:
        total = sum(flops.sft_row(actor, row.prompt, row.answers[0]) for row in rows)
        tokens = sum(row.prompt + row.answers[0] for row in rows)
    return total * sample.tokens / tokens


def _mean_prompt(rows: Sequence[Lengths]) -> float:
    return sum(row.prompt for row in rows) / len(rows)
