"""A real Slurm on emulated hosts: slurmctld on the first, one slurmd on each, munge between them.

All files lie in the folder of the hosts, none in /etc, and all daemons run inside the hosts, so they end with them.
"""

import os
import time
from pathlib import Path

from tests.hosts import Host, Hosts

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo", "scontrol", "ip")

_CONFIGURATION = """
ClusterName=emulated
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd_%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdTimeout=15
SlurmctldTimeout=30
InactiveLimit=0
KillWait=5
SchedulerParameters=sched_interval=1,batch_sched_delay=1
NodeName={names} CPUs=2 Sockets=1 CoresPerSocket=2 ThreadsPerCore=1 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A cluster that runs; its hosts end it."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.folder = hosts.folder / "slurm"
        for name in ("state", *(f"spool_{host.name}" for host in hosts)):
            (self.folder / name).mkdir(parents=True)
        self.folder.chmod(0o755)
        self.configuration = self.folder / "slurm.conf"
        names = ",".join(host.name for host in hosts)
        text = _CONFIGURATION.format(controller=hosts[0].name, folder=self.folder, names=names)
        self.configuration.write_text(text)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self._start_daemons(key)

    @property
    def variables(self) -> dict[str, str]:
        """What Slurm's programs need."""
        return {"SLURM_CONF": str(self.configuration)}

    def run(self, *argv: str, host: Host | None = None, **variables: str) -> str:
        """Output of a program of Slurm on a host, the first one by default."""
        done = (host or self.hosts[0]).run(*argv, **self.variables, **variables)
        assert done.returncode == 0, f"{' '.join(argv)}: {done.stdout}"
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol` knows about a job."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def _start_daemons(self, key: Path) -> None:
        first = self.hosts[0]
        files = {"socket": "munge.sock", "pid-file": "munged.pid", "log-file": "munged.log", "seed-file": "munged.seed"}
        places = [f"--{option}={self.folder / name}" for option, name in files.items()]
        self.run("munged", "--force", f"--key-file={key}", "--num-threads=2", *places)
        self.run("slurmctld", host=first)
        for host in self.hosts:
            # slurmd looks for a mounted cgroup file system and does not use it.
            self.run("mount", "-t", "tmpfs", "tmpfs", "/sys/fs/cgroup", host=host)
            self.run("slurmd", "-N", host.name, host=host)
        deadline = time.monotonic() + 30
        while (states := self.run("sinfo", "--noheader", "--Node", "--format=%T").split()) != ["idle"] * len(
            self.hosts.all
        ):
            logs = [path.read_text() for path in self.folder.glob("*.log")]
            assert time.monotonic() < deadline, f"{states}: {logs}"
            time.sleep(0.3)
