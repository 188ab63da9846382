"""The one message about a hang, the same from `megaclass run`, `megaclass train` and a rank without a launcher of ours."""

from collections.abc import Sequence

from megaclass.launch.hang.stacks import RankReport
from megaclass.launch.hang.verdict import HangVerdict


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
