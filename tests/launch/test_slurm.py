"""Inside a real Slurm allocation of three nodes, with nothing said about hosts: those of the allocation are used."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

CONF = """\
ClusterName=bed
SlurmctldHost=h1(10.123.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={dir}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool-%n
SlurmctldLogFile={dir}/ctld.log
SlurmdLogFile={dir}/d-%n.log
SlurmctldPidFile={dir}/ctld.pid
SlurmdPidFile={dir}/d-%n.pid
ReturnToService=2
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
NodeName=h1 NodeAddr=10.123.0.1 CPUs=4 RealMemory=1000 State=UNKNOWN
NodeName=h2 NodeAddr=10.123.0.2 CPUs=4 RealMemory=1000 State=UNKNOWN
NodeName=h3 NodeAddr=10.123.0.3 CPUs=4 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture
def slurm(bed):
    """slurm(command): runs it on h1 with Slurm's configuration; three nodes are up."""
    missing = [name for name in ("slurmctld", "slurmd", "salloc", "munged", "sinfo") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"a real Slurm needs {', '.join(missing)}: apt-get install slurm-wlm munge")
    folder = bed.folder / "slurm"
    for name in ("state", "spool-h1", "spool-h2", "spool-h3"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "slurm.conf").write_text(CONF.format(dir=folder))
    # A bed's host has no cgroups mounted; without this line slurmd looks for them, and ends.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "munge.key").write_bytes(os.urandom(64))
    (folder / "munge.key").chmod(0o600)
    env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    daemons = []

    def start(host, *command):
        with (folder / f"{Path(command[0]).name}-{host}.out").open("wb") as log:
            daemons.append(
                subprocess.Popen(bed.inside(host, *command), env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            )

    def call(*command, timeout_s=60):
        return subprocess.run(bed.inside("h1", *command), env=env, capture_output=True, text=True, timeout=timeout_s)

    munge = [
        f"--{name}={folder}/munge.{name.split('-')[0]}" for name in ("socket", "pid-file", "log-file", "seed-file")
    ]
    start("h1", "munged", "-F", "--force", f"--key-file={folder}/munge.key", *munge)
    start("h1", "slurmctld", "-D")
    for host in ("h1", "h2", "h3"):
        start(host, "slurmd", "-D", "-N", host)
    deadline = time.monotonic() + 40

    def logs():
        return "\n".join(f"--- {file.name}\n{file.read_text()[-1000:]}" for file in sorted(folder.glob("*.[lo]*")))

    try:
        while "idle" not in (state := call("sinfo", "-h", "-o", "%T %D").stdout) or "3" not in state:
            assert time.monotonic() < deadline, f"Slurm does not come up: {state}\n{logs()}"
            time.sleep(0.2)
        yield call
    finally:
        for pid, line in bed.processes().items():
            if any(name in line for name in ("munged", "slurmctld", "slurmd", "slurmstepd")):
                os.kill(pid, 9)
        for daemon in daemons:
            daemon.wait(10)


def test_the_hosts_of_the_allocation_are_used_and_named(slurm, bed, script):
    ssh = (f"--ssh-arg={argument}" for argument in ("-F", str(bed.folder / "ssh_config")))
    run = (sys.executable, "-m", "megaclass", "run", *ssh, *script("print(rank, os.uname().nodename)"))
    done = slurm("salloc", "-N", "3", "-n", "4", "--", *run)
    assert done.returncode == 0, done.stderr
    assert "megaclass run: detected Slurm job " in done.stderr and ": h1:2, h2:1, h3:1\n" in done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[0]<stdout>:0 h1",
        "[1]<stdout>:1 h1",
        "[2]<stdout>:2 h2",
        "[3]<stdout>:3 h3",
    ]
