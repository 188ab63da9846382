"""Retrieval against loops over the sorted gallery and against scikit-learn, on one rank and on several."""

import json

import numpy as np
import pytest
import torch

from megaclass.cli.main import main
from megaclass.errors import DataError
from megaclass.evaluation.protocols import retrieval
from megaclass.evaluation.protocols.retrieval import retrieve
from megaclass.evaluation.search import GalleryShard, rows_of_rank

_CPU = torch.device("cpu")


def _case() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Queries with 1 to 9 mates, some with none; gallery entries of identities that are not asked for."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(30, 8))
    gallery_labels = np.repeat(np.arange(25), 1 + np.arange(25) % 9)
    query_labels = np.repeat(np.arange(5, 30), 2)
    gallery = centres[gallery_labels] + rng.normal(size=(len(gallery_labels), 8))
    queries = centres[query_labels] + rng.normal(size=(len(query_labels), 8))
    unit = [(rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32) for rows in (queries, gallery)]
    return unit[0], query_labels, unit[1], gallery_labels


def _on_this_rank() -> dict:
    queries, query_labels, gallery, gallery_labels = _case()
    part = rows_of_rank(len(gallery))
    shard = GalleryShard(embeddings_ND=gallery[part.start : part.stop], first=part.start)
    return retrieve(queries, query_labels, shard, gallery_labels, device=_CPU)


def _check(got: dict) -> None:
    queries, query_labels, gallery, gallery_labels = _case()
    scores = queries.astype(np.float64) @ gallery.astype(np.float64).T
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(float(value))

    for row, label in zip(scores, query_labels, strict=True):
        hits = (gallery_labels == label)[np.argsort(-row)]
        num = hits.sum()
        if not num:
            continue
        precision = np.cumsum(hits) / np.arange(1, len(hits) + 1)
        note("map", precision[hits].mean())
        note("map_at_r", (precision * hits)[:num].sum() / num)
        note("minp", num / (np.flatnonzero(hits)[-1] + 1))
        for k in (1, 5, 10):
            note(f"cmc {k}", hits[:k].any())
            note(f"recall_at_k {k}", hits[:k].sum() / num)
            note(f"precision_at_k {k}", hits[:k].sum() / k)
    assert (got["num_queries"], got["num_unmated"]) == (40, 10) == (len(found["map"]), 10)
    for name, values in found.items():
        key, _, k = name.partition(" ")
        assert (got[key][k] if k else got[key]) == pytest.approx(np.mean(values)), name
    # Open set: the best score of a query without mates that one of ten such queries exceeds.
    is_mated = np.isin(query_labels, gallery_labels)
    threshold = np.sort(scores[~is_mated].max(1))[-2]
    best = scores[is_mated].max(1)
    is_right = gallery_labels[scores[is_mated].argmax(1)] == query_labels[is_mated]
    assert got["tpir_at_fpir"]["0.1"] == pytest.approx((is_right & (best > threshold)).mean())


def test_the_numbers_are_those_of_sorting_the_gallery(monkeypatch):
    _check(_on_this_rank())
    monkeypatch.setattr("megaclass.evaluation.search._MAX_GALLERY_BLOCK", 16)
    monkeypatch.setattr("megaclass.evaluation.search._BLOCK_BYTES", {"cpu": 500})
    _check(_on_this_rank())
    monkeypatch.setattr(retrieval, "_MAX_COMPARED", 2)
    monkeypatch.setitem(retrieval._MAX_PLACES, "cpu", 30)
    _check(_on_this_rank())


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_gallery_may_be_spread_over_ranks(run_ranks, num_ranks):
    found = run_ranks(num_ranks, _on_this_rank)
    for got in found:
        _check(got)
        assert json.dumps(got) == json.dumps(found[0])


def test_mean_average_precision_is_that_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    queries, query_labels, gallery, gallery_labels = _case()
    scores, is_mate = queries @ gallery.T, query_labels[:, None] == gallery_labels
    rows = is_mate.any(1)
    want = np.mean([metrics.average_precision_score(*one) for one in zip(is_mate[rows], scores[rows], strict=True)])
    assert _on_this_rank()["map"] == pytest.approx(want)
    ranked = metrics.label_ranking_average_precision_score(is_mate[rows], scores[rows])
    assert _on_this_rank()["map"] == pytest.approx(ranked)


def test_ties_count_against_the_model():
    same = np.repeat(np.eye(4, dtype=np.float32)[:1], 10, axis=0)
    got = retrieve(same[:2], np.array([0, 1]), GalleryShard(embeddings_ND=same), np.arange(10) % 5, device=_CPU)
    # Both mates come after the eight others: the precision is 1 of 9 and 2 of 10.
    assert got["map"] == pytest.approx((1 / 9 + 2 / 10) / 2)
    assert got["cmc"] == {"1": 0.0, "5": 0.0, "10": 1.0} and got["minp"] == pytest.approx(0.2)


def test_a_query_does_not_find_itself():
    _, _, gallery, labels = _case()
    keys = np.arange(len(gallery))
    shard = GalleryShard(embeddings_ND=gallery, keys_N=keys)
    got = retrieve(gallery, labels, shard, labels, query_keys_P=keys, device=_CPU)
    want = [
        retrieve(
            gallery[[n]],
            labels[[n]],
            GalleryShard(embeddings_ND=np.delete(gallery, n, 0)),
            np.delete(labels, n),
            device=_CPU,
        )["map"]
        for n in range(len(gallery))
        if (labels == labels[n]).sum() > 1
    ]
    assert got["num_unmated"] == len(gallery) - len(want)
    assert got["map"] == pytest.approx(np.mean(want))


def test_queries_without_any_mate_are_refused():
    rows = np.eye(3, dtype=np.float32)
    with pytest.raises(DataError, match="No query has a mate in the gallery: their identities have no name in common"):
        retrieve(rows, np.array([7, 8, 9]), GalleryShard(embeddings_ND=rows), np.arange(3), device=_CPU)
    with pytest.raises(DataError, match="No query has a mate in the gallery but itself"):
        keyed = GalleryShard(embeddings_ND=rows, keys_N=np.arange(3))
        retrieve(rows, np.arange(3), keyed, np.arange(3), query_keys_P=np.arange(3), device=_CPU)


def test_the_command_retrieves_from_lists(make_run, tmp_path, picture, capsys):
    run = make_run()
    lines = []
    for person in range(5):
        for take in range(3):
            (tmp_path / f"{person}-{take}.png").write_bytes(picture(person, take))
            lines.append(f"{person}-{take}.png\tperson {person}\n")
    (tmp_path / "gallery.txt").write_text("".join(line for line in lines if "-0" not in line))
    (tmp_path / "queries.txt").write_text("".join(line for line in lines if "-0" in line))
    command = ["evaluate", str(run), "--gallery", str(tmp_path / "gallery.txt"), "--device", "cpu"]
    assert main([*command, "--queries", str(tmp_path / "queries.txt")]) == 0
    printed = capsys.readouterr().out
    assert "queries from gallery mAP 100.00 %, CMC@1 100.00 %" in printed and "mINP: 100.00 %" in printed
    assert main(["report", str(run)]) == 0
    assert "5 queries with mates among 10 gallery entries" in (run / "report.html").read_text()
    (tmp_path / "queries.txt").write_text("one\n")
    assert main([*command, "--queries", str(tmp_path / "queries.txt")]) == 2
    assert "Line 1 of" in capsys.readouterr().out
    assert main(["evaluate", str(run), "--queries", "q"]) == 2
    assert "--queries need --gallery" in capsys.readouterr().err
