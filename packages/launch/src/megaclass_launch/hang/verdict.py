"""Groups the stacks of all ranks and names the odd ones: the rank for which all others wait.

The rules, in this order; the first that tells some ranks from the others decides:

    1  a rank that cannot answer (its host is lost, it is stopped or in the kernel, it does not react) is the suspect
    2  ranks that have finished fewer steps than others
    3  ranks that are in no collective while others wait in one
    4  ranks in another collective, or another place, than most: of two equally large groups both are named

Otherwise no rank is odd, and the verdict says where all of them wait. Standard library only.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from megaclass_launch.hang.stacks import RankReport
from megaclass_launch.rank_status import wait_for_gpu, wait_for_helper, wait_for_ranks

# ---- stacks in words ----
#
# Reads the stacks that Python's faulthandler writes, and says in words where a thread is.


_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+).*\(most recent call first\):")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
# Files of other packages and of Python's library: the place that interests the reader is the one that called them.
_LIBRARY = re.compile(r"/(site-packages|dist-packages)/|/lib/python3\.\d+/")


@dataclass(frozen=True, slots=True)
class Frame:
    file: str
    line: str
    function: str
    own_path: str = ""
    """Path inside the folder of the rank's package, such as "data/loader.py"; empty for all other files."""

    @property
    def is_library(self) -> bool:
        return not self.own_path and bool(_LIBRARY.search(self.file) or self.file.startswith("<frozen"))

    def shown(self) -> str:
        """Returns a short place: inside the rank's package "data/loader.py:142", elsewhere the last two parts of the path."""
        path = self.own_path or "/".join(PurePosixPath(self.file).parts[-2:]).lstrip("/")
        return f"{path}:{self.line}"


Thread = list[Frame]
"""Frames of one thread, the innermost first."""


def threads_of(stacks: str, package: str) -> dict[int, Thread]:
    """Returns the frames of each thread by its identifier, in the order of the text: the main thread is the last.

    package: the folder of the package that the process runs. Folders of a user may have the same name.
    """
    threads: dict[int, Thread] = {}
    current: Thread = []
    for line in stacks.splitlines():
        if match := _THREAD.match(line):
            current = threads.setdefault(int(match[1], 16), [])
        elif match := _FRAME.match(line):
            file = match[1]
            own_path = file.removeprefix(f"{package}/") if package and file.startswith(f"{package}/") else ""
            current.append(Frame(file, match[2], match[3], own_path))
    return threads


def collective_of(thread: Thread) -> str:
    """Returns the collective in which a thread waits, such as "all_gather"; empty if it is in none."""
    inner = thread[:8]
    for index, frame in enumerate(inner):
        if frame.file.endswith("torch/distributed/distributed_c10d.py"):
            # Of nested ones the outermost is what the program called: barrier, all_gather_object.
            outer = [f.function for f in inner[index:] if f.file.endswith("torch/distributed/distributed_c10d.py")]
            return _plain(outer[-1])
        if not frame.is_library:
            break
    return "backward, which averages the gradients" if inner and inner[0].function == "_engine_run_backward" else ""


def says_that_it_waits(thread: Thread, what: Callable[..., object]) -> bool:
    """Tells whether the thread is in `what`, one of the functions of rank_status that say what a thread waits for."""
    return any(frame.function == what.__name__ and frame.file.endswith("/rank_status.py") for frame in thread)


def waits_for_gpu(thread: Thread) -> bool:
    """Tells whether the thread waits for its GPU: for queued work, which may contain a collective."""
    if thread and thread[0].function == "synchronize" and "/torch/cuda/" in thread[0].file:
        return True
    return says_that_it_waits(thread, wait_for_gpu)


def place_of(thread: Thread) -> Frame | None:
    """Returns the innermost frame that is not a library's, or the innermost one if all are."""
    return next((frame for frame in thread if not frame.is_library), thread[0] if thread else None)


def waits_for_other_thread(thread: Thread) -> bool:
    """Tells whether a thread waits for another one of its process, as the loop waits for the threads that read images."""
    names = ("threading.py", "concurrent/futures/_base.py", "queue.py", "concurrent/futures/thread.py")
    return bool(thread) and thread[0].file.endswith(names)


def busy_thread(threads: Sequence[Thread]) -> Thread:
    """Returns the thread for whose result the main thread waits; empty if there is none.

    That is one that runs code of the rank's package, a reader of images for example.
    """
    for thread in threads:
        if not waits_for_other_thread(thread) and any(frame.own_path for frame in thread):
            return thread
    return []


