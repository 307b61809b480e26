"""Check the machines of a placement: ask all of them at once, then compare, then time the links. No torch."""

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch import preflight, process
from launch.cluster import devices, links, machine, software
from launch.cluster.finding import EVERYWHERE, Finding, failed
from launch.cluster.links import Link
from launch.cluster.room import room_findings
from launch.cluster.session import CONNECT_SECONDS, Session, SessionError, allow_open_files, at_once
from launch.command import remote_variables, user_variable_files
from launch.environment import launcher_environment
from launch.hostfile import Host
from launch.inputs import existing_folder, free_bytes, is_hub_name, model_folders, source_path
from launch.plan import Plan, choose_port
from launch.recipe import Stage

_FACTS_SECONDS = 240
"""For hashing data and importing torch on a busy machine."""
_CLOCK_ROUNDS = 5
_OUR_PACKAGES = ("rlhf", "step1_sft", "step2_reward", "step3_ppo", "ds_configs", "launch")
Facts = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """What a check measures, and what it takes for wrong."""

    links: bool = True
    """Time collectives."""
    link_mib: int | None = None
    """Size of their tensors; None: by what ranks run on."""
    link_seconds: float = 30.0
    """Limit of one connection or collective."""
    slow_share: float = 0.5
    """A link is slow below this share of what is usual."""
    clock_seconds: float = 1.0
    """Difference between two clocks that is let pass."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Result of a check."""

    findings: list[Finding]
    links: list[Link] = field(default_factory=list)
    facts: Mapping[str, Facts] = field(default_factory=dict)
    """Host -> what its probe said."""


@dataclass
class _Machine:
    host: Host
    session: Session | None = None
    facts: Facts | None = None
    clock: machine.Clock | None = None
    error: str = ""
    """Why there is no answer."""


def check_machines(
    plan: Plan,
    options: CheckOptions,
    interrupt: process.Interrupt,
    *,
    finished: Sequence[str] = (),
    found: Sequence[Finding] = (),
) -> Report:
    """Check every machine of a plan; nothing stays behind on any of them.

    Args:
        plan: of the run.
        options: what to measure.
        interrupt: of `process.catch_signals`; a signal ends the measurement of links.
        finished: stages that are not run again.
        found: what is known already; it stands first in the report.
    """
    stages = [stage for stage in plan.stages if stage.name not in finished]
    request = _request(plan, stages)
    machines = [_Machine(host) for host in plan.placement.hosts]
    here = _Machine(Host("here", (0,)))
    allow_open_files(256 + 4 * len(machines))
    try:
        _ask(machines if not plan.placement.is_remote else [*machines, here], request, plan, here)
        findings = [
            *found,
            *_judge(plan, stages, machines, here if plan.placement.is_remote else machines[0], request, options),
        ]
    finally:
        at_once(_close, [*machines, here])
    facts = {each.host.name: each.facts for each in machines if each.facts is not None}
    if not options.links or plan.placement.world_size == 1:
        return Report(findings=findings, facts=facts)
    if failed(findings) or interrupt.signum is not None:
        why = "because of the problems above" if failed(findings) else "stopped by a signal"
        findings.append(Finding(check="links", host=EVERYWHERE, status="not checked", found=f"not timed, {why}"))
        return Report(findings=findings, facts=facts)
    timed, ended = _time_links(plan, options, interrupt)
    findings += links.link_findings(timed, ended=ended, slow_share=options.slow_share)
    return Report(findings=findings, links=timed, facts=facts)


def _request(plan: Plan, stages: Sequence[Stage]) -> dict[str, Any]:
    """Arguments of `probe.facts` for a run."""
    root = Path(preflight.__file__).resolve().parent.parent
    paths: dict[str, str] = {}
    hub: list[str] = []
    for stage in stages:
        data = stage.config.data
        named = {f"data.sources[{i}].path": source_path(source, data.root) for i, source in enumerate(data.sources)}
        named |= {"data.template": Path(data.template) if data.template.endswith((".jinja", ".j2")) else None}
        named |= {
            key: folder for key, folder in model_folders(stage).items() if not folder.is_relative_to(plan.run_dir)
        }
        for key, path in named.items():
            if path is not None and (text := str(path.absolute())) not in paths.values():
                paths[f"{stage.folder}: {key}"] = text
        hub += [model.path for model in stage.models().values() if model.path and is_hub_name(model.path)]
    variables = remote_variables(
        plan.environment, plan.recipe.environment, user_variable_files(),
        through_shell=plan.placement.launcher == "pdsh",
    )  # fmt: skip
    return {
        "environment": variables if plan.placement.is_remote else plan.environment,
        "packages": list(software.PACKAGES),
        "code": {name: str(root / name) for name in _OUR_PACKAGES},
        "paths": paths,
        "hub": sorted(set(hub)),
        "folder": os.getcwd(),
    }


