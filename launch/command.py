"""One stage and a placement -> the argument list and environment of a `deepspeed` process. No torch.

What DeepSpeed 0.19's launcher does by itself and is kept from doing here:

- It picks up /job/hostfile when no --hostfile is given, and then starts --num_gpus ranks on every host in it. A run on
  this machine passes `--hostfile /dev/null`, which it takes for "no hostfile".
- With one host left it starts on this machine, whatever the host's name. A remote host gets --force_multi.
- Over pdsh it carries only a few variables and quotes neither arguments nor values. Ours go through DS_ENV_FILE after a
  check that they hold nothing a shell would expand.
- Its OpenMPI launcher takes no filters, its Slurm launcher names no hosts without one, and both leave it to MPI to tell
  ranks who they are. They get a hostfile of the hosts and slots that are left, and launch/start_rank.py as the program.
"""

import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from launch.placement import Placement
from launch.start_rank import ASK_RANK_0

NO_HOSTFILE = "/dev/null"
"""`--hostfile` of a run on this machine: not a regular file, so deepspeed reads none, /job/hostfile included."""

CARRIED_PREFIXES = (
    "NCCL_", "RCCL_", "GLOO_", "FI_", "HSA_", "MIOPEN_", "TORCH_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "WANDB_",
    "DS_", "OMP_", "RLHF_",
)  # fmt: skip
"""Variables of this shell that remote ranks get too."""

_CARRIED_BY_DEEPSPEED = ("PYTHON", "MLFLOW", "MV2", "UCX")
_START_RANK = Path(__file__).with_name("start_rank.py")
_OWN_LAUNCHER_ARGUMENTS = {
    # One core for each rank, mpirun's default, would hold all threads of a rank.
    "openmpi": "--bind-to none",
    # Without it srun waits for the ranks that wait for the one that failed.
    "slurm": "--kill-on-bad-exit=1 --cpu-bind=none --distribution=block --ntasks-per-node={slots}",
}

_SHELL_SAFE_ARGUMENT = re.compile(r"[\w@%+=:,./-]+", re.ASCII)
_EXPANDED_IN_QUOTES = re.compile(r"[\"$`\\!\n\r\0]")
_LINE_BREAKS = re.compile(r"[\n\r\0]")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class CommandError(ValueError):
    """A command or an environment that cannot be handed to other machines safely."""


def stage_command(
    module: str, config_path: Path, placement: Placement, *, port: int, rank_logs: Path, python: str = sys.executable
) -> list[str]:
    """Argument list that starts one stage; never a shell string.

    Args:
        module: of the stage's program.
        config_path: its YAML.
        placement: where ranks start.
        port: of rank 0.
        rank_logs: existing folder that gets a file with each rank's output.
        python: interpreter of the launcher.

    Raises:
        CommandError: an argument holds characters that a remote shell would interpret.
    """
    argv = [python, "-m", "deepspeed.launcher.runner", "-q"]
    program = ["--module", module, "--config", str(config_path)]
    if placement.is_remote and placement.launcher != "pdsh":
        return [*argv, *_through(placement, port, rank_logs), module, *program[2:]]
    argv += ["--hostfile", str(placement.hostfile) if placement.hostfile else NO_HOSTFILE]
    given = {
        "--num_gpus": placement.num_gpus,
        "--include": placement.include,
        "--exclude": placement.exclude,
        "--master_addr": placement.master_addr,
    }
    for flag, value in given.items():
        argv += [flag, str(value)] if value else []
    if placement.is_remote and len(placement.hosts) == 1:
        argv.append("--force_multi")
    if placement.is_remote and placement.launcher_args:
        argv.append(f"--launcher_args={placement.launcher_args}")
    argv += ["--enable_each_rank_log", str(rank_logs)]
    argv += ["--master_port", str(port), "--no_local_rank", *program]
    if placement.is_remote:
        _check_for_shells(argv)
    return argv


def _check_for_shells(argv: Sequence[str]) -> None:
    for argument in argv:
        if not _SHELL_SAFE_ARGUMENT.fullmatch(argument) and not argument.startswith("--launcher_args="):
            raise CommandError(
                f"{argument!r} would be read by the remote machines' shells, because pdsh does not quote. "
                "Use paths of letters, digits and @%+=:,./-_ only."
            )


def _through(placement: Placement, port: int, rank_logs: Path) -> list[str]:
    """Arguments of deepspeed's OpenMPI and Slurm launchers up to the module's name; neither is a shell in between."""
    own = _OWN_LAUNCHER_ARGUMENTS[placement.launcher].format(slots=len(placement.hosts[0].slots))
    argv = ["--hostfile", str(hostfile_path(rank_logs)), "--launcher", placement.launcher, "--force_multi"]
    argv.append(f"--launcher_args={own} {placement.launcher_args}".rstrip())
    if placement.launcher == "slurm":
        argv += ["--include", "@".join(host.name for host in placement.hosts)]
    # With an address deepspeed does not ask the first host for one; this machine need not reach it through ssh at all.
    first = placement.master_addr or placement.hosts[0].name.rpartition("@")[2]
    argv += ["--no_ssh_check", "--master_addr", first, "--master_port", str(port), str(_START_RANK)]
    # Slurm puts rank 0 on the host that comes first in its own list.
    asked = ASK_RANK_0 if placement.launcher == "slurm" and placement.master_addr is None else first
    return [*argv, placement.launcher, asked, str(port), str(rank_logs), str(variables_path(rank_logs))]


