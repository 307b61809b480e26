"""A rank under mpirun and srun, as processes: who it is, where rank 0 is, its variables and its output."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launch import start_rank

PROGRAM = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
OPENMPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


def slurm(rank: int) -> dict[str, str]:
    return {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "SLURMD_NODENAME": f"n{rank}"}


def start(folder: Path, launcher: str, address: str, environment: dict[str, str]) -> "subprocess.Popen[str]":
    (folder / "shown.py").write_text(PROGRAM)
    variables = folder / "variables"
    variables.write_text('AWKWARD=a b=c =d\nTOKEN="$x"\n')
    return subprocess.Popen(
        [
            sys.executable,
            start_rank.__file__,
            launcher,
            address,
            "9",
            str(folder),
            str(variables),
            "shown",
            "--a",
            "b c",
        ],
        env={"PYTHONPATH": str(folder), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def seen(folder: Path, rank: int) -> dict[str, str]:
    (path,) = folder.glob(f"*_rank{rank}.log")
    arguments, environment = json.loads(path.read_text())
    assert arguments == ["--a", "b c"]
    return environment


def test_openmpi(tmp_path: Path) -> None:
    process = start(tmp_path, "openmpi", "node1", OPENMPI)
    assert process.communicate(timeout=30)[0] == "", "the output goes to the file"
    environment = seen(tmp_path, 3)
    wanted = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "9"}
    assert wanted.items() <= environment.items()
    assert (environment["AWKWARD"], environment["TOKEN"]) == ("a b=c =d", '"$x"')


def test_under_slurm_ranks_learn_from_rank_0_where_it_is(tmp_path: Path) -> None:
    later = start(tmp_path, "slurm", start_rank.ASK_RANK_0, slurm(1))
    with pytest.raises(subprocess.TimeoutExpired):
        later.wait(timeout=1)
    first = start(tmp_path, "slurm", start_rank.ASK_RANK_0, slurm(0))
    assert (first.wait(timeout=30), later.wait(timeout=30)) == (0, 0)
    assert [seen(tmp_path, rank)["MASTER_ADDR"] for rank in (0, 1)] == ["n0", "n0"]


def test_without_its_launcher(tmp_path: Path) -> None:
    process = start(tmp_path, "slurm", "node1", OPENMPI)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID is not set" in out and "started by slurm" in out
