"""`rlhf bench peers`: run the lines in turns, keep every result, write the table. No torch."""

import argparse
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf import artifacts, host
from rlhf.bench.jobs import Bench, environment
from rlhf.bench.lines import Contestant, Line, select
from rlhf.bench.process import ChildError, run_child
from rlhf.bench.record import Sample, to_json
from rlhf.bench.table import BEGIN, END, markdown, summary
from rlhf.bench.workload import FULL, QUICK, Sizes
from rlhf.sections import read_page, write_section

STAGES = ("sft", "reward", "ppo")
PACKAGES = {"trl": "TRL", "transformers": "generate", "vllm": "vLLM"}
"""Packages of the peers, and what the table calls them."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What was asked for on the command line."""

    lines: list[Line]
    rounds: int
    sizes: Sizes
    work: Path
    json: Path
    write: Path | None
    resume: bool
    timeout: float
    pythons: dict[str, str]
    overrides: dict[str, list[str]]
    words: list[str]
    """Of the command, what changes the numbers."""


def main(arguments: argparse.Namespace) -> int:
    """Run; 0 if every run ended well, 1 if some failed, 2 if nothing could be started."""
    try:
        settings = read_settings(arguments)
        report = _open_report(settings)
        _prepare(settings, report)
    except (ValueError, OSError, ChildError) as error:
        sys.stderr.write(f"rlhf bench: {error}\n")
        return 2
    bench = Bench(
        work=settings.work, sizes=settings.sizes, pythons=settings.pythons, overrides=settings.overrides
    )  # fmt: skip
    for line in settings.lines:
        if _is_done(report, line, settings):
            _say(f"{line.name}: kept")
            continue
        _run_line(bench, line, settings, report)
        for text in summary(report, line):
            _say(f"  {text}")
        _save(settings, report)
    _save(settings, report)
    failed = [name for name, entry in report["lines"].items() if entry["status"] != "done"]
    if failed:
        _say(f"with errors: {', '.join(failed)}; see {settings.json}")
    return 1 if failed else 0


def read_settings(arguments: argparse.Namespace) -> Settings:
    """Check the command line.

    Raises:
        ValueError: a value cannot be used.
    """
    if arguments.rounds < 1 or arguments.timeout <= 0:
        raise ValueError(f"--rounds={arguments.rounds} must be >= 1 and --timeout={arguments.timeout:g} > 0.")
    overrides: dict[str, list[str]] = {}
    for text in arguments.set:
        stage, dot, rest = text.partition(".")
        if stage not in STAGES or not dot or "=" not in rest:
            raise ValueError(f"--set {text!r} is not STAGE.KEY=VALUE with one of the stages {', '.join(STAGES)}.")
        overrides.setdefault(stage, []).append(f"--{rest}")
    if arguments.write is not None:
        read_page(arguments.write, begin=BEGIN, end=END)
    work = arguments.work.resolve()
    pythons = {"trl": arguments.trl_python, "vllm": arguments.vllm_python}
    return Settings(
        lines=select([name for name in arguments.lines.split(",") if name]),
        rounds=1 if arguments.quick else arguments.rounds,
        sizes=QUICK if arguments.quick else FULL,
        work=work,
        json=arguments.json or work / "peers.json",
        write=arguments.write,
        resume=arguments.resume,
        timeout=arguments.timeout,
        pythons={package: path for package, path in pythons.items() if path},
        overrides=overrides,
        words=_words(arguments),
    )


def _words(arguments: argparse.Namespace) -> list[str]:
    words = ["--quick"] if arguments.quick else ["--rounds", str(arguments.rounds)]
    for text in arguments.set:
        words += ["--set", text]
    return words


def _shown_command(settings: Settings, lines: Iterable[str]) -> str:
    """The command that makes these lines as the page shows it, without a path of this machine."""
    names = list(lines)
    chosen = [] if len(names) == len(select([])) else ["--lines", ",".join(names)]
    return shlex.join(["rlhf", "bench", "peers", *settings.words, *chosen, "--write", "docs/performance.md"])


def _open_report(settings: Settings) -> dict[str, Any]:
    """An empty report, or the one to go on with.

    Raises:
        ValueError: it was made with other settings.
    """
    asked = {"sizes": settings.sizes.name, "rounds": settings.rounds, "overrides": settings.overrides}
    if settings.resume and settings.json.is_file():
        report: dict[str, Any] = json.loads(settings.json.read_text(encoding="utf-8"))
        if report["settings"] != asked:
            raise ValueError(
                f"{settings.json} was made with {report['settings']}, not {asked}. Use the same settings, or another "
                "--json."
            )
        return report
    return {"settings": asked, "lines": {}}


