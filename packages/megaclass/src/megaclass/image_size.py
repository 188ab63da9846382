"""Size of images: one number for squares, (height, width) for rectangles; in files `112` or `112,96`.

Data that is not images has rows of W numbers instead of pixels: features are (1, W), one row per sample, and sequences (0, W),
any number of rows. For sequences of numbered tokens W is the number of different tokens.
"""

ImageSize = int | tuple[int, int]


def has_rows(size: ImageSize) -> bool:
    """Returns True for features and sequences, False for images."""
    return height_and_width(size)[0] <= 1


def is_sequence(size: ImageSize) -> bool:
    """Returns True if samples differ in length: a backbone is then called with a padded batch and its lengths."""
    return height_and_width(size)[0] == 0


def input_shape(size: ImageSize) -> tuple[int, ...]:
    """Returns the shape of one sample as the backbone takes it: (3, H, W), or (W,) for a row of features."""
    height, width = height_and_width(size)
    return (width,) if has_rows(size) else (3, height, width)


def height_and_width(size: ImageSize) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def compact_size(size: tuple[int, int]) -> ImageSize:
    """One number if both sides are equal."""
    height, width = size
    return height if height == width else (height, width)


def size_to_text(size: ImageSize) -> str:
    return str(size) if isinstance(size, int) else ",".join(map(str, size))


def size_from_text(text: str) -> ImageSize:
    """ValueError if the text is not a size."""
    sides = [int(side) for side in text.split(",")]
    if len(sides) not in (1, 2) or sides[0] < len(sides) % 2 or sides[-1] < 1:
        raise ValueError(f"{text!r} is not a size of images: expected one number, or height,width.")
    return sides[0] if len(sides) == 1 else compact_size((sides[0], sides[1]))


def shown_size(size: ImageSize) -> str:
    """Width × height, as people say it. Rectangles say so, because the setting data.size is [height, width]."""
    height, width = height_and_width(size)
    if has_rows(size):
        return f"{width:,} numbers{' per row' if is_sequence(size) else ''}"
    return f"{width} × {height}" + (" (width × height)" if height != width else "")
