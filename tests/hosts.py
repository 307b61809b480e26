"""Emulated hosts on this machine, so that what crosses machines runs for real: ssh, pdsh, mpirun, srun, `rlhf`.

Two ways. `namespaces`: each host has network, process, name, mount and IPC namespaces of its own and an sshd; the
network cards are joined by a bridge in a namespace that nothing else is in, so no address exists outside. Needs root.
`loopback`: one sshd for each name on 127.0.0.2 and on, sharing everything else; no faults can be made there.

Nothing has a name outside of the test's folder: a host is gone when its first process is, which dies with the test.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlhf import procfs

NETWORK = "10.77.0"
INTERFACE = "eth0"
ROOT = Path(__file__).resolve().parents[1]

_UNSHARE = ("unshare", "--net", "--pid", "--uts", "--mount", "--ipc", "--fork", "--kill-child", "--mount-proc")
_TIMEOUT = 20.0

# What a host does first; its arguments are its name and its folder. The folder holds its files of /etc.
_INIT = r"""
set -eu
hostname "$1"
mount --make-rprivate /
for file in hosts passwd resolv.conf; do mount --bind "$2/$file" "/etc/$file"; done
mount -t tmpfs tmpfs /run; mkdir -p /run/sshd
mount -t tmpfs tmpfs /dev/shm
if mountpoint -q /sys/fs/cgroup; then mkdir "$2/cgroup"; mount --rbind /sys/fs/cgroup "$2/cgroup"; fi
mount -t sysfs sysfs /sys   # that of this network
if mountpoint -q "$2/cgroup"; then mount --move "$2/cgroup" /sys/fs/cgroup; fi
ip link set lo up
touch "$2/made"
while [ ! -e "$2/wired" ]; do sleep 0.05; done
/usr/sbin/sshd -f "$2/sshd_config" -E "$2/sshd.log"
touch "$2/up"
while :; do sleep 3600 & wait; done
"""

_SSHD = """
Port {port}
ListenAddress {address}
HostKey {keys}/host
AuthorizedKeysFile {keys}/user.pub
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
PidFile none
MaxStartups 100
"""
_SSH = """
Host {name}
  HostName {address}
  Port {port}
Host *
  IdentityFile {keys}/user
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
  ConnectTimeout 5
  ServerAliveInterval 5
  ServerAliveCountMax 3
