"""`megaclass data align`: crops equal to InsightFace's, from given landmarks or with detectors of both layouts."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image
from tests.commands import ended_in_this_process
from tests.megaclass.face_detectors import BOX, POINTS, write_retinaface, write_scrfd

from megaclass.data.align import STANDARD_POINTS, align
from megaclass.data.face_detector import FaceDetector
from megaclass.data.tools.align_photos import read_points
from megaclass.errors import DataError

WRITERS = {"scrfd": write_scrfd, "retinaface": write_retinaface}


def _photo(rng, height=300, width=260):
    """Smooth, as photos are; noise would punish a sixty-fourth of a pixel."""
    coarse = Image.fromarray(rng.integers(0, 256, (height // 12, width // 12, 3), dtype=np.uint8))
    return np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))


def _red_square(photo, x, y, side=16):
    photo = np.tile(photo.mean(axis=2, keepdims=True).astype(np.uint8), 3)
    photo[y : y + side, x : x + side] = [255, 0, 0]
    return photo


def _points_line(name, points):
    return f"{name} {' '.join(f'{value:.4f}' for value in points.ravel())}\n"


@pytest.mark.parametrize("size", [112, 128, 224])
def test_crops_equal_norm_crop_of_insightface_within_one_grey_level(size):
    face_align = pytest.importorskip(
        "insightface.utils.face_align", reason="needs insightface: pip install --no-deps insightface scikit-image"
    )
    rng = np.random.default_rng(size)
    for _ in range(50):
        photo = _photo(rng)
        points = STANDARD_POINTS * rng.uniform(0.5, 2) + rng.uniform(0, 60, 2) + rng.normal(0, 3, (5, 2))
        want = face_align.norm_crop(photo, points.astype(np.float32), image_size=size)
        got = align(photo, points, size, where="a photo")
        assert np.abs(got.astype(int) - want).max() <= 1


def test_photos_with_landmarks_become_crops_in_the_same_folders(tmp_path):
    rng = np.random.default_rng(0)
    lines, wanted = ["3\n", "name lefteye_x lefteye_y\n"], {}
    for name in ("anna/1 of 2.png", "anna/2.png", "bert/2.png"):
        photo, points = _photo(rng), STANDARD_POINTS + rng.normal(0, 5, (5, 2)) + 40
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(photo).save(tmp_path / "photos" / name)
        lines.append(_points_line(name, points))
        wanted[name] = align(photo, points.round(4), 112, where=name)
    Image.fromarray(_photo(rng)).save(tmp_path / "photos/bert/unknown.png")
    (tmp_path / "photos/bert/broken.jpg").write_bytes(b"no picture")
    lines.append(_points_line("bert/broken.jpg", STANDARD_POINTS))
    (tmp_path / "points.txt").write_text("".join(lines))
    command = ["data", "align", str(tmp_path / "photos"), "--out", str(tmp_path / "crops"), "--json"]
    command += ["--points", str(tmp_path / "points.txt")]
    ended = ended_in_this_process(command)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) | {"out": ""} == {
        "out": "",
        "num_photos": 5,
        "num_aligned": 3,
        "num_kept": 0,
        "num_left_out": 2,
    }
    for name, crop in wanted.items():
        assert np.array_equal(np.asarray(Image.open(tmp_path / "crops" / name)), crop), name
    left_out = (tmp_path / "crops/not-aligned.txt").read_text()
    assert "bert/broken.jpg\t" in left_out and "points.txt has no line for it" in left_out

    (tmp_path / "crops/anna/2.png").unlink()
    again = json.loads(ended_in_this_process(command).stdout)
    assert (again["num_aligned"], again["num_kept"]) == (1, 2)
    other = ended_in_this_process([*command, "--size", "224"])
    assert other.returncode == 2 and "other settings" in other.stderr


@pytest.mark.parametrize("layout", WRITERS)
def test_a_detector_finds_the_painted_faces(tmp_path, layout):
    detector = FaceDetector(WRITERS[layout](tmp_path / "detector.onnx"))
    assert detector.layout.lower() == layout
    grey = np.full((640, 640, 3), 90, dtype=np.uint8)
    both = _red_square(_red_square(grey, 160, 320), 480, 96)
    both[320:336, 160:176] = [255, 0, 0]
    found = sorted(detector.detect(both), key=lambda face: face.points_52[0, 0])
    for face, cell in zip(found, ([160, 320], [480, 96]), strict=True):
        assert face.score == pytest.approx(1, abs=0.01)
        assert face.points_52 == pytest.approx(POINTS + cell, abs=0.01)
        assert face.box_4 == pytest.approx(np.tile(cell, 2) + BOX * [-1, -1, 1, 1], abs=0.01)


@pytest.mark.parametrize("layout", WRITERS)
def test_places_are_in_pixels_of_the_photo_whatever_its_size(tmp_path, layout):
    """A photo of half the size is enlarged for the detector; wide ones are filled up with black below."""
    detector = FaceDetector(WRITERS[layout](tmp_path / "detector.onnx", side=640))
    photo = np.full((200, 320, 3), 90, dtype=np.uint8)
    photo[80:96, 160:176] = [255, 0, 0]
    best = detector.detect(photo)[0]
    assert best.points_52.mean(axis=0) == pytest.approx((POINTS.mean(axis=0) + np.array([328, 168])) / 2, abs=8)


def test_scrfd_gives_what_insightface_makes_of_it(tmp_path):
    model_zoo = pytest.importorskip(
        "insightface.model_zoo", reason="needs insightface: pip install --no-deps insightface scikit-image"
    )
    theirs = model_zoo.SCRFD(str(write_scrfd(tmp_path / "detector.onnx")))
    theirs.prepare(-1, input_size=(640, 640), det_thresh=0.5)
    photo = np.full((640, 640, 3), 90, dtype=np.uint8)
    photo[320:336, 160:176] = photo[96:112, 480:496] = [255, 0, 0]
    boxes, points = theirs.detect(photo[..., ::-1])
    ours = FaceDetector(tmp_path / "detector.onnx").detect(photo)
    assert len(ours) == len(boxes) == 2
    for face in ours:
        nearest = np.abs(points - face.points_52).sum(axis=(1, 2)).argmin()
        assert face.points_52 == pytest.approx(points[nearest], abs=1e-3)
        assert [*face.box_4, face.score] == pytest.approx(boxes[nearest], abs=1e-3)


def test_photos_are_aligned_with_a_detector_and_the_central_face_wins(tmp_path):
    (tmp_path / "photos").mkdir()
    photo = np.full((640, 640, 3), 90, dtype=np.uint8)
    photo[320:336, 304:320] = photo[96:112, 560:576] = [255, 0, 0]
    Image.fromarray(photo).save(tmp_path / "photos/two.png")
    Image.fromarray(np.full((640, 640, 3), 90, dtype=np.uint8)).save(tmp_path / "photos/none.png")
    detector = write_scrfd(tmp_path / "detector.onnx")
    command = ["data", "align", str(tmp_path / "photos"), "--out", str(tmp_path / "crops"), "--detector", str(detector)]
    ended = ended_in_this_process(command)
    assert "1 of 2 photos aligned; 1 left out" in ended.stdout, ended.stderr
    assert "none.png\tthe detector finds no face" in (tmp_path / "crops/not-aligned.txt").read_text()
    want = align(photo, POINTS + np.array([304, 320]), 112, where="two.png")
    assert np.array_equal(np.asarray(Image.open(tmp_path / "crops/two.png")), want)
    shutil.rmtree(tmp_path / "crops")
    (tmp_path / "crops").mkdir()
    (tmp_path / "crops/mine.txt").write_text("keep")
    assert "is not empty" in ended_in_this_process(command).stderr


def test_what_is_no_detector_is_refused_by_name(tmp_path):
    import onnx
    from onnx import TensorProto, helper

    (tmp_path / "broken.onnx").write_bytes(b"broken")
    with pytest.raises(DataError, match=r"Cannot open the face detector .*broken\.onnx"):
        FaceDetector(tmp_path / "broken.onnx")
    graph = helper.make_graph(
        [helper.make_node("Flatten", ["input"], ["embedding"])],
        "other",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, [1, 3, 8, 8])],
        [helper.make_tensor_value_info("embedding", TensorProto.FLOAT, [1, 192])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    onnx.save(model, tmp_path / "embeds.onnx")
    with pytest.raises(DataError, match=r"outputs with \[192\] columns: expected SCRFD"):
        FaceDetector(tmp_path / "embeds.onnx")


def test_a_line_without_landmarks_is_named(tmp_path):
    (tmp_path / "photos").mkdir()
    Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(tmp_path / "photos/a.png")
    (tmp_path / "points.txt").write_text(_points_line("a.png", POINTS) * 2 + "b.png 1 2 3\n")
    command = ["data", "align", str(tmp_path / "photos"), "--out", str(tmp_path / "crops")]
    ended = ended_in_this_process([*command, "--points", str(tmp_path / "points.txt")])
    assert ended.returncode == 2 and "Line 3 of" in ended.stderr and "b.png 1 2 3" in ended.stderr


def test_landmarks_that_are_not_text_are_an_error_that_names_the_line(tmp_path):
    (tmp_path / "points").write_bytes(b"\xff\xfe\n\n\x93NUMPY\xff\n")
    with pytest.raises(DataError, match=r"Line 3 of .*points"):
        read_points(tmp_path / "points")
