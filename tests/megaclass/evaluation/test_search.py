"""Blocked, sharded search against float64 brute force and hand-worked identification."""

import numpy as np
import pytest
import torch

from megaclass.evaluation.search import NO_LABEL, GalleryShard, search, shard_of_rank

_CPU = torch.device("cpu")


def _unit(num_rows: int, width: int, seed: int) -> np.ndarray:
    rows = np.random.default_rng(seed).normal(size=(num_rows, width))
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def _case() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Probes and gallery with labels; some gallery entries are nobody's, some probes have no mate."""
    probes, gallery = _unit(23, 12, 0), _unit(301, 12, 1)
    gallery_labels = np.arange(301) % 40
    gallery_labels[::7] = NO_LABEL
    return probes, np.arange(23) * 2, gallery, gallery_labels


def _brute_force(k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    probes, probe_labels, gallery, gallery_labels = _case()
    scores = probes.astype(np.float64) @ gallery.astype(np.float64).T
    is_mate = (probe_labels[:, None] == gallery_labels) & (gallery_labels != NO_LABEL)
    mates = np.where(is_mate, scores, -np.inf).max(axis=1)
    others = np.where(is_mate, -np.inf, scores)
    order = np.argsort(-others, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(others, order, axis=1), order, mates


def _search_on_this_rank(k: int) -> tuple[np.ndarray, ...]:
    probes, probe_labels, gallery, gallery_labels = _case()
    found = search(probes, shard_of_rank(gallery, gallery_labels), k=k, device=_CPU, probe_labels_P=probe_labels)
    return found.other_scores_Pk.numpy(), found.other_indices_Pk.numpy(), found.mate_scores_P.numpy()


@pytest.mark.parametrize("block_bytes", [2**26, 1, 301 * 4 * 5], ids=["one block", "a probe at a time", "five probes"])
def test_blocks_of_any_size_find_what_brute_force_finds(monkeypatch, block_bytes):
    monkeypatch.setattr("megaclass.evaluation.search._BLOCK_BYTES", {"cpu": block_bytes})
    want_scores, want_indices, want_mates = _brute_force(10)
    scores, indices, mates = _search_on_this_rank(10)
    np.testing.assert_allclose(scores, want_scores, atol=1e-6)
    np.testing.assert_array_equal(indices, want_indices)
    np.testing.assert_allclose(mates, want_mates, atol=1e-6)


def test_blocks_of_the_gallery_are_joined(monkeypatch):
    monkeypatch.setattr("megaclass.evaluation.search._MAX_GALLERY_BLOCK", 16)
    np.testing.assert_array_equal(_search_on_this_rank(10)[1], _brute_force(10)[1])


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_shards_on_ranks_find_what_one_rank_finds_on_every_rank(run_ranks, num_ranks):
    want_scores, want_indices, want_mates = _brute_force(10)
    for scores, indices, mates in run_ranks(num_ranks, _search_on_this_rank, 10):
        np.testing.assert_allclose(scores, want_scores, atol=1e-6)
        np.testing.assert_array_equal(indices, want_indices)
        np.testing.assert_allclose(mates, want_mates, atol=1e-6)


def test_a_gallery_smaller_than_k_leaves_places_empty():
    found = search(_unit(2, 4, 0), GalleryShard(embeddings_ND=_unit(3, 4, 1)), k=5, device=_CPU)
    assert torch.isfinite(found.other_scores_Pk).sum(dim=1).tolist() == [3, 3]
    assert torch.isneginf(found.mate_scores_P).all()


def _search_more_ranks_than_rows() -> list[int]:
    gallery = _unit(2, 4, 1)
    return search(gallery, shard_of_rank(gallery), k=1, device=_CPU).other_indices_Pk[:, 0].tolist()


def test_ranks_without_a_row_take_part(run_ranks):
    assert run_ranks(3, _search_more_ranks_than_rows) == [[0, 1]] * 3


def test_a_probe_does_not_find_its_own_image():
    """Probes 0 to 22 are also gallery rows; leaving these out finds what a gallery without them gives to each."""
    probes, probe_labels, gallery, gallery_labels = _case()
    rows = np.arange(23) * 3 + 1
    gallery[rows], gallery_labels[rows] = probes, probe_labels
    keys = np.arange(len(gallery))
    shard = GalleryShard(embeddings_ND=gallery, labels_N=gallery_labels, keys_N=keys)
    found = search(probes, shard, k=5, device=_CPU, probe_labels_P=probe_labels, probe_keys_P=keys[rows])
    for probe, row in enumerate(rows):
        others = GalleryShard(embeddings_ND=np.delete(gallery, row, 0), labels_N=np.delete(gallery_labels, row))
        alone = search(probes[[probe]], others, k=5, device=_CPU, probe_labels_P=probe_labels[[probe]])
        np.testing.assert_allclose(found.other_scores_Pk[probe], alone.other_scores_Pk[0], atol=1e-6)
        np.testing.assert_allclose(found.mate_scores_P[probe], alone.mate_scores_P[0], atol=1e-6)
