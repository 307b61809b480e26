"""Run by mpirun or srun once for each rank: makes it what DeepSpeed's per-node launcher makes it under pdsh. No torch.

    python start_rank.py openmpi|slurm ADDRESS PORT FOLDER VARIABLES MODULE ARGUMENTS...

DeepSpeed's OpenMPI and Slurm launchers give a rank neither RANK nor an address of rank 0, and no file of its own for
its output; and they write variables into command lines, with quotes as part of the value.
"""

import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

ASK_RANK_0 = "-"
"""ADDRESS of rank 0 when the launcher decides where rank 0 is: it writes its address into FOLDER."""

_NAMES = {
    "openmpi": {
        "RANK": "OMPI_COMM_WORLD_RANK",
        "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
        "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    },
    "slurm": {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"},
}
_ADDRESS_FILE = "rank0.address"
_PATIENCE_SECONDS = 300.0


def ranks_variables(launcher: str, environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE and LOCAL_RANK from what the launcher says.

    Raises:
        SystemExit: it does not say so.
    """
    missing = [theirs for theirs in _NAMES[launcher].values() if theirs not in environment]
    if missing:
        raise SystemExit(f"start_rank: {', '.join(missing)} is not set. This program is to be started by {launcher}.")
    return {ours: environment[theirs] for ours, theirs in _NAMES[launcher].items()}


def read_variables(path: Path) -> dict[str, str]:
    """Lines NAME=value as `rlhf run` writes them."""
    pairs = (line.partition("=") for line in path.read_text(encoding="utf-8").splitlines())
    return {name: value for name, _, value in pairs}


def address_of_rank_0(folder: Path, rank: int, environment: Mapping[str, str]) -> str:
    """The name of rank 0's machine, through a file that all ranks see.

    Raises:
        SystemExit: it did not come.
    """
    path = folder / _ADDRESS_FILE
    if rank == 0:
        own = environment.get("SLURMD_NODENAME") or socket.gethostname()
        new = path.with_suffix(".new")
        new.write_text(own, encoding="utf-8")
        new.replace(path)
        return own
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if path.is_file():
            return path.read_text(encoding="utf-8")
        time.sleep(0.2)
    raise SystemExit(
        f"start_rank: rank {rank} on {socket.gethostname()} has seen no {path} for {_PATIENCE_SECONDS:g} s: rank 0 did "
        "not start, or this machine does not see the run folder."
    )


def main(arguments: list[str]) -> None:
    """Set the variables, send the output to a file, and become the program."""
    launcher, address, port, folder_name, variables, *program = arguments
    folder = Path(folder_name)
    environment = {**os.environ, **read_variables(Path(variables))}
    environment |= ranks_variables(launcher, environment)
    rank = int(environment["RANK"])
    # In append mode, like the files of DeepSpeed's launcher, whose names these have.
    log = os.open(folder / f"{socket.gethostname()}_rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if address == ASK_RANK_0:
        address = address_of_rank_0(folder, rank, environment)
    environment |= {"MASTER_ADDR": address, "MASTER_PORT": port}
    os.execve(sys.executable, [sys.executable, "-u", "-m", *program], environment)


if __name__ == "__main__":
    main(sys.argv[1:])
