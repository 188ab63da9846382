"""`megaclass top RUN`: a live view of a run in a terminal, from its files alone. Standard library only.

It reads config.toml, metrics.jsonl and events.jsonl, so it works on any host that sees the run folder, needs no connection to
the job, and shows a finished run as well. Drawn with plain characters: rich is not needed.
"""

import itertools
import math
import shutil
import statistics
import sys
import textwrap
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaclass.errors import UserError
from megaclass.events_file import read_events
from megaclass.launch.wire.plain_text import plain_text
from megaclass.metrics_file import read_metrics
from megaclass.progress import duration_text

_BLOCKS = " ▁▂▃▄▅▆▇█"
_PHASES = {"data": "d", "forward": "f", "backward": "b", "exchange": "x", "update": "u"}
_CHART_ROWS = 6
_MOST_RANKS, _FEWEST_RANKS = 16, 2
_SHOWN_EVENTS = 6
_LINES_OF_EVENT, _FEWEST_EVENT_LINES = 4, 4
_ANY_HEIGHT = 10_000
_LONGEST_OUTCOME = 40
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"


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
    """Draws the run until Ctrl-C, or once; returns the exit code."""
    if is_once or not sys.stdout.isatty():
        width = shutil.get_terminal_size((100, 40)).columns
        print("\n".join(draw(read_run(folder), width, time.time())))
        return 0
    read_run(folder)  # an error before the screen changes stays visible
    sys.stdout.write(_ENTER)
    try:
        while True:
            size = shutil.get_terminal_size((100, 40))
            lines = draw(read_run(folder), size.columns, time.time(), size.lines - 1)
            sys.stdout.write(_HOME + "".join(f"{line}{_CLEAR_LINE}\n" for line in lines) + _CLEAR_REST)
            sys.stdout.flush()
            time.sleep(interval_s)
    except KeyboardInterrupt:
        return 0
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()


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
    return RunView(
        folder=folder,
        rows=read_metrics(folder / "metrics.jsonl")[0],
        events=read_events(folder)[0],
        global_batch=global_batch,
        changed_at=max(path.stat().st_mtime for path in found if path.name != "config.toml" or len(found) == 1),
    )


def draw(view: RunView, width: int, now: float, height: int = _ANY_HEIGHT) -> list[str]:
    """Returns the lines of the view, none longer than the terminal and not more than its height.

    In a low terminal fewer events are shown, the newest ones, and fewer ranks, the slowest ones.
    """
    above = [*_title(view, now), ""]
    if view.rows:
        above += [*_loss_chart(view.rows, width), "", *_speed(view, width), *_phases(view.rows[-1], width)]
    else:
        above.append("no row of metrics yet")
    room = height - len(above)
    fewest = len(_ranks(view, width, _FEWEST_RANKS))
    events = _last_events(view.events, width, max(_FEWEST_EVENT_LINES, room - fewest))
    ranks = _ranks(view, width, min(_MOST_RANKS, max(1, room - len(events) - 2)))
    return [line[:width].rstrip() for line in (*above, *ranks, *events)][:height]


def _title(view: RunView, now: float) -> list[str]:
    begun = [event for event in view.events if event["event"] in ("start", "resume")]
    num_steps = _number(begun[-1].get("num_steps")) if begun else 0.0
    num_ranks = _number(begun[-1].get("world_size")) if begun else 0.0
    step = int(view.rows[-1]["step"]) if view.rows else 0
    done = f"step {step:,}" + (f" of {num_steps:,.0f} ({step / num_steps:.0%})" if num_steps else "")
    ranks = f", {num_ranks:.0f} rank{'s' if num_ranks != 1 else ''}" if num_ranks else ""
    return [str(view.folder.absolute()), f"{done}{ranks}, {_state(view, num_steps, now)}"]


def _state(view: RunView, num_steps: float, now: float) -> str:
    # Events of earlier starts do not count: a run that hung may have been restarted since.
    starts = [index for index, event in enumerate(view.events) if event["event"] in ("start", "resume")]
    for event in reversed(view.events[starts[-1] if starts else 0 :]):
        if event["event"] == "end":
            return plain_text(str(event.get("outcome", "ended")), _LONGEST_OUTCOME)
        if event["event"] == "hang":
            return "hung"
    silent_s = max(0.0, now - view.changed_at)
    left_s = _left_s(view, num_steps)
    left = f", {duration_text(left_s)} left" if left_s is not None else ""
    return f"running, last sign of life {duration_text(silent_s)} ago{left}"


def _left_s(view: RunView, num_steps: float) -> float | None:
    speed = _number(view.rows[-1].get("images_per_second")) if view.rows else 0.0
    if not (speed and num_steps and view.global_batch):
        return None
    return max(0.0, num_steps - int(view.rows[-1]["step"])) * view.global_batch / speed


