"""Reads checkpoints of InsightFace's training code: backbones, and class centres of any number of ranks.

`torch.load` always runs with weights_only=True: a file that contains other objects is refused.
"""

import itertools
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megaclass.errors import CheckpointError
from megaclass.insightface.mxnet_params import backbone_state, read_params
from megaclass_launch.even_parts import even_sizes


def read_backbone(path: Path) -> dict[str, Tensor]:
    """Reads the state dict of a backbone from `backbone.pth`, `model.pt`, `checkpoint_gpu_N.pt` or MXNet's `.params`."""
    if path.suffix in (".params", ".param"):
        return backbone_state(read_params(path), path)
    loaded = _load(path)
    state = loaded.get("state_dict_backbone", loaded)
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: state_dict_backbone is a {type(state).__name__}, expected tensors by name.")
    # DDP and torch.compile put a prefix before every name.
    state = {re.sub(r"^(?:module\.|_orig_mod\.)+", "", str(name)): tensor for name, tensor in state.items()}
    if not state or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise CheckpointError(f"{path} does not hold the state dict of a backbone: expected tensors by name.")
    return state


def load_backbone_(backbone: nn.Module, state: Mapping[str, Tensor], path: Path) -> None:
    """Copies the state into the backbone, or raises an error that shows the differences in names and shapes."""
    check_fits(backbone, state, path)
    try:
        backbone.load_state_dict(dict(state), strict=False)
    except RuntimeError as error:
        reason = str(error).strip().split("\n")[-1].strip()
        raise CheckpointError(f"{path} does not fit this backbone: {reason}") from error


def check_fits(backbone: nn.Module, state: Mapping[str, Tensor], path: Path) -> None:
    """Refuses a state dict with other names or shapes, and shows the differences."""
    own = backbone.state_dict()
    # Older files lack the batch counters, which have no effect.
    missing = [name for name in own if name not in state and not name.endswith("num_batches_tracked")]
    unknown = [name for name in state if name not in own]
    shapes = [
        f"{name} is {tuple(state[name].shape)}, expected {tuple(own[name].shape)}"
        for name in own
        if name in state and state[name].shape != own[name].shape
    ]
    problems = [f"missing {n}" for n in missing[:3]] + [f"unknown {n}" for n in unknown[:3]] + shapes[:3]
    if problems:
        total = len(missing) + len(unknown) + len(shapes)
        raise CheckpointError(f"{path} does not fit this backbone, {total} difference(s): {'; '.join(problems)}.")


def read_centre_shards(folder: Path) -> list[tuple[int, Tensor]]:
    """Returns (first class, centres) of each file `checkpoint_gpu_{rank}.pt`, or MXNet's `{rank}_centers.param`, in order.

    The files of all ranks must be present. torch maps its files, so rows are read when they are used.
    """
    if not folder.is_dir():
        raise CheckpointError(f"There is no folder {folder} to read centres from.")
    torch_files = _by_rank(folder, r"checkpoint_gpu_(\d+)\.pt")
    mxnet_files = _by_rank(folder, r"(\d+)_centers\.param")
    if torch_files:
        shards = [_centres_of(path) for path in torch_files]
    elif mxnet_files:
        shards = [_only_array(path) for path in mxnet_files]
    else:
        raise CheckpointError(f"{folder} holds neither checkpoint_gpu_N.pt nor N_centers.param files.")
    widths = {shard.shape[1] for shard in shards}
    if len(widths) > 1:
        raise CheckpointError(f"The centres in {folder} have different widths: {sorted(widths)}.")
    sizes = [len(shard) for shard in shards]
    _check_split(sizes, folder)
    return list(zip(itertools.accumulate(sizes[:-1], initial=0), shards, strict=True))