def hostfile_path(rank_logs: Path) -> Path:
    """The hosts and slots of one attempt, for the launchers that take no filters."""
    return rank_logs / "hostfile"


def variables_path(rank_logs: Path) -> Path:
    """Variables of the ranks on other machines: a file of the run folder, whose logs/ holds `rank_logs`."""
    return rank_logs.parent.parent / "deepspeed_env"


def check_launcher_args(text: str) -> None:
    """Check --launcher_args.

    Raises:
        CommandError: deepspeed could not take it apart.
    """
    try:
        shlex.split(text)
    except ValueError as error:
        raise CommandError(f"--launcher_args {text!r}: {error}. Close the quote.") from None


def stage_environment(
    base: Mapping[str, str], recipe: Mapping[str, str], *, accelerator_visible: bool, source_root: Path | None
) -> dict[str, str]:
    """Environment of the launcher process; ranks on this machine inherit it.

    A variable that the user set wins over the recipe's, and the recipe's over the defaults here.

    Args:
        base: the user's environment.
        recipe: `environment` of pipeline.yaml.
        accelerator_visible: False sets DS_ACCELERATOR=cpu, so that no process probes for one.
        source_root: checkout to put on PYTHONPATH; None when the packages are installed.
    """
    environment = {"TOKENIZERS_PARALLELISM": "false"}
    if not accelerator_visible:
        # More threads than cores make two ranks slower: 70 -> 145 ms for one all-reduce on 2 cores.
        environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environment |= recipe
    environment |= base
    environment["PYTHONUNBUFFERED"] = "1"
    environment.setdefault("PYTHONFAULTHANDLER", "1")
    if source_root is not None:
        paths = [str(source_root), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return environment


def remote_variables(
    environment: Mapping[str, str], recipe: Mapping[str, str], files: Sequence[Path], *, through_shell: bool = True
) -> dict[str, str]:
    """Variables that ranks on other machines get: the user's .deepspeed_env files, ours by prefix, and the recipe's.

    Args:
        environment: of the launcher.
        recipe: `environment` of pipeline.yaml.
        files: the user's.
        through_shell: values pass a shell on the other machines (pdsh); without one, deepspeed's variables are ours.

    Raises:
        CommandError: a line is no assignment, or a value holds what a remote shell would expand. Values are not
            printed: they may be tokens.
    """
    prefixes = CARRIED_PREFIXES if through_shell else (*CARRIED_PREFIXES, *_CARRIED_BY_DEEPSPEED)
    carried: dict[str, str] = {}
    places: dict[str, str] = {}
    for path in files:
        for number, name, value in assignments(path):
            carried[name], places[name] = value, f"{path}:{number}: "
    for name in sorted(environment):
        if name.startswith(prefixes) or name in recipe:
            carried[name] = environment[name]
            places.pop(name, None)
    carried.pop("DS_ENV_FILE", None)
    theirs = {name: value for name, value in environment.items() if name.startswith(_CARRIED_BY_DEEPSPEED)}
    for name, value in {**theirs, **carried}.items():
        if through_shell and _EXPANDED_IN_QUOTES.search(value):
            raise CommandError(
                f"{places.get(name, '')}environment variable {name} holds a quote, $, `, \\, ! or line break, which "
                "the remote shells would expand. Set it on the machines themselves, or take it out here."
            )
        if _LINE_BREAKS.search(value):
            raise CommandError(f"environment variable {name} holds a line break. Set it on the machines themselves.")
    return carried


def assignments(path: Path) -> Iterator[tuple[int, str, str]]:
    """Line number, name and value of NAME=value lines; what follows the first `=` is the value, blanks inside kept.

    Raises:
        CommandError: the file cannot be read, or a line is no assignment.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{path}: cannot be read as text ({error}). Repair or remove it.") from None
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not _VARIABLE.fullmatch(name.strip()):
            raise CommandError(f"{path}:{number}: is not NAME=value. Correct or delete the line.")
        yield number, name.strip(), value.strip()


def user_variable_files() -> list[Path]:
    """The files that deepspeed would read by itself: `.deepspeed_env` in the home and the working directory."""
    candidates = [Path.home() / ".deepspeed_env", Path(".deepspeed_env")]
    return [path for path in candidates if path.is_file()]


def source_root() -> Path | None:
    """The checkout this code runs from, which ranks need on PYTHONPATH; None when it is installed in site-packages."""
    root = Path(__file__).resolve().parent.parent
    return root if (root / "setup.py").is_file() else None
