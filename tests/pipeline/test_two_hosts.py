"""`rlhf run --hostfile` on two emulated machines, recipe tiny_cpu cut short: each launcher, what can go wrong. Minutes.

Slurm's batch script: test_slurm_job.py. What is refused before anything starts: tests/unit/launch too.
"""

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlhf.heartbeat import Beat, read_beat
from rlhf.watchdog import EXIT_STUCK
from tests import hosts as emulated
from tests.hosts import Host, Hosts, rlhf
from tests.slurm import PROGRAMS, Slurm

pytestmark = pytest.mark.slow

LAUNCHERS = ("pdsh", "openmpi", "slurm")
# The recipe's task with 500 rows instead of 10,000.
ROWS = '[{"path":"builtin:politeness","options":{"rows":500,"seed":0}}]'
SFT = (
    '--sft.data.sources=[{"path":"builtin:politeness","options":{"rows":500,"seed":0,"responses":1}}]',
    "--sft.epochs=100", "--sft.eval.max_rows=8", "--sft.eval.generate_rows=0",
)  # fmt: skip
SHORT = (
    *SFT, "--sft.max_steps=2", f"--reward.data.sources={ROWS}", "--reward.max_steps=2",
    "--reward.eval.max_rows=8", "--reward.eval.generate_rows=0", "--reward.normalise.rows=8",
    f"--ppo.data.sources={ROWS}", "--ppo.max_steps=1", "--ppo.eval.max_rows=8", "--ppo.eval.generate_rows=4",
    "--ppo.rollout.prompts_per_step=8", "--ppo.rollout.batch_size=8", "--ppo.update.minibatch_size=8",
    "--ppo.update.epochs=1",
)  # fmt: skip
ONE_STAGE = ("--stages", "sft", *SFT, "--sft.max_steps=2")
LONG = ("--stages", "sft", *SFT, "--sft.max_steps=100", "--sft.run.save_every=5")
STRICT = ("--sft.run.watchdog.silent_seconds=8", "--sft.run.watchdog.update_seconds=15")
AWKWARD = "a b=c =d"
# Python runs it in every process that finds it on its path: ranks write down what reached them.
NOTE = """
import json, os
if "RANK" in os.environ and "NOTES" in os.environ:
    with open(os.path.join(os.environ["NOTES"], "rank" + os.environ["RANK"]), "w") as file:
        json.dump({**os.environ, "PARENT": open(f"/proc/{os.getppid()}/cmdline").read()}, file)
"""


class Start:
    """Starts `rlhf run` on the first of some hosts."""

    def __init__(self, hosts: Hosts, folder: Path, launcher: str = "pdsh", **variables: str) -> None:
        self.hosts, self.run, self.launcher = hosts, folder / "run", launcher
        self.variables = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", **variables}

    def __call__(self, *flags: str) -> "subprocess.Popen[str]":
        argv = rlhf("run", "--recipe", "tiny_cpu", "--hostfile", str(self.hosts.hostfile()), "--out", str(self.run))
        return self.hosts[0].start(*argv, "--launcher", self.launcher, *flags, **self.variables)

    def to_the_end(self, *flags: str) -> str:
        """Its output; it has to end with 0."""
        out, code = ended(self(*flags))
        assert code == 0, out + "".join(path.read_text()[-3000:] for path in self.run.glob("logs/*.log"))
        return out

    def beat(self, rank: int, *, stage: str = "step1_sft", attempt: int = 1) -> Beat | None:
        return read_beat(self.run / "logs" / f"{stage}.{attempt}", rank)

    def wait_for_step(self, step: int, process: "subprocess.Popen[str]", *, attempt: int = 1) -> Beat:
        """The record of rank 1 at a step."""
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and process.poll() is None:
            beat = self.beat(1, attempt=attempt)
            if beat is not None and beat.step >= step and beat.state == "running":
                return beat
            time.sleep(0.05)
        raise AssertionError(f"step {step} did not come: {process.communicate(timeout=60)[0]}")

    def assert_nothing_is_left(self, seconds: float = 60) -> None:
        """No process of the stage, of deepspeed or of its launchers on any host."""
        deadline = time.monotonic() + seconds
        words = ("step1_sft", "deepspeed", "pdsh", "mpirun", "orted", "srun", "slurmstepd")
        while left := [line for host in self.hosts for word in words for line in host.processes(word)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.3)


def ended(process: "subprocess.Popen[str]", timeout: float = 580) -> tuple[str, int]:
    out, _ = process.communicate(timeout=timeout)
    return out, process.returncode


@pytest.fixture(scope="module")
def slurm(two_hosts: Hosts) -> Slurm:
    reason = emulated.lacking(*PROGRAMS)
    if reason:
        pytest.skip(reason)
    return Slurm(two_hosts)