def _loss_chart(rows: Sequence[Mapping[str, Any]], width: int) -> list[str]:
    """Draws the loss over the steps: one column is the mean of some rows."""
    # The loss of a run that diverges is not finite at its end; such losses have no place in a chart.
    steps = [int(row["step"]) for row in rows if _number(row.get("loss")) == row.get("loss")]
    losses = [float(row["loss"]) for row in rows if _number(row.get("loss")) == row.get("loss")]
    if not losses:
        return ["no loss yet"]
    columns = max(1, min(len(losses), width - 12))
    # There are at least as many losses as columns, so that no column is empty.
    ends = [number * len(losses) // columns for number in range(columns + 1)]
    means = [statistics.fmean(losses[start:stop]) for start, stop in itertools.pairwise(ends)]
    # A few losses are drawn wide: the curve fills the terminal from the first rows on.
    means = [mean for mean in means for _ in range(max(1, (width - 12) // columns))]
    low, high = min(means), max(means)
    heights = [round((mean - low) / (high - low) * (_CHART_ROWS * 8 - 1)) + 1 if high > low else 4 for mean in means]
    lines = []
    for row in range(_CHART_ROWS - 1, -1, -1):
        label = f"{high:.4g}" if row == _CHART_ROWS - 1 else f"{low:.4g}" if row == 0 else ""
        lines.append(f"{label:>9} │" + "".join(_BLOCKS[min(8, max(0, height - 8 * row))] for height in heights))
    lines.append(f"{'loss':>9} └ {losses[-1]:.4g} at step {steps[-1]:,}")
    return lines


def _speed(view: RunView, width: int) -> list[str]:
    row = view.rows[-1]
    parts = [f"{_number(row.get('images_per_second')):,.0f} images/s"]
    if len(view.rows) > 1:
        recent = [_number(other.get("images_per_second")) for other in view.rows[-20:]]
        parts.append(f"median {statistics.median(recent):,.0f}")
    for name, text in (
        ("learning_rate", "lr {:.3g}"),
        ("target_cosine", "target cosine {:.3f}"),
        ("data_wait_share", "waiting for data {:.0%}"),
        ("gpu_memory_gib", "{:.1f} GiB of GPU memory"),
        ("gpu_busy_share", "GPU busy {:.0%}"),
        ("verification_accuracy", "verification {:.2%}"),
    ):
        if isinstance(row.get(name), int | float):
            parts.append(text.format(row[name]))
    return _filled(parts, width)


def _phases(row: Mapping[str, Any], width: int) -> list[str]:
    seconds = {phase: _number(row.get(f"{phase}_s")) for phase in _PHASES}
    total = sum(seconds.values())
    if not total:
        return []
    shares = [f"{phase} {value / total:.0%}" for phase, value in seconds.items()]
    return _filled([f"step {_step_time(total)}: {shares[0]}", *shares[1:]], width)


def _ranks(view: RunView, width: int, most: int) -> list[str]:
    """Draws a bar per rank: its own time, and the time in which it waits for others in exchanges."""
    row = view.rows[-1] if view.rows else {}
    table = row.get("rank_seconds")
    if not isinstance(table, dict) or not all(isinstance(table.get(phase), list) for phase in _PHASES):
        return []
    size = min(len(table[phase]) for phase in _PHASES)
    totals = [sum(_number(table[phase][rank]) for phase in _PHASES) for rank in range(size)]
    longest = max(totals, default=0.0)
    if not longest:
        return []
    memory = row.get("rank_gpu_memory_gib")
    own = [totals[rank] - _number(table["exchange"][rank]) for rank in range(size)]
    shown = sorted(sorted(range(size), key=lambda rank: -own[rank])[:most])
    legend = ", ".join(f"{letter} {phase}" for phase, letter in _PHASES.items())
    whose = "ranks" if size == len(shown) else f"{most} slowest of {size} ranks"
    lines = ["", f"{whose}: {legend}"]
    for rank in shown:
        columns = max(10, width - 42)
        # Ends are rounded, not lengths: bars of the same time are then equally long.
        sums = itertools.accumulate((_number(table[phase][rank]) for phase in _PHASES), initial=0.0)
        ends = [round(total / longest * columns) for total in sums]
        letters = zip(_PHASES.values(), itertools.pairwise(ends), strict=True)
        bar = "".join(letter * (stop - start) for letter, (start, stop) in letters)
        gib = f" {_number(memory[rank]):.1f} GiB" if isinstance(memory, list) and rank < len(memory) else ""
        slow = (
            f" {_number(row.get('slower')):.0%} slower: {row.get('slow_phase')}" if row.get("slow_rank") == rank else ""
        )
        lines.append(f"{rank:>5} {_step_time(own[rank]):>9} {bar}{gib}{plain_text(slow)}")
    return lines


def _last_events(events: Sequence[Mapping[str, Any]], width: int, most_lines: int) -> list[str]:
    """Returns the newest events, as many as fit below a blank line and a header."""
    lines: list[str] = []
    for event in reversed(events[-_SHOWN_EVENTS:]):
        of_event = _event_lines(event, width)
        if len(lines) + len(of_event) + 2 > most_lines and lines:
            break
        lines = [*of_event, *lines]
    return ["", "events", *lines] if lines else []


def _event_lines(event: Mapping[str, Any], width: int) -> list[str]:
    clock = time.strftime("%H:%M:%S", time.localtime(float(event["time"])))
    step = f" step {event['step']:,}" if event.get("step") is not None else ""
    fields = [(name, _shown(value)) for name, value in event.items() if name not in ("time", "event", "step")]
    detail = ", ".join(value.rstrip(".") if name == "text" else f"{name} {value}" for name, value in fields)
    text = plain_text(str(event["event"]).replace("_", " ") + f": {detail}" * bool(detail))
    # Verdicts on hangs and warnings are longer than a line; of lists of numbers the first ones suffice.
    return textwrap.wrap(
        f"{clock}{step} {text}",
        max(20, width),
        initial_indent="  ",
        subsequent_indent=" " * 11,
        max_lines=_LINES_OF_EVENT if "text" in event else 1,
        placeholder=" …",
    )


def _filled(parts: Sequence[str], width: int) -> list[str]:
    """Joins the parts by two spaces, with as many on a line as fit."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(part)
    return lines


def _step_time(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _number(value: Any) -> float:
    """Returns a finite number of a file that anyone may have written; 0 for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else 0.0
