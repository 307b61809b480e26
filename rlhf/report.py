"""A run's folder -> one self-contained HTML page with plots, and Markdown beside it. No torch.

Works for a pipeline's folder, for one stage's folder, and for runs that are not finished: what is missing is listed.
Everything shown is read from what the stages wrote; nothing is measured here.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import yaml

from rlhf import report_plots as plots
from rlhf.artifacts import MANIFEST, ArtifactError, Manifest, read_manifest
from rlhf.records import HEALTH, METRICS
from rlhf.report_plots import Series

STAGES = {
    "step1_sft": "Step 1: supervised fine-tuning",
    "step2_reward": "Step 2: reward model",
    "step3_ppo": "Step 3: PPO",
}
PHASES = {
    "input": "input",
    "rollout": "rollout",
    "score": "scoring",
    "update": "update",
    "eval": "evaluation",
    "startup": "start-up",
    "compile": "compiling",
    "other": "other (saving)",
}
_NUM_SAMPLES = 8


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What one stage left in its folder."""

    name: str
    folder: Path
    train: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    health: list[dict[str, Any]]
    config: dict[str, Any]
    environment: dict[str, Any]
    progress: dict[str, Any]
    result: dict[str, Any]
    histograms: dict[str, Any]
    data: dict[str, Any]
    manifest: Manifest | None
    missing: list[str]

    @property
    def title(self) -> str:
        """Heading."""
        return STAGES.get(self.name, self.name)

    @property
    def metrics(self) -> dict[str, Any]:
        """The stage's entries of summary.json; empty until it is done."""
        return dict(self.result.get("metrics", {}))

    def series(self, label: str, name: str, split: str = "train") -> list[Series]:
        """One curve of a metric as a list, or an empty list if it was never logged."""
        rows = self.train if split == "train" else self.evals
        pairs = [(row["step"], row[name]) for row in rows if name in row]
        if not any(value is not None for _, value in pairs):
            return []
        steps, values = zip(*[(step, math.nan if value is None else value) for step, value in pairs], strict=True)
        return [Series(label, steps, values, points=split == "eval")]

    def phase_seconds(self) -> dict[str, float]:
        """Seconds by phase: the result's, else the sum of the lines so far."""
        if "phase_seconds" in self.result:
            return {phase: float(self.result["phase_seconds"].get(phase, 0.0)) for phase in PHASES}
        return {phase: sum(row.get(f"time/{phase}_seconds") or 0.0 for row in self.train) for phase in PHASES}


@dataclass(frozen=True)
class Panel:
    """One plot with its heading."""

    title: str
    svg: str


@dataclass(frozen=True)
class Node:
    """One model of the lineage."""

    label: str
    detail: str
    children: list["Node"] = field(default_factory=list)


@dataclass(frozen=True)
class Pair:
    """One prompt, answered before and after."""

    prompt: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None


def write_report(run_dir: str | Path) -> Path:
    """Write report.html and report.md into a run's or a stage's folder.

    Returns:
        Path of the HTML page.

    Raises:
        FileNotFoundError: the folder is not there or holds nothing that a stage wrote.
    """
    run_dir = Path(run_dir)
    content = _content(run_dir, read_stages(run_dir))
    for suffix in ("md", "html"):
        environment = jinja2.Environment(
            autoescape=suffix == "html", trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
        )
        environment.filters.update(number=number, seconds=clock_time, cell=_markdown_cell)
        template = resources.files("rlhf").joinpath(f"report_template.{suffix}").read_text("utf-8")
        page = run_dir / f"report.{suffix}"
        page.write_text(environment.from_string(template).render(**content), encoding="utf-8")
    return page


def read_stages(run_dir: Path) -> list[Stage]:
    """The stages found in a run's folder, or the one whose own folder it is.

    Raises:
        FileNotFoundError: there is none.
    """
    if not run_dir.is_dir():
        raise FileNotFoundError(f"run folder {run_dir} does not exist. Pass the folder of `rlhf run` or of one stage.")
    if any((run_dir / name).exists() for name in (METRICS, "environment.json", "config.yaml")):
        own = _read_json(run_dir / "environment.json").get("stage") or run_dir.resolve().name
        return [read_stage(run_dir, name=str(own))]
    stages = [read_stage(run_dir / name, name=name) for name in STAGES if (run_dir / name).is_dir()]
    if not stages:
        raise FileNotFoundError(
            f"{run_dir} holds neither a stage's metrics.jsonl nor any of {', '.join(STAGES)}. Pass the folder of "
            "`rlhf run` or of one stage."
        )
    return stages


