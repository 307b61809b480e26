"""`rlhf chaos`: kill a pipeline at random moments, resume it, and compare it with one that was left alone. No torch.

For each ZeRO stage the recipe runs once uninterrupted and once under fire: a rank, DeepSpeed's launcher, its front end
or `rlhf run` itself gets SIGKILL, during start-up, at a random instant of a random step or inside a save; then the same
command runs with --resume. Each stage's `metrics.jsonl` (but for clocks and memory) and final weights must come out
equal to the bit. Moments are drawn from a seed. CPU recipes only: elsewhere additions have no fixed order.
"""

import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.display import read_progress
from launch.plan import PlanError, RunOptions, make_plan
from launch.recipe import FOLDERS, Stage
from launch.record import read_result
from launch.victims import MARK, Victim, end_process, find, wait_for_end
from rlhf import artifacts, ds_config, states
from rlhf.sections import read_page, write_section

BEGIN = "<!-- rlhf chaos: begin -->"
END = "<!-- rlhf chaos: end -->"
TARGETS = ("rank", "launcher", "front end", "pipeline")
_CLOCKS = ("time", "speed/", "memory/")
_POLL_SECONDS = 0.01
_END_SECONDS = 120.0
"""All processes of a killed run have to be gone by then."""
QUICK = {
    "sft": ("--sft.max_steps=8", "--sft.eval.max_rows=32", "--sft.eval.generate_rows=8", "--sft.run.log_every=3"),
    "reward": ("--reward.max_steps=8", "--reward.eval.max_rows=32", "--reward.normalise.rows=16"),
    "ppo": ("--ppo.max_steps=4", "--ppo.eval.generate_rows=8", "--ppo.rollout.prompts_per_step=16",
            "--ppo.update.minibatch_size=8"),
}  # fmt: skip
"""Settings that make a stage last seconds; only what it does, not what it learns, is looked at."""


@dataclass(frozen=True, kw_only=True)
class ChaosOptions:
    """The command line of `rlhf chaos`."""

    recipe: str
    kills: int
    stages: tuple[str, ...]
    zero: tuple[int, ...]
    seed: int
    work: Path
    save_every: int
    num_gpus: int | None = None
    quick: bool = False
    write: Path | None = None
    overrides: tuple[str, ...] = ()


@dataclass
class Kill:
    """One kill: what was planned, and what came of it."""

    zero: int
    stage: str
    target: str
    moment: str
    """`start-up`, `step` or `save`."""
    fraction: float
    """Where in the stage's steps, or of the start-up, from 0 to 1."""
    delay: float
    """From there: in steps after a step, in seconds inside a save or the start-up."""
    happened: str = "not reached"
    killed: str = "-"
    resumed: str = "-"
    equal: str = "-"


@dataclass
class Study:
    """All kills, and what was compared."""

    options: ChaosOptions
    kills: list[Kill]
    problems: list[str] = field(default_factory=list)


class StudyError(RuntimeError):
    """The study cannot go on: a run failed that nobody killed."""


def main(options: ChaosOptions) -> int:
    """Run the study; 0 if all came out equal, 1 if not, 2 for problems found before."""
    try:
        _check(options)
        study = Study(options, draw_kills(options))
        for zero in options.zero:
            _one_zero_stage(study, zero)
            _save(study)
    except (PlanError, ValueError) as error:
        for line in str(error).splitlines():
            _say(f"rlhf chaos: {line}", error=True)
        return 2
    except StudyError as error:
        _say(f"rlhf chaos: {error}", error=True)
        return 1
    _say(table(study.kills))
    for problem in study.problems:
        _say(problem)
    return 1 if study.problems or any(kill.equal != "equal" for kill in study.kills) else 0


