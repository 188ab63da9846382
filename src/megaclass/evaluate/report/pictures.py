"""Encoded images as data URIs that every browser shows."""

import base64
import io
from dataclasses import dataclass

from megaclass.data.decode import decode_image
from megaclass.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """An image of the page, or the reason why it cannot be shown."""

    source: str = ""
    description: str = ""
    error: str = ""


def picture(encoded: bytes, description: str = "") -> Picture:
    try:
        return Picture(source=_data_uri(encoded), description=description)
    except DataError as error:
        return Picture(error=str(error))


def _data_uri(encoded: bytes) -> str:
    if encoded.startswith(b"\xff\xd8\xff"):
        kind = "jpeg"
    elif encoded.startswith(b"\x89PNG\r\n\x1a\n"):
        kind = "png"
    else:  # training data may also hold BMP, TIFF or WebP, which not every browser shows
        from PIL import Image

        with io.BytesIO() as converted:
            Image.fromarray(decode_image(encoded, "a picture in the report")).save(converted, format="PNG")
            encoded, kind = converted.getvalue(), "png"
    return f"data:image/{kind};base64,{base64.b64encode(encoded).decode('ascii')}"
