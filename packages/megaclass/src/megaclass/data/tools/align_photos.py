"""`megaclass data align`: aligns the faces of a folder of photos, by given landmarks or with a detector of the user.

The crops lie in the folders of their photos and have their names, so one folder per identity stays one. A photo without a
usable face is left out and listed in not-aligned.txt with the reason. Crops that exist are kept: an interrupted command
continues where it ended. align.json holds the settings, and other settings are refused.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from megaclass.data.align import align
from megaclass.data.decode import decode_image
from megaclass.data.face_detector import DetectedFace, FaceDetector
from megaclass.data.ordered_map import ordered_map
from megaclass.data.sources.files import read_image_file
from megaclass.errors import DataError
from megaclass_launch.files import published_file, write_text

_SETTINGS_FILE, _LEFT_OUT_FILE = "align.json", "not-aligned.txt"
_NUM_COORDINATES = 10


@dataclass(frozen=True)
class Aligned:
    """Numbers of photos."""

    num_photos: int
    num_aligned: int
    num_kept: int
    """Crops that existed already."""
    num_left_out: int


def align_photos(
    photos: Iterable[Path],
    folder: Path,
    out: Path,
    *,
    points: Path | None = None,
    detector: Path | None = None,
    image_size: int = 112,
    suffix: Literal["png", "jpg"] = "png",
    num_threads: int = 1,
    on_progress: Callable[[int, int], None] | None = None,
) -> Aligned:
    """Writes the aligned face of every photo below `folder` to the same place below `out`.

    points: text file with a line `name x1 y1 … x5 y5` per photo. detector: ONNX file; of several faces the large one near
    the middle is taken.
    """
    if (points is None) == (detector is None):
        raise DataError("megaclass data align needs either --points FILE or --detector FILE.onnx.")
    chosen = points or detector
    assert chosen is not None
    try:
        digest = hashlib.sha256(chosen.read_bytes()).hexdigest()
    except OSError as error:
        raise DataError(f"Cannot read {chosen}: {error.strerror}.") from error
    known = read_points(points) if points is not None else {}
    finder = FaceDetector(detector) if detector is not None else None
    settings = {"photos": str(folder.resolve()), "size": image_size, "format": suffix, "landmarks_sha256": digest}
    try:
        out.mkdir(parents=True, exist_ok=True)
        _require_same_settings(out, settings)
    except OSError as error:
        raise DataError(f"Cannot write {out}: {error.strerror or error}.") from error

    def align_one(photo: Path) -> str | None:
        """Returns why the photo has no crop; "" if it has a new one, None if the crop existed already."""
        place = photo.relative_to(folder)
        # Photos that differ in their suffix only must not share a crop.
        is_alone = num_named[place.with_suffix("")] == 1
        target = (out / place).with_name(f"{place.stem if is_alone else place.name}.{suffix}")
        if target.exists():
            return None
        try:
            pixels_HW3 = decode_image(read_image_file(photo), str(photo))
            if finder is None:
                points_52 = known.get(place.as_posix())
                if points_52 is None:
                    return f"{points} has no line for it"
            else:
                faces = finder.detect(pixels_HW3)
                if not faces:
                    return "the detector finds no face"
                points_52 = main_face(faces, pixels_HW3.shape[:2]).points_52
            crop_SS3 = align(pixels_HW3, points_52, image_size, where=str(photo))
        except DataError as error:
            return str(error)
        target.parent.mkdir(parents=True, exist_ok=True)
        with published_file(target) as unfinished:
            if suffix == "jpg":
                Image.fromarray(crop_SS3).save(unfinished, quality=95, subsampling=0)
            else:
                Image.fromarray(crop_SS3).save(unfinished)
        return ""

    every = sorted(photos)
    num_named = Counter(photo.relative_to(folder).with_suffix("") for photo in every)
    left_out, num_kept = [], 0
    try:
        outcomes = ordered_map(align_one, every, num_threads)
        for done, (photo, outcome) in enumerate(zip(every, outcomes, strict=True), start=1):
            num_kept += outcome is None
            if outcome:
                left_out.append(f"{photo.relative_to(folder)}\t{outcome}\n")
            if on_progress is not None:
                on_progress(done, len(every))
        write_text(out / _LEFT_OUT_FILE, "".join(left_out))
    except OSError as error:
        raise DataError(f"Cannot write {out}: {error.strerror or error}. Run again to continue.") from error
    return Aligned(len(every), len(every) - num_kept - len(left_out), num_kept, len(left_out))


def main_face(faces: Iterable[DetectedFace], size: tuple[int, int]) -> DetectedFace:
    """Returns the face with the largest area minus twice the squared distance from the middle, as InsightFace chooses."""

    def weight(face: DetectedFace) -> float:
        offset_2 = (face.box_4[:2] + face.box_4[2:]) / 2 - np.array(size[::-1]) / 2
        return float(np.prod(face.box_4[2:] - face.box_4[:2]) - 2 * np.square(offset_2).sum())

    return max(faces, key=weight)


def read_points(path: Path) -> dict[str, NDArray[np.float64]]:
    """Returns five landmarks by name of photo. A line is `name x1 y1 … x5 y5`, perhaps with a score behind, as IJB has it.

    Fields are separated by spaces, tabs or commas. Lines that do not end in ten numbers, such as headers, are errors, except
    the first two.
    """
    found = {}
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        # The name may hold spaces: it ends where the numbers begin.
        match = re.fullmatch(r"(.+?)((?:[\s,]+[-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?){10,11})[\s,]*", line)
        try:
            numbers = [float(text) for text in re.split(r"[\s,]+", match[2].strip(" \t,"))] if match else []
        except ValueError:
            numbers = []
        if match and numbers:
            found[match[1].strip()] = np.array(numbers[:_NUM_COORDINATES]).reshape(5, 2)
        elif line.strip() and number > 2:
            raise DataError(f"Line {number} of {path} is {line[:100]!r}: expected name x1 y1 x2 y2 x3 y3 x4 y4 x5 y5.")
    if not found:
        raise DataError(f"{path} has no landmarks: expected a line name x1 y1 x2 y2 x3 y3 x4 y4 x5 y5 per photo.")
    return found


def _require_same_settings(out: Path, settings: dict[str, object]) -> None:
    file = out / _SETTINGS_FILE
    text = json.dumps(settings, indent=1) + "\n"
    if file.exists():
        if file.read_text(encoding="utf-8") != text:
            raise DataError(f"{out} holds crops made with other settings ({file}): choose another folder with --out.")
    elif any(out.iterdir()):
        raise DataError(f"{out} is not empty and holds no {_SETTINGS_FILE}: choose another folder with --out.")
    else:
        write_text(file, text)
