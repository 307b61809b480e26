import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf.data.store import DTYPES, DamagedStoreError, Store, Writer, default_cache_dir, open_or_build

# A builder that takes a while, so that two started together overlap; each build leaves a line in builds.txt.
TWO_LEADERS = """
import sys, time
from pathlib import Path
from rlhf.data.store import open_or_build
folder = Path(sys.argv[1])
def build(writer):
    with (folder / "builds.txt").open("a") as file:
        file.write("built\\n")
    time.sleep(0.5)
    writer.append("tokens", range(1000))
    return {"rows": 0}
(folder / f"ready{sys.argv[2]}").touch()
while not (folder / "go").exists():
    time.sleep(0.01)
store, is_new = open_or_build(folder / "cache", "key", build)
print(int(store["tokens"].sum()), is_new)
"""


def build_numbers(writer: Writer) -> dict[str, Any]:
    writer.append("tokens", [1, 2, 3])
    writer.append("tokens", np.array([4], np.int64))
    writer.append("rank", [0.5])
    return {"note": "caf\u00e9"}


def test_what_is_written_is_read_and_mapped(tmp_path: Path) -> None:
    """B6: arrays are maps of files, not copies in memory."""
    store, is_new = open_or_build(tmp_path / "cache", "k", build_numbers)
    again, is_new_again = open_or_build(tmp_path / "cache", "k", build_numbers)
    assert (is_new, is_new_again) == (True, False)
    for s in (store, again):
        assert isinstance(s["tokens"], np.memmap)
        assert s["tokens"].dtype == np.int32 and s["tokens"].tolist() == [1, 2, 3, 4]
        assert s["rank"].tolist() == [0.5]
        assert s["uid"].size == 0
        assert s.report == {"note": "caf\u00e9"}
    assert set(again.arrays) == set(DTYPES)
    with pytest.raises(ValueError, match="read-only"):
        again["tokens"][0] = 9


def test_two_leaders_on_one_disk_build_once(tmp_path: Path) -> None:
    """B1, B3: two real processes with different hash seeds start together; one builds, both read the same."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_LEADERS, str(tmp_path), str(seed)],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in (1, 2)
    ]
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("ready*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    (tmp_path / "go").touch()
    outputs = [process.communicate(timeout=60)[0].split() for process in processes]
    assert sorted(outputs) == [["499500", "False"], ["499500", "True"]]
    assert (tmp_path / "builds.txt").read_text() == "built\n"
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == ["key", "key.lock"]


def test_a_leader_that_waited_without_a_lock_takes_what_is_there(tmp_path: Path) -> None:
    """Where a file system has no locks, two build; the first rename wins."""

    def overtaken(writer: Writer) -> dict[str, Any]:
        other = tmp_path / "other"
        open_or_build(other, "k", build_numbers)
        (other / "k").rename(tmp_path / "k")
        writer.append("tokens", [7])
        return {}

    store, _ = open_or_build(tmp_path, "k", overtaken)
    assert store["tokens"].tolist() == [1, 2, 3, 4]


def cut(folder: Path) -> None:
    os.truncate(folder / "tokens.bin", 8)


def flip(folder: Path) -> None:
    data = bytearray((folder / "tokens.bin").read_bytes())
    data[5] ^= 1
    (folder / "tokens.bin").write_bytes(data)


def lose(folder: Path) -> None:
    (folder / "rank.bin").unlink()


def spoil(folder: Path) -> None:
    (folder / "meta.json").write_text('{"count": {')


@pytest.mark.parametrize("damage", [cut, flip, lose, spoil])
def test_damage_is_noticed_and_mended(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    open_or_build(tmp_path, "k", build_numbers)
    damage(tmp_path / "k")
    with pytest.raises(DamagedStoreError):
        Store(tmp_path / "k")
    store, is_new = open_or_build(tmp_path, "k", build_numbers)
    assert is_new
    assert store["tokens"].tolist() == [1, 2, 3, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["k", "k.lock"]


def test_a_failed_build_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(writer: Writer) -> dict[str, Any]:
        writer.append("tokens", [1])
        raise ValueError("a row is bad")

    with pytest.raises(ValueError, match="a row is bad"):
        open_or_build(tmp_path, "k", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["k.lock"]
    assert open_or_build(tmp_path, "k", build_numbers)[1]


def test_what_a_killed_builder_left_is_removed(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom rlhf.data.store import open_or_build\n"
        "open_or_build(Path(sys.argv[1]), 'k', lambda writer: os._exit(9))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 9
    assert len(list(tmp_path.glob("k.tmp.*"))) == 1
    open_or_build(tmp_path, "k", build_numbers)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["k", "k.lock"]


@pytest.mark.parametrize("mode", [0o000, 0o500])
def test_a_cache_folder_without_permission_is_named(tmp_path: Path, mode: int) -> None:
    """B1: somebody else's cache folder. Root may do anything, so a process without privileges makes the attempt."""
    folder = Path("/tmp") / f"rlhf_test_cache_{os.getpid()}_{mode}"
    folder.mkdir(mode=mode)
    result = tmp_path / "result"
    try:
        if (child := os.fork()) == 0:
            message = "no error"
            try:
                with result.open("w") as file:
                    if os.getuid() == 0:
                        os.setuid(65534)
                    try:
                        open_or_build(folder, "k", build_numbers)
                    except PermissionError as error:
                        message = str(error)
                    file.write(message)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
    finally:
        folder.chmod(0o700)
        folder.rmdir()
    assert f"data.cache_dir={folder} cannot be used: Permission denied. Give a folder of your own" in result.read_text()


def test_a_cache_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(OSError, match="data.cache_dir=.*cannot be used"):
        open_or_build(tmp_path / "cache", "k", build_numbers)


def test_other_errors_of_the_system_pass_unchanged(tmp_path: Path) -> None:
    def missing(writer: Writer) -> dict[str, Any]:
        return {"text": (tmp_path.parent / "not there").read_text()}

    with pytest.raises(FileNotFoundError, match="not there"):
        open_or_build(tmp_path / "cache", "k", missing)


def test_default_folder_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B1: nothing is shared under /tmp."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".rlhf_cache"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / ".rlhf_cache"
