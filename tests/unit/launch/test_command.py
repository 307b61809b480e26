"""Argument list and environment of a stage. Fault row F1: nothing depends on where a flag stands."""

from dataclasses import replace
from pathlib import Path

import pytest

from launch.command import CommandError, check_launcher_args, remote_variables, stage_command, stage_environment
from launch.hostfile import Host
from launch.placement import Placement

LOGS = Path("/runs/logs/step1_sft.1")
LOCAL = Placement(hosts=(Host("localhost", (0, 1)),), num_gpus=2)
REMOTE = Placement(hosts=(Host("node1", (0,)), Host("node2", (0,))), hostfile=Path("/shared/nodes"))


def test_local_command() -> None:
    argv = stage_command(
        "step1_sft.train", Path("/runs/a b/sft.yaml"), LOCAL, port=1234, rank_logs=LOGS, python="/venv/bin/python"
    )
    assert argv == [
        "/venv/bin/python", "-m", "deepspeed.launcher.runner", "-q", "--hostfile", "/dev/null", "--num_gpus", "2",
        "--enable_each_rank_log", "/runs/logs/step1_sft.1", "--master_port", "1234", "--no_local_rank", "--module",
        "step1_sft.train", "--config", "/runs/a b/sft.yaml",
    ]  # fmt: skip


def test_job_hostfile_is_not_picked_up() -> None:
    """deepspeed reads /job/hostfile when it gets no --hostfile, and then runs on every machine in it."""
    argv = stage_command("m", Path("/c"), LOCAL, port=1, rank_logs=LOGS)
    hostfile = Path(argv[argv.index("--hostfile") + 1])
    assert not hostfile.is_file()  # deepspeed's own test of whether there is a hostfile


def test_remote_command() -> None:
    argv = stage_command("step1_sft.train", Path("/shared/c.yaml"), REMOTE, port=1, rank_logs=LOGS)
    assert argv[argv.index("--hostfile") + 1] == "/shared/nodes"
    assert "--force_multi" not in argv and "--num_gpus" not in argv


def test_one_remote_host_is_forced() -> None:
    """`--include node2` alone makes deepspeed run on this machine instead, and hang."""
    one = Placement(hosts=(Host("node2", (0,)),), hostfile=Path("/n"), include="node2", master_addr="10.0.0.2")
    argv = stage_command("m", Path("/c"), one, port=1, rank_logs=LOGS)
    assert "--force_multi" in argv
    assert argv[argv.index("--include") + 1] == "node2" and argv[argv.index("--master_addr") + 1] == "10.0.0.2"


@pytest.mark.parametrize("name", ["a b", "x;touch${IFS}f", "$(id)", "a`id`", "a&b", "é"])
def test_remote_arguments_cannot_reach_a_shell(name: str) -> None:
    with pytest.raises(CommandError, match="pdsh does not quote"):
        stage_command("m", Path("/runs") / name, REMOTE, port=1, rank_logs=LOGS)
    stage_command("m", Path("/runs") / name, LOCAL, port=1, rank_logs=LOGS)  # no shell on this machine


@pytest.mark.parametrize(
    ("launcher", "arguments", "asked"),
    [
        ("openmpi", "--bind-to none --x 'a b'", "node1"),
        (
            "slurm",
            "--kill-on-bad-exit=1 --cpu-bind=none --distribution=block --ntasks-per-node=1 --x 'a b'",
            "-",
        ),
    ],
)
def test_other_launchers(launcher: str, arguments: str, asked: str) -> None:
    """They get the hosts that are left as a hostfile, and a program that tells ranks who they are."""
    placement = replace(REMOTE, launcher=launcher, launcher_args="--x 'a b'", exclude="node3", num_gpus=1)
    logs = Path("/a run/logs/step1_sft.1")
    argv = stage_command("step1_sft.train", Path("/a run/c.yaml"), placement, port=9, rank_logs=logs)
    assert argv[argv.index("--hostfile") + 1] == "/a run/logs/step1_sft.1/hostfile"
    assert argv[argv.index("--launcher") + 1] == launcher and f"--launcher_args={arguments}" in argv
    assert not {"--num_gpus", "--exclude", "--enable_each_rank_log"} & set(argv)
    assert ("--include" in argv) == (launcher == "slurm")
    if launcher == "slurm":  # without it srun takes any hosts
        assert argv[argv.index("--include") + 1] == "node1@node2"
    program = next(i for i, argument in enumerate(argv) if argument.endswith("start_rank.py"))
    assert argv[program + 1 :] == [
        launcher, asked, "9", str(logs), "/a run/deepspeed_env", "step1_sft.train", "--config", "/a run/c.yaml",
    ]  # fmt: skip
    named = stage_command("m", Path("/c"), replace(placement, master_addr="10.0.0.1"), port=9, rank_logs=logs)
    assert named.count("10.0.0.1") == 2 and "-" not in named


def test_launcher_arguments_that_do_not_come_apart() -> None:
    check_launcher_args("--mca btl_tcp_if_include 'ib0,ib1'")
    with pytest.raises(CommandError, match="--launcher_args .*No closing quotation"):
        check_launcher_args("--x 'a")


