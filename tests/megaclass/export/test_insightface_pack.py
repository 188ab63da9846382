"""`megaclass export --to insightface --detector FILE`: what insightface, uniface and deepface do with the files."""

import importlib.util
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from tests.commands import ended_in_this_process
from tests.megaclass.face_detectors import POINTS, write_retinaface, write_scrfd

import megaclass
from megaclass.data.align import align
from megaclass.errors import ExportError
from megaclass.export.run_export import export_model


@pytest.fixture
def photo_RGB():
    rng = np.random.default_rng(0)
    coarse = Image.fromarray(rng.integers(60, 200, (40, 40), dtype=np.uint8))
    grey = np.asarray(coarse.resize((640, 640), Image.Resampling.BICUBIC))
    photo = np.stack([grey] * 3, axis=2)
    photo[320:336, 160:176] = [255, 0, 0]
    return photo


@pytest.fixture
def pack(make_run, tmp_path):
    run = make_run("mbf", size=112)
    detector = write_scrfd(tmp_path / "scrfd.onnx")
    ended = ended_in_this_process(["export", str(run), "--to", "insightface", "--detector", str(detector)])
    assert ended.returncode == 0, ended.stderr
    return run / "export/insightface"


def _embedding_here(pack, photo):
    """Of the run itself, through our own alignment, of one flip, as FaceAnalysis embeds."""
    crop = align(photo, POINTS + np.array([160, 320]), 112, where="photo")
    return megaclass.load(pack.parents[1], device="cpu").embed([crop], mirror=False)[0]


def _cosine(one, other):
    return float(np.dot(one, other) / np.linalg.norm(one) / np.linalg.norm(other))


def test_face_analysis_loads_the_pack_and_gives_our_embeddings(pack, photo_RGB):
    app = pytest.importorskip(
        "insightface.app", reason="needs insightface: pip install --no-deps insightface scikit-image"
    )
    faces = app.FaceAnalysis(name=str(pack), providers=["CPUExecutionProvider"])
    assert sorted(faces.models) == ["detection", "recognition"]
    faces.prepare(ctx_id=-1, det_size=(640, 640))
    (face,) = faces.get(np.ascontiguousarray(photo_RGB[..., ::-1]))
    assert face.kps == pytest.approx(POINTS + np.array([160, 320]), abs=1e-3)
    assert _cosine(face.embedding, _embedding_here(pack, photo_RGB)) > 0.9999


def test_the_folder_is_also_a_model_here_and_has_a_card(pack, photo_RGB):
    assert sorted(file.name for file in pack.iterdir()) == [
        "README.md",
        "config.json",
        "detector.onnx",
        "recognition.onnx",
    ]
    again = megaclass.load(pack, device="cpu").embed(
        [align(photo_RGB, POINTS + np.array([160, 320]), 112, where="photo")], mirror=False
    )[0]
    assert _cosine(again, _embedding_here(pack, photo_RGB)) > 0.9999
    card = (pack / "README.md").read_text()
    assert "FaceAnalysis(name=" in card and "a licence of its own" in card


def test_uniface_gives_our_embeddings(pack, photo_RGB):
    base = pytest.importorskip("uniface.recognition.base", reason="needs uniface: pip install --no-deps uniface")

    class Own(base.BaseRecognizer):
        def __init__(self, path):
            super().__init__(model_path=str(path), preprocessing=base.PreprocessConfig())

    points = (POINTS + np.array([160, 320])).astype(np.float32)
    got = Own(pack / "recognition.onnx").get_normalized_embedding(np.ascontiguousarray(photo_RGB[..., ::-1]), points)
    assert _cosine(got, _embedding_here(pack, photo_RGB)) > 0.9999


@pytest.mark.ranks
@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("deepface", "insightface", "pandas")),
    reason="needs deepface: pip install --no-deps deepface insightface scikit-image pandas gdown",
)
def test_deepface_gives_our_embeddings(pack, photo_RGB, tmp_path):
    """In a process of its own: deepface chooses its framework from the environment when it is imported."""
    crop = align(photo_RGB, POINTS + np.array([160, 320]), 112, where="photo")
    Image.fromarray(crop).save(tmp_path / "crop.png")
    weights = tmp_path / ".deepface/weights/buffalo_l"
    weights.mkdir(parents=True)
    shutil.copy(pack / "recognition.onnx", weights / "webface_r50.onnx")
    code = (
        "import sys, numpy; from deepface import DeepFace\n"
        "found = DeepFace.represent(sys.argv[1], model_name='Buffalo_L', detector_backend='skip')\n"
        "numpy.save(sys.argv[2], numpy.array(found[0]['embedding']))\n"
    )
    environment = os.environ | {"DEEPFACE_HOME": str(tmp_path), "DEEPFACE_BACKEND_ENGINE": "onnx"}
    command = [sys.executable, "-c", code, str(tmp_path / "crop.png"), str(tmp_path / "embedding.npy")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    assert _cosine(np.load(tmp_path / "embedding.npy"), _embedding_here(pack, photo_RGB)) > 0.999


def test_what_face_analysis_could_not_use_is_refused_and_nothing_is_written(make_run, tmp_path):
    scrfd, retinaface = write_scrfd(tmp_path / "scrfd.onnx"), write_retinaface(tmp_path / "retinaface.onnx")
    run = make_run("mbf", size=96)
    for form, detector, message in (
        ("insightface", scrfd, "multiple of 112 or 128, but run takes 96"),
        ("onnx", scrfd, "belongs to an export to insightface, not to onnx"),
    ):
        with pytest.raises(ExportError, match=message):
            export_model(run, form, tmp_path / "out", detector=detector)
    shutil.rmtree(run)
    run = make_run("mbf", size=112)
    for detector, message in ((retinaface, "has that of RetinaFace"), (run / "summary.json", "Cannot open the face")):
        with pytest.raises(ExportError, match=message):
            export_model(run, "insightface", tmp_path / "out", detector=detector)
    assert not (tmp_path / "out").exists()


def test_a_pack_and_the_state_dict_replace_each_other(make_run, tmp_path):
    run, out = make_run("mbf", size=112), tmp_path / "out"
    detector = write_scrfd(tmp_path / "scrfd.onnx")
    for detector_or_none, file in ((None, "backbone.pth"), (detector, "recognition.onnx"), (None, "backbone.pth")):
        export_model(run, "insightface", out, detector=detector_or_none)
        assert {one.name for one in out.iterdir()} - {"config.json", "README.md", "detector.onnx"} == {file}
