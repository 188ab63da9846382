"""How long does a checkpoint hold up training? The same state saved synchronously and in the background, in one run.

    python benchmarks/checkpoint.py [--classes 1048576] [--folder /where/the/run/would/be] [--out benchmarks/checkpoint.md]

Stall: from the call to the moment at which the device could take the next step, copies to the host included. Also
measured: what steps cost while a save is being written, against steps without one.
"""

import argparse
import datetime
import platform
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

from megaclass.backbones import build_backbone
from megaclass.checkpoint.save import CheckpointWriter, Snapshot

EMBEDDING_DIM = 512
SYNCHRONOUS, BACKGROUND = "synchronous", "in the background"


def build_state(num_classes: int, device: torch.device) -> Snapshot:
    """What a run of r50 with SGD has to save: backbone and centres, each with momentum."""
    torch.manual_seed(0)
    backbone = build_backbone("iresnet50", embedding_dim=EMBEDDING_DIM, image_size=112).to(device)
    shared = {f"backbone.{name}": tensor for name, tensor in backbone.state_dict().items()}
    shared |= {f"optimizer.{name}.momentum_buffer": p.detach().clone() for name, p in backbone.named_parameters()}
    rows = {name: torch.randn((num_classes, EMBEDDING_DIM), device=device) for name in ("weight", "momentum")}
    return Snapshot(
        step=0, shared=shared, head_rows=rows, class_start=0, class_stop=num_classes, num_classes=num_classes
    )


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Steps:
    """Stands in for training: products of matrices that keep the device busy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        side, self._num_products = (8192, 20) if device.type == "cuda" else (512, 4)
        self._matrix = torch.randn((side, side), device=device) / side

    def seconds_each(self, num_steps: int) -> float:
        wait_for(self._device)
        begun = time.perf_counter()
        for _ in range(num_steps):
            for _ in range(self._num_products):
                torch.mm(self._matrix, self._matrix)
            wait_for(self._device)
        return (time.perf_counter() - begun) / num_steps


def measure(folder: Path, state: Snapshot, device: torch.device, num_saves: int) -> dict[str, float]:
    """Medians in seconds; the two kinds take turns, so a disk that slows down does so for both."""
    steps = Steps(device)
    stalls: dict[str, list[float]] = {SYNCHRONOUS: [], BACKGROUND: []}
    writing, alone, beside = [], [], []
    writers = {
        kind: CheckpointWriter(folder / kind, config="", keep=1, device=device, is_asynchronous=kind == BACKGROUND)
        for kind in stalls
    }
    for writer in writers.values():
        writer.reserve(state.head_rows, state.shared)
    for number in range(1, num_saves + 1):
        for kind, writer in writers.items():
            snapshot = Snapshot(**{**vars(state), "step": number})
            alone.append(steps.seconds_each(5))
            wait_for(device)
            begun = time.perf_counter()
            writer.save(snapshot)
            wait_for(device)
            stalls[kind].append(time.perf_counter() - begun)
            if kind == BACKGROUND:
                beside.append(steps.seconds_each(5))
                writer.finish()
                writing.append(time.perf_counter() - begun)
    return {
        SYNCHRONOUS: statistics.median(stalls[SYNCHRONOUS]),
        BACKGROUND: statistics.median(stalls[BACKGROUND]),
        "worst": max(stalls[BACKGROUND]),
        "writing": statistics.median(writing),
        "alone": statistics.median(alone),
        "beside": statistics.median(beside),
    }


def table(times: dict[str, float], num_bytes: int, num_classes: int, device: torch.device) -> str:
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
    share, worst = times[BACKGROUND] / times[SYNCHRONOUS], times["worst"] / times[SYNCHRONOUS]
    slower = times["beside"] / times["alone"] - 1
    return f"""\
{datetime.date.today()}, {machine}, torch {torch.__version__}, r50 and {num_classes:,} classes with momentum, \
{num_bytes / 1e9:.1f} GB, one rank:

| save | training waits | share |
|---|---|---|
| synchronous | {times[SYNCHRONOUS]:.3f} s | 100 % |
| in the background, median | {times[BACKGROUND]:.3f} s | **{share:.1%}** |
| in the background, worst | {times["worst"]:.3f} s | {worst:.1%} |

A save in the background is published after {times["writing"]:.2f} s; steps meanwhile take {slower:+.0%}.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--classes", type=int, default=1 << 20 if device.type == "cuda" else 1 << 17)
    parser.add_argument("--saves", type=int, default=5, help="of each kind (5)")
    parser.add_argument("--folder", type=Path, help="where to write; otherwise the system's temporary folder")
    parser.add_argument("--out", type=Path, help="Markdown file the table is appended to")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        state = build_state(options.classes, device)
        times = measure(folder, state, device, options.saves)
    finally:
        shutil.rmtree(folder)
    num_bytes = sum(t.numel() * t.element_size() for t in (*state.shared.values(), *state.head_rows.values()))
    text = table(times, num_bytes, options.classes, device)
    print(text)
    if options.out is not None:
        with options.out.open("a", encoding="utf-8") as file:
            file.write("\n" + text)


if __name__ == "__main__":
    main()
