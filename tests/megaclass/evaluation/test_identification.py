"""Rank-k, TPIR at FPIR and MegaFace's protocol: hand-worked, against loops over all scores, and by properties."""

import numpy as np
import pytest
import torch
from tests.megaclass.evaluation.conftest import write_megaface_feature

from megaclass.errors import DataError
from megaclass.evaluation.gallery import labels_of, read_megaface_features
from megaclass.evaluation.protocols.identification import (
    numbers_of,
    numbers_of_scores,
    published_ijb_tpir,
    rank_among_distractors,
)
from megaclass.evaluation.search import GalleryShard, search, shard_of_rank

_CPU = torch.device("cpu")


def identify(probes, labels, gallery, *, num_gallery, device):
    found = search(probes, gallery, k=10, device=device, probe_labels_P=labels)
    return numbers_of(found, num_gallery=num_gallery)


def _unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def test_rank_and_tpir_of_a_hand_worked_case():
    # Three mated probes: mate first at 0.9; one other above the mate (0.5 < 0.6); a tie at 0.7, which counts against.
    # Ten unmated probes whose best scores are 0.0, 0.05 .. 0.45; one of them (FPIR 0.1) may pass, so the threshold
    # is the second highest, 0.40: probe 0 passes it, probes 1 and 2 are not first. TPIR at 0.1 = 1 / 3.
    mates = np.array([0.9, 0.5, 0.7] + [-np.inf] * 10)
    others = np.full((13, 10), -1.0)
    others[1, 0], others[2, 0] = 0.6, 0.7
    others[3:, 0] = np.arange(10) * 0.05
    numbers = numbers_of_scores(mates, others, num_gallery=20)
    assert (numbers["num_mated"], numbers["num_unmated"]) == (3, 10)
    assert numbers["rank_k"] == {"1": pytest.approx(1 / 3), "5": 1.0, "10": 1.0}
    assert numbers["tpir_at_fpir"] == {"0.1": pytest.approx(1 / 3), "0.01": None, "0.001": None}


def test_numbers_are_those_of_looping_over_all_scores():
    rng = np.random.default_rng(0)
    people = rng.normal(size=(60, 8))
    gallery_labels, probe_labels = np.repeat(np.arange(40), 3), np.repeat(np.arange(60), 5)
    gallery = _unit(people[gallery_labels] + rng.normal(scale=0.7, size=(120, 8)))
    probes = _unit(people[probe_labels] + rng.normal(scale=0.7, size=(300, 8)))
    got = identify(probes, probe_labels, shard_of_rank(gallery, gallery_labels), num_gallery=120, device=_CPU)

    hits, firsts, impostors = {1: 0, 5: 0, 10: 0}, [], []
    for probe, label in zip(probes.astype(float), probe_labels, strict=True):
        scores = gallery.astype(float) @ probe
        mates, others = scores[gallery_labels == label], scores[gallery_labels != label]
        if not len(mates):
            impostors.append(others.max())
            continue
        place = 1 + (others >= mates.max()).sum()
        for k in hits:
            hits[k] += place <= k
        if place == 1:
            firsts.append(mates.max())
    assert got["num_mated"] == 200
    assert got["rank_k"] == {str(k): pytest.approx(num / 200) for k, num in hits.items()}
    for fpir in (0.1, 0.01):
        # The lowest threshold that lets no more than the allowed share of unmated probes pass.
        allowed = [t for t in [*impostors, np.inf] if np.mean(np.array(impostors) > t) <= fpir]
        assert got["tpir_at_fpir"][f"{fpir:g}"] == pytest.approx(np.sum(np.array(firsts) > min(allowed)) / 200)
    assert got["tpir_at_fpir"]["0.001"] is None


def test_a_perfect_model_finds_everybody_and_one_that_sees_no_difference_nobody():
    people = _unit(np.random.default_rng(0).normal(size=(50, 16)))
    labels = np.arange(50)
    perfect = identify(people, labels, shard_of_rank(people[:40], labels[:40]), num_gallery=40, device=_CPU)
    assert set(perfect["rank_k"].values()) == {1.0}
    assert perfect["tpir_at_fpir"]["0.1"] == 1.0
    same = np.repeat(people[:1], 50, axis=0)
    blind = identify(same, labels, shard_of_rank(same[:40], labels[:40]), num_gallery=40, device=_CPU)
    assert set(blind["rank_k"].values()) == {0.0}
    assert blind["tpir_at_fpir"]["0.1"] == 0.0


