"""Reads the records of a run: metrics.jsonl, one JSON object per line, each with its step, and summary.json."""

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


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None
