"""Ten classes of drawn images in the shape of MNIST, so the examples run without a download."""

import numpy as np
from numpy.typing import NDArray

# 5 x 7 dots per digit.
_GLYPHS = """
01110 00100 01110 01110 00010 11111 00110 11111 01110 01110
10001 01100 10001 10001 00110 10000 01000 00001 10001 10001
10011 00100 00001 00001 01010 11110 10000 00010 10001 10001
10101 00100 00010 00110 10010 00001 11110 00100 01110 01111
11001 00100 00100 00001 11111 00001 10001 01000 10001 00001
10001 00100 01000 10001 00010 10001 10001 01000 10001 00010
01110 01110 11111 01110 00010 01110 01110 01000 01110 01100
"""


def drawn_digits(count: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Returns images of shape (count, 28, 28, 1) and their labels: glyphs at random places, with noise."""
    lines = [line.split() for line in _GLYPHS.split("\n") if line]
    glyphs = np.array([[[int(dot) for dot in line[digit]] for line in lines] for digit in range(10)], np.float32)
    glyphs = glyphs.repeat(3, axis=1).repeat(3, axis=2)
    random = np.random.default_rng(seed)
    labels = random.integers(10, size=count)
    images = random.normal(0, 0.3, (count, 28, 28, 1)).astype(np.float32)
    for image, label in zip(images, labels, strict=True):
        top, left = random.integers(0, 7), random.integers(0, 13)
        image[top : top + 21, left : left + 15, 0] += glyphs[label]
    return images, labels
