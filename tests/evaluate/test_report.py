"""The page is read as a browser reads it: parsed, its pictures decoded, its text searched."""

import base64
import dataclasses
import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from megaclass.evaluate.report import ReportData, render_report, write_report
from megaclass.evaluate.verification import ScoredPairs, verify_distances

_NUM_PAIRS = 60
_VOID = {"meta", "img", "br", "link", "hr", "input"}


class Page(HTMLParser):
    """Text, tags and attributes; fails on a tag closed out of order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.seen)

    def images(self) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.seen if name == "img"]


def _picture(shade: int, image_format: str = "JPEG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (12, 12), (shade % 256, 80, 120)).save(file, image_format)
    return file.getvalue()


def _scored(name: str, gap: float, seed: int, xnorm: float | None = None) -> ScoredPairs:
    rng = np.random.default_rng(seed)
    is_same = np.arange(_NUM_PAIRS) % 2 == 0
    distances = np.where(is_same, rng.normal(1 - gap, 0.2, _NUM_PAIRS), rng.normal(1 + gap, 0.2, _NUM_PAIRS)).clip(0, 4)
    verification = verify_distances(distances, is_same, xnorm=xnorm)
    return ScoredPairs(name=name, distances_N=distances, is_same_N=is_same, verification=verification)


def _report() -> ReportData:
    return ReportData(
        title="run <demo> & more",
        metrics=[
            {"step": step, "loss": 9.0 / (1 + step), "learning_rate": 0.1, "images_per_second": 900.0 + step}
            for step in range(50)
        ]
        + [{"step": 50, "verification_accuracy": 0.9}],
        model=_scored("model", 0.4, 0, xnorm=17.25),
        baselines=[_scored("raw pixels", 0.1, 1), _scored("colour histograms", 0.05, 2)],
        pair_images=[_picture(shade) for shade in range(2 * _NUM_PAIRS)],
        sample_faces=[[_picture(row * 10 + column) for column in range(3)] for row in range(4)],
        facts={"Ranks": "2 × cpu", "Data": "<folder>"},
        config_text='[head]\nname = "<script>alert(1)</script>"\n',
        versions={"megaclass": "0.1.0", "torch": "2.13.0"},
    )


def test_the_page_needs_nothing_from_outside():
    html = render_report(_report())
    page = Page(html)
    assert not re.search(r"https?://|//cdn|url\(|@import", html)
    assert page.count("script") == page.count("link") == page.count("iframe") == 0
    assert all(not name.startswith("on") for _, attributes in page.seen for name in attributes)
    policies = [one["content"] for name, one in page.seen if name == "meta" and one.get("http-equiv")]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]


def test_every_picture_decodes():
    page = Page(render_report(_report()))
    # 4 x 3 samples, and two images for each of 12 closest different and 12 farthest same pairs.
    assert len(page.images()) == 12 + 2 * 24
    for image in page.images():
        kind, encoded = re.fullmatch(r"data:image/(\w+);base64,(.+)", image["src"]).groups()
        with Image.open(io.BytesIO(base64.b64decode(encoded, validate=True))) as decoded:
            decoded.load()
            assert decoded.format.lower() == kind


@pytest.mark.parametrize(("image_format", "kind"), [("JPEG", "jpeg"), ("PNG", "png"), ("BMP", "png"), ("WEBP", "png")])
def test_pictures_keep_their_format_where_every_browser_shows_it(image_format, kind):
    given = _picture(5, image_format)
    report = dataclasses.replace(_report(), pair_images=(), sample_faces=[[given]])
    (image,) = Page(render_report(report)).images()
    assert image["src"].startswith(f"data:image/{kind};base64,")
    if image_format in ("JPEG", "PNG"):
        assert image["src"].endswith(base64.b64encode(given).decode())


def test_numbers_of_the_model_stand_beside_those_of_the_baselines():
    report = _report()
    text = " ".join(Page(render_report(report)).text)
    for scored in (report.model, *report.baselines):
        assert scored.name in text
        assert f"{100 * scored.verification.accuracy:.2f} %" in text
        assert f"{scored.verification.auc:.4f}" in text
    assert "17.25" in text
    assert "TAR at FAR 0.1" in text
    assert "TAR at FAR 0.01 " not in text, "30 different pairs cannot show a FAR of 0.01"


def test_all_charts_are_there_with_titles():
    page = Page(render_report(_report()))
    titles = [attributes["aria-label"] for name, attributes in page.seen if name == "svg"]
    assert titles == ["ROC", "Similarity of same and different pairs", "Loss", "Learning rate", "Throughput"]


def test_text_from_outside_stays_text():
    page = Page(render_report(_report()))
    text = "".join(page.text)
    assert "run <demo> & more" in text
    assert '[head]\nname = "<script>alert(1)</script>"\n' in text
    assert "<folder>" in text


def test_the_hardest_pairs_come_worst_first_and_wrong_ones_are_marked():
    report = _report()
    distances, is_same = report.model.distances_N, report.model.is_same_N
    shown = [
        int(image["alt"].split(",")[0].removeprefix("pair "))
        for image in Page(render_report(report)).images()
        if image["alt"]
    ]
    closest, farthest = shown[:24:2], shown[24::2]
    assert closest == sorted(np.flatnonzero(~is_same).tolist(), key=lambda pair: distances[pair])[:12]
    assert farthest == sorted(np.flatnonzero(is_same).tolist(), key=lambda pair: -distances[pair])[:12]
    threshold = report.model.verification.threshold
    num_wrong = sum((distances[pair] < threshold) != is_same[pair] for pair in closest + farthest)
    assert num_wrong > 0
    marks = [one for name, one in Page(render_report(report)).seen if name == "b" and one.get("class") == "wrong"]
    assert len(marks) == num_wrong + 1  # and one in the sentence that explains the mark


def test_what_is_missing_is_left_out():
    bare = ReportData(title="bare", metrics=[], model=_scored("model", 0.4, 0))
    page = Page(render_report(bare))
    text = "".join(page.text)
    assert page.images() == []
    assert text.count("No values were recorded.") == 3
    assert "Configuration" not in text
    assert "Training images" not in text


def test_a_loss_that_was_not_finite_does_not_stop_the_report():
    rows = [
        {"step": 0, "loss": 2.0},
        {"step": 1, "loss": None},
        {"step": 2, "loss": float("nan")},
        {"step": 3, "loss": 1.0},
    ]
    Page(render_report(dataclasses.replace(_report(), metrics=rows)))
    Page(render_report(dataclasses.replace(_report(), metrics=rows[:1])))
    Page(render_report(dataclasses.replace(_report(), metrics=rows[1:3])))


def test_the_file_is_written_whole(tmp_path):
    path = tmp_path / "report.html"
    write_report(path, _report())
    write_report(path, _report())
    assert path.read_text(encoding="utf-8") == render_report(_report())
    assert list(tmp_path.iterdir()) == [path]
