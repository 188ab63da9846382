"""Encoded images to pixels: whole batches into one uint8 tensor. JPEG by simplejpeg, everything else by Pillow."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from megaclass.errors import DataError

# Checked before decoding: a few kilobytes can announce gigabytes of pixels.
MAX_PIXELS = 2**25
# The same for what is read before it can be looked at.
MAX_ENCODED_BYTES = 2**28

_NUM_TRIED_FOR_SIZE = 100


class ReadsImages(Protocol):
    @property
    def num_images(self) -> int: ...
    def read(self, index: int) -> bytes: ...
    def name_of(self, index: int) -> str: ...


def decode_image(encoded: bytes, where: str) -> NDArray[np.uint8]:
    """RGB pixels (H, W, 3). `where` names the image in errors, for example `train.rec, key 17`."""
    if encoded[:3] == b"\xff\xd8\xff":
        return _decode_jpeg(encoded, where)
    return _decode_with_pillow(encoded, where)


def decode_batch(encoded: Sequence[bytes], image_size: tuple[int, int], names: Sequence[str]) -> NDArray[np.uint8]:
    """RGB pixels (B, H, W, 3); images of another size are resized to `image_size` = (height, width)."""
    height, width = image_size
    images_BHW3 = np.empty((len(encoded), height, width, 3), dtype=np.uint8)
    for row, (item, name) in enumerate(zip(encoded, names, strict=True)):
        decode_into(images_BHW3[row], item, name)
    return images_BHW3


def decode_into(out_HW3: NDArray[np.uint8], encoded: bytes, where: str) -> None:
    """Fills `out_HW3` with the image, resized where it has another size."""
    import simplejpeg

    # A JPEG of the right size, which nearly all are, goes straight to its place. One that is larger does not fit there and
    # is refused before a pixel is decoded, so its dimensions need not be asked first.
    if encoded[:3] == b"\xff\xd8\xff":
        try:
            if simplejpeg.decode_jpeg(encoded, "RGB", buffer=out_HW3).shape == out_HW3.shape:
                return
        except ValueError:
            pass
    image_HW3 = decode_image(encoded, where)
    size = out_HW3.shape[:2]
    out_HW3[:] = image_HW3 if image_HW3.shape[:2] == size else _resize(image_HW3, size)


def to_tensor(images_BHW3: NDArray[np.uint8]) -> torch.Tensor:
    """(B, 3, H, W), contiguous, still uint8: a quarter of the traffic to the device."""
    return torch.from_numpy(images_BHW3).permute(0, 3, 1, 2).contiguous()


def normalise(images: torch.Tensor) -> torch.Tensor:
    """uint8 in [0, 255] to float32 in [-1, 1], as every InsightFace model expects."""
    return images.to(torch.float32).div_(255).sub_(0.5).div_(0.5)


def image_dimensions(encoded: bytes, where: str) -> tuple[int, int]:
    """(height, width), read from the header alone."""
    if encoded[:3] == b"\xff\xd8\xff":
        return _jpeg_dimensions(encoded, where)
    return decode_image(encoded, where).shape[:2]


def first_image_size(source: ReadsImages) -> tuple[int, int]:
    """(height, width) of the first image that can be decoded: it speaks for all where nothing else says it."""
    num_tried = min(source.num_images, _NUM_TRIED_FOR_SIZE)
    for index in range(num_tried):
        try:
            return image_dimensions(source.read(index), source.name_of(index))
        except DataError:
            if index == num_tried - 1:
                raise
    raise AssertionError("a source has at least one image")


def _jpeg_dimensions(encoded: bytes, where: str) -> tuple[int, int]:
    import simplejpeg

    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(encoded)
    except ValueError as error:
        raise DataError(
            f"Cannot decode {where}: {len(encoded)} bytes that begin as a JPEG but are none ({error})."
        ) from error
    _require_reasonable(height, width, where)
    return height, width


def _decode_jpeg(encoded: bytes, where: str) -> NDArray[np.uint8]:
    import simplejpeg

    _jpeg_dimensions(encoded, where)
    try:
        image_HW3: NDArray[np.uint8] = simplejpeg.decode_jpeg(encoded, colorspace="RGB")
    except ValueError as error:
        # CMYK and other rarities that Pillow converts, or damage that Pillow reports too.
        try:
            return _decode_with_pillow(encoded, where)
        except DataError:
            raise DataError(f"Cannot decode {where}: damaged JPEG of {len(encoded)} bytes ({error}).") from error
    return image_HW3


def _decode_with_pillow(encoded: bytes, where: str) -> NDArray[np.uint8]:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(encoded), formats=("JPEG", "PNG", "BMP", "WEBP", "TIFF", "GIF", "PPM")) as image:
            _require_reasonable(image.height, image.width, where)
            return np.asarray(image.convert("RGB"))
    except UnidentifiedImageError as error:
        raise DataError(
            f"Cannot decode {where}: {len(encoded)} bytes that are no image (they begin with {encoded[:8]!r})."
        ) from error
    except (*_DAMAGE, Image.DecompressionBombError) as error:
        raise DataError(f"Cannot decode {where}: damaged image of {len(encoded)} bytes ({error}).") from error


# What Pillow's readers raise on damaged files, found by fuzzing them.
_DAMAGE = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    struct.error,
    KeyError,
    IndexError,
    TypeError,
    OverflowError,
    ZeroDivisionError,
    MemoryError,
)


def _require_reasonable(height: int, width: int, where: str) -> None:
    if height * width > MAX_PIXELS:
        raise DataError(
            f"Cannot decode {where}: {width} × {height} pixels, at most {MAX_PIXELS:,} in all are accepted."
        )


def _resize(image_HW3: NDArray[np.uint8], image_size: tuple[int, int]) -> NDArray[np.uint8]:
    from PIL import Image

    height, width = image_size
    return np.asarray(Image.fromarray(image_HW3).resize((width, height), Image.Resampling.BILINEAR))
