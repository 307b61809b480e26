"""What a machine says about itself: one file that runs there, under whatever Python is there. No torch.

`launch.cluster.session` sends this source through ssh and then talks with it: a request is a line of JSON on stdin, its
answer a line on stdout that starts with MARK. Nothing but the standard library is imported, and nothing of this
repository, so a machine whose packages are broken or absent still answers. It reports; what is wrong is decided by
who asks.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MARK = "RLHF-PROBE "
HASHED_BYTES = 8 * 2**20
"""Larger files are compared by size, first and last block."""
_BLOCK_BYTES = 2**20
_READ_BYTES = 512 * 2**20
"""Read of one path in all; files after that are compared by size."""
_MOST_FILES = 5000
_SUFFIXES = (".py", ".json", ".yaml", ".jinja", ".html")
"""Files that make up a package of ours."""
_SIOCGIFADDR = 0x8915

GPU_FIELDS = (
    "index", "name", "uuid", "driver_version", "memory.total", "memory.free",
    "ecc.errors.uncorrected.volatile.total", "pcie.link.width.current", "pcie.link.width.max",
)  # fmt: skip
TOOLS = {
    "nvidia_query": ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv"],
    "nvidia_topology": ["nvidia-smi", "topo", "-m"],
    "rocm": ["rocm-smi", "--showproductname", "--showmeminfo", "vram", "--showdriverversion", "--json"],
    "rocm_topology": ["rocm-smi", "--showtopotype"],
    "ibstat": ["ibstat"],
}
"""Programs whose output is given back as it stands, where they are installed."""
_TORCH = """
import json, torch
count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
print(json.dumps({"version": torch.__version__, "devices": count}))
"""

_listener: socket.socket | None = None


def facts(
    *,
    environment: dict[str, str],
    packages: list[str],
    code: dict[str, str],
    paths: dict[str, str],
    hub: list[str],
    folder: str,
    import_torch: bool,
) -> dict[str, Any]:
    """Everything that needs no other machine.

    Args:
        environment: variables that ranks get here; they hold for all later requests too.
        packages: distributions whose versions are asked for.
        code: name -> folder of our packages.
        paths: name -> file or folder of data and models.
        hub: models of the hub that are looked up in the cache.
        folder: working directory of the launcher, which ranks start in.
        import_torch: import it in a process of its own, with a limit.
    """
    os.environ.update(environment)
    return {
        "hostname": socket.gethostname(),
        "executable": sys.executable,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in packages},
        "torch": _torch() if import_torch else {},
        "commit": _commit(code),
        "code": {name: tree(Path(path), suffixes=_SUFFIXES) for name, path in code.items()},
        "paths": {name: tree(Path(path)) for name, path in paths.items()},
        "hub": {name: _revision(name) for name in hub},
        "folder": os.access(folder, os.X_OK) and os.path.isdir(folder),
        "tools": {name: _run(argv) for name, argv in TOOLS.items() if shutil.which(argv[0])},
        "driver": _driver(),
        "interfaces": _interfaces(),
        "infiniband": _infiniband(),
        "modules": [line.split()[0] for line in _text("/proc/modules").splitlines() if line.strip()],
        "own_address": _own_address(),
        "first_address": _first_address(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": _memory_bytes(),
        "shm_bytes": _free_bytes("/dev/shm"),
    }


def clock() -> dict[str, Any]:
    """Time of this machine, unix seconds."""
    return {"time": time.time()}


def write_token(*, folder: str, name: str, text: str) -> dict[str, Any]:
    """Leave a file for the other machines to find; says what is free there too."""
    path = Path(folder) / name
    path.write_text(text, encoding="utf-8")
    return {"free_bytes": _free_bytes(folder)}


def read_tokens(*, folder: str, names: list[str], limit: float = 3.0) -> dict[str, Any]:
    """Contents of files that others have left; a network disk may show them after a while."""
    found: dict[str, str] = {}
    deadline = time.monotonic() + limit
    while True:
        for name in names:
            if name not in found:
                with contextlib.suppress(OSError):
                    found[name] = (Path(folder) / name).read_text(encoding="utf-8")
        if len(found) == len(names) or time.monotonic() > deadline:
            return {"texts": found}
        time.sleep(0.1)


def remove_tokens(*, folder: str, names: list[str]) -> dict[str, Any]:
    """Remove them again."""
    for name in names:
        with contextlib.suppress(OSError):
            (Path(folder) / name).unlink()
    return {}


def listen(*, port: int) -> dict[str, Any]:
    """Take a port, as rank 0 does; an error if it is taken."""
    global _listener
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    _listener = socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=family == socket.AF_INET6)
    return {"port": _listener.getsockname()[1]}


def connect(*, address: str, port: int, text: str, limit: float) -> dict[str, Any]:
    """Send a line to a machine that listens."""
    with socket.create_connection((address, port), timeout=limit) as link:
        link.sendall(text.encode() + b"\n")
    return {}


def accepted(*, number: int, limit: float) -> dict[str, Any]:
    """Lines that arrived, of `number` callers at most; the port is given back."""
    global _listener
    assert _listener is not None, "listen comes first"
    lines = []
    with _listener:
        _listener.settimeout(limit)
        with contextlib.suppress(OSError):  # a caller that does not come is one that could not
            for _ in range(number):
                link, _ = _listener.accept()
                with link:
                    link.settimeout(limit)
                    lines.append(link.makefile("rb").readline().decode("utf-8", "replace").strip())
    _listener = None
    return {"lines": lines}


def call_back(*, name: str, limit: int) -> dict[str, Any]:
    """Whether ssh from here to another machine works without a password."""
    done = _run(["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={limit}", name, "true"], seconds=limit + 5)
    return {"code": done["code"], "said": done["error"]}


def tree(path: Path, suffixes: tuple[str, ...] = ()) -> dict[str, Any]:
    """Files under a path with their size and hash: what makes two copies the same.

    Returns:
        `kind` (file, folder, missing), `bytes`, `files` (relative name -> "SIZE HASH"), `unreadable` names, and `more`:
        the number of files beyond the limit, which are compared by this number only.
    """
    if not path.exists():
        return {"kind": "missing"}
    files, left = [path], 0
    if path.is_dir():
        files = sorted(
            file for file in path.rglob("*")
            if file.is_file() and "__pycache__" not in file.parts and (not suffixes or file.suffix in suffixes)
        )  # fmt: skip
        files, left = files[:_MOST_FILES], len(files[_MOST_FILES:])
    listed, unreadable, total, budget = {}, [], 0, _READ_BYTES
    for file in files:
        name = "" if file == path else file.relative_to(path).as_posix()
        try:
            size = file.stat().st_size
            total += size
            budget -= min(size, HASHED_BYTES)
            listed[name] = f"{size} {_digest(file, size) if budget >= 0 else '-'}"
        except OSError as error:
            unreadable.append(f"{name or path}: {error.strerror}")
    kind = "folder" if path.is_dir() else "file"
    return {"kind": kind, "bytes": total, "files": listed, "unreadable": unreadable, "more": left}


def _digest(file: Path, size: int) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        if size <= HASHED_BYTES:
            digest.update(stream.read())
        else:
            digest.update(stream.read(_BLOCK_BYTES))
            stream.seek(-_BLOCK_BYTES, os.SEEK_END)
            digest.update(stream.read())
    return digest.hexdigest()[:16]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch() -> dict[str, Any]:
    done = _run([sys.executable, "-c", _TORCH], seconds=180)
    if done["code"] != 0:
        lines = [line for line in done["error"].splitlines() if line.strip()]
        return {"error": lines[-1] if lines else f"exit code {done['code']}"}
    answer: dict[str, Any] = json.loads(done["text"].splitlines()[-1])
    return answer


def _commit(code: dict[str, str]) -> str:
    """Commit of the checkout that the code lies in; "" where there is none."""
    root = Path(next(iter(code.values()), ".")).parent
    if shutil.which("git") is None or not (root / ".git").exists():
        return ""
    done = _run(["git", "-C", str(root), "-c", f"safe.directory={root}", "rev-parse", "HEAD"])
    return str(done["text"]).strip() if done["code"] == 0 else ""


def _revision(name: str) -> str | None:
    """Commit of a hub model in the cache; None if it is not there."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{name.replace('/', '--')}"
    if not (cache / "snapshots").is_dir():
        return None
    return _text(str(cache / "refs" / "main")).strip() or "unknown"


