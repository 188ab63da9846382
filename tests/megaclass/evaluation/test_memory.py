"""4,000 images, a third of an lfw.bin, are evaluated without holding the set as floats: measured in a process of its own."""

import io
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.forked import run_forked
from torch import nn

from megaclass.data.pair_file import PairSet, write_pairs
from megaclass.evaluation.protocol import Evaluator
from megaclass.evaluation.sets import evaluate_sets, find_sets

_NUM_IMAGES = 4_000


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(path: Path) -> None:
    """Print by how much an evaluation raises the peak of this process."""
    network = nn.Sequential(nn.AvgPool2d(7), nn.Flatten(), nn.Linear(3 * 16 * 16, 512)).eval()
    network(torch.zeros(64, 3, 112, 112))
    before = peak_bytes()
    evaluator = Evaluator(network=network, image_size=112, device=torch.device("cpu"))
    (result,) = evaluate_sets(evaluator, find_sets([path]))
    assert result.error is None, result.error
    assert result.numbers["num_pairs"] == _NUM_IMAGES // 2
    print(peak_bytes() - before)


@pytest.mark.ranks
def test_the_peak_stays_far_below_the_size_of_the_set_as_floats(tmp_path):
    rng = np.random.default_rng(0)
    distinct = []
    for _ in range(50):
        file = io.BytesIO()
        coarse = Image.fromarray(rng.integers(0, 256, (28, 28, 3), dtype=np.uint8))
        coarse.resize((112, 112)).save(file, "JPEG", quality=92)
        distinct.append(file.getvalue())
    # What follows the end of a JPEG is not looked at, and keeps the pickle from storing equal images once.
    images = [distinct[index % 50] + index.to_bytes(4, "little") for index in range(_NUM_IMAGES)]
    write_pairs(tmp_path / "lfw.bin", PairSet(images, np.arange(_NUM_IMAGES // 2) // 300 % 2 == 0))
    assert (tmp_path / "lfw.bin").stat().st_size > 20e6, "a third of lfw.bin"

    done = run_forked(measure, tmp_path / "lfw.bin")
    assert done.returncode == 0, done.stderr
    # As float32 the set alone would be 0.6 GB, and 1.2 GB with both flips.
    assert int(done.stdout) < 300e6
