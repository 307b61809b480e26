"""When a failed stage is started again, and where."""

from dataclasses import replace
from pathlib import Path

import pytest

from launch.command import stage_command
from launch.hostfile import Host
from launch.placement import Placement
from launch.recipe import Stage, find_recipe, load_recipe, resolve_stages
from launch.restart import GiveUpError, Restarts, check_fewer_ranks, without


def test_waits_double_up_to_five_minutes() -> None:
    restarts = Restarts(most=9, delay_seconds=10)
    delays = [restarts.next_delay(step=step, exit_code=1) for step in range(1, 8)]
    assert delays == [10, 20, 40, 80, 160, 300, 300]


def test_no_restart_without_progress() -> None:
    """The failure of a step that is always reached and never passed."""
    restarts = Restarts(most=9, delay_seconds=0)
    restarts.next_delay(step=5, exit_code=1)
    restarts.next_delay(step=6, exit_code=1)
    with pytest.raises(GiveUpError, match="failed at step 6, the time before at step 6, so nothing was gained"):
        restarts.next_delay(step=6, exit_code=1)
    with pytest.raises(GiveUpError, match="failed at step 4, the time before at step 6"):
        restarts.next_delay(step=4, exit_code=1)


def test_two_failures_before_the_first_step() -> None:
    restarts = Restarts(most=9, delay_seconds=0)
    restarts.next_delay(step=0, exit_code=1)
    with pytest.raises(GiveUpError):
        restarts.next_delay(step=0, exit_code=1)


def test_used_up_and_refused() -> None:
    restarts = Restarts(most=1, delay_seconds=0)
    restarts.next_delay(step=1, exit_code=1)
    with pytest.raises(GiveUpError, match="--restarts 1 are used up"):
        restarts.next_delay(step=2, exit_code=1)
    with pytest.raises(GiveUpError, match="settings were refused"):
        Restarts(most=1, delay_seconds=0).next_delay(step=1, exit_code=2)
    with pytest.raises(GiveUpError, match="a detector of run.health stopped it"):
        Restarts(most=1, delay_seconds=0).next_delay(step=1, exit_code=78)
    with pytest.raises(GiveUpError, match="^$"):  # nobody has asked for restarts
        Restarts(most=0, delay_seconds=0).next_delay(step=1, exit_code=1)


THREE = Placement(hosts=tuple(Host(f"node{i}.invalid", (0, 1)) for i in (1, 2, 3)), hostfile=Path("/nodes"), num_gpus=2)


def test_hosts_that_are_left_are_named_slot_by_slot() -> None:
    left = without(THREE, ["node2.invalid"])
    assert left.world_size == 4 and left.is_remote
    assert (left.num_gpus, left.include, left.exclude) == (None, "node1.invalid:0,1@node3.invalid:0,1", "")
    argv = stage_command("m", Path("/c"), left, port=1, rank_logs=Path("/r"))
    assert argv[argv.index("--include") + 1] == left.include and "--num_gpus" not in argv
    one = without(THREE, ["node1.invalid", "node2.invalid"])
    assert "--force_multi" in stage_command("m", Path("/c"), one, port=1, rank_logs=Path("/r"))
    with pytest.raises(GiveUpError, match="no host is left"):
        without(THREE, [host.name for host in THREE.hosts])


def test_address_of_rank_0_goes_with_its_host() -> None:
    named = Placement(hosts=THREE.hosts, hostfile=THREE.hostfile, master_addr="10.0.0.1")
    assert without(named, ["node2.invalid"]).master_addr == "10.0.0.1"
    assert without(named, ["node1.invalid"]).master_addr is None


def test_this_machine_alone_needs_no_ssh() -> None:
    placement = Placement(hosts=(Host("127.0.0.1", (0, 1)), Host("node2.invalid", (0, 1))), hostfile=Path("/nodes"))
    left = without(replace(placement, launcher="openmpi", launcher_args="-x"), ["node2.invalid"])
    assert "-x" not in " ".join(stage_command("m", Path("/c"), left, port=1, rank_logs=Path("/r")))
    assert (left.is_remote, left.include, left.world_size) == (False, "localhost:0,1", 2)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    path = find_recipe("tiny_cpu")
    return resolve_stages(load_recipe(path), path, tmp_path, stages=["ppo"])[0]


def test_fewer_ranks(stage: Stage) -> None:
    """A state goes on with any number of ranks, so only the rows count."""
    check_fewer_ranks(stage, THREE)
    check_fewer_ranks(stage, without(THREE, ["node2.invalid"]))


def test_more_ranks_than_rows(stage: Stage) -> None:
    many = Placement(hosts=(Host("a", tuple(range(500))),), hostfile=Path("/nodes"))
    with pytest.raises(GiveUpError, match=r"rollout.prompts_per_step=\d+ does not divide over 500 ranks"):
        check_fewer_ranks(stage, many)
