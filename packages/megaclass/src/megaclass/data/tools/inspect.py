"""`megaclass data inspect`: counts and sizes of a source, images per class."""

from collections import Counter
from typing import Any

import numpy as np

from megaclass.data.decode import image_dimensions
from megaclass.data.sources.source import ImageSource, TensorSource
from megaclass.errors import DataError
from megaclass.progress import OnProgress, no_progress

_NUM_SIZED = 2000
_NUM_SURVEYED = 1000
_BAR_WIDTH = 50


def inspect_source(source: ImageSource, on_progress: OnProgress = no_progress) -> dict[str, Any]:
    """Returns counts, a histogram {images per class: number of classes}, and the sizes of up to 2,000 images."""
    labels, counts = np.unique(source.labels[source.labels >= 0], return_counts=True)
    sizes, num_bytes, num_sized = _sizes_of(source, _NUM_SIZED, on_progress)
    # Ranges that double: 1, 2-3, 4-7, …
    ranges = enumerate(np.bincount(np.log2(counts).astype(np.int64)).tolist())
    return {
        "what": source.describe(),
        "num_images": source.num_images,
        "num_classes": source.num_classes,
        "num_empty_classes": source.num_classes - len(labels),
        "first_label": int(labels[0]),
        "last_label": int(labels[-1]),
        # Over the classes that have images.
        "images_per_class": {
            "smallest": int(counts.min()),
            "median": float(np.median(counts)),
            "mean": float(counts.mean()),
            "largest": int(counts.max()),
        },
        "histogram": {f"{2**power}–{2 ** (power + 1) - 1}" if power else "1": count for power, count in ranges},
        "sizes": {f"{width} × {height}": count for (height, width), count in sizes.most_common()},
        "num_sized": num_sized,
        "num_unreadable": num_sized - sizes.total(),
        "mean_bytes": num_bytes / max(1, sizes.total()),
    }


def inspection_text(found: dict[str, Any]) -> str:
    counts = ", ".join(f"{name} {value:,.4g}" for name, value in found["images_per_class"].items())
    widest = max(found["histogram"].values())
    bars = [
        f"  {name:>15}  {count:>9,}  {'█' * max(1, round(_BAR_WIDTH * count / widest)) if count else ''}"
        for name, count in found["histogram"].items()
    ]
    sizes = ", ".join(f"{size}: {count:,}" for size, count in list(found["sizes"].items())[:5])
    num_unreadable = found["num_unreadable"]
    unreadable = f", {num_unreadable} unreadable: megaclass data verify names them" if num_unreadable else ""
    lines = [
        found["what"],
        f"images            {found['num_images']:,}",
        f"classes           {found['num_classes']:,}, {found['num_empty_classes']:,} of them without images",
        f"labels            {found['first_label']:,} to {found['last_label']:,}",
        f"images per class  {counts}",
        f"sizes             {sizes} (of {found['num_sized']:,} examined{unreadable}), {found['mean_bytes']:,.0f} bytes each",
        "",
        " images per class    classes",
        *bars,
    ]
    return "\n".join(lines)


def survey_sizes(source: ImageSource, image_size: tuple[int, int]) -> tuple[str, int, int]:
    """Reads the headers of all images, or of 1,000 spread over them if there are more.

    Returns what was examined, how many readable images have another size, and how many of those another aspect ratio.
    """
    sizes, _, _ = _sizes_of(source, _NUM_SURVEYED)
    others = {size: count for size, count in sizes.items() if size != image_size}
    height, width = image_size
    # Within a pixel: 113 x 112 counts as a square.
    shapes = [count for (h, w), count in others.items() if abs(h * width - w * height) > max(h, w, height, width)]
    is_all = sizes.total() == source.num_images
    looked_at = f"all {sizes.total():,} images" if is_all else f"{sizes.total():,} images examined"
    return looked_at, sum(others.values()), sum(shapes)


def _sizes_of(
    source: ImageSource, num_wanted: int, on_progress: OnProgress = no_progress
) -> tuple[Counter[tuple[int, int]], int, int]:
    """Returns the (height, width) and the bytes of images spread over the source that can be read, and how many were read."""
    looked_at = np.unique(np.linspace(0, source.num_images - 1, num_wanted).astype(np.int64))
    sizes: Counter[tuple[int, int]] = Counter()
    num_bytes = 0
    for number, index in enumerate(looked_at.tolist(), start=1):
        on_progress(number, len(looked_at))
        try:
            encoded = source.read(index)
            has_pixels = not isinstance(source, TensorSource)
            sizes[image_dimensions(encoded, source.name_of(index)) if has_pixels else source.image_size] += 1
        except DataError:
            continue
        num_bytes += len(encoded)
    return sizes, num_bytes, len(looked_at)
