"""One process without a launcher; several ranks: tests/distributed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlhf import distributed


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_launcher")
def test_a_plain_process_is_a_world_of_one() -> None:
    """C11, F24: no launcher, no port, no accelerator, and no word on stdout or stderr."""
    code = """
import torch
from rlhf import distributed
distributed.init(timeout_seconds=30)
distributed.init(timeout_seconds=30)
assert (distributed.rank(), distributed.world_size(), distributed.local_rank()) == (0, 1, 0) and distributed.is_main()
assert distributed.device().type == "cpu"
x = torch.tensor([1.5, 2.0], requires_grad=True)
total = distributed.all_sum(x)
assert torch.equal(total, x) and total.data_ptr() != x.data_ptr() and not total.requires_grad
assert distributed.all_sum(torch.tensor(True)).item() == 1
assert distributed.all_max(torch.tensor(3)).item() == 3
assert distributed.all_gather(torch.tensor([4.0])).tolist() == [[4.0]]
assert distributed.all_gather_objects("a") == ["a"] and distributed.broadcast_object({"b": 1}) == {"b": 1}
distributed.barrier()
distributed.shutdown()
distributed.shutdown()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        cwd=Path(__file__).resolve().parents[3],
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and done.stderr == ""


def test_half_a_launcher(no_launcher: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr("rlhf.distributed.dist.is_initialized", lambda: False)  # another test may hold a group open
    with pytest.raises(ValueError, match=r"WORLD_SIZE=2 is set but RANK, MASTER_PORT is not"):
        distributed.init()


def test_before_init_the_launcher_says_who_we_are(no_launcher: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.distributed.is_initialized():  # noqa: TID251  another test of this process holds a group
        pytest.skip("a process group of another test is open")
    assert distributed.is_main() and distributed.world_size() == 1
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert distributed.rank() == 3 and distributed.world_size() == 4 and not distributed.is_main()


def test_same_on_all(no_launcher: None) -> None:
    distributed.same_on_all(True, "fine")
    with pytest.raises(ValueError, match=r"^the reason$"):
        distributed.same_on_all(False, "the reason", error=ValueError)


def test_together_passes_the_error_on(no_launcher: None) -> None:
    with distributed.together("nothing"):
        pass
    with pytest.raises(KeyError), distributed.together("writing"):
        raise KeyError("x")
