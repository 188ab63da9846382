"""Pieces of HTML that the report's sections are made of. All text from outside is escaped here."""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from html import escape

from megaclass.data.decode import decode_image
from megaclass.errors import DataError

NUM_COLOURS = 8


def colour(place: int) -> str:
    """CSS class of the model at this place; colours come round again after eight."""
    return f"series-{place % NUM_COLOURS}"


def section(title: str, *parts: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


class Best(str):
    """A cell of a table that holds the best value of its row."""


def best_marked(cells: Sequence[str], values: Sequence[float | None], *, is_lower_better: bool = False) -> list[str]:
    """The cells, those of the best value marked; none where there is nothing to compare."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if len(known) < 2:
        return list(cells)
    best = min(known) if is_lower_better else max(known)
    return [Best(cell) if value == best else cell for cell, value in zip(cells, values, strict=True)]


def table(columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Cells that are `Best` stand out."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = "".join(f'<tr><th scope="row">{escape(name)}</th>{"".join(map(_cell, cells))}</tr>' for name, cells in rows)
    return f'<div class="scroll"><table><thead><tr><td></td>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(cell: str) -> str:
    return f'<td class="best">{escape(cell)}</td>' if isinstance(cell, Best) else f"<td>{escape(cell)}</td>"


def figure(title: str, content: str, legend: Sequence[tuple[str, str]], *, has_toggles: bool = False) -> str:
    """legend: name and css classes of each key; with toggles a key hides what it stands for."""
    keys = "".join(_toggle(name, css) if has_toggles else _key(name, css) for name, css in legend)
    return (
        f'<figure><figcaption><b>{escape(title)}</b><span class="legend">{keys}</span></figcaption>{content}</figure>'
    )


def _key(name: str, css: str) -> str:
    return f'<span><i class="key {escape(css)}"></i>{escape(name)}</span>'


def _toggle(name: str, css: str) -> str:
    # Disabled until the script has run: without it a press would do nothing.
    return (
        f'<button class="toggle" type="button" aria-pressed="true" disabled data-series="{escape(css)}">'
        f'<i class="key {escape(css)}"></i>{escape(name)}</button>'
    )


def tabs(name: str, panels: Sequence[tuple[str, str]]) -> str:
    """(title, content) of each panel; a single one needs no tabs. `name` keeps the ids of several groups apart."""
    if len(panels) == 1:
        return panels[0][1]
    buttons = "".join(
        f'<button role="tab" type="button" id="{name}-tab-{place}" aria-controls="{name}-panel-{place}">'
        f"{escape(title)}</button>"
        for place, (title, _) in enumerate(panels)
    )
    shown = "".join(
        f'<div role="tabpanel" id="{name}-panel-{place}" aria-labelledby="{name}-tab-{place}">'
        f"<h3>{escape(title)}</h3>{content}</div>"
        for place, (title, content) in enumerate(panels)
    )
    return f'<div role="tablist" hidden>{buttons}</div>{shown}'


def definitions(facts: Mapping[str, str]) -> str:
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items())
    return f"<dl>{items}</dl>" if facts else ""


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def image(encoded: bytes, alt: str) -> str:
    try:
        return f'<img src="{_data_uri(encoded)}" alt="{escape(alt)}">'
    except DataError as error:
        return f'<span class="empty">{escape(str(error))}</span>'


def _data_uri(encoded: bytes) -> str:
    if encoded.startswith(b"\xff\xd8\xff"):
        kind = "jpeg"
    elif encoded.startswith(b"\x89PNG\r\n\x1a\n"):
        kind = "png"
    else:  # whatever else the data may hold (BMP, WebP ...), not every browser shows
        from PIL import Image

        with io.BytesIO() as converted:
            Image.fromarray(decode_image(encoded, "a picture in the report")).save(converted, format="PNG")
            encoded, kind = converted.getvalue(), "png"
    return f"data:image/{kind};base64,{base64.b64encode(encoded).decode('ascii')}"
