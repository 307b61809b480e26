"""Environment of deepspeed's launcher for one start of ranks. No torch."""

import os
from collections.abc import Mapping
from pathlib import Path

from launch import command
from launch.placement import DEVICE_VARIABLES, Placement
from launch.plan import Plan


def launcher_environment(
    plan: Plan, placement: Placement, *, rank_logs: Path, variables: Mapping[str, str]
) -> dict[str, str]:
    """The launcher's environment; for other machines also the files that ranks get hosts and variables from.

    Args:
        plan: of the run.
        placement: where ranks start.
        rank_logs: of this start, in the logs/ of the folder that variables are written to; it gets the hostfile.
        variables: beside the plan's environment.
    """
    environment = {**plan.environment, **variables}
    if not placement.is_remote:
        for name in DEVICE_VARIABLES:
            environment.pop(name, None)  # its devices are in --include or --num_gpus
        return environment
    by_pdsh = placement.launcher == "pdsh"
    carried = command.remote_variables(
        environment, plan.recipe.environment, command.user_variable_files(), through_shell=by_pdsh
    )
    path = command.variables_path(rank_logs)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:  # may hold tokens
        file.write("".join(f"{name}={value}\n" for name, value in carried.items()))
    hosts = "".join(f"{host}\n" for host in placement.hosts)
    command.hostfile_path(rank_logs).write_text(hosts, encoding="utf-8")
    # The others would show the values in command lines, with quotes added; launch/start_rank.py reads the file.
    environment["DS_ENV_FILE"] = str(path) if by_pdsh else os.devnull
    return environment
