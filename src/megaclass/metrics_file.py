"""Reads the records of a run: metrics.jsonl, a JSON object per line with its step, and summary.json. Standard library only."""

import json
from pathlib import Path
from typing import Any

from megaclass.errors import DataError


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Returns the readable rows and the number of lines that are not rows.

    A crash can cut off the last line, and a power cut can leave other bytes in place of lines; neither stops a reader.
    A file that does not exist has no rows. A last line without its newline is still being written and is not counted.
    """
    if not path.is_file():
        return [], 0
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    rows = [row for row in map(_row, lines) if row is not None]
    return rows, len(lines) - len(rows)


def read_summary(run: Path) -> dict[str, Any]:
    """Returns the content of a run's summary.json; empty if the run has not written one yet."""
    path = run / "summary.json"
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"Cannot read {path}: {error}") from error
    return values if isinstance(values, dict) else {}


def object_in(line: str) -> dict[str, Any] | None:
    """Returns the JSON object in a line; None if there is none, or if one of its whole numbers has more than 64 bits."""
    try:
        row = json.loads(line, parse_int=_whole_number)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _row(line: str) -> dict[str, Any] | None:
    row = object_in(line)
    return row if row is not None and isinstance(row.get("step"), int) else None


def _whole_number(digits: str) -> int:
    # Larger ones are no numbers of a run, and most arithmetic raises OverflowError on them.
    if abs(number := int(digits)) >= 2**63:
        raise ValueError(f"{digits[:20]}… is too large")
    return number
