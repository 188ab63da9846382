"""Charts of the report as data: lines and histograms over axes with round ticks, and bars. charts.html.j2 draws them as SVG.

Colours and fonts are CSS classes (`series-0`, `grid`, `axis-label`) of report.css, so one drawing serves the light and
the dark page. A drawing has coordinates of its own, `size` units wide and high. The page scales it to the width of its
column, so a drawing for a narrow column gets a smaller size to keep its text readable.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

WIDE = (480, 300)
NARROW = (360, 240)
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 20, 12, 46
_EPOCHS_HEIGHT = 12
_NUM_COLOURS = 8


def colour(place: int) -> str:
    """Returns the CSS class of the model at this place; after eight models the colours repeat."""
    return f"series-{place % _NUM_COLOURS}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """A line through points in the given order. A value that is not finite leaves a gap."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    css: str = "series-0"


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """A range of values along one side of the drawing."""

    label: str
    low: float
    high: float
    ticks: tuple[float, ...]
    is_log: bool = False
    tick_text: Callable[[float], str] = lambda value: f"{value:g}"
    epochs: tuple[tuple[float, str], ...] = ()
    """Positions and texts of a second scale above the drawing."""

    def share(self, value: float) -> float:
        """Returns the position of a value: 0 at the low end, 1 at the high end."""
        if self.is_log:
            value = max(value, self.low)
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def linear_axis(
    label: str,
    values: Sequence[float],
    *,
    from_zero: bool = False,
    is_tight: bool = False,
    step: float | None = None,
) -> Axis:
    """Returns an axis over all finite values. It ends at round ticks, or with `is_tight` at the outermost values.

    step: distance of the ticks; None chooses a round one.
    """
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        # There is only one value: room around it gives the axis a length.
        margin = abs(high) / 2 or 0.5
        low, high = (low if from_zero else low - margin), high + margin
    step = step or _round_step((high - low) / 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(index * step for index in range(first, last + 1))
    text = _text_for_step(step, ticks)
    if not is_tight:
        return Axis(label=label, low=ticks[0], high=ticks[-1], ticks=ticks, tick_text=text)
    inside = tuple(tick for tick in ticks if low - step / 1e6 <= tick <= high + step / 1e6)
    return Axis(label=label, low=low, high=high, ticks=inside, tick_text=text)


def with_epochs(axis: Axis, steps_per_epoch: float) -> Axis:
    """Adds a second scale in epochs to an axis in steps; nothing if it covers no whole number of epochs."""
    epochs = linear_axis("epoch", [axis.low / steps_per_epoch, axis.high / steps_per_epoch], is_tight=True)
    return replace(axis, epochs=tuple((tick * steps_per_epoch, epochs.tick_text(tick)) for tick in epochs.ticks))


def log_axis(label: str, low: float, high: float) -> Axis:
    """Returns a logarithmic axis between two positive values, with a tick at each power of ten."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    ticks = tuple(10.0**exponent for exponent in range(first, last + 1))
    return Axis(label=label, low=low, high=high, ticks=ticks, is_log=True, tick_text=_power_of_ten)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A chart with its title and legend. Without lines and areas the page says that no values were recorded."""

    title: str
    x: Axis = Axis(label="", low=0, high=1, ticks=())
    y: Axis = Axis(label="", low=0, high=1, ticks=())
    lines: Sequence[Series] = ()
    """Later ones lie over earlier ones."""
    areas: Sequence[Series] = ()
    """Filled outlines."""
    band: tuple[float, float] | None = None
    """Range of values that is shaded."""
    marker: float | None = None
    """Position of a dashed vertical line."""
    size: tuple[int, int] = WIDE
    legend: Sequence[tuple[str, str]] = ()
    """Name and CSS classes of each key."""
    has_toggles: bool = False
    """Pressing a key of the legend hides its line."""
    note: str = ""
    """Words below the chart that say what to look for."""

    left = _LEFT

    @property
    def right(self) -> int:
        return self.size[0] - _RIGHT

    @property
    def top(self) -> int:
        """Leaves room for the scale in epochs."""
        return _TOP + (_EPOCHS_HEIGHT if self.x.epochs else 0)

    @property
    def bottom(self) -> int:
        return self.size[1] - _BOTTOM

    def at_x(self, value: float) -> float:
        return round(_LEFT + min(max(self.x.share(value), 0.0), 1.0) * (self.right - _LEFT), 1)

    def at_y(self, value: float) -> float:
        return round(self.bottom - min(max(self.y.share(value), 0.0), 1.0) * (self.bottom - self.top), 1)

    def path(self, one: Series) -> str:
        """Returns the line as SVG's path data."""
        pieces: list[list[tuple[float, float]]] = [[]]
        for x, y in zip(one.xs, one.ys, strict=True):
            if math.isfinite(x) and math.isfinite(y):
                pieces[-1].append((self.at_x(x), self.at_y(y)))
            elif pieces[-1]:
                pieces.append([])
        return "".join("M" + "L".join(f"{x} {y}" for x, y in _thinned(piece)) for piece in pieces if piece)


def histogram(
    title: str,
    groups: Sequence[tuple[str, NDArray[np.float64]]],
    edges: NDArray[np.float64],
    x: Axis,
    *,
    y_label: str = "share of pairs, %",
    **others: Any,
) -> Figure:
    """Returns a figure with one filled outline per group (CSS class, share of the group in each bin)."""
    areas = [
        Series(name=css, css=css, xs=np.repeat(edges, 2).tolist(), ys=[0.0, *np.repeat(100 * shares, 2).tolist(), 0.0])
        for css, shares in groups
    ]
    y = linear_axis(y_label, [height for area in areas for height in area.ys], from_zero=True)
    return Figure(title=title, x=x, y=y, areas=areas, **others)


def smoothed(values: Sequence[float], *, span: int) -> list[float]:
    """Returns the mean over `span` values before and after each; values that are not finite stay and enter no mean."""
    given = np.asarray(values, dtype=np.float64)
    is_finite = np.isfinite(given)
    totals = np.concatenate([[0.0], np.cumsum(np.where(is_finite, given, 0.0))])
    counts = np.concatenate([[0], np.cumsum(is_finite)])
    places = np.arange(len(given))
    first, last = np.maximum(places - span, 0), np.minimum(places + span + 1, len(given))
    means = (totals[last] - totals[first]) / np.maximum(counts[last] - counts[first], 1)
    return [float(value) for value in np.where(is_finite, means, given)]


def bars(rows: Sequence[tuple[str, Mapping[str, float]]]) -> list[dict[str, Any]]:
    """Returns a bar per row (name, seconds by part), for the template. The longest fills the width."""
    longest = max((sum(parts.values()) for _, parts in rows), default=0.0) or 1.0
    return [
        {
            "name": name,
            "total": (total := sum(parts.values())) and _time(total),
            "parts": [
                (part, f"{_time(seconds)} ({seconds / (total or 1):.0%})", round(100 * seconds / longest, 2))
                for part, seconds in parts.items()
            ],
        }
        for name, parts in rows
    ]


def _time(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Keeps the first, lowest, highest and last point per column of one unit: the same picture in a smaller file."""
    kept: list[tuple[float, float]] = []
    for _, column in itertools.groupby(range(len(points)), key=lambda index: round(points[index][0])):
        indices = list(column)
        by_height = sorted(indices, key=lambda index: points[index][1])
        kept.extend(points[index] for index in sorted({indices[0], by_height[0], by_height[-1], indices[-1]}))
    return kept


def _round_step(rough: float) -> float:
    """Returns the smallest of 1, 2, 2.5, 5 x 10^n that is not below `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))


def _text_for_step(step: float, ticks: Sequence[float]) -> Callable[[float], str]:
    """Returns a formatter with the same decimals for the whole axis; very small or large values become powers."""
    largest = max(abs(tick) for tick in ticks)
    decimals = next((count for count in range(12) if abs(round(step, count) - step) < 1e-6 * step), 12)
    is_extreme = largest >= 1e6 or largest < 1e-2

    def text(value: float) -> str:
        if abs(value) < step / 1e6:  # index * step is not exactly zero for every step
            return "0" if is_extreme else f"{0:.{decimals}f}"
        if is_extreme:
            mantissa, exponent = f"{value:.3e}".split("e")
            return f"{float(mantissa):g}e{int(exponent)}".replace("-", "−")
        return f"{value:,.{decimals}f}".replace("-", "−")

    return text


_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def _power_of_ten(value: float) -> str:
    exponent = round(math.log10(value))
    return {0: "1", 1: "10"}.get(exponent, "10" + str(exponent).translate(_SUPERSCRIPTS))