def _check_split(sizes: list[int], folder: Path) -> None:
    """Requires the even split that InsightFace uses; any other means that a file belongs to another run."""
    total, world_size = sum(sizes), len(sizes)
    expected = even_sizes(total, world_size)
    if sizes != expected:
        raise CheckpointError(
            f"The shards in {folder} hold {sizes} classes; {total} classes over {world_size} ranks would be {expected}. "
            f"Is a shard missing, or from another run?"
        )


def _by_rank(folder: Path, pattern: str) -> list[Path]:
    found = {int(match[1]): path for path in folder.iterdir() if (match := re.fullmatch(pattern, path.name))}
    missing = sorted(set(range(max(found, default=-1) + 1)) - set(found))
    if missing:
        raise CheckpointError(f"{folder} has no file of rank {missing[0]}: found ranks {sorted(found)}.")
    return [found[rank] for rank in sorted(found)]


def _centres_of(path: Path) -> Tensor:
    state = _load(path).get("state_dict_softmax_fc")
    weights = [t for t in state.values() if isinstance(t, Tensor) and t.ndim == 2] if isinstance(state, dict) else []
    if len(weights) != 1:
        raise CheckpointError(f"{path}: state_dict_softmax_fc must hold one matrix of centres, found {len(weights)}.")
    return weights[0].float()


def _only_array(path: Path) -> Tensor:
    arrays = list(read_params(path).values())
    if len(arrays) != 1 or arrays[0].ndim != 2:
        raise CheckpointError(f"{path} must hold one matrix of centres, found {len(arrays)} array(s).")
    return torch.from_numpy(np.array(arrays[0])).float()


def _load(path: Path) -> dict[str, Any]:
    try:
        num_bytes = path.stat().st_size
        # The size of an archive is checked before torch allocates anything for it.
        is_archive = zipfile.is_zipfile(path)
        if is_archive:
            _check_archive(path, num_bytes)
        # Files written before torch 1.6 are not archives and cannot be mapped.
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except FileNotFoundError:
        raise CheckpointError(f"There is no file {path}.") from None
    except CheckpointError:
        raise
    # torch's reader of old files raises many types of errors on damaged files: AttributeError, IndexError, struct.error,
    # UnicodeDecodeError, OverflowError. All of them mean that the file cannot be read.
    except Exception as error:
        # torch's own text for pickles advises to read them without protection, which may run code.
        reason = str(error).strip().split("\n")[0].partition(" In PyTorch 2.6")[0].rstrip(".") or type(error).__name__
        raise CheckpointError(
            f"Cannot read {path} as tensors only: {reason}. It is damaged, or not a file of torch.save, or holds other objects "
            f"than tensors. Copy it again, or save the weights alone: torch.save(model.state_dict(), path)."
        ) from error
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path} holds a {type(loaded).__name__}, expected a state dict.")
    _check_tensors(loaded, path, num_bytes)
    return loaded


def _check_archive(path: Path, num_bytes: int) -> None:
    """Refuses archives that unpack to more bytes than the file has: torch stores tensors uncompressed."""
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(entry.file_size for entry in archive.infolist())
    if unpacked > num_bytes:
        raise CheckpointError(
            f"{path} has {num_bytes:,} bytes and would unpack to {unpacked:,}: torch does not write such files."
        )


def _check_tensors(loaded: dict[Any, Any], path: Path, num_bytes: int) -> None:
    """Refuses tensors larger than the file (by strides of 0) and special tensors: a copy could fill the memory."""
    parts = [loaded, *(part for part in loaded.values() if isinstance(part, dict))]
    for name, tensor in ((name, value) for part in parts for name, value in part.items() if isinstance(value, Tensor)):
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise CheckpointError(f"{path}: {str(name)[:80]} is not a plain tensor ({tensor.layout}, {tensor.dtype}).")
        if tensor.numel() * tensor.element_size() > num_bytes:
            raise CheckpointError(
                f"{path}: {str(name)[:80]} of shape {tuple(tensor.shape)} does not fit into {num_bytes:,} bytes."
            )
