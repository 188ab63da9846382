"""Holding out: what is held out is never trained on, the same split comes out every time, and pairs say where they are from."""

import json
import shutil

import numpy as np
import pytest

from megaclass.checkpoint.class_names import class_list
from megaclass.cli.main import main
from megaclass.data.decode import encode_jpeg
from megaclass.data.pair_file import read_pairs
from megaclass.data.sources.open_source import open_source
from megaclass.data.tools.split import Split, is_unseen
from megaclass.data.tools.synthesize import synthesize
from megaclass.errors import DataError
from megaclass.evaluation.training_overlap import find_overlaps, training_data_line


@pytest.fixture
def data(tmp_path):
    synthesize(tmp_path / "set", num_identities=20, images_per_identity=6, image_size=16, num_pairs=2, num_processes=1)
    return tmp_path / "set"


def images_by_class(path) -> dict[str, set[bytes]]:
    source = open_source(path)
    names = list(class_list(str(path), source).names())
    found: dict[str, set[bytes]] = {}
    for index in range(source.num_images):
        found.setdefault(names[source.labels[index]].decode(), set()).add(source.read(index))
    return found


def test_identities_are_in_one_part_only_with_their_old_numbers_as_names(data, tmp_path):
    assert main(["data", "split", str(data), "--identities", "0.25", "--out", str(tmp_path / "out"), "--json"]) == 0
    train, holdout, whole = (images_by_class(tmp_path / place) for place in ("out/train", "out/holdout", "set"))
    assert len(train) == 15 and len(holdout) == 5
    assert not set(train) & set(holdout) and train | holdout == whole
    source = open_source(tmp_path / "out" / "train")
    assert source.num_classes == 15 and set(source.labels.tolist()) == set(range(15))


def test_images_are_held_out_of_every_identity(data, tmp_path):
    assert main(["data", "split", str(data), "--images", "0.3", "--out", str(tmp_path / "out")]) == 0
    train, holdout, whole = (images_by_class(tmp_path / place) for place in ("out/train", "out/holdout", "set"))
    assert set(train) == set(holdout) == set(whole)
    for name, images in whole.items():
        assert len(holdout[name]) == 2 and train[name] | holdout[name] == images and not train[name] & holdout[name]


def test_pairs_of_held_out_identities_lie_beside_the_training_part_and_are_known_as_such(data, tmp_path):
    out = tmp_path / "out"
    assert main(["data", "split", str(data), "--identities", "0.25", "--out", str(out)]) == 0
    pairs = read_pairs(out / "train" / "holdout.bin")
    assert pairs.num_pairs == 5 * 15 and pairs.is_same.mean() == pytest.approx(0.5, abs=0.02)
    held_out = set.union(*images_by_class(out / "holdout").values())
    assert set(pairs.images) <= held_out
    assert is_unseen(out / "train" / "holdout.bin", str(out / "train"))
    # Not of the whole data, not of the held-out part, not of other pairs under the same name, and not of pairs by images.
    for trained_on in (data, out / "holdout", f"{out / 'train'},{out / 'holdout'}"):
        assert not is_unseen(out / "train" / "holdout.bin", str(trained_on))
    assert not is_unseen(data / "verification.bin", str(out / "train"))
    shutil.copy(data / "verification.bin", out / "train" / "holdout.bin")
    assert not is_unseen(out / "train" / "holdout.bin", str(out / "train"))
    assert main(["data", "split", str(data), "--images", "0.3", "--out", str(tmp_path / "by-images")]) == 0
    assert not is_unseen(tmp_path / "by-images/train/holdout.bin", str(tmp_path / "by-images/train"))


def test_pairs_can_be_made_of_what_a_split_holds_out(data, tmp_path):
    out = tmp_path / "out"
    assert main(["data", "split", str(data), "--identities", "0.25", "--seed", "3", "--out", str(out)]) == 0
    command = ["data", "pairs", str(data), "--holdout", "0.25", "--seed", "3", "--pairs", "20", "--out"]
    assert main([*command, str(tmp_path / "own.bin")]) == 0
    held_out = set.union(*images_by_class(out / "holdout").values())
    assert set(read_pairs(tmp_path / "own.bin").images) <= held_out
    assert is_unseen(tmp_path / "own.bin", str(out / "train"))


def test_the_same_seed_gives_the_same_split_and_another_one_another(data):
    source = open_source(data)
    first, again, other = (Split(by="identities", share=0.3, seed=seed).is_held_out(source) for seed in (0, 0, 1))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


@pytest.mark.parametrize("share", ["0", "1", "1.5", "-0.1", "nan"])
def test_a_share_that_is_none_is_refused(data, tmp_path, share, capsys):
    assert main(["data", "split", str(data), "--identities", share, "--out", str(tmp_path / "out")]) == 2
    assert "expected a number between 0 and 1" in capsys.readouterr().err


def test_images_that_are_in_the_training_data_are_found(data, tmp_path):
    source = open_source(data)
    pairs = read_pairs(data / "verification.bin").images
    assert find_overlaps({"": pairs}, source)[""]["found"] == 0
    found = find_overlaps({"": [*pairs, source.read(3), source.read(7), source.read(7)]}, source)[""]
    assert (found["found"], found["images"]) == (2, len(set(pairs)) + 2)
    said = training_data_line({"training_data": found})
    assert "2 of its 6 images are in the training data (all 120 training images were compared)" in said
    sampled = find_overlaps({"": [source.read(index) for index in range(120)]}, source, max_looked_at=10)[""]
    assert sampled["found"] == sampled["looked_at"] == 10


@pytest.mark.parametrize("options", [["--size", "48"], ["--size", "24x32"]])
def test_training_images_are_found_after_they_were_encoded_again(tmp_path, options):
    drawn, packed = tmp_path / "drawn", tmp_path / "packed"
    synthesize(drawn, num_identities=10, images_per_identity=4, image_size=64, num_pairs=10, num_processes=1)
    assert main(["data", "pack", str(drawn), "--out", str(packed), *options]) == 0
    source, unseen = open_source(drawn), read_pairs(drawn / "verification.bin").images
    seen = [source.read(index) for index in range(0, 40, 2)]
    one_colour = encode_jpeg(np.full((64, 64, 3), 90, dtype=np.uint8), 90)
    found = find_overlaps({"seen": [*seen, one_colour, b"no image"], "unseen": unseen}, open_source(packed))
    assert (found["seen"]["found"], found["seen"]["images"]) == (20, 22)
    assert found["unseen"]["found"] == 0


def test_a_damaged_mark_claims_nothing(data, tmp_path):
    out = tmp_path / "out"
    assert main(["data", "split", str(data), "--identities", "0.25", "--out", str(out)]) == 0
    mark = out / "train" / "holdout.bin.split.json"
    for content in ("[]", "{", json.dumps({"by": "identities"}), "[" * 5000):
        mark.write_text(content)
        assert not is_unseen(out / "train" / "holdout.bin", str(out / "train"))


def test_one_identity_cannot_be_split(tmp_path):
    synthesize(tmp_path / "one", num_identities=1, images_per_identity=4, image_size=16, num_pairs=2, num_processes=1)
    with pytest.raises(DataError, match="only one with images"):
        Split(by="identities", share=0.5).is_held_out(open_source(tmp_path / "one"))
