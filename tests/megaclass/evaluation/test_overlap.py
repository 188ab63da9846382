"""What is said about a verification set: held out, not known, or no measure at all."""

import pytest

from megaclass.cli.main import main
from megaclass.data.pair_file import write_pairs
from megaclass.data.sources.open_source import open_source
from megaclass.data.tools.make_pairs import make_pairs
from megaclass.data.tools.synthesize import synthesize
from megaclass.evaluation.protocol import SetResult
from megaclass.evaluation.training_overlap import compared_with_training_data, training_data_line


@pytest.fixture
def train(tmp_path):
    """The training part of a split, with three sets next to it: held out, drawn by code, and made of the training data."""
    whole = tmp_path / "set"
    synthesize(whole, num_identities=20, images_per_identity=6, image_size=16, num_pairs=10, num_processes=1)
    assert main(["data", "split", str(whole), "--identities", "0.25", "--out", str(tmp_path / "split")]) == 0
    train = tmp_path / "split" / "train"
    (train / "verification.bin").write_bytes((whole / "verification.bin").read_bytes())
    write_pairs(train / "seen.bin", make_pairs(open_source(train), 10))
    return train


def test_each_set_is_told_by_what_it_measures(train):
    results = [
        *(
            SetResult(name=name, kind="pairs", path=str(train / f"{name}.bin"))
            for name in ("holdout", "verification", "seen")
        ),
        SetResult(name="lost", kind="pairs", path=str(train / "lost.bin"), error="Cannot read it."),
        SetResult(name="people", kind="identification", path=str(train)),
    ]
    compared = compared_with_training_data(results, open_source(train), str(train))
    holdout, verification, seen, lost, people = (training_data_line(one.numbers) for one in compared)
    assert holdout == (
        "Its identities were held out of training; none of its 30 images is among all 90 training images."
    )
    assert "None of its 20 images is among all 90 training images; other images of the same people" in verification
    assert seen.startswith("WARNING: ") and "are in the training data" in seen and "megaclass data split" in seen
    assert lost == people == ""
    drawn = compared_with_training_data(results, open_source(train), str(train), train / "verification.bin")
    assert training_data_line(drawn[1].numbers).startswith("Its identities were held out of training")
