"""Processes of one job on this machine: started, watched, never left behind. Real processes throughout."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megaclass_launch.agent import supervisor as supervisor_module
from megaclass_launch.agent.supervisor import Supervisor
from megaclass_launch.errors import LaunchError
from megaclass_launch.hang.stacks import children_of
from megaclass_launch.launchers import local
from megaclass_launch.launchers.local import default_threads, run_local

# Each rank writes its pid first, so a test can see whether it is still there.
_PREAMBLE = """
import os, signal, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
folder = Path(sys.argv[1])
def say(name, text):
    (folder / f".{name}").write_text(str(text))
    (folder / f".{name}").rename(folder / name)
def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.01)
"""
_HELLO = 'say(f"pid{rank}", os.getpid())\n'
FOR_EVER = "while True: time.sleep(600)"
pytestmark = pytest.mark.ranks

# Instead of the seconds that ranks are given: what lasts longer than a grace need not last long.
GRACE_S = 0.5
# Ranks sleep for 600 s unless they are ended.
WELL_BELOW_THE_SLEEP_S = 200.0


@pytest.fixture
def program(tmp_path):
    """program(body): the command that runs `body` as a rank."""

    def command(body):
        script = tmp_path / "rank.py"
        script.write_text(_PREAMBLE + body)
        return [sys.executable, "-S", str(script), str(tmp_path)]

    return command


@pytest.fixture
def parent(tmp_path, program):
    """parent(body, size): a process of its own that calls run_local; whatever happens, all are gone after the test."""
    started = []

    def start(body, size):
        grace = f"from megaclass_launch.launchers import local; local.GRACE_S = {GRACE_S}"
        code = f"""{grace}
from megaclass_launch.messages import messages_on_stderr
with messages_on_stderr():
    raise SystemExit(local.run_local({program(body)!r}, {size}))"""
        process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
    for pid in pids(tmp_path):
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)


def pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in sorted(folder.glob("pid*"))]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until(condition, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def test_every_rank_finds_its_place_in_the_environment(program, tmp_path):
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MEGACLASS_STARTER"]
    body = f'say(f"out{{rank}}", [os.environ[name] for name in {names}] + [os.environ["MASTER_PORT"]])'
    assert run_local(program(body), 3) == 0
    worlds = [eval((tmp_path / f"out{rank}").read_text()) for rank in range(3)]
    assert [world[:-1] for world in worlds] == [[str(r), "3", str(r), "3", "127.0.0.1", "megaclass"] for r in range(3)]
    assert len({world[-1] for world in worlds}) == 1


def test_it_ends_with_0_when_all_ranks_do_however_long_one_takes(program, tmp_path):
    assert run_local(program(_HELLO + "time.sleep(0.5 * rank)"), 3) == 0
    assert len(pids(tmp_path)) == 3


def test_the_exit_code_is_that_of_the_first_rank_that_failed_and_its_name_is_told(program, tmp_path, capfd):
    body = _HELLO + "wait_for('pid0'); wait_for('pid2')\nif rank == 1: sys.exit(7)\ntime.sleep(600)"
    assert run_local(program(body), 3) == 7
    assert not any(is_alive(pid) for pid in pids(tmp_path))
    err = capfd.readouterr().err
    assert f"megaclass: rank 1 on {os.uname().nodename} (pid {pids(tmp_path)[1]}) ended with exit code 7" in err
    assert "the other 2 are being stopped" in err


def test_those_that_fail_because_of_another_are_not_taken_for_the_cause(program, capfd):
    """Rank 0 fails as soon as it sees rank 1 gone, as peers of a killed rank do."""
    body = """
say(f"pid{rank}", os.getpid())
if rank == 1:
    wait_for("ready0")
    os.kill(os.getpid(), signal.SIGKILL)
wait_for("pid1")
other = int((folder / "pid1").read_text())
say("ready0", "")
while "Z" not in Path(f"/proc/{other}/stat").read_text().split()[2]:
    pass
os._exit(1)
"""
    assert run_local(program(body), 2) == 128 + signal.SIGKILL
    assert "megaclass: rank 1 on" in capfd.readouterr().err


def test_a_rank_killed_by_a_signal_ends_the_others_within_seconds(program, tmp_path, capfd):
    body = _HELLO + "wait_for('pid0')\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)"
    begun = time.monotonic()
    assert run_local(program(body), 2) == 128 + signal.SIGKILL
    assert time.monotonic() - begun < WELL_BELOW_THE_SLEEP_S
    assert "ended with signal SIGKILL" in capfd.readouterr().err
    assert not any(is_alive(pid) for pid in pids(tmp_path))


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace_period(program, tmp_path):
    body = f"""
signal.signal(signal.SIGTERM, lambda *_: say("heard", ""))
{_HELLO}
if rank == 1:
    wait_for("pid0")
    sys.exit(3)
while True:
    time.sleep(600)
