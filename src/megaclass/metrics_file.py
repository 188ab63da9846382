"""Reads metrics.jsonl, the record of a run: one JSON object per line, each with its step."""

import json
from pathlib import Path
from typing import Any


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


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None