@pytest.fixture
def start(two_hosts: Hosts, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Start]]:
    """Makes a `Start` for a launcher; ends what a failed test leaves."""
    made = []

    def make(launcher: str, **variables: str) -> Start:
        reason = emulated.lacking(*({"openmpi": ("mpirun", "ompi_info")}.get(launcher, ())))
        if reason:
            pytest.skip(reason)
        if launcher == "slurm":
            variables = {**request.getfixturevalue("slurm").variables, **variables}
        made.append(Start(two_hosts, tmp_path, launcher, **variables))
        return made[-1]

    yield make
    for host in two_hosts:
        host.run("pkill", "-KILL", "-f", str(tmp_path))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_three_stages_and_what_reaches_the_ranks(
    two_hosts: Hosts, start: Callable[..., Start], tmp_path: Path, launcher: str
) -> None:
    """Variables of .deepspeed_env, with blanks and `=` in them, arrive as they are; so do those of this shell."""
    notes, home = tmp_path / "notes", two_hosts[0].folder / "home"
    notes.mkdir()
    (notes / "sitecustomize.py").write_text(NOTE)
    (home / ".deepspeed_env").write_text(f"# of the test\n\nAWKWARD={AWKWARD}\nNOTES={notes}\n")
    run = start(launcher, PYTHONPATH=f"{emulated.ROOT}:{notes}", NCCL_DEBUG_SUBSYS="A B", UNRELATED="1")
    try:
        out = run.to_the_end(*SHORT)
    finally:
        (home / ".deepspeed_env").unlink()
    assert "2 ranks on node1 slots=1, node2 slots=1" in out
    summary = json.loads((run.run / "summary.json").read_text())
    assert [stage["status"] for stage in summary["stages"].values()] == ["done"] * 3
    for stage in ("step1_sft", "step2_reward", "step3_ppo"):
        beats = [run.beat(rank, stage=stage) for rank in (0, 1)]
        assert [beat.host for beat in beats if beat is not None] == ["node1", "node2"]
        assert [beat.world_size for beat in beats if beat is not None] == [2, 2]
        assert all(len(list((run.run / "logs" / f"{stage}.1").glob(f"*_rank{rank}.log"))) == 1 for rank in (0, 1))
    for rank in (0, 1):
        reached = json.loads((notes / f"rank{rank}").read_text())
        assert (reached["AWKWARD"], reached["NCCL_DEBUG_SUBSYS"], reached["WORLD_SIZE"]) == (AWKWARD, "A B", "2")
        assert AWKWARD not in reached["PARENT"], "it may be a token, and everybody sees command lines"
        assert launcher == "slurm" or rank == 0 or "UNRELATED" not in reached  # srun carries everything
    run.assert_nothing_is_left(10)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_rank_a_restart_and_ctrl_c(start: Callable[..., Start], launcher: str) -> None:
    run = start(launcher)
    process = run("--restarts", "1", "--restart-delay", "1", *LONG)
    beat = run.wait_for_step(7, process)
    assert beat.host == "node2"
    run.hosts[1].kill(beat.pid)
    killed = time.monotonic()
    run.wait_for_step(6, process, attempt=2)
    again = run.beat(0, attempt=2)
    assert again is not None and again.host == "node1" and time.monotonic() - killed < 200
    run.hosts[0].run("kill", "-INT", str(inner(run.hosts[0], process)))
    out, code = ended(process, timeout=90)
    assert code == 128 + signal.SIGINT, out
    assert "step1_sft failed: " in out and f"rank 1 on node2 (process {beat.pid}), step " in out
    words = "host node2 failed: signal SIGKILL" if launcher == "pdsh" else "rank 1 ended with signal SIGKILL"
    assert words in out and "restart 1 of 1 in 1 s" in out and "continues from its saved state; attempt 2" in out
    assert "stopped by SIGINT in step1_sft; its processes have ended; add --resume" in out
    run.assert_nothing_is_left()


