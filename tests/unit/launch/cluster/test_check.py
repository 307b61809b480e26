"""A check of two machines through an `ssh` of ours, which runs the probe here with something changed on one of them.

The protocol, the probe and the comparison are the real ones. What is wrong on a machine is put into its
`sitecustomize.py`, which its Python loads first.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.cluster import check
from launch.cluster.check import CheckOptions, check_machines
from launch.cluster.finding import Finding
from launch.cluster.session import Session
from launch.placement import PlacementFlags
from launch.plan import Plan, RunOptions, make_plan
from launch.process import Interrupt
from rlhf.cli import main

_SSH = r"""#!/bin/sh
# Options come in pairs; then the host and the command.
while [ "${1#-}" != "$1" ]; do shift 2; done
host=$1; shift
[ -e "$MACHINES/$host/silent" ] && exec sleep 60
if [ ! -d "$MACHINES/$host" ]; then echo "ssh: connect to host $host port 22: Connection timed out" >&2; exit 255; fi
PYTHONPATH=$MACHINES/$host exec sh -c "$*"
"""
_TORCH = """
__version__ = "2.13.0"
class accelerator:
    is_available = staticmethod(lambda: False)
"""
_OTHER_DISK = """
import pathlib
def elsewhere(method):
    def run(path, *arguments, **named):
        hidden = ".rlhf-check-" in path.name
        return method(pathlib.Path({other!r}) / path.name if hidden else path, *arguments, **named)
    return run
for name in ("read_text", "write_text", "unlink"):
    setattr(pathlib.Path, name, elsewhere(getattr(pathlib.Path, name)))
"""

Make = Callable[..., Plan]


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of node1 and node2; what is in theirs comes first on their Python's path."""
    folder = tmp_path / "machines"
    for name in ("node1", "node2"):
        (folder / name).mkdir(parents=True)
        (folder / name / "torch.py").write_text(_TORCH)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "ssh").write_text(_SSH)
    (programs / "ssh").chmod(0o755)
    (programs / "pdsh").symlink_to(programs / "ssh")
    monkeypatch.setenv("MACHINES", str(folder))
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    (tmp_path / "hosts").write_text("# of the tests\nnode1 slots=1\nnode2 slots=1\n")
    return folder


def findings(tmp_path: Path, *, expect: bool = True, **flags: object) -> list[Finding]:
    """What is wrong; both machines are this one, so rank 0 is reached at 127.0.0.1."""
    where = {"hostfile": tmp_path / "hosts", "master_addr": "127.0.0.1", **flags}
    plan = make_plan(
        RunOptions(recipe="tiny_cpu", out=tmp_path / "runs" / "r", placement=PlacementFlags(**where))  # type: ignore[arg-type]
    )
    before = sorted(tmp_path.rglob("*"))
    report = check_machines(plan, CheckOptions(links=False), Interrupt())
    left = [path for path in sorted(tmp_path.rglob("*")) if path not in before and "__pycache__" not in path.parts]
    assert left == []
    assert {finding.host for finding in report.findings} >= {"node1", "node2"}
    return [finding for finding in report.findings if finding.status not in ("ok", "none")]


def change(machines: Path, host: str, code: str) -> None:
    (machines / host / "sitecustomize.py").write_text(code)


def test_two_good_machines(machines: Path, tmp_path: Path) -> None:
    assert findings(tmp_path) == []


