"""Encoded images to pixels, whatever their format, with a limit on what a few bytes may ask for."""

import contextlib
import io
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image, ImageOps

from megaclass.data.augment import normalise, to_tensor
from megaclass.data.decode import (
    decode_batch,
    decode_image,
    decode_into,
    fit_image,
    image_dimensions,
)
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
    "no image": (b"hello, world", "that are not an image"),
    "empty": (b"", "0 bytes that are not an image"),
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


@pytest.mark.ranks
def test_modules_import_without_the_image_libraries():
    program = (
        "import sys; sys.modules['simplejpeg'] = sys.modules['PIL'] = None\n"
        "import megaclass.data.loader, megaclass.data.tools.synthesize\n"
        "import megaclass.data.sources.open_source, megaclass.data.pair_file"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def jpeg_441() -> bytes:
    """A 4:1:1 JPEG whose sampling factors are turned: of a square image both have as many blocks."""
    content = bytearray(simplejpeg.encode_jpeg(picture(64, 64), quality=95, colorsubsampling="411"))
    frame = content.index(b"\xff\xc0")
    assert content[frame + 11] == 0x41
    content[frame + 11] = 0x14
    return bytes(content)


def test_a_jpeg_that_the_fast_decoder_does_not_know_is_decoded_all_the_same():
    item, out = jpeg_441(), np.empty((64, 64, 3), dtype=np.uint8)
    with pytest.raises(KeyError):
        simplejpeg.decode_jpeg_header(item)
    assert image_dimensions(item, "a") == (64, 64)
    assert decode_image(item, "a").shape == (64, 64, 3)
    assert decode_into(out, item, "a") is False


class SurpriseError(Exception):
    """No exception that anybody has thought of."""


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_whatever_a_decoder_raises_is_a_bad_image(monkeypatch, kind):
    def fail(*_, **__):
        raise SurpriseError("odd")

    item = encoded(picture(), kind)
    monkeypatch.setattr(Image, "open", fail)
    monkeypatch.setattr(simplejpeg, "decode_jpeg", fail)
    monkeypatch.setattr(simplejpeg, "decode_jpeg_header", fail)
    for decode in (decode_image, image_dimensions, lambda item, name: decode_batch([item], (8, 8), [name])):
        with pytest.raises(DataError, match=r"Cannot decode a: .*SurpriseError: odd"):
            decode(item, "a")


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_grey_of_16_bits_keeps_its_shades(kind):
    shades = np.linspace(0, 65535, 16 * 24).reshape(16, 24).astype(np.uint16)
    stream = io.BytesIO()
    Image.fromarray(shades).save(stream, kind)
    decoded = decode_image(stream.getvalue(), "a")
    assert np.array_equal(decoded, np.repeat((shades >> 8).astype(np.uint8)[:, :, None], 3, axis=2))


def test_grey_whose_range_the_file_does_not_say_is_a_bad_image():
    stream = io.BytesIO()
    Image.fromarray(np.linspace(0, 1, 256, dtype=np.float32).reshape(16, 16)).save(stream, "TIFF")
    with pytest.raises(DataError, match="save it with 8 or 16 bits per channel"):
        decode_image(stream.getvalue(), "a")


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_images_are_turned_upright_as_their_exif_orientation_says(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if kind == "WEBP" else {}
    item = encoded(picture(16, 24), kind, exif=exif.tobytes(), **options)
    upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(item))).convert("RGB"))
    decoded = decode_image(item, "a")
    assert decoded.shape == upright.shape == (*image_dimensions(item, "a"), 3)
    assert np.abs(decoded.astype(int) - upright).max() <= 4
    out = np.empty_like(decoded)
    assert decode_into(out, item, "a") is False and np.array_equal(out, decoded)


@pytest.mark.parametrize("exif", [b"", b"II*\0", b"II*\0\xff\xff\xff\xff", b"MM\0*\0\0\0\x08\xff\xff", b"nonsense"])
def test_damaged_exif_data_is_no_damaged_image(exif):
    plain = encoded(picture(), "JPEG")
    segment = b"Exif\0\0" + exif
    item = plain[:2] + b"\xff\xe1" + (len(segment) + 2).to_bytes(2, "big") + segment + plain[2:]
    assert np.array_equal(decode_image(item, "a"), decode_image(plain, "a"))


def test_an_image_that_has_the_size_is_not_touched_by_any_fit():
    item = encoded(picture(), "JPEG", quality=80)
    want = decode_image(item, "a")
    for fit in ("pad", "crop", "squash"):
        assert np.array_equal(decode_batch([item], (16, 24), ["a"], fit)[0], want)


def test_pad_keeps_the_shape_and_adds_black_borders():
    wide = np.full((20, 40, 3), 200, dtype=np.uint8)
    padded = fit_image(wide, (16, 16), "pad")
    assert padded.shape == (16, 16, 3)
    assert (padded[4:12] == 200).all() and not padded[:4].any() and not padded[12:].any()
    assert not fit_image(wide.transpose(1, 0, 2), (16, 16), "pad")[:, :4].any()


def test_crop_keeps_the_shape_and_the_centre():
    wide = np.zeros((20, 40, 3), dtype=np.uint8)
    wide[:, 10:30] = 200
    assert (fit_image(wide, (16, 16), "crop")[:, 1:-1] == 200).all()
    assert (fit_image(wide.transpose(1, 0, 2), (16, 16), "crop")[1:-1] == 200).all()


def test_squash_stretches_as_it_always_did():
    image = picture(20, 40)
    want = np.asarray(Image.fromarray(image).resize((16, 16), Image.Resampling.BILINEAR))
    assert np.array_equal(fit_image(image, (16, 16), "squash"), want)


@pytest.mark.parametrize("fit", ["pad", "crop", "squash"])
@pytest.mark.parametrize("size", [(1, 1), (1, 3000), (3000, 1), (17, 31)])
def test_images_of_any_shape_are_fitted(fit, size):
    assert fit_image(np.zeros((*size, 3), dtype=np.uint8), (112, 96), fit).shape == (112, 96, 3)
