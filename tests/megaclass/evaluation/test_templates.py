"""IJB's protocol on a small set written in its layout, against loops that follow the words of the protocol."""

import numpy as np
import pytest
import torch
from torch import nn

from megaclass.data.align import IJB_POINTS, STANDARD_POINTS, align
from megaclass.errors import DataError
from megaclass.evaluation.protocol import EvaluationSet, Evaluator
from megaclass.evaluation.protocols.templates import evaluate_ijb, read_ijb, template_features
from megaclass.evaluation.sets import evaluate_sets, find_sets

_CPU = torch.device("cpu")
_NUM_TEMPLATES, _NUM_SUBJECTS, _SIZE = 24, 8, 16


class Flatten(nn.Module):
    """An embedding that is easy to follow: the pixels themselves, a little more of the left than of the right."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = torch.linspace(1, 2, x.shape[-1])
        return (x * weights).flatten(1)


@pytest.fixture
def ijb_folder(tmp_path, picture):
    """24 templates of 8 subjects, three each: gallery G1 (4 subjects), G2 (the other 4), probes (the rest)."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "IJBC"
    (folder / "loose_crop").mkdir(parents=True)
    (folder / "meta").mkdir()
    members, landmarks = [], []
    for template in range(_NUM_TEMPLATES):
        for frame in range(1 + template % 4):
            name = f"{len(members)}.png"
            subject = template % _NUM_SUBJECTS
            (folder / "loose_crop" / name).write_bytes(picture(subject, len(members), 120))
            # Frames 0 and 1 of a template come from one video, later ones from photos.
            members.append(f"{name} {100 + template} {template * 10 + max(0, frame - 1)}")
            points = STANDARD_POINTS + rng.normal(scale=2, size=(5, 2))
            coordinates = " ".join(f"{value:.3f}" for value in points.ravel())
            landmarks.append(f"{name} {coordinates} {rng.uniform(0.5, 1):.4f}")
    pairs = [
        f"{100 + a} {100 + b} {int(a % _NUM_SUBJECTS == b % _NUM_SUBJECTS)}"
        for a in range(_NUM_TEMPLATES)
        for b in range(a)
    ]
    meta = {
        "ijbc_face_tid_mid.txt": members,
        "ijbc_name_5pts_score.txt": landmarks,
        "ijbc_template_pair_label.txt": pairs,
        "ijbc_1N_gallery_G1.csv": ["TEMPLATE_ID,SUBJECT_ID", *(f"{100 + s},{s}" for s in range(4)), "100,0"],
        "ijbc_1N_gallery_G2.csv": ["TEMPLATE_ID,SUBJECT_ID", *(f"{100 + s},{s}" for s in range(4, 8))],
        "ijbc_1N_probe_mixed.csv": ["TEMPLATE_ID,SUBJECT_ID", *(f"{100 + t},{t % 8}" for t in range(8, 24))],
    }
    for name, lines in meta.items():
        (folder / "meta" / name).write_text("\n".join(lines) + "\n")
    return folder


def _templates_word_for_word(ijb):
    """f + mirrored f of the aligned photo, times the score; mean over a medium's frames, sum over media, normalised."""
    model, templates = Flatten(), {}
    for photo, points, score, template, medium in zip(
        ijb.photos, ijb.points_N52, ijb.scores_N, ijb.templates_N, ijb.media_N, strict=True
    ):
        from PIL import Image

        pixels = align(np.asarray(Image.open(photo).convert("RGB")), points, _SIZE, where="x", standard_52=IJB_POINTS)
        image = (torch.from_numpy(pixels.copy()).permute(2, 0, 1).double()[None] / 255 - 0.5) / 0.5
        feature = (model(image) + model(image.flip(3)))[0].numpy() * score
        templates.setdefault(template, {}).setdefault(medium, []).append(feature)
    return {
        template: sum(np.mean(frames, axis=0) for frames in media.values()) for template, media in templates.items()
    }


