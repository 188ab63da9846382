"""Evaluation at the sizes people use: memory of an lfw-sized .bin, and a million probes against a million entries.

    python benchmarks/evaluate.py                 # 12,000 images of an lfw-sized .bin on the CPU; peak memory
    python benchmarks/evaluate.py --search        # blocked search on this device, against float64 brute force
    python benchmarks/evaluate.py --gpu           # one million by one million scores of width 512 on the GPU
    python benchmarks/evaluate.py --gpu --classify    # a million embeddings against a million classes: all numbers
    python benchmarks/evaluate.py --gpu --retrieve    # a million queries in a gallery of a million: all numbers

--classify and --retrieve may be given together.

Each prints a table row for benchmarks/evaluate.md and fails when a limit of the project is not kept.
"""

import argparse
import contextlib
import io
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

_NUM_IMAGES, _IMAGE_SIZE = 12_000, 112
_MAX_PEAK_BYTES = 10**9


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", action="store_true", help="blocked search at --rows by --rows")
    parser.add_argument("--gpu", action="store_true", help="one million by one million on the GPU")
    parser.add_argument("--classify", action="store_true", help="classification at --rows by --rows")
    parser.add_argument(
        "--retrieve", action="store_true", help="retrieval at --rows by --rows, ten entries an identity"
    )
    parser.add_argument("--rows", type=int, help="probes and gallery entries (20,000; with --gpu 1,000,000)")
    parser.add_argument("--width", type=int, default=512, help="numbers an embedding (512)")
    parser.add_argument("--backbone", default="slim", help="network of the .bin measurement (slim)")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        return measure_bin(options.measure, options.backbone)
    if options.classify or options.retrieve:
        device = torch.device("cuda" if options.gpu else "cpu")
        num_rows = options.rows or (1_000_000 if options.gpu else 20_000)
        chosen = [measure_classification] * options.classify + [measure_retrieval] * options.retrieve
        return max([measure(num_rows, options.width, device) for measure in chosen])
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


def noisy(rows: torch.Tensor, *, seed: int) -> torch.Tensor:
    """Rows near to the given ones: so near that many, but not all, find their own first."""
    noise = unit_rows(len(rows), rows.shape[1], rows.device, seed=seed)
    return torch.nn.functional.normalize(rows + 4.0 * noise)


@contextlib.contextmanager
def measured(what: str, num_rows: int, width: int, device: torch.device) -> Iterator[Callable[[str], None]]:
    """Prints a table row with time and memory of the block, and what the block tells."""
    told: list[str] = []
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begun = time.monotonic()
    yield told.append
    if device.type == "cuda":
        torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else peak_bytes()
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    taken_s = time.monotonic() - begun
    print(
        f"| {what}, {name}, {num_rows:,} × {num_rows:,}, width {width} | {taken_s:.1f} s | {peak / 1e9:.1f} GB peak | "
        f"{'; '.join(told)} |"
    )


def measure_classification(num_rows: int, width: int, device: torch.device) -> int:
    """One image per class, near its centre. 200 images are checked against all centres in float64."""
    from megaclass.checkpoint.class_names import ClassList
    from megaclass.evaluation.centres import ClassShard
    from megaclass.evaluation.protocols.classification import fitted_scale, numbers_of
    from megaclass.evaluation.search import search

    centres = unit_rows(num_rows, width, device, seed=0)
    rows, labels = noisy(centres, seed=1), np.arange(num_rows)
    shard = ClassShard.of(centres, 0, ClassList(num_rows), num_rows).shard
    with measured("classification", num_rows, width, device) as tell:
        scale, fitted = fitted_scale(rows, labels, shard, device=device)
        found = search(rows, shard, k=5, device=device, probe_labels_P=labels, scale=scale)
        numbers = numbers_of(found, labels, scale=scale, fitted=fitted)
        tell(f"top-1 {numbers['top_k']['1']:.4f}, ECE {numbers['calibration_error']:.4f}")
    checked = torch.linspace(0, num_rows - 1, min(200, num_rows), device=device).long()
    assert scale is not None and found.log_sums_P is not None
    wrong = 0.0
    for start in range(0, len(checked), 20):
        some = checked[start : start + 20]
        cosines = rows[some].double() @ centres.double().T
        sums = torch.logsumexp(scale * cosines, dim=1)
        own = cosines.gather(1, some[:, None])[:, 0]
        wrong = max(wrong, (found.log_sums_P[some].double() - sums).abs().max().item())
        wrong = max(wrong, (found.mate_scores_P[some].double() - own).abs().max().item())
        others = cosines.scatter(1, some[:, None], -2.0).topk(5, dim=1).values
        wrong = max(wrong, (found.other_scores_Pk[some].double() - others).abs().max().item())
    print(f"largest error against float64: {wrong:.1e}")
    return 0 if wrong < 1e-3 else 1


def measure_retrieval(num_rows: int, width: int, device: torch.device) -> int:
    """Ten gallery entries per identity. 200 queries alone are checked against sorting all their scores in float64."""
    from megaclass.evaluation.protocols.retrieval import retrieve
    from megaclass.evaluation.search import GalleryShard

    people, labels = unit_rows(-(-num_rows // 10), width, device, seed=0), np.arange(num_rows) // 10
    gallery, queries = noisy(people[labels], seed=1), noisy(people[labels], seed=2)
    with measured("retrieval", num_rows, width, device) as tell:
        numbers = retrieve(queries, labels, GalleryShard(embeddings_ND=gallery), labels, device=device)
        tell(f"mAP {numbers['map']:.4f}, MAP@R {numbers['map_at_r']:.4f}, CMC@1 {numbers['cmc']['1']:.4f}")
    some = np.linspace(0, num_rows - 1, min(200, num_rows)).astype(np.int64)
    few = retrieve(queries[some], labels[some], GalleryShard(embeddings_ND=gallery), labels, device=device)["map"]
    precisions = []
    for place in some.tolist():
        order = (gallery.double() @ queries[place].double()).argsort(descending=True).cpu().numpy()
        hits = labels[order] == labels[place]
        precisions.append((np.cumsum(hits) / np.arange(1, num_rows + 1))[hits].mean())
    error = abs(few - float(np.mean(precisions)))
    print(f"mAP of {len(some)} queries: {few:.6f}, off by {error:.1e} from float64")
    return 0 if error < 1e-4 else 1


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
