"""`megaclass run` on this machine: the same agent, the same ends, without ssh."""

import contextlib
import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SLEEP = "print('up', flush=True)\ntime.sleep(600)"
# Until nothing is left: far below the 600 s for which ranks sleep, far above what it takes on an idle machine.
SOON_S = 20


# ---- the start ----


def test_the_driver_and_the_agent_import_no_torch(run):
    """So that they start within a second: benchmarks/launch.md has the figure."""
    done = run("-np", "2", "true", env={"PYTHONPROFILEIMPORTTIME": "1"})
    assert done.code == 0
    modules = re.findall(r"import time:.*\| +(\S+)$", done.err, re.MULTILINE)
    assert "megaclass_launch.driver.driver" in modules
    assert not [name for name in modules if name.split(".")[0] in ("torch", "numpy")]
    agent = subprocess.run(
        [sys.executable, "-c", "import sys, megaclass_launch.agent.agent; sys.exit('torch' in sys.modules)"], timeout=60
    )
    assert agent.returncode == 0


def test_ranks_find_each_other(run, tmp_path):
    program = tmp_path / "job.py"
    program.write_text(
        "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "total = torch.ones(1); dist.all_reduce(total); print(total.item()); dist.destroy_process_group()\n"
    )
    done = run("-np", "2", "python", str(program))
    assert sorted(done.out.splitlines()) == ["[0]<stdout>:2.0", "[1]<stdout>:2.0"], done.story()


def test_an_environment_longer_than_a_pipe_arrives(run, script, tmp_path):
    file = tmp_path / "env"
    file.write_text("".join(f"BIG{i}={'x' * 100_000}\n" for i in range(6)))
    done = run("-np", "2", "--env-file", str(file), *script("print(sum(len(os.environ[f'BIG{i}']) for i in range(6)))"))
    assert done.out.count("]<stdout>:600000\n") == 2, done.story()


def test_the_given_variables_win_the_place_of_a_rank_wins_over_them_and_cuda_visible_devices_is_left_as_it_is(
    run, script
):
    names = ["OMP_NUM_THREADS", "RANK", "A", "CUDA_VISIBLE_DEVICES"]
    given = ("-x", "OMP_NUM_THREADS=7", "-x", "RANK=9", "-x", "A")
    env = {"A": "x", "CUDA_VISIBLE_DEVICES": "2,3"}
    done = run("-np", "1", *given, *script(f"print(*[os.environ.get(name) for name in {names}])"), env=env)
    assert done.out == "[0]<stdout>:7 0 x 2,3\n"


def test_a_dry_run_prints_the_plan_and_starts_nothing(run, script, tmp_path):
    done = run("-np", "3", "-H", "localhost:1,h2:2", "--dry-run", *script(f"open({str(tmp_path / 'ran')!r}, 'w')"))
    assert done.code == 0 and done.out.startswith("3 ranks on 2 hosts\n") and "h2: ranks 1-2\n" in done.out
    assert not (tmp_path / "ran").exists()


def test_options_without_a_meaning_say_so_in_one_line(run):
    done = run("-np", "1", "--mpi", "true")
    assert (done.code, done.err) == (0, "megaclass run: --mpi has no effect: no MPI is needed.\n")


def test_a_batch_systems_hosts_are_detected_and_named(run, script, tmp_path):
    nodes = tmp_path / "nodes"
    nodes.write_text("localhost\nlocalhost\n")
    done = run(*script("print(rank)"), env={"PBS_NODEFILE": str(nodes), "PBS_JOBID": "12"})
    assert f"megaclass run: detected PBS job 12 (PBS_NODEFILE={nodes}): localhost:2\n" in done.err
    assert sorted(done.out.splitlines()) == ["[0]<stdout>:0", "[1]<stdout>:1"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-np", "2", "no-such-command"], "localhost: There is no command 'no-such-command' on the PATH "),
        (["-np", "2", "./no-such-script"], "localhost: There is no command './no-such-script' in "),
        (["true"], "How many processes?"),
        (["-np", "3", "-H", "localhost:2", "true"], "-np 3 needs more slots than there are: 2"),
        (["-np", "2", "-H", "-oProxyCommand=touch owned:2", "true"], "-oProxyCommand=touch owned:2"),
        (["-np", "2", "--min-np", "3", "true"], "--min-np 3 is more than -np 2"),
        (["-np", "2", "--python", "/no/python", "true"], "Cannot start '/no/python' for localhost: No such file"),
    ],
)
def test_what_cannot_start_is_refused_without_a_traceback(run, arguments, says):
    done = run(*arguments)
    assert done.code == 2 and says in done.err and "Traceback" not in done.err, done.story()


