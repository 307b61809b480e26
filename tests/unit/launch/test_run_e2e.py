"""launch/run_e2e.sh, without installing anything: arguments, stamp, old Python. From nothing: the pipeline test."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "launch" / "run_e2e.sh"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "check out"  # a blank in the path
    (root / "launch").mkdir(parents=True)
    shutil.copy(SCRIPT, root / "launch")
    (root / "setup.py").write_text("setup")
    (root / "constraints.txt").write_text("constraints")
    return root


@pytest.fixture
def installed(checkout: Path) -> Path:
    """A checkout whose .venv is up to date; its `rlhf` prints its arguments."""
    binaries = checkout / ".venv" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (binaries / "rlhf").write_text('#!/bin/sh\nprintf "<%s>" "$@"\n')
    for path in binaries.iterdir():
        path.chmod(0o755)
    digest = hashlib.sha256(b"setupconstraints").hexdigest()
    (checkout / ".venv" / ".installed").write_text(f"{digest}\ndev\n")
    return checkout


def call(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    argv = ["bash", str(checkout / "launch" / "run_e2e.sh"), *arguments]
    return subprocess.run(argv, capture_output=True, text=True, cwd="/", env={**os.environ, **environment}, check=False)


@pytest.mark.parametrize(
    ("arguments", "passed"),
    [
        ([], "<run><--recipe><tiny_cpu>"),
        (["--seed", "2", "--out", "a b"], "<run><--recipe><tiny_cpu><--seed><2><--out><a b>"),
        (["--out", "x", "--recipe", "gsm8k_small"], "<run><--out><x><--recipe><gsm8k_small>"),
        (["--recipe=gsm8k_small", "--dry-run"], "<run><--recipe=gsm8k_small><--dry-run>"),
        (["--extras", "dev", "--install-only"], ""),
    ],
)
def test_arguments_pass_on(installed: Path, arguments: list[str], passed: str) -> None:
    done = call(installed, *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (0, passed, "")


def test_exit_code_passes_on(installed: Path) -> None:
    (installed / ".venv" / "bin" / "rlhf").write_text("#!/bin/sh\nexit 7\n")
    assert call(installed).returncode == 7


@pytest.mark.parametrize("change", ["setup.py", "constraints.txt", "extras"])
def test_a_change_installs_again(installed: Path, change: str) -> None:
    (installed / ".venv" / "bin" / "python").write_text(
        f'#!/bin/sh\n[ "$3" = install ] && echo "pip $*" && exit\nexec {sys.executable} "$@"\n'
    )
    if change != "extras":
        (installed / change).write_text("other")
    out = call(installed, "--install-only", "--extras", "dev,smollm2" if change == "extras" else "dev").stdout
    assert "pip -m pip install --quiet --disable-pip-version-check torch==" in out
    assert out.rstrip().endswith("[dev,smollm2]" if change == "extras" else "[dev]")
    again = call(installed, "--install-only", "--extras", "dev")
    assert (again.returncode, again.stdout) == (0, "")


def test_old_python_is_refused(checkout: Path, tmp_path: Path) -> None:
    old = tmp_path / "python3.8"
    old.write_text('#!/bin/sh\ncase "$2" in *exit*) exit 1;; *) echo 3.8.10;; esac\n')
    old.chmod(0o755)
    done = call(checkout, PYTHON=str(old))
    assert done.returncode == 2 and "is Python 3.8.10, but 3.10 or newer is needed" in done.stderr
    done = call(checkout, PYTHON="no-such-python")
    assert done.returncode == 2 and "no-such-python is not on PATH" in done.stderr
