"""How hard the synthetic identities are for methods that do not learn, and how fast they are drawn.

    python benchmarks/synthetic_difficulty.py [--size 64] [--pairs 2000] [--grid docs/faces.png]

Prints images/s on one core and the 10-fold accuracy of four baselines on pairs of one and of two identities; a baseline
that verifies more than 75 % means that pixels or colours give the identity away. `--grid` draws the page of the docs.
"""

import argparse
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megaclass.data.synthetic.faces import draw_faces

Features = NDArray[np.float64]


def main() -> None:
    parser = argparse.ArgumentParser(description="Baselines on synthetic identities.")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grid", type=Path, help="write a page of faces there, one identity a row, and stop")
    options = parser.parse_args()
    if options.grid:
        write_grid(options.grid, options.seed)
        return
    is_same = np.arange(options.pairs) % 2 == 0
    first = 10_000_000 + np.arange(options.pairs)
    identity = np.stack([first, np.where(is_same, first, first + 1)], axis=1).reshape(-1)
    began = time.process_time()
    faces = draw_faces(options.seed, identity, np.tile([0, 1], options.pairs), options.size)
    print(f"drawn: {len(faces) / (time.process_time() - began):.0f} images/s at {options.size} pixels")
    for name, scores in baseline_scores(faces).items():
        print(f"{name}: {best_threshold_accuracy(scores, is_same):.1%}")


def baseline_scores(faces: NDArray[np.uint8]) -> dict[str, Features]:
    pixels = faces.reshape(len(faces), -1) / 255.0
    bins = (faces // 32).reshape(len(faces), -1, 3).astype(np.int64) @ np.array([64, 8, 1])
    histograms = np.stack([np.bincount(row, minlength=512) for row in bins]) / bins.shape[1]
    return {
        "cosine of pixels": cosine(pixels - 0.5),
        "cosine of pixels less their mean": cosine(pixels - pixels.mean(axis=1, keepdims=True)),
        "intersection of colour histograms": np.minimum(histograms[0::2], histograms[1::2]).sum(axis=1),
        "cosine of colour histograms": cosine(histograms),
    }


def cosine(features: Features) -> Features:
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    return np.asarray(np.sum(unit[0::2] * unit[1::2], axis=1))


def best_threshold_accuracy(scores: Features, is_same: NDArray[np.bool_]) -> float:
    """10 folds: the threshold that is best on nine is tried on the tenth."""
    is_right = (scores[None] >= np.sort(scores)[:, None]) == is_same[None]
    folds = np.array_split(np.arange(len(scores)), 10)
    best = [np.delete(is_right, fold, axis=1).mean(axis=1).argmax() for fold in folds]
    return float(np.mean([is_right[threshold, fold].mean() for threshold, fold in zip(best, folds, strict=True)]))


def write_grid(path: Path, seed: int, rows: int = 7, columns: int = 9, size: int = 96) -> None:
    from PIL import Image

    faces = draw_faces(seed, np.repeat(np.arange(rows), columns), np.tile(np.arange(columns), rows), size)
    page = faces.reshape(rows, columns, size, size, 3).transpose(0, 2, 1, 3, 4).reshape(rows * size, columns * size, 3)
    # 256 colours are enough for a page of the docs, in a third of the bytes.
    palette = Image.fromarray(page).quantize(256)
    Image.fromarray(page).quantize(palette=palette, dither=Image.Dither.FLOYDSTEINBERG).save(path, optimize=True)


if __name__ == "__main__":
    main()
