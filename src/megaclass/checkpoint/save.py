"""State -> disk: every rank its own centres, rank 0 the backbone; published by a rename once every byte is there."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megaclass.checkpoint.manifest import Manifest, SavedFile, describe_file, flush
from megaclass.distributed.agreement import on_every_rank, on_main_rank
from megaclass.distributed.collectives import gather_blocks, group_rank, group_size

_ENTRY_BYTES = 512


def checkpoint_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:09d}"


def save_checkpoint(
    checkpoints: Path,
    *,
    step: int,
    shared: Mapping[str, Tensor],
    head_rows: Mapping[str, Tensor],
    class_start: int,
    class_stop: int,
    num_classes: int,
    config: str,
    keep: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Collective. Writes checkpoints/step-N and removes all but the newest `keep`.

    shared: tensors that are the same on all ranks (backbone, its optimizer), written by rank 0.
    head_rows: this rank's centres and their state, for classes [class_start, class_stop).
    A crash at any moment leaves the older checkpoints as they were; a rank that cannot write ends the save on all.
    """
    from safetensors.torch import save_file

    final = checkpoint_folder(checkpoints, step)
    partial = final.with_name(f".{final.name}.partial")
    entries: dict[str, SavedFile] = {}

    def prepare() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    def write(name: str, tensors: Mapping[str, Tensor], start: int = 0, stop: int = 0) -> None:
        # A copy a tensor: the format refuses views that share memory.
        save_file({key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}, partial / name)
        flush(partial / name)
        entries[name] = describe_file(partial / name, start, stop)

    def write_own() -> None:
        write(f"head-{class_start:010d}-{class_stop:010d}.safetensors", head_rows, class_start, class_stop)
        if group_rank(group) == 0:
            write("shared.safetensors", shared)

    def publish() -> None:
        manifest = Manifest(
            step=step, num_classes=num_classes, world_size=group_size(group), config=config, files=all_entries
        )
        manifest.write(partial)
        flush(partial)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        flush(checkpoints)
        for old in sorted(checkpoints.glob("step-*"))[:-keep]:
            shutil.rmtree(old)

    on_main_rank(prepare, device, group)
    on_every_rank(write_own, device, group)
    all_entries = _gather_entries(entries, device, group)
    on_main_rank(publish, device, group)
    return final


def _gather_entries(
    entries: dict[str, SavedFile], device: torch.device, group: dist.ProcessGroup | None
) -> dict[str, SavedFile]:
    """All ranks' files; a rank writes at most two. An all-gather of 1 KiB a rank."""
    from dataclasses import asdict

    texts = [json.dumps([name, asdict(saved)]).encode().ljust(_ENTRY_BYTES) for name, saved in entries.items()]
    block = torch.tensor(list(b"".join(texts).ljust(2 * _ENTRY_BYTES)), dtype=torch.uint8, device=device)
    gathered: dict[str, SavedFile] = {}
    for row in gather_blocks(block, group).cpu():
        for text in (bytes(row[:_ENTRY_BYTES].tolist()), bytes(row[_ENTRY_BYTES:].tolist())):
            if text.strip():
                name, values = json.loads(text)
                gathered[name] = SavedFile(**values)
    return gathered
