"""Files of a state: what left memory is what is hashed; errors are kept for later."""

import hashlib
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf.state_writer import StateWriter


@pytest.mark.parametrize("beside", [False, True])
def test_contents_and_hash(tmp_path: Path, *, beside: bool) -> None:
    writer = StateWriter(tmp_path, beside=beside)
    tensor = torch.arange(1000.0)
    (tmp_path / "policy").mkdir()
    writer.save({"weights": tensor, "step": 3}, str(tmp_path / "policy" / "a.pt"))
    writer.wait()
    entry = writer.entries["policy/a.pt"]
    content = (tmp_path / "policy" / "a.pt").read_bytes()
    assert (entry.bytes, entry.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    loaded = torch.load(tmp_path / "policy" / "a.pt")
    assert torch.equal(loaded["weights"], tensor) and loaded["step"] == 3


def test_what_is_written_beside_training_is_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step goes on and changes the weights before the disk has taken the file."""
    gate = threading.Event()
    honest = StateWriter._write

    def late(self: Any, path: Path, write: Any) -> None:
        assert gate.wait(10)
        honest(self, path, write)

    monkeypatch.setattr(StateWriter, "_write", late)
    writer = StateWriter(tmp_path, beside=True)
    tensor = torch.zeros(4)
    writer.save({"w": tensor}, str(tmp_path / "a.pt"))
    tensor += 1
    assert writer.is_busy
    gate.set()
    writer.wait()
    assert not writer.is_busy and torch.equal(torch.load(tmp_path / "a.pt")["w"], torch.zeros(4))


@pytest.fixture
def small_files() -> Any:
    """A limit of 64 kB on the size of files, as a full disk in the middle of one."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.usefixtures("small_files")
def test_an_error_waits_until_it_is_asked_for(tmp_path: Path, *, beside: bool) -> None:
    writer = StateWriter(tmp_path, beside=beside)
    writer.save({"w": torch.zeros(1 << 16)}, str(tmp_path / "a.pt"))
    writer.save({"w": torch.zeros(2)}, str(tmp_path / "b.pt"))
    with pytest.raises(OSError, match="File too large"):
        writer.wait()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "policy").write_text("a file is in the way")
    writer = StateWriter(tmp_path, beside=False)
    writer.makedirs(str(tmp_path / "policy"))
    with pytest.raises(OSError, match="exists"):
        writer.wait()