def draw_kills(options: ChaosOptions) -> list[Kill]:
    """Kills in the order of the runs; each stage under each ZeRO stage gets its share."""
    rng = random.Random(options.seed)
    cells = [(zero, stage) for zero in options.zero for stage in options.stages]
    kills = []
    for number in range(options.kills):
        zero, stage = cells[number % len(cells)]
        moment = rng.choices(("step", "save", "start-up"), weights=(5, 3, 1))[0]
        kills.append(
            Kill(
                zero=zero,
                stage=stage,
                target=rng.choice(TARGETS[:1] * 2 + TARGETS[1:]),
                moment=moment,
                fraction=rng.random(),
                delay=rng.random() * {"step": 1.0, "save": 0.05, "start-up": 5.0}[moment],
            )
        )
    # In the order in which the moments come: a resumed run does not pass an earlier one again.
    return sorted(kills, key=lambda k: (cells.index((k.zero, k.stage)), k.moment != "start-up", k.fraction))


def _check(options: ChaosOptions) -> None:
    if options.kills < 1 or options.save_every < 1:
        raise ValueError(f"--kills and --save-every must be >= 1, got {options.kills}, {options.save_every}.")
    if any(zero not in (0, 1, 2, 3) for zero in options.zero) or not options.zero:
        raise ValueError(f"--zero takes stages 0 to 3, got {', '.join(map(str, options.zero))}.")
    if options.write is not None:
        read_page(options.write, begin=BEGIN, end=END)
    if options.work.exists():
        raise ValueError(f"--work {options.work} exists. Remove it, or name another folder.")
    plan = make_plan(_run_options(options, options.work, options.overrides))
    for stage in plan.stages:
        for role, name in stage.ds_configs().items():
            if not name.startswith("cpu_"):
                raise ValueError(f"{stage.folder}: {role} uses {name}. The study takes recipes for CPUs (cpu_*.json).")


def _run_options(options: ChaosOptions, out: Path, overrides: Sequence[str]) -> RunOptions:
    return RunOptions(recipe=options.recipe, out=out, overrides=tuple(overrides))


def _one_zero_stage(study: Study, zero: int) -> None:
    options = study.options
    folder = options.work / f"zero{zero}"
    overrides = list(_overrides(options, zero, folder))
    _say(f"ZeRO-{zero}: uninterrupted run in {folder / 'whole'}")
    code, text = _Attempt(options, folder / "whole", overrides, mark=f"{os.getpid()}.{zero}.whole").wait()
    if code:
        raise StudyError(f"the uninterrupted run ended with exit code {code}:\n{text[-3000:]}")
    plan = make_plan(_run_options(options, folder / "killed", overrides))
    kills = [kill for kill in study.kills if kill.zero == zero]
    _under_fire(study, plan.stages, folder / "killed", overrides, kills)
    for stage in plan.stages:
        if stage.name not in options.stages:
            continue
        found = compare(folder / "whole" / stage.folder, folder / "killed" / stage.folder)
        for kill in kills:
            if kill.stage == stage.name:
                kill.equal = "equal" if not found else found[0]
        study.problems += [f"ZeRO-{zero}, {stage.folder}: {line}" for line in found]


def _overrides(options: ChaosOptions, zero: int, folder: Path) -> Iterator[str]:
    """Flags of all runs with one ZeRO stage: its DeepSpeed JSONs, saves, and what the user set."""
    plan = make_plan(_run_options(options, folder, ()))
    for stage in plan.stages:
        if options.quick:
            yield from QUICK[stage.name]
        yield f"--{stage.name}.run.save_every={options.save_every}"
        for role, name in stage.ds_configs().items():
            if role not in ("model", "actor", "critic"):  # frozen, so in no state
                continue
            raw = ds_config.load(name)
            base = "cpu_zero3_hybrid" if zero == 3 and "hybrid_engine" in raw else f"cpu_zero{zero}"
            micro = ds_config.micro_batch_size(raw)
            path = folder.absolute() / f"{stage.name}_{role}.json"
            artifacts.write_json(path, {**ds_config.load(base), "train_micro_batch_size_per_gpu": micro})
            yield f"--{stage.name}.deepspeed{'' if role == 'model' else f'.{role}'}={path}"
    yield from options.overrides


