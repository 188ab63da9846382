"""Encoded images to pixels: whole batches into one uint8 array. JPEG by simplejpeg, everything else by Pillow.

Images are turned upright by their EXIF orientation, as OpenCV does. Images of another size are fitted to the wanted one:

squash   stretched to the size without keeping the aspect ratio
pad      scaled until it fits, the rest black
crop     scaled until it covers the size, and the rest cut off evenly
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from megaclass.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

# Checked before decoding: a few kilobytes can announce gigabytes of pixels.
MAX_PIXELS = 2**25
# Largest encoded image: it is read before its header can be checked.
MAX_ENCODED_BYTES = 2**28

IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm"),
)
"""Suffixes of image files, in upper or lower case. The content decides how a file is decoded."""

Fit = Literal["pad", "crop", "squash"]

_PILLOW_FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "TIFF", "GIF", "PPM")
_JPEG_MARK = b"\xff\xd8\xff"
# First bytes of each format, and the suffix of such a file.
_MARKS = {
    _JPEG_MARK: ".jpg",
    b"\x89PNG": ".png",
    b"RIFF": ".webp",
    b"BM": ".bmp",
    b"GIF8": ".gif",
    b"II*\0": ".tif",
    b"MM\0*": ".tif",
    **{b"P%d" % digit: suffix for digit, suffix in enumerate((".pbm", ".pgm", ".ppm") * 2, start=1)},
}
_EXIF_MARK = b"Exif\0\0"
# Kinds of the segments of a JPEG that hold no part of the image.
_APP0, _APP1, _APP15, _COMMENT = 0xE0, 0xE1, 0xEF, 0xFE
_ORIENTATION_TAG = 0x0112
_NUM_TRIED_FOR_SIZE = 100


class ReadsImages(Protocol):
    @property
    def num_images(self) -> int: ...
    def read(self, index: int) -> bytes: ...
    def name_of(self, index: int) -> str: ...


def decode_image(encoded: bytes, where: str) -> NDArray[np.uint8]:
    """Returns RGB pixels (H, W, 3), upright. `where` names the image in errors, for example `train.rec, key 17`.

    Any exception of a decoder becomes a DataError, so one odd image does not end a run.
    """
    if encoded.startswith(_JPEG_MARK):
        return _decode_jpeg(encoded, where)
    return _decode_with_pillow(encoded, where)


def decode_batch(
    encoded: Sequence[bytes], image_size: tuple[int, int], names: Sequence[str], fit: Fit = "squash"
) -> NDArray[np.uint8]:
    """Returns RGB pixels (B, H, W, 3); images of another size are fitted to `image_size` = (height, width)."""
    height, width = image_size
    images_BHW3 = np.empty((len(encoded), height, width, 3), dtype=np.uint8)
    for row, (item, name) in enumerate(zip(encoded, names, strict=True)):
        decode_into(images_BHW3[row], item, name, fit)
    return images_BHW3


def decode_into(out_HW3: NDArray[np.uint8], encoded: bytes, where: str, fit: Fit = "squash") -> bool:
    """Decodes the image into `out_HW3`. Returns whether it had another size and was fitted."""
    import simplejpeg

    # Nearly every image is a JPEG of the right size and is decoded in place. simplejpeg refuses a larger one before it decodes
    # a pixel, so the dimensions need not be read first.
    if encoded.startswith(_JPEG_MARK) and _jpeg_orientation(encoded) == 1:
        try:
            if simplejpeg.decode_jpeg(encoded, "RGB", buffer=out_HW3).shape == out_HW3.shape:
                return False
        except Exception:  # decode_image below copes with it or raises a DataError
            pass
    image_HW3 = decode_image(encoded, where)
    size = (out_HW3.shape[0], out_HW3.shape[1])
    out_HW3[:] = fit_image(image_HW3, size, fit)
    return image_HW3.shape[:2] != size


def fit_image(image_HW3: NDArray[np.uint8], image_size: tuple[int, int], fit: Fit) -> NDArray[np.uint8]:
    """Returns the image in `image_size` = (height, width), or the same array if it has that size."""
    from PIL import Image

    height, width = image_size
    had_height, had_width = image_HW3.shape[:2]
    if (had_height, had_width) == image_size:
        return image_HW3
    image, bilinear = Image.fromarray(image_HW3), Image.Resampling.BILINEAR
    if fit == "squash":
        return np.asarray(image.resize((width, height), bilinear))
    if fit == "crop":
        scale = max(height / had_height, width / had_width)
        kept_width, kept_height = min(had_width, width / scale), min(had_height, height / scale)
        left, top = (had_width - kept_width) / 2, (had_height - kept_height) / 2
        box = (left, top, left + kept_width, top + kept_height)
        return np.asarray(image.resize((width, height), bilinear, box=box))
    scale = min(height / had_height, width / had_width)
    inner_height = min(height, max(1, round(had_height * scale)))
    inner_width = min(width, max(1, round(had_width * scale)))
    if (inner_height, inner_width) != (had_height, had_width):
        image = image.resize((inner_width, inner_height), bilinear)
    top, left = (height - inner_height) // 2, (width - inner_width) // 2
    padded_HW3 = np.zeros((height, width, 3), dtype=np.uint8)
    padded_HW3[top : top + inner_height, left : left + inner_width] = np.asarray(image)
    return padded_HW3


def encode_jpeg(image_HW3: NDArray[np.uint8], quality: int) -> bytes:
    """Returns the image as a JPEG whose colours have the full resolution."""
    import simplejpeg

    encoded: bytes = simplejpeg.encode_jpeg(
        np.ascontiguousarray(image_HW3), quality=quality, colorspace="RGB", colorsubsampling="444"
    )
    return encoded


def image_dimensions(encoded: bytes, where: str) -> tuple[int, int]:
    """Returns (height, width) of the upright image, read from the header alone."""
    if encoded.startswith(_JPEG_MARK):
        height, width = _jpeg_dimensions(encoded, where)
        orientation = _jpeg_orientation(encoded)
    else:
        height, width, orientation = _pillow_dimensions(encoded, where)
    return (width, height) if orientation >= 5 else (height, width)


def image_suffix(encoded: bytes, where: str) -> str:
    """Returns the suffix of a file with this content, such as `.jpg`."""
    for mark, suffix in _MARKS.items():
        if encoded.startswith(mark):
            return suffix
    raise DataError(f"Cannot decode {where}: {_no_image(encoded)}.")


def first_image_size(source: ReadsImages) -> tuple[int, int]:
    """Returns (height, width) of the first image that can be decoded, for sources that do not state a size."""
    num_tried = min(source.num_images, _NUM_TRIED_FOR_SIZE)
    for index in range(num_tried):
        try:
            return image_dimensions(source.read(index), source.name_of(index))
        except DataError:
            if index == num_tried - 1:
                raise
    raise AssertionError("a source has at least one image")


def _jpeg_dimensions(encoded: bytes, where: str) -> tuple[int, int]:
    """Returns (height, width) as stored, not yet turned upright."""
    import simplejpeg

    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(encoded)
    except Exception:  # KeyError for 4:4:1, for example, which Pillow reads; it also explains damage
        return _pillow_dimensions(encoded, where)[:2]
    _require_reasonable(height, width, where)
    return height, width


def _decode_jpeg(encoded: bytes, where: str) -> NDArray[np.uint8]:
    import simplejpeg

    _jpeg_dimensions(encoded, where)
    try:
        image_HW3: NDArray[np.uint8] = simplejpeg.decode_jpeg(encoded, colorspace="RGB")
    except Exception:  # CMYK, 4:4:1 and other rarities that Pillow converts, or damage that it explains
        return _decode_with_pillow(encoded, where)
    return _upright(image_HW3, _jpeg_orientation(encoded))


@contextmanager
def _opened(encoded: bytes, where: str) -> Iterator[Image]:
    """Opens an image with Pillow; all errors of the block become DataErrors."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(encoded), formats=_PILLOW_FORMATS) as image:
            _require_reasonable(image.height, image.width, where)
            yield image
    except DataError:
        raise
    except UnidentifiedImageError as error:
        raise DataError(f"Cannot decode {where}: {_no_image(encoded)}.") from error
    except Exception as error:
        reason = str(error) if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {error}"
        raise DataError(f"Cannot decode {where}: damaged image of {len(encoded)} bytes ({reason}).") from error


