"""The report's part on evaluation sets: one table of all, and a tab for each with ROC, histograms and hardest pairs."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from megaclass.evaluate.report.charts import Series, fixed_axis, histogram_chart, line_chart, log_axis
from megaclass.evaluate.report.parts import best_marked, colour, figure, image, percent, section, table, tabs
from megaclass.evaluate.results import Curves, HardPair, SetResult
from megaclass.evaluate.training_overlap import training_data_line

Column = tuple[str, SetResult | None]
"""Name of a model, and what it did on a set; None where it was never evaluated on it."""
_ABSENT = "–"
_NOT_MEASURABLE = "not measurable"
WRONG_MARK = '<b class="wrong">wrong</b>'


def set_sections(models: Sequence[tuple[str, Sequence[SetResult], bool]]) -> list[str]:
    """models: name, results, and whether it is a baseline, which has no pictures of its own."""
    names = list(dict.fromkeys(result.name for _, results, _ in models for result in results))
    if not names:
        return []
    by_model = [
        ({result.name: result for result in results}, title, is_baseline) for title, results, is_baseline in models
    ]
    panels = []
    for name in names:
        columns: list[Column] = [(title, results.get(name)) for results, title, _ in by_model]
        baselines = {title for _, title, is_baseline in by_model if is_baseline}
        panels.append((name, _panel(columns, baselines)))
    overview = _overview(names, [(title, results) for results, title, _ in by_model])
    return [section("All sets", overview, _failures(models)), section("Set by set", tabs("sets", panels))]


def headline(result: SetResult) -> str:
    """The one number people quote for such a set."""
    if result.error is not None:
        return "not evaluated"
    numbers = result.numbers
    if result.kind == "pairs":
        return f"{percent(numbers['accuracy'])} ± {100 * numbers['accuracy_std']:.2f}"
    if result.kind == "templates":
        tar = numbers["tar_at_far"].get("1e-4")
        return f"TAR {_share(tar)} at FAR 1e-4"
    if result.kind == "identification":
        return f"rank-1 {_share(numbers['rank_k']['1'])}"
    size = max(numbers["rank_k"], key=int)
    return f"rank-1 {_share(numbers['rank_k'][size]['1'])} of {int(size):,}"


def _headline_value(result: SetResult) -> float | None:
    """The number in the headline: the higher, the better."""
    if result.error is not None:
        return None
    numbers = result.numbers
    value: float | None
    if result.kind == "pairs":
        value = numbers["accuracy"]
    elif result.kind == "templates":
        value = numbers["tar_at_far"].get("1e-4")
    elif result.kind == "identification":
        value = numbers["rank_k"]["1"]
    else:
        value = numbers["rank_k"][max(numbers["rank_k"], key=int)]["1"]
    return value


def _overview(names: Sequence[str], models: Sequence[tuple[str, Mapping[str, SetResult]]]) -> str:
    rows = []
    for name in names:
        found = [results.get(name) for _, results in models]
        cells = [_ABSENT if one is None else headline(one) for one in found]
        rows.append((name, best_marked(cells, [None if one is None else _headline_value(one) for one in found])))
    return table([title for title, _ in models], rows)


def _failures(models: Sequence[tuple[str, Sequence[SetResult], bool]]) -> str:
    failed = [
        f"<li><b>{escape(result.name)}</b> ({escape(title)}): {escape(result.error)}</li>"
        for title, results, _ in models
        for result in results
        if result.error is not None
    ]
    return f'<h3 class="wrong">Not evaluated</h3><ul class="failed">{"".join(failed)}</ul>' if failed else ""


def _panel(columns: Sequence[Column], baselines: set[str]) -> str:
    done = [(place, title, result) for place, (title, result) in enumerate(columns) if result and result.error is None]
    if not done:
        return '<p class="empty">Not evaluated: see above.</p>'
    kind = done[0][2].kind
    alike = [(place, title, result) for place, title, result in done if result.kind == kind]
    parts = [_lead(alike[0][2]), _NUMBERS[kind]([(title, result.numbers) for _, title, result in alike])]
    drawn = [(place, title, result.curves) for place, title, result in alike if result.curves is not None]
    if drawn:
        figures = [_roc_figure(drawn)]
        figures += [_histogram_figure(title, curves) for _, title, curves in drawn if title not in baselines]
        parts.append(f'<div class="charts">{"".join(figures)}</div>')
    pictured = [(title, result) for _, title, result in alike if result.hard_pairs and title not in baselines]
    parts += [_hard_pairs(title, result, is_alone=len(pictured) == 1) for title, result in pictured]
    return "".join(parts)


def _lead(result: SetResult) -> str:
    numbers = result.numbers
    if result.kind == "pairs":
        folds = len(numbers["fold_accuracies"])
        text = (
            f"{numbers['num_pairs']:,} pairs, {numbers['num_same']:,} of the same identity. Accuracy: the threshold is "
            f"chosen on {folds - 1} folds and judged on the one left out. In brackets: 95 % confidence."
        )
        if said := training_data_line(numbers):
            text = f"{text} {said}"
    elif result.kind == "templates":
        text = f"{numbers['num_pairs']:,} pairs of templates, {numbers['num_same']:,} of the same person."
    elif result.kind == "identification":
        text = (
            f"{numbers['num_gallery']:,} in the gallery; {numbers['num_mated']:,} probes have a mate there, "
            f"{numbers['num_unmated']:,} have none."
        )
        if said := probes_in_gallery_line(numbers):
            text = f"{text} {said}"
    else:
        text = f"{numbers['num_pairs']:,} pairs of {numbers['num_probes']:,} probe images among distractors."
    return f"<p>{escape(text)}</p>"


def probes_in_gallery_line(numbers: Mapping[str, Any]) -> str:
    """Empty where no probe is in the gallery."""
    num_inside = numbers.get("num_probes_in_gallery", 0)
    return (
        f"{num_inside:,} probes are in the gallery themselves: each was compared with the others." if num_inside else ""
    )


def _pair_numbers(columns: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    rows = [
        ("Accuracy", best_marked([percent(n["accuracy"]) for _, n in columns], [n["accuracy"] for _, n in columns])),
        ("Deviation over folds", [percent(n["accuracy_std"]) for _, n in columns]),
        *_rate_rows(columns),
        *_published_rows(columns),
        ("Best threshold (cosine)", [f"{1 - n['threshold'] / 2:.3f}" for _, n in columns]),
    ]
    if any(n.get("xnorm") is not None for _, n in columns):
        rows.append(("XNorm", [_ABSENT if n.get("xnorm") is None else f"{n['xnorm']:.2f}" for _, n in columns]))
    return table([title for title, _ in columns], rows)


def _published_rows(columns: Sequence[tuple[str, Mapping[str, Any]]]) -> list[tuple[str, list[str]]]:
    """What InsightFace prints, for comparison; left out where too few different pairs make it a matter of luck."""
    if all(n["tar_at_far"].get("1e-3") is None for _, n in columns):
        return []
    return [("TAR at FAR 1e-3, published grid", _shares([n.get("published_tar_at_far_1e-3") for _, n in columns]))]


def _rate_rows(columns: Sequence[tuple[str, Mapping[str, Any]]]) -> list[tuple[str, list[str]]]:
    rows = [
        ("Area under the ROC", best_marked([f"{n['auc']:.4f}" for _, n in columns], [n["auc"] for _, n in columns])),
        (
            "Equal error rate",
            best_marked([percent(n["eer"]) for _, n in columns], [n["eer"] for _, n in columns], is_lower_better=True),
        ),
    ]
    for far in columns[0][1]["tar_at_far"]:
        cells = [share_with_interval(n["tar_at_far"].get(far), n.get("tar_at_far_95", {}).get(far)) for _, n in columns]
        rows.append((f"TAR at FAR {far}", best_marked(cells, [n["tar_at_far"].get(far) for _, n in columns])))
    return rows


def _template_numbers(columns: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    rows = _rate_rows(columns)
    for gallery in columns[0][1].get("identification", {}):
        for key, title in (("rank_k", "rank-{}"), ("tpir_at_fpir", "TPIR at FPIR {}")):
            for k in columns[0][1]["identification"][gallery][key]:
                found = [n.get("identification", {}).get(gallery, {}).get(key, {}) for _, n in columns]
                cells = _shares([shares.get(k) for shares in found])
                rows.append((f"1:N {gallery}, {title.format(k)}", cells))
    for fpir in columns[0][1].get("published_tpir_at_fpir", {}):
        cells = _shares([n.get("published_tpir_at_fpir", {}).get(fpir) for _, n in columns])
        rows.append((f"1:N joined, TPIR at FPIR {fpir}, published threshold", cells))
    return table([title for title, _ in columns], rows)


def _identification_numbers(columns: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    rows = []
    for k in columns[0][1]["rank_k"]:
        cells = [share_with_interval(n["rank_k"].get(k), n.get("rank_k_95", {}).get(k)) for _, n in columns]
        rows.append((f"Rank-{k}", best_marked(cells, [n["rank_k"].get(k) for _, n in columns])))
    rows += [
        (f"TPIR at FPIR {fpir}", _shares([n["tpir_at_fpir"].get(fpir) for _, n in columns]))
        for fpir in columns[0][1]["tpir_at_fpir"]
    ]
    return table([title for title, _ in columns], rows)


def _distractor_numbers(columns: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    rows = []
    for size, ranks in columns[0][1]["rank_k"].items():
        for k in ranks:
            cells = _shares([n["rank_k"].get(size, {}).get(k) for _, n in columns])
            rows.append((f"Rank-{k}, {int(size):,} distractors", cells))
    return table([title for title, _ in columns], rows)


_NUMBERS: dict[str, Callable[[Sequence[tuple[str, Mapping[str, Any]]]], str]] = {
    "pairs": _pair_numbers,
    "templates": _template_numbers,
    "identification": _identification_numbers,
    "distractors": _distractor_numbers,
}


def _share(share: float | None) -> str:
    return _NOT_MEASURABLE if share is None else percent(share)


def _shares(shares: Sequence[float | None]) -> list[str]:
    """One a column, the highest marked."""
    return best_marked([_share(share) for share in shares], shares)


def share_with_interval(share: float | None, ends: Sequence[float] | None) -> str:
    """The share, and in brackets where it lies with 95 % confidence."""
    if share is None or ends is None:
        return _share(share)
    return f"{percent(share)} [{100 * ends[0]:.1f}, {100 * ends[1]:.1f}]"


def _roc_figure(drawn: Sequence[tuple[int, str, Curves]]) -> str:
    curves = []
    for place, title, one in drawn:
        # A log axis has no zero: of the points without a false accept only the last, highest one is drawn, at the edge.
        start = int(np.flatnonzero(one.far == 0)[-1])
        curves.append(Series(name=title, xs=one.far[start:].tolist(), ys=one.tar[start:].tolist(), css=colour(place)))
    most_different = max(one.num_different for _, _, one in drawn)
    # Good models differ near the top: the axis begins at the fifth below the lowest point drawn.
    lowest = min(4, int(5 * min(min(curve.ys) for curve in curves)))
    svg = line_chart(
        # The first model is drawn last, over the others.
        curves[::-1],
        log_axis("false accept rate", 1 / max(most_different, 10), 1.0),
        fixed_axis("true accept rate", [fifth / 5 for fifth in range(lowest, 6)]),
        title="ROC",
    )
    return figure("ROC", svg, [(curve.name, curve.css) for curve in curves], has_toggles=True)


def _histogram_figure(title: str, curves: Curves) -> str:
    lowest = round(5 * float(curves.edges[0]))
    svg = histogram_chart(
        [("series-1", curves.different), ("series-0", curves.same)],
        curves.edges,
        fixed_axis("cosine similarity", [fifth / 5 for fifth in range(lowest, 6)]),
        title=f"Similarity of pairs: {title}",
        marker=curves.threshold,
    )
    legend = [("same identity", "series-0"), ("different", "series-1"), (f"threshold {curves.threshold:.3f}", "marker")]
    return figure(f"Similarity of pairs: {title}", svg, legend)


def _hard_pairs(title: str, result: SetResult, *, is_alone: bool) -> str:
    assert result.curves is not None
    different = [hard for hard in result.hard_pairs if not hard.is_same]
    same = [hard for hard in result.hard_pairs if hard.is_same]
    whose = "" if is_alone else f" of {escape(title)}"
    return (
        f"<h3>Hardest pairs{whose}</h3><p>Numbers are cosine similarities; {WRONG_MARK} marks a pair that the best "
        f"threshold, {result.curves.threshold:.3f}, puts on the wrong side.</p>"
        f'<div class="columns"><div><h4>Different, yet closest</h4>{_pairs(different)}</div>'
        f"<div><h4>Same, yet farthest</h4>{_pairs(same)}</div></div>"
    )


def _pairs(hard_pairs: Sequence[HardPair]) -> str:
    cards = []
    for hard in hard_pairs:
        pictures = "".join(
            image(picture, f"pair {hard.pair}, {side} image")
            for side, picture in zip(("first", "second"), hard.pictures, strict=True)
        )
        names = f'<div class="quiet names">{escape(" · ".join(hard.names))}</div>' if any(hard.names) else ""
        cards.append(
            f'<div class="pair"><div class="faces">{pictures}</div>'
            f'<div class="caption"><span>{hard.similarity:.3f} {WRONG_MARK if hard.is_wrong else ""}</span>'
            f'<span class="quiet">pair {hard.pair}</span></div>{names}</div>'
        )
    return f'<div class="pairs">{"".join(cards)}</div>'
