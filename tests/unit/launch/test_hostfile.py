"""Hostfile parser and filters. Fault rows F1 and F2; the cases that DeepSpeed's own parser accepts are refused here."""

from pathlib import Path

import pytest

from launch.hostfile import Host, HostfileError, filter_hosts, is_local, read_hostfile


def write(tmp_path: Path, content: bytes | str) -> Path:
    path = tmp_path / "hostfile"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_worked_example(tmp_path: Path) -> None:
    path = write(tmp_path, "# cluster A\n\nnode1 slots=2\nuser@10.0.0.7\tslots=1\n  node-3.lan   slots=4  \n")
    assert read_hostfile(path) == (
        Host("node1", (0, 1)),
        Host("user@10.0.0.7", (0,)),
        Host("node-3.lan", (0, 1, 2, 3)),
    )


def test_f2_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(HostfileError, match=r"nodes does not exist.*this machine alone"):
        read_hostfile(tmp_path / "nodes")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "names no host"),
        ("# only a comment\n", "names no host"),
        ("node1\n", r":1: `node1`: has no slots"),
        ("node1 slots=0\n", r":1: .*0 slots"),
        ("node1 slots=1.5\n", r":1: .*'slots=1.5' is not of the form"),
        ("node1 slots=2abc\n", r":1: .*'slots=2abc' is not of the form"),
        ("node1 slots = 2\n", r":1: .*'slots' is not of the form"),
        ("node1 SLOTS=2\n", r":1: .*'SLOTS=2' is not of the form"),
        ("node1 max_slots=2\n", r":1: .*is not of the form"),
        ("node1 slots=-1\n", r":1: .*is not of the form"),
        ("node1:2\n", r":1: .*'node1:2' is not a host name"),
        ("node1 slots=1000000\n", r":1: .*more than 1024"),
        ("node1 slots=2 # fast one\n", r":1: .*text after the slots: '# fast one'"),
        ("node1 slots=2 max_slots=4\n", r":1: .*text after the slots"),
        ("a slots=1\n\na slots=2\n", r":3: host a stands in line 1 already"),
        ("$(reboot) slots=1\n", r":1: .*is not a host name"),
        ("node1;ls slots=1\n", r":1: .*is not a host name"),
        ("-oProxyCommand=x slots=1\n", r":1: .*is not a host name"),
        (b"\xef\xbb\xbfnode1 slots=1\n", r":1: starts with a byte-order mark"),
        (b"node1 slots=1\r\nnode2 slots=1\r\n", r":1: has Windows line ends"),
        (b"\x7fELF\xff\xfe\x00", r"is not UTF-8 text"),
        ("node1 slots=\u0662\n", r":1: .*is not of the form"),
        ("node1 slots=1\nlocalhost slots=1\n", r":2: `localhost` means another machine on each of 2 hosts"),
        ("127.0.1.1 slots=1\nnode1 slots=1\n", r":1: `127.0.1.1` means another machine"),
        ("node1 slots=1\nroot@::1 slots=1\n", r":2: `root@::1` means another machine"),
        ("import torch\nprint(1)\n", r":1: .*'torch' is not of the form"),
    ],
)
def test_refused(tmp_path: Path, content: bytes | str, message: str) -> None:
    with pytest.raises(HostfileError, match=message):
        read_hostfile(write(tmp_path, content))


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    with pytest.raises(HostfileError) as caught:
        read_hostfile(write(tmp_path, "a slots=0\nb slots=1\nc\nb slots=2\n"))
    assert [line.split("hostfile")[1].split(" ")[0] for line in str(caught.value).splitlines()] == [":1:", ":3:", ":4:"]


def test_two_names_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its accelerators would be given to two sets of ranks."""
    monkeypatch.setattr("launch.hostfile.is_local", lambda name: name in ("login", "10.0.0.1"))
    with pytest.raises(HostfileError, match=r":3: `10.0.0.1` is this machine, as is `login` in line 1"):
        read_hostfile(write(tmp_path, "login slots=2\nnode1 slots=2\n10.0.0.1 slots=2\n"))
    assert len(read_hostfile(write(tmp_path, "login slots=2\nnode1 slots=2\n"))) == 2


def test_lines_are_kept_for_what_is_found_later(tmp_path: Path) -> None:
    hosts = read_hostfile(write(tmp_path, "# a\n\nnode1 slots=2\nnode2 slots=1\n"))
    assert [host.line for host in hosts] == [3, 4]
    assert [host.line for host in filter_hosts(hosts, include="node2:0")] == [4]


def test_a_pipe_or_a_folder_is_no_hostfile(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(HostfileError, match="is no file"):
            read_hostfile(path)


HOSTS = (Host("a", (0, 1)), Host("b", (0, 1, 2, 3)), Host("c", (0,)))


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ("", "", {"a": (0, 1), "b": (0, 1, 2, 3), "c": (0,)}),
        ("b:3,1@a", "", {"a": (0, 1), "b": (1, 3)}),
        ("b:0@b:2", "", {"b": (0, 2)}),
        ("", "b:0,1,2,3@a:1", {"a": (0,), "c": (0,)}),
        ("", "a", {"b": (0, 1, 2, 3), "c": (0,)}),
    ],
)
def test_filters(include: str, exclude: str, left: dict[str, tuple[int, ...]]) -> None:
    """The hostfile's order is kept, as deepspeed does, so that rank 0 is on the first host."""
    assert {h.name: h.slots for h in filter_hosts(HOSTS, include=include, exclude=exclude)} == left


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        ("a", "b", "exclude each other"),
        ("d", "", "host 'd' is not among a, b, c"),
        ("a:", "", "is not of the form"),
        ("a:x", "", "is not of the form"),
        ("a:2", "", r"a has the slots \[0, 1\], not \[2\]"),
        ("", "a@b@c", "leaves no slot"),
    ],
)
def test_filters_refuse(include: str, exclude: str, message: str) -> None:
    with pytest.raises(HostfileError, match=message):
        filter_hosts(HOSTS, include=include, exclude=exclude)


def test_local_addresses_are_local() -> None:
    """F5: a hostfile that lists the launching host by one of its own addresses."""
    assert all(is_local(name) for name in ("localhost", "127.0.0.1", "::1", "root@localhost"))
    assert not is_local("192.0.2.1")  # TEST-NET-1, never one's own
    assert not is_local("no-such-host.invalid")