def test_environment_of_a_cpu_machine() -> None:
    environment = stage_environment({"PATH": "/bin"}, {"X": "1"}, accelerator_visible=False, source_root=Path("/src"))
    assert environment["DS_ACCELERATOR"] == "cpu" and environment["OMP_NUM_THREADS"] == "1"
    assert environment["X"] == "1" and environment["PYTHONPATH"] == "/src"


def test_environment_of_an_accelerator_machine_is_untouched() -> None:
    environment = stage_environment({}, {}, accelerator_visible=True, source_root=None)
    assert "DS_ACCELERATOR" not in environment and "OMP_NUM_THREADS" not in environment


def test_what_the_user_set_wins() -> None:
    base = {"OMP_NUM_THREADS": "4", "X": "user", "PYTHONPATH": "/a:/src"}
    environment = stage_environment(base, {"X": "recipe"}, accelerator_visible=False, source_root=Path("/src"))
    assert (environment["OMP_NUM_THREADS"], environment["X"]) == ("4", "user")
    assert environment["PYTHONPATH"] == "/src:/a"


def test_remote_variables(tmp_path: Path) -> None:
    """DeepSpeed carries few variables by itself, and its file reader crashes on a blank line or a comment."""
    file = tmp_path / ".deepspeed_env"
    file.write_text("# cluster\n\nNCCL_DEBUG=WARN\nPATHS = /a:/b\nOPTIONS=-x a=1 b = 2\nEMPTY=\n")
    environment = {"NCCL_SOCKET_IFNAME": "eth0", "HF_HOME": "/hf", "HOME": "/root", "MINE": "2", "DS_ENV_FILE": "/x"}
    assert remote_variables(environment, {"MINE": "1"}, [file]) == {
        "NCCL_DEBUG": "WARN",
        "PATHS": "/a:/b",
        "OPTIONS": "-x a=1 b = 2",
        "EMPTY": "",
        "NCCL_SOCKET_IFNAME": "eth0",
        "HF_HOME": "/hf",
        "MINE": "2",
    }


@pytest.mark.parametrize("value", ['a"b', "$HOME", "`id`", "a\\b", "a\nb", "a!b"])
def test_remote_values_cannot_reach_a_shell(value: str) -> None:
    with pytest.raises(CommandError, match="HF_TOKEN holds") as caught:
        remote_variables({"HF_TOKEN": value}, {}, [])
    assert value not in str(caught.value).replace("a quote, $, `, \\, !", "")  # it may be a token


@pytest.mark.parametrize("name", ["PYTHONPATH", "UCX_TLS", "MLFLOW_URI"])
def test_variables_that_deepspeed_carries_by_itself_cannot_reach_a_shell(name: str) -> None:
    with pytest.raises(CommandError, match=f"environment variable {name} holds"):
        remote_variables({name: "/a:$(touch x)"}, {}, [])
    assert name not in remote_variables({name: "/a b"}, {}, [])  # its own copy has this directory in front


def test_without_a_shell_only_a_line_break_is_refused() -> None:
    values = {"HF_TOKEN": 'a "$b" \\', "PYTHONPATH": "/a b:/c", "HOME": "/root"}
    carried = remote_variables(values, {}, [], through_shell=False)
    assert carried == {"HF_TOKEN": values["HF_TOKEN"], "PYTHONPATH": "/a b:/c"}
    with pytest.raises(CommandError, match="HF_TOKEN holds a line break"):
        remote_variables({"HF_TOKEN": "a\nb"}, {}, [], through_shell=False)


def test_blanks_and_equals_signs_reach_the_remote_shell_whole(tmp_path: Path) -> None:
    """What DeepSpeed's pdsh command makes of the file, read by a shell."""
    import subprocess
    from types import SimpleNamespace

    from deepspeed.launcher.multinode_runner import PDSHRunner  # noqa: TID251  what is tested is that it takes ours

    values = {"OPTIONS": "-x a=1 b = 2", "GLOB": "*", "HOME_OF": "~/x", "HASH": "a # b", "SEMI": "a; b", "EMPTY": ""}
    runner = PDSHRunner(SimpleNamespace(user_script="", user_args=[]), "")
    for name, value in remote_variables(values, dict.fromkeys(values, ""), []).items():
        runner.add_export(name, value)
    script = "".join(f"export {name}={value}; " for name, value in runner.exports.items())
    done = subprocess.run(["bash", "-c", f"{script} env -0"], capture_output=True, check=True, cwd=tmp_path)
    seen = dict(line.split("=", 1) for line in done.stdout.decode().split("\0") if line)
    assert {name: seen[name] for name in values} == values


def test_a_value_of_a_variable_file_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "env"
    file.write_text('A=1\nB="x y"\n')
    with pytest.raises(CommandError, match=r"env:2: environment variable B holds a quote"):
        remote_variables({}, {}, [file])
    file.write_bytes(b"A=\xff\n")
    with pytest.raises(CommandError, match=r"env: cannot be read as text"):
        remote_variables({}, {}, [file])


def test_bad_line_of_a_variable_file(tmp_path: Path) -> None:
    file = tmp_path / "env"
    file.write_text("A=1\nexport B=2\n")
    with pytest.raises(CommandError, match=r"env:2: is not NAME=value"):
        remote_variables({}, {}, [file])