def _pillow_dimensions(encoded: bytes, where: str) -> tuple[int, int, int]:
    """Returns (height, width, orientation) from the header."""
    with _opened(encoded, where) as image:
        return image.height, image.width, _orientation(image.info.get("exif", b""))


def _decode_with_pillow(encoded: bytes, where: str) -> NDArray[np.uint8]:
    with _opened(encoded, where) as image:
        image_HW3 = pillow_to_rgb(image, image, where)
        # Pillow turns a TIFF itself. The orientation of a PNG may come after its pixels, so it is read last.
        orientation = 1 if image.format == "TIFF" else _orientation(image.info.get("exif", b""))
    return _upright(image_HW3, orientation)


def _no_image(encoded: bytes) -> str:
    return f"{len(encoded)} bytes that are not an image (they start with {encoded[:8]!r})"


def pillow_to_rgb(image: Image, opened: Image, where: str) -> NDArray[np.uint8]:
    """Returns RGB pixels (H, W, 3) of a Pillow image. opened: as Pillow opened it; copies do not know the file's format."""
    if image.mode.startswith("I") or image.mode == "F":
        return _from_wide(np.asarray(image), opened, where)
    return np.asarray(image.convert("RGB"))


def _from_wide(grey_HW: NDArray[np.generic], opened: Image, where: str) -> NDArray[np.uint8]:
    """Converts 16-bit grey to RGB by the upper byte of each value, as Pillow narrows 16-bit colours.

    Pillow's own conversion would cut values at 255, which makes nearly every pixel white.
    """
    bits = 8 * grey_HW.dtype.itemsize
    if opened.format == "TIFF":
        bits = getattr(opened, "tag_v2", {}).get(258, (16,))[0]
    elif opened.format in ("PNG", "PPM"):
        # Pillow may hold their 16 bits in 32.
        bits = 16
    if bits != 16 or grey_HW.dtype.kind not in "iu":
        raise DataError(
            f"Cannot decode {where}: grey values of {bits} bits ({grey_HW.dtype}), whose range is not stated; "
            f"save it with 8 or 16 bits per channel."
        )
    grey_8_HW = (grey_HW.astype(np.int64) >> 8).astype(np.uint8)
    return np.repeat(grey_8_HW[:, :, None], 3, axis=2)


