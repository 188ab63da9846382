"""`megaclass bench step`: measures a training step with the real data, data from memory and noise, and its parts alone.

If the step is as fast with noise as with the real data, reading is not the bottleneck; then the longest part of the step is.
"""

import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from megaclass.config.schema import Config
from megaclass.data.loader import Batch, BatchLoader
from megaclass.data.sources.in_memory import DebugSource, SyntheticSource
from megaclass.data.sources.source import ImageSource
from megaclass.distributed.agreement import on_every_rank, on_main_rank
from megaclass.train.model.build import Model, build_model
from megaclass.train.run.data import make_data, make_loader, open_data
from megaclass.train.step import training_step
from megaclass_launch.launchers.local import run_local
from megaclass_launch.ranks.collectives import gather_blocks, scatter_sum, sum_over_ranks_
from megaclass_launch.ranks.process_group import process_group
from megaclass_launch.world import World, world_from_environment

_log = logging.getLogger("megaclass.bench")

_WARM_UP_STEPS = 2
_NUM_TIMED = 5
# A run that waits for data for more than this share of the time is bound by data, however fast the parts alone are.
_WAITING_SHARE = 0.25


@dataclass(frozen=True)
class SourceSpeed:
    """Speed of training steps with one source of data."""

    source: str
    images_per_second: float
    """Of all ranks together."""
    step_ms: float
    waiting_share: float
    """Share of the time spent waiting for the next batch."""


@dataclass(frozen=True)
class StepBench:
    """Result of `megaclass bench step`."""

    sources: list[SourceSpeed]
    parts_ms: dict[str, float]
    """Milliseconds per step on this rank for decode, host-to-device, backbone, head and communication, each alone."""
    bound_by: str
    advice: str

    def to_text(self) -> str:
        """Returns both tables and the advice."""
        lines = [f"{'source':12}{'images/s':>12}{'ms per step':>12}{'waiting for data':>20}"]
        lines += [
            f"{speed.source:12}{speed.images_per_second:>12,.0f}{speed.step_ms:>12.1f}{speed.waiting_share:>20.0%}"
            for speed in self.sources
        ]
        lines += ["", f"{'part':24}{'ms per step, alone':>20}"]
        lines += [f"{name:24}{value:>20.2f}" for name, value in self.parts_ms.items()]
        return "\n".join([*lines, "", f"Bound by {self.bound_by}: {self.advice}"])


def bench_step(config: Config, arguments: Sequence[str], *, num_steps: int, is_json: bool) -> int:
    """Measures and prints the result; returns the exit code. arguments: the command line after `bench step`, to start ranks."""
    world = world_from_environment()
    if world.starter == "none":
        make_data(config)
        if config.train.nproc > 1:
            return run_local([sys.executable, "-P", "-m", "megaclass", "bench", "step", *arguments], config.train.nproc)
    with process_group(world, device=config.train.device) as device:
        on_main_rank(lambda: make_data(config), device)
        source, loader = on_every_rank(lambda: open_data(config, world, device), device)
        if world.is_main:
            _log.info(source.describe())
        model = build_model(config, source, world, device)
        result = measure_step(config, model, source, loader, world, device, num_steps)
    if world.is_main:
        print(json.dumps(asdict(result), indent=1) if is_json else result.to_text())
    return 0


def measure_step(
    config: Config,
    model: Model,
    source: ImageSource,
    loader: BatchLoader,
    world: World,
    device: torch.device,
    num_steps: int,
) -> StepBench:
    """Measures steps and parts. Collective: every rank takes the same steps."""
    noise = SyntheticSource(source.num_classes, source.num_images, loader.image_size[0])
    loaders = {
        "real": loader,
        "synthetic": make_loader(config, noise, world, device),
        "debug": make_loader(config, DebugSource(source), world, device),
    }
    model.parallel.train()
    speeds = [_run(name, each, config, model, device, num_steps) for name, each in loaders.items()]
    parts = _parts(config, model, loader, world, device)
    bound_by, advice = verdict(speeds, parts, _decoders(loader)[1])
    return StepBench(speeds, parts, bound_by, advice)


def verdict(speeds: Sequence[SourceSpeed], parts_ms: dict[str, float], decoders: str) -> tuple[str, str]:
    """Returns the part that bounds the run, and advice. Decoding runs in parallel with the other parts, which run in turn.

    decoders: the setting by which more decoders are started, with its present value.
    """
    rest_ms = sum(parts_ms.values()) - parts_ms["decode"]
    real, *without_io = speeds
    gain = max(speed.images_per_second for speed in without_io) / real.images_per_second
    if real.waiting_share > _WAITING_SHARE or parts_ms["decode"] > rest_ms:
        return "decode", (
            f"the run waits {real.waiting_share:.0%} of its time for data and would be {gain:.2f} times as fast without "
            f"reading. Raise {decoders}, or keep the data in memory with data.stage."
        )
    longest = max((name for name in parts_ms if name != "decode"), key=lambda name: parts_ms[name])
    return longest, (
        f"{parts_ms[longest]:.1f} of the {rest_ms:.1f} ms per step, decoding excluded; "
        f"without reading the run would be {gain:.2f} times as fast. {_ADVICE[longest]}"
    )