"""
    begun = time.monotonic()
    assert run_local(program(body), 2) == 3
    assert 2.0 < time.monotonic() - begun < WELL_BELOW_THE_SLEEP_S
    assert (tmp_path / "heard").exists()
    assert not any(is_alive(pid) for pid in pids(tmp_path))


def test_a_rank_may_tidy_up_when_another_failed(program, tmp_path):
    body = f"""
signal.signal(signal.SIGTERM, lambda *_: (say("tidy", ""), sys.exit(0)))
{_HELLO}
if rank == 1:
    wait_for("pid0")
    sys.exit(3)
time.sleep(600)
"""
    assert run_local(program(body), 2) == 3
    assert (tmp_path / "tidy").exists()


@pytest.mark.parametrize("moment", ["at work", "at start"])
def test_no_rank_outlives_a_parent_that_is_killed(parent, tmp_path, moment):
    process = parent("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + _HELLO + "time.sleep(600)", 3)
    wait_until(lambda: len(pids(tmp_path)) >= (3 if moment == "at work" else 1))
    process.kill()
    process.wait()
    time.sleep(0.3 if moment == "at start" else 0)  # one that was being started may still write its pid
    wait_until(lambda: not any(is_alive(pid) for pid in pids(tmp_path)))


@pytest.mark.parametrize("code", [75, 0])
def test_sigterm_to_the_parent_reaches_the_ranks_who_take_their_time_and_say_how_it_ended(parent, tmp_path, code):
    """Longer than the grace: a save is not cut short."""
    body = f"""
def save(*_):
    time.sleep({GRACE_S + 1} + 0.5 * rank)
    say(f"saved{{rank}}", "")
    os._exit({code})
signal.signal(signal.SIGTERM, save)
{_HELLO}
time.sleep(600)
"""
    process = parent(body, 2)
    wait_until(lambda: len(pids(tmp_path)) == 2)
    process.terminate()
    assert process.wait(60) == code
    assert {path.name for path in tmp_path.glob("saved*")} == {"saved0", "saved1"}
    assert not any(is_alive(pid) for pid in pids(tmp_path))


def test_a_closed_terminal_is_sigterm_to_the_ranks_and_closing_it_twice_is_no_second_one(parent, tmp_path):
    body = f"""
def save(*_):
    say(f"heard{{rank}}", "")
    time.sleep({GRACE_S + 1})
    say(f"saved{{rank}}", "")
    os._exit(75)
