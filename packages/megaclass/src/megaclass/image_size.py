"""Size of images: one number for squares, (height, width) for rectangles; in files `112` or `112,96`."""

ImageSize = int | tuple[int, int]


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
    if len(sides) not in (1, 2) or min(sides) < 1:
        raise ValueError(f"{text!r} is not a size of images: expected one number, or height,width.")
    return sides[0] if len(sides) == 1 else compact_size((sides[0], sides[1]))


def shown_size(size: ImageSize) -> str:
    """Width × height, as people say it. Rectangles say so, because the setting data.size is [height, width]."""
    height, width = height_and_width(size)
    return f"{width} × {height}" + (" (width × height)" if height != width else "")
