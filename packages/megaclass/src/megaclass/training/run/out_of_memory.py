"""Explains an error of the allocator: how much was asked for, what takes the memory, and which settings to lower."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megaclass.config.schema import Config
from megaclass.errors import HeadError, TrainError
from megaclass.training.model.build import build_row_optimizer
from megaclass_launch.world import World

_GIB = 2**30
# Texts of the allocators of torch: of a CPU, and of CUDA, whose exception is a class of its own.
_CPU_TEXT = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")


@contextmanager
def out_of_memory_explained(config: Config, world: World, device: torch.device) -> Iterator[None]:
    """Turns an out-of-memory error in the block into a TrainError with figures and the settings to lower."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
        free, total = torch.cuda.mem_get_info(device)
        used = (
            f"{(total - free) / _GIB:.1f} of {total / _GIB:.1f} GiB are in use, "
            f"{torch.cuda.memory_allocated(device) / _GIB:.1f} GiB of them by tensors of this process"
        )
        raise TrainError(_text(config, world, device, asked[1] if asked else "more", used)) from error
    except (RuntimeError, MemoryError, HeadError) as error:
        found = _CPU_TEXT.search(str(error))
        if found is None and not isinstance(error, MemoryError):
            raise
        asked_text = f"{int(found[1]) / _GIB:.2f} GiB" if found else "more"
        import resource  # not on Windows

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        used = f"this process has used up to {peak / _GIB:.1f} GiB"
        raise TrainError(_text(config, world, device, asked_text, used)) from error


def _text(config: Config, world: World, device: torch.device, asked: str, used: str) -> str:
    train, head = config.train, config.head
    lower = [f"train.global_batch={max(1, train.global_batch // 2)} (is {train.global_batch})"]
    if train.accumulate < train.global_batch:
        lower.append(f"train.accumulate={2 * train.accumulate} (is {train.accumulate}; the same step in parts)")
    if head.sample_rate == 1.0:
        lower.append("head.sample_rate=0.1 (is 1.0)")
    if head.storage != "bf16":
        lower.append(f"head.storage=bf16 (is {head.storage})")
    if head.stored_gib:
        lower.append(f"head.stored_gib=0 (is {head.stored_gib:g})")
    return (
        f"{world.name()} ran out of memory on {device}: it asked for {asked}, and {used}. {_centres(config)} Lower one of: "
        f"{'; '.join(lower)}; or use more processes, which share the classes (train.nproc is {train.nproc})."
    )


def _centres(config: Config) -> str:
    """Returns a sentence on what a million centres cost with these settings."""
    width = config.backbone.embedding_dim
    weight = torch.empty((1, width), dtype=torch.bfloat16 if config.head.storage == "bf16" else torch.float32)
    rows = {"weight": weight, **build_row_optimizer(config.head).new_state(weight)}
    per_class = config.head.subcentres * sum(row.numel() * row.element_size() for row in rows.values())
    return (
        f"Centres and optimizer state take {per_class * 10**6 / _GIB:.2f} GiB per million classes "
        f"(backbone.embedding_dim={width}, head.optimizer={config.head.optimizer}), divided by the number of processes."
    )