class _Attempt:
    """One `rlhf run` in a process of its own."""

    def __init__(
        self, options: ChaosOptions, out: Path, overrides: Sequence[str], *, mark: str, resume: bool = False
    ) -> None:
        argv = [sys.executable, "-m", "rlhf.cli", "run", "--recipe", options.recipe, "--out", str(out)]
        argv += ["--num_gpus", str(options.num_gpus)] if options.num_gpus else []
        argv += [*(["--resume"] if resume else []), *overrides]
        self.out, self.mark = out, mark
        self.log = out.parent / f"{out.name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.started = time.time()
        with self.log.open("ab") as file:
            file.write(f"$ {shlex.join(argv)}\n".encode())
            file.flush()
            self._position = file.tell()
            self.process = subprocess.Popen(
                argv, env={**os.environ, MARK: mark}, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )

    def wait(self) -> tuple[int, str]:
        """Exit code, and what it printed."""
        code = self.process.wait()
        with self.log.open("rb") as file:
            file.seek(self._position)
            return code, file.read().decode("utf-8", "replace")


def _under_fire(
    study: Study, stages: Sequence[Stage], out: Path, overrides: Sequence[str], kills: Sequence[Kill]
) -> None:
    """Run, kill, resume, until no kill is left and the run ends by itself."""
    resume = False
    for number, kill in enumerate([*kills, None]):
        mark = f"{os.getpid()}.{out.parent.name}.{number}"
        attempt = _Attempt(study.options, out, overrides, mark=mark, resume=resume)
        stage = next((stage for stage in stages if kill is not None and stage.name == kill.stage), None)
        if kill is not None and stage is not None:
            _strike(kill, stage, attempt)
        code, text = attempt.wait()
        if left := wait_for_end(mark, _END_SECONDS):
            names = ", ".join(victim.name for victim in left)
            study.problems.append(f"{out}: {names} outlived a kill by {_END_SECONDS:.0f} s")
        if kill is None or kill.killed == "-":
            if code:
                raise StudyError(f"{out}: exit code {code}, although nothing was killed:\n{text[-3000:]}")
            if kill is not None:
                kill.happened = "not reached: the run was faster"
                study.problems.append(f"{out}: a kill in {kill.stage} was not reached")
            continue
        resume = True
        assert stage is not None
        kill.resumed = _resume_point(stage)
        _say(f"  {kill.stage}: {kill.happened}, killed {kill.killed}; goes on from {kill.resumed}")


def _strike(kill: Kill, stage: Stage, attempt: _Attempt) -> None:
    """End the planned process at the planned moment, or any process at the stage's end if that was faster."""
    num_steps, step_seconds = _pace(stage, attempt)
    seconds = kill.delay * (step_seconds if kill.moment == "step" else 1.0)
    for moment in _moments(kill, stage, attempt, num_steps):
        ended = read_result(stage.out_dir) is not None
        if moment or ended:
            time.sleep(0.0 if ended else seconds)
            victims = find(attempt.mark)
            victim = _choose(kill, victims) or (victims[0] if ended and victims else None)
            where = _where(stage, attempt, kill, seconds)
            if victim is not None and end_process(victim):
                kill.happened, kill.killed = where, victim.name
                return
        if attempt.process.poll() is not None:
            return
        time.sleep(_POLL_SECONDS)


def _moments(kill: Kill, stage: Stage, attempt: _Attempt, num_steps: int) -> Iterator[bool]:
    """Whether the moment has come, looked at again and again."""
    state = states.states_of(stage.out_dir)
    step = round(kill.fraction * (num_steps - 1))
    while True:
        progress = read_progress(stage.out_dir / "progress.json", not_before=attempt.started)
        phase, reached = progress.get("phase"), int(progress.get("step", 0))
        if kill.moment == "start-up":
            yield any(victim.name.startswith("rank") for victim in find(attempt.mark)) and _is_current(stage, attempt)
        elif kill.moment == "save":
            # The part of a save that is under way, not one that an earlier kill has left.
            yield reached >= step - 1 and any(
                path.stat().st_mtime > attempt.started for path in state.glob(".step_*.part")
            )
        else:
            yield phase == "train" and reached >= step


def _is_current(stage: Stage, attempt: _Attempt) -> bool:
    """Whether the run has come to a stage: its config was written by this attempt."""
    path = attempt.out / "configs" / f"{stage.folder}.yaml"
    return path.exists() and path.stat().st_mtime > attempt.started - 0.1


