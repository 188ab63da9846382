"""Health of class centres: lengths, and names that lie too close."""

import numpy as np
import pytest
import torch

from megaclass.errors import CheckpointError
from megaclass.evaluation import centres as centres_module
from megaclass.evaluation.centres import centre_health, centres_in_memory, read_run_centres

_CPU = torch.device("cpu")
_NAMES = ["anna", "bert", "carl", "dora", "emil", "fritz"]


def test_lengths_and_nearest_names_of_a_hand_worked_case():
    # anna and carl point almost the same way; dora is at right angles to all.
    weight = torch.tensor([[1.0, 0, 0], [0, 2, 0], [3, 0.3, 0], [0, 0, 4]])
    health = centre_health(centres_in_memory(weight, _NAMES[:4]), device=_CPU)
    np.testing.assert_allclose(health.norms, [1, 2, np.sqrt(9.09), 4], rtol=1e-6)
    (pair, cosine), *others = health.closest_pairs.items()
    assert [health.names[number] for number in pair] == ["anna", "carl"]
    assert cosine == pytest.approx(3 / np.sqrt(9.09), abs=1e-6)
    assert others and all(low < high for low, high in health.closest_pairs), "each pair once"
    assert (health.num_classes, health.num_checked, health.num_unusable) == (4, 4, 0)


def test_sub_centres_of_one_class_are_not_each_others_neighbours():
    weight = torch.tensor([[1.0, 0], [1, 0.01], [0, 1], [0.01, 1]])
    health = centre_health(centres_in_memory(weight, ["anna", "bert"]), device=_CPU)
    assert list(health.closest_pairs) == [(0, 1)] and health.names == {0: "anna", 1: "bert"}
    assert health.nearest.max() < 0.05


def test_centres_that_are_zero_or_not_finite_are_counted_and_left_out():
    weight = torch.tensor([[1.0, 0], [0, 0], [torch.nan, 1], [0, 1], [1, 0.1]])
    health = centre_health(centres_in_memory(weight, _NAMES[:5]), device=_CPU)
    assert health.num_unusable == 2
    assert next(iter(health.closest_pairs)) == (0, 4)


def test_too_many_classes_are_sampled_and_the_number_is_said(monkeypatch):
    monkeypatch.setitem(centres_module._MAX_MULTIPLICATIONS, "cpu", 1)
    weight = torch.randn(3000, 4, generator=torch.Generator().manual_seed(0))
    names = [str(number) for number in range(3000)]
    health = centre_health(centres_in_memory(weight, names), device=_CPU)
    assert (health.num_classes, health.num_checked) == (3000, 100)


def test_centres_of_a_run_come_with_their_names(make_run):
    run = make_run(class_names="\n".join(_NAMES).encode() + b"\n")
    centres = read_run_centres(run)
    assert centres.names() == _NAMES
    assert centres.all_rows().shape == (6, 16)
    assert centres.classes.names_of({1, 4}) == {1: "bert", 4: "emil"}
    assert read_run_centres(make_run("unnamed")).classes.names_of({0, 5}) == {0: "0", 5: "5"}


def test_blocks_read_from_disk_give_what_memory_gives(make_run, monkeypatch):
    centres = read_run_centres(make_run())
    want = centre_health(centres_in_memory(centres.all_rows(), centres.names()), device=_CPU)
    monkeypatch.setattr("megaclass.evaluation.centres._BLOCK_ROWS", 4)
    got = centre_health(centres, device=_CPU)
    assert [rows.shape[0] for _, rows in centres.blocks()] == [4, 2]
    np.testing.assert_allclose(got.nearest, want.nearest, rtol=1e-6)
    assert list(got.closest_pairs) == list(want.closest_pairs)
    # Brute force in float64, every centre against every other.
    weight = centres.all_rows().double().numpy()
    unit = weight / np.linalg.norm(weight, axis=1, keepdims=True)
    cosines = unit @ unit.T - 9 * np.eye(6)
    np.testing.assert_allclose(got.nearest, cosines.max(axis=1), atol=1e-6)


def test_a_run_without_a_whole_checkpoint_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="no undamaged checkpoint"):
        read_run_centres(tmp_path)