"""


def lacking(*programs: str, namespaces: bool = True) -> str:
    """Why there can be no hosts with these programs here; empty if there can."""
    search = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    missing = [name for name in ("sshd", "ssh", "ssh-keygen", *programs) if shutil.which(name, path=search) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if not namespaces:
        return ""
    if os.geteuid() != 0:
        return "emulated hosts need root"
    made = subprocess.run([*_UNSHARE, "ip", "link", "add", "br0", "type", "bridge"], capture_output=True, text=True)
    return "" if made.returncode == 0 else f"no namespaces here: {made.stderr.strip()}"


@dataclass
class Host:
    """One emulated machine."""

    name: str
    address: str
    folder: Path
    """Its files; `home` in it is the home of its user."""
    _unshare: "subprocess.Popen[bytes]"
    _switch: int
    _port: str

    @property
    def first_process(self) -> int:
        """Number, outside, of the process that all others of this host die with."""
        return _only_child(self._unshare.pid)

    def command(self, argv: Sequence[str]) -> list[str]:
        """An argument list that runs another one on this host, in the working directory of the caller."""
        enter = ["nsenter", "--target", str(self.first_process), "--net", "--pid", "--uts", "--mount", "--ipc"]
        return [*enter, f"--wd={Path.cwd()}", "--", *argv]

    def environment(self, changes: Mapping[str, str] | None = None) -> dict[str, str]:
        """The caller's variables, with this host's home."""
        return {**os.environ, "HOME": str(self.folder / "home"), "HOSTNAME": self.name, **(changes or {})}

    def start(self, *argv: str, **variables: str) -> "subprocess.Popen[str]":
        """Start a program here; stdout and stderr come together."""
        return subprocess.Popen(
            self.command(argv),
            env=self.environment(variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *argv: str, timeout: float = 60, **variables: str) -> "subprocess.CompletedProcess[str]":
        """Run a program here; its exit code is not looked at."""
        with self.start(*argv, **variables) as process:
            try:
                out, _ = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                self.end(process)
                out, _ = process.communicate(timeout=10)
                raise AssertionError(f"{' '.join(argv)} took more than {timeout} s:\n{out}") from None
        return subprocess.CompletedProcess(argv, process.returncode, out, "")

    def pid(self, process: "subprocess.Popen[str]") -> int:
        """Number, outside, of the program that `start` started: a signal to nsenter would not reach it."""
        return _only_child(process.pid)

    def end(self, process: "subprocess.Popen[str]") -> None:
        """End a program of `start` with SIGKILL."""
        with contextlib.suppress(AssertionError, ProcessLookupError):
            os.kill(self.pid(process), signal.SIGKILL)

    def kill(self, inner_pid: int, signum: int = signal.SIGKILL) -> None:
        """Send a signal to a process by the number that it has on this host."""
        done = self.run("kill", f"-{int(signum)}", str(inner_pid))
        assert done.returncode == 0, done.stdout

    def processes(self, word: str = "") -> list[str]:
        """Command lines of this host that hold a word; without ended processes."""
        if not self.is_on:
            return []
        namespace = os.readlink(f"/proc/{self.first_process}/ns/pid")
        found = []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{entry}/ns/pid") == namespace and procfs.read(entry, "cmdline"):
                    found.append(procfs.read(entry, "cmdline").replace(b"\0", b" ").decode("utf-8", "replace"))
        return [line for line in found if word in line]

    @property
    def is_on(self) -> bool:
        """Whether it has not been switched off."""
        return self._unshare.poll() is None

    def unplug(self) -> None:
        """Take its network away; no packet says so to anybody."""
        self._link("down")

    def plug_in(self) -> None:
        """Give its network back."""
        self._link("up")

    def _link(self, state: str) -> None:
        _check(["nsenter", "--target", str(self._switch), "--net", "ip", "link", "set", self._port, state])

    def power_off(self) -> None:
        """End all its processes at once, sshd included."""
        self._unshare.kill()  # --kill-child ends the first process, whose end is that of its namespace
        self._unshare.wait(timeout=10)


@dataclass
class Hosts:
    """Hosts that reach one another by name, through ssh without a password."""

    folder: Path
    all: list[Host] = field(default_factory=list)

    def __getitem__(self, index: int) -> Host:
        return self.all[index]

    def __iter__(self) -> Iterator[Host]:
        return iter(self.all)

    def hostfile(self, *slots: int, name: str = "hostfile") -> Path:
        """A hostfile of the first hosts; one slot each without numbers."""
        path = self.folder / name
        numbers = slots or [1] * len(self.all)
        path.write_text("".join(f"{host.name} slots={n}\n" for host, n in zip(self.all, numbers, strict=False)))
        return path


@contextlib.contextmanager
def namespaces(folder: Path, count: int = 2) -> Iterator[Hosts]:
    """Make hosts node1, node2 and on; `lacking` says whether that is possible. Two seconds."""
    _make_keys(folder)
    hosts, started = Hosts(folder), []
    try:
        switch = _start(["unshare", "--net", "sleep", "infinity"])
        started.append(switch)
        _wait(lambda: os.readlink(f"/proc/{switch.pid}/ns/net") != os.readlink("/proc/self/ns/net"), "a namespace")
        inside = ["nsenter", "--target", str(switch.pid), "--net", "ip", "link"]
        _check([*inside, "add", "br0", "type", "bridge"])
        _check([*inside, "set", "br0", "up"])
        names = {f"node{i}": f"{NETWORK}.{10 + i}" for i in range(1, count + 1)}
        for number, (name, address) in enumerate(names.items(), start=1):
            own = _write_files(folder, name, names)
            (own / "init.sh").write_text(_INIT)
            unshare = _start([*_UNSHARE, "bash", str(own / "init.sh"), name, str(own)], log=own / "init.log")
            started.append(unshare)
            _wait((own / "made").exists, f"{name}: {own / 'init.log'}")
            host = Host(name, address, own, unshare, switch.pid, f"port{number}")
            _check([*inside, "add", f"port{number}", "type", "veth", "peer", "name", INTERFACE,
                    "netns", str(host.first_process)])  # fmt: skip
            _check([*inside, "set", f"port{number}", "master", "br0"])
            host.plug_in()
            for words in (f"addr add {address}/24 dev {INTERFACE}", f"link set {INTERFACE} up"):
                _check(host.command(["ip", *words.split()]))
            (own / "wired").touch()
            hosts.all.append(host)
        for host in hosts:
            for other in hosts:
                _wait(lambda h=host, o=other: h.run("ssh", o.name, "true").returncode == 0, f"ssh to {other.name}")
        yield hosts
    finally:
        for process in reversed(started):
            process.kill()
        for process in started:
            process.wait(timeout=10)


@dataclass
class Loopback:
    """Names that ssh takes to an sshd on this machine, for programs started with `environment`."""

    names: list[str]
    addresses: list[str]
    environment: dict[str, str]


@contextlib.contextmanager
def loopback(folder: Path, count: int = 2) -> Iterator[Loopback]:
    """Make names alias2, alias3 and on. They stand only in an ssh configuration, which an `ssh` first on PATH names.

    `pkill`, which DeepSpeed runs on each host to end a job, would end the jobs of everybody here and does nothing.
    """
    _make_keys(folder)
    names = [f"alias{i}" for i in range(2, count + 2)]
    addresses = [f"127.0.0.{i}" for i in range(2, count + 2)]
    programs = folder / "bin"
    programs.mkdir()
    config, port, started = folder / "ssh_config", _free_port(), []
    keys = folder / "keys"
    named = [_SSH.format(name=n, address=a, port=port, keys=keys) for n, a in zip(names, addresses, strict=True)]
    config.write_text("".join(named))
    _program(programs / "ssh", f'exec {shutil.which("ssh")} -F {config} "$@"')
    _program(programs / "pkill", "exit 0")
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    try:
        for name, address in zip(names, addresses, strict=True):
            sshd_config = folder / f"sshd_{name}"
            sshd_config.write_text(_SSHD.format(port=port, address=address, keys=keys) + f"SetEnv PATH={path}\n")
            if os.geteuid() == 0:
                Path("/run/sshd").mkdir(
                    mode=0o755, exist_ok=True
                )  # sshd's own, empty; without it root's does not start
            started.append(_start(["/usr/sbin/sshd", "-D", "-f", str(sshd_config)], log=folder / f"{name}.log"))
        hosts = Loopback(names, addresses, {**os.environ, "PATH": path})
        for name in names:
            argv = [str(programs / "ssh"), "-o", "BatchMode=yes", name, "true"]
            _wait(lambda a=argv: subprocess.run(a, capture_output=True).returncode == 0, f"ssh to {name}")
        yield hosts
    finally:
        for process in started:
            process.kill()
            process.wait(timeout=10)


def rlhf(*arguments: str) -> list[str]:
    """The command, from this checkout."""
    return [sys.executable, "-c", "import sys; from rlhf.cli import main; sys.exit(main())", *arguments]


def _write_files(folder: Path, name: str, names: Mapping[str, str]) -> Path:
    """A host's own files of /etc, its home and the configuration of its sshd."""
    own = folder / name
    (own / "home" / ".ssh").mkdir(parents=True, mode=0o700)
    (own / "resolv.conf").touch()
    (own / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for n, a in names.items()))
    users = [line.split(":") for line in Path("/etc/passwd").read_text().splitlines()]
    users = [[*user[:5], str(own / "home"), user[6]] if user[0] == "root" else user for user in users]
    (own / "passwd").write_text("".join(":".join(user) + "\n" for user in users))
    keys = folder / "keys"
    text = _SSH.format(name=name, address=names[name], port=22, keys=keys)
    (own / "home" / ".ssh" / "config").write_text(text)
    (own / "sshd_config").write_text(_SSHD.format(port=22, address="0.0.0.0", keys=keys))
    return own


def _make_keys(folder: Path) -> None:
    (folder / "keys").mkdir()
    for name in ("host", "user"):
        _check(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(folder / "keys" / name)])


def _program(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


def _start(argv: Sequence[str], log: Path | None = None) -> "subprocess.Popen[bytes]":
    """Start a process that dies with this one."""
    with open(log or os.devnull, "wb") as file:
        argv = ["setpriv", "--pdeathsig", "KILL", *argv]
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)


def _check(argv: Sequence[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stdout}{done.stderr}"


def _wait(is_so, what: str) -> None:  # noqa: ANN001
    deadline = time.monotonic() + _TIMEOUT
    while not is_so():
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.05)


def _only_child(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert len(children) == 1, f"process {pid} has the children {children}"
    return int(children[0])


def _free_port() -> int:
    from rlhf.host import free_port

    return free_port()
