"""What the probe reports, asked through a session as on another machine, here."""

import os
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.cluster import probe
from launch.cluster.session import Session, SessionError, allow_open_files
from launch.cluster.software import difference

FACTS = {
    "environment": {}, "packages": ["torch", "no-such-package"], "code": {}, "paths": {}, "hub": [], "folder": "/",
    "import_torch": False,
}  # fmt: skip


@pytest.fixture
def session() -> Iterator[Session]:
    session = Session(None)
    yield session
    session.close()


def test_facts(session: Session, tmp_path: Path) -> None:
    cache = tmp_path / "models--a--b"
    (cache / "snapshots").mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("c0ffee\n")
    facts = session.ask("facts", seconds=60, **{**FACTS, "environment": {"HF_HUB_CACHE": str(tmp_path)},
                                                "hub": ["a/b", "a/c"], "folder": str(tmp_path)})  # fmt: skip
    assert facts["packages"]["no-such-package"] is None and facts["packages"]["torch"]
    assert facts["hub"] == {"a/b": "c0ffee", "a/c": None}
    assert facts["folder"] is True and facts["torch"] == {}
    assert "127.0.0.1" in facts["interfaces"]["lo"]["addresses"]
    assert facts["memory_bytes"] > 0 and facts["cores"] >= 1
    again = session.ask("facts", seconds=60, **{**FACTS, "folder": str(tmp_path / "none"), "hub": ["a/b"]})
    assert again["folder"] is False
    assert again["hub"] == {"a/b": "c0ffee"}, "variables hold from then on"


def test_torch_that_cannot_be_imported(tmp_path: Path) -> None:
    """The machine answers all the same, with the last line of what went wrong."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')\n")
    session = Session(None)
    facts = session.ask("facts", seconds=60, **{**FACTS, "import_torch": True,
                                                "environment": {"PYTHONPATH": str(tmp_path)}})  # fmt: skip
    session.close()
    assert facts["torch"] == {"error": "ImportError: libcudart.so.12: cannot open shared object file"}


def test_port_and_connection(session: Session) -> None:
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        with pytest.raises(SessionError, match="Address already in use"):
            session.ask("listen", seconds=10, port=holder.getsockname()[1])
    port = session.ask("listen", seconds=10, port=0)["port"]
    other = Session(None)
    other.ask("connect", seconds=10, address="127.0.0.1", port=port, text="node2", limit=3)
    assert session.ask("accepted", seconds=10, number=2, limit=0.3) == {"lines": ["node2"]}
    with pytest.raises(SessionError, match="Connection refused"):
        other.ask("connect", seconds=10, address="127.0.0.1", port=port, text="node2", limit=3)
    other.close()


def test_tokens(session: Session, tmp_path: Path) -> None:
    free = session.ask("write_token", seconds=10, folder=str(tmp_path), name="mine", text="t")["free_bytes"]
    assert free == pytest.approx(os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize, rel=0.05)
    found = session.ask("read_tokens", seconds=10, folder=str(tmp_path), names=["mine", "other"], limit=0.2)
    assert found == {"texts": {"mine": "t"}}
    session.ask("remove_tokens", seconds=10, folder=str(tmp_path), names=["mine", "other"])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SessionError, match="FileNotFoundError"):
        session.ask("write_token", seconds=10, folder=str(tmp_path / "none"), name="mine", text="t")


def test_an_answer_that_does_not_come(session: Session, tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(SessionError, match=r"no answer within 0.3 s"):
        session.ask("read_tokens", seconds=0.3, folder=str(tmp_path), names=["never"], limit=5)
    assert time.monotonic() - started < 3


def test_a_python_that_is_not_there() -> None:
    with pytest.raises(SessionError, match="could not be started: No such file"):
        Session(None, python="/no/such/python")


def make(folder: Path, **files: bytes) -> Path:
    folder.mkdir()
    for name, contents in files.items():
        (folder / f"{name}.py").write_bytes(contents)
    return folder


def test_trees_are_compared_file_by_file(tmp_path: Path) -> None:
    here = probe.tree(make(tmp_path / "here", a=b"1", b=b"2", c=b"3"))
    assert here["kind"] == "folder" and here["bytes"] == 3
    (tmp_path / "here" / "__pycache__").mkdir()
    (tmp_path / "here" / "__pycache__" / "a.pyc").write_bytes(b"x")
    assert difference(here, probe.tree(tmp_path / "here"), "code") == ""
    there = probe.tree(make(tmp_path / "there", a=b"1", b=b"X", d=b"3"))
    assert difference(here, there, "code") == "code lacks c.py, has d.py too, has other contents in b.py"
    assert difference(here, probe.tree(tmp_path / "none"), "code") == "code is not there"
    file = probe.tree(tmp_path / "here" / "a.py")
    assert difference(file, probe.tree(tmp_path / "there" / "b.py"), "rows") == "rows has other contents"
    assert difference(here, file, "code") == "code is a file"


def test_large_files_differ_in_their_ends(tmp_path: Path) -> None:
    for name, last in (("one", b"\0"), ("two", b"\1")):
        with (tmp_path / name).open("wb") as file:
            file.seek(probe.HASHED_BYTES + 10)
            file.write(last)
    one, two = probe.tree(tmp_path / "one"), probe.tree(tmp_path / "two")
    assert one["bytes"] == two["bytes"] and one != two


def test_more_sessions_than_files_may_be_open() -> None:
    """The limit is raised as far as it may be, and answers come on descriptors that select() does not take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    held = []
    try:
        allow_open_files(1400)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(1400, hard)
        held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
        session = Session(None)
        assert session.ask("clock", seconds=30)["time"] > 0
        session.close()
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