signal.signal(signal.SIGTERM, save)
{_HELLO}
time.sleep(600)
"""
    process = parent(body, 2)
    wait_until(lambda: len(pids(tmp_path)) == 2)
    process.send_signal(signal.SIGHUP)
    wait_until(lambda: (tmp_path / "heard0").exists() and (tmp_path / "heard1").exists())
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 75
    assert {path.name for path in tmp_path.glob("saved*")} == {"saved0", "saved1"}


def test_nohup_keeps_the_ranks_at_work(tmp_path, program):
    code = _HELLO + "wait_for('go')\nsys.exit(4 + rank if rank == 0 else 0)"
    call = (
        f"import sys; from megaclass_launch.launchers.local import run_local; sys.exit(run_local({program(code)!r}, 2))"
    )
    process = subprocess.Popen(["nohup", sys.executable, "-c", call], stderr=subprocess.DEVNULL)
    wait_until(lambda: len(pids(tmp_path)) == 2)
    for pid in (process.pid, *pids(tmp_path)):
        os.kill(pid, signal.SIGHUP)
    time.sleep(0.2)
    (tmp_path / "go").touch()
    assert process.wait(60) == 4


def test_a_second_sigterm_does_not_wait_for_the_ranks(parent, tmp_path):
    process = parent('signal.signal(signal.SIGTERM, lambda *_: say("heard", ""))\n' + _HELLO + FOR_EVER, 2)
    wait_until(lambda: len(pids(tmp_path)) == 2)
    process.terminate()
    wait_until(lambda: (tmp_path / "heard").exists())
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    assert not any(is_alive(pid) for pid in pids(tmp_path))


def test_ranks_that_do_not_know_sigterm_end_at_once(parent, tmp_path):
    process = parent(_HELLO + FOR_EVER, 2)
    wait_until(lambda: len(pids(tmp_path)) == 2)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    assert not any(is_alive(pid) for pid in pids(tmp_path))


def test_a_rank_that_fails_while_others_save_is_what_the_job_ended_with(program, tmp_path, capfd):
    body = _HELLO + "wait_for('pid0'); wait_for('pid1')\nif rank == 1: time.sleep(1)\nsys.exit(75 if rank == 0 else 9)"
    assert run_local(program(body), 2) == 9
    assert "rank 1" in capfd.readouterr().err


def test_ctrl_c_ends_everything(parent, tmp_path):
    process = parent(_HELLO + "time.sleep(600)", 2)
    wait_until(lambda: len(pids(tmp_path)) == 2)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 128 + signal.SIGINT
    assert not any(is_alive(pid) for pid in pids(tmp_path))


def test_a_command_that_does_not_exist_is_named():
    with pytest.raises(LaunchError, match="Cannot start rank 0 with '/no/such/program': No such file or directory"):
        run_local(["/no/such/program"], 2)


def test_the_handler_of_sigterm_is_put_back(program):
    before = signal.getsignal(signal.SIGTERM)
    run_local(program(""), 1)
    assert signal.getsignal(signal.SIGTERM) is before


def test_waiting_costs_no_cpu(program):
    """Also while one rank is done and another still works."""
    before = os.times()
    assert run_local(program("time.sleep(1.5 * rank)"), 2) == 0
    after = os.times()
    assert (after.user - before.user) + (after.system - before.system) < 0.5


@pytest.mark.parametrize("given", [None, "5"])
def test_cores_are_shared_out_as_threads_unless_the_user_says_how_many(program, tmp_path, given):
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    env |= {"OMP_NUM_THREADS": given} if given else {}
    assert run_local(program('say(f"out{rank}", os.environ["OMP_NUM_THREADS"])'), 2, env) == 0
    expected = given or str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert [(tmp_path / f"out{rank}").read_text() for rank in range(2)] == [expected] * 2
    assert default_threads(10_000) == 1


def test_more_processes_than_the_machine_can_bear_are_refused_before_one_starts(program, tmp_path):
    with pytest.raises(
        LaunchError, match=r"1000 processes were requested .* at most \d+ are allowed\. For several machines"
    ):
        run_local(program(_HELLO), 1000)
    assert [path.name for path in tmp_path.iterdir()] == ["rank.py"]


def test_a_stopped_rank_is_named_each_time_it_is_stopped(parent, tmp_path):
    process = parent(_HELLO + "wait_for('over')", 2)
    wait_until(lambda: len(pids(tmp_path)) == 2)
    stopped = int((tmp_path / "pid1").read_text())
    for _ in range(2):
        os.kill(stopped, signal.SIGSTOP)
        line = process.stderr.readline()
        assert f"(pid {stopped}) is stopped: it received SIGSTOP; SIGCONT lets it continue." in line
        assert line.startswith("WARNING megaclass: rank 1 on ")
        os.kill(stopped, signal.SIGCONT)
        time.sleep(0.3)  # for the news that it goes on
    (tmp_path / "over").touch()
    assert process.wait(30) == 0 and process.stderr.read() == ""


def test_workers_that_were_forgotten_leave_no_open_files():
    """An elastic job may start and end any number of workers on a host that stays."""
    with Supervisor("test-of-open-files", grace_s=1.0, adopts=False, captures=True) as supervisor:
        num_files = []
        for number in range(3):
            worker = supervisor.start(number, ["true"], dict(os.environ))
            while not supervisor.reap():
                time.sleep(0.01)
            assert worker.process.stdout is not None and worker.process.stderr is not None
            worker.process.stdout.close()
            worker.process.stderr.close()
            supervisor.forget(worker)
            num_files.append(len(list(Path("/proc/self/fd").iterdir())))
        with pytest.raises(LaunchError):
            supervisor.start(3, ["/no/such/program"], dict(os.environ))
        num_files.append(len(list(Path("/proc/self/fd").iterdir())))
    assert len(set(num_files)) == 1


def test_an_orphan_killer_that_cannot_be_replaced_now_is_replaced_later(monkeypatch):
    """A host that is short of memory or processes kills one of them, and refuses a new one."""
    before = set(children_of(os.getpid()))

    def started() -> list[int]:
        return [child for child in children_of(os.getpid()) if child not in before]

    with Supervisor("test-of-killers", grace_s=1.0, adopts=False) as supervisor:
        killers = started()
        assert len(killers) == 2
        os.kill(killers[0], signal.SIGKILL)
        num_files = len(list(Path("/proc/self/fd").iterdir()))

        def refused(*_, **__):
            raise BlockingIOError("Resource temporarily unavailable")

        with monkeypatch.context() as short:
            short.setattr(subprocess, "Popen", refused)
            while started() == killers:
                supervisor.keep_watch()
            supervisor.keep_watch()
        assert started() == killers[1:]
        assert len(list(Path("/proc/self/fd").iterdir())) == num_files
        supervisor.keep_watch()
        assert len(started()) == 2


def test_the_job_ends_although_a_rank_hangs_in_the_kernel(monkeypatch, caplog):
    """Nothing can end such a rank: here signals to it are lost."""
    monkeypatch.setattr(supervisor_module, "_UNKILLABLE_S", 0.2)
    monkeypatch.setattr(supervisor_module.orphan_killer, "send", lambda pid, number: None)
    monkeypatch.setattr(local, "FAULT_GRACE_S", 0.2)
    before = set(children_of(os.getpid()))
    try:
        assert run_local(["sh", "-c", '[ "$RANK" = 1 ] && exit 3; exec sleep 1000'], 2) == 3
        assert len([record for record in caplog.records if "hang in the kernel" in record.message]) == 1
    finally:
        for pid in set(children_of(os.getpid())) - before:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
