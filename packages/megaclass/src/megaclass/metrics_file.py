"""Reads the records of a run: metrics.jsonl, a JSON object per line with its step, and summary.json. Standard library only."""

import json
from pathlib import Path
from typing import Any

from megaclass.errors import DataError
from megaclass_launch.files import read_json_lines


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Returns the readable rows and the number of lines that are not rows: damaged lines do not stop a reader."""
    return read_json_lines(path, lambda row: isinstance(row.get("step"), int))


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


def is_number(value: object) -> bool:
    """Tells whether a value of a file that anyone may have written is a number that can be shown, or NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and (value != value or abs(value) < 1e300)
