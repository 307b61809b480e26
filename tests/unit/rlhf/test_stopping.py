"""Requests to save and stop."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rlhf.stopping import REQUEST, StopRequest


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_noted_and_the_former_handler_comes_back(tmp_path: Path, signum: int) -> None:
    before = signal.getsignal(signum)
    request = StopRequest(tmp_path)
    with request.listening():
        assert not request.is_there(look=True)
        os.kill(os.getpid(), signum)
        assert request.is_there(look=False)
    assert signal.getsignal(signum) == before


def test_a_file_is_seen_by_whoever_looks(tmp_path: Path) -> None:
    request = StopRequest(tmp_path)
    (tmp_path / REQUEST).touch()
    assert request.is_there(look=True) and not request.is_there(look=False)


def test_in_a_thread_there_are_no_signals_but_no_error_either(tmp_path: Path) -> None:
    request = StopRequest(tmp_path)
    entered = []

    def listen() -> None:
        with request.listening():
            entered.append(True)

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert entered == [True]


def test_a_second_sigterm_ends_the_process(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from rlhf.stopping import StopRequest\n"
        "with StopRequest(Path('.')).listening():\n"
        "    os.kill(os.getpid(), signal.SIGUSR1)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('alive')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGTERM and done.stdout == ""
    done = subprocess.run([sys.executable, "-c", code.replace("    os.kill(os.getpid(), signal.SIGUSR1)\n", "")],
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0 and done.stdout == "alive\n"
