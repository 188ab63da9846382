"""Classification against loops in float64 over all images and classes, on one rank and on several."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megaclass.checkpoint.class_names import ClassList
from megaclass.cli.main import main
from megaclass.data.sources.open_source import open_source
from megaclass.errors import DataError
from megaclass.evaluation.centres import centres_in_memory
from megaclass.evaluation.protocol import EvaluationSet, Evaluator
from megaclass.evaluation.protocols.classification import (
    ClassificationProtocol,
    calibration_error,
    coverage_points,
    fitted_scale,
    labelled_images,
    numbers_of,
)
from megaclass.evaluation.results import read_results, remarks_on
from megaclass.evaluation.search import search
from megaclass.evaluation.sets import classification_set

_CPU = torch.device("cpu")
_CLASSES, _PER_CLASS, _WIDTH = 37, 3, 8


def _case(num_images: int = 203) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Embeddings, their classes (-1: unknown), centres with three sub-centres each, and training images per class."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(_CLASSES * _PER_CLASS, _WIDTH)) * rng.uniform(0.1, 9, (_CLASSES * _PER_CLASS, 1))
    centres[5] = 0  # one sub-centre that was never trained
    labels = rng.integers(-1, _CLASSES, num_images)
    labels[:15] = -1
    rows = np.where(labels[:, None] >= 0, centres[labels * _PER_CLASS], 0)
    rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)
    rows = rows + rng.normal(scale=0.4, size=rows.shape)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows.astype(np.float32), labels, centres.astype(np.float32), rng.integers(0, 12, _CLASSES)


def _on_this_rank() -> dict:
    rows, labels, centres, counts = _case()
    shard = centres_in_memory(torch.from_numpy(centres), [str(c) for c in range(_CLASSES)]).shard()
    rows_ND = torch.from_numpy(rows)
    scale, fitted = fitted_scale(rows_ND, labels, shard.shard, device=_CPU)
    found = search(rows_ND, shard.shard, k=5, device=_CPU, probe_labels_P=labels, scale=scale)
    numbers = numbers_of(found, labels, scale=scale, fitted=fitted, num_images_C=counts)
    return numbers | {"fitted": fitted.tolist(), "best": found.other_indices_Pk[:, 0].tolist()}


def _cosines(rows: np.ndarray, centres: np.ndarray) -> np.ndarray:
    unit = centres.astype(np.float64) / np.maximum(np.linalg.norm(centres.astype(np.float64), axis=1), 1e-30)[:, None]
    return (rows.astype(np.float64) @ unit.T).reshape(len(rows), _CLASSES, _PER_CLASS).max(2)


def _check(got: dict) -> None:
    rows, labels, centres, counts = _case()
    cosines = _cosines(rows, centres)
    known = np.flatnonzero(labels >= 0)
    places = np.array([(np.delete(cosines[n], labels[n]) >= cosines[n, labels[n]]).sum() for n in known])
    is_right = places == 0
    assert 0.3 < is_right.mean() < 0.95, "the case must be neither easy nor hopeless"
    assert got["top_k"] == {"1": pytest.approx(is_right.mean()), "5": pytest.approx((places < 5).mean())}
    per_class = [is_right[labels[known] == c].mean() for c in np.unique(labels[known])]
    assert got["mean_per_class"] == pytest.approx(np.mean(per_class))
    assert (got["num_images"], got["num_unknown_images"]) == (len(known), (labels < 0).sum())
    groups = {"0": (0, 0), "1": (1, 1), "2": (2, 2), "3-4": (3, 4), "5-8": (5, 8), "9-16": (9, 16)}
    assert list(got["by_training_images"]) == list(groups)
    for name, (low, high) in groups.items():
        here = (counts[labels[known]] >= low) & (counts[labels[known]] <= high)
        assert got["by_training_images"][name]["images"] == here.sum()
        assert got["by_training_images"][name]["top_1"] == pytest.approx(is_right[here].mean())

    # The temperature: no other one makes the fitted images more likely.
    def loss(scale: float, some: np.ndarray) -> float:
        return np.mean([np.log(np.exp(scale * cosines[n]).sum()) - scale * cosines[n, labels[n]] for n in some])

    fitted = np.array(got["fitted"])
    assert len(fitted) == len(known) // 2 == got["num_fitted"]
    scale = 1 / got["temperature"]
    assert loss(scale, fitted) <= min(loss(s, fitted) for s in np.geomspace(1, 256, 200)) + 1e-6
    chances = np.exp(scale * cosines) / np.exp(scale * cosines).sum(1, keepdims=True)
    confidence = chances.max(1)[known]
    judged = ~np.isin(known, fitted)
    want = 0.0
    for low in range(15):
        here = judged & (np.floor(confidence * 15).astype(int) == low)
        if here.any():
            want += here.sum() / judged.sum() * abs(is_right[here].mean() - confidence[here].mean())
    assert got["calibration_error"] == pytest.approx(want, abs=1e-6)

    by_confidence = is_right[np.argsort(-confidence, kind="stable")]
    for point in got["coverage"]:
        kept = math.ceil(point["coverage"] * len(known) - 1e-9)
        assert point["accuracy"] == pytest.approx(by_confidence[:kept].mean())
        assert (confidence >= point["threshold"] - 1e-6).sum() == kept

    impostors, best = cosines[labels < 0].max(1), cosines[known].max(1)
    assert got["reject_by"] == "unknown images"
    assert list(got["reject"]) == ["0.1"]
    allowed = min(t for t in impostors if (impostors > t).mean() <= 0.1)
    assert got["reject"]["0.1"]["threshold"] == pytest.approx(allowed, abs=1e-6)
    assert got["reject"]["0.1"]["kept"] == pytest.approx((is_right & (best > allowed)).mean())


def test_the_numbers_are_those_of_looping_over_all_classes():
    _check(_on_this_rank())


def test_blocks_are_joined(monkeypatch):
    monkeypatch.setattr("megaclass.evaluation.search._MAX_GALLERY_BLOCK", 8)
    monkeypatch.setattr("megaclass.evaluation.search._BLOCK_BYTES", {"cpu": 200})
    _check(_on_this_rank())


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_centres_may_be_spread_over_ranks(run_ranks, num_ranks):
    found = run_ranks(num_ranks, _on_this_rank)
    for got in found:
        _check(got)
        assert json.dumps(got) == json.dumps(found[0]), "every rank has the same numbers"


def _with_fewer_classes_than_ranks() -> dict:
    rows = torch.eye(4)[:2]
    shard = centres_in_memory(torch.eye(4)[:2], ["a", "b"]).shard()
    found = search(rows, shard.shard, k=5, device=_CPU, probe_labels_P=np.array([0, 1]), scale=2.0)
    assert found.log_sums_P is not None
    return {
        "top": numbers_of(found, np.array([0, 1]), scale=None, fitted=np.array([]))["top_k"],
        "sums": found.log_sums_P,
    }


def test_there_may_be_fewer_classes_than_ranks_and_than_five(run_ranks):
    for got in run_ranks(4, _with_fewer_classes_than_ranks):
        assert got["top"] == {"1": 1.0, "5": 1.0}
        assert got["sums"].tolist() == [pytest.approx(math.log(math.exp(2) + 1))] * 2


def test_a_model_that_sees_no_difference_is_right_nowhere():
    rows, centres = torch.ones(20, 4) / 2, torch.ones(6, 4)
    shard, labels = centres_in_memory(centres, list("abcdef")).shard().shard, np.arange(20) % 6
    found = search(rows, shard, k=5, device=_CPU, probe_labels_P=labels, scale=10.0)
    numbers = numbers_of(found, labels, scale=10.0, fitted=np.array([]))
    assert numbers["top_k"] == {"1": 0.0, "5": 0.0}
    assert numbers["coverage"][-1]["accuracy"] == 0.0
    # It says 1/6 of everything, and is never right.
    assert numbers["calibration_error"] == pytest.approx(1 / 6)
    assert numbers["reject_by"] == "own class left out"
    assert numbers["reject"]["0.1"]["kept"] == 0.0


def test_perfect_probabilities_have_no_calibration_error():
    confidence = np.repeat([0.25, 0.75], 400)
    is_right = np.concatenate([np.arange(400) % 4 == 0, np.arange(400) % 4 > 0])
    assert calibration_error(confidence, is_right) == pytest.approx(0)
    assert calibration_error(np.ones(4), np.array([True, True, False, False])) == pytest.approx(0.5)


def test_of_equally_confident_images_the_wrong_ones_are_kept_first():
    points = coverage_points(np.array([0.9, 0.5, 0.5, 0.5]), np.array([True, True, False, True]))
    assert [point["accuracy"] for point in points if point["coverage"] == 0.5] == [0.5]


# ---- a set of image files -------------------------------------------------------------------------------------------


def _folder(root: Path, picture, names: list[str], takes: range) -> Path:
    for number, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for take in takes:
            (root / name / f"{take}.png").write_bytes(picture(number, take))
    return root


def test_classes_are_matched_by_name_else_by_number(tmp_path, picture):
    folder = _folder(tmp_path / "set", picture, ["carl", "anna", "zoe"], range(2))
    model = ClassList.of([b"bert", b"anna", b"carl"], "test")
    source, labels, matched = labelled_images(folder, model)
    assert [source.name_of(n).split("/")[-2] for n in range(6)] == ["anna"] * 2 + ["carl"] * 2 + ["zoe"] * 2
    assert (labels.tolist(), matched) == ([1, 1, 2, 2, -1, -1], "name")
    _, labels, matched = labelled_images(folder, ClassList(2))
    assert (labels.tolist(), matched) == ([0, 0, 1, 1, -1, -1], "number")
    with pytest.raises(
        DataError, match=r"None of the 6 images of .* Its classes are anna, carl, zoe, …; the model's are x"
    ):
        labelled_images(folder, ClassList.of([b"x"], "test"))


def _evaluate(folder: str, network: torch.nn.Module, names: list[str], centres: torch.Tensor) -> tuple[dict, list]:
    evaluator = Evaluator(
        network=network, image_size=32, device=_CPU, batch_size=4, centres=centres_in_memory(centres, names).shard
    )
    one = EvaluationSet(name="set", kind="classification", path=Path(folder))
    result = ClassificationProtocol().evaluate(evaluator, one)
    assert result.examples is not None
    return dict(result.numbers), [(c.own_class, c.other_class, c.num_alike) for c in result.examples.confused]


def test_images_are_classified_by_several_ranks(run_ranks, tmp_path, picture, network):
    names = [f"class-{number}" for number in range(9)]
    folder = _folder(tmp_path / "set", picture, names, range(3))
    evaluator = Evaluator(network=network, image_size=32, device=_CPU)
    from megaclass.evaluation.images import SourceImages

    rows = evaluator.embed(SourceImages(source=open_source(folder), image_size=32)).normalised_ND().astype(np.float64)
    # Centres are means of their classes; those of classes 3 and 4 are exchanged.
    centres = rows.reshape(9, 3, -1).mean(1)[[0, 1, 2, 4, 3, 5, 6, 7, 8]]
    cosines = rows @ (centres / np.linalg.norm(centres, axis=1, keepdims=True)).T
    want = (cosines.argmax(1) == np.repeat(np.arange(9), 3)).mean()
    for numbers, confused in run_ranks(3, _evaluate, str(folder), network, names, torch.from_numpy(centres).float()):
        assert numbers["top_k"]["1"] == pytest.approx(want)
        assert {("class-3", "class-4", 3), ("class-4", "class-3", 3)} <= set(confused)


def test_the_command_classifies_and_keeps_the_examples(make_run, tmp_path, picture, capsys):
    names = [f"class-{number}" for number in range(6)]
    run = make_run(class_names="".join(f"{name}\n" for name in names).encode())
    folder = _folder(tmp_path / "holdout", picture, [*names[:5], "stranger"], range(5))
    training = _folder(tmp_path / "train", picture, names, range(7, 9))
    command = ["evaluate", str(run), "--classify", str(folder), "--training-data", str(training), "--device", "cpu"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "of 6 classes" in said and "Classes are matched by name." in said
    assert "5 images of 1 classes that the model does not know" in said
    (result,) = read_results(run)
    assert (result.kind, result.name) == ("classification", "holdout-classes")
    assert result.numbers["by_training_images"]["2"]["images"] == 25
    assert result.examples is not None and len(result.examples.worst) == 5
    assert result.examples.worst[0].pictures[0].startswith(b"\xff\xd8\xff")
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "Coverage" in page and "Most confused" in page
    assert main(["evaluate", str(run), "--classify", str(tmp_path / "nowhere")]) == 2
    assert "there is no such folder" in capsys.readouterr().err


def test_sets_may_be_given_together_or_one_by_one(make_run, tmp_path, picture, capsys):
    run = make_run()
    sets = [
        str(_folder(tmp_path / name, picture, [f"{number}" for number in range(3)], range(2))) for name in ("a", "b")
    ]
    for given in (["--classify", *sets], ["--classify", sets[0], "--classify", sets[1]]):
        assert main(["evaluate", str(run), *given, "--device", "cpu", "--json"]) == 0
        assert list(json.loads(capsys.readouterr().out)) == ["a-classes", "b-classes"]


def test_a_model_without_centres_says_how_to_get_them(make_run, tmp_path, picture, capsys):
    folder = _folder(tmp_path / "holdout", picture, ["a", "b"], range(2))
    assert main(["export", str(make_run()), "--to", "safetensors", "--out", str(tmp_path / "out")]) == 0
    assert main(["evaluate", str(tmp_path / "out"), "--classify", str(folder)]) == 0, "the export has the centres"
    (tmp_path / "out" / "centres.safetensors").unlink()
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "out"), "--classify", str(folder)]) == 2
    assert "has no class centres, so it cannot classify: give the run folder" in capsys.readouterr().out


def test_inner_products_are_of_one_flip_and_their_numbers_say_so(tmp_path, picture, network):
    names = [f"class-{number}" for number in range(3)]
    folder = _folder(tmp_path / "set", picture, names, range(2))
    weight = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    centres = replace(centres_in_memory(weight, names), is_cosine=False)
    evaluator = Evaluator(network=network, image_size=32, device=_CPU, centres=centres.shard)
    one = EvaluationSet(name="set", kind="classification", path=folder)
    result = ClassificationProtocol().evaluate(evaluator, one)
    assert remarks_on(result)[0] == "Without the embeddings of mirrored images."


def test_a_set_in_the_working_folder_has_its_name(tmp_path, monkeypatch):
    (tmp_path / "holdout").mkdir()
    monkeypatch.chdir(tmp_path / "holdout")
    assert classification_set(Path()).name == "holdout-classes"


def test_a_report_has_the_rows_of_every_model():
    rows, labels, centres, counts = _case()
    shard = centres_in_memory(torch.from_numpy(centres), [str(c) for c in range(_CLASSES)]).shard().shard
    found = search(torch.from_numpy(rows), shard, k=5, device=_CPU, probe_labels_P=labels)
    plain = numbers_of(found, labels, scale=None, fitted=np.array([]))
    counted = numbers_of(found, labels, scale=None, fitted=np.array([]), num_images_C=counts)
    titles = {title: [cell.text for cell in cells] for title, cells in ClassificationProtocol().rows([plain, counted])}
    without, with_counts = titles["Top-1, classes with 3-4 training images"]
    assert without == "not measurable" and with_counts.endswith("%")


def test_a_model_of_one_class_rejects_nothing_and_its_numbers_are_finite():
    rows, _, centres, _ = _case()
    shard = centres_in_memory(torch.from_numpy(centres[:1]), ["anna"]).shard().shard
    labels = np.zeros(len(rows), dtype=np.int64)
    found = search(torch.from_numpy(rows), shard, k=5, device=_CPU, probe_labels_P=labels)
    numbers = numbers_of(found, labels, scale=None, fitted=np.array([]))
    assert numbers["reject"] == {} and numbers["top_k"]["1"] == 1.0
    json.dumps(numbers, allow_nan=False)
