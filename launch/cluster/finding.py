"""What a check found: on which machine, what it should be, and what to do. No torch."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["ok", "none", "warning", "slow", "failed", "not checked"]
"""`none`: there is no such thing here, and nothing asks for it. `failed` stops a run; `slow` fails a check only."""
EVERYWHERE = ""
"""Host of a finding about all machines together."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was checked on one machine."""

    check: str
    host: str
    status: Status
    found: str
    expected: str = ""
    repair: str = ""

    def __str__(self) -> str:
        where = f"{self.host}: " if self.host else ""
        expected = f", expected {self.expected}" if self.expected else ""
        repair = f" {self.repair}" if self.repair else ""
        return f"{where}{self.check}: {self.found}{expected}.{repair}"


def failed(findings: Iterable[Finding]) -> list[Finding]:
    """What stops a run."""
    return [finding for finding in findings if finding.status == "failed"]


def odd_ones(check: str, values: Mapping[str, Any], *, status: Status, repair: str) -> Iterator[Finding]:
    """Compare machines with one another where nothing says what is right: those unlike most are named.

    Args:
        check: name of the check.
        values: host -> value, in words; "" for none.
        status: of a machine that differs.
        repair: what to do then.
    """
    if not values:
        return
    counts = Counter(values.values())
    usual = max(counts, key=lambda value: counts[value])  # the first of equals: the order of the hostfile
    for host, value in values.items():
        if value == usual:
            yield Finding(check=check, host=host, status="ok" if value else "none", found=str(value) or "none")
        else:
            others = [name for name, other in values.items() if other == usual]
            expected = f"{usual or 'none'} as on {others[0]}{f' and {len(others) - 1} more' * (len(others) > 1)}"
            yield Finding(check=check, host=host, status=status, found=str(value) or "none", expected=expected,
                          repair=repair)  # fmt: skip
