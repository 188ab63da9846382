"""A head's settings, their limits, their comparison between ranks, and the check of each batch against them."""

import json
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from megaclass.distributed.collectives import gather_blocks, group_rank, group_size
from megaclass.errors import HeadError
from megaclass.gpu.cuda_graphs import CudaGraph
from megaclass.head.margins import Margin
from megaclass.head.row_optimizers import RowOptimizer
from megaclass.head.sampling import RateSchedule
from megaclass.head.state.centres import STORAGE_DTYPES
from megaclass.head.state.state_dict import MODULE_STATES, ModuleState

CUDA_GRAPHS: tuple[str, ...] = get_args(CudaGraph)

# Settings that ranks compare are sent as JSON text of this fixed size.
_SETTINGS_BYTES = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSettings:
    """Arguments of PartialFC, which documents them, with their defaults filled in."""

    embedding_dim: int
    num_classes: int
    margin: Margin
    optimizer: RowOptimizer
    rates: RateSchedule
    seed: int
    max_batch: int | None
    gradient_scale: Literal["mean", "sum"]
    kernel: str
    storage: Literal["float32", "float64", "bf16"]
    """As given to the constructor; `.double()` and its like change the centres, not this."""
    num_subcentres: int
    filter_above: float | None
    correct_sampling: bool
    stored_bytes: int | None
    module_state: ModuleState
    cuda_graph: CudaGraph

    def __post_init__(self) -> None:
        limits: dict[str, tuple[bool, str]] = {
            "embedding_dim": (self.embedding_dim >= 1, "at least 1"),
            "num_classes": (1 <= self.num_classes < 2**31, "in [1, 2^31)"),
            "num_subcentres": (1 <= self.num_subcentres <= 255, "in [1, 255]"),
            "max_batch": (self.max_batch is None or self.max_batch >= 1, "None or at least 1"),
            "gradient_scale": (self.gradient_scale in ("mean", "sum"), "'mean' or 'sum'"),
            "module_state": (self.module_state in MODULE_STATES, f"one of {', '.join(MODULE_STATES)}"),
            "cuda_graph": (self.cuda_graph in CUDA_GRAPHS, f"one of {', '.join(CUDA_GRAPHS)}"),
            "storage": (self.storage in STORAGE_DTYPES, f"one of {', '.join(STORAGE_DTYPES)}"),
            "stored_bytes": (self.stored_bytes is None or self.stored_bytes >= 0, "None, or 0 or more"),
            "filter_above": (self.filter_above is None or 0 < self.filter_above <= 1, "None or a cosine in (0, 1]"),
            "correct_sampling": (
                not (self.correct_sampling and 0 in self.rates.rates),
                "False where a sample rate is 0: no negative is drawn, so none can represent the others",
            ),
        }
        for name, (is_allowed, allowed) in limits.items():
            if not is_allowed:
                raise HeadError(f"PartialFC {name} is {getattr(self, name)!r}; it must be {allowed}.")

    def compare_between_ranks(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        """Collective: all-gathers 8 KiB per rank. Ranks with different settings would silently compute different things."""
        text = json.dumps(self._compared()).encode()
        if len(text) > _SETTINGS_BYTES:
            raise HeadError(
                f"The head's settings are {len(text)} bytes as text, more than {_SETTINGS_BYTES}: shorten sample_rate."
            )
        block = torch.frombuffer(bytearray(text.ljust(_SETTINGS_BYTES)), dtype=torch.uint8).to(device)
        texts = [bytes(row.tolist()) for row in gather_blocks(block, group).cpu()]
        for other, theirs in enumerate(texts):
            if theirs != texts[0]:
                first, second = json.loads(texts[0]), json.loads(theirs)
                name = next(key for key in first if first[key] != second[key])
                raise HeadError(
                    f"Ranks disagree about the head: {name} is {first[name]} on rank 0 but {second[name]} on rank {other}. "
                    f"Give every rank the same settings."
                )

    def _compared(self) -> dict[str, Any]:
        """Settings that must be equal on all ranks. `kernel`, `stored_bytes` and `cuda_graph` may differ."""
        names = (
            "embedding_dim", "num_classes", "seed", "max_batch", "gradient_scale", "filter_above", "correct_sampling",
            "module_state", "storage", "num_subcentres",
        )  # fmt: skip
        return {
            **{name: getattr(self, name) for name in names},
            "margin": repr(self.margin),
            "optimizer": repr(self.optimizer),
            "sample_rate": list(zip(self.rates.starts, self.rates.rates, strict=True)),
        }


def check_batch(
    settings: HeadSettings,
    embeddings_BD: Tensor,
    labels_B: Tensor,
    built_as: tuple[int, int],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> None:
    """Raises for a batch whose shapes, dtypes or device do not fit the head. Reads no values, so the host never waits.

    built_as: rank and number of ranks when the head was built.
    """
    now, (rank, world_size) = (group_rank(group), group_size(group)), built_as
    if now != built_as:
        raise HeadError(
            f"The head was built as rank {rank} of {world_size}, but this process is now rank {now[0]} of {now[1]}. "
            f"Build it after torch.distributed is initialised: under Lightning in configure_model(), under Accelerate "
            f"after Accelerator()."
        )
    check_embeddings(settings, embeddings_BD, rank, device)
    if labels_B.shape != embeddings_BD.shape[:1] or labels_B.is_floating_point():
        raise HeadError(
            f"Rank {rank} brought labels of shape {tuple(labels_B.shape)} and {labels_B.dtype} for {len(embeddings_BD)} "
            f"embeddings; expected one integer per embedding."
        )
    if labels_B.device != embeddings_BD.device:
        raise HeadError(
            f"Rank {rank} brought labels on {labels_B.device} and embeddings on {embeddings_BD.device}; they must be on the "
            f"same device: labels.to(embeddings.device)."
        )
    if settings.max_batch is not None and len(labels_B) > settings.max_batch:
        raise HeadError(
            f"Rank {rank} brought {len(labels_B)} images, more than max_batch={settings.max_batch}: raise max_batch."
        )


def check_embeddings(settings: HeadSettings, embeddings_BD: Tensor, rank: int, device: torch.device) -> None:
    """Raises for embeddings of another shape, dtype or device than the head's. Reads no values."""
    is_matrix = embeddings_BD.ndim == 2 and embeddings_BD.shape[1] == settings.embedding_dim
    if not is_matrix or not embeddings_BD.is_floating_point():
        raise HeadError(
            f"Rank {rank} brought embeddings of shape {tuple(embeddings_BD.shape)} and {embeddings_BD.dtype}; the head "
            f"expects (batch, {settings.embedding_dim}) of a floating dtype. Set embedding_dim to the backbone's."
        )
    if embeddings_BD.device != device:
        raise HeadError(
            f"Rank {rank} brought embeddings on {embeddings_BD.device}, the head is on {device}: build the head with "
            f"device={str(embeddings_BD.device)!r}, or move it there with head.to(…)."
        )
