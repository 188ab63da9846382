"""`megaclass run --launcher ray` on a Ray cluster of two nodes, h1 and h2 of the bed."""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

_SMALL = ("--object-store-memory=100000000", "--min-worker-port=0", "--max-worker-port=0", "--disable-usage-stats")


class RayCluster:
    def __init__(self, bed) -> None:
        self.bed = bed
        self._log = bed.folder / "ray.log"
        self.mark = os.urandom(8).hex()
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        head = ("--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={self.bed.folder}/ray")
        for number, role in ((1, head), (2, ("--address=10.123.0.1:6379",))):
            address = f"--node-ip-address=10.123.0.{number}"
            command = self._inside(f"h{number}", "ray", "start", "--block", "--num-cpus=2", address, *role, *_SMALL)
            with self._log.open("ab") as log:
                self._daemons.append(self._popen(command, stdout=log, stderr=log))
            self._wait_for_head()
        self._wait_for_nodes(2)

    def run(self, *arguments, timeout_s=60):
        """`megaclass run --launcher ray` on h1."""
        process = self.begin(*arguments)
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            pytest.fail(f"not over after {timeout_s} s\n{out}\n{err}")
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def begin(self, *arguments):
        command = (sys.executable, "-m", "megaclass", "run", "--launcher", "ray", *arguments)
        return self._popen(self._inside("h1", *command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def stop(self) -> None:
        # Ray's daemons open sessions of their own; what they all carry is the environment.
        while left := processes_with(f"RAY_TEST_CLUSTER={self.mark}"):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        for daemon in self._daemons:
            daemon.wait()

    def _wait_for_head(self) -> None:
        knock = self._inside("h1", "bash", "-c", "exec 3<>/dev/tcp/10.123.0.1/6379")
        deadline = time.monotonic() + 60
        while self._popen(knock, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).wait() != 0:
            assert time.monotonic() < deadline, f"Ray did not start: {self._log.read_text()[-3000:]}"
            time.sleep(0.1)

    def _wait_for_nodes(self, num_nodes: int) -> None:
        # One process that asks again and again: to load Ray takes seconds.
        program = f"""
import ray, time
deadline = time.monotonic() + 60
while True:
    try:
        ray.init(address="auto", logging_level="ERROR")
        break
    except Exception:
        assert time.monotonic() < deadline
        time.sleep(0.2)
while len(ray.nodes()) < {num_nodes}:
    assert time.monotonic() < deadline
    time.sleep(0.1)
"""
        with self._log.open("ab") as log:
            asking = self._popen(self._inside("h1", sys.executable, "-c", program), stdout=log, stderr=log)
        assert asking.wait(120) == 0, f"Ray did not start: {self._log.read_text()[-3000:]}"

    def _popen(self, command, **pipes):
        env = {
            name: value for name, value in os.environ.items() if not name.startswith(("MEGACLASS_", "SLURM_", "RAY_"))
        }
        folder = str(Path(sys.executable).parent)
        env |= {"PATH": f"{folder}:{env['PATH']}", "RAY_ADDRESS": "10.123.0.1:6379", "OMP_NUM_THREADS": "1"}
        # Said outright: otherwise each node goes by what Ray has left in the home folder of whoever runs the tests.
        env |= {"RAY_TEST_CLUSTER": self.mark, "RAY_AUTH_MODE": "disabled"}
        # No processes in advance: each job would start four and use two.
        env |= {"RAY_prestart_worker_first_driver": "0"}
        return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, **pipes)

    def _network(self, host):
        return f"mc{os.getpid()}-{host}"

    def _inside(self, host, *command):
        # The host's network and name; Ray's daemons do not end with the host's first process, so they stay outside of it.
        shell = 'mount --bind "$1" /etc/hosts; hostname "$2"; shift 2; exec "$@"'
        return [
            *(
                "nsenter",
                f"--net=/run/netns/{self._network(host)}",
                "unshare",
                "--uts",
                "--mount",
                "bash",
                "-c",
                shell,
                "-",
            ),
            *(str(self.bed.folder / "hosts"), host, *command),
        ]


@pytest.fixture(scope="module")
def cluster(bed_of_the_session):
    if importlib.util.find_spec("ray") is None:
        pytest.skip('there is no Ray: pip install "megaclass-launch[ray]"')
    cluster = RayCluster(bed_of_the_session)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def processes_with(text):
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                is_zombie = (folder / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
                if not is_zombie and text.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
    return found


def test_ranks_of_one_node_are_neighbours_and_their_output_is_marked_as_with_ssh(cluster):
    done = cluster.run(
        "-np", "4", "bash", "-c", "echo rank $RANK of $WORLD_SIZE, local $LOCAL_RANK, on $(hostname) at $MASTER_ADDR"
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    first, second = ("h1", "h2") if "on h1" in lines[0] else ("h2", "h1")
    address = f"10.123.0.{first[1]}"
    assert lines == [
        f"[{rank}]<stdout>:rank {rank} of 4, local {rank % 2}, on {first if rank < 2 else second} at {address}"
        for rank in range(4)
    ]


def test_the_first_rank_that_fails_ends_the_others_and_gives_its_exit_code(cluster):
    body = 'if [ $RANK = 1 ]; then echo "the end" >&2; exit 7; fi; sleep 60'
    begun = time.monotonic()
    done = cluster.run("-np", "3", "-x", "RAY_TEST_MARK=a1b2", "bash", "-c", body)
    assert done.returncode == 7, done.stderr
    assert "[1]<stderr>:the end" in done.stderr
    assert "the first to fail was rank 1 on h" in done.stderr and "with exit code 7" in done.stderr
    assert time.monotonic() - begun < 45
    assert processes_with("RAY_TEST_MARK=a1b2") == []


def test_a_driver_that_is_killed_leaves_nothing_behind(cluster):
    process = cluster.begin("-np", "2", "-x", "RAY_TEST_MARK=c3d4", "bash", "-c", "echo up; sleep 60")
    assert process.stdout.readline().endswith("up\n") and process.stdout.readline().endswith("up\n")
    assert processes_with("RAY_TEST_MARK=c3d4")
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 20
    while processes_with("RAY_TEST_MARK=c3d4") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_with("RAY_TEST_MARK=c3d4") == []


def test_ctrl_c_reaches_the_ranks_which_may_save_and_leave(cluster):
    body = "trap 'echo saved; exit 0' INT; echo up; sleep 60 & wait"
    process = cluster.begin("-np", "2", "bash", "-c", body)
    assert process.stdout.readline().endswith("up\n") and process.stdout.readline().endswith("up\n")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out.count("saved\n")) == (130, 2), err


def test_after_a_failure_all_ranks_are_started_again(cluster):
    body = (
        "echo start $MEGACLASS_RESTART at $MASTER_PORT; if [ $RANK = 1 ] && [ $MEGACLASS_RESTART = 0 ]; then exit 3; fi"
    )
    done = cluster.run("-np", "2", "--restarts", "5", "bash", "-c", f"{body}; sleep 0.5", timeout_s=120)
    assert done.returncode == 0, done.stderr
    lines = {line.partition(":")[2] for line in done.stdout.splitlines()}
    assert sorted(line.split(" at ")[0] for line in lines) == ["start 0", "start 1"]
    assert "megaclass: restart 1 of 5: 2 ranks." in done.stderr and "restart 2" not in done.stderr


def test_what_must_be_mended_first_is_not_started_again(cluster):
    done = cluster.run("-np", "2", "--restarts", "5", "bash", "-c", "exit 2")
    assert done.returncode == 2 and "restart 1" not in done.stderr
    assert "exit code 2 means that something has to be fixed first: no restart." in done.stderr


def test_a_job_that_hangs_is_ended(cluster):
    done = cluster.run("-np", "2", "--hang-timeout", "3", "bash", "-c", "echo up; sleep 60")
    assert done.returncode == 134, done.stderr
    assert "the job hangs: no rank has printed anything or made progress (--hang-timeout)" in done.stderr


def test_an_agent_that_is_killed_ends_the_job_and_leaves_nothing_behind(cluster):
    process = cluster.begin("-np", "4", "-x", "RAY_TEST_MARK=e5f6", "bash", "-c", "echo up; sleep 60")
    assert all(process.stdout.readline().endswith("up\n") for _ in range(4))
    agents = [
        pid for pid in processes_with(cluster.mark) if b"agent.agent" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert len(agents) == 2
    os.kill(agents[0], signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 255, err
    assert "was lost: its agent, or Ray's actor with it, ended with signal SIGKILL. Its ranks end by themselves" in err
    deadline = time.monotonic() + 20
    while processes_with("RAY_TEST_MARK=e5f6") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_with("RAY_TEST_MARK=e5f6") == []


def test_more_processes_than_the_cluster_has_room_for_are_refused(cluster):
    done = cluster.run("-np", "9", "true")
    assert done.returncode == 2
    assert "-np 9 requires 9 CPUs, but the Ray cluster has 4: lower -np, or add a host with ray start" in done.stderr


def test_a_command_that_is_not_there_is_named(cluster):
    done = cluster.run("-np", "2", "no-such-command")
    assert done.returncode == 2 and "There is no command 'no-such-command'" in done.stderr


# The cluster of this module is taken down during its teardown.
@pytest.mark.ranks
def test_a_cluster_that_is_not_there_is_named_at_once(monkeypatch, capsys):
    if importlib.util.find_spec("ray") is None:
        pytest.skip('there is no Ray: pip install "megaclass-launch[ray]"')
    from megaclass.cli.main import main

    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert main(["run", "--launcher", "ray", "-np", "2", "true"]) == 2
    assert "There is no Ray cluster at RAY_ADDRESS=127.0.0.1:1 (Connection refused)" in capsys.readouterr().err