def _require_reasonable(height: int, width: int, where: str) -> None:
    if height * width > MAX_PIXELS:
        raise DataError(
            f"Cannot decode {where}: {width} × {height} pixels, at most {MAX_PIXELS:,} in all are accepted."
        )


def _jpeg_orientation(encoded: bytes) -> int:
    """Returns the EXIF orientation by walking over the segments before the tables: 1 µs, where a search took 50."""
    position = 2
    while encoded[position : position + 1] == b"\xff" and position + 4 <= len(encoded):
        kind, length = encoded[position + 1], int.from_bytes(encoded[position + 2 : position + 4], "big")
        if kind == _APP1 and encoded.startswith(_EXIF_MARK, position + 4):
            return _orientation(encoded[position + 4 : position + 2 + length])
        if not (_APP0 <= kind <= _APP15 or kind == _COMMENT):
            break
        position += 2 + length
    return 1


def _orientation(exif: bytes) -> int:
    """Returns EXIF's number from 1 to 8; 1, upright, if there is none or it cannot be read: the pixels may still be fine."""
    exif = exif.removeprefix(_EXIF_MARK)
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return 1
    try:
        (directory,) = struct.unpack_from(f"{order}I", exif, 4)
        (num_entries,) = struct.unpack_from(f"{order}H", exif, directory)
        for entry in range(num_entries):
            tag, _, _, value = struct.unpack_from(f"{order}HHIH", exif, directory + 2 + 12 * entry)
            if tag == _ORIENTATION_TAG:
                return int(value) if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


def _upright(image_HW3: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Turns the image upright: orientations 5 to 8 lie on their side; 2, 4, 5 and 7 are mirrored."""
    if orientation >= 5:
        image_HW3 = image_HW3.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        image_HW3 = image_HW3[:, ::-1]
    if orientation in (3, 4, 7, 8):
        image_HW3 = image_HW3[::-1]
    return image_HW3 if orientation == 1 else np.ascontiguousarray(image_HW3)
