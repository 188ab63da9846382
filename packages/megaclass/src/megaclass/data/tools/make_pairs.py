"""Makes verification pairs out of labelled images, same and different in turn, chosen by hashes."""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from megaclass.data.decode import decode_image
from megaclass.data.loading.reader import BadImages, read_image
from megaclass.data.pair_file import PairSet
from megaclass.data.sources.source import ImageSource
from megaclass.errors import DataError
from megaclass.keyed_random import combine64
from megaclass.progress import OnProgress, no_progress

_SALT = 0x7061697273
_MAX_ATTEMPTS = 1000


def make_pairs(source: ImageSource, num_pairs: int, seed: int = 0, on_progress: OnProgress = no_progress) -> PairSet:
    """Returns pairs of one class and of two classes in turn, so every fold is balanced. No pair occurs twice.

    A pair with an image that cannot be decoded is drawn again, and a warning names the image.
    """
    order = np.argsort(source.labels, kind="stable")
    by_class = np.split(order, np.flatnonzero(np.diff(source.labels[order])) + 1)
    several = [images for images in by_class if len(images) > 1]
    num_same = (num_pairs + 1) // 2
    num_possible, num_different = possible_pairs(source.labels)
    if num_pairs < 2 or num_possible < num_same or len(by_class) < 2:
        # They are drawn at random and none occurs twice: beyond half of the possible ones, a draw hardly finds a new one.
        most = min(num_possible, num_different)
        way_out = (
            f"Ask for at most {most:,}: --pairs {most}."
            if most > 1
            else "It needs two classes and several images of one."
        )
        raise DataError(
            f"Cannot make {num_pairs} pairs of {source.describe()}: there are {num_possible:,} pairs of one class "
            f"({num_same} are needed) and {len(by_class)} classes. {way_out}"
        )
    sound = _SoundImages(source)
    same = _distinct(lambda draws: _draw_same(several, draws), sound, num_same, seed, 0)
    different = _distinct(lambda draws: _draw_different(by_class, draws), sound, num_pairs - num_same, seed, 1)
    images: list[bytes] = []
    for number in range(num_pairs):
        images += next(same if number % 2 == 0 else different)
        on_progress(number + 1, num_pairs)
    return PairSet(images, np.arange(num_pairs) % 2 == 0)


def possible_pairs(labels: NDArray[np.int64]) -> tuple[int, int]:
    """Returns how many pairs there are of images of one class, and of two classes."""
    counts = np.unique(labels, return_counts=True)[1].astype(np.int64)
    return int((counts * (counts - 1) // 2).sum()), int((counts.sum() ** 2 - (counts**2).sum()) // 2)


def _draw_same(several: list[NDArray[np.int64]], draws: list[int]) -> tuple[int, int]:
    images = several[draws[0] % len(several)]
    first = draws[1] % len(images)
    return int(images[first]), int(images[(first + 1 + draws[2] % (len(images) - 1)) % len(images)])


def _draw_different(by_class: list[NDArray[np.int64]], draws: list[int]) -> tuple[int, int]:
    first = draws[0] % len(by_class)
    second = (first + 1 + draws[1] % (len(by_class) - 1)) % len(by_class)
    return _choose(by_class[first], draws[2]), _choose(by_class[second], draws[3])


def _choose(images: NDArray[np.int64], draw: int) -> int:
    return int(images[draw % len(images)])


class _SoundImages:
    """Reads encoded images that decode, and warns once about each other one."""

    def __init__(self, source: ImageSource) -> None:
        self._source = source
        self._bad = BadImages.of_tool(source.num_images)

    def read(self, index: int) -> bytes | None:
        if index in self._bad.indices:
            return None
        try:
            encoded = read_image(self._source, index)
            decode_image(encoded, self._source.name_of(index))
        except DataError as error:
            self._bad.add_bad(index, error)
            return None
        return encoded


def _distinct(
    draw: Callable[[list[int]], tuple[int, int]], sound: _SoundImages, num_pairs: int, seed: int, salt: int
) -> Iterator[list[bytes]]:
    """Yields different pairs of encoded images; a pair that occurred already or has a bad image is drawn again."""
    seen: set[tuple[int, int]] = set()
    for number in range(num_pairs):
        for attempt in range(_MAX_ATTEMPTS):
            draws = combine64(seed, _SALT, salt, number, attempt, np.arange(4, dtype=np.uint64)).tolist()
            first, second = draw(draws)
            pair = (min(first, second), max(first, second))
            if pair in seen:
                continue
            images = [image for image in map(sound.read, (first, second)) if image is not None]
            if len(images) == 2:
                break
        else:
            raise DataError(
                f"Cannot find {num_pairs} different pairs of images that decode, only {len(seen)}. Ask for fewer."
            )
        seen.add(pair)
        yield images