def _run(argv: list[str], seconds: float = 30) -> dict[str, Any]:
    """Exit code (None: not started or out of time), output and errors of a program."""
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=seconds,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"code": None, "text": "", "error": f"no answer within {seconds:g} s"}
    except OSError as error:
        return {"code": None, "text": "", "error": str(error)}
    return {"code": done.returncode, "text": done.stdout[-200_000:], "error": done.stderr[-4000:]}


def _driver() -> str:
    """Version of the accelerator's kernel driver; "" where there is none."""
    for line in _text("/proc/driver/nvidia/version").splitlines():
        if line.startswith("NVRM version:"):
            return " ".join(line.split()[2:])
    amd = _text("/sys/module/amdgpu/version").strip()
    return f"amdgpu {amd}" if amd else ""


def _interfaces() -> dict[str, dict[str, Any]]:
    """Network interfaces with addresses, state, MTU and rate."""
    found: dict[str, dict[str, Any]] = {}
    for _, name in socket.if_nameindex():
        folder = f"/sys/class/net/{name}"
        found[name] = {
            "addresses": _ipv4(name),
            "state": _text(f"{folder}/operstate").strip(),
            "mtu": _number(_text(f"{folder}/mtu")),
            "mbit_s": _number(_text(f"{folder}/speed")),
        }
    for line in _text("/proc/net/if_inet6").splitlines():
        digits, _, _, scope, _, name = line.split()
        if name in found and scope in ("00", "10"):  # global, loopback; not link-local
            found[name]["addresses"].append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found


