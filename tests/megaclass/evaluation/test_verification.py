"""The published protocol, against hand-worked cases, brute force and properties."""

import json
import math

import numpy as np
import pytest

from megaclass.errors import DataError
from megaclass.evaluation.protocols.verification import (
    Roc,
    area_under,
    equal_error_rate,
    far_name,
    published_tar_at_far,
    published_thresholds,
    roc_curve,
    score_embeddings,
    squared_distances,
    tar_at_far,
    verify_distances,
)


def _random_pairs(num_pairs: int, *, overlap: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    is_same = rng.random(num_pairs) < 0.5
    return np.where(is_same, rng.normal(1 - overlap, 0.3, num_pairs), rng.normal(1 + overlap, 0.3, num_pairs)).clip(
        0, 4
    ), is_same


def _brute_force_accuracies(distances, is_same, thresholds, num_folds) -> tuple[list[float], list[float]]:
    """The protocol word for word: each fold, each threshold, each pair."""
    sizes = [len(distances) // num_folds + (fold < len(distances) % num_folds) for fold in range(num_folds)]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    accuracies, chosen = [], []
    for fold in range(num_folds):
        inside = range(starts[fold], starts[fold + 1])
        outside = [index for index in range(len(distances)) if index not in inside]
        best, best_threshold = -1.0, math.nan
        for threshold in thresholds:
            accuracy = sum((distances[index] < threshold) == is_same[index] for index in outside) / len(outside)
            if accuracy > best:
                best, best_threshold = accuracy, threshold
        chosen.append(best_threshold)
        accuracies.append(sum((distances[index] < best_threshold) == is_same[index] for index in inside) / len(inside))
    return accuracies, chosen


def test_folds_and_thresholds_of_a_hand_worked_case():
    # Two folds of two pairs, thresholds 0, 1, 2, 3; "same" means distance < threshold.
    #   fold 0: same at 0.5, different at 2.5      fold 1: same at 1.5, different at 1.0
    # Correct pairs by threshold                    0  1  2  3
    #   fold 0                                      1  2  2  1
    #   fold 1 (1.0 < 1 is false: still different)  1  1  1  1
    # Fold 0 is judged at fold 1's first maximum, 0: the same pair is missed, 1 of 2 correct.
    # Fold 1 is judged at fold 0's first maximum, 1: 1.5 is missed, 1.0 is rightly rejected, 1 of 2 correct.
    # Over all pairs 2, 3, 3, 2 are correct: threshold 1.
    result = verify_distances([0.5, 2.5, 1.5, 1.0], [True, False, True, False], thresholds_T=[0, 1, 2, 3], num_folds=2)
    assert result.fold_thresholds == (0, 1)
    assert result.fold_accuracies == (0.5, 0.5)
    assert (result.accuracy, result.accuracy_std, result.threshold) == (0.5, 0, 1)


def test_the_deviation_is_that_of_the_population():
    # Fold 0 separates at 1 (same 0.5, different 1.5). Fold 1 is reversed, so its best threshold of 0 and 1 is 0.
    # Fold 0 at threshold 0: 1 of 2. Fold 1 at threshold 1: same 1.5 missed, different 0.5 accepted, 0 of 2.
    # Mean 0.25, population deviation 0.25 (the sample's would be 0.354).
    result = verify_distances([0.5, 1.5, 1.5, 0.5], [True, False, True, False], thresholds_T=[0, 1], num_folds=2)
    assert result.fold_accuracies == (0.5, 0.0)
    assert result.accuracy_std == 0.25


def test_the_published_thresholds_are_400_from_0_by_a_hundredth():
    thresholds = published_thresholds()
    assert len(thresholds) == 400
    assert thresholds[0] == 0
    assert thresholds[-1] == pytest.approx(3.99)


@pytest.mark.parametrize("num_pairs", [40, 47], ids=["even folds", "uneven folds"])
def test_accuracy_is_that_of_the_protocol_word_for_word(num_pairs):
    distances, is_same = _random_pairs(num_pairs, overlap=0.2)
    distances = np.round(16 * distances) / 16  # many lie exactly on a threshold
    thresholds = np.arange(0, 4, 1 / 16)
    accuracies, chosen = _brute_force_accuracies(distances, is_same, thresholds, 10)
    result = verify_distances(distances, is_same, thresholds_T=thresholds)
    assert result.fold_accuracies == pytest.approx(accuracies, abs=1e-12)
    assert result.fold_thresholds == pytest.approx(chosen, abs=0)
    assert result.accuracy == pytest.approx(np.mean(accuracies))
    assert result.accuracy_std == pytest.approx(np.std(accuracies))


def test_roc_auc_and_eer_are_those_of_counting_every_pair():
    distances, is_same = _random_pairs(120, overlap=0.2)
    distances = np.round(distances, 1)  # ties, between same and different pairs too
    same, different = distances[is_same], distances[~is_same]
    roc = roc_curve(distances, is_same)
    for point, threshold in enumerate(np.unique(distances), start=1):
        assert roc.tar[point] == pytest.approx(np.mean([one <= threshold for one in same]))
        assert roc.far[point] == pytest.approx(np.mean([one <= threshold for one in different]))
    wins = [1.0 if one < other else 0.5 if one == other else 0.0 for one in same for other in different]
    assert area_under(roc) == pytest.approx(np.mean(wins))
    # On a fine walk along the ROC's straight pieces the two errors are equal at the EER.
    eer = equal_error_rate(roc)
    walk = np.linspace(0, 1, 20_001)
    far = np.interp(walk, np.linspace(0, 1, len(roc.far)), roc.far)
    tar = np.interp(walk, np.linspace(0, 1, len(roc.tar)), roc.tar)
    assert eer == pytest.approx(far[np.argmin(np.abs(far - (1 - tar)))], abs=1e-3)


def test_tar_at_far_of_a_hand_worked_case():
    # By distance: same 1, same 2, different 3, same 4, different 5 .. different 13 (10 different pairs in all).
    #   up to 2: FAR 0, TAR 2/3     up to 4: FAR 0.1, TAR 1
    distances = np.arange(1.0, 14.0)
    is_same = np.isin(distances, [1, 2, 4])
    roc = roc_curve(distances, is_same)
    found = tar_at_far(roc, [0.5, 0.1, 0.01], num_different=10)
    # One of 10 is the smallest FAR that can be seen: 0.01 is not measurable.
    assert found == {0.5: 1.0, 0.1: 1.0, 0.01: None}
    roc = Roc(far=np.array([0, 0, 1.0]), tar=np.array([0, 0.4, 1.0]), thresholds=np.zeros(3))
    assert tar_at_far(roc, [0.1], num_different=10) == {0.1: 0.4}


def _brute_force_published_tar(distances, is_same, far, num_folds):
    """Fold by fold, threshold by threshold: the first crossing of the FAR, joined by a straight line."""
    sizes = [len(distances) // num_folds + (fold < len(distances) % num_folds) for fold in range(num_folds)]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    tars = []
    for fold in range(num_folds):
        inside = range(starts[fold], starts[fold + 1])
        different = [d for i, d in enumerate(distances) if i not in inside and not is_same[i]]
        before, chosen = 0.0, 0.0
        for step in range(4000):
            now = sum(d < step * 0.001 for d in different) / len(different)
            if now >= far:
                chosen = 0.001 * (step - 1 + (far - before) / (now - before))
                break
            before = now
        same = [distances[i] for i in inside if is_same[i]]
        tars.append(sum(d < chosen for d in same) / len(same))
    return np.mean(tars)


def test_the_published_tar_is_that_of_its_grid_word_for_word():
    distances, is_same = _random_pairs(200, overlap=0.3)
    for far in (0.05, 0.3):
        want = _brute_force_published_tar(distances, is_same, far, 5)
        assert published_tar_at_far(distances, is_same, far=far, num_folds=5) == pytest.approx(want, abs=1e-12)
    # Beyond the last threshold nothing is interpolated: the FAR is never reached.
    assert published_tar_at_far(np.full(20, 3.9995), np.arange(20) % 2 == 0, num_folds=2) == 0


def test_a_far_that_is_a_whole_number_of_pairs_is_reached_in_spite_of_rounding():
    # 29 of 100 different pairs lie below the same pairs, and 0.29 * 100 is 28.999999999999996.
    distances = np.concatenate([np.full(29, 0.1), np.full(71, 2.0), np.full(100, 1.0)])
    roc = roc_curve(distances, np.arange(200) >= 100)
    assert tar_at_far(roc, [0.29, 0.28], num_different=100) == {0.29: 1.0, 0.28: 0.0}


def test_eer_of_a_hand_worked_case():
    # Distances: same 1, same 2, different 3, same 4, different 5, different 6.
    # After 2: FAR 0, FRR 1/3. After 3: FAR 1/3, FRR 1/3: equal.
    roc = roc_curve(np.array([1.0, 2, 3, 4, 5, 6]), np.array([True, True, False, True, False, False]))
    assert equal_error_rate(roc) == pytest.approx(1 / 3)
    # All distances equal: from (0, 0) straight to (1, 1), which meets FAR = 1 - TAR at a half.
    assert equal_error_rate(roc_curve(np.ones(4), np.array([True, False, True, False]))) == pytest.approx(0.5)


def test_distances_are_squared_and_between_directions():
    embeddings = [[3.0, 0.0], [0.0, 5.0], [1.0, 1.0], [2.0, 2.0], [1.0, 0.0], [-9.0, 0.0]]
    assert squared_distances(np.array(embeddings)) == pytest.approx([2, 0, 4], abs=1e-15)


def test_a_perfect_model_is_always_right():
    rng = np.random.default_rng(0)
    is_same = np.tile(np.repeat([True, False], 15), 10)
    first = rng.normal(size=(300, 64))
    second = np.where(is_same[:, None], first + rng.normal(scale=0.05, size=first.shape), rng.normal(size=first.shape))
    result = score_embeddings(np.stack([first, second], 1).reshape(600, 64), is_same, xnorm=8.0).verification
    assert (result.accuracy, result.accuracy_std, result.auc, result.eer) == (1, 0, 1, 0)
    assert (result.num_pairs, result.num_same, result.xnorm) == (300, 150, 8.0)
    assert result.tar_at_far[1e-2] == 1.0
    assert result.tar_at_far[1e-3] is None


def test_a_random_model_guesses():
    rng = np.random.default_rng(0)
    is_same = np.tile(np.repeat([True, False], 150), 10)
    result = score_embeddings(rng.normal(size=(6000, 32)), is_same).verification
    assert result.accuracy == pytest.approx(0.5, abs=0.03)
    assert result.auc == pytest.approx(0.5, abs=0.03)
    assert result.eer == pytest.approx(0.5, abs=0.03)


def test_the_order_of_pairs_within_a_fold_and_of_whole_folds_does_not_matter():
    distances, is_same = _random_pairs(200, overlap=0.2)
    rng = np.random.default_rng(1)
    folds = [rng.permutation(20) + 20 * fold for fold in rng.permutation(10)]
    order = np.concatenate(folds)
    straight, shuffled = verify_distances(distances, is_same), verify_distances(distances[order], is_same[order])
    assert shuffled.accuracy == pytest.approx(straight.accuracy)
    assert sorted(shuffled.fold_accuracies) == sorted(straight.fold_accuracies)
    assert (shuffled.auc, shuffled.eer, shuffled.tar_at_far, shuffled.threshold) == (
        straight.auc,
        straight.eer,
        straight.tar_at_far,
        straight.threshold,
    )


def test_any_order_of_pairs_gives_the_same_roc():
    distances, is_same = _random_pairs(200, overlap=0.2)
    order = np.random.default_rng(1).permutation(200)
    straight, shuffled = verify_distances(distances, is_same), verify_distances(distances[order], is_same[order])
    assert (shuffled.auc, shuffled.eer, shuffled.tar_at_far) == (straight.auc, straight.eer, straight.tar_at_far)


def test_the_two_images_of_a_pair_may_be_swapped_and_embeddings_rescaled():
    rng = np.random.default_rng(0)
    embeddings, is_same = rng.normal(size=(80, 16)), np.arange(40) % 2 == 0
    swapped = embeddings.reshape(40, 2, 16)[:, ::-1].reshape(80, 16) * 8.0
    both = [score_embeddings(one, is_same).verification for one in (swapped, embeddings)]
    assert both[0] == both[1]


def test_scored_pairs_carry_cosines():
    rng = np.random.default_rng(0)
    embeddings = rng.normal(size=(40, 8)).astype(np.float32)
    scored = score_embeddings(embeddings, np.arange(20) % 2, xnorm=None)
    left, right = embeddings[0::2], embeddings[1::2]
    cosines = (left * right).sum(1) / np.linalg.norm(left, axis=1) / np.linalg.norm(right, axis=1)
    assert scored.similarities_N == pytest.approx(cosines, abs=1e-6)
    assert scored.is_same_N.dtype == bool


def test_the_result_is_plain_json():
    distances, is_same = _random_pairs(60, overlap=0.4)
    result = verify_distances(distances, is_same, xnorm=3.5)
    restored = json.loads(json.dumps(result.to_json()))
    assert restored["accuracy"] == result.accuracy
    assert list(restored["tar_at_far"]) == ["1e-1", "1e-2", "1e-3", "1e-4", "1e-5", "1e-6"]
    assert restored["tar_at_far"]["1e-6"] is None
    assert [far_name(far) for far in (0.05, 1.0)] == ["5e-2", "1e0"]


def _good_embeddings() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(40, 4))


@pytest.mark.parametrize(
    ("embeddings", "is_same", "message"),
    [
        (_good_embeddings()[:18], np.arange(9) % 2, "9 pairs cannot be split into 10 folds"),
        (_good_embeddings()[:0], np.arange(0), "0 pairs cannot be split into 10 folds"),
        (_good_embeddings(), np.ones(20), "All 20 pairs are labelled same"),
        (_good_embeddings(), np.zeros(20), "All 20 pairs are labelled different"),
    ],
    ids=["fewer pairs than folds", "empty", "all same", "all different"],
)
def test_what_cannot_be_verified_is_refused(embeddings, is_same, message):
    with pytest.raises(DataError, match=message):
        score_embeddings(embeddings, is_same)
