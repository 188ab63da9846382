"""`megaclass top RUN`: a live view of a run in a terminal, from its files alone, drawn by rich, which must be installed.

It reads metrics.jsonl and events.jsonl, so it works on any host that sees the run folder, and for a finished run as well.
"""

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from megaclass.evaluation.report.ranks import rank_rows
from megaclass.metrics_file import is_number, read_metrics
from megaclass.phases import PHASES
from megaclass.progress import duration_text
from megaclass_launch.errors import UserError
from megaclass_launch.events_file import read_events
from megaclass_launch.wire.checks import plain_text

_BLOCKS = "▁▂▃▄▅▆▇█"
_EVERY_S, _COLUMNS, _MOST_RANKS, _SHOWN_EVENTS = 2.0, 60, 16, 6


@dataclass(frozen=True, slots=True)
class RunView:
    """The files of a run, read once."""

    folder: Path
    rows: list[dict[str, Any]]
    events: list[dict[str, Any]]
    changed_at: float
    """Time at which metrics.jsonl or events.jsonl was last written, by the clock of their file system."""


def watch_run(folder: Path, *, is_once: bool) -> int:
    """Draws the run until Ctrl-C, or once if the output is not a terminal; returns the exit code."""
    console = Console(highlight=False)
    view = draw(read_run(folder), time.time())
    if is_once or not console.is_terminal:
        console.print(view)
        return 0
    with suppress(KeyboardInterrupt), Live(view, console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(_EVERY_S)
            live.update(draw(read_run(folder), time.time()), refresh=True)
    return 0


def read_run(folder: Path) -> RunView:
    """Reads the files of a run. Raises UserError if the folder holds none."""
    names = ("metrics.jsonl", "events.jsonl", "config.toml")
    if not (found := [folder / name for name in names if (folder / name).is_file()]):
        raise UserError(f"{folder} is not a run folder, train.run_dir of a run: it has none of {', '.join(names)}.")
    changed_at = max(path.stat().st_mtime for path in found if path.name != names[2] or len(found) == 1)
    return RunView(folder, read_metrics(folder / names[0])[0], read_events(folder)[0], changed_at)


def draw(view: RunView, now: float) -> Group:
    """Returns what rich draws: state, loss, numbers, a row per rank and the newest events."""
    row = view.rows[-1] if view.rows else {}
    starts = [place for place, event in enumerate(view.events) if event["event"] in ("start", "resume")]
    # Events of earlier starts do not count: a run that hung may have been restarted since.
    since = view.events[starts[-1] if starts else 0 :]
    num_steps = _number(since[0].get("num_steps")) if starts else 0.0
    step = int(_number(row.get("step")))
    of = f" of {num_steps:,.0f} ({step / num_steps:.0%})" if num_steps else ""
    num_done = step - _number(since[0].get("step")) if starts else 0.0
    left_s = (num_steps - step) * _number(row.get("elapsed_s")) / num_done if 0 < num_done < num_steps else 0.0
    left = f", {duration_text(left_s)} left" if left_s > 0 else ""
    state = f"running, last sign of life {duration_text(max(0.0, now - view.changed_at))} ago{left}"
    for event in since:
        if event["event"] in ("end", "hang"):
            state = str(event.get("outcome", "ended")) if event["event"] == "end" else "hung"
    losses = [float(one["loss"]) for one in view.rows if _number(one.get("loss")) == one.get("loss")]
    numbers = {name: one for name, one in row.items() if name != "step" and isinstance(one, int | float)}
    sparkline = _sparkline(losses) if losses else "no loss yet"
    lines = [str(view.folder.absolute()), f"step {step:,}{of}, {state}", "", sparkline]
    lines += ["  ".join(f"{name} {_number(one):.4g}" for name, one in numbers.items())]
    events = ["events"]
    for event in view.events[-_SHOWN_EVENTS:]:
        fields = ", ".join(f"{name} {value}" for name, value in event.items() if name not in ("time", "event"))
        events.append(f"  {time.strftime('%H:%M:%S', time.localtime(float(event['time'])))} {event['event']}: {fields}")
    above, below = ([Text(plain_text(line, 600)) for line in part] for part in (lines, events))
    return Group(*above, _ranks(row), *below)


def _sparkline(losses: Sequence[float]) -> str:
    """Draws the loss over the steps in one line, each column the mean of some rows."""
    columns = min(len(losses), _COLUMNS)
    ends = [number * len(losses) // columns for number in range(columns + 1)]
    means = [math.fsum(losses[a:b]) / (b - a) for a, b in itertools.pairwise(ends)]
    low, high = min(means), max(means)
    blocks = (_BLOCKS[round((mean - low) / ((high - low) or 1.0) * (len(_BLOCKS) - 1))] for mean in means)
    return f"loss {''.join(blocks)} {losses[-1]:.4g}, from {low:.4g} to {high:.4g}"


def _ranks(row: Mapping[str, Any]) -> Table:
    """Returns a table of the milliseconds per phase, of the ranks with the most time of their own; the slow one is red."""
    table = Table("rank", *PHASES, "own, ms", box=None)
    for found in rank_rows([row] if "step" in row else []):
        own_W = found.own_s
        for rank in sorted(sorted(range(len(own_W)), key=lambda one: -own_W[one])[:_MOST_RANKS]):
            cells = [
                f"{1000 * value:.1f}" for value in (*(found.seconds[phase][rank] for phase in PHASES), own_W[rank])
            ]
            table.add_row(str(rank), *cells, style="red" if row.get("slow_rank") == rank else "")
    return table


def _number(value: Any) -> float:
    """Returns a finite number; 0 for anything else that the file may hold."""
    return float(value) if is_number(value) and value == value else 0.0
