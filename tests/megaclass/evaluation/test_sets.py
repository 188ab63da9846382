"""What `--on` finds, what a set gives, and that one bad set costs nothing but itself."""

import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from tests.megaclass.evaluation.conftest import write_megaface_feature
from torch import nn

from megaclass.cli.main import main
from megaclass.errors import DataError
from megaclass.evaluation import gallery as gallery_module
from megaclass.evaluation.protocol import EvaluationSet, Evaluator
from megaclass.evaluation.protocols import PROTOCOLS
from megaclass.evaluation.results import read_results, write_results
from megaclass.evaluation.sets import evaluate_sets, find_sets, sets_of_main_rank
from megaclass_launch.errors import UserError

_SIZE = 32


class Pixels(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.avg_pool2d(x, 8).flatten(1)


class Diverged(Pixels):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = super().forward(x)
        return torch.where(torch.arange(len(rows))[:, None] == 5, torch.nan, rows)


def _evaluator(network: nn.Module | None = None, **options) -> Evaluator:
    return Evaluator(network=network or Pixels(), image_size=_SIZE, device=torch.device("cpu"), **options)


def _people(folder, picture, identities, takes):
    for identity in identities:
        (folder / f"person-{identity}").mkdir(parents=True)
        for take in takes:
            (folder / f"person-{identity}" / f"{take}.png").write_bytes(picture(identity, take))
    return folder


def test_a_folder_gives_all_its_sets(tmp_path, pairs_bin):
    pairs_bin("lfw")
    pairs_bin("cfp_fp")
    (tmp_path / "pairs.txt").write_text("")
    found = find_sets([tmp_path])
    assert [(one.name, one.kind) for one in found] == [("cfp_fp", "pairs"), ("lfw", "pairs"), (tmp_path.name, "pairs")]


def test_sets_of_one_name_keep_apart(tmp_path, pairs_bin):
    path = pairs_bin("lfw")
    other = tmp_path / "other" / "lfw.bin"
    other.parent.mkdir()
    other.write_bytes(path.read_bytes())
    assert [one.name for one in find_sets([path, other])] == [f"{tmp_path.name}-lfw", "other-lfw"]
    assert [one.name for one in find_sets([path, path.absolute(), path])] == ["lfw"]
    (tmp_path / "lfw.txt").write_text("")
    assert [one.name for one in find_sets([path, tmp_path / "lfw.txt"])] == ["lfw.bin", "lfw.txt"]
    sets = [tmp_path / name / "val" / "lfw.bin" for name in ("a", "b")]
    assert [one.name for one in find_sets(sets)] == ["a-val-lfw", "b-val-lfw"]


@pytest.mark.parametrize("name", ["nothing", "model.txt.gz"])
def test_what_holds_no_set_is_named(tmp_path, name):
    with pytest.raises(DataError, match=f"Cannot evaluate on .*{name}"):
        find_sets([tmp_path / name])
    with pytest.raises(DataError, match=r"but nothing of that kind is in it. .* megaclass data pairs .* --out"):
        find_sets([tmp_path])


def test_pairs_give_numbers_curves_and_the_hardest_pairs(pairs_bin, picture):
    (result,) = evaluate_sets(_evaluator(), find_sets([pairs_bin()]))
    assert result.error is None
    assert result.numbers["accuracy"] == 1.0
    assert result.numbers["tar_at_far"]["1e-1"] == 1.0
    assert result.numbers["tar_at_far"]["1e-6"] is None
    low, high = result.numbers["tar_at_far_95"]["1e-1"]
    assert low < 1 <= high
    different, same = result.hard_pairs[0], result.hard_pairs[12]
    assert (different.is_same, same.is_same) == (False, True)
    assert different.pictures == (picture(different.pair, 0), picture(1000 + different.pair, 1))


def test_a_pairs_list_gives_what_the_bin_of_the_same_images_gives(tmp_path, pairs_bin, picture):
    lines = []
    for pair in range(40):
        for side, identity in enumerate((pair, pair if pair % 2 == 0 else 1000 + pair)):
            (tmp_path / f"{pair}-{side}.png").write_bytes(picture(identity, side))
        lines.append(f"{pair}-0.png {pair}-1.png {int(pair % 2 == 0)}")
    (tmp_path / "pairs.txt").write_text("\n".join(lines))
    by_bin, by_list = evaluate_sets(_evaluator(), find_sets([pairs_bin(), tmp_path / "pairs.txt"]))
    assert by_list.numbers == by_bin.numbers
    assert by_list.hard_pairs[0].names == (f"{by_list.hard_pairs[0].pair}-0.png", f"{by_list.hard_pairs[0].pair}-1.png")


def test_identification_from_folders_embeddings_and_features_agrees(tmp_path, picture):
    gallery = _people(tmp_path / "gallery", picture, range(6), [0])
    probes = _people(tmp_path / "probes", picture, range(12), [1, 2])
    sets = [EvaluationSet(name="folders", kind="identification", path=gallery, probes=probes)]
    (folders,) = evaluate_sets(_evaluator(), sets)
    assert folders.numbers["rank_k"] == {"1": 1.0, "5": 1.0, "10": 1.0}
    assert (folders.numbers["num_mated"], folders.numbers["num_unmated"]) == (12, 12)

    from megaclass.evaluation.images import GivenImages, find_images

    for folder in (gallery, probes):
        files = find_images(folder)
        rows = _evaluator().embed(GivenImages(images=files, image_size=_SIZE)).sums_ND
        np.save(tmp_path / f"{folder.name}.npy", rows)
        (tmp_path / f"{folder.name}.txt").write_text("".join(f"{path.relative_to(folder)}\n" for path in files))
        for path, row in zip(files, rows, strict=True):
            (tmp_path / f"{folder.name}-features" / path.parent.name).mkdir(parents=True, exist_ok=True)
            write_megaface_feature(tmp_path / f"{folder.name}-features" / path.parent.name / f"{path.stem}.bin", row)
    sets = [
        EvaluationSet(name="npy", kind="identification", path=tmp_path / "gallery.npy", probes=tmp_path / "probes.npy"),
        EvaluationSet(
            name="features",
            kind="identification",
            path=tmp_path / "gallery-features",
            probes=tmp_path / "probes-features",
        ),
    ]
    for result in evaluate_sets(_evaluator(), sets):
        assert result.numbers == folders.numbers

    sets = [EvaluationSet(name="d", kind="distractors", path=tmp_path / "gallery.npy", probes=probes)]
    (distractors,) = evaluate_sets(_evaluator(), sets)
    assert distractors.numbers["rank_k"]["6"]["10"] == 1.0


def test_embeddings_of_another_width_than_the_models_are_refused(tmp_path, picture):
    probes = _people(tmp_path / "probes", picture, range(2), [0])
    np.save(tmp_path / "gallery.npy", np.ones((2, 7), np.float32))
    (tmp_path / "gallery.txt").write_text("a/1.png\nb/1.png\n")
    sets = [EvaluationSet(name="g", kind="identification", path=tmp_path / "gallery.npy", probes=probes)]
    (result,) = evaluate_sets(_evaluator(embedding_dim=48), sets)
    assert "gallery.npy have 7 numbers, but the model gives 48" in result.error
    (result,) = evaluate_sets(_evaluator(), sets)
    assert re.search(r"probes have 48 numbers, but those of the gallery .*gallery\.npy have 7", result.error)
    np.save(tmp_path / "gallery.npy", np.array([[1.0] * 48, [np.nan] * 48], np.float32))
    (result,) = evaluate_sets(_evaluator(), sets)
    assert "Row 1 of" in result.error


def _identify_on_this_rank(gallery: str, probes: str) -> list[dict]:
    from pathlib import Path

    sets = [
        EvaluationSet(name=kind, kind=kind, path=Path(gallery), probes=Path(probes))
        for kind in ("identification", "distractors")
    ]
    return [result.to_json() for result in evaluate_sets(_evaluator(), sets)]


@pytest.mark.parametrize("num_people", [6, 2], ids=["several entries a rank", "a rank without one"])
def test_ranks_embed_and_search_their_part_of_the_gallery(run_ranks, tmp_path, picture, num_people):
    gallery = _people(tmp_path / "gallery", picture, range(num_people), [0])
    probes = _people(tmp_path / "probes", picture, range(8), [1, 2])
    want = _identify_on_this_rank(str(gallery), str(probes))
    assert want[0]["rank_k"]["1"] == 1.0
    assert run_ranks(3, _identify_on_this_rank, str(gallery), str(probes)) == [want] * 3


class Malicious:
    def __reduce__(self):
        return eval, ("1",)


def test_bad_sets_are_named_with_their_item_and_the_others_still_run(tmp_path, pairs_bin, picture):
    pictures = [picture(0)] * 40
    bad = {
        "harmful": ([Malicious()], [True]),
        "odd": (pictures[:39], [True] * 20),
        "few": (pictures[:18], [True, False] * 4 + [True]),
        "broken": ([*pictures[:25], b"no image", *pictures[26:]], [True, False] * 10),
        "larger": ([*pictures[:30], picture(0, 0, 48), *pictures[31:]], [True, False] * 10),
        "one-sided": (pictures, [True] * 20),
    }
    paths = []
    for name, content in bad.items():
        paths.append(tmp_path / f"{name}.bin")
        paths[-1].write_bytes(pickle.dumps(content))
    results = evaluate_sets(_evaluator(), find_sets([*paths, tmp_path / "absent.bin", pairs_bin("lfw")]))
    errors = {result.name: result.error for result in results}
    for name, message in {
        "harmful": "ask for builtins.eval",
        "odd": "39 images and 20 labels",
        "few": "9 pairs cannot be split into 10 folds",
        "broken": f"Cannot decode image 25 of {tmp_path / 'broken.bin'} (pair 12)",
        "larger": f"image 30 of {tmp_path / 'larger.bin'} (pair 15) has 48 × 48 pixels, but the model takes 32 × 32",
        "one-sided": "All 20 pairs are labelled same",
        "absent": "No such file",
    }.items():
        assert message in errors[name]
    assert errors["lfw"] is None

    write_results(tmp_path / "run", {"name": "m"}, results)
    said = {result.name: result.error for result in read_results(tmp_path / "run")}
    assert said == errors


def test_resizing_must_be_asked_for(pairs_bin):
    path = pairs_bin("large", size=48)
    (refused,) = evaluate_sets(_evaluator(), find_sets([path]))
    assert "--resize" in refused.error
    (scaled,) = evaluate_sets(_evaluator(fit="squash"), find_sets([path]))
    assert scaled.error is None


def test_an_embedding_that_is_not_finite_names_its_image(pairs_bin):
    path = pairs_bin()
    (result,) = evaluate_sets(_evaluator(Diverged(), batch_size=8), find_sets([path]))
    assert f"The embedding of image 5 of {path} (pair 2) is not finite" in result.error


def _evaluate_on_this_rank(paths: list[str]) -> list[dict]:
    from pathlib import Path

    return [result.to_json() for result in evaluate_sets(_evaluator(batch_size=8), find_sets([Path(p) for p in paths]))]


def test_all_ranks_get_the_numbers_of_one_and_outlive_a_bad_set_together(run_ranks, tmp_path, pairs_bin, picture):
    broken = tmp_path / "broken.bin"
    broken.write_bytes(pickle.dumps(([picture(0)] * 39 + [b"no image"], [True, False] * 10)))
    paths = [str(broken), str(pairs_bin())]
    want = _evaluate_on_this_rank(paths)
    for error, numbers in run_ranks(3, _evaluate_on_this_rank, paths):
        assert "Cannot decode image 39" in error["error"]
        assert numbers["accuracy"] == want[1]["accuracy"]
        assert numbers["xnorm"] == pytest.approx(want[1]["xnorm"], rel=1e-6)


def test_a_disk_that_fails_costs_its_set_alone(pairs_bin, monkeypatch):
    from megaclass.evaluation.protocols import pairs

    paths, read_pairs = [pairs_bin("lfw"), pairs_bin("agedb_30")], pairs.read_pairs

    def fail_on_lfw(path):
        if path.name == "lfw.bin":
            raise OSError(5, "Input/output error", str(path))
        return read_pairs(path)

    monkeypatch.setattr(pairs, "read_pairs", fail_on_lfw)
    lfw, agedb = evaluate_sets(_evaluator(), find_sets(paths))
    assert "Input/output error" in lfw.error
    assert agedb.error is None


def test_results_come_back_whole_and_those_of_another_model_are_forgotten(tmp_path, pairs_bin):
    results = evaluate_sets(_evaluator(), find_sets([pairs_bin("lfw"), pairs_bin("agedb_30")]))
    write_results(tmp_path / "out", {"weights": "1"}, results[:1])
    write_results(tmp_path / "out", {"weights": "1"}, results[1:])
    back = read_results(tmp_path / "out")
    assert [one.name for one in back] == ["lfw", "agedb_30"]
    assert back[0].numbers == results[0].numbers
    np.testing.assert_array_equal(back[0].curves.tar, results[0].curves.tar)
    assert [hard.pictures for hard in back[0].hard_pairs] == [hard.pictures for hard in results[0].hard_pairs]
    write_results(tmp_path / "out", {"weights": "2"}, results[1:])
    assert [one.name for one in read_results(tmp_path / "out")] == ["agedb_30"]


@pytest.mark.parametrize("content", ["", "[]", '{"format": 99}'])
def test_results_that_cannot_be_read_say_so(tmp_path, content):
    (tmp_path / "evaluation.json").write_text(content)
    with pytest.raises(DataError, match=r"evaluation\.json"):
        read_results(tmp_path)


def test_probes_that_are_in_the_gallery_do_not_find_themselves(tmp_path, picture):
    """A folder against itself: with a network that tells nobody apart, everybody was found at rank 1."""

    class FirstPixel(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flatten(1)[:, :2] + 3

    gallery = _people(tmp_path / "gallery", picture, range(6), [0, 1])
    _people(tmp_path / "probes", picture, range(3), [1, 2])
    evaluator = _evaluator(FirstPixel())
    sets = [
        EvaluationSet(name=name, kind="identification", path=gallery, probes=tmp_path / name)
        for name in ("gallery", "probes")
    ]
    itself, some = (result.numbers for result in evaluate_sets(evaluator, sets))
    assert itself["num_probes_in_gallery"] == 12 and itself["rank_k"]["1"] < 1
    assert (some["num_probes_in_gallery"], some["num_mated"]) == (3, 6)
    alone = _people(tmp_path / "alone", picture, range(4), [0])
    (only,) = evaluate_sets(evaluator, [EvaluationSet(name="a", kind="identification", path=alone, probes=alone)])
    assert only.numbers["num_mated"] == 0 and only.numbers["rank_k"]["1"] is None


def test_probes_that_cannot_be_looked_for_in_the_gallery_are_said_to_find_themselves(tmp_path, picture):
    folder, stored = _people(tmp_path / "people", picture, range(6), [0]), tmp_path / "stored.npy"
    files = sorted(folder.rglob("*.png"))
    images = torch.stack([torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1) for file in files])
    straight = (images.float() - 127.5) / 127.5
    np.save(stored, (Pixels()(straight) + Pixels()(straight.flip(3))).numpy())
    stored.with_suffix(".txt").write_text("".join(f"{file.relative_to(folder)}\n" for file in files))
    sets = [
        EvaluationSet(name="mixed", kind="identification", path=stored, probes=folder),
        EvaluationSet(name="alike", kind="identification", path=stored, probes=stored),
    ]
    mixed, alike = evaluate_sets(_evaluator(), sets)
    remark = PROTOCOLS["identification"].remark
    assert (mixed.numbers["num_probes_in_gallery"], mixed.numbers["rank_k"]["1"]) == (None, 1.0)
    assert "find themselves at rank 1" in remark(mixed.numbers) and "both as images" in remark(mixed.numbers)
    assert alike.numbers["num_probes_in_gallery"] == 6 and "find themselves" not in remark(alike.numbers)
    write_results(tmp_path / "out", {"name": "a", "weights": "b"}, [mixed])
    assert read_results(tmp_path / "out")[0].numbers["num_probes_in_gallery"] is None


def _identities_and_rows(path: str) -> tuple[list[str], list[float]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        if dist.get_rank() > 0:
            # As on a host whose disk does not show the files yet.
            monkeypatch.setattr(gallery_module, "find_images", None)
            monkeypatch.setattr(Path, "rglob", None)
        try:
            gallery = gallery_module.open_gallery(_evaluator(), Path(path))
            return gallery.identities, gallery.all_rows().sum(1).tolist()
        except UserError as error:
            return [str(error)], []


def test_the_files_of_a_gallery_are_those_that_rank_0_lists(run_ranks, tmp_path, picture):
    folder = _people(tmp_path / "gallery", picture, range(6), [0])
    for number in range(5):
        path = tmp_path / "features" / f"person-{number}" / "0.bin"
        path.parent.mkdir(parents=True)
        write_megaface_feature(path, np.arange(1.0, 9.0) + number)
    for path, num_rows in ((folder, 6), (tmp_path / "features", 5)):
        first, second = run_ranks(2, _identities_and_rows, str(path))
        assert first == second and first[0] == [f"person-{number}" for number in range(num_rows)]
    missing = f"Cannot read the images of {tmp_path / 'nowhere'}: the folder does not exist."
    first, second = run_ranks(2, _identities_and_rows, str(tmp_path / "nowhere"))
    assert first == ([missing], []) and second == ([f"rank 0: {missing}"], [])


def _found_by_rank_0(path: str) -> list[EvaluationSet]:
    def find() -> list[EvaluationSet]:
        assert dist.get_rank() == 0
        return [
            *find_sets([Path(path)]),
            EvaluationSet(name="g", kind="identification", path=Path("g"), probes=Path("p")),
        ]

    return sets_of_main_rank(find, torch.device("cpu"))


def test_all_ranks_evaluate_the_sets_that_rank_0_finds(run_ranks, tmp_path, pairs_bin):
    expected = [*find_sets([pairs_bin()])]
    for found in run_ranks(2, _found_by_rank_0, str(pairs_bin())):
        assert found[:-1] == expected and found[-1].probes == Path("p")


def test_a_wrong_path_of_the_training_data_shows_before_anything_is_evaluated(pairs_bin, make_run, capsys):
    command = ["evaluate", str(make_run()), "--on", str(pairs_bin()), "--training-data", "nowhere", "--device", "cpu"]
    assert main(command) == 2
    printed = capsys.readouterr()
    assert "Cannot open the data at nowhere" in printed.err and printed.out == ""
