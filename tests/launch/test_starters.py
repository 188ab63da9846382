"""Ranks started by others: mpirun and srun, for real, on one host and on several.

torchrun: tests/megaclass/training/test_train.py.
"""

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import megaclass
from megaclass.cli.main import main
from megaclass_launch.errors import LaunchError
from megaclass_launch.rendezvous.rank0_address import meeting_point
from megaclass_launch.world import World

_STEERING = (
    "MEGACLASS_",
    "HOROVOD_",
    "SLURM_",
    "OMPI_",
    "PMIX_",
    "MASTER_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "NCCL_",
    "GLOO_",
)
_MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe")
# What ranks do before they load torch, which takes seconds.
_MEET = """
import os, sys
from megaclass_launch.rendezvous.rank0_address import meeting_point
from megaclass_launch.errors import UserError
from megaclass_launch.world import world_from_environment
try:
    world = meeting_point(world_from_environment())
    os.environ["NCCL_LATER"] = "set between two process groups of one process"
    assert meeting_point(world_from_environment()) == world
    sys.stdout.write(f"rank {world.rank} goes to {world.address}:{world.port}\\n")
except UserError as error:
    sys.stderr.write(f"megaclass: {error}\\n")
    sys.exit(2)
"""
# And then: add up, over plain connections to where rank 0 is. It shows who meets whom without loading torch.
_SUM = """
import socket, sys, time
from megaclass_launch.rendezvous.rank0_address import meeting_point
from megaclass_launch.world import world_from_environment
world = meeting_point(world_from_environment())
total = world.rank + 1
if world.rank == 0:
    with socket.create_server((world.address, world.port)) as server:
        others = [server.accept()[0] for _ in range(world.size - 1)]
        total += sum(int.from_bytes(other.recv(1)) for other in others)
        for other in others:
            other.sendall(bytes([total]))
else:
    deadline = time.monotonic() + 30
    while True:
        try:
            connection = socket.create_connection((world.address, world.port), timeout=30)
            break
        except ConnectionRefusedError:
            # Rank 0 does not listen yet.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    connection.sendall(bytes([total]))
    total = connection.recv(1)[0]
place = f"cross rank {world.cross_rank} of {world.cross_size}"
sys.stdout.write(f"rank {world.rank} of {world.size}, {place}: sum {total}\\n")
"""
# A rank that joins a process group.
_JOIN = """
from megaclass_launch.messages import messages_on_stderr
from megaclass_launch.ranks.process_group import process_group
from megaclass_launch.world import world_from_environment
world = world_from_environment()
with messages_on_stderr(), process_group(world, device="cpu", timeout_s=30):
    print(f"rank {world.rank} of {world.size}")
"""


@pytest.fixture
def run_here(request):
    """`megaclass run` on this machine, as the launcher's own tests start it."""
    return request.getfixturevalue("run")


def environment(**more: str) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(_STEERING)}
    folder = str(Path(sys.executable).parent)
    return {**env, "PATH": f"{folder}:{env['PATH']}", "OMP_NUM_THREADS": "1", **more}