def _ipv4(name: str) -> list[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return []
    return [socket.inet_ntoa(answer[20:24])]


def _infiniband() -> list[dict[str, Any]]:
    """Ports of RDMA devices as the kernel shows them, in the words of ibstat."""
    found = []
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        rate = _text(str(port / "rate")).split()
        found.append({
            "device": port.parent.parent.name,
            "port": int(port.name),
            "state": _text(str(port / "state")).partition(":")[2].strip().capitalize(),
            "physical": _text(str(port / "phys_state")).partition(":")[2].strip(),
            "gbit_s": float(rate[0]) if rate else 0.0,
            "layer": _text(str(port / "link_layer")).strip(),
        })  # fmt: skip
    return found


def _own_address() -> str:
    """Address that the machine's own name stands for; "" if for none."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def _first_address() -> str:
    """What deepspeed takes as the address of rank 0 when it is not told one."""
    words = str(_run(["hostname", "-I"])["text"]).split()
    return words[0] if words else ""


def _memory_bytes() -> int:
    for line in _text("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _free_bytes(folder: str) -> int:
    try:
        stat = os.statvfs(folder)
    except OSError:
        return 0
    return stat.f_bavail * stat.f_frsize


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(text: str) -> int:
    try:
        return max(0, int(text))
    except ValueError:
        return 0


def serve() -> None:
    """Answer requests until stdin ends."""
    actions = {
        action.__name__: action
        for action in (facts, clock, write_token, read_tokens, remove_tokens, listen, connect, accepted, call_back)
    }
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        answer: dict[str, Any]
        try:
            answer = actions[request.pop("do")](**request)
        except Exception as error:  # whatever it is, the one who asks shall read it
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(f"\n{MARK}{json.dumps(answer)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
