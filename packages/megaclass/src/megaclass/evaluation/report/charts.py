"""Draws charts as SVG text: lines and histograms, axes with round ticks, no dependency.

Colours and fonts are CSS classes (`series-0`, `grid`, `axis-label`) of report.css, so one drawing serves the light and
the dark page. A drawing has coordinates of its own, `size` units wide and high. The page scales it to the width of its
column, so a drawing for a narrow column gets a smaller size to keep its text readable.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from html import escape

import numpy as np
from markupsafe import Markup
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
class Figure:
    """A chart with its title and legend."""

    title: str
    svg: Markup = field(default_factory=Markup)
    """Empty if there is nothing to draw."""
    legend: Sequence[tuple[str, str]] = ()
    """Name and CSS classes of each key."""
    has_toggles: bool = False
    """Pressing a key of the legend hides its line."""
    note: str = ""
    """Words below the chart that say what to look for."""


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


def linear_axis(label: str, values: Sequence[float], *, from_zero: bool = False, is_tight: bool = False) -> Axis:
    """Returns an axis over all finite values. It ends at round ticks, or with `is_tight` at the outermost values."""
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        # There is only one value: room around it gives the axis a length.
        margin = abs(high) / 2 or 0.5
        low, high = (low if from_zero else low - margin), high + margin
    step = _round_step((high - low) / 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(index * step for index in range(first, last + 1))
    if is_tight:
        inside = tuple(tick for tick in ticks if low - step / 1e6 <= tick <= high + step / 1e6)
        return Axis(label=label, low=low, high=high, ticks=inside, tick_text=_text_for_step(step, ticks))
    return Axis(label=label, low=ticks[0], high=ticks[-1], ticks=ticks, tick_text=_text_for_step(step, ticks))


def with_epochs(axis: Axis, steps_per_epoch: float) -> Axis:
    """Adds a second scale in epochs to an axis in steps; nothing if it covers no whole number of epochs."""
    epochs = linear_axis("epoch", [axis.low / steps_per_epoch, axis.high / steps_per_epoch], is_tight=True)
    ticks = tuple((tick * steps_per_epoch, epochs.tick_text(tick)) for tick in epochs.ticks)
    return replace(axis, epochs=ticks)


def fixed_axis(label: str, ticks: Sequence[float], *, tick_text: Callable[[float], str] | None = None) -> Axis:
    """Returns an axis that ends at its first and last tick."""
    return Axis(
        label=label,
        low=ticks[0],
        high=ticks[-1],
        ticks=tuple(ticks),
        tick_text=tick_text or _text_for_step(ticks[1] - ticks[0], ticks),
    )


def log_axis(label: str, low: float, high: float) -> Axis:
    """Returns a logarithmic axis between two positive values, with a tick at each power of ten."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    ticks = tuple(10.0**exponent for exponent in range(first, last + 1))
    return Axis(label=label, low=low, high=high, ticks=ticks, is_log=True, tick_text=_power_of_ten)


def line_chart(
    series: Sequence[Series],
    x_axis: Axis,
    y_axis: Axis,
    *,
    title: str,
    size: tuple[int, int] = WIDE,
    band: tuple[float, float] | None = None,
) -> Markup:
    """Draws lines over two axes, later ones over earlier ones, and a shaded range of values behind them."""
    plot = _Plot(x_axis=x_axis, y_axis=y_axis, size=size)
    lines = [] if band is None else [plot.band(*band)]
    lines += [
        f'<path class="line {escape(one.css)}" data-name="{escape(one.name)}" d="{_line_path(one, plot)}"/>'
        for one in series
    ]
    return plot.svg(lines, title, has_values=True)


