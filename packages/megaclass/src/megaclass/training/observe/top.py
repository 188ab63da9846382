"""`megaclass top RUN`: a live view of a run in a terminal, from its files alone, drawn by rich.

It reads config.toml, metrics.jsonl and events.jsonl, so it works on any host that sees the run folder, needs no connection to
the job, and shows a finished run as well.
"""

import itertools
import math
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaclass.metrics_file import read_metrics
from megaclass.phases import OWN_PHASES, PHASES
from megaclass.progress import duration_text
from megaclass_launch.errors import UserError
from megaclass_launch.events_file import read_events
from megaclass_launch.wire.plain_text import plain_text

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

_BLOCKS = "▁▂▃▄▅▆▇█"
_COLUMNS, _MOST_RANKS, _SHOWN_EVENTS = 60, 16, 6


@dataclass(frozen=True, kw_only=True, slots=True)
class RunView:
    """The files of a run, read once."""

    folder: Path
    rows: list[dict[str, Any]]
    events: list[dict[str, Any]]
    global_batch: int
    changed_at: float
    """Time at which metrics.jsonl or events.jsonl was last written, by the clock of their file system."""


def watch_run(folder: Path, *, interval_s: float, is_once: bool) -> int:
    """Draws the run until Ctrl-C, or once if the output is not a terminal; returns the exit code."""
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        raise UserError("megaclass top needs rich: pip install 'megaclass[ui]'") from None
    console = Console(highlight=False)
    view = draw(read_run(folder), time.time())
    if is_once or not console.is_terminal:
        console.print(view)
        return 0
    try:
        with Live(view, console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval_s)
                live.update(draw(read_run(folder), time.time()), refresh=True)
    except KeyboardInterrupt:
        return 0


def read_run(folder: Path) -> RunView:
    """Reads the files of a run. Raises UserError if the folder holds none."""
    names = ("metrics.jsonl", "events.jsonl", "config.toml")
    found = [folder / name for name in names if (folder / name).is_file()]
    if not found:
        raise UserError(
            f"{folder} is not a run folder: it has none of {', '.join(names)}. Give train.run_dir of a run."
        )
    try:
        config = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
        global_batch = int(config["train"]["global_batch"])
    except (OSError, ValueError, KeyError, TypeError):
        global_batch = 0
    changed_at = max(path.stat().st_mtime for path in found if path.name != "config.toml" or len(found) == 1)
    rows, events = read_metrics(folder / "metrics.jsonl")[0], read_events(folder)[0]
    return RunView(folder=folder, rows=rows, events=events, global_batch=global_batch, changed_at=changed_at)


def draw(view: RunView, now: float) -> "Group":
    """Returns what rich draws: state, loss, numbers, a row per rank and the newest events."""
    from rich.console import Group
    from rich.text import Text

    row = view.rows[-1] if view.rows else {}
    starts = [place for place, event in enumerate(view.events) if event["event"] in ("start", "resume")]
    # Events of earlier starts do not count: a run that hung may have been restarted since.
    since = view.events[starts[-1] if starts else 0 :]
    num_steps = _number(since[0].get("num_steps")) if starts else 0.0
    step = int(_number(row.get("step")))
    of = f" of {num_steps:,.0f} ({step / num_steps:.0%})" if num_steps else ""
    speed = _number(row.get("images_per_second"))
    left_s = max(0.0, num_steps - step) * view.global_batch / speed if speed and num_steps else 0.0
    left = f", {duration_text(left_s)} left" if left_s else ""
    state = f"running, last sign of life {duration_text(max(0.0, now - view.changed_at))} ago{left}"
    for event in since:
        if event["event"] in ("end", "hang"):
            state = str(event.get("outcome", "ended")) if event["event"] == "end" else "hung"
    lines = [str(view.folder.absolute()), f"step {step:,}{of}, {state}", ""]
    losses = [float(one["loss"]) for one in view.rows if _number(one.get("loss")) == one.get("loss")]
    lines.append(_sparkline(losses) if losses else "no loss yet")
    numbers = {name: one for name, one in row.items() if name != "step" and isinstance(one, int | float)}
    lines.append("  ".join(f"{name} {_number(one):.4g}" for name, one in numbers.items()))
    lines += [_event_text(event) for event in view.events[-_SHOWN_EVENTS:]]
    texts = [Text(plain_text(line, 600)) for line in lines]
    return Group(*texts[:5], _ranks(row), Text("events"), *texts[5:])


def _sparkline(losses: Sequence[float]) -> str:
    """Draws the loss over the steps in one line, each column the mean of some rows."""
    columns = min(len(losses), _COLUMNS)
    ends = [number * len(losses) // columns for number in range(columns + 1)]
    means = [math.fsum(losses[a:b]) / (b - a) for a, b in itertools.pairwise(ends)]
    low, high = min(means), max(means)
    blocks = (_BLOCKS[round((mean - low) / ((high - low) or 1.0) * (len(_BLOCKS) - 1))] for mean in means)
    return f"loss {''.join(blocks)} {losses[-1]:.4g}, from {low:.4g} to {high:.4g}"


def _ranks(row: Mapping[str, Any]) -> "Table":
    """Returns a table of the milliseconds per phase, of the ranks with the most time of their own; the slow one is red."""
    from rich.table import Table

    table = Table("rank", *PHASES, "own, ms", box=None)
    times = row.get("rank_seconds")
    if not isinstance(times, dict) or not all(isinstance(times.get(phase), list) for phase in PHASES):
        return table
    size = min(len(times[phase]) for phase in PHASES)
    own = [sum(_number(times[phase][rank]) for phase in OWN_PHASES) for rank in range(size)]
    for rank in sorted(sorted(range(size), key=lambda one: -own[one])[:_MOST_RANKS]):
        cells = [f"{1000 * _number(times[phase][rank]):.1f}" for phase in PHASES]
        table.add_row(str(rank), *cells, f"{1000 * own[rank]:.1f}", style="red" if row.get("slow_rank") == rank else "")
    return table


def _event_text(event: Mapping[str, Any]) -> str:
    fields = ", ".join(f"{name} {value}" for name, value in event.items() if name not in ("time", "event"))
    return f"  {time.strftime('%H:%M:%S', time.localtime(float(event['time'])))} {event['event']}: {fields}"


def _number(value: Any) -> float:
    """Returns a finite number of a file that anyone may have written; 0 for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if is_number else 0.0