def _pace(stage: Stage, attempt: _Attempt) -> tuple[int, float]:
    """Steps of a stage and seconds of one, from the uninterrupted run."""
    folder = attempt.out.parent / "whole" / stage.folder
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    seconds = [line["time/step_seconds"] for line in lines if "time/step_seconds" in line]
    return int(read_progress(folder / "progress.json").get("num_steps", 1)), statistics.median(seconds)


def _choose(kill: Kill, victims: Sequence[Victim]) -> Victim | None:
    wanted = [victim for victim in victims if victim.name.startswith(kill.target)]
    if not wanted:
        return None
    return wanted[int(kill.fraction * 1000) % len(wanted)]


def _where(stage: Stage, attempt: _Attempt, kill: Kill, seconds: float) -> str:
    """The moment in words."""
    if read_result(stage.out_dir) is not None:
        return "after its end"
    progress = read_progress(stage.out_dir / "progress.json", not_before=attempt.started)
    parts = [path.name for path in states.states_of(stage.out_dir).glob(".step_*.part")]
    if kill.moment == "save":
        return f"inside the save of step {int(parts[0][6:14])}" if parts else "just after a save"
    if kill.moment == "start-up":
        return f"start-up, {seconds:.1f} s in"
    return f"after step {progress.get('step', 0)}, {seconds:.2f} s in"


def _resume_point(stage: Stage) -> str:
    """What a resume will find."""
    if read_result(stage.out_dir) is not None:
        return "its end"
    found = states.complete(states.states_of(stage.out_dir))
    return f"step {int(found[-1].name[5:])}" if found else "its beginning (no step was made)"


def compare(one: Path, two: Path) -> list[str]:
    """What differs between two folders of a stage: records but for clocks, and weights; empty if nothing does."""
    found = []
    lines = [_records(folder) for folder in (one, two)]
    if len(lines[0]) != len(lines[1]):
        found.append(f"metrics.jsonl has {len(lines[1])} lines, not {len(lines[0])}")
    for number, (first, second) in enumerate(zip(*lines, strict=False), start=1):
        if first != second:
            keys = [key for key in {**first, **second} if first.get(key) != second.get(key)]
            found.append(f"line {number} of metrics.jsonl differs in {', '.join(keys[:3])}")
            break
    for weights in sorted(one.glob("*/*.safetensors")):
        other = two / weights.relative_to(one)
        if not other.is_file() or artifacts.hash_file(other) != artifacts.hash_file(weights):
            found.append(f"{weights.relative_to(one)} differs")
    return found


def _records(folder: Path) -> list[dict[str, Any]]:
    try:
        text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [
        {key: value for key, value in json.loads(line).items() if not key.startswith(_CLOCKS)}
        for line in text.splitlines()
    ]


def table(kills: Sequence[Kill]) -> str:
    """The result as Markdown."""
    rows = [("#", "ZeRO", "Stage", "Moment", "Killed", "Resumed from", "Metrics and weights")]
    rows += [
        (str(number), str(kill.zero), FOLDERS[kill.stage], kill.happened, kill.killed, kill.resumed, kill.equal)
        for number, kill in enumerate(kills, start=1)
    ]
    text = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([text[0], "|---|---|---|---|---|---|---|", *text[1:]])


def _save(study: Study) -> None:
    """The table so far, and how to make it again."""
    artifacts.write_json(study.options.work / "chaos.json", {"kills": [vars(kill) for kill in study.kills]})
    if study.options.write is not None:
        done = [kill for kill in study.kills if kill.equal != "-"]
        write_section(study.options.write, f"{_command(study.options)}\n\n{table(done)}", begin=BEGIN, end=END)


def _command(options: ChaosOptions) -> str:
    words = ["rlhf", "chaos", "--recipe", options.recipe, "--kills", str(options.kills), "--seed", str(options.seed)]
    words += ["--zero", *map(str, options.zero), "--save-every", str(options.save_every)]
    words += [*(["--quick"] if options.quick else []), *options.overrides]
    return f"`{shlex.join(words)}`:"


def _say(text: str, *, error: bool = False) -> None:
    print(text, file=sys.stderr if error else sys.stdout, flush=True)  # noqa: T201  the command's output