def histogram_chart(
    groups: Sequence[tuple[str, NDArray[np.float64]]],
    edges: NDArray[np.float64],
    x_axis: Axis,
    *,
    title: str,
    y_label: str = "share of pairs, %",
    marker: float | None = None,
    size: tuple[int, int] = WIDE,
) -> Markup:
    """Draws one filled outline per group (CSS class, share of the group in each bin), and a dashed line at `marker`."""
    y_axis = linear_axis(y_label, [0.0, *(100 * float(shares.max()) for _, shares in groups)], from_zero=True)
    plot = _Plot(x_axis=x_axis, y_axis=y_axis, size=size)
    drawn = []
    for css, shares in groups:
        outline = zip(np.repeat(edges, 2), [0.0, *np.repeat(100 * shares, 2), 0.0], strict=True)
        drawn.append(f'<path class="area {escape(css)}" d="M{"L".join(plot.point(x, y) for x, y in outline)}Z"/>')
    if marker is not None:
        at = plot.x(marker)
        drawn.append(f'<line class="marker" x1="{at:.1f}" x2="{at:.1f}" y1="{plot.top}" y2="{plot.bottom}"/>')
    return plot.svg(drawn, title)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plot:
    """The coordinates of a drawing with two axes, and the frame around its content."""

    x_axis: Axis
    y_axis: Axis
    size: tuple[int, int]

    @property
    def bottom(self) -> int:
        return self.size[1] - _BOTTOM

    @property
    def top(self) -> int:
        """Leaves room for the scale in epochs."""
        return _TOP + (_EPOCHS_HEIGHT if self.x_axis.epochs else 0)

    @property
    def right(self) -> int:
        return self.size[0] - _RIGHT

    def x(self, value: float) -> float:
        return _LEFT + min(max(self.x_axis.share(value), 0.0), 1.0) * (self.right - _LEFT)

    def y(self, value: float) -> float:
        return self.bottom - min(max(self.y_axis.share(value), 0.0), 1.0) * (self.bottom - self.top)

    def point(self, x: float, y: float) -> str:
        return f"{self.x(float(x)):.1f} {self.y(float(y)):.1f}"

    def band(self, low: float, high: float) -> str:
        """Returns a rectangle over the values from low to high, as far as they lie in the drawing."""
        top, bottom = self.y(high), self.y(low)
        return (
            f'<rect class="band" x="{_LEFT}" y="{top:.1f}" width="{self.right - _LEFT}" '
            f'height="{max(bottom - top, 0):.1f}"/>'
        )

    def svg(self, drawn: Sequence[str], title: str, *, has_values: bool = False) -> Markup:
        width, height = self.size
        middle_x, middle_y = (_LEFT + self.right) / 2, (self.top + self.bottom) / 2
        # Safe to mark as markup: all text of the drawing is escaped here.
        parts = [
            f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}"'
            f"{self._scales() if has_values else ''}>",
            *(self._y_tick(tick) for tick in self.y_axis.ticks),
            *(self._x_tick(tick) for tick in self.x_axis.ticks),
            *(self._epoch(at, text) for at, text in self.x_axis.epochs),
            *(
                [f'<text class="tick" x="{_LEFT - 18}" y="12" text-anchor="end">epoch</text>']
                * bool(self.x_axis.epochs)
            ),
            *drawn,
            f'<line class="axis" x1="{_LEFT}" x2="{self.right}" y1="{self.bottom}" y2="{self.bottom}"/>',
            f'<text class="axis-label" x="{middle_x:g}" y="{height - 8}" text-anchor="middle">'
            f"{escape(self.x_axis.label)}</text>",
            f'<text class="axis-label" transform="translate(12 {middle_y:g}) rotate(-90)" text-anchor="middle">'
            f"{escape(self.y_axis.label)}</text></svg>",
        ]
        return Markup("".join(parts))

    def _scales(self) -> str:
        """Returns the attributes by which the script turns a position into the values at it."""
        scales = [
            ("x", self.x_axis, _LEFT, self.right),
            ("y", self.y_axis, self.bottom, self.top),
        ]
        return "".join(
            f' data-{name}="{axis.low:.9g} {axis.high:.9g} {first} {last} {int(axis.is_log)}" '
            f'data-{name}-label="{escape(axis.label)}"'
            for name, axis, first, last in scales
        )

    def _epoch(self, at: float, text: str) -> str:
        x = self.x(at)
        return (
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{self.top}" y2="{self.bottom}"/>'
            f'<text class="tick" x="{x:.1f}" y="12" text-anchor="middle">{escape(text)}</text>'
        )

    def _x_tick(self, tick: float) -> str:
        at = self.x(tick)
        return (
            f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{self.bottom}" y2="{self.bottom + 4}"/>'
            f'<text class="tick" x="{at:.1f}" y="{self.bottom + 17}" text-anchor="middle">'
            f"{escape(self.x_axis.tick_text(tick))}</text>"
        )

    def _y_tick(self, tick: float) -> str:
        at = self.y(tick)
        return (
            f'<line class="grid" x1="{_LEFT}" x2="{self.right}" y1="{at:.1f}" y2="{at:.1f}"/>'
            f'<text class="tick" x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">'
            f"{escape(self.y_axis.tick_text(tick))}</text>"
        )


def _line_path(series: Series, plot: _Plot) -> str:
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(series.xs, series.ys, strict=True):
        if math.isfinite(x) and math.isfinite(y):
            pieces[-1].append((plot.x(x), plot.y(y)))
        elif pieces[-1]:
            pieces.append([])
    return "".join("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in _thinned(piece)) for piece in pieces if piece)


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