def _prepare(settings: Settings, report: dict[str, Any]) -> None:
    """Write models and rows, measure the machine, look for the peers."""
    settings.work.mkdir(parents=True, exist_ok=True)
    settings.json.parent.mkdir(parents=True, exist_ok=True)
    _program(
        settings,
        "assets",
        ["--out", str(Bench(work=settings.work, sizes=settings.sizes).assets), "--sizes", settings.sizes.name],
    )
    peaks = settings.work / "peaks.json"
    _program(settings, "peak", ["--out", str(peaks)])
    needed = {c.package for line in settings.lines for c in line.contestants if c.package}
    versions, left_out = _peers(settings, needed)
    looked_for = {PACKAGES[package] for package in needed}
    other_lines = {name: why for name, why in report.get("left_out", {}).items() if name not in looked_for}
    report.update(
        date=time.strftime("%Y-%m-%d"),
        git_commit=artifacts.git_commit(),
        machine={
            "cpu": host.cpu_name(),
            "cores": os.cpu_count(),
            "peaks": json.loads(peaks.read_text(encoding="utf-8")),
        },
        versions={**report.get("versions", {}), **versions},
        left_out={**other_lines, **left_out},
    )


def _program(settings: Settings, name: str, arguments: Sequence[str]) -> None:
    argv = [sys.executable, "-m", f"rlhf.bench.{name}", *arguments]
    log = settings.work / f"{name}.log"
    run_child(argv, environment=environment({}, work=settings.work), log=log, timeout=settings.timeout)


def _peers(settings: Settings, needed: Iterable[str]) -> tuple[dict[str, str], dict[str, str]]:
    """(versions of the packages, reasons of those that cannot be imported)."""
    versions = dict(artifacts.versions())
    left_out: dict[str, str] = {}
    bench = Bench(work=settings.work, sizes=settings.sizes, pythons=settings.pythons)
    for package in sorted(needed):
        log = settings.work / f"import_{package}.log"
        code = f"import {package}; print('version', {package}.__version__)"
        argv = [bench.python(package), "-c", code]
        try:
            run_child(argv, environment=environment({}, work=settings.work), log=log, timeout=settings.timeout)
        except ChildError:
            left_out[PACKAGES[package]] = f"`import {package}` failed"
            _say(f"{PACKAGES[package]} is left out: import {package} failed, see {log}")
            continue
        versions[package] = log.read_text(encoding="utf-8").splitlines()[-1].removeprefix("version ")
    return versions, left_out


def _is_done(report: dict[str, Any], line: Line, settings: Settings) -> bool:
    entry = report["lines"].get(line.name)
    if not settings.resume or entry is None or entry["status"] != "done":
        return False
    return set(entry["contestants"]) >= {contestant.name for contestant in _present(line, report)}


def _present(line: Line, report: dict[str, Any]) -> Iterator[Contestant]:
    for contestant in line.contestants:
        if not contestant.package or PACKAGES[contestant.package] not in report["left_out"]:
            yield contestant


def _run_line(bench: Bench, line: Line, settings: Settings, report: dict[str, Any]) -> None:
    """All rounds, the contestants in turns; one that fails is out for the rest, the others go on."""
    contestants = list(_present(line, report))
    entries: dict[str, dict[str, Any]] = {c.name: {"samples": [], "error": None} for c in contestants}
    report["lines"][line.name] = {"status": "running", "contestants": entries}
    for number in range(settings.rounds):
        for contestant in contestants:
            entry = entries[contestant.name]
            if entry["error"]:
                continue
            title = f"{line.name}, round {number + 1} of {settings.rounds}, {contestant.name}"
            try:
                sample = _run_once(bench, line, contestant, number, settings)
            except (ChildError, ValueError, KeyError, OSError) as error:
                entry["error"] = f"{type(error).__name__}: {error}"
                _say(f"{title}: FAILED\n{error}")
                continue
            entry["samples"].append(to_json(sample))
            _say(f"{title}: {_said(sample)}")
    report["lines"][line.name]["status"] = "failed" if any(e["error"] for e in entries.values()) else "done"


def _run_once(bench: Bench, line: Line, contestant: Contestant, number: int, settings: Settings) -> Sample:
    """One run in a fresh process and folder; a folder is kept only if the run failed."""
    name = "".join(letter if letter.isalnum() else "_" for letter in contestant.name)
    folder = settings.work / "runs" / line.name / f"{number + 1}_{name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    job = contestant.job(bench, folder)
    finished = run_child(
        job.argv,
        environment=environment(job.environment, work=settings.work),
        log=folder / "log.txt",
        timeout=settings.timeout,
        cwd=folder,
    )
    sample = job.read(finished)
    shutil.rmtree(folder)
    return replace(sample, process_seconds=finished.wall_seconds)


def _said(sample: Sample) -> str:
    if not sample.tokens:
        return f"{sample.wall_seconds:.2f} s"
    said = f"{sample.tokens_per_second:,.0f} tokens/s, {sample.step_seconds:.2f} s a step"
    if sample.compile_seconds:
        said += f", {sample.compile_seconds:.1f} s of compiling"
    if sample.cpu_seconds is None:
        return said
    # Well below 100 % somebody else was on the processors, and the wall time says little.
    return f"{said}, processors {sample.cpu_seconds / (sample.wall_seconds * sample.ranks):.0%} busy with it"


def _save(settings: Settings, report: dict[str, Any]) -> None:
    report["command"] = _shown_command(settings, report["lines"])
    artifacts.write_json(settings.json, report)
    if settings.write is not None and report["lines"]:
        write_section(settings.write, markdown(report), begin=BEGIN, end=END)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
