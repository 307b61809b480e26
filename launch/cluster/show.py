"""A check as a table, as lines to act on, and as JSON. No torch."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launch.cluster.check import Report
from launch.cluster.finding import Finding
from launch.plan import Plan

_STYLES = {"ok": "green", "none": "dim", "warning": "yellow", "slow": "red", "failed": "red", "not checked": "yellow"}
_SAID = ("failed", "slow", "warning")


def show_report(console: Console, plan: Plan, report: Report) -> None:
    """Print one table, in which machines of which the same is said share a row, and what to do about what is wrong."""
    table = Table(title=f"{plan.recipe.name} on {plan.placement}", title_justify="left")
    table.add_column("check", no_wrap=True)
    table.add_column("where", overflow="fold")
    table.add_column("result", no_wrap=True)
    table.add_column("found", overflow="fold")
    for hosts, finding in _rows(report.findings):
        where = _where(hosts, len(plan.placement.hosts))
        result = Text(finding.status, style=_STYLES[finding.status])
        table.add_row(finding.check, where, result, Text(finding.found))
    console.print(table)
    for status in _SAID:
        for finding in report.findings:
            if finding.status == status:
                console.print(Text(f"  - {status}: {finding}"), soft_wrap=True)


def as_json(plan: Plan, report: Report) -> dict[str, Any]:
    """The report for other programs."""
    statuses = {finding.status for finding in report.findings}
    return {
        "schema": 1,
        "recipe": plan.recipe.name,
        "ok": not statuses & {"failed", "slow"},
        "hosts": [{"name": host.name, "slots": list(host.slots)} for host in plan.placement.hosts],
        "findings": [asdict(finding) for finding in report.findings],
        "links": [
            asdict(link) | ({} if link.errors else {"all_reduce_gb_s": link.reduce_gb_s,
                                                    "all_gather_gb_s": link.gather_gb_s})
            for link in report.links
        ],
        "facts": {host: {key: value for key, value in facts.items() if key not in ("code", "paths")}
                  for host, facts in report.facts.items()},
    }  # fmt: skip


def _rows(findings: Sequence[Finding]) -> list[tuple[list[str], Finding]]:
    """Findings of one check, result and text together, in the order of the checks' first appearance."""
    rows: dict[tuple[str, str, str], tuple[list[str], Finding]] = {}
    order = list(dict.fromkeys(finding.check for finding in findings))
    for finding in sorted(findings, key=lambda finding: order.index(finding.check)):
        key = (finding.check, finding.status, finding.found)
        rows.setdefault(key, ([], finding))[0].append(finding.host)
    return list(rows.values())


def _where(hosts: Sequence[str], count: int) -> str:
    named = list(dict.fromkeys(host for host in hosts if host))
    if not named or (len(named) == count > 1):
        return f"all {count}" if named else ""
    return ", ".join(named)