def run(*command: str, timeout_s: float = 200.0, **env: str) -> subprocess.CompletedProcess[str]:
    """The end of the time kills the starter's whole session."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, env=environment(**env), text=True, start_new_session=True, **pipes)
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"{command} did not end within {timeout_s} s\n{out[-2000:]}\n{err[-2000:]}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def needs(*programs: str, package: str) -> None:
    if missing := [name for name in programs if shutil.which(name) is None and not Path("/usr/sbin", name).exists()]:
        pytest.skip(f"there is no {', '.join(missing)}: apt-get install {package}")


@pytest.fixture
def recipe(tmp_path):
    """Arguments of `megaclass train` for a run of seconds."""
    file = tmp_path / "tiny.toml"
    file.write_text(
        f"""
        [data]
        path = "synthetic:20x160"
        size = 32
        [backbone]
        name = "slim"
        embedding_dim = 16
        [train]
        run_dir = "{tmp_path}/run"
        epochs = 1
        global_batch = 32
        [export]
        onnx = false
        """
    )
    return str(file)


@pytest.fixture
def adder(tmp_path):
    file = tmp_path / "adder.py"
    file.write_text(_SUM)
    return (sys.executable, str(file))


def assert_trained(done, tmp_path, size):
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    for rank in range(size):
        assert f"rank {rank} of {size} on " in done.stderr
    assert (tmp_path / "run" / "metrics.jsonl").stat().st_size > 0


@pytest.fixture
def meeter(tmp_path):
    file = tmp_path / "meeter.py"
    file.write_text(_MEET)
    return (sys.executable, str(file))


# ---- mpirun ----


@pytest.fixture
def mpirun_on_hosts(bed):
    needs("mpirun", package="openmpi-bin")

    def start(*arguments, **env):
        ssh = ("--mca", "plm_rsh_agent", f"ssh -F {bed.folder}/ssh_config")
        return run(*bed.inside("h1", *_MPIRUN, *ssh, "-x", "OMP_NUM_THREADS", *arguments), **env)

    return start


@pytest.mark.ranks
def test_mpirun_starts_four_ranks_on_one_host(adder):
    needs("mpirun", package="openmpi-bin")
    done = run(*_MPIRUN, "-np", "4", *adder)
    places = [f"rank {rank} of 4, cross rank 0 of 1: sum 10" for rank in range(4)]
    assert sorted(done.stdout.splitlines()) == places, done.stderr


def test_mpirun_on_several_hosts_needs_no_address(mpirun_on_hosts, adder):
    done = mpirun_on_hosts("-H", "h1:2,h2:1", *adder)
    assert sorted(done.stdout.splitlines()) == [
        "rank 0 of 3, cross rank 0 of 2: sum 6",
        "rank 1 of 3, cross rank 0 of 2: sum 6",
        "rank 2 of 3, cross rank 1 of 2: sum 6",
    ], done.stderr


def test_mpirun_trains_on_two_hosts(mpirun_on_hosts, recipe, tmp_path):
    assert_trained(mpirun_on_hosts("-x", "PATH", "-H", "h1:1,h2:1", "megaclass", "train", recipe), tmp_path, 2)


def test_mpirun_needs_no_rank_on_the_host_where_it_is_typed(mpirun_on_hosts, meeter):
    done = mpirun_on_hosts("-H", "h2:1,h3:1", *meeter)
    first, second = sorted(done.stdout.splitlines())
    assert first.startswith("rank 0 goes to 10.123.0.2:") and second == first.replace("rank 0", "rank 1"), done.stderr


def test_variables_that_mpirun_was_not_told_to_hand_on_are_named(mpirun_on_hosts, meeter):
    done = mpirun_on_hosts("-H", "h1:1,h2:1", *meeter, NCCL_DEBUG="WARN", MASTER_PORT="29871")
    places = [f"rank {rank} goes to 10.123.0.1:29871" for rank in (0, 1)]
    assert done.returncode == 0 and sorted(done.stdout.splitlines()) == places, done.stderr
    assert "rank 0 on h1 has NCCL_DEBUG, this rank does not." in done.stderr
    assert "add -x NCCL_DEBUG." in done.stderr


def test_an_address_that_is_not_rank_0s_is_refused_at_once(mpirun_on_hosts, meeter):
    done = mpirun_on_hosts("-x", "MASTER_ADDR=h3", "-H", "h1:1,h2:1", *meeter)
    assert done.returncode == 2
    assert "MASTER_ADDR=h3 points to 10.123.0.3, but rank 0 runs on h1 (10.123.0.1)" in done.stderr
    assert "leave MASTER_ADDR out, or add -x MASTER_ADDR=10.123.0.1." in done.stderr


def test_an_interface_that_does_not_exist_is_named_with_those_that_do(mpirun_on_hosts, meeter):
    done = mpirun_on_hosts("-x", "GLOO_SOCKET_IFNAME=eth9", "-H", "h1:1,h2:1", *meeter)
    assert done.returncode == 2
    assert "GLOO_SOCKET_IFNAME=eth9 names 'eth9', but h1 has no such network interface: it has lo, eth0." in done.stderr


# ---- srun ----


class Slurm:
    """Two nodes, h1 and h2 of the bed."""

    def __init__(self, bed) -> None:
        self.bed = bed
        self.folder = bed.folder / "slurm-of-starters"
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        for name in ("state", "munge", "spool/h1", "spool/h2"):
            (self.folder / name).mkdir(parents=True)
        for folder in (self.bed.folder, self.folder, self.folder / "munge"):
            folder.chmod(0o755)  # munged insists that others may look into its folder
        key = self.folder / "munge" / "key"
        key.touch(0o600)
        key.write_bytes(os.urandom(64))
        text = Path(__file__).with_name("slurm.conf.in").read_text()
        (self.folder / "slurm.conf").write_text(text.replace("@DIR@", str(self.folder)))
        munge = [f"--{name}-file={self.folder}/munge/{name}" for name in ("key", "pid", "log", "seed")]
        self._daemon("/usr/sbin/munged", "--foreground", "--force", f"--socket={self.folder}/munge/socket", *munge)
        self._daemon(*self._inside("h1", "/usr/sbin/slurmctld", "-D"))
        for host in ("h1", "h2"):
            self._daemon(*self._inside(host, "/usr/sbin/slurmd", "-D"))
        for _ in range(100):
            nodes = self.run("sinfo", "-h", "-o", "%T %D").stdout
            if nodes.strip() == "idle 2":
                return
            time.sleep(0.1)
        logs = "\n".join(file.read_text()[-1500:] for file in self.folder.glob("*.log"))
        pytest.fail(f"Slurm did not start: {nodes}\n{logs}")

    def run(self, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
        return run(*self.bed.inside("h1", *command), SLURM_CONF=f"{self.folder}/slurm.conf", **env)

    def stop(self) -> None:
        for daemon in reversed(self._daemons):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait()

    def _daemon(self, *command: str) -> None:
        env = environment(SLURM_CONF=f"{self.folder}/slurm.conf")
        quiet = subprocess.DEVNULL
        self._daemons.append(
            subprocess.Popen(command, env=env, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)
        )

    def _inside(self, host: str, *command: str) -> list[str]:
        # The host's network and name, but the machine's own /sys, where slurmd insists on finding control groups.
        network = f"/run/netns/mc{os.getpid()}-{host}"
        shell = 'mount --bind "$1" /etc/hosts; hostname "$2"; shift 2; exec "$@"'
        return [
            *("nsenter", f"--net={network}", "unshare", "--uts", "--mount", "bash", "-c", shell, "-"),
            *(str(self.bed.folder / "hosts"), host, *command),
        ]


@pytest.fixture(scope="module")
def slurm_of_the_module(bed_of_the_session):
    needs("srun", "slurmctld", "slurmd", "munged", package="slurm-wlm munge")
    slurm = Slurm(bed_of_the_session)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()


@pytest.fixture
def slurm(bed, slurm_of_the_module):
    return slurm_of_the_module


@pytest.fixture
def sbatch(slurm, recipe, tmp_path):
    """Submits deploy/slurm.sbatch with the recipe; its output goes to tmp_path/log."""
    script = Path(__file__).parents[2] / "deploy" / "slurm.sbatch"
    # The nodes of the bed have no GPUs and few cores.
    text = re.sub(r"#SBATCH --(gpus-per-node|cpus-per-task|time).*", "", script.read_text())
    (tmp_path / "batch").write_text(text)
    where = ("-N2", "-t9", f"--chdir={tmp_path}", f"--output={tmp_path}/log")

    def submit(*options, settings):
        done = slurm.run("sbatch", "--parsable", *where, *options, str(tmp_path / "batch"), *settings, RECIPE=recipe)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return submit


def test_the_batch_script_hands_recipe_and_settings_to_every_task(sbatch, tmp_path):
    sbatch("--wait", "--ntasks-per-node=2", settings=("--show-config", "train.seed=31"))
    assert (tmp_path / "log").read_text().count("seed = 31\n") == 4


def test_a_batch_job_that_is_asked_to_stop_saves_and_is_queued_again(slurm, sbatch, tmp_path):
    job = sbatch("--ntasks-per-node=1", settings=("train.epochs=500",))

    def wait_for(condition):
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, (
                f"{shown()}\n{tail(tmp_path / 'log')}\n{tail(slurm.folder / 'controller.log')}"
            )
            time.sleep(0.3)

    def tail(file):
        return file.read_text()[-3000:]

    def shown():
        return slurm.run("scontrol", "show", "job", job).stdout

    try:
        wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").is_file())
        slurm.run("scancel", "--signal=TERM", job)
        # Slurm itself waits two minutes. Begun in the second in which the nodes end it, a job is "revoked".
        wait_for(lambda: re.search(r"JobState=(PENDING|RUNNING)(.|\n)*Restarts=1 ", shown()))
        slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now+3")
        wait_for(lambda: "megaclass: resuming from " in (tmp_path / "log").read_text())
    finally:
        slurm.run("scancel", job)
        wait_for(lambda: re.search("JobState=(CANCELLED|COMPLETED|FAILED)", shown()))
    assert "asked to stop; saved at step " in (tmp_path / "log").read_text()


def test_srun_trains_on_two_nodes(slurm, recipe, tmp_path):
    assert_trained(slurm.run("srun", "-t5", "-N2", "megaclass", "train", recipe), tmp_path, 2)


def test_srun_fills_nodes_unevenly_and_every_rank_knows_its_place(slurm, adder):
    done = slurm.run("srun", "-t5", "-N2", "-n3", *adder)
    assert sorted(done.stdout.splitlines()) == [
        "rank 0 of 3, cross rank 0 of 2: sum 6",
        "rank 1 of 3, cross rank 0 of 2: sum 6",
        "rank 2 of 3, cross rank 1 of 2: sum 6",
    ], done.stderr


def test_a_batch_script_that_forgets_srun_is_told(slurm, tmp_path):
    (tmp_path / "join.py").write_text(_JOIN)
    done = slurm.run("salloc", "-t5", "-N2", "-n3", sys.executable, str(tmp_path / "join.py"))
    assert "rank 0 of 1" in done.stdout
    assert "Slurm granted 3 tasks, but this is one process: type `srun` in front of the command" in done.stderr


# ---- megaclass run --launcher ----

_RUN = (sys.executable, "-m", "megaclass", "run")


def shown_plan(capsys, *arguments):
    assert main(["run", "--dry-run", "--workdir", "/job", *arguments]) == 0
    return capsys.readouterr().out.split()


def test_mpirun_gets_the_hosts_and_the_names_of_the_variables_but_not_their_values(capsys):
    plan = shown_plan(
        capsys, "--launcher", "mpi", "-H", "h77:2,h78:1", "-x", "SECRET=5", "python", "a.py", "--launcher", "x"
    )
    assert plan[0] == "mpirun" and plan[-4:] == ["python", "a.py", "--launcher", "x"]
    assert plan[plan.index("-np") + 1] == "3" and plan[plan.index("-H") + 1] == "h77:2,h78:1"
    assert "SECRET" in plan and "SECRET=5" not in plan
    assert plan[plan.index("--wdir") + 1] == "/job"


def test_srun_gets_the_tasks_and_ends_all_when_one_fails(capsys, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    interface = ("--network-interface", "eth7")
    plan = shown_plan(capsys, "--launcher=slurm", *interface, "-H", "h77:2,h78:2", "python", "a.py")
    # fmt: off
    assert plan == ["srun", "--ntasks=4", "--nodelist=h77,h78", "--nodes=2", "--ntasks-per-node=2", "--export=ALL",
                    "--kill-on-bad-exit=1", "--label", "--chdir=/job", "python", "a.py"]
    # fmt: on


def test_unequal_slots_become_a_task_list_and_processes_fill_the_first_hosts(capsys, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    plan = shown_plan(capsys, "--launcher=slurm", "-H", "h77:1,h78:2", "true")
    assert plan[1:5] == ["--ntasks=3", "--nodelist=h77,h78,h78", "--nodes=2", "--distribution=arbitrary"]
    assert plan[5] == "--export=ALL,MASTER_ADDR=h77"
    plan = shown_plan(capsys, "--launcher=slurm", "-np", "2", "-H", "h77:1,h78:2", "true")
    assert plan[1:5] == ["--ntasks=2", "--nodelist=h77,h78", "--nodes=2", "--ntasks-per-node=1"]


def test_ray_is_not_asked_for_a_plan(capsys, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    plan = " ".join(shown_plan(capsys, "--launcher=ray", "-np", "2", "python", "a b.py"))
    assert plan.startswith("2 ranks, packed onto as few nodes as possible") and "command: python 'a b.py'" in plan


def test_mpirun_starts_the_job_on_both_hosts(bed, meeter):
    needs("mpirun", package="openmpi-bin")
    done = bed("--launcher", "mpi", "-H", "h1:1,h2:1", *meeter)
    assert done.code == 0, done.story()
    lines = sorted(line.partition(":")[2] for line in done.out.splitlines())
    assert len(lines) == 2 and all(line.startswith(f"rank {r} goes to 10.123.0.1:") for r, line in enumerate(lines))


def test_srun_starts_the_job_and_asks_for_the_nodes_itself(slurm, meeter):
    done = slurm.run(*_RUN, "--launcher", "slurm", "-H", "h1:1,h2:1", *meeter)
    assert done.returncode == 0, done.stderr
    lines = sorted(line.partition(": ")[2] for line in done.stdout.splitlines())
    assert len(lines) == 2 and all(line.startswith(f"rank {r} goes to h1:") for r, line in enumerate(lines))


@pytest.mark.parametrize("hosts", ["h1:1,h2:2", "h2:2,h1:1"])
def test_srun_fills_hosts_of_unequal_slots_and_rank_0_is_on_the_first(slurm, adder, hosts):
    body = 'echo $SLURM_PROCID on $(hostname); exec "$0" "$@"'
    done = slurm.run(*_RUN, "--launcher", "slurm", "-H", hosts, "bash", "-c", body, *adder)
    assert done.returncode == 0 and done.stdout.count(": sum 6\n") == 3, done.stderr
    places = sorted(line.partition(": ")[2] for line in done.stdout.splitlines() if " on " in line)
    in_order = [host.partition(":")[0] for host in hosts.split(",") for _ in range(int(host[-1]))]
    assert places == [f"{rank} on {host}" for rank, host in enumerate(in_order)]


def test_more_processes_than_slurm_granted_tasks_are_refused(slurm):
    done = slurm.run("salloc", "-t5", "-N2", "-n2", *_RUN, "--launcher", "slurm", "-np", "4", "true")
    assert done.returncode == 2
    assert "-np 4 asks for more than the 2 tasks of Slurm job" in done.stderr
    assert "lower -np, or submit with sbatch --ntasks=4." in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--launcher", "pbs", "-np", "2", "true"], "--launcher: invalid choice: 'pbs' (choose from "),
        (["--launcher"], "--launcher: expected one argument."),
        (["--launcher", "local", "-H", "h77:1", "true"], "but h77 is another machine: leave -H out."),
        (["--launcher", "mpi", "true"], "How many processes? Give -np N"),
        (["--launcher", "local", "true"], "How many processes? Give -np N"),
        (
            ["--launcher", "mpi", "-np", "2", "--restarts", "1", "true"],
            "--launcher mpi does not support --restarts: leave",
        ),
        (["--launcher", "slurm", "-np", "2", "--output-filename", "o", "true"], "does not support --output-filename"),
        (
            ["--launcher", "ray", "-np", "2", "--min-np", "1", "--remote-prefix", "nice", "true"],
            "--min-np and --remote-prefix",
        ),
        (
            ["--launcher", "mpi", "-np", "2", "--workdir", "/absent", "true"],
            "the working folder /absent: No such file",
        ),
        (["--launcher", "ray", "-H", "h77:1", "true"], "Ray chooses the hosts; leave -H and --hostfile out"),
    ],
)
def test_a_launcher_that_cannot_do_what_is_asked_says_so(capsys, monkeypatch, arguments, message):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert main(["run", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_launcher_that_is_not_installed_is_named_with_its_package(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["run", "--launcher", "mpi", "-np", "2", "true"]) == 2
    assert "There is no mpirun here: sudo apt install openmpi-bin" in capsys.readouterr().err


@pytest.mark.ranks
def test_local_is_the_drivers_own_way(run_here):
    done = run_here("--launcher", "local", "-np", "2", "bash", "-c", "echo rank $RANK --check")
    assert done.code == 0 and sorted(done.out.splitlines()) == [
        "[0]<stdout>:rank 0 --check",
        "[1]<stdout>:rank 1 --check",
    ]


@pytest.mark.parametrize("flag", ["--check-build", "--check", "-cb"])
def test_check_build_is_found_under_all_its_names(capsys, monkeypatch, flag):
    monkeypatch.setattr("megaclass_launch.check.build_table.build_table", lambda: "the table")
    assert main(["run", "-np", "2", flag]) == 0
    assert capsys.readouterr().out == "the table\n"


@pytest.mark.ranks
def test_check_build_prints_horovods_table(capsys):
    assert main(["run", "--check-build"]) == 0
    table = capsys.readouterr().out.replace("    [X] Ray\n", "")
    # The development environment has neither of them or recent versions of both.
    tensorflow = "X" if importlib.util.find_spec("tensorflow") else " "
    nccl = "X" if torch.cuda.is_available() else " "
    assert (
        table
        == f"""Megaclass v{megaclass.__version__}:

