"""The report of `check`: findings with advice, as a table or JSON. Standard library only."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from megaclass_launch.wire.plain_text import plain_text


class FindingState(StrEnum):
    """Consequence of a finding for the start of training."""

    GOOD = "good"
    ABSENT = "absent"
    """Not available, and not needed for training."""
    DOUBTFUL = "doubtful"
    """Training would start, but may be slow or confusing."""
    BAD = "bad"
    """Training would not start, or would leave GPUs unused."""


_MARKS = {FindingState.GOOD: "[X]", FindingState.ABSENT: "[ ]", FindingState.DOUBTFUL: "[?]", FindingState.BAD: "[!]"}
_ADVICE_COLUMN = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the report."""

    what: str
    state: FindingState
    found: str
    advice: str = ""
    """Advice with the command to type; set for every finding that is bad or doubtful."""

    def __post_init__(self) -> None:
        assert (self.state in (FindingState.BAD, FindingState.DOUBTFUL)) == bool(self.advice), self


def good(what: str, found: str) -> Finding:
    return Finding(what=what, state=FindingState.GOOD, found=found)


def absent(what: str, found: str) -> Finding:
    return Finding(what=what, state=FindingState.ABSENT, found=found)


def doubtful(what: str, found: str, advice: str) -> Finding:
    return Finding(what=what, state=FindingState.DOUBTFUL, found=found, advice=advice)


def bad(what: str, found: str, advice: str) -> Finding:
    return Finding(what=what, state=FindingState.BAD, found=found, advice=advice)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All findings, with the facts that they are based on."""

    findings: Mapping[str, Sequence[Finding]]
    """Keyed by subject: a host name, or `together`."""
    titles: Mapping[str, str] = field(default_factory=dict)
    """Headings in the table, keyed by subject; the subject itself by default."""
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Facts about each host; empty for a host that did not answer."""
    all_reduce: Sequence[Mapping[str, Any]] = ()
    """Rows of `bench allreduce`."""

    @property
    def would_start(self) -> bool:
        """True if no finding is bad."""
        return not any(finding.state is FindingState.BAD for finding in self._all())

    def as_json(self) -> dict[str, object]:
        """Returns everything in the table, and the facts and measurements behind it."""
        return {
            "would_start": self.would_start,
            "findings": [
                {"where": where, **asdict(finding)} for where, findings in self.findings.items() for finding in findings
            ],
            "facts": dict(self.facts),
            "all_reduce": list(self.all_reduce),
        }

    def table(self) -> str:
        """Returns the report as text; advice stands below each finding that has any."""
        width = max((len(finding.what) for finding in self._all()), default=0)
        lines: list[str] = []
        for where, findings in self.findings.items():
            lines += ["", self.titles.get(where, where)]
            for finding in findings:
                found = plain_text(finding.found)
                lines.append(f"    {_MARKS[finding.state]} {finding.what:<{width}}  {found}".rstrip())
                if finding.advice:
                    lines.append(f"{'':{_ADVICE_COLUMN}}{plain_text(finding.advice)}")
        return "\n".join([*lines, "", self._verdict()])

    def _verdict(self) -> str:
        num_bad = sum(finding.state is FindingState.BAD for finding in self._all())
        if num_bad:
            return f"Training would not start: {num_bad} problem{'s' if num_bad > 1 else ''}, marked [!]."
        num_doubtful = sum(finding.state is FindingState.DOUBTFUL for finding in self._all())
        return "Training would start." + (f" Warnings: {num_doubtful}, marked [?]." if num_doubtful else "")

    def _all(self) -> Iterator[Finding]:
        for findings in self.findings.values():
            yield from findings
