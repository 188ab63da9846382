"""Classification with a trained model, and classes that are added to it without training."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import megaclass
from megaclass.cli.main import main
from megaclass.errors import DataError

_NAMES = [f"class-{number}" for number in range(6)]


@pytest.fixture
def run(make_run):
    return make_run(class_names="".join(f"{name}\n" for name in _NAMES).encode())


@pytest.fixture
def folder(tmp_path, picture):
    def draw(name: str, classes: list[str], takes: range, first: int = 0) -> Path:
        for number, one in enumerate(classes, start=first):
            (tmp_path / name / one).mkdir(parents=True)
            for take in takes:
                (tmp_path / name / one / f"{take}.png").write_bytes(picture(number, take))
        return tmp_path / name

    return draw


def _cosines(model, rows: np.ndarray) -> np.ndarray:
    centres = model.centres.all_rows().double().numpy()
    return rows.astype(np.float64) @ (centres / np.linalg.norm(centres, axis=1, keepdims=True)).T


def test_names_cosines_and_probabilities_are_those_of_all_centres(run, folder, capsys):
    holdout = folder("holdout", _NAMES, range(5))
    model = megaclass.load(run, device="cpu")
    plain = model.classify(holdout)
    assert len(plain) == 30 and plain[0].guesses[0].probability is None and plain[0].is_known
    assert main(["evaluate", str(run), "--classify", str(holdout), "--device", "cpu"]) == 0
    model = megaclass.load(run, device="cpu")
    rows = model.embed(holdout)
    want = _cosines(model, rows)
    scale = 1 / json.loads((run / "evaluation.json").read_text())["sets"]["holdout-classes"]["temperature"]
    for one, cosines in zip(model.classify(rows, top=4), want, strict=True):
        order = np.argsort(-cosines)[:4]
        assert [guess.name for guess in one.guesses] == [_NAMES[place] for place in order]
        np.testing.assert_allclose([guess.cosine for guess in one.guesses], cosines[order], atol=1e-6)
        chances = np.exp(scale * cosines) / np.exp(scale * cosines).sum()
        np.testing.assert_allclose([guess.probability for guess in one.guesses], chances[order], rtol=1e-4)
    assert len(model.classify(rows[:1], top=99)[0].guesses) == 6
    assert math.isclose(sum(guess.probability for guess in model.classify(rows[0], top=6)[0].guesses), 1, rel_tol=1e-5)

    # At a rate of 0.1 the closest class must be above the measured threshold.
    threshold = model.facts["classification"]["reject"]["0.1"]["threshold"]
    found = model.classify(rows, reject=0.1)
    assert [one.is_known for one in found] == (want.max(1) > threshold).tolist()
    assert len({one.is_known for one in found}) == 2, "some are accepted and some are not"
    with pytest.raises(DataError, match=r"no threshold that accepts 0\.02 .*: measured are 0\.1"):
        model.classify(rows, reject=0.02)
    with pytest.raises(DataError, match="top must be at least 1"):
        model.classify(rows, top=0)


def test_names_temperature_and_rejection_travel_with_an_export(run, folder, tmp_path):
    holdout = folder("holdout", _NAMES, range(5))
    assert main(["evaluate", str(run), "--classify", str(holdout), "--device", "cpu"]) == 0
    assert main(["export", str(run), "--to", "safetensors", "--out", str(tmp_path / "out")]) == 0
    assert "classifies 6 classes" in (tmp_path / "out" / "README.md").read_text()
    exported, model = megaclass.load(tmp_path / "out", device="cpu"), megaclass.load(run, device="cpu")
    rows = model.embed(holdout)
    assert exported.classify(rows, reject=0.1) == model.classify(rows, reject=0.1)
    # An export of the export keeps them, too.
    assert main(["export", str(tmp_path / "out"), "--to", "safetensors", "--out", str(tmp_path / "again")]) == 0
    assert megaclass.load(tmp_path / "again", device="cpu").classify(rows) == model.classify(rows)


def test_the_command_prints_names_or_json(run, folder, capsys):
    image = folder("photos", ["a"], range(1)) / "a" / "0.png"
    assert main(["classify", str(run), str(image), "--top", "2", "--device", "cpu"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0] == str(image) and len(printed.out.splitlines()) == 3
    assert "no probabilities: megaclass evaluate RUN --classify DATA" in printed.err
    assert main(["classify", str(run), str(image.parent.parent), "--json", "--device", "cpu"]) == 0
    (said,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert said["image"] == str(image) and said["is_known"] is True and len(said["guesses"]) == 5
    assert set(said["guesses"][0]) == {"name", "cosine", "probability"}
    assert main(["classify", str(run), str(image), "--reject", "0.01", "--device", "cpu"]) == 2
    assert "none was measured" in capsys.readouterr().err


def test_a_model_without_centres_says_how_to_get_them(run, folder, tmp_path, capsys):
    assert main(["export", str(run), "--to", "safetensors", "--out", str(tmp_path / "out")]) == 0
    (tmp_path / "out" / "centres.safetensors").unlink()
    assert main(["classify", str(tmp_path / "out"), str(folder("photos", ["a"], range(1)))]) == 2
    assert "has no class centres, so it cannot classify: give the run folder" in capsys.readouterr().err
    # New classes are a way, too.
    people = folder("people", ["anna", "bert"], range(3), first=10)
    assert main(["add-classes", str(tmp_path / "out"), str(people), "--out", str(tmp_path / "new")]) == 0
    assert megaclass.load(tmp_path / "new", device="cpu").class_names == ["anna", "bert"]


def test_new_people_are_added_from_a_few_photos_and_known_classes_stay(run, folder, tmp_path, capsys):
    people = folder("people", ["anna", "bert"], range(3), first=10)
    assert main(["add-classes", str(run), str(people), "--out", str(tmp_path / "new")]) == 0
    assert "8 classes; to use it: megaclass classify" in capsys.readouterr().out
    old, new = megaclass.load(run, device="cpu"), megaclass.load(tmp_path / "new", device="cpu")
    assert new.class_names == [*_NAMES, "anna", "bert"]
    assert torch.equal(new.centres.all_rows()[:6], old.centres.all_rows())
    rows = old.embed(people).astype(np.float64)
    for number in range(2):
        mean = rows[3 * number : 3 * number + 3].mean(0)
        np.testing.assert_allclose(new.centres.all_rows()[6 + number], mean / np.linalg.norm(mean), atol=1e-6)
    later = folder("later", ["anna", "bert"], range(3, 5), first=10)
    assert [one.guesses[0].name for one in new.classify(later)] == ["anna", "anna", "bert", "bert"]
    assert main(["add-classes", str(tmp_path / "new"), str(people), "--out", str(tmp_path / "again")]) == 2
    assert "already knows 2 of the 2 classes" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["add-classes", "export"])
def test_damaged_centres_are_an_error_and_not_taken_for_none(run, folder, tmp_path, capsys, command):
    assert main(["export", str(run), "--to", "safetensors", "--out", str(tmp_path / "out")]) == 0
    (tmp_path / "out" / "centres.safetensors").write_bytes(b"junk")
    more = {"add-classes": [str(folder("people", ["anna"], range(2)))], "export": ["--to", "safetensors"]}[command]
    assert main([command, str(tmp_path / "out"), *more, "--out", str(tmp_path / "new")]) == 2
    assert f"Cannot read {tmp_path / 'out' / 'centres.safetensors'} as class centres" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_names_of_classes_do_not_control_the_terminal(make_run, folder, capsys):
    run = make_run(class_names=b"\x1b[31mred\n" + b"".join(b"%d\n" % number for number in range(5)))
    image = folder("photos", ["a"], range(1)) / "a" / "0.png"
    assert main(["classify", str(run), str(image), "--top", "6", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "[31mred" in printed and "\x1b" not in printed
