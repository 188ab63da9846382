"""IJB from photos to numbers, against InsightFace's evaluation written down again with OpenCV and scikit-learn.

Photos are JPEG files; crops are made by cv2.warpAffine, as `eval_ijbc.py` does, 1:1 numbers by scikit-learn's ROC, 1:N numbers
by the loops of `ijb_evals.py`. The network is untrained, so its numbers lie far from 0 and 1.
"""

import numpy as np
import pytest
import torch
from PIL import Image

from megaclass.backbones import build_backbone
from megaclass.data.align import STANDARD_POINTS, similarity_transform
from megaclass.evaluation.protocol import Evaluator
from megaclass.evaluation.protocols.templates import evaluate_ijb, read_ijb

_NUM_SUBJECTS, _TEMPLATES_EACH, _SIZE = 20, 5, 112


@pytest.fixture(scope="module")
def ijb_folder(tmp_path_factory):
    """100 templates of 20 subjects: one of each in a gallery, the others are probes. Photos have noise and several sizes."""
    rng = np.random.default_rng(3)
    folder = tmp_path_factory.mktemp("ijb") / "IJBC"
    (folder / "loose_crop").mkdir(parents=True)
    (folder / "meta").mkdir()
    subjects = [rng.integers(0, 256, (6, 6, 3)) for _ in range(_NUM_SUBJECTS)]
    members, landmarks = [], []
    for template in range(_NUM_SUBJECTS * _TEMPLATES_EACH):
        for frame in range(1 + template % 3):
            name = f"{len(members) + 1}.jpg"
            side = int(rng.integers(90, 260))
            face = Image.fromarray(subjects[template % _NUM_SUBJECTS].astype(np.uint8)).resize((side, side))
            noisy = np.asarray(face) + rng.normal(scale=110, size=(side, side, 3))
            Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(folder / "loose_crop" / name, quality=90)
            members.append(f"{name} {template + 1} {template * 10 + max(0, frame - 1)}")
            # A part of many faces lies outside of the photo.
            points = STANDARD_POINTS * (side / 112) * rng.uniform(0.6, 1.3) + rng.normal(scale=side / 30, size=(5, 2))
            coordinates = " ".join(f"{value:.3f}" for value in points.ravel())
            landmarks.append(f"{name} {coordinates} {rng.uniform(0.5, 1):.3f}")
    templates = range(_NUM_SUBJECTS * _TEMPLATES_EACH)
    pairs = [f"{a + 1} {b + 1} {int(a % _NUM_SUBJECTS == b % _NUM_SUBJECTS)}" for a in templates for b in range(a)]
    half = _NUM_SUBJECTS // 2
    header = "TEMPLATE_ID,SUBJECT_ID"
    meta = {
        "ijbc_face_tid_mid.txt": members,
        "ijbc_name_5pts_score.txt": landmarks,
        "ijbc_template_pair_label.txt": pairs,
        "ijbc_1N_gallery_G1.csv": [header, *(f"{s + 1},{s}" for s in range(half))],
        "ijbc_1N_gallery_G2.csv": [header, *(f"{s + 1},{s}" for s in range(half, _NUM_SUBJECTS))],
        "ijbc_1N_probe_mixed.csv": [header, *(f"{t + 1},{t % _NUM_SUBJECTS}" for t in templates[_NUM_SUBJECTS:])],
    }
    for name, lines in meta.items():
        (folder / "meta" / name).write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def untrained():
    torch.manual_seed(0)
    return build_backbone("slim", embedding_dim=64, image_size=_SIZE).eval()


