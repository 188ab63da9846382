import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from megaclass.evaluation.report.charts import (
    NARROW,
    WIDE,
    Figure,
    Series,
    histogram,
    linear_axis,
    log_axis,
    smoothed,
)
from megaclass.evaluation.report.templates import environment


def svg_of(figure: Figure) -> str:
    return str(environment().get_template("evaluation/report/charts.html.j2").module.chart(figure))


def _tick_texts(axis):
    return [axis.tick_text(tick) for tick in axis.ticks]


def _points(svg: str) -> list[list[tuple[float, float]]]:
    """The coordinates of each path, read from the drawing."""
    paths = [element.get("d") for element in ElementTree.fromstring(svg).iter("path")]
    return [[(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", path)] for path in paths]


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([0.0, 23.4], ["0", "5", "10", "15", "20", "25"]),
        ([0.0, 0.1], ["0.00", "0.02", "0.04", "0.06", "0.08", "0.10"]),
        ([0.0, 1631.0], ["0", "500", "1,000", "1,500", "2,000"]),
        ([-0.31, 0.32], ["−0.4", "−0.2", "0.0", "0.2", "0.4"]),
        ([0.0, 3e-4], ["0", "1e−4", "2e−4", "3e−4"]),
        ([0.0, 4e7], ["0", "1e7", "2e7", "3e7", "4e7"]),
        ([5.0, 5.0], ["2", "3", "4", "5", "6", "7", "8"]),
        ([], ["−0.6", "−0.4", "−0.2", "0.0", "0.2", "0.4", "0.6"]),
        ([math.nan, 0.0, math.inf, 10.0], ["0", "2", "4", "6", "8", "10"]),
    ],
)
def test_ticks_are_round_and_hold_all_finite_values(values, texts):
    axis = linear_axis("x", values)
    assert _tick_texts(axis) == texts
    assert all(axis.low <= value <= axis.high for value in values if math.isfinite(value))


def test_an_axis_from_zero_shows_zero_even_if_nothing_else_is_there():
    assert linear_axis("y", [7.0, 9.0], from_zero=True).low == 0
    assert linear_axis("y", [0.0, 0.0], from_zero=True).low == 0
    assert linear_axis("y", [7.0, 7.0], from_zero=True).low == 0


def test_a_tight_axis_ends_on_the_values():
    axis = linear_axis("step", [3.0, 1195.0], is_tight=True)
    assert (axis.low, axis.high) == (3.0, 1195.0)
    assert _tick_texts(axis) == ["250", "500", "750", "1,000"]


def test_ticks_at_a_given_distance_may_extend_the_axis():
    axis = linear_axis("cosine", [-0.55, 1.0], step=0.2)
    assert _tick_texts(axis) == ["−0.6", "−0.4", "−0.2", "0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]


def test_a_log_axis_has_a_tick_at_each_power_of_ten():
    axis = log_axis("far", 1 / 1500, 1.0)
    assert _tick_texts(axis) == ["10⁻³", "10⁻²", "10⁻¹", "1"]
    assert axis.share(1 / 1500) == 0
    assert axis.share(0.0) == 0
    assert axis.share(1.0) == 1


@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_lines_lie_inside_the_drawing_where_their_values_are(size):
    xs = [0.0, 1.0, 2.0]
    line = Series(name="a", xs=xs, ys=[0.0, 1.0, 0.5])
    figure = Figure(title="t", lines=[line], x=linear_axis("x", xs), y=linear_axis("y", [0, 1], step=0.5), size=size)
    ((first, second, third),) = _points(svg_of(figure))
    assert first[0] < second[0] < third[0] <= size[0]
    assert second[0] == pytest.approx((first[0] + third[0]) / 2, abs=0.1)
    assert first[1] > third[1] > second[1] >= 0  # the y of a drawing points down
    assert third[1] == pytest.approx((first[1] + second[1]) / 2, abs=0.1)


def test_a_value_that_is_not_finite_leaves_a_gap():
    line = Series(name="a", xs=[0, 1, 2, 3, 4], ys=[math.nan, 1.0, math.inf, 0.5, 0.2])
    figure = Figure(title="t", lines=[line], x=linear_axis("x", [0, 4]), y=linear_axis("y", [0, 1]))
    path = ElementTree.fromstring(svg_of(figure)).find("path").get("d")
    assert (path.count("M"), path.count("L")) == (2, 1)


def test_thinning_a_long_line_keeps_its_spikes_and_ends():
    ys = [0.0] * 100_000
    ys[61_803] = 1.0
    xs = list(range(len(ys)))
    x, y = linear_axis("x", xs, is_tight=True), linear_axis("y", [0, 1])
    (points,) = _points(svg_of(Figure(title="t", lines=[Series(name="a", xs=xs, ys=ys)], x=x, y=y)))
    assert len(points) < 4 * WIDE[0]
    heights = [y for _, y in points]
    assert heights.count(min(heights)) == 1
    assert (points[0][0], points[-1][0]) == (66, WIDE[0] - 20)


def test_the_outline_of_a_histogram_has_the_heights_of_its_bins():
    shares = np.array([0.75, 0.25])
    edges = np.array([0.0, 0.5, 1.0])
    figure = histogram("t", [("series-0", shares)], edges, linear_axis("x", [0, 1], step=0.5), marker=0.5)
    (outline,) = _points(svg_of(figure))
    assert len(outline) == 6
    base, high, low = outline[0][1], outline[1][1], outline[3][1]
    assert (base - high) == pytest.approx(3 * (base - low), abs=0.3)  # 75 % and 25 %


def test_titles_and_labels_are_escaped():
    x, y = linear_axis("<x>", [0, 1]), linear_axis("a & b", [0, 1])
    drawing = ElementTree.fromstring(svg_of(Figure(title='"quoted" <title>', x=x, y=y)))
    assert drawing.get("aria-label") == '"quoted" <title>'
    assert {"<x>", "a & b"} <= {element.text for element in drawing.iter("text")}


def test_smoothing_is_a_centred_mean_that_leaves_out_what_is_not_finite():
    assert smoothed([1.0, 2.0, 6.0, 3.0], span=0) == [1, 2, 6, 3]
    assert smoothed([1.0, 2.0, 6.0, 4.0], span=1) == pytest.approx([1.5, 3, 4, 5])
    averages = smoothed([1.0, math.nan, 3.0], span=1)
    assert averages[0] == 1
    assert math.isnan(averages[1])
    assert averages[2] == 3
    assert smoothed([], span=3) == []
