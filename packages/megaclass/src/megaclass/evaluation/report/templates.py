"""The pages of the package: their templates, and the pictures in them as data URIs."""

import base64
import functools
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

import megaclass
from megaclass.data.decode import decode_image
from megaclass.errors import DataError

_PACKAGE = Path(megaclass.__file__).parent


def render(name: str, **values: Any) -> str:
    """Renders a template, named by its path in the package. In HTML, text from outside is escaped, and `style` is the style
    sheet of the report.
    """
    return environment().get_template(name).render(style=Markup(source("report.css")), **values)


@functools.cache
def environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_PACKAGE),
        autoescape=jinja2.select_autoescape(["html.j2"]),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    made.globals["picture"] = picture
    return made


def source(name: str) -> str:
    """Returns the style sheet or the script of the report."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


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
