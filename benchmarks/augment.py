"""Normalising, mirroring and augmenting one batch on a GPU: one Triton program against the functions of torch, in one run.

    python benchmarks/augment.py [--batch 512]

Milliseconds per batch in a row of batches, as in training: the time of the GPU or of the host, whichever is longer.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from megaclass.data import loader as loader_module
from megaclass.data.augment import AUGMENTATIONS, parse_augment
from megaclass.data.loader import Batch, Treatment

NUM_TIMED, ROUNDS = 30, 5


def milliseconds(action: Callable[[], object]) -> float:
    for _ in range(5):
        action()
    rounds = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(NUM_TIMED):
            action()
        torch.cuda.synchronize()
        rounds.append(1000 * (time.perf_counter() - begun) / NUM_TIMED)
    return statistics.median(rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=512)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/augment.py needs a GPU.")
    device = torch.device("cuda", 0)
    pixels = torch.randint(0, 256, (options.batch, 112, 112, 3), dtype=torch.uint8, device=device).permute(0, 3, 1, 2)
    indices = np.arange(options.batch)
    batch = Batch(pixels, torch.zeros(0), indices, 0, 0, index_tensor=torch.from_numpy(indices).to(device))
    has_program = loader_module.has_program
    print("| augmentations | program ms | first call s | torch ms | ratio |\n|---|---|---|---|---|")
    for text in (
        "",
        *AUGMENTATIONS,
        "crop,low_resolution,blur,colour,grey,occlusion,jpeg",
        "pick:2," + ",".join(AUGMENTATIONS),
    ):
        treatment = Treatment(seed=1, global_step=7, mirror=True, augment=parse_augment(text))
        treated = replace(batch, treatment=treatment)
        begun = time.perf_counter()
        treated.prepared(device)
        torch.cuda.synchronize()
        first_s = time.perf_counter() - begun
        ours = milliseconds(lambda treated=treated: treated.prepared(device))
        loader_module.has_program = lambda: False
        theirs = milliseconds(lambda treated=treated: treated.prepared(device))
        loader_module.has_program = has_program
        print(f"| {text or 'none'} | {ours:.3f} | {first_s:.1f} | {theirs:.3f} | {theirs / ours:.1f} |", flush=True)


if __name__ == "__main__":
    main()