def _ask(machines: Sequence[_Machine], request: Mapping[str, Any], plan: Plan, here: _Machine) -> None:
    """Start a probe on each machine and let it say all it knows."""

    def ask(each: _Machine) -> None:
        remote = plan.placement.is_remote and each is not here
        try:
            each.session = Session(each.host.name if remote else None)
            each.session.ask("clock", seconds=CONNECT_SECONDS + 10)
            each.clock = _read_clock(each.session)
            each.facts = each.session.ask("facts", seconds=_FACTS_SECONDS, import_torch=each is not here, **request)
        except SessionError as error:
            each.error = str(error)

    at_once(ask, machines)


def _read_clock(session: Session) -> machine.Clock:
    """Offset by the fastest of a few questions: the answer was given between its sending and its arrival."""
    best: machine.Clock | None = None
    for _ in range(_CLOCK_ROUNDS):
        asked, sent = time.time(), time.monotonic()
        answer = session.ask("clock", seconds=10)
        half = (time.monotonic() - sent) / 2
        if best is None or half < best.error_seconds:
            best = machine.Clock(offset_seconds=answer["time"] - (asked + half), error_seconds=half)
    assert best is not None
    return best


def _close(each: _Machine) -> None:
    if each.session is not None:
        each.session.close()


def _judge(
    plan: Plan, stages: Sequence[Stage], machines: Sequence[_Machine], here: _Machine, request: Mapping[str, Any],
    options: CheckOptions,
) -> list[Finding]:  # fmt: skip
    remote = plan.placement.is_remote
    findings = [_ssh_finding(plan, each) for each in machines] if remote else []
    if here.facts is None:  # without a measure nothing can be compared
        findings.append(Finding(check="probe", host="here", status="failed", found=here.error))
        return findings
    answering = [each for each in machines if each.facts is not None and each.clock is not None]
    for each in answering:
        findings += _one_machine(plan, each, here.facts, request, options)
    findings += _disk(plan, stages, answering)
    facts = {each.host.name: each.facts for each in answering if each.facts is not None}
    if len(answering) == len(machines):
        findings += _reach(plan, answering) if remote else []
        findings += room_findings(plan.recipe.name, plan.stages, plan.placement.hosts, facts)
    findings += devices.compared_findings(facts) if remote else []
    return findings


def _ssh_finding(plan: Plan, each: _Machine) -> Finding:
    name = each.host.name
    if each.facts is not None:
        return Finding(check="ssh", host=name, status="ok", found="answers")
    line = f"{plan.placement.hostfile}:{each.host.line}: " if each.host.line else ""
    return Finding(
        check="ssh", host=name, status="failed", found=f"{line}no answer through ssh: {each.error}",
        expected="an answer without a password",
        repair=f"See `ssh -o BatchMode=yes {name} true`, or leave it out with --exclude.",
    )  # fmt: skip


def _one_machine(
    plan: Plan, each: _Machine, here: Facts, request: Mapping[str, Any], options: CheckOptions
) -> list[Finding]:
    assert each.facts is not None and each.clock is not None
    name, facts, remote = each.host.name, each.facts, plan.placement.is_remote
    several = len(plan.placement.hosts) > 1
    found = [*machine.clock_findings(name, each.clock, most_seconds=options.clock_seconds)] if remote else []
    found += software.python_findings(name, facts, here)
    found += software.package_findings(name, facts, here)
    found += software.torch_findings(name, facts)
    found += software.code_findings(name, facts, here)
    if remote:
        found += software.folder_findings(name, facts, request["folder"])
    found += software.path_findings(name, facts, here, request["paths"])
    offline = plan.environment.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on")
    found += software.hub_findings(name, facts, here, offline=offline)
    found += machine.memory_findings(each.host, facts)
    found += machine.interface_findings(name, facts, request["environment"], several=several)
    on_cpu = request["environment"].get("DS_ACCELERATOR") == "cpu"
    found += devices.gpu_findings(each.host, facts, needed=plan.recipe.needs_accelerator, on_cpu=on_cpu)
    found += devices.infiniband_findings(name, facts, request["environment"])
    found += devices.direct_findings(name, facts)
    return found