_ADVICE = {
    "host-to-device": "Use fewer augmentations, or smaller images.",
    "backbone": "Use a smaller backbone, bf16, or train.compile.",
    "head": "Lower head.sample_rate, or add ranks, so that each holds fewer classes.",
    "communication": "Use a faster network, a larger train.global_batch, or gradient accumulation.",
}


def _run(
    name: str, loader: BatchLoader, config: Config, model: Model, device: torch.device, num_steps: int
) -> SourceSpeed:
    waited_s, begun, counted = 0.0, 0.0, 0
    batches = iter(loader.batches(num_steps=_WARM_UP_STEPS + num_steps))
    for step in range(_WARM_UP_STEPS + num_steps):
        if step == _WARM_UP_STEPS:
            _wait_for(device)
            begun, waited_s = time.perf_counter(), 0.0
        asked = time.perf_counter()
        batch = next(batches)
        waited_s += time.perf_counter() - asked
        training_step(model, batch, config, lr=1e-6, step=step, device=device)
        counted = step + 1 - _WARM_UP_STEPS
    _wait_for(device)
    elapsed_s = time.perf_counter() - begun
    per_step_s = elapsed_s / counted
    return SourceSpeed(name, config.train.global_batch / per_step_s, 1000 * per_step_s, waited_s / elapsed_s)


def _parts(config: Config, model: Model, loader: BatchLoader, world: World, device: torch.device) -> dict[str, float]:
    """Returns milliseconds per step of each part alone; collectives are timed with messages of the same sizes."""
    batch = loader.load(0, 0)
    inputs, labels = batch.prepared(device), batch.labels.to(device)
    steps = iter(range(1, 10**9))
    decode_ms = _median_ms(lambda: loader.load(0, next(steps) % loader.steps_per_epoch), device)
    backbone_ms = _median_ms(lambda: _backbone_alone(model, batch, inputs), device)
    embeddings = torch.randn(len(labels), config.backbone.embedding_dim, device=device)
    head_ms = _median_ms(lambda: _head_alone(model, embeddings, labels), device)
    gradients = torch.zeros(sum(p.numel() for p in model.backbone.parameters() if p.requires_grad), device=device)
    # All ranks send blocks of the size of the largest one.
    block = torch.zeros(-(-config.train.global_batch // world.size), config.backbone.embedding_dim, device=device)
    head_messages_ms = _median_ms(lambda: _head_messages(block, world), device)
    gradient_ms = _median_ms(lambda: sum_over_ranks_(gradients, None), device)
    return {
        "decode": decode_ms / _decoders(loader)[0],
        "host-to-device": _median_ms(lambda: batch.prepared(device), device),
        "backbone": backbone_ms,
        "head": max(0.0, head_ms - head_messages_ms),
        "communication": gradient_ms + head_messages_ms if world.size > 1 else 0.0,
    }


def _decoders(loader: BatchLoader) -> tuple[int, str]:
    """Returns how many threads decode at once, and the setting that changes it."""
    processes = loader.processes
    if processes is None:
        return loader.num_workers, f"data.threads (now {loader.num_workers})"
    return processes.num_processes * processes.num_threads, f"data.workers (now {processes.num_processes})"


def _backbone_alone(model: Model, batch: Batch, inputs: torch.Tensor) -> None:
    for dropout in model.dropouts:
        dropout.expect(torch.from_numpy(batch.indices).to(inputs.device), 0)
    with model.parallel.no_sync():
        with torch.autocast(inputs.device.type, model.precision.dtype, enabled=model.precision.uses_autocast):
            embeddings = model.parallel(inputs)
        embeddings.float().sum().backward()


def _head_alone(model: Model, embeddings: torch.Tensor, labels: torch.Tensor) -> None:
    loss = model.head(embeddings.detach().requires_grad_(), labels)
    loss.backward()
    model.head.step(lr=1e-6)


def _head_messages(block: torch.Tensor, world: World) -> None:
    """Sends what the head sends in a step: embeddings to all ranks, two sums per image, gradients of embeddings back."""
    gathered = gather_blocks(block, None)
    sum_over_ranks_(torch.zeros(2, world.size * len(block), device=block.device), None)
    scatter_sum(gathered, None)


def _median_ms(work: Callable[[], object], device: torch.device) -> float:
    times_s = []
    for _ in range(1 + _NUM_TIMED):
        _wait_for(device)
        begun = time.perf_counter()
        work()
        _wait_for(device)
        times_s.append(time.perf_counter() - begun)
    # The first run is a warm-up.
    return 1000 * statistics.median(times_s[1:])


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