def test_a_file_that_cannot_be_executed_is_named(run, tmp_path):
    file = tmp_path / "data.bin"
    file.write_bytes(b"\0\1\2")
    done = run("-np", "2", str(file))
    assert (
        done.code == 2 and f"{file} is not executable: type chmod +x" in done.err and "nothing was started" in done.err
    )


def test_closed_standard_streams_do_not_matter(run, script, tmp_path):
    command = shlex.join(run.command("-np", "2", *script(f"open({str(tmp_path)!r} + f'/{{rank}}', 'w')")))
    assert subprocess.run(["bash", "-c", f"{command} <&- >&- 2>&-"], env=run.env, timeout=60).returncode == 0
    assert sorted(path.name for path in tmp_path.glob("[01]")) == ["0", "1"]


def test_with_horovods_names_programs_may_call_horovodrun(run):
    inner = "horovodrun -np 2 sh -c 'echo rank $HOROVOD_RANK of $HOROVOD_SIZE'"
    done = run("--horovod", "-np", "1", "sh", "-c", inner)
    assert sorted(done.out.splitlines()) == [
        "[0]<stdout>:[0]<stdout>:rank 0 of 2",
        "[0]<stdout>:[1]<stdout>:rank 1 of 2",
    ], done.story()


def test_two_names_of_this_machine_are_taken_for_two_hosts(run, script):
    names = ("RANK", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME")
    body = f"print(*[os.environ['HOROVOD_' + name] for name in {names}], os.environ['MASTER_ADDR'])"
    done = run("-np", "4", "-H", "localhost:2,127.0.0.1:2", *script(body))
    assert done.code == 0, done.story()
    assert sorted(line.partition(":")[2] for line in done.out.splitlines()) == [
        "0 0 2 0 2 localhost 127.0.0.1",
        "1 1 2 0 2 localhost 127.0.0.1",
        "2 0 2 1 2 127.0.0.1 127.0.0.1",
        "3 1 2 1 2 127.0.0.1 127.0.0.1",
    ]
    assert "WARNING megaclass run: localhost and 127.0.0.1 are this machine: taken for 2 hosts" in done.err


# ---- the end ----


def test_ranks_under_one_name_of_this_machine_outlive_those_under_another(run, script):
    done = run("-np", "2", "-H", "localhost:1,127.0.0.1:1", *script("if rank: time.sleep(3)\nprint('whole', rank)"))
    assert done.code == 0 and "[1]<stdout>:whole 1\n" in done.out, done.story()


def test_a_rank_that_fails_under_one_name_of_this_machine_ends_those_under_another(run, script):
    done = run("-np", "2", "-H", "localhost:1,127.0.0.1:1", *script("if rank: sys.exit(5)\ntime.sleep(600)"))
    assert done.code == 5, done.story()


@pytest.mark.parametrize("code", [3, 255])
def test_the_exit_code_is_that_of_the_first_rank_that_failed(run, script, code):
    done = run("-np", "3", *script(f"if rank == 1: sys.exit({code})\ntime.sleep(600)"))
    assert done.code == code
    assert re.search(rf"megaclass: rank 1 on localhost \(pid \d+\) ended with exit code {code}; the other 2", done.err)


def test_the_last_thing_said_is_who_failed_first_and_where_its_output_is(run, script, tmp_path):
    done = run("-np", "2", "--output-filename", str(tmp_path), *script("if rank: 1 / 0\ntime.sleep(600)"))
    assert done.code == 1, done.story()
    *_, before, last = done.err.strip().splitlines()
    assert before.strip() == "ZeroDivisionError: division by zero" and last == f"All it printed: {tmp_path}/rank.1"


def test_a_horovod_script_without_a_package_for_it_is_told_which_to_install(run, script):
    # The script runs without site-packages.
    done = run("-np", "1", *script("import horovod.torch"))
    assert done.code == 1 and "is installed there: pip install megaclass-horovod" in done.err, done.story()


def test_a_module_of_horovod_that_is_not_there_is_no_reason_to_advise_the_option_for_it(run, tmp_path):
    file = tmp_path / "script.py"
    file.write_text("import horovod.runner.elastic.driver")
    done = run("--horovod", "-np", "1", sys.executable, str(file))
    assert done.code == 1 and "with --horovod" not in done.err, done.story()
    assert "Megaclass has no horovod.runner.elastic: docs/horovod.md lists the modules" in done.err, done.story()


def test_horovodrun_tells_the_version_of_the_horovod_it_stands_for(run):
    assert run("--horovod", "-np", "1", "horovodrun", "--version").out == "[0]<stdout>:0.28.1\n"
    assert run("--version").out.startswith("megaclass ")


def test_those_that_fail_because_of_another_are_not_taken_for_the_cause(run, script, tmp_path):
    body = f"""
file = {str(tmp_path / "pid")!r}
if rank == 1:
    open(file, "w").write(str(os.getpid()))
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
while not os.path.exists(file) or not open(file).read():
    time.sleep(0.01)
while " Z " not in open(f"/proc/{{open(file).read()}}/stat").read():
    pass
os._exit(1)
"""
    done = run("-np", "2", *script(body))
    assert done.code == 137 and "rank 1 on localhost" in done.err


def test_a_rank_may_tidy_up_when_another_failed_and_is_killed_when_it_takes_too_long(run, script):
    body = """
def leave(*_):
    print("tidied", flush=True)
    time.sleep(600 if rank == 2 else 0)
    os._exit(0)
signal.signal(signal.SIGTERM, leave)
meet()
if rank == 0:
    sys.exit(5)
time.sleep(600)
"""
    begun = time.monotonic()
    done = run("-np", "3", "--grace", "1.5", *script(body))
    assert done.code == 5 and done.out.count("tidied") == 2
    assert time.monotonic() - begun > 1.5, "not before the grace is over, but before the 60 s for which `run` waits"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_driver_is_passed_on(run, script, number):
    started = run.start("-np", "2", *script(SLEEP))
    started.says("up", times=2)
    started.send(number)
    assert started.wait() == 128 + number
    run.seconds_until_nothing_is_left(SOON_S)


def test_ranks_have_time_to_save_after_sigterm_to_the_driver_and_a_second_one_shortens_it(run, script):
    body = """
def save(*_):
    print("saving", flush=True)
    time.sleep(6 if rank == 0 else 600)
    print("saved", flush=True)
    os._exit(75)
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
time.sleep(600)
"""
    started = run.start("-np", "2", *script(body))
    started.says("up", times=2)
    begun = time.monotonic()
    started.send(signal.SIGTERM)
    started.says("[0]<stdout>:saved")
    assert "SIGTERM: ending the ranks. SIGKILL follows in 30 s (--grace)." in started.err
    started.send(signal.SIGTERM)
    assert started.wait() == 143
    assert "SIGKILL follows in 3 s (--grace)." in started.err and 8.5 < time.monotonic() - begun < 20
    run.seconds_until_nothing_is_left(SOON_S)


def test_a_notice_of_preemption_is_passed_on_and_ends_nothing_by_itself(run, script):
    body = """
notices = []
signal.signal(signal.SIGUSR1, lambda *_: notices.append(print("noticed", flush=True)))
print("up", flush=True)
while not notices:
    time.sleep(0.01)
time.sleep(0.5)
print("done", flush=True)
"""
    started = run.start("-np", "2", *script(body))
    started.says("up", times=2)
    started.send(signal.SIGUSR1)
    assert started.wait() == 0 and started.out.count("noticed") == 2 and started.out.count("done") == 2


def test_everything_is_gone_soon_after_the_driver_is_killed(run, script):
    started = run.start("-np", "2", "bash", "-c", "echo up; (setsid sleep 600 &) ; sleep 601; echo never")
    started.says("up", times=2)
    started.send(signal.SIGKILL)
    run.seconds_until_nothing_is_left(SOON_S)


def test_everything_is_gone_soon_after_all_that_names_megaclass_is_killed(run, script):
    started = run.start("-np", "2", "bash", "-c", "echo up; (setsid sleep 600 &) ; sleep 601; echo never")
    started.says("up", times=2)
    # All are listed before the first is killed, and one may end because another was killed, as with `pkill -9 -f`.
    for pid in [pid for pid in run.processes() if b"megaclass" in command_line(pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    run.seconds_until_nothing_is_left(SOON_S)


def test_killed_orphan_killers_are_replaced(run):
    started = run.start("-np", "1", "--heartbeat", "5", "bash", "-c", "echo up; sleep 600; echo never")
    started.says("up")

    first = orphan_killers(run)
    assert len(first) == 2
    for pid in first:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + SOON_S
    while len(now := orphan_killers(run)) < 2 or set(now) & set(first):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    started.send(signal.SIGTERM)
    assert started.wait() == 143


def orphan_killers(run):
    return [pid for pid in run.processes() if b"-I\0-S\0-\0" in command_line(pid)]


def command_line(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("also", ["one orphan killer", "both orphan_killers", "one orphan killer and the driver"])
def test_an_agent_killed_together_with_its_watchers_leaves_nothing_behind(run, also):
    """Behind a shell, in sessions of their own, where the kernel does not end them with the agent."""
    started = run.start("-np", "2", "bash", "-c", "echo up; (setsid sleep 600 &) ; sleep 601; echo never")
    started.says("up", times=2)
    [agent] = [pid for pid in run.processes() if b"megaclass_launch.agent.agent" in command_line(pid)]
    killed = [agent, *orphan_killers(run)[: 2 if "both" in also else 1], *([started.pid] if "driver" in also else [])]
    for pid in killed:
        os.kill(pid, signal.SIGSTOP)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    run.seconds_until_nothing_is_left(SOON_S)
    assert started.wait() == (-9 if "driver" in also else 255)


@pytest.mark.parametrize(
    "behind", ["sleep 600; echo never", 'python3 -c \'import subprocess as s; s.run(["sleep", "600"])\'; :']
)
def test_all_watchers_killed_at_the_same_instant_leave_no_rank_behind_a_shell(run, behind):
    """Driver, agent and both orphan killers: the kernel kills the ranks' process groups."""
    started = run.start("-np", "2", "bash", "-c", f"echo up; {behind}")
    started.says("up", times=2)
    [agent] = [pid for pid in run.processes() if b"megaclass_launch.agent.agent" in command_line(pid)]
    killed = [started.pid, *orphan_killers(run), agent]
    assert len(killed) == 4
    for pid in killed:
        os.kill(pid, signal.SIGSTOP)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    run.seconds_until_nothing_is_left(SOON_S)


@pytest.mark.parametrize(
    "daemon",
    ["{} &", "(setsid {} &);", "(env -i setsid {} &);"],
    ids=["in the background", "in a session of its own", "without the run's id"],
)
def test_what_the_ranks_leave_behind_is_ended_with_them_and_named(run, daemon):
    sleeper = f"sleep 600.{int.from_bytes(os.urandom(4))}"
    done = run("-np", "2", "bash", "-c", f"{daemon.format(sleeper)} sleep 0.3; exit 0")
    assert done.code == 0
    assert "megaclass: localhost: ending what its ranks left behind: sleep, sleep" in done.err
    assert subprocess.run(["pgrep", "-f", sleeper], capture_output=True).returncode == 1, "a sleeper is left"


def test_ctrl_c_in_a_terminal_reaches_the_ranks_once_and_through_the_driver_only(run, script):
    body = """
def heard(*_):
    print("heard", flush=True)
    time.sleep(0.5)
    sys.exit(0)
signal.signal(signal.SIGINT, heard)
print("up", flush=True)
while True:
    time.sleep(600)
"""
    pid, terminal = pty.fork()
    if pid == 0:
        command = run.command("-np", "2", *script(body))
        os.execvpe(command[0], command, {**run.env, "TERM": "xterm"})
    text = b""

    def read_until(done):
        nonlocal text
        deadline = time.monotonic() + 30
        while not done():
            assert time.monotonic() < deadline, text
            if select.select([terminal], [], [], 0.1)[0]:
                try:
                    text += os.read(terminal, 65536)
                except OSError:
                    return

    read_until(lambda: text.count(b"up") == 2)
    os.write(terminal, b"\x03")
    read_until(lambda: False)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert text.count(b"heard") == 2 and b"Ctrl-C: SIGINT to 2 rank(s)" in text
    assert b"\x1b[36m[0]<stdout>:\x1b[0mup" in text, "colour when a terminal"


def test_the_ranks_of_a_nested_run_are_those_of_the_inner_one(run, script):
    inner = run.command("-np", "2", *script("print(rank, os.environ['WORLD_SIZE'])"))
    done = run("-np", "1", *inner)
    assert sorted(done.out.splitlines()) == ["[0]<stdout>:[0]<stdout>:0 2", "[0]<stdout>:[1]<stdout>:1 2"]


# ---- restarts ----


def test_a_restart_starts_all_ranks_again_with_a_new_port_and_a_new_run_id(run, script):
    body = """
import json
names = ("MEGACLASS_RESTART", "MASTER_PORT", "MEGACLASS_RUN_ID")
print(json.dumps([os.environ[name] for name in names]), flush=True)
meet()
if rank == 1 and os.environ["MEGACLASS_RESTART"] == "0":
    sys.exit(3)
"""
    done = run("-np", "2", "--restarts", "5", *script(body))
    assert done.code == 0, done.story()
    starts = {tuple(json.loads(line.partition(":")[2])) for line in done.out.splitlines()}
    assert len(done.out.splitlines()) == 4 and len(starts) == 2
    assert {start[0] for start in starts} == {"0", "1"} and len({start[2] for start in starts}) == 2
    assert "megaclass: restart 1 of 5: 2 ranks on localhost:2." in done.err and "restart 2" not in done.err


def test_ranks_that_stop_as_asked_and_can_be_resumed_are_not_restarted(run, script, tmp_path):
    body = f"""
def save(*_):
    if rank: time.sleep(5)  # longer than the grace of those whom another one's failure ends
    open({str(tmp_path)!r} + f"/saved{{rank}}", "w").close()
    os._exit(75)
signal.signal(signal.SIGUSR1, save)
print("up", flush=True)
time.sleep(600)
"""
    started = run.start("-np", "2", "--restarts", "2", *script(body))
    started.says("up", times=2)
    started.send(signal.SIGUSR1)
    assert started.wait() == 75
    assert sorted(path.name for path in tmp_path.glob("saved*")) == ["saved0", "saved1"]
    assert "can be resumed" in started.err and "restart" not in started.err and "failed" not in started.err


def test_a_rank_that_fails_after_another_stopped_as_asked_is_the_one_that_counts(run, script):
    done = run("-np", "2", *script("if rank == 0: sys.exit(75)\ntime.sleep(1)\nsys.exit(9)"))
    assert done.code == 9, done.story()


def test_an_interrupt_between_two_starts_ends_the_run(run, script):
    started = run.start("-np", "1", "--restarts", "9", "--workdir", "/no/such/folder", *script("sys.exit(6)"))
    # The fourth start waits for 3 s, the fifth for 7. No rank has run, so all nine may be used.
    started.says("starts ended within 60 s: the next one in 7 s")
    started.send(signal.SIGINT)
    assert started.wait() == 130 and "restart 5" not in started.err


@pytest.mark.parametrize(
    ("steps", "num_restarts", "reason"),
    [
        ([], 2, "the last 3 starts made no progress (no checkpoint, and none ran for 60 s)"),
        ([5, 5, 5, 5, 9], 3, "the last 3 starts made no progress (no checkpoint after step 5)"),
        ([5, None, 6, None, None, None, 8], 5, "the last 3 starts made no progress (no checkpoint after step 6)"),
    ],
    ids=["a program that reports nothing", "the same step again and again", "some starts advance"],
)
def test_restarts_stop_after_three_starts_without_progress(run, tmp_path, steps, num_restarts, reason):
    program = tmp_path / "job.py"
    program.write_text(
        "import os, sys\nfrom megaclass_launch.rank_status import own_status\n"
        f"step = dict(enumerate({steps})).get(int(os.environ['MEGACLASS_RESTART']))\n"
        "if step is not None: own_status().checkpoint(step)\n"
        "sys.exit(6)\n"
    )
    done = run("-np", "1", "--restarts", "20", "sh", "-c", f"{sys.executable} {program}", timeout_s=250)
    assert done.code == 6 and done.err.count("megaclass: restart ") == num_restarts, done.story()
    assert f"megaclass: no restart: {reason}" in done.err.splitlines()[-1]


def test_restarts_end_with_the_last_failure_and_an_interrupt_is_none(run, script):
    done = run("-np", "2", "--restarts", "1", *script("print('up', flush=True)\ntime.sleep(0.2)\nsys.exit(6)"))
    assert done.code == 6 and done.err.count("megaclass: restart") == 1
    started = run.start("-np", "2", "--restarts", "2", *script(SLEEP))
    started.says("up", times=2)
    started.send(signal.SIGINT)
    assert started.wait() == 130 and "megaclass: restart" not in started.err