Available Frameworks:
    [{tensorflow}] TensorFlow
    [{tensorflow}] Keras
    [X] PyTorch
    [ ] MXNet

Available Controllers:
    [ ] MPI
    [X] Gloo

Available Tensor Operations:
    [{nccl}] NCCL
    [ ] DDL
    [ ] CCL
    [ ] MPI
    [X] Gloo
"""
    )


# ---- what is refused before anybody waits ----


def refusal(world, env):
    with pytest.raises(LaunchError) as caught:
        meeting_point(world, env)
    return str(caught.value)


def test_a_name_that_does_not_resolve_is_named_with_the_line_to_type():
    world = World(rank=1, size=2, starter="torchrun", address="no-such-host.invalid", port=1234)
    message = refusal(world, {"MASTER_ADDR": "no-such-host.invalid"})
    assert "cannot resolve 'no-such-host.invalid', where rank 0 should be" in message
    assert "give every torchrun --master-addr" in message


def test_only_rank_0_must_be_at_the_address():
    elsewhere = {"size": 2, "starter": "torchrun", "address": "192.0.2.77", "port": 1234}
    assert "points to 192.0.2.77, but rank 0 runs on" in refusal(World(rank=0, **elsewhere), {})
    assert meeting_point(World(rank=1, **elsewhere), {}).address == "192.0.2.77"


@pytest.mark.parametrize("value", ["^docker0", "=lo", "l", "lo,lo"])
def test_nccls_ways_to_name_interfaces_are_understood(value):
    meeting_point(World(rank=0, size=2, starter="torchrun", port=1234), {"NCCL_SOCKET_IFNAME": value})


def test_mpirun_without_a_pmix_library_asks_for_the_address(monkeypatch):
    monkeypatch.setattr("megaclass_launch.rendezvous.rank0_address.tell_all", lambda text, is_main: None)
    world = World(rank=0, size=2, starter="Open MPI", cross_size=2, port=1234)
    assert "add -x MASTER_ADDR=" in refusal(world, {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://192.0.2.77:1"})
    at_mpirun = {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://127.0.0.1,192.0.2.77:1;tcp6://[::1]:2"}
    assert meeting_point(world, at_mpirun).address == "127.0.0.1"