def read_stage(folder: Path, *, name: str) -> Stage:
    """Read what a stage wrote; files that are not there yet, or cut short, are listed as missing."""
    lines, missing = _read_lines(folder / METRICS), []
    manifest = None
    if (folder / "model").is_dir():
        try:
            manifest = read_manifest(folder / "model")
        except ArtifactError as error:
            missing.append(str(error))
    title = STAGES.get(name, name)
    if not lines:
        missing.append(f"{title}: no metrics.jsonl yet.")
    result = _read_json(folder / "result.json")
    progress = _read_json(folder / "progress.json")
    if not result:
        done = f" It reached step {progress['step']} of {progress['num_steps']}." if "num_steps" in progress else ""
        missing.append(f"{title}: not finished (no result.json).{done}")
    config_path = folder / "config.yaml"
    config = yaml.safe_load(config_path.read_text(encoding="utf-8")) if config_path.is_file() else None
    return Stage(
        name=name,
        folder=folder,
        train=[line for line in lines if line.get("split") == "train"],
        evals=[line for line in lines if line.get("split") == "eval"],
        samples=_read_lines(folder / "samples.jsonl"),
        health=_read_lines(folder / HEALTH),
        config=config or {},
        environment=_read_json(folder / "environment.json"),
        progress=progress,
        result=result,
        histograms=_read_json(folder / "histograms.json"),
        data=_read_json(folder / "data.json"),
        manifest=manifest,
        missing=missing,
    )


def panels(stage: Stage) -> list[Panel]:
    """Plots of one stage, those without numbers left out."""
    x_label = "PPO step" if stage.name == "step3_ppo" else "optimiser step"
    drawn = []
    for title, y_label, wanted in _CURVES.get(stage.name, ()):
        series = [one for label, name, split in wanted for one in stage.series(label, name, split)]
        if series:
            limit = stage.metrics.get("gold_max") if title == "Gold reward" else None
            drawn.append(Panel(title, plots.curve(series, x_label=x_label, y_label=y_label, limit=limit,
                                                  key=f"{stage.name} {title}")))  # fmt: skip
    margin, calibration = stage.histograms.get("margin"), stage.histograms.get("calibration")
    if margin:
        svg = plots.histogram(margin["edges"], margin["counts"], x_label="score difference, chosen - rejected",
                              y_label="held-out pairs")  # fmt: skip
        drawn.append(Panel("Margin", svg))
    if calibration:
        svg = plots.calibration(calibration["predicted"], calibration["observed"], calibration["counts"])
        drawn.append(Panel("Calibration", svg))
    return drawn


def pairs(stages: Sequence[Stage]) -> tuple[list[Pair], str, str]:
    """Prompts with the answers before and after, of the last stage that has samples, and the two columns' names."""
    for stage in reversed(stages):
        before = {s["prompt"]: s for s in stage.samples if s.get("when") == "before"}
        after = {s["prompt"]: s for s in stage.samples if s.get("when") == "after"}
        if before or after:
            names = ("SFT policy", "after PPO") if stage.name == "step3_ppo" else ("before training", "after training")
            prompts = list(dict.fromkeys([*after, *before]))[:_NUM_SAMPLES]
            return [Pair(p, before.get(p), after.get(p)) for p in prompts], *names
    return [], "", ""


def lineage(stages: Sequence[Stage]) -> list[Node]:
    """The models that no other one was made from, each with its parents below it."""
    manifests = [stage.manifest for stage in stages if stage.manifest is not None]
    parents = {m.parent_folder(p).resolve() for m in manifests for p in m.parents}
    return [_node(m, seen=frozenset()) for m in reversed(manifests) if m.folder.resolve() not in parents]