def _disk(plan: Plan, stages: Sequence[Stage], machines: Sequence[_Machine]) -> list[Finding]:
    """Leave a file in the run's folder here and on each machine; each must see the other's."""
    folder, remote = existing_folder(plan.run_dir), plan.placement.is_remote
    prefix = f".rlhf-check-{secrets.token_hex(8)}"
    ours = folder / f"{prefix}-here"
    wanted = preflight.wanted_bytes(stages, plan.stages)
    if free_bytes(folder) < wanted:
        wanted = 0  # preflight.check has said so of this machine

    def write(number: int) -> machine.Disk:
        session = machines[number].session
        assert session is not None
        arguments = {"folder": str(folder), "name": f"{prefix}-{number}"}
        try:
            written = session.ask("write_token", seconds=30, text=prefix, **arguments)
            free: int | None = int(written["free_bytes"])
            error = ""
            seen = session.ask("read_tokens", seconds=30, folder=str(folder), names=[ours.name])["texts"]
        except SessionError as failure:
            free, error, seen = None, str(failure), {}
        text = (folder / arguments["name"]).read_text() if (folder / arguments["name"]).is_file() else ""
        return machine.Disk(folder=str(folder), free_bytes=free, error=error, seen_here=text == prefix,
                            sees_ours=seen.get(ours.name) == prefix)  # fmt: skip

    def remove(number: int) -> None:
        session = machines[number].session
        assert session is not None
        try:
            session.ask("remove_tokens", seconds=30, folder=str(folder), names=[f"{prefix}-{number}"])
        except SessionError:  # named by what comes next
            return

    try:
        ours.write_text(prefix, encoding="utf-8")
    except OSError as error:
        disk = machine.Disk(folder=str(folder), error=f"{error.strerror}")
        return list(machine.disk_findings("here", disk, wanted_bytes=0, shared=remote))
    try:
        disks = at_once(write, range(len(machines)))
    finally:
        at_once(remove, range(len(machines)))
        ours.unlink(missing_ok=True)
    return [
        finding
        for each, disk in zip(machines, disks, strict=True)
        for finding in machine.disk_findings(each.host.name, disk, wanted_bytes=wanted, shared=remote)
    ]


def _reach(plan: Plan, machines: Sequence[_Machine]) -> list[Finding]:
    """Take the port of rank 0 on its machine, let all machines connect to it, and try ssh back."""
    first = machines[0]
    assert first.session is not None and first.facts is not None
    address = plan.placement.master_addr or first.facts["first_address"] or first.facts["own_address"]
    port, error, problems = choose_port(plan.placement), "", {}

    def connect(each: _Machine) -> str:
        assert each.session is not None
        try:
            each.session.ask("connect", seconds=15, address=address, port=port, text=each.host.name, limit=5)
        except SessionError as failure:
            return str(failure)
        return ""

    def call_back(each: _Machine) -> Facts:
        assert each.session is not None
        name = first.host.name
        try:
            return each.session.ask("call_back", seconds=30, name=name, limit=CONNECT_SECONDS)
        except SessionError as failure:
            return {"code": None, "said": str(failure)}

    try:
        first.session.ask("listen", seconds=15, port=port)
        said = at_once(connect, machines)
        came = first.session.ask("accepted", seconds=30, number=said.count(""), limit=3)["lines"]
        for each, why in zip(machines, said, strict=True):
            other = "" if each.host.name in came else "another machine answers at that address"
            problems[each.host.name] = why or other
    except SessionError as failure:
        error = str(failure)
    reach = machine.Reach(first=first.host.name, address=address, port=port, error=error, problems=problems)
    findings = list(machine.reach_findings(reach))
    for each, answer in zip(machines, at_once(call_back, machines), strict=True):
        findings += machine.back_findings(each.host.name, first.host.name, answer)
    return findings


def _time_links(plan: Plan, options: CheckOptions, interrupt: process.Interrupt) -> tuple[list[Link], str]:
    """In a folder beside the run's, which all machines have just been seen to share."""
    folder = Path(tempfile.mkdtemp(prefix=".rlhf-check-", dir=existing_folder(plan.run_dir)))
    try:
        rank_logs = links.rank_folder(folder)
        rank_logs.mkdir(parents=True)
        on_cpu = plan.environment.get("DS_ACCELERATOR") == "cpu"
        mib = options.link_mib or (links.CPU_MIB if on_cpu else links.ACCELERATOR_MIB)
        return links.measure(
            plan.placement,
            environment=launcher_environment(plan, plan.placement, rank_logs=rank_logs, variables={}),
            folder=folder,
            num_bytes=mib * 2**20,
            limit_seconds=options.link_seconds,
            port=choose_port(plan.placement),
            interrupt=interrupt,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