def _plain(function: str) -> str:
    """Names of torch's functions without the endings that tell how tensors are passed."""
    for ending in ("_into_tensor", "_tensor", "_single", "_coalesced"):
        function = function.removesuffix(ending)
    return function


_SHOWN = 4
_UNANSWERED = ("lost", "stopped", "kernel", "silent", "ended")
_GONE = ("lost", "stopped", "ended")


@dataclass(frozen=True, kw_only=True, slots=True)
class HangVerdict:
    """The result of comparing all ranks."""

    text: str
    """One sentence: the suspects, where each is, and where the others wait."""
    suspects: tuple[int, ...]
    """Ranks; empty if none is odd."""
    groups: tuple[tuple[tuple[int, ...], str], ...]
    """Ranks with the same stacks of their main threads, and that stack, for a reader who wants to see it."""
    may_end: bool = False
    """True if some rank waits for another one. Otherwise ranks may only be slow, and ending them would lose healthy work."""


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of one rank, as the rules see it."""

    report: RankReport
    main: Thread
    collective: str
    where: str
    call: str
    """File operation or process for which it waits."""


def find_verdict(reports: Sequence[RankReport]) -> HangVerdict:
    """Compares the ranks. reports: one per rank, also of those whose hosts did not answer."""
    places = [_place(report) for report in sorted(reports, key=lambda report: report.rank)]
    suspects = _suspects(places)
    others = [place for place in places if place not in suspects]
    if not suspects or not others:
        text = _describe_all(places)
    else:
        named = "; ".join(_describe(place) for place in suspects[:_SHOWN])
        if len(suspects) > _SHOWN:
            named += f"; and {len(suspects) - _SHOWN} more ({_numbers(place.report.rank for place in suspects)})"
        text = f"{named}; {_describe_others(others, len(suspects))}"
    return HangVerdict(
        text=text,
        suspects=tuple(place.report.rank for place in suspects) if others else (),
        groups=_groups(places, {place.report.rank for place in suspects}),
        may_end=_may_end(places),
    )


def _may_end(places: list[_Place]) -> bool:
    if len(places) < 2:
        return False
    if any(place.collective for place in places):
        return True
    # A rank that waits outside a collective, for example in a socket, waits in vain if another one is gone.
    has_lost_one = any(place.report.state in _GONE for place in places)
    return has_lost_one and any(place.report.state == "answered" and not place.call for place in places)


def _place(report: RankReport) -> _Place:
    threads = threads_of(report.stacks, report.package)
    # Other programs do not tell the identifier of their main thread: it is the last one.
    main = threads.get(report.main_thread) or next(reversed(threads.values()), [])
    collective = collective_of(main)
    if not collective and says_that_it_waits(main, wait_for_ranks):
        collective = report.detail or "an operation of all ranks"
    if not collective and waits_for_gpu(main):
        collective = "queued work of its GPU"
    shown, call = main, report.waits_for
    if not collective and waits_for_other_thread(main) and (busy := busy_thread(list(threads.values()))):
        # A main thread that waits for one of its own threads says nothing: that thread shows what the rank is doing.
        shown, call = busy, report.file_wait or call
    if not collective and says_that_it_waits(main, wait_for_helper):
        call = report.file_wait or call
    frame = place_of(shown)
    return _Place(report, main, collective, f"in {frame.shown()} ({frame.function})" if frame else "", call)


# ---- the rules ----


def _suspects(places: list[_Place]) -> list[_Place]:
    unanswered = [place for place in places if place.report.state in _UNANSWERED]
    if unanswered:
        return unanswered
    steps = [place.report.step for place in places]
    if min(steps) != max(steps):
        return [place for place in places if place.report.step == min(steps)]
    busy = [place for place in places if not place.collective]
    # A minority that computes while the others wait. With two ranks one is enough; otherwise half is the most.
    if 0 < len(busy) < len(places) and (len(busy) * 2 <= len(places) or len(places) == 2):
        return busy
    # Of equally frequent places the one of the lowest rank counts as usual, because Counter keeps the order of insertion.
    # So, of two ranks that differ, the second is odd.
    [(usual, _), *_] = Counter(place.collective or place.where for place in places).most_common()
    return [place for place in places if (place.collective or place.where) != usual]


# ---- words ----


def _describe(place: _Place) -> str:
    report = place.report
    name = f"rank {report.rank} ({report.host})"
    match report.state:
        case "lost":
            return f"{name}: {report.detail or 'its host is unreachable'}"
        case "stopped":
            where = f" in step {report.step + 1:,}" if report.step >= 0 else ""
            return f"{name}: stopped{where} by SIGSTOP (pid {report.pid}), so it gives no stacks; SIGCONT continues it"
        case "kernel":
            call = f", in {report.waits_for}" if report.waits_for else ""
            return f"{name}: in the kernel{call} and cannot be interrupted: a disk, network file system or GPU hangs"
        case "ended":
            return f"{name}: its process has ended"
        case "silent":
            call = f"; its main thread is waiting in {report.waits_for}" if report.waits_for else ""
            return f"{name}: gives no Python stacks (another kind of program, or no CPU time){call}"
    is_known = not report.phase or bool(place.collective)
    behind = "" if is_known else f" ({report.phase})"
    if place.collective:
        at = f" at {place.where.removeprefix('in ')}" if place.where else ""
        return f"{name}: waits in {place.collective}{_of_step(report)}{at}"
    doing = f", waiting {'for' if place.call.startswith('process ') else 'in'} {place.call}" if place.call else ""
    return f"{name}: {place.where or 'without a Python frame'}{doing}{behind}"


def _describe_others(others: list[_Place], num_suspects: int) -> str:
    it = "it" if num_suspects == 1 else "them"
    who = f"the other {len(others)} ranks wait" if len(others) > 1 else f"rank {others[0].report.rank} waits"
    return f"{who} for {it} in {_where_all(others)}"


def _where_all(places: list[_Place]) -> str:
    """Names where the ranks are, the most frequent place first."""
    counts = Counter(_what_for(place) for place in places).most_common()
    if len(counts) == 1:
        return counts[0][0]
    shown = [f"{what} ({number})" for what, number in counts[:3]]
    return ", ".join(shown) + (f" and {len(counts) - 3} other places" if len(counts) > 3 else "")


def _what_for(place: _Place) -> str:
    if place.collective:
        return place.collective + _of_step(place.report)
    return place.where.removeprefix("in ") or "an unknown place"


def _of_step(report: RankReport) -> str:
    return f" of step {report.step + 1:,}" if report.step >= 0 else ""


def _describe_all(places: list[_Place]) -> str:
    if len(places) == 1:
        return _describe(places[0])
    if all(place.report.state in _UNANSWERED for place in places):
        return "; ".join(_describe(place) for place in places[:_SHOWN])
    return f"no rank differs from the others: all {len(places)} are in {_where_all(places)}"


def _numbers(ranks: Iterable[int]) -> str:
    """Shortens a list of ranks: "1, 4-7"."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def _groups(places: list[_Place], suspects: set[int]) -> tuple[tuple[tuple[int, ...], str], ...]:
    groups: dict[str, list[int]] = {}
    for place in places:
        # The import system's own frames say nothing.
        frames = [frame for frame in place.main if not frame.file.startswith("<frozen")]
        lines = [f"  {frame.shown()} in {frame.function}" for frame in frames]
        text = "\n".join(lines) or f"  no stacks: {place.report.state}"
        groups.setdefault(text, []).append(place.report.rank)
    # The suspects first: they are what the reader looks for.
    ordered = sorted(groups.items(), key=lambda group: (not suspects & {*group[1]}, len(group[1]), group[1]))
    return tuple((tuple(ranks), text) for text, ranks in ordered)


def describe_groups(verdict: HangVerdict) -> str:
    """Returns the stacks of the main threads, each once with its ranks, for a terminal or verdict.txt."""
    parts = []
    for ranks, text in verdict.groups:
        parts.append(f"{'rank' if len(ranks) == 1 else 'ranks'} {_numbers(ranks)}, innermost first:\n{text}")
    return "\n".join(parts)


# ---- sentence ----
# The one message about a hang, the same with and without a driver.


def hang_sentence(silent_s: float, verdict: HangVerdict, *, what: str) -> str:
    """Returns the message about a job that is ended. silent_s: since the last progress; what: the progress that is missing."""
    return f"the job hangs: {what} for {silent_s:.0f} s. {verdict.text}."


def slow_sentence(silent_s: float, verdict: HangVerdict, *, what: str) -> str:
    """Returns the message about a job that goes on, because its ranks may only be slow."""
    why = "the job continues, because no rank is seen to wait for another"
    return f"{what} for {silent_s:.0f} s; {why}. {verdict.text}."


def steps_done(reports: Sequence[RankReport]) -> int | None:
    """Returns the number of steps that all ranks have done, or None if they do not train."""
    steps = [report.step for report in reports if report.step >= 0]
    return min(steps) if steps else None
