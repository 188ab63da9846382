"""The verdict on a hang: which ranks are named, and in which words, for stacks as faulthandler writes them."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from megaclass_launch.driver.agent_pipe import PipeState
from megaclass_launch.driver.hang_watch import HangWatch
from megaclass_launch.driver.job import JobState
from megaclass_launch.driver.outcome import Reason
from megaclass_launch.exit_codes import EXIT_HUNG
from megaclass_launch.hang.stacks import RankReport
from megaclass_launch.hang.verdict import find_verdict
from megaclass_launch.hosts import Host
from megaclass_launch.options import parse_options
from megaclass_launch.rank_status import LookClock, OwnStatus, StatusPage

LIB = "/usr/lib/python3.12"
GATHER = [
    "/venv/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py:4394:all_gather_into_tensor",
    "/venv/lib/python3.12/site-packages/torch/distributed/c10d_logger.py:83:wrapper",
    "/packages/launch/src/megaclass_launch/ranks/collectives.py:29:gather_blocks",
    "/packages/megaclass/src/megaclass/training/loop.py:91:train",
]
REDUCE = [GATHER[0].replace("all_gather_into_tensor", "all_reduce"), *GATHER[1:]]
BACKWARD = [
    "/venv/lib/python3.12/site-packages/torch/autograd/graph.py:824:_engine_run_backward",
    "/packages/megaclass/src/megaclass/training/step.py:91:_forward_backward",
]
WAITS_FOR_LOADER = [
    f"{LIB}/threading.py:355:wait",
    f"{LIB}/concurrent/futures/_base.py:451:result",
    "/packages/megaclass/src/megaclass/data/loader.py:142:batches",
    "/packages/megaclass/src/megaclass/training/loop.py:80:train",
]
READS = [
    "/packages/megaclass/src/megaclass/data/sources/files.py:77:read",
    "/packages/megaclass/src/megaclass/data/loader.py:199:_read",
]
IDLE = [f"{LIB}/concurrent/futures/thread.py:81:_worker", f"{LIB}/threading.py:982:run"]
OWN = ["/home/me/job/train.py:12:main", "/home/me/job/train.py:30:<module>"]


def dumped(*threads: list[str]) -> str:
    """As faulthandler writes it; the main thread is the last."""
    text = ""
    for number, thread in enumerate(threads, start=1):
        text += f"Thread 0x{number:016x} [x] (most recent call first):\n"
        for frame in thread:
            file, line, function = frame.rsplit(":", 2)
            text += f'  File "{file}", line {line} in {function}\n'
        text += "\n"
    return text


def report(rank: int, *threads: list[str], state: str = "answered", step: int = 1233, **more) -> RankReport:
    host = f"gpu-{1 + rank // 2}"
    known = {"rank": rank, "host": host, "pid": 100 + rank, "package": "/packages/megaclass/src/megaclass"}
    return RankReport(state=state, step=step, stacks=dumped(*threads), **(known | more))


def test_the_rank_that_waits_for_a_file_is_named_with_the_file_and_the_others_with_their_collective():
    odd = report(3, IDLE, READS, WAITS_FOR_LOADER, file_wait="read of /data/000123.jpg")
    verdict = find_verdict([report(rank, IDLE, GATHER) for rank in range(16) if rank != 3] + [odd])
    assert verdict.text == (
        "rank 3 (gpu-2): in data/sources/files.py:77 (read), waiting in read of /data/000123.jpg; "
        "the other 15 ranks wait for it in all_gather of step 1,234"
    )
    assert verdict.suspects == (3,)
    assert verdict.groups[0][0] == (3,)
    assert verdict.groups[1][0] == tuple(rank for rank in range(16) if rank != 3)


SAYS = "/packages/launch/src/megaclass_launch/rank_status.py:213"
WAITS_FOR_LOADER_PROCESS = [
    "/packages/megaclass/src/megaclass/data/loading/pool.py:188:_ready",
    "/packages/megaclass/src/megaclass/data/loading/pool.py:172:_handle_messages",
    f"{SAYS}:wait_for_helper",
    "/packages/megaclass/src/megaclass/data/loading/pool.py:163:wait_for",
    "/packages/megaclass/src/megaclass/training/loop.py:80:train",
]


@pytest.mark.parametrize(
    ("waits", "words"),
    [
        ("read of /data/000123.jpg in process 8", ", waiting in read of /data/000123.jpg in process 8"),
        ("process 8, stopped by SIGSTOP", ", waiting for process 8, stopped by SIGSTOP"),
        ("", ""),
    ],
)
def test_a_rank_that_waits_for_its_loader_processes_is_named_with_what_they_wait_for(waits, words):
    odd = report(1, IDLE, WAITS_FOR_LOADER_PROCESS, file_wait=waits)
    others = [report(rank, IDLE, GATHER) for rank in (0, 2)]
    verdict = find_verdict([*others, odd])
    where = f"rank 1 (gpu-1): in data/loading/pool.py:188 (_ready){words}"
    assert verdict.text == f"{where}; the other 2 ranks wait for it in all_gather of step 1,234"
    # Where the data of all ranks hangs, none of them is odd, whatever the numbers of their processes are.
    assert find_verdict([odd, replace(odd, rank=0, file_wait=waits.replace("8", "9"))]).suspects == ()


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"state": "stopped"}, "rank 1 (gpu-1): stopped in step 1,234 by SIGSTOP (pid 101)"),
        ({"state": "kernel", "waits_for": "openat"}, "rank 1 (gpu-1): in the kernel, in openat and cannot be interrupted"),
        ({"state": "lost"}, "rank 1 (gpu-1): its host is unreachable"),
        ({"state": "silent"}, "rank 1 (gpu-1): gives no Python stacks"),
    ],
)  # fmt: skip
def test_a_rank_that_cannot_answer_is_the_suspect_wherever_the_others_are(odd, words):
    reports = [report(0, GATHER), report(1, **odd), report(2, BACKWARD), report(3, OWN)]
    verdict = find_verdict(reports)
    assert verdict.suspects == (1,)
    assert verdict.text.startswith(words)
    assert "the other 3 ranks wait for it in" in verdict.text


def test_a_rank_that_has_done_fewer_steps_comes_before_the_places():
    """On a GPU the other ranks are steps ahead, and wait for their devices in another place than the slow one."""
    gpu = [
        "/packages/megaclass/src/megaclass/training/metrics.py:66:<lambda>",
        f"{SAYS}:wait_for_gpu",
        "/packages/megaclass/src/megaclass/training/metrics.py:66:read",
        "/packages/megaclass/src/megaclass/training/loop.py:101:train",
    ]
    verdict = find_verdict([report(0, gpu, step=20), report(1, GATHER, step=17), report(2, gpu, step=20)])
    assert verdict.suspects == (1,)
    assert verdict.text.endswith("the other 2 ranks wait for it in queued work of its GPU of step 21")


def test_a_rank_in_another_collective_is_odd_and_equal_ranks_are_not():
    odd = find_verdict([report(0, GATHER), report(1, GATHER), report(2, REDUCE)])
    assert odd.suspects == (2,)
    assert "rank 2 (gpu-2): waits in all_reduce of step 1,234" in odd.text
    same = find_verdict([report(0, GATHER), report(1, GATHER)])
    assert same.suspects == ()
    assert same.text == "no rank differs from the others: all 2 are in all_gather of step 1,234"


def test_ranks_of_any_program_are_told_apart_by_their_place():
    reports = [report(rank, OWN, step=-1) for rank in range(3)]
    assert find_verdict(reports).suspects == ()
    verdict = find_verdict([*reports, report(3, READS, OWN, step=-1, waits_for="read of /nfs/a")])
    assert verdict.suspects == ()
    verdict = find_verdict([*reports, report(3, OWN, READS, step=-1, waits_for="read of /nfs/a")])
    assert verdict.suspects == (3,)
    assert verdict.text.startswith(
        "rank 3 (gpu-2): in data/sources/files.py:77 (read), waiting in read of /nfs/a; the other 3 ranks wait for it in"
    )


@pytest.mark.parametrize("package", ["/home/me/megaclass/src/megaclass", "/home/me/megaclass", "/venv/lib/megaclass"])
def test_files_of_a_user_are_not_shortened_at_a_folder_that_is_called_megaclass(package):
    """`git clone` makes such a folder. Only files of the package itself are shown from its folder on."""
    own = report(1, [f"{package}/data/loader.py:3:read"], package=package)
    assert find_verdict([own]).text.startswith("rank 1 (gpu-1): in data/loader.py:3 (read)")
    for file, shown in (
        ("/home/you/megaclass/tests/launch/net.py", "launch/net.py"),
        ("/home/me/megaclass-2/data/own.py", "data/own.py"),
    ):
        users = report(1, [f"{file}:3:read"], package=package)
        assert find_verdict([users]).text.startswith(f"rank 1 (gpu-1): in {shown}:3 (read)")


def test_a_rank_shows_its_reader_how_late_it_is_and_long_work_is_never_late():
    page = StatusPage()
    assert page.read().pid == 0
    own = OwnStatus(page.fileno())
    own.progress(step=7, phase="training", allowed_s=5.0)
    status = page.read()
    assert (status.step, status.phase, status.num_done) == (7, "training", 1)
    assert status.late_s(status.progress_at + 4.9) < 0 < status.late_s(status.progress_at + 5.1)
    with own.long_work("evaluation"):
        during = page.read()
        assert (during.phase, during.late_s(during.progress_at + 1e6)) == ("evaluation", 0.0)
    after = page.read()
    assert (after.phase, after.allowed_s, after.step) == ("training", 5.0, 7)
    page.close()


def test_after_a_pause_of_the_watcher_lateness_counts_anew():
    own = OwnStatus(None)
    own.progress(step=7, allowed_s=30.0)
    status = own.read()
    begun = status.progress_at
    clock = LookClock(begun)

    def late_after(seconds: float) -> bool:
        now = begun + seconds
        return status.late_s(now, since=clock.since(now)) > 0

    assert not any(late_after(second) for second in range(20))
    # 100 s pass without a look: the rank has 30 s from the first look on.
    assert not any(late_after(second) for second in range(120, 150))
    assert late_after(151)
    # A look that an overloaded host delays is no pause.
    assert late_after(155)
    clock.restart(begun + 170)
    assert not late_after(171) and not any(late_after(second) for second in range(172, 200)) and late_after(201)


@pytest.mark.parametrize(
    ("others", "may_end"),
    [
        ([report(1, GATHER)], True),
        ([report(1, OWN)], False),
        ([report(1, OWN, waits_for="read of /data/1.jpg")], False),
        ([report(1, state="stopped"), report(2, OWN)], True),
        ([report(1, state="ended"), report(2, GATHER)], True),
        ([report(1, state="lost"), report(2, OWN, waits_for="read of /data/1.jpg")], False),
        ([], False),
    ],
)
def test_a_job_may_be_ended_only_if_a_rank_waits_for_another(others, may_end):
    assert find_verdict([report(0, READS, waits_for="read of /data/0.jpg"), *others]).may_end is may_end


def test_a_single_process_that_waits_in_a_collective_waits_for_nobody():
    assert not find_verdict([report(0, GATHER)]).may_end


@pytest.mark.parametrize("then", ["waits", "is slow", "has gone on"])
def test_the_driver_ends_a_late_job_only_if_a_rank_waits_for_another_and_still_is_late(then):
    said = []
    messages = SimpleNamespace(say=said.append, detail=lambda text: None)
    io = SimpleNamespace(messages=messages, output=SimpleNamespace(folder=None, write_stacks=lambda *_: None))
    job = JobState(parse_options(["-np", "2", "true"]), io, [Host(name="h1", slots=2)])
    job.ranks.note_pids({0: 10, 1: 11})
    agent = SimpleNamespace(name="h1", is_over=False, state=PipeState.RUNNING)
    job.opened.append(agent)
    watch = HangWatch(job)
    for _ in range(2):
        watch.note(agent, {"say": "status", "idle_s": 60.0, "silent_s": 60.0, "missing": "no step has finished"}, b"")
        watch.check(time.monotonic())
        if not job.is_ending:
            [asked] = [order.message for order in job.take_orders()]
            assert asked["may_abort"] is False, "a rank that cannot be asked is not ended by the question"
        for found in (
            report(0, READS, waits_for="read of /data/0.jpg"),
            report(1, OWN if then == "is slow" else GATHER),
        ):
            fields = {name: getattr(found, name) for name in ("rank", "pid", "state", "waits_for", "package")}
            fields |= {"is_late": True, "is_still_late": then != "has gone on" or found.rank == 0}
            watch.note(agent, {"say": "stacks", **fields}, found.stacks.encode())
    if then == "waits":
        assert job.decision.reason is Reason.FAULT and job.decision.outcome.exit_code == EXIT_HUNG
        assert [order.message["do"] for order in job.take_orders()] == ["end"]
    else:
        assert job.decision.reason is Reason.NONE and not job.take_orders()
    if then == "has gone on":
        assert not said
    if then == "is slow":
        [told] = said
        assert "no step has finished for 60 s; the job continues, because no rank is seen to wait" in told