def number(value: Any) -> str:
    """A number as a person reads it: four digits, thousands apart; a dash for none."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}".replace(",", "\u202f")
    size = abs(value)
    if size >= 1e5 or size < 1e-3:
        return f"{value:.2e}"
    return f"{value:,.0f}".replace(",", "\u202f") if size >= 1000 else f"{value:.3g}" if size < 1 else f"{value:.4g}"


def clock_time(value: float | None) -> str:
    """Seconds as `42 s`, `3 min 05 s` or `2 h 07 min`."""
    if value is None:
        return "-"
    whole = round(value)
    if whole < 60:
        return f"{value:.0f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


_CURVES: dict[str, tuple[tuple[str, str, tuple[tuple[str, str, str], ...]], ...]] = {
    "step1_sft": (
        ("Loss", "nats per token", (("train", "train/loss", "train"), ("held out", "eval/loss", "eval"))),
        ("Token accuracy", "fraction", (("train", "train/token_accuracy", "train"),
                                        ("held out", "eval/token_accuracy", "eval"))),
        ("Stop rate, held out", "fraction", (("stopped", "eval/stop_frac", "eval"),)),
        ("Gradient norm", "L2 norm", (("before clipping", "train/grad_norm", "train"),)),
        ("Learning rate", "learning rate", (("lr", "train/lr", "train"),)),
        ("Speed", "real tokens per second", (("speed", "speed/tokens_per_second", "train"),)),
    ),
    "step2_reward": (
        ("Ranking loss", "nats per pair", (("train", "train/loss", "train"), ("held out", "eval/loss", "eval"))),
        ("Pair accuracy", "fraction", (("train", "train/pair_accuracy", "train"),
                                       ("held out", "eval/pair_accuracy", "eval"))),
        ("Score margin", "score", (("train", "train/margin", "train"), ("held out", "eval/margin", "eval"))),
        ("Learning rate", "learning rate", (("lr", "train/lr", "train"),)),
    ),
    "step3_ppo": (
        ("Gold reward", "gold", (("rollouts", "ppo/gold", "train"), ("held out", "eval/gold", "eval"))),
        ("Reward-model score", "score", (("rollouts", "ppo/score", "train"), ("held out", "eval/score", "eval"))),
        ("Reward of a response", "score", (("score - KL penalty", "ppo/reward", "train"),)),
        ("KL to the reference", "nats per response", (("rollouts", "ppo/kl_ref", "train"),
                                                      ("held out", "eval/kl_ref", "eval"))),
        ("KL coefficient", "coefficient", (("coefficient", "ppo/kl_coef", "train"),)),
        ("Entropy", "nats per token", (("rollouts", "ppo/entropy", "train"), ("held out", "eval/entropy", "eval"))),
        ("Response length", "tokens", (("rollouts", "ppo/response_length", "train"),
                                       ("held out", "eval/response_length", "eval"))),
        ("Stopped and distinct", "fraction of responses", (("stopped", "ppo/stop_frac", "train"),
                                                           ("distinct", "ppo/distinct_frac", "train"))),
        ("Clip fraction", "fraction of tokens", (("policy", "policy/clip_frac", "train"),
                                                 ("value", "value/clip_frac", "train"))),
        ("Explained variance of the critic", "1 - var(error) / var(return)",
         (("critic", "value/explained_variance", "train"),)),
        ("KL to the rollout policy", "nats per token", (("k3", "policy/kl_old", "train"),)),
        ("Policy loss", "per token", (("policy", "policy/loss", "train"),)),
        ("Value loss", "score^2", (("value", "value/loss", "train"),)),
        ("Learning rates", "learning rate", (("actor", "train/lr", "train"), ("critic", "critic/lr", "train"))),
        ("Speed", "real tokens per second", (("speed", "speed/tokens_per_second", "train"),)),
    ),
}  # fmt: skip


def _content(run_dir: Path, stages: list[Stage]) -> dict[str, Any]:
    environment = next((stage.environment for stage in stages if stage.environment), {})
    summary = _read_json(run_dir / "summary.json")
    missing = [text for stage in stages for text in stage.missing]
    if len(stages) > 1 or stages[0].folder != run_dir:
        missing += [f"{title}: not started." for name, title in STAGES.items() if name not in {s.name for s in stages}]
    seconds = {stage.title.split(": ")[-1]: stage.phase_seconds() for stage in stages}
    samples, before_name, after_name = pairs(stages)
    return {
        "name": summary.get("recipe") or run_dir.resolve().name,
        "facts": _facts(run_dir, stages, environment, summary),
        "byline": _byline(stages, environment),
        "titles": {stage.name: stage.title for stage in stages},
        "versions": environment.get("versions", {}),
        "highlights": _highlights(stages),
        "headline": _headline(stages),
        "missing": missing,
        "stages": [{"stage": stage, "panels": panels(stage), "data": _flatten(stage.data),
                    "config": yaml.safe_dump(stage.config, sort_keys=False) if stage.config else ""}
                   for stage in stages],
        "health": [(stage.title, event) for stage in stages for event in stage.health],
        "seconds_svg": plots.stacked_seconds(seconds, PHASES) if any(sum(s.values()) for s in seconds.values()) else "",
        "seconds": seconds,
        "phases": PHASES,
        "speed": _speed(stages),
        "samples": samples,
        "before_name": before_name,
        "after_name": after_name,
        "lineage": lineage(stages),
    }  # fmt: skip


def _facts(
    run_dir: Path, stages: Sequence[Stage], environment: Mapping[str, Any], summary: Mapping[str, Any]
) -> list[tuple[str, str]]:
    hardware = environment.get("hardware", {})
    machine = [str(hardware[key]) for key in ("cpu",) if hardware.get(key)]
    if hardware.get("cpu_count"):
        machine.append(f"{hardware['cpu_count']} cores")
    if hardware.get("memory_bytes"):
        machine.append(f"{hardware['memory_bytes'] / 2**30:.0f} GiB memory")
    done = [float(stage.result["seconds"]) for stage in stages if "seconds" in stage.result]
    facts = [
        ("Recipe", summary.get("recipe")),
        ("Folder", run_dir),
        ("Seed", summary.get("seed", environment.get("seed"))),
        ("Started", environment.get("started")),
        ("Wall time", clock_time(sum(done)) if done else None),
        ("Accelerator", f"{hardware['accelerator']}" if hardware.get("accelerator") else None),
        ("Machine", ", ".join(machine)),
        ("Ranks", environment.get("world_size")),
        ("Git commit", environment.get("git_commit")),
    ]
    facts += [(f"Command, {s.name}", s.environment.get("command")) for s in stages]
    return [(label, str(value)) for label, value in facts if value not in (None, "")]


def _byline(stages: Sequence[Stage], environment: Mapping[str, Any]) -> list[str]:
    """The run in one line, under its name."""
    done = [float(stage.result["seconds"]) for stage in stages if "seconds" in stage.result]
    ranks = environment.get("world_size")
    words = [
        " + ".join(stage.title.split(": ")[-1] for stage in stages),
        f"seed {environment['seed']}" if "seed" in environment else "",
        f"{ranks} rank{'s' if ranks != 1 else ''}" if ranks else "",
        clock_time(sum(done)) if done else "",
        f"commit {environment['git_commit'][:10]}" if environment.get("git_commit") else "",
    ]
    return [word for word in words if word]


def _first_and_last(stage: Stage, name: str) -> tuple[Any, Any]:
    values = [row[name] for row in stage.evals if row.get(name) is not None]
    return (values[0], values[-1]) if values else (None, None)


def _numbers(stage: Stage) -> dict[str, Any]:
    """Result metrics; before there are any, the first and last evaluation under the same names."""
    found: dict[str, Any] = {}
    first_last = {
        "step1_sft": (("eval/loss", "eval_loss_before", "eval_loss_after"), ("eval/stop_frac", "", "stop_frac")),
        "step2_reward": tuple((f"eval/{n}", "", n) for n in ("pair_accuracy", "tie_frac", "calibration_error",
                                                             "length_correlation")),
        "step3_ppo": (("eval/gold", "gold_sft", "gold_ppo"), ("eval/score", "score_sft", "score_ppo")),
    }  # fmt: skip
    for name, before, after in first_last.get(stage.name, ()):
        found[before], found[after] = _first_and_last(stage, name)
    return {**found, **stage.metrics}


def _arrow(numbers: Mapping[str, Any], before: str, after: str) -> str:
    return f"{number(numbers.get(before))} \u2192 {number(numbers.get(after))}"


def _headline(stages: Sequence[Stage]) -> list[tuple[str, str, str, str]]:
    """Rows of stage, what, value, and what that means."""
    rows = []
    for stage in stages:
        n = _numbers(stage)
        if stage.name == "step1_sft":
            rows += [
                (stage.name, "Held-out loss", _arrow(n, "eval_loss_before", "eval_loss_after"),
                 "nats per target token, before and after"),
                (stage.name, "Stop rate", number(n.get("stop_frac")), "held-out answers that end by themselves"),
            ]  # fmt: skip
        elif stage.name == "step2_reward":
            rows += [
                (stage.name, "Pair accuracy", number(n.get("pair_accuracy")), "held-out pairs, ties left out"),
                (stage.name, "Ties", number(n.get("tie_frac")), "share of held-out pairs"),
                (stage.name, "Calibration error", number(n.get("calibration_error")),
                 "mean gap between predicted and observed share"),
                (stage.name, "Length correlation", number(n.get("length_correlation")),
                 "score with response length; near 0: length is not what is rewarded"),
            ]  # fmt: skip
        elif stage.name == "step3_ppo":
            maximum = f", of at most {number(n['gold_max'])}" if n.get("gold_max") is not None else ""
            rows += [
                (stage.name, "Gold reward", _arrow(n, "gold_sft", "gold_ppo"),
                 f"SFT policy and after PPO{maximum}; never trained on"),
                (stage.name, "Reward-model score", _arrow(n, "score_sft", "score_ppo"), "SFT policy and after PPO"),
                (stage.name, "KL to the reference", number(n.get("kl")), "nats per response"),
                (stage.name, "Entropy", number(n.get("entropy")), "nats per token"),
                (stage.name, "Distinct answers", number(n.get("distinct_frac")), "share; a collapse would show here"),
                (stage.name, "Response length", number(n.get("response_length")), "tokens, stop token included"),
            ]  # fmt: skip
    return [row for row in rows if row[2].replace(" \u2192 ", "").strip("-")]


def _highlights(stages: Sequence[Stage]) -> list[dict[str, Any]]:
    """The one number of each stage, large; `share` draws a bar where a maximum is known."""
    cards: list[dict[str, Any]] = []
    for stage in stages:
        n = _numbers(stage)
        if stage.name == "step1_sft" and n.get("eval_loss_after") is not None:
            cards.append({"label": "SFT held-out loss", "before": n["eval_loss_before"], "value": n["eval_loss_after"],
                          "unit": "nats per token", "bars": []})  # fmt: skip
        elif stage.name == "step2_reward" and n.get("pair_accuracy") is not None:
            accuracy = float(n["pair_accuracy"])
            cards.append({"label": "Reward-model pair accuracy", "before": None, "value": accuracy,
                          "unit": "of held-out pairs", "bars": [("", 100 * accuracy, True)]})  # fmt: skip
        elif stage.name == "step3_ppo" and n.get("gold_ppo") is not None:
            unit, bars = "gold", []
            if n.get("gold_max"):
                unit = f"of at most {number(n['gold_max'])}"
                bars = [
                    (label, 100 * max(0.0, min(1.0, n[key] / n["gold_max"])), key == "gold_ppo")
                    for label, key in (("SFT", "gold_sft"), ("PPO", "gold_ppo"))
                    if n.get(key) is not None
                ]
            cards.append({"label": "Gold reward, SFT to PPO", "before": n.get("gold_sft"), "value": n["gold_ppo"],
                          "unit": unit, "bars": bars})  # fmt: skip
    return cards


def _speed(stages: Sequence[Stage]) -> list[dict[str, Any]]:
    rows = []
    for stage in stages:
        peaks = [row["memory/peak_bytes"] for row in stage.train if row.get("memory/peak_bytes")]
        rows.append({
            "title": stage.title,
            "status": stage.result.get("status", "unfinished"),
            "seconds": stage.result.get("seconds"),
            "tokens": stage.result.get("num_tokens"),
            "tokens_per_second": stage.result.get("tokens_per_second", stage.progress.get("tokens_per_second")),
            "peak_gib": max(peaks) / 2**30 if peaks else None,
            "ranks": stage.result.get("world_size", stage.environment.get("world_size")),
        })  # fmt: skip
    return rows


def _node(manifest: Manifest, *, seen: frozenset[str]) -> Node:
    children = []
    for parent in manifest.parents:
        folder = manifest.parent_folder(parent)
        if not (folder / MANIFEST).is_file():
            name = parent.path if not parent.digest else f"{parent.path} ({parent.digest[:12]})"
            children.append(Node(name, "no manifest: not made by a stage, or gone"))
        elif parent.digest not in seen:
            below = read_manifest(folder)
            node = _node(below, seen=seen | {manifest.digest})
            stale = "" if below.digest == parent.digest else f"; replaced since: was {parent.digest[:12]}"
            children.append(Node(node.label, node.detail + stale, node.children))
    size = sum(entry.bytes for entry in manifest.files.values()) / 2**20
    label = f"{manifest.folder.parent.name}/{manifest.folder.name}"
    detail = f"{manifest.kind}, {manifest.digest[:12]}, {size:,.1f} MiB, seed {manifest.seed}"
    return Node(label, detail, children)


def _flatten(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Leaves of nested counts with their path as one label."""
    rows: list[tuple[str, Any]] = []
    for key, item in value.items():
        label = f"{prefix} / {key}" if prefix else str(key)
        if isinstance(item, Mapping):
            rows += _flatten(item, label)
        elif isinstance(item, list | tuple):
            rows.append((label, ", ".join(str(one) for one in item)))
        else:
            rows.append((label, item))
    return rows


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return value if isinstance(value, dict) else {}


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Whole JSON lines of a file; the last one of a run that goes on may be cut short."""
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def _markdown_cell(value: Any) -> str:
    """Text for one Markdown table cell: no markup of its own, no line breaks."""
    text = str(value).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "\\`")
    return text.replace("\n", " / ").strip()
