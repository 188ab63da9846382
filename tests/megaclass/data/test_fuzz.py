"""Readers under fire: any bytes give records or a DataError, soon and in little memory; never a crash or a hang."""

import io
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.fuzzing import Target, assert_clean, fuzz

from megaclass.data.decode import decode_image, decode_into, image_dimensions
from megaclass.data.pair_file import read_pairs
from megaclass.data.sources.open_source import open_source
from megaclass.data.synthetic.faces import draw_faces
from megaclass.data.tools.synthesize import synthesize
from megaclass.data.tools.verify import verify
from megaclass.errors import DataError

SAMPLE_MUTATIONS = 30


def make_target(name: str, folder: Path) -> Target:
    """A real file of one of the formats that are read, and its reader. Kinds: NAMES."""
    if name.endswith(" image"):
        return _image_target(name.removesuffix(" image"))
    return {**_record_targets(folder / "rec"), **_other_targets(folder)}[name]


def _record_targets(folder: Path) -> dict[str, Target]:
    synthesize(folder, num_identities=3, images_per_identity=2, image_size=16, num_pairs=2, num_processes=1)
    read_all(folder)
    names = ["train.rec", "train.idx", "property", "train.idx.cache", "train.rec.labels"]
    wholes = {name: (folder / name).read_bytes() for name in names}

    def attempt_with(name: str, read: Callable[[Path], None]) -> Callable[[bytes], None]:
        def attempt(content: bytes) -> None:
            try:
                (folder / name).write_bytes(content)
                read(folder)
            finally:
                for other in names:
                    (folder / other).unlink(missing_ok=True)
                    if not other.startswith("train.rec.l") and not other.endswith(".cache"):
                        (folder / other).write_bytes(wholes[other])

        return attempt

    def attempt_cache(name: str, *, is_header: bool) -> Callable[[bytes], None]:
        def attempt(content: bytes) -> None:
            read_all(folder)
            fresh = (folder / name).read_bytes()
            (folder / name).write_bytes(
                content.ljust(4096)[:4096] + fresh[4096:] if is_header else fresh[:4096] + content
            )
            read_all(folder)

        return attempt

    targets = {name: target(wholes[name], attempt_with(name, read_all)) for name in names[:3]}
    for name in names[3:]:
        targets[name] = target(wholes[name][4096:], attempt_cache(name, is_header=False))
        targets[f"{name}, header"] = target(wholes[name][:512], attempt_cache(name, is_header=True))
    for name in ("train.rec", "train.idx"):
        targets[f"{name}, verified"] = target(wholes[name], attempt_with(name, _verify))
    return targets


def target(whole: bytes, attempt: Callable[[bytes], None]) -> Target:
    return Target(whole, attempt, refusal=DataError)


def _other_targets(folder: Path) -> dict[str, Target]:
    image = encoded("JPEG")
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, content in (
            ("a.jpg", image),
            ("a.cls", b"3"),
            ("long" * 40 + ".jpg", image),
            ("long" * 40 + ".cls", b"4"),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        # Without the padding to 10 KiB that follows the two empty blocks of the end.
        length = tar.offset + 1024
    for name in ("tar", "list"):
        (folder / name).mkdir()
    (folder / "list" / "a.jpg").write_bytes(image)

    def at(path: Path, read: Callable[[Path], None]) -> Callable[[bytes], None]:
        def attempt(content: bytes) -> None:
            path.write_bytes(content)
            read(path)

        return attempt

    pairs = (folder / "rec" / "verification.bin").read_bytes()
    return {
        "a.tar": target(stream.getvalue()[:length], at(folder / "tar" / "a.tar", read_all)),
        "label.txt": target(b"a.jpg\t0\na.jpg\t17\n", at(folder / "list" / "label.txt", read_all)),
        "verification.bin": target(pairs, at(folder / "a.bin", read_pairs)),
    }


def _image_target(kind: str) -> Target:
    out = np.empty((24, 24, 3), dtype=np.uint8)

    def attempt(content: bytes) -> None:
        for fit in ("pad", "crop", "squash"):
            with suppress(DataError):
                decode_into(out, content, "fuzzed image", fit)
        with suppress(DataError):
            image_dimensions(content, "fuzzed image")
        decode_image(content, "fuzzed image")

    # Lying on its side as EXIF says, and of 16 bits: paths of their own through the decoder.
    exif = Image.Exif()
    exif[0x0112] = 6
    if kind == "PPM":
        return target(b"P5 12 12 65535\n" + np.arange(144, dtype=">u2").tobytes(), attempt)
    return target(encoded(kind, **({"exif": exif.tobytes()} if kind == "JPEG" else {})), attempt)


def encoded(kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(draw_faces(0, np.array([1]), np.array([1]), 24)[0]).save(stream, kind, **options)
    return stream.getvalue()


def read_all(place: Path) -> None:
    source = open_source(place)
    assert source.labels.min() >= 0 and source.labels.max() < source.num_classes
    assert source.describe()
    for index in range(source.num_images):
        assert isinstance(source.read(index), bytes) and source.name_of(index)


def _verify(place: Path) -> None:
    findings, sound = verify(place)
    if sound is not None:
        assert sound.num_images <= findings.num_images


NAMES = [
    "train.rec",
    "train.idx",
    "property",
    "train.idx.cache",
    "train.idx.cache, header",
    "train.rec.labels",
    "train.rec.labels, header",
    "train.rec, verified",
    "train.idx, verified",
    "a.tar",
    "label.txt",
    "verification.bin",
    *(f"{kind} image" for kind in ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_of_damaged_files_gives_records_or_a_data_error(name):
    counts = fuzz(make_target, name, range(SAMPLE_MUTATIONS))
    assert_clean(counts)
    # A damaged header of a cache is made anew, and verify reports instead of refusing.
    assert counts.refused > 0 or name.endswith(("header", "verified"))
