"""Whether a failed stage is started again, when, and on which hosts. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from launch.hostfile import Host, is_local
from launch.placement import Placement
from launch.recipe import Stage
from rlhf.config import to_dict
from rlhf.health import EXIT_UNHEALTHY

MOST_DELAY_SECONDS = 300.0
USAGE_ERROR = 2
"""Exit code of a stage that refuses its settings: it would refuse them again."""


class GiveUpError(Exception):
    """A stage is not started again; the message says why."""


@dataclass
class Restarts:
    """Counts the failures of one stage."""

    most: int
    """Restarts allowed."""
    delay_seconds: float
    """Wait before the first; each further one waits twice as long, up to 5 minutes."""
    done: int = 0
    last_step: int | None = None

    def next_delay(self, *, step: int, exit_code: int) -> float:
        """Count a failure at a step; seconds to wait before the next start.

        Raises:
            GiveUpError: there is none.
        """
        if self.most == 0:
            raise GiveUpError("")
        if exit_code == USAGE_ERROR:
            raise GiveUpError("not started again: its settings were refused.")
        if exit_code == EXIT_UNHEALTHY:
            raise GiveUpError("not started again: a detector of run.health stopped it, and would stop it again.")
        if self.done >= self.most:
            raise GiveUpError(f"not started again: --restarts {self.most} are used up.")
        if self.last_step is not None and step <= self.last_step:
            raise GiveUpError(
                f"not started again: it failed at step {step}, the time before at step {self.last_step}, so nothing "
                "was gained. Repair the cause first."
            )
        self.last_step = step
        self.done += 1
        return min(self.delay_seconds * 2.0 ** (self.done - 1), MOST_DELAY_SECONDS)


def without(placement: Placement, lost: Sequence[str]) -> Placement:
    """The placement on the hosts that are left, slots named one by one.

    Raises:
        GiveUpError: none is left.
    """
    left = tuple(host for host in placement.hosts if host.name not in lost)
    if not left:
        raise GiveUpError(f"--elastic: no host is left of {', '.join(map(str, placement.hosts))}.")
    if len(left) == 1 and is_local(left[0].name):
        here = Host("localhost", left[0].slots)
        return replace(placement, hosts=(here,), hostfile=None, num_gpus=None, include=_spec([here]), exclude="")
    # The address of rank 0 may have been that of a host that is gone.
    kept = placement.master_addr if placement.hosts[0] in left else None
    return replace(placement, hosts=left, num_gpus=None, include=_spec(left), exclude="", master_addr=kept)


def check_fewer_ranks(stage: Stage, placement: Placement) -> None:
    """Check that a stage can go on with the ranks that are left.

    Raises:
        GiveUpError: a batch has fewer rows than there are ranks. A saved state goes on with any number of them.
    """
    config = to_dict(stage.config)
    key = "global_batch_size" if "global_batch_size" in config else "rollout.prompts_per_step"
    rows = config.get(key) or config["rollout"]["prompts_per_step"]
    if rows < placement.world_size:
        raise GiveUpError(f"--elastic: {key}={rows} does not divide over {placement.world_size} ranks.")


def _spec(hosts: Sequence[Host]) -> str:
    return "@".join(f"{host.name}:{','.join(map(str, host.slots))}" for host in hosts)
