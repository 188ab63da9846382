"""Encoded images to pixels, whatever their format, with a limit on what a few bytes may ask for."""

import contextlib
import io
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from megaclass.data.decode import decode_batch, decode_image, image_dimensions, normalise, to_tensor
from megaclass.errors import DataError


def picture(height: int = 16, width: int = 24) -> np.ndarray:
    across, down = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return np.stack([across, down, 255 - across], axis=2).astype(np.uint8)


def encoded(pixels: np.ndarray, kind: str, mode: str = "RGB", **options) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(stream, kind, **options)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("kind", "mode", "tolerance"),
    [("JPEG", "RGB", 40), ("PNG", "RGB", 0), ("PNG", "RGBA", 0), ("BMP", "RGB", 0), ("WEBP", "RGB", 40)],
)
def test_every_format_decodes_to_rgb(kind, mode, tolerance):
    options = {"quality": 95} if kind in ("JPEG", "WEBP") else {}
    item = encoded(picture(), kind, mode, **options)
    decoded = decode_image(item, "a")
    assert decoded.dtype == np.uint8
    assert np.abs(decoded.astype(int) - picture()).max() <= tolerance
    assert image_dimensions(item, "a") == (16, 24)


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_grey_and_cmyk_jpegs_become_rgb(mode):
    assert decode_image(encoded(picture(), "JPEG", mode), "a").shape == (16, 24, 3)


def test_a_batch_is_one_array_and_other_sizes_are_resized():
    batch = decode_batch([encoded(picture(), "PNG"), encoded(picture(32, 48), "PNG")], (16, 24), ["a", "b"])
    assert batch.shape == (2, 16, 24, 3)
    assert np.abs(batch[1].astype(int) - picture()).max() < 16
    images = to_tensor(batch)
    assert images.shape == (2, 3, 16, 24) and images.is_contiguous() and images.dtype == torch.uint8


def test_normalised_pixels_lie_between_minus_one_and_one():
    pixels = torch.tensor([0, 51, 255], dtype=torch.uint8)
    assert torch.allclose(normalise(pixels), torch.tensor([-1.0, -0.6, 1.0]))
    assert pixels.tolist() == [0, 51, 255]


def huge_png() -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    size = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    )


def huge_jpeg() -> bytes:
    small = encoded(picture(), "JPEG")
    start = small.index(b"\xff\xc0") + 5
    return small[:start] + struct.pack(">HH", 60_000, 60_000) + small[start + 4 :]


BAD = {
    "no image": (b"hello, world", "that are no image"),
    "empty": (b"", "0 bytes that are no image"),
    "cut JPEG": (encoded(picture(), "JPEG")[:-200], "Cannot decode train.rec, key 7"),
    "JPEG of nothing": (b"\xff\xd8\xff\xe0", "Cannot decode train.rec, key 7"),
    "cut PNG": (encoded(picture(), "PNG")[:60], "damaged image"),
    "bomb in PNG": (huge_png(), "pixels"),
    "bomb in JPEG": (huge_jpeg(), "60000 × 60000 pixels, at most 33,554,432"),
}


@pytest.mark.parametrize(("item", "message"), BAD.values(), ids=BAD.keys())
def test_a_bad_image_is_named(item, message):
    with pytest.raises(DataError, match=r"train\.rec, key 7") as caught:
        decode_image(item, "train.rec, key 7")
    assert message in str(caught.value)


def test_any_bytes_give_an_image_or_a_data_error():
    rng = np.random.default_rng(0)
    wholes = [encoded(picture(), kind) for kind in ("JPEG", "PNG", "BMP", "WEBP", "GIF")]
    for number in range(400):
        damaged = bytearray(wholes[number % len(wholes)])
        for position in rng.integers(0, len(damaged), rng.integers(1, 5)):
            damaged[position] = rng.integers(256)
        with contextlib.suppress(DataError):
            assert decode_image(bytes(damaged), "a").ndim == 3


def test_modules_import_without_the_image_libraries():
    program = (
        "import sys; sys.modules['simplejpeg'] = sys.modules['PIL'] = None\n"
        "import megaclass.data.loader, megaclass.data.synthesize, megaclass.data.source, megaclass.data.pairs"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