def inner(host: Host, process: "subprocess.Popen[str]") -> int:
    """Number of a started program on its host."""
    lines = Path(f"/proc/{host.pid(process)}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("NSpid")).split()[-1])


@pytest.mark.parametrize("launcher", ["pdsh", "slurm"])
def test_a_stopped_rank_on_the_second_host(start: Callable[..., Start], launcher: str) -> None:
    run = start(launcher)
    process = run(*LONG, *STRICT)
    beat = run.wait_for_step(3, process)
    run.hosts[1].kill(beat.pid, signal.SIGSTOP)
    out, code = ended(process, timeout=120)
    assert code == EXIT_STUCK, out
    assert "step1_sft failed: the run was stuck: rank 1 on node2" in out and "not given a sign of life" in out
    assert "rank 0 was at, innermost call first:" in out
    run.assert_nothing_is_left()


@pytest.fixture
def lost_hosts(two_hosts: Hosts, tmp_path: Path) -> Iterator[Hosts]:
    """Two more hosts, to lose one of them; `two_hosts` for its reason to skip."""
    (tmp_path / "lost").mkdir()
    with emulated.namespaces(tmp_path / "lost") as hosts:
        yield hosts


@pytest.mark.parametrize("how", ["power_off", "unplug"])
def test_elastic_goes_on_with_the_host_that_is_left(lost_hosts: Hosts, tmp_path: Path, how: str) -> None:
    run = Start(lost_hosts, tmp_path)
    process = run("--elastic", "--restarts", "1", "--restart-delay", "1", *LONG, *STRICT, "--sft.max_steps=60")
    run.wait_for_step(7, process)
    getattr(lost_hosts[1], how)()
    out, code = ended(process)
    assert code == 0, out
    failed = out.partition("step1_sft failed: ")[2].splitlines()[0]
    assert ("host node2 failed" if how == "power_off" else "No answer from node2 now.") in failed
    assert "--elastic: node2 does not answer; going on with 1 rank on this machine" in out
    assert "continues from its saved state; attempt 2" in out
    lines = [json.loads(line) for line in (run.run / "step1_sft" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["split"] == "train"][-1] == 60
    run.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("node1 slots=1\nnode9 slots=1\n", "{0}:2: host node9 does not answer `ssh"),
        ("node1 slots=1\n\nnode2 slots=0\n", "{0}:3: `node2 slots=0`: has 0 slots"),
        ("node1 slots=1\nnode2 slots=two\n", "{0}:2: `node2 slots=two`: 'slots=two' is not of the form"),
        ("node1 slots=1\n# own address\n10.77.0.11 slots=1\n", "{0}:3: `10.77.0.11` is this machine, as is `node1`"),
        ("localhost slots=1\nnode2 slots=1\n", "{0}:1: `localhost` means another machine on each of 2 hosts"),
        ("node2 slots=1\nnode2 slots=1\n", "{0}:2: host node2 stands in line 1 already"),
    ],
)
def test_hostfiles_that_are_refused(two_hosts: Hosts, tmp_path: Path, text: str, words: str) -> None:
    hostfile = tmp_path / "nodes"
    hostfile.write_text(text)
    flags = ["run", "--recipe", "tiny_cpu", "--hostfile", str(hostfile), "--out", str(tmp_path / "run")]
    done = two_hosts[0].run(*rlhf(*flags))
    assert done.returncode == 2 and words.format(hostfile) in done.stdout, done.stdout
    assert not list(tmp_path.glob("run/step*")) and not list(tmp_path.glob("run/logs/*"))


def test_visible_devices_that_disagree_with_the_hostfile(two_hosts: Hosts, tmp_path: Path) -> None:
    flags = ["run", "--recipe", "tiny_cpu", "--hostfile", str(two_hosts.hostfile(2, 2, name="pairs"))]
    variables = {"DS_ACCELERATOR": "cuda", "CUDA_VISIBLE_DEVICES": "1"}
    done = two_hosts[0].run(*rlhf(*flags, "--out", str(tmp_path / "run")), **variables)
    assert done.returncode == 2 and "CUDA_VISIBLE_DEVICES=1 hides slots [0] of node1 slots=2" in done.stdout


def test_no_hostfile_is_picked_up_unasked(two_hosts: Hosts, tmp_path: Path) -> None:
    """DeepSpeed reads /job/hostfile by itself; here it lies on the first host alone, in a file system of its own."""
    place, first = Path("/job"), two_hosts[0]
    if place.exists():
        pytest.skip(f"{place} exists on this machine")
    place.mkdir()
    try:
        assert first.run("mount", "-t", "tmpfs", "tmpfs", str(place)).returncode == 0
        written = first.run("cp", str(two_hosts.hostfile()), "/job/hostfile")
        assert written.returncode == 0, written.stdout
        run = ["run", "--recipe", "tiny_cpu", "--out", str(tmp_path / "run"), "--num_gpus", "1"]
        done = first.run(*rlhf(*run, *ONE_STAGE), timeout=300)
        assert done.returncode == 0, done.stdout
        beat = read_beat(tmp_path / "run" / "logs" / "step1_sft.1", 0)
        assert beat is not None and (beat.host, beat.world_size) == ("node1", 1)
    finally:
        first.run("umount", str(place))
        place.rmdir()


def test_the_second_way_two_names_on_loopback(tmp_path: Path) -> None:
    reason = emulated.lacking("pdsh", namespaces=False)
    if reason:
        pytest.skip(reason)
    (tmp_path / "hosts").mkdir()
    with emulated.loopback(tmp_path / "hosts") as hosts:
        hostfile = tmp_path / "nodes"
        hostfile.write_text("".join(f"{name} slots=1\n" for name in hosts.names))
        argv = rlhf("run", "--recipe", "tiny_cpu", "--hostfile", str(hostfile), "--out", str(tmp_path / "run"))
        done = subprocess.run(
            [*argv, "--master_addr", hosts.addresses[0], *ONE_STAGE],
            env={**hosts.environment, "GLOO_SOCKET_IFNAME": "lo"},
            capture_output=True,
            text=True,
            timeout=580,
        )
    logs = "".join(path.read_text()[-3000:] for path in tmp_path.glob("run/logs/*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    assert "2 ranks on alias2 slots=1, alias3 slots=1" in done.stdout
    assert json.loads((tmp_path / "run/summary.json").read_text())["stages"]["step1_sft"]["status"] == "done"
