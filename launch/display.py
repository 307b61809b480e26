"""What a person sees while a run goes on and when it has ended. No torch."""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

_LINE_SECONDS = 15.0
_REDRAW_SECONDS = 0.5

KEY_METRICS = {
    "step1_sft": (
        ("eval loss", "eval_loss_before", "eval_loss_after"),
        ("token accuracy", "token_accuracy_before", "token_accuracy_after"),
        ("stop", None, "stop_frac"),
    ),
    "step2_reward": (
        ("pair accuracy", "pair_accuracy_before", "pair_accuracy"),
        ("ties", None, "tie_frac"),
        ("calibration error", None, "calibration_error"),
        ("length correlation", None, "length_correlation"),
    ),
    "step3_ppo": (
        ("gold", "gold_sft", "gold_ppo"),
        ("score", "score_sft", "score_ppo"),
        ("KL", None, "kl"),
        ("entropy", None, "entropy"),
        ("distinct", None, "distinct_frac"),
        ("length", None, "response_length"),
    ),
}
"""Stage -> (label, metric before, metric after) of summary.json, for the closing table."""


class StageProgress:
    """Live line of one stage, read from its progress.json; plain lines now and then when stdout is no terminal."""

    def __init__(self, console: Console, stage: str, path: Path) -> None:
        self._console, self._stage, self._path = console, stage, path
        self._started = self._last_line = time.monotonic()
        self._not_before = time.time()
        self._last_look = 0.0
        self._shown = ""
        self._live = Live(self._render({}), console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> "StageProgress":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def tick(self) -> None:
        """Show what has changed; cheap enough to be called ten times a second."""
        now = time.monotonic()
        if now - self._last_look < _REDRAW_SECONDS:
            return
        self._last_look = now
        progress = read_progress(self._path, not_before=self._not_before)
        if self._console.is_terminal:
            self._live.update(self._render(progress), refresh=True)
            return
        text = progress_text(progress)
        if text and text != self._shown and (not self._shown or now - self._last_line >= _LINE_SECONDS):
            self._console.print(Text(f"{self._stage}  {_duration(now - self._started)}  {text}"), soft_wrap=True)
            self._shown, self._last_line = text, now

    def _render(self, progress: Mapping[str, Any]) -> Text:
        elapsed = _duration(time.monotonic() - self._started)
        step, num_steps = progress.get("step"), progress.get("num_steps")
        bar = ""
        if isinstance(step, int) and isinstance(num_steps, int) and num_steps > 0:
            filled = min(24, round(24 * step / num_steps))
            bar = f"  [{'#' * filled}{'.' * (24 - filled)}]"
        return Text(f"{self._stage}  {elapsed}{bar}  {progress_text(progress) or 'starting'}", overflow="ellipsis")


def read_progress(path: Path, *, not_before: float = 0.0) -> dict[str, Any]:
    """progress.json of a stage; empty while there is none, or only one from before `not_before` (unix time)."""
    try:
        # File times lag behind the clock by up to one tick of the kernel.
        if path.stat().st_mtime < not_before - 0.1:
            return {}
        progress = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return progress if isinstance(progress, dict) else {}


def progress_text(progress: Mapping[str, Any]) -> str:
    """Step, loss or score, tokens per second, time left; of what is there."""
    if not progress:
        return ""
    parts = []
    if "step" in progress:
        parts.append(f"step {progress['step']}/{progress.get('num_steps', '?')}")
    parts += [f"{name} {progress[name]:.4g}" for name in ("loss", "score") if _is_number(progress.get(name))]
    if _is_number(progress.get("tokens_per_second")):
        parts.append(f"{progress['tokens_per_second']:,.0f} tokens/s")
    if _is_number(progress.get("eta_seconds")) and progress.get("phase") != "done":
        parts.append(f"{_duration(progress['eta_seconds'])} left")
    if isinstance(progress.get("firing"), list) and progress["firing"]:
        parts.append(f"unhealthy: {', '.join(map(str, progress['firing']))}")
    if progress.get("phase"):
        parts.append(f"({progress['phase']})")
    return "  ".join(parts)


def closing_table(summary: Mapping[str, Any]) -> Table:
    """Stage, status, seconds, tokens per second and key metrics of a summary.json."""
    table = Table(title=f"{summary['recipe']}, seed {summary['seed']}", title_justify="left")
    table.add_column("stage")
    table.add_column("status")
    table.add_column("seconds", justify="right")
    table.add_column("tokens/s", justify="right")
    table.add_column("metrics", overflow="fold")
    for stage, entry in summary["stages"].items():
        metrics = entry["metrics"]
        shown = []
        for label, before, after in KEY_METRICS.get(stage, ()):
            if not _is_number(metrics.get(after)):
                continue
            start = f"{metrics[before]:.3g} -> " if before and _is_number(metrics.get(before)) else ""
            top = f" (of {metrics['gold_max']:.3g})" if label == "gold" and _is_number(metrics.get("gold_max")) else ""
            shown.append(f"{label} {start}{metrics[after]:.3g}{top}")
        table.add_row(
            stage, entry["status"], _number(entry["wall_seconds"], ".1f"), _number(entry["tokens_per_second"], ",.0f"),
            ", ".join(shown),
        )  # fmt: skip
    return table


def make_console() -> Console:
    """Console on stdout; lines are not cut where it is no terminal, so that paths and commands can be copied."""
    return Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 160)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any, form: str) -> str:
    return format(value, form) if _is_number(value) else "-"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
