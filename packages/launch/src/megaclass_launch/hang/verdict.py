"""Groups the stacks of all ranks and names the odd ones: the rank for which all others wait.

The rules, in this order; the first that tells some ranks from the others decides:

    1  a rank that cannot answer (its host is lost, it is stopped or in the kernel, it does not react) is the suspect
    2  ranks that have finished fewer steps than others
    3  ranks that are in no collective while others wait in one
    4  ranks in another collective, or another place, than most: of two equally large groups both are named

Otherwise no rank is odd, and the verdict says where all of them wait. Standard library only.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megaclass_launch.hang.frames import (
    Thread,
    busy_thread,
    collective_of,
    main_thread_of,
    place_of,
    threads_of,
    waits_for_gpu,
    waits_for_helper,
    waits_for_other_thread,
    waits_for_ranks,
)
from megaclass_launch.hang.stacks import RankReport

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

    @property
    def is_waiting(self) -> bool:
        return bool(self.collective)


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
    if any(place.is_waiting for place in places):
        return True
    # A rank that waits outside a collective, for example in a socket, waits in vain if another one is gone.
    has_lost_one = any(place.report.state in _GONE for place in places)
    return has_lost_one and any(place.report.state == "answered" and not place.call for place in places)


def _place(report: RankReport) -> _Place:
    threads = threads_of(report.stacks, report.package)
    main = main_thread_of(threads, report.main_thread)
    collective = collective_of(main)
    if not collective and waits_for_ranks(main):
        collective = report.detail or "an operation of all ranks"
    if not collective and waits_for_gpu(main):
        collective = "queued work of its GPU"
    shown, call = main, report.waits_for
    if not collective and waits_for_other_thread(main) and (busy := busy_thread(list(threads.values()))):
        # A main thread that waits for one of its own threads says nothing: that thread shows what the rank is doing.
        shown, call = busy, report.file_wait or call
    if not collective and waits_for_helper(main):
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
    busy = [place for place in places if not place.is_waiting]
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
    is_known = report.phase in ("", "training") or bool(place.collective)
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


def hang_sentence(silent_s: float, verdict: HangVerdict, *, what: str = "no step has finished") -> str:
    """Returns the message about a job that is ended. silent_s: since the last progress; what: the progress that is missing."""
    return f"the job hangs: {what} for {silent_s:.0f} s. {verdict.text}."


def slow_sentence(silent_s: float, verdict: HangVerdict, *, what: str = "no step has finished") -> str:
    """Returns the message about a job that goes on, because its ranks may only be slow."""
    why = "the job continues, because no rank is seen to wait for another"
    return f"{what} for {silent_s:.0f} s; {why}. {verdict.text}."


def steps_done(reports: Sequence[RankReport]) -> int | None:
    """Returns the number of steps that all ranks have done, or None if they do not train."""
    steps = [report.step for report in reports if report.step >= 0]
    return min(steps) if steps else None