def test_a_machine_that_does_not_answer(machines: Path, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("\nnode1 slots=1\nnode9 slots=1\n")
    where = PlacementFlags(hostfile=tmp_path / "hosts", master_addr="127.0.0.1")
    plan = make_plan(RunOptions(recipe="tiny_cpu", out=tmp_path / "r", placement=where))
    report = check_machines(plan, CheckOptions(), Interrupt())
    first, *rest = [each for each in report.findings if each.status not in ("ok", "none")]
    assert str(first) == (
        f"node9: ssh: {tmp_path}/hosts:3: no answer through ssh: exit code 255: ssh: connect to host node9 port 22: "
        "Connection timed out, expected an answer without a password. See `ssh -o BatchMode=yes node9 true`, or leave "
        "it out with --exclude."
    )
    assert [(each.check, each.status) for each in rest] == [("links", "not checked")]
    assert "node1" in {each.host for each in report.findings if each.check == "packages"}, "the other one is checked"


def test_a_machine_that_hangs(machines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "CONNECT_SECONDS", -9)
    (machines / "node2" / "silent").touch()
    (found,) = findings(tmp_path)
    assert found.host == "node2" and "no answer within 1 s" in found.found


def test_another_version(machines: Path, tmp_path: Path) -> None:
    change(machines, "node2", """
import importlib.metadata as metadata, platform
real = metadata.version
metadata.version = lambda name: "2.12.0" if name == "torch" else real(name)
platform.python_version = lambda: "3.10.1"
""")  # fmt: skip
    python, packages = findings(tmp_path)
    assert (packages.host, packages.check, packages.status) == ("node2", "packages", "failed")
    from importlib.metadata import version

    assert (packages.found, packages.expected) == ("torch 2.12.0", f"torch {version('torch')}")
    assert packages.repair == f"There: {sys.executable} -m pip install torch=={version('torch')}"
    assert python.found.startswith("3.10.1 at ") and python.check == "python"


def test_a_python_that_is_not_there(machines: Path) -> None:
    """Another one answers in its place, so that the machine can say which there are."""
    session = Session("node1", python="/no/such/python")
    assert abs(session.ask("clock", seconds=30)["time"] - time.time()) < 30
    session.close()


def test_another_machine_at_the_address_of_rank_0(
    machines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection alone does not show that rank 0 would be at its other end."""
    change(machines, "node1", """
import socket
real = socket.create_server
socket.create_server = lambda address, **named: real(("", 0), **named)
""")  # fmt: skip
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        found = findings(tmp_path, master_port=stranger.getsockname()[1])
    assert [(each.host, each.check) for each in found] == [
        ("node1", "reach of rank 0"),
        ("node2", "reach of rank 0"),
    ]
    assert found[0].found.endswith("another machine answers at that address")


def test_a_broken_torch(machines: Path, tmp_path: Path) -> None:
    (machines / "node1" / "torch.py").write_text("raise ImportError('libcudart.so.12: no such file')\n")
    (found,) = findings(tmp_path)
    assert (found.host, found.check) == ("node1", "torch")
    assert found.found == "cannot be imported: ImportError: libcudart.so.12: no such file"


def test_other_code_and_data(machines: Path, tmp_path: Path) -> None:
    """A file of ours and a file of the recipe's data that read otherwise there."""
    change(machines, "node2", """
import pathlib
real = pathlib.Path.open
def open(path, *arguments, **named):
    return real(pathlib.Path("/dev/null") if path.name == "ops.py" else path, *arguments, **named)
pathlib.Path.open = open
""")  # fmt: skip
    (found,) = findings(tmp_path)
    assert (found.host, found.check) == ("node2", "code")
    assert found.found == "rlhf has other contents in ops.py"


def test_a_disk_that_is_not_shared(machines: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    change(machines, "node2", _OTHER_DISK.format(other=str(other)))
    (found,) = findings(tmp_path)
    assert (found.host, found.check) == ("node2", "run folder")
    assert found.found == f"{tmp_path} is another disk: a file written here is not there"
    assert found.expected == "one shared disk" and "Mount the shared disk" in found.repair
    assert list(other.iterdir()) == [], "what was written there is gone"


def test_a_disk_that_cannot_be_written_to(machines: Path, tmp_path: Path) -> None:
    change(machines, "node1", """
import pathlib
def write_text(path, *arguments, **named):
    raise PermissionError(13, "Permission denied", str(path))
pathlib.Path.write_text = write_text
""")  # fmt: skip
    (found,) = findings(tmp_path)
    assert (found.host, found.check) == ("node1", "run folder")
    assert found.found.startswith(f"cannot write to {tmp_path}: PermissionError: ")


def test_a_full_disk(machines: Path, tmp_path: Path) -> None:
    change(machines, "node2", """
import os
real = os.statvfs
os.statvfs = lambda path: os.statvfs_result([4096, 4096, 10**6, 1000, 1000, *real(path)[5:]])
""")  # fmt: skip
    shm, disk = sorted(findings(tmp_path), key=lambda each: each.check)
    assert disk.found == f"0.0 GB free in {tmp_path}" and disk.expected.endswith("for the states and models of the run")
    assert "lower run.keep_states" in disk.repair
    assert (shm.status, shm.found) == ("warning", "4 MiB free in /dev/shm")


def test_a_wrong_clock(machines: Path, tmp_path: Path) -> None:
    change(machines, "node2", "import time\nreal = time.time\ntime.time = lambda: real() - 90\n")
    (found,) = findings(tmp_path)
    assert (found.host, found.check, found.expected) == ("node2", "clock", "within 1 s of here")
    assert -91 < float(found.found.split()[0]) < -89
    assert "time server" in found.repair


def test_a_port_that_is_taken(machines: Path, tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        (found,) = findings(tmp_path, master_port=port)
    assert (found.host, found.check) == ("node1", "port")
    assert found.found.startswith(f"port {port} cannot be used: OSError: [Errno 98] Address already in use")
    assert "--master_port" in found.repair


def test_rank_0_that_is_not_reached(machines: Path, tmp_path: Path) -> None:
    """A name that stands for nothing there: each machine says so."""
    change(machines, "node2", """
import socket
real = socket.create_connection
def create_connection(address, *arguments, **named):
    raise TimeoutError("timed out")
socket.create_connection = create_connection
""")  # fmt: skip
    (found,) = findings(tmp_path)
    assert (found.host, found.check) == ("node2", "reach of rank 0")
    assert "cannot connect to 127.0.0.1:" in found.found and found.found.endswith("TimeoutError: timed out")


def test_interfaces(machines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=ib7")
    found = findings(tmp_path)
    assert [(each.host, each.check) for each in found] == [("node1", "interfaces"), ("node2", "interfaces")]
    assert found[0].found == "NCCL_SOCKET_IFNAME==ib7 names none of its interfaces"
    assert "lo 127.0.0.1" in found[0].expected
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    change(machines, "node2", "import socket\nsocket.gethostbyname = lambda name: '127.0.1.1'\n")
    (found, *_) = [each for each in findings(tmp_path) if each.host == "node2"]
    assert "stands for 127.0.1.1, which other machines cannot reach" in found.found
    assert "Set GLOO_SOCKET_IFNAME" in found.repair


def test_the_working_folder(machines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    change(
        machines, "node2",
        f"import os\nreal = os.path.isdir\nos.path.isdir = lambda p: p != {str(here)!r} and real(p)\n",
    )  # fmt: skip
    (found,) = findings(tmp_path)
    assert (found.host, found.check) == ("node2", "working folder")


def test_the_command(machines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One table, one line to act on for each problem, JSON, and an exit code of 0, 1 or 2."""
    arguments = ["check", "--recipe", "tiny_cpu", "--hostfile", str(tmp_path / "hosts"), "--no-links"]
    arguments += ["--master_addr", "127.0.0.1", "--out", str(tmp_path / "r"), "--json", str(tmp_path / "r.json")]
    assert main(arguments) == 0
    assert "no problem" in capsys.readouterr().out
    change(machines, "node2", "import platform\nplatform.python_version = lambda: '3.9.0'\n")
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert "  - failed: node2: python: 3.9.0 at " in out
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["ok"] is False and report["facts"]["node2"]["python"] == "3.9.0"
    assert [each["host"] for each in report["findings"] if each["status"] == "failed"] == ["node2"]
    (tmp_path / "hosts").write_text("node1 slots=0\n")
    assert main(arguments) == 2
    assert "has 0 slots" in capsys.readouterr().out
    assert not (tmp_path / "r").exists()


def test_a_run_checks_first(machines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`rlhf run` stops before its first stage, and says so once a problem."""
    change(machines, "node2", "import platform\nplatform.python_version = lambda: '3.9.0'\n")
    arguments = ["run", "--recipe", "tiny_cpu", "--hostfile", str(tmp_path / "hosts"), "--out", str(tmp_path / "r")]
    assert main([*arguments, "--master_addr", "127.0.0.1"]) == 2
    out = capsys.readouterr().out
    assert "checking the machines; --no-check leaves it out" in out
    assert "nothing was started. 1 problem" in out and "node2: python: 3.9.0" in out
    assert not (tmp_path / "r" / "logs").exists()
