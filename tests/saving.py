"""A run with nothing in it, so that states can be saved and resumed without a stage."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.artifacts import Contract
from rlhf.checkpoint import Checkpoints
from rlhf.config import RunConfig
from rlhf.health import Health, Verdict
from rlhf.health_config import HealthConfig, NonFiniteConfig

CONTRACT = Contract(tokenizer="t", template_name="plain", template_fingerprint="f", stop_token_id=2)


class NoLanguage:
    """A tokenizer that is one empty file."""

    contract = CONTRACT

    def save(self, folder: Path) -> None:
        (folder / "tokenizer.json").touch()


class Counter:
    """A part of a run with a value."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class TinyRun:
    """What checkpoints use of a run."""

    def __init__(self, folder: Path | str, *, num_steps: int = 10, stage: str = "step1_sft", **config: Any) -> None:
        self.folder = Path(folder)
        self.config = RunConfig(out_dir=str(folder), **config)
        self.stage = stage
        self.num_steps = num_steps
        self.first_step = 0
        self.values: dict[str, float] = {}
        self.health = Health(HealthConfig(non_finite=NonFiniteConfig(action="rollback")))
        self.windows: list[Any] = []
        self.stopped = False

    def steps(self, batches: Iterable[Any]) -> Generator[tuple[int, Any], None, None]:
        yield from enumerate(batches, start=self.first_step + 1)

    def state_dict(self, step: int) -> dict[str, Any]:
        return {"step": step, "metrics": dict(self.values), "health": self.health.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.first_step = state["step"]

    def window_state(self) -> dict[str, Any]:
        return {}

    def load_window(self, windows: Sequence[Mapping[str, Any]]) -> None:
        self.windows = list(windows)

    def stop(self) -> None:
        self.stopped = True

    def observe_failure(self, step: int, text: str) -> None:
        self.health.not_finite(step, text)

    def roll_back(self, state: Mapping[str, Any], verdict: Verdict, name: str) -> None:
        self.load_state_dict(state)
        self.health.roll_back(state["health"])

    def give_up(self, step: int, detector: str, text: str) -> None:
        self.stopped = True


def checkpoints(run: TinyRun, engines: Mapping[str, Any], **parts: Any) -> Checkpoints:
    return Checkpoints(run, engines, parts, language=NoLanguage())


def save(folder: Path | str, engines: Mapping[str, Any], *, step: int, **config: Any) -> Path:
    """Write the state after a step; returns its folder."""
    written = checkpoints(TinyRun(folder, **config), engines)
    written.save(step)
    written.wait()
    return Path(folder) / "state" / f"step_{step:08d}"


def resume(folder: Path | str, engines: Mapping[str, Any], **config: Any) -> TinyRun:
    run = TinyRun(folder, resume=True, **config)
    checkpoints(run, engines).resume()
    return run
