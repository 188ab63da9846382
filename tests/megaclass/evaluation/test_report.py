"""The page is read as a browser reads it: parsed, its pictures decoded, its text searched."""

import base64
import dataclasses
import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from megaclass.evaluation.centres import CentreHealth
from megaclass.evaluation.protocol import SetResult
from megaclass.evaluation.protocols.pairs import result_of_pairs
from megaclass.evaluation.protocols.verification import ScoredPairs, verify_distances
from megaclass.evaluation.report.curves import passed_s, time_parts
from megaclass.evaluation.report.from_runs import ModelReport, ReportData
from megaclass.evaluation.report.page import comparison, render_report, script_digest, write_report
from megaclass.phases import PHASES

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
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.seen)

    def images(self) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.seen if name == "img"]

    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def _picture(shade: int, image_format: str = "JPEG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (12, 12), (shade % 256, 80, 120)).save(file, image_format)
    return file.getvalue()


def _scored(gap: float, seed: int, xnorm: float | None = None) -> ScoredPairs:
    rng = np.random.default_rng(seed)
    is_same = np.arange(_NUM_PAIRS) % 2 == 0
    distances = np.where(is_same, rng.normal(1 - gap, 0.2, _NUM_PAIRS), rng.normal(1 + gap, 0.2, _NUM_PAIRS)).clip(0, 4)
    verification = verify_distances(distances, is_same, xnorm=xnorm)
    return ScoredPairs(distances_N=distances, is_same_N=is_same, verification=verification)


def _pairs(name: str, gap: float, seed: int, xnorm: float | None = None) -> SetResult:
    pictures = [_picture(shade) for shade in range(2 * _NUM_PAIRS)]
    return result_of_pairs(name, f"/data/{name}.bin", _scored(gap, seed, xnorm), pictures.__getitem__)


def _health() -> CentreHealth:
    rng = np.random.default_rng(0)
    return CentreHealth(
        num_classes=1200,
        num_checked=1000,
        norms=rng.normal(1, 0.1, 1200).astype(np.float32),
        nearest=rng.uniform(0, 1, 1000).astype(np.float32),
        closest_pairs={(0, 3): 0.987, (1, 2): 0.9},
        names={0: "anna", 1: "bert", 2: "carl", 3: "anna <2>"},
        num_unusable=3,
    )


def _report() -> ReportData:
    metrics = [
        {
            "step": step,
            "loss": 9.0 / (1 + step),
            "learning_rate": 0.1,
            "images_per_second": 900.0 + step,
            **{f"{phase}_s": 0.5 * (phase == "data") for phase in PHASES},
            "forward_s": 1.0,
            "elapsed_s": 2.0 * step,
        }
        for step in range(50)
    ]
    identification = {
        "num_gallery": 40,
        "num_mated": 30,
        "num_unmated": 5,
        "rank_k": {"1": 0.9, "5": 1.0, "10": 1.0},
        "rank_k_95": {"1": [0.74, 0.97], "5": [0.89, 1.0], "10": [0.89, 1.0]},
        "tpir_at_fpir": {"0.1": None},
    }
    ours = ModelReport(
        name="ours",
        results=[
            _pairs("lfw", 0.4, 0, xnorm=17.25),
            _pairs("agedb_30", 0.3, 1),
            SetResult(name="gallery", kind="identification", path="g", numbers=identification),
            SetResult(name="broken", kind="pairs", path="broken.bin", error="Cannot decode image 3 of <broken.bin>."),
        ],
        metrics=[*metrics, {"step": 25, "verification_accuracy": 0.8}, {"step": 50, "verification_accuracy": 0.9}],
        facts={"Ranks": "2 × cpu", "Data": "<folder>", "Data fingerprint": "ab12cd"},
        config_text='[head]\nname = "<script>alert(1)</script>"\n',
        centres=_health(),
        sample_faces=[[_picture(row * 10 + column) for column in range(3)] for row in range(4)],
    )
    pixels = ModelReport(name="raw pixels", results=[_pairs("lfw", 0.1, 2)], is_baseline=True)
    return ReportData(
        title="run <demo> & more", models=[ours, pixels], versions={"megaclass": "0.1.0", "torch": "2.13.0"}
    )


def _two_runs() -> ReportData:
    report = _report()
    theirs = dataclasses.replace(report.models[0], name="theirs", results=[_pairs("lfw", 0.2, 5)], sample_faces=())
    return dataclasses.replace(report, models=[report.models[0], theirs])


def test_the_page_needs_nothing_from_outside_and_runs_its_own_script_alone():
    html = render_report(_report())
    page = Page(html)
    assert not re.search(r"https?://|//cdn|url\(|@import", html)
    assert page.count("script") == 1
    assert page.count("link") == page.count("iframe") == 0
    assert all(not name.startswith("on") for _, attributes in page.seen for name in attributes)
    policies = [one["content"] for name, one in page.seen if name == "meta" and one.get("http-equiv")]
    assert policies == [f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src '{script_digest()}'"]


def test_every_picture_decodes():
    page = Page(render_report(_report()))
    # 4 x 3 samples, and for each of two sets two images for 12 closest different and 12 farthest same pairs.
    assert len(page.images()) == 12 + 2 * 2 * 24
    for image in page.images():
        kind, encoded = re.fullmatch(r"data:image/(\w+);base64,(.+)", image["src"]).groups()
        with Image.open(io.BytesIO(base64.b64decode(encoded, validate=True))) as decoded:
            decoded.load()
            assert decoded.format.lower() == kind


@pytest.mark.parametrize(("image_format", "kind"), [("JPEG", "jpeg"), ("PNG", "png"), ("BMP", "png"), ("WEBP", "png")])
def test_pictures_keep_their_format_where_every_browser_shows_it(image_format, kind):
    given = _picture(5, image_format)
    report = ReportData(title="t", models=[ModelReport(name="m", sample_faces=[[given]])])
    (image,) = Page(render_report(report)).images()
    assert image["src"].startswith(f"data:image/{kind};base64,")
    if image_format in ("JPEG", "PNG"):
        assert image["src"].endswith(base64.b64encode(given).decode())


def test_numbers_of_all_sets_and_models_stand_beside_each_other():
    report = _report()
    words = Page(render_report(report)).words()
    for model in report.models:
        assert model.name in words
        for result in model.results:
            if result.kind == "pairs" and result.error is None:
                assert f"{100 * result.numbers['accuracy']:.2f} % ± {100 * result.numbers['accuracy_std']:.2f}" in words
                assert f"{result.numbers['auc']:.4f}" in words
    low, high = report.models[0].results[0].numbers["tar_at_far_95"]["1e-1"]
    assert f"[{100 * low:.1f}, {100 * high:.1f}]" in words
    assert "17.25" in words
    assert "not measurable" not in words, "rows without a number are named in a sentence"
    assert re.search(r"Not measurable with so few images: [^.]*TAR at FAR 1e-6\.", words)
    assert "rank-1 90.00 %" in words
    assert "90.00 % [74.0, 97.0]" in words


def test_a_set_that_was_not_evaluated_is_listed_with_the_reason():
    words = Page(render_report(_report())).words()
    assert "Not evaluated" in words
    assert "Cannot decode image 3 of <broken.bin>." in words


def test_all_charts_are_there_with_titles():
    page = Page(render_report(_report()))
    titles = [attributes["aria-label"] for name, attributes in page.seen if name == "svg"]
    assert titles == [
        *["ROC", "DET", "Similarity of pairs: ours"] * 2,
        *["Loss", "Verification during training", "Learning rate", "Throughput"],
        *["Length of the centres", "Nearest centre of another class"],
    ]


def test_several_models_lie_over_each_other_in_one_roc():
    html = render_report(_two_runs())
    roc = html[html.index('aria-label="ROC"') :]
    drawn = re.findall(r'class="line (series-\d)"', roc[: roc.index("</svg>")])
    assert drawn == ["series-1", "series-0"]
    toggles = re.findall(r'<button class="toggle"[^>]*data-series="(series-\d)"><i[^>]*></i>(\w+)', html)
    assert ("series-0", "ours") in toggles
    assert ("series-1", "theirs") in toggles


def test_health_of_the_centres_names_the_closest():
    words = Page(render_report(_report())).words()
    assert "0.987 anna · anna <2>" in words
    assert "1,200 classes; the nearest of another class was looked for from 1,000" in words
    assert "3 are zero or not finite" in words


def test_bold_marks_the_best_model_of_each_row_and_not_the_first():
    report = _report()
    better, worse = _pairs("lfw", 0.9, 1), _pairs("lfw", 0.05, 2)
    assert better.numbers["accuracy"] > worse.numbers["accuracy"] and better.numbers["eer"] < worse.numbers["eer"]
    models = [ModelReport(name=name, results=[one]) for name, one in (("worse", worse), ("better", better))]
    html = render_report(dataclasses.replace(report, models=models))
    best = re.findall(r'<td class="best">([^<]*)</td>', html)
    assert f"{100 * better.numbers['accuracy']:.2f} %" in best and f"{better.numbers['auc']:.4f}" in best
    assert f"{100 * better.numbers['eer']:.2f} %" in best
    assert f"{100 * worse.numbers['accuracy']:.2f} %" not in best
    assert "nth-child(2)" not in html
    # One model alone is the best of nothing; equal ones are all marked.
    alone = render_report(dataclasses.replace(report, models=models[:1]))
    assert 'class="best"' not in alone
    equal = render_report(dataclasses.replace(report, models=[models[0], dataclasses.replace(models[0], name="again")]))
    row = re.search(r'<tr><th scope="row">Accuracy</th>(.*?)</tr>', equal)
    assert row is not None and row[1].count('class="best"') == 2


def test_each_of_several_models_is_told_by_what_its_own_training_data_was():
    held_out = {"images": 9, "found": 0, "looked_at": 50, "training_images": 50, "is_held_out": True}
    seen = {**held_out, "found": 9, "is_held_out": False}
    result = _pairs("own", 0.3, 1)
    first, second = (
        ModelReport(name=name, results=[dataclasses.replace(result, numbers={**result.numbers, "training_data": said})])
        for name, said in (("first", held_out), ("second", seen))
    )
    report = _report()
    words = Page(render_report(dataclasses.replace(report, models=[first, second]))).words()
    assert "first: Its identities were held out of training" in words
    assert "second: WARNING: 9 of its 9 images are in the training data" in words
    alike = Page(render_report(dataclasses.replace(report, models=[first, dataclasses.replace(first, name="same")])))
    assert alike.words().count("Its identities were held out of training") == 1 and "first: Its" not in alike.words()


def test_evaluation_has_its_own_part_of_the_time():
    phases = {f"{phase}_s": 0.0 for phase in PHASES} | {"forward_s": 0.3}
    rows = [
        {"step": 10, "elapsed_s": 10.0, "evaluation_s": 6.0, **phases},
        {"step": 20, "elapsed_s": 12.0, **phases},
    ]
    # The clocks of the ranks add up to 3 s in the last two seconds of rank 0.
    assert time_parts(rows) == pytest.approx({"forward": 5.0, "evaluating": 6.0, "saving and other": 1.0})


def test_where_time_went_adds_up():
    # 98 s in all, a quarter of it waiting.
    parts = time_parts(_report().models[0].metrics)
    assert parts == pytest.approx({"data": 24.5, "forward": 49.0, "saving and other": 24.5})
    words = Page(render_report(_report())).words()
    assert "waiting for data 24.5 s (25%) forward 49.0 s (50%) saving and other 24.5 s (25%)" in words


def test_the_duration_of_a_resumed_run_is_the_sum_of_its_parts():
    rows = [{"step": 10, "elapsed_s": 10.0}, {"step": 20, "elapsed_s": 4.0}, {"step": 20, "verification_accuracy": 0.5}]
    assert sum(passed_s(rows)) == 14.0
    # Its first row after the resume came later than the last one before.
    slow_start = [{"step": 10, "elapsed_s": 10.0}, {"step": 20, "elapsed_s": 13.0}, {"step": 30, "elapsed_s": 15.0}]
    resumed = [{"event": "start", "step": 0}, {"event": "resume", "step": 10}]
    assert sum(passed_s(slow_start, resumed)) == 25.0
    assert sum(passed_s(slow_start)) == 15.0
    # A later resume from an earlier checkpoint took back what the one at step 15 had added.
    twice = [{"event": "resume", "step": 15}, {"event": "resume", "step": 10}]
    assert passed_s(slow_start, twice) == [10.0, 13.0, 2.0]


def test_several_runs_are_rows_of_one_table_with_results_speed_and_the_settings_that_differ():
    runs = [
        dataclasses.replace(
            _report().models[0],
            name=name,
            results=[_pairs("lfw", gap, 5)],
            facts={"Final loss": loss, "Ranks": "2"},
            config_text=f"[optimizer]\nlr = {lr}\nmomentum = 0.9\n[train]\nrun_dir = '{name}'\n",
        )
        for name, gap, loss, lr in (("a", 0.2, "1,234.5", 0.1), ("b", 0.4, "9.25", 0.2), ("c", 0.3, "–", 0.2))
    ]
    table = comparison(runs)
    assert table["columns"] == ["lfw", "Final loss", "optimizer.lr"], "what is the same in all runs is left out"
    by_name = {name: dict(zip(table["columns"], cells, strict=True)) for name, cells in table["rows"]}
    assert [name for name, cells in by_name.items() if cells["lfw"][2]] == ["b"], "the best is marked"
    assert [cells["Final loss"][1] for cells in by_name.values()] == [1234.5, 9.25, None]
    assert comparison(runs[:1]) == {}
    html = render_report(dataclasses.replace(_report(), models=runs))
    page = Page(html)
    assert [one.get("class") for name, one in page.seen if name == "table"].count("sortable") == 1
    assert "Runs compared" in page.words() and "All sets" not in page.words()


def test_the_model_stands_out_from_its_baseline_and_its_number_is_explained():
    html = render_report(_report())
    assert html.count('class="tile"') == 1 and html.count('class="tile baseline"') == 1
    accuracy = _report().models[0].results[0].numbers["accuracy"]
    said = f"the model says correctly in {accuracy:.1%} of cases whether both are of the same identity; guessing is right in"
    assert f"{said} 50%." in Page(html).words()


def test_text_from_outside_stays_text():
    page = Page(render_report(_report()))
    text = "".join(page.text)
    assert "run <demo> & more" in text
    assert '[head]\nname = "<script>alert(1)</script>"\n' in text
    assert "<folder>" in text
    assert "ab12cd" in text


def test_the_hardest_pairs_come_worst_first_and_wrong_ones_are_marked():
    scored = _scored(0.4, 0)
    distances, is_same = scored.distances_N, scored.is_same_N
    pictures = [_picture(shade) for shade in range(2 * _NUM_PAIRS)]
    model = ModelReport(name="m", results=[result_of_pairs("lfw", "lfw.bin", scored, pictures.__getitem__)])
    html = render_report(ReportData(title="t", models=[model]))
    shown = [int(image["alt"].split(",")[0].removeprefix("pair ")) for image in Page(html).images()]
    closest, farthest = shown[:24:2], shown[24::2]
    assert closest == sorted(np.flatnonzero(~is_same).tolist(), key=lambda pair: distances[pair])[:12]
    assert farthest == sorted(np.flatnonzero(is_same).tolist(), key=lambda pair: -distances[pair])[:12]
    threshold = scored.verification.threshold
    num_wrong = sum((distances[pair] < threshold) != is_same[pair] for pair in closest + farthest)
    assert num_wrong > 0
    marks = [one for name, one in Page(html).seen if name == "b" and one.get("class") == "wrong"]
    assert len(marks) == num_wrong + 1  # and one in the sentence that explains the mark


def test_what_is_missing_is_left_out():
    page = Page(render_report(ReportData(title="bare", models=[ModelReport(name="m")])))
    assert page.images() == []
    for title in ("Configuration", "Training", "All sets", "Class centres", "Run"):
        assert title not in page.words()


def test_a_loss_that_was_not_finite_does_not_stop_the_report():
    rows = [
        {"step": 0, "loss": 2.0},
        {"step": 1, "loss": None},
        {"step": 2, "loss": float("nan")},
        {"step": 3, "loss": 1.0},
    ]
    for some in (rows, rows[:1], rows[1:3]):
        Page(render_report(ReportData(title="t", models=[ModelReport(name="m", metrics=some)])))


def test_the_file_is_written_whole(tmp_path):
    path = tmp_path / "report.html"
    write_report(path, _report())
    write_report(path, _report())
    assert path.read_text(encoding="utf-8") == render_report(_report())
    assert list(tmp_path.iterdir()) == [path]
