"""The report's sections with pictures: health of the centres, classes far from their centre, images that fit another class."""

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaclass.data.decode import decode_image
from megaclass.errors import DataError
from megaclass.evaluation.examples import Examples
from megaclass.evaluation.protocols.centre_health import CentreHealth
from megaclass.evaluation.report.charts import Figure, histogram_chart, linear_axis


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


_NUM_BINS = 40


def centres_section(name: str, health: CentreHealth, images: Examples | None, *, is_alone: bool) -> dict[str, Any]:
    """Returns the template's values on the centres of one run."""
    figures = []
    for title, values, label in (
        ("Length of the centres", health.norms, "length"),
        ("Nearest centre of another class", health.nearest, "cosine similarity"),
    ):
        if len(values):
            axis = linear_axis(label, [float(values.min()), float(values.max())])
            edges = np.linspace(axis.low, axis.high, _NUM_BINS + 1)
            shares = np.histogram(values, edges)[0] / len(values)
            svg = histogram_chart([("series-0", shares)], edges, axis, title=title, y_label="share of centres, %")
            figures.append(Figure(title=title, svg=svg))
    checked = "all" if health.num_checked == health.num_classes else f"{health.num_checked:,}, spread evenly,"
    warning = f" {health.num_unusable} are zero or not finite." if health.num_unusable else ""
    return {
        "title": "Class centres" if is_alone else f"Class centres: {name}",
        "text": f"{health.num_classes:,} classes; the nearest of another class was looked for from {checked} of them."
        f"{warning} Two names whose centres nearly coincide are often one person: likely label noise.",
        "figures": figures,
        "pairs": _pairs_of_classes(health, images.class_pictures if images is not None else {}),
    }


def _pairs_of_classes(health: CentreHealth, pictures: Mapping[int, bytes]) -> list[dict[str, Any]]:
    """Returns the closest pairs of classes, with a picture of each class if there is one."""
    numbers = health.closest_numbers or [(-1, -1)] * len(health.closest_pairs)
    found = []
    for (first, second, score), pair in zip(health.closest_pairs, numbers, strict=True):
        shown = [
            picture(pictures[one], name) for one, name in zip(pair, (first, second), strict=True) if one in pictures
        ]
        found.append({"names": (first, second), "cosine": f"{score:.3f}", "pictures": shown})
    return found


def training_images_section(name: str, found: Examples, *, is_alone: bool) -> dict[str, Any]:
    """Returns the template's values on the training images of one run."""
    share = found.num_confused / max(1, found.num_images)
    return {
        "title": "" if is_alone else name,
        "text": f"{found.num_images:,} images of {found.num_classes:,} classes were embedded after the last step. "
        f"{found.num_confused:,} of them ({share:.1%}) are closer to the centre of another class than to their own. Look at "
        f"their labels first.",
        **shown_examples(found),
    }


def shown_examples(found: Examples) -> dict[str, Any]:
    """Returns the template's values on the worst classes and what they are confused with."""
    return {
        "worst": [
            {
                "name": one.name,
                "cosine": f"{one.mean_cosine:.3f}",
                "note": f"{one.num_images} images, {one.num_closer_to_another} closer to another class",
                "pictures": [picture(encoded, one.name) for encoded in one.pictures],
            }
            for one in found.worst
        ],
        "confused": [
            {
                "own": (one.own_class, f"{one.own_cosine:.3f}"),
                "other": (one.other_class, f"{one.other_cosine:.3f}"),
                "file": one.name if one.num_alike == 1 else f"{one.num_alike} images, such as {one.name}",
                "pictures": [
                    picture(encoded, title)
                    for encoded, title in zip(one.pictures, (one.own_class, one.other_class), strict=False)
                ],
            }
            for one in found.confused
        ],
    }
