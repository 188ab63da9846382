"""Evaluation at the sizes people use: memory of an lfw-sized .bin, and a million probes against a million entries.

    python benchmarks/evaluate.py                 # 12,000 images of an lfw-sized .bin on the CPU; peak memory
    python benchmarks/evaluate.py --search        # blocked search on this device, against float64 brute force
    python benchmarks/evaluate.py --gpu           # one million by one million scores of width 512 on the GPU

Each prints a table row for benchmarks/evaluate.md and fails when a limit of the project is not kept.
"""

import argparse
import io
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

_NUM_IMAGES, _IMAGE_SIZE = 12_000, 112
_MAX_PEAK_BYTES = 10**9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", action="store_true", help="blocked search at --rows by --rows")
    parser.add_argument("--gpu", action="store_true", help="one million by one million on the GPU")
    parser.add_argument("--rows", type=int, help="probes and gallery entries (20,000; with --gpu 1,000,000)")
    parser.add_argument("--width", type=int, default=512, help="numbers an embedding (512)")
    parser.add_argument("--backbone", default="slim", help="network of the .bin measurement (slim)")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        return measure_bin(options.measure, options.backbone)
    if options.gpu or options.search:
        device = torch.device("cuda" if options.gpu else "cpu")
        return measure_search(options.rows or (1_000_000 if options.gpu else 20_000), options.width, device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lfw.bin"
        write_bin(path)
        # A process of its own: what it peaks at is the evaluation's, and not what made the file.
        command = [sys.executable, __file__, "--measure", str(path), "--backbone", options.backbone]
        return subprocess.run(command).returncode


def write_bin(path: Path) -> None:
    """6,000 pairs of JPEGs of about 6 kB, as in lfw.bin; every image has bytes of its own."""
    from PIL import Image

    from megaclass.data.pair_file import PairSet, write_pairs

    rng = np.random.default_rng(0)
    distinct = []
    for _ in range(300):
        coarse = Image.fromarray(rng.integers(0, 256, (28, 28, 3), dtype=np.uint8))
        file = io.BytesIO()
        coarse.resize((_IMAGE_SIZE, _IMAGE_SIZE)).save(file, "JPEG", quality=92)
        distinct.append(file.getvalue())
    # What follows the end of a JPEG is not looked at, and keeps the pickle from storing equal images once.
    images = [distinct[index % len(distinct)] + index.to_bytes(4, "little") for index in range(_NUM_IMAGES)]
    write_pairs(path, PairSet(images, np.arange(_NUM_IMAGES // 2) // 300 % 2 == 0))
    print(f"{path.name}: {_NUM_IMAGES:,} images, {path.stat().st_size / 1e6:.0f} MB", file=sys.stderr)


def measure_bin(path: Path, backbone: str) -> int:
    from megaclass.backbones import build_backbone
    from megaclass.evaluation.protocol import Evaluator
    from megaclass.evaluation.sets import evaluate_sets, find_sets

    network = build_backbone(backbone, embedding_dim=512, image_size=_IMAGE_SIZE).eval()
    with torch.no_grad():
        # Libraries take their working memory at the first batch of any size.
        network(torch.zeros(2, 3, _IMAGE_SIZE, _IMAGE_SIZE))
    before, begun, begun_cpu = peak_bytes(), time.monotonic(), time.process_time()
    evaluator = Evaluator(network=network, image_size=_IMAGE_SIZE, device=torch.device("cpu"))
    (result,) = evaluate_sets(evaluator, find_sets([path]))
    if result.error is not None:
        print(result.error, file=sys.stderr)
        return 2
    taken_s, cpu_s, grown = time.monotonic() - begun, time.process_time() - begun_cpu, peak_bytes() - before
    as_floats = _NUM_IMAGES * 3 * _IMAGE_SIZE**2 * 4
    print(
        f"| {backbone}, {_NUM_IMAGES:,} images | {taken_s:.0f} s ({cpu_s:.0f} s of CPU) | "
        f"{grown / 1e6:.0f} MB beyond the model |"
    )
    print(f"(the set as float32 would be {as_floats / 1e6:,.0f} MB, twice that with both flips)", file=sys.stderr)
    return 0 if grown < _MAX_PEAK_BYTES else 1


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_search(num_rows: int, width: int, device: torch.device) -> int:
    """Every row is a probe and a gallery entry of another draw; 200 probes are checked against all entries in float64."""
    from megaclass.evaluation.search import GalleryShard, search

    gallery, probes = unit_rows(num_rows, width, device, seed=0), unit_rows(num_rows, width, device, seed=1)
    if device.type == "cuda":
        search(probes[:1000], GalleryShard(embeddings_ND=gallery[:1000]), k=10, device=device)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    given = 2 * num_rows * width * 4
    begun = time.monotonic()
    found = search(probes, GalleryShard(embeddings_ND=gallery), k=10, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    taken_s = time.monotonic() - begun
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else peak_bytes()
    checked = torch.linspace(0, num_rows - 1, min(200, num_rows), device=device).long()
    want, places = brute_force(probes[checked], gallery)
    error = (found.other_scores_Pk[checked].double() - want).abs().max().item()
    # Neighbours whose float64 scores differ by less than float32 can tell may change places.
    agreeing = (found.other_indices_Pk[checked] == places).double().mean().item()
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(
        f"| {name}, {num_rows:,} × {num_rows:,}, width {width} | {taken_s:.1f} s, {num_rows**2 / taken_s:.2e} scores/s | "
        f"{peak / 1e9:.1f} GB peak ({given / 1e9:.1f} GB are the embeddings; all scores: {num_rows**2 * 4 / 1e9:,.0f} GB) | "
        f"largest error {error:.1e}, {agreeing:.2%} of the neighbours as in float64 |"
    )
    return 0 if error < 1e-5 and agreeing > 0.995 else 1


def unit_rows(num_rows: int, width: int, device: torch.device, *, seed: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(num_rows, width, generator=generator, device=device))


def brute_force(probes_PD: torch.Tensor, gallery_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scores: list[torch.Tensor] = []
    for start in range(0, len(gallery_ND), 100_000):
        scores.append(probes_PD.double() @ gallery_ND[start : start + 100_000].double().T)  # noqa: PERF401 (one at a time)
    best = torch.topk(torch.cat(scores, dim=1), 10, dim=1)
    return best.values, best.indices


if __name__ == "__main__":
    sys.exit(main())