def test_the_order_of_probes_and_gallery_does_not_matter():
    rng = np.random.default_rng(0)
    gallery, probes = _unit(rng.normal(size=(30, 8))), _unit(rng.normal(size=(45, 8)))
    gallery_labels, probe_labels = np.arange(30), np.arange(45) % 35
    straight = identify(probes, probe_labels, shard_of_rank(gallery, gallery_labels), num_gallery=30, device=_CPU)
    one, two = rng.permutation(45), rng.permutation(30)
    shuffled = identify(
        probes[one], probe_labels[one], shard_of_rank(gallery[two], gallery_labels[two]), num_gallery=30, device=_CPU
    )
    assert shuffled == straight


def test_the_published_threshold_is_one_of_all_impostor_scores():
    # Four probes; FPIR 0.5 takes the ceil(0.5 x 4) = 2nd highest of all impostor scores, 0.8; mates above it: 2 of 4.
    mates = np.array([0.95, 0.85, 0.8, 0.1])
    assert published_ijb_tpir(mates, np.array([0.9, 0.8, 0.7]), 0.5) == 0.5
    assert published_ijb_tpir(mates, np.array([0.9]), 0.5) is None


def _distractor_case() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    people = rng.normal(size=(8, 6))
    labels = np.repeat(np.arange(8), 3)
    return _unit(people[labels] + rng.normal(scale=0.8, size=(24, 6))), labels, _unit(rng.normal(size=(130, 6)))


def _rank_on_this_rank():
    probes, labels, distractors = _distractor_case()
    return rank_among_distractors(probes, labels, shard_of_rank(distractors), num_distractors=130, device=_CPU)


def _check_against_all_pairs(got):
    probes, labels, distractors = _distractor_case()
    scores = probes.astype(float) @ distractors.astype(float).T
    assert (got["num_probes"], got["num_pairs"]) == (24, 8 * 3 * 2)
    assert list(got["rank_k"]) == ["10", "100", "130"]
    for size, ranks in got["rank_k"].items():
        for k, share in ranks.items():
            hits = [
                (scores[a, : int(size)] >= probes[a].astype(float) @ probes[b].astype(float)).sum() < int(k)
                for a in range(24)
                for b in range(24)
                if a != b and labels[a] == labels[b]
            ]
            assert share == pytest.approx(np.mean(hits))


def test_rank_among_distractors_is_that_of_trying_every_pair():
    _check_against_all_pairs(_rank_on_this_rank())


def test_distractors_may_be_spread_over_ranks(run_ranks):
    for got in run_ranks(2, _rank_on_this_rank):
        _check_against_all_pairs(got)


def test_probes_without_a_second_image_are_refused():
    with pytest.raises(DataError, match="No identity has two probe images"):
        rank_among_distractors(
            np.eye(3, dtype=np.float32),
            np.arange(3),
            GalleryShard(embeddings_ND=np.eye(3, dtype=np.float32)),
            num_distractors=3,
            device=_CPU,
        )


def test_feature_files_come_back(tmp_path):
    vectors = np.random.default_rng(0).normal(size=(3, 7)).astype(np.float32)
    paths = [tmp_path / f"{number}.bin" for number in range(3)]
    for path, vector in zip(paths, vectors, strict=True):
        write_megaface_feature(path, vector)
    assert paths[0].read_bytes()[:16] == b"\x07\0\0\0\x01\0\0\0\x04\0\0\0\x05\0\0\0"
    np.testing.assert_array_equal(read_megaface_features(paths), vectors)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x07\0\0\0\x01\0\0\0\x04\0\0\0\x05\0\0\0", b"\x01\0\0\0\x02\0\0\0\x04\0\0\0\x05\0\0\0abcd", b"\x89PNG" * 9],
    ids=["empty", "cut off", "other mark", "a picture"],
)
def test_what_is_no_feature_file_is_refused_by_name(tmp_path, content):
    path = tmp_path / "features.bin"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"features\.bin is not a MegaFace feature file"):
        read_megaface_features([path])


def test_files_of_different_models_are_refused(tmp_path):
    write_megaface_feature(tmp_path / "a.bin", np.zeros(3, np.float32))
    write_megaface_feature(tmp_path / "b.bin", np.zeros(4, np.float32))
    with pytest.raises(DataError, match=r"b\.bin holds 4 numbers, .*a\.bin 3"):
        read_megaface_features([tmp_path / "a.bin", tmp_path / "b.bin"])


def test_names_unknown_to_the_gallery_get_numbers_of_their_own():
    assert labels_of(["anna", "bert", "carl", "bert"], {"anna": 0, "dora": 1}).tolist() == [0, 2, 3, 2]
