"""Environment files: every line has a reason, precedence, what is refused; and the Slurm script that uses them."""

import dataclasses
import os
import re
import subprocess
from pathlib import Path

import pytest

from launch.command import CommandError, remote_variables
from launch.env_files import FOLDER, environment_names, read_environment, with_environment_files
from launch.plan import PlanError, RunOptions, make_plan
from launch.recipe import find_recipe, load_recipe

SLURM = FOLDER.parent / "slurm"
RECIPE = load_recipe(find_recipe("tiny_cpu"))


def test_what_is_there() -> None:
    assert environment_names() == ["rocm", "slingshot"]
    found = read_environment(["rocm", "slingshot"])
    assert found["MIOPEN_USER_DB_PATH"] == found["MIOPEN_CUSTOM_CACHE_DIR"] == f"/tmp/miopen-{os.getuid()}"
    assert found["NCCL_NET_GDR_LEVEL"] == "PHB" and found["FI_CXI_RX_MATCH_MODE"] == "hybrid"
    assert not {"ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"} & set(found)


@pytest.mark.parametrize("name", environment_names())
def test_each_file_says_why_and_that_it_never_ran(name: str) -> None:
    """A comment stands over each variable, or over the group it belongs to."""
    text = (FOLDER / f"{name}.env").read_text(encoding="utf-8")
    assert "has never run on" in text and "OLCF" in text
    blocks = [block for block in text.split("\n\n") if "=" in re.sub(r"#.*", "", block)]
    assert all(block.startswith("#") for block in blocks)
    # Every variable reaches other machines even if no recipe names it.
    assert set(remote_variables(read_environment([name]), {}, [])) == set(read_environment([name]))


def test_the_recipe_s_own_variables_win_over_its_files_and_the_shell_over_both(tmp_path: Path) -> None:
    file = tmp_path / "mine.env"
    file.write_text("A=file\nB=file\nC=a b = c\n")
    recipe = dataclasses.replace(RECIPE, environment={"A": "recipe"}, environment_files=[str(file)])
    assert with_environment_files(recipe, None).environment == {"A": "recipe", "B": "file", "C": "a b = c"}
    assert with_environment_files(recipe, ()).environment == {"A": "recipe"}
    options = RunOptions(recipe="tiny_cpu", out=tmp_path / "run", environment=(str(file),))
    plan = make_plan(options, {"HOME": str(tmp_path), "B": "shell"})
    assert {name: plan.environment[name] for name in "ABC"} == {"A": "file", "B": "shell", "C": "a b = c"}
    assert make_plan(RunOptions(recipe="tiny_cpu"), {"HOME": str(tmp_path)}).environment.keys().isdisjoint("ABC")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A=1\n\n# again\nA=2\n", r"own.env:4: A is set in .*own.env:1 already. Keep one"),
        ("A=/tmp/{user}\n", r"own.env:1: \{user\} has no meaning here. Use \{uid\}"),
        ("export A=1\n", "own.env:1: is not NAME=value"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "own.env"
    path.write_text(text)
    with pytest.raises(CommandError, match=message):
        read_environment([str(path)])
    with pytest.raises(PlanError, match=message):
        make_plan(RunOptions(recipe="tiny_cpu", environment=(str(path),)), {"HOME": str(tmp_path)})


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(CommandError, match="--environment rocn: is neither one of rocm, slingshot nor a file"):
        read_environment(["rocn"])
    with pytest.raises(CommandError, match=r"--environment \./rocm: is neither"):
        read_environment(["./rocm"])


def test_frontier_s_masks_are_the_cores_beside_each_gcd() -> None:
    """Of the eight cores of a GCD's L3 cache the first is the system's."""
    first_core = {0: 48, 1: 56, 2: 16, 3: 24, 4: 0, 5: 8, 6: 32, 7: 40}
    masks = re.search(r"^masks=(.*)$", (SLURM / "frontier.sbatch").read_text(), re.MULTILINE)[1].split(",")
    cores = [[core for core in range(64) if int(mask, 16) >> core & 1] for mask in masks]
    assert cores == [list(range(first_core[gcd] + 1, first_core[gcd] + 8)) for gcd in range(8)]


def test_frontier_s_script_starts_a_run_with_its_settings(tmp_path: Path) -> None:
    """Its own arguments stand first, so that the user's win; run.sbatch does the rest. Slurm and rlhf are stand-ins."""
    programs = {
        "scontrol": "printf 'frontier00001\\nfrontier00002\\n'",
        "rlhf": 'printf \'%s\\n\' "$@" > "$CALLED"\nwhile [ "$1" != --hostfile ]; do shift; done; cat "$2" >>"$CALLED"',
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLED": str(tmp_path / "called"), "SLURM_JOB_ID": "7",
        "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_NODELIST": "frontier[00001-00002]",
    }  # fmt: skip
    (tmp_path / "launch").symlink_to(FOLDER.parent)
    script = tmp_path / "slurm_script"
    script.write_text((SLURM / "frontier.sbatch").read_text())
    argv = ["bash", str(script), "--recipe", "tiny_cpu", "--out", str(tmp_path / "run"), "--environment", "rocm"]
    subprocess.run(argv, env=environment, check=True, timeout=30)
    called = (tmp_path / "called").read_text().splitlines()
    assert called[:2] == ["run", "--hostfile"] and called[-2:] == ["frontier00001 slots=8", "frontier00002 slots=8"]
    assert called[3:6] == ["--environment", "rocm", "slingshot"] and called[6:8] == ["--launcher", "slurm"]
    assert called[8].startswith("--launcher_args=--cpus-per-task=7 --gpu-bind=none --cpu-bind=mask_cpu:fe000000000000,")
    assert called[9:-2] == argv[2:]


@pytest.mark.parametrize("path", sorted(SLURM.glob("*.sbatch")), ids=lambda path: path.name)
def test_slurm_scripts_parse(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