def _cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def test_scores_and_numbers_are_those_of_the_protocol_word_for_word(ijb_folder):
    ijb = read_ijb(ijb_folder)
    result, distances_M, _ = evaluate_ijb(
        Evaluator(network=Flatten(), image_size=_SIZE, device=_CPU, batch_size=7), ijb
    )
    templates = _templates_word_for_word(ijb)
    want = [2 - 2 * _cosine(templates[a], templates[b]) for a, b, _ in ijb.pairs_M3]
    np.testing.assert_allclose(distances_M, want, atol=1e-5)
    same = [d for d, (_, _, label) in zip(want, ijb.pairs_M3, strict=True) if label]
    different = sorted(d for d, (_, _, label) in zip(want, ijb.pairs_M3, strict=True) if not label)
    allowed = int(0.1 * len(different))
    tar = np.mean(np.array(same) < different[allowed])
    assert result["tar_at_far"]["1e-1"] == pytest.approx(tar, abs=2 / len(same))
    assert result["tar_at_far"]["1e-3"] is None
    assert (result["num_pairs"], result["num_same"]) == (24 * 23 // 2, 24)

    # 1:N: subjects of G2 have no mate in G1 and the other way round; a template listed twice counts once.
    for name, subjects in (("G1", range(4)), ("G2", range(4, 8)), ("joined", range(8))):
        hits = 0
        mated = [t for t in range(8, 24) if t % 8 in subjects]
        for probe in mated:
            scores = {s: _cosine(templates[100 + probe], templates[100 + s]) for s in subjects}
            hits += max(scores, key=scores.get) == probe % 8
        numbers = result["identification"][name]
        assert (numbers["num_gallery"], numbers["num_mated"], numbers["num_unmated"]) == (
            len(subjects),
            len(mated),
            16 - len(mated),
        )
        assert numbers["rank_k"]["1"] == pytest.approx(hits / len(mated))
    probes = range(8, 24)
    impostors = sorted(
        (_cosine(templates[100 + p], templates[100 + s]) for p in probes for s in range(8) if s != p % 8), reverse=True
    )
    mates = [_cosine(templates[100 + p], templates[100 + p % 8]) for p in probes]
    threshold = impostors[int(np.ceil(0.1 * 16)) - 1]
    assert result["published_tpir_at_fpir"]["0.1"] == pytest.approx(np.mean(np.array(mates) > threshold))


def test_template_features_of_a_hand_worked_case():
    # Template 5: medium 1 has frames (2, 0) and (0, 2), mean (1, 1); medium 2 has (2, 3): sum (3, 4), normalised.
    features = np.array([[2.0, 0], [7, 0], [0, 2], [2, 3]])
    rows, ids = template_features(features, np.array([5, 2, 5, 5]), np.array([1, 1, 1, 2]))
    assert ids.tolist() == [2, 5]
    np.testing.assert_allclose(rows, [[1, 0], [0.6, 0.8]])


def _evaluate_on_this_rank(folder: str) -> dict:
    from pathlib import Path

    evaluator = Evaluator(network=Flatten(), image_size=_SIZE, device=_CPU)
    (result,) = evaluate_sets(evaluator, [EvaluationSet(name="ijbc", kind="templates", path=Path(folder))])
    return result.to_json()


def test_ranks_share_the_work_and_get_the_numbers_of_one(run_ranks, ijb_folder):
    assert [one.kind for one in find_sets([ijb_folder])] == ["templates"]
    want = _evaluate_on_this_rank(str(ijb_folder))
    assert want["identification"]["joined"]["rank_k"]["1"] == 1.0
    for got in run_ranks(2, _evaluate_on_this_rank, str(ijb_folder)):
        assert got["auc"] == pytest.approx(want["auc"])
        assert got["identification"] == want["identification"]


def test_without_the_1_to_n_files_there_are_1_to_1_numbers(ijb_folder):
    for path in (ijb_folder / "meta").glob("*_1N_*"):
        path.unlink()
    assert "identification" not in _evaluate_on_this_rank(str(ijb_folder))


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        ("template_pair_label.txt", "100 999 0", r"Template 999 in .*_template_pair_label\.txt has no images"),
        ("1N_probe_mixed.csv", "998,3", r"Template 998 in .*_1N_probe_mixed\.csv has no images"),
        ("template_pair_label.txt", "100 101", r"Line 277 of .*_template_pair_label\.txt has 2 columns: expected 3"),
        ("template_pair_label.txt", "100 x 1", r"Line 277 of .*_template_pair_label\.txt: could not convert"),
        ("face_tid_mid.txt", "x.png 1 1", r"_face_tid_mid\.txt has 61 lines, .*_name_5pts_score\.txt 60"),
    ],
)
def test_what_the_lists_contradict_is_named_with_file_and_item(ijb_folder, file, line, message):
    with (ijb_folder / "meta" / f"ijbc_{file}").open("a") as opened:
        opened.write(line + "\n")
    with pytest.raises(DataError, match=message):
        read_ijb(ijb_folder)


def test_a_photo_that_is_missing_or_damaged_is_named(ijb_folder):
    (ijb_folder / "loose_crop" / "7.png").write_bytes(b"no image")
    assert "7.png" in _evaluate_on_this_rank(str(ijb_folder))["error"]
    (ijb_folder / "loose_crop" / "3.png").unlink()
    assert "Cannot read " in _evaluate_on_this_rank(str(ijb_folder))["error"]