@torch.no_grad()
def _published_templates(folder, network):
    """Returns the normalised template of each number, as eval_ijbc.py computes it."""
    cv2 = pytest.importorskip("cv2", reason="pip install -e 'packages/megaclass[dev]' brings opencv-python-headless")
    target = np.array(
        [[30.2946, 51.6963], [65.5318, 51.5014], [48.0252, 71.7366], [33.5493, 92.3655], [62.7299, 92.2041]],
        dtype=np.float32,
    )
    target[:, 0] += 8.0
    features, medium_of = {}, {}
    for line in (folder / "meta" / "ijbc_face_tid_mid.txt").read_text().splitlines():
        name, template, medium = line.split()
        medium_of[name] = (int(template), int(medium))
    for line in (folder / "meta" / "ijbc_name_5pts_score.txt").read_text().splitlines():
        name, *numbers = line.split(" ")
        photo = cv2.imread(str(folder / "loose_crop" / name))
        points = np.array(numbers[:-1], dtype=np.float32).reshape(5, 2)
        matrix = similarity_transform(points, target)  # equal to scikit-image's, see test_alignment.py
        crop = cv2.cvtColor(cv2.warpAffine(photo, matrix, (112, 112), borderValue=0.0), cv2.COLOR_BGR2RGB)
        both = np.stack([crop, np.fliplr(crop)]).transpose(0, 3, 1, 2)
        straight, mirrored = network(torch.tensor(both, dtype=torch.float32).div_(255).sub_(0.5).div_(0.5)).numpy()
        template, medium = medium_of[name]
        feature = (straight + mirrored) * np.float32(numbers[-1])
        features.setdefault(template, {}).setdefault(medium, []).append(feature)
    sums = {one: sum(np.mean(frames, axis=0) for frames in media.values()) for one, media in features.items()}
    return {one: row.astype(np.float64) / np.linalg.norm(row.astype(np.float64)) for one, row in sums.items()}


def _list_of(folder, name):
    return np.loadtxt(folder / "meta" / name, delimiter=",", skiprows=1, dtype=int)


def _published_1n(folder, gallery, templates):
    """Returns rank-1 and TPIR of ijb_evals.py on one gallery."""
    gallery, probes = _list_of(folder, gallery), _list_of(folder, "ijbc_1N_probe_mixed.csv")
    rows = np.array([templates[template] for template, _ in gallery])
    hits, mates, best_others, unmated = 0, [], [], []
    for template, subject in probes:
        scores = rows @ templates[template]
        is_mate = gallery[:, 1] == subject
        if is_mate.any():
            hits += is_mate[np.argmax(scores)]
            mates.append(scores[is_mate][0])
            best_others.append(scores[~is_mate].max())
        else:
            unmated.append(scores.max())
    mates, unmated = np.array(mates), np.sort(unmated)[::-1]
    is_first = mates > np.array(best_others)
    tpir = {far: np.sum(is_first & (mates > unmated[int(len(unmated) * far) - 1])) / len(mates) for far in (0.1,)}
    return hits / len(mates), tpir


def test_numbers_are_those_of_insightface_from_the_photos_on(ijb_folder, untrained):
    from sklearn.metrics import auc, roc_curve

    evaluator = Evaluator(network=untrained, image_size=_SIZE, device=torch.device("cpu"), published_tpir=True)
    numbers, distances_M, _ = evaluate_ijb(evaluator, read_ijb(ijb_folder))
    templates = _published_templates(ijb_folder, untrained)
    pairs = np.loadtxt(ijb_folder / "meta" / "ijbc_template_pair_label.txt", dtype=int)
    scores = np.array([templates[a] @ templates[b] for a, b, _ in pairs])
    np.testing.assert_allclose(1 - distances_M / 2, scores, atol=2e-6)
    far, tar, _ = roc_curve(pairs[:, 2], scores, drop_intermediate=False)
    assert 0.55 < auc(far, tar) < 0.95, "neither a network that sees nothing nor one that sees everything"
    assert numbers["auc"] == pytest.approx(auc(far, tar), abs=1e-9)
    for name, target in (("1e-1", 1e-1), ("1e-2", 1e-2), ("1e-3", 1e-3)):
        assert numbers["tar_at_far"][name] == pytest.approx(tar[far <= target].max(), abs=1e-12)
    for name in ("G1", "G2"):
        rank_1, tpir = _published_1n(ijb_folder, f"ijbc_1N_gallery_{name}.csv", templates)
        found = numbers["identification"][name]
        assert (found["rank_k"]["1"], found["tpir_at_fpir"]["0.1"]) == pytest.approx((rank_1, tpir[0.1]), abs=1e-12)
    default = Evaluator(network=untrained, image_size=_SIZE, device=torch.device("cpu"))
    ours = evaluate_ijb(default, read_ijb(ijb_folder))[0]["identification"]["G1"]
    published = numbers["identification"]["G1"]
    assert ours["tpir_at_fpir"]["0.1"] >= published["tpir_at_fpir"]["0.1"] and ours["rank_k"] == published["rank_k"]
