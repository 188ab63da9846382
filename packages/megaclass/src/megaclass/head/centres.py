"""The class centres of one rank and their optimizer state, row for row."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megaclass.errors import HeadError
from megaclass.head.counter_random import (
    normals_from_bits,
    random_bits_rows,
    round_stochastically,
    stream_keys,
)
from megaclass.head.faults import OverwriteCheck
from megaclass.head.problem import take_rows, unit_rows
from megaclass.head.row_optimizers import RowOptimizer
from megaclass.keyed_random import Stream
from megaclass_launch.even_parts import even_part

STORAGE_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bf16": torch.bfloat16}
# As in InsightFace. Only directions enter the loss, but the length scales the first steps: gradients are divided by it.
_INITIAL_DEVIATION = 0.01
# Numbers drawn at once: on a CPU the block stays in the cache of a core, on a GPU it fills all multiprocessors.
_BLOCK_ELEMENTS = {"cpu": 1 << 15, "cuda": 1 << 26}


def class_range(num_classes: int, rank: int, world_size: int) -> range:
    """Returns the classes of a rank: contiguous ranges of nearly equal size, by the rule of InsightFace's checkpoints."""
    if num_classes < world_size:
        raise HeadError(
            f"{num_classes} classes cannot be cut over {world_size} ranks: every rank needs at least one class. "
            f"Use at most {num_classes} ranks."
        )
    return even_part(num_classes, rank, world_size)


class Centres:
    """R = K * M rows of D numbers; the M sub-centres of a class are adjacent.

    Neither a module nor a holder of buffers: DistributedDataParallel and FSDP would overwrite buffers with those of rank 0,
    but here every rank holds other classes. PartialFC moves and saves them as it does buffers.
    """

    def __init__(
        self,
        classes: range,
        embedding_dim: int,
        num_subcentres: int,
        *,
        storage: str,
        optimizer: RowOptimizer,
        seed: int,
        device: torch.device,
        fewest_classes: int,
        is_cosine: bool = True,
        has_bias: bool = False,
    ) -> None:
        """fewest_classes: classes on the rank that has the fewest.

        is_cosine: only directions enter the loss. has_bias: the last number of each centre is a bias, which starts at 0.
        """
        self.is_cosine = is_cosine
        self.classes, self.num_subcentres, self.seed, self.optimizer = classes, num_subcentres, seed, optimizer
        self._fewest_rows = fewest_classes * num_subcentres
        dtype = STORAGE_DTYPES[storage]
        self.weight_RD = torch.empty((len(classes) * num_subcentres, embedding_dim), dtype=dtype, device=device)
        self._draw_initial()
        if has_bias:
            self.weight_RD[:, -1] = 0
        self.state = optimizer.new_state(self.weight_RD)
        self.num_wins_R = torch.zeros(
            len(self.weight_RD) if num_subcentres > 1 else 0, dtype=torch.int32, device=device
        )
        """Images that were closest to each sub-centre of their class, since the training last set it to zero."""
        self.overwrite_check = OverwriteCheck(self.weight_RD, self._fewest_rows)

    @property
    def work_dtype(self) -> torch.dtype:
        return torch.float64 if self.weight_RD.dtype == torch.float64 else torch.float32

    def directions(self, rows_RD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the vectors that images are compared with, in the work dtype: unit vectors, and 1 / length of the rows.

        For inner products the rows as they are, and ones.
        """
        return unit_rows(rows_RD, self.work_dtype, is_cosine=self.is_cosine)

    def rows(self) -> dict[str, Tensor]:
        """Returns the centres and their optimizer state; first dimension R."""
        return {"weight": self.weight_RD, **self.state}

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state without the overwrite check, a view of the centres that apply_() forms again."""
        return {name: value for name, value in vars(self).items() if name != "overwrite_check"}

    def apply_(self, function: Callable[[Tensor], Tensor]) -> None:
        """Moves and converts as nn.Module._apply does buffers. State keeps the dtype that suits the centres."""
        self.weight_RD = function(self.weight_RD)
        self.num_wins_R = self.num_wins_R.to(self.weight_RD.device)
        wanted = self.optimizer.new_state(self.weight_RD[:0])
        for name, tensor in self.state.items():
            moved = function(tensor)
            # Converted from the original: a detour over a narrower dtype would round it.
            self.state[name] = moved if moved.dtype == wanted[name].dtype else tensor.to(wanted[name])
        self.overwrite_check = OverwriteCheck(self.weight_RD, self._fewest_rows)

    def load_rows(self, first_class: int, tensors: Mapping[str, Tensor]) -> None:
        """Copies the part of `tensors` (whole classes from first_class on) that belongs to this rank."""
        own = self.rows()
        if set(tensors) != set(own):
            raise HeadError(f"Rows with {sorted(tensors)} cannot be loaded into a head that keeps {sorted(own)}.")
        self.load_some_rows(first_class, tensors)

    def load_some_rows(self, first_class: int, tensors: Mapping[str, Tensor]) -> None:
        """Loads like load_rows; tensors that are not given keep their values."""
        own = self.rows()
        for name, source in tensors.items():
            if len(source) % self.num_subcentres or source.shape[1:] != own[name].shape[1:]:
                raise HeadError(
                    f"Rows of {name!r} have shape {tuple(source.shape)}, this head's {tuple(own[name].shape)} with "
                    f"{self.num_subcentres} centre(s) per class: embedding_dim, num_subcentres or bias differ."
                )
            num_classes = len(source) // self.num_subcentres
            start = max(first_class, self.classes.start)
            stop = min(first_class + num_classes, self.classes.stop)
            if start < stop:
                # The overlap of two ranges of classes: the source may hold more than this rank, less, or none of it.
                here = slice(*((c - self.classes.start) * self.num_subcentres for c in (start, stop)))
                there = slice(*((c - first_class) * self.num_subcentres for c in (start, stop)))
                own[name][here].copy_(source[there])
        self.overwrite_check.renew()

    def count_wins_(self, rows_N: Tensor) -> None:
        """Counts the images of a step, given the rows of their own centres, -1 if on another rank. One centre: nothing."""
        if self.num_subcentres > 1:
            # Clamped: while programs are compiled and not run, rows are whatever was in memory.
            self.num_wins_R.index_add_(0, rows_N.clamp(0, len(self.num_wins_R) - 1), (rows_N >= 0).to(torch.int32))

    def start_at_(self, directions_KD: Tensor) -> Tensor:
        """Points the first centre of each class in its direction, with the length of a random one, unless it is zero.

        directions_KD: float32, overwritten. Returns the number of classes that were set, 0-d.
        """
        lengths_K = torch.linalg.vector_norm(directions_KD, dim=1)
        is_given_K = lengths_K > 0
        length = _INITIAL_DEVIATION * directions_KD.shape[1] ** 0.5
        first_KD = self.weight_RD.unflatten(0, (-1, self.num_subcentres))[:, 0]
        directions_KD.mul_((length / lengths_K.where(is_given_K, torch.inf))[:, None])
        first_KD.copy_(directions_KD.where(is_given_K[:, None], first_KD.to(directions_KD.dtype)))
        self.overwrite_check.renew()
        num_given: Tensor = is_given_K.sum()
        return num_given

    def turn_to_(self, directions_KD: Tensor, weight: float) -> None:
        """Turns each centre to (its unit vector + weight * the unit direction); a zero direction leaves it. Lengths stay.

        One centre per class. In blocks, because all centres once more would need as much memory again.
        """
        assert self.num_subcentres == 1
        for rows_ND, directions_ND in zip(self.weight_RD.split(1 << 16), directions_KD.split(1 << 16), strict=True):
            old_ND = rows_ND.to(directions_ND.dtype)
            lengths_N = torch.linalg.vector_norm(old_ND, dim=1, keepdim=True)
            turned_ND = F.normalize(old_ND) + weight * F.normalize(directions_ND)
            is_given_N = (directions_ND != 0).any(dim=1, keepdim=True)
            rows_ND.copy_((F.normalize(turned_ND) * lengths_N).where(is_given_N, old_ND))
        self.overwrite_check.renew()

    def update_(
        self,
        rows: slice | Tensor,
        grad_unit_RD: Tensor,
        mask_R: Tensor | None,
        lr: float | Tensor,
        step: int,
        squares: list[Tensor] | None = None,
    ) -> None:
        """Moves these rows by the gradient of their unit vectors; rows where mask_R is False stay as they are.

        rows: a slice or a list of rows; entries of a list that mask_R leaves out (padding) may repeat a row.
        squares: if given, the sum of squares of the rows' gradient is added to the list, 0-d float64.
        """
        # Without a list of rows, a mask or a narrower storage dtype, the update writes into the centres and copies nothing.
        in_place = isinstance(rows, slice) and mask_R is None and self.weight_RD.dtype == self.work_dtype
        stored = {name: take_rows(tensor, rows) for name, tensor in self.rows().items()}
        moved = {name: tensor if in_place else self._working_copy(tensor) for name, tensor in stored.items()}
        weight_RD = moved.pop("weight")
        grad_RD = grad_unit_RD
        if self.is_cosine:
            unit_RD, inverse_R = self.directions(weight_RD)
            # The chain rule of the normalisation: only what is orthogonal to the centre changes its direction.
            along_R = (unit_RD * grad_unit_RD).sum(1, keepdim=True)
            grad_RD = grad_unit_RD.sub_(unit_RD.mul_(along_R)).mul_(inverse_R[:, None])
        if squares is not None:
            # Rows that mask_R leaves out have no gradient: padding, and sub-centres that no image is closest to.
            squares.append(torch.linalg.vector_norm(grad_RD, dim=1).double().square().sum())
        self.optimizer.update_(weight_RD, moved, self.optimizer.clip_(grad_RD), lr)
        if in_place:
            return
        moved["weight"] = weight_RD
        for place, (name, old) in enumerate(stored.items()):
            new = self._rounded(moved[name], old.dtype, rows, step, place)
            if mask_R is not None:
                new = torch.where(mask_R.view(-1, *[1] * (new.ndim - 1)), new, old)
            self._write(self.rows()[name], rows, new, mask_R)

    def _working_copy(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.work_dtype) if tensor.dtype == torch.bfloat16 else tensor.clone()

    def _rounded(self, new: Tensor, dtype: torch.dtype, rows: slice | Tensor, step: int, place: int) -> Tensor:
        if dtype != torch.bfloat16:
            return new
        # Rounding is keyed by the number of the row over all ranks, so another number of ranks rounds alike.
        ids = torch.arange(rows.start, rows.stop, device=new.device) if isinstance(rows, slice) else rows
        keys = stream_keys(Stream.ROUND_WEIGHTS, self.seed, step, place)
        return round_stochastically(new, random_bits_rows(keys, ids + self._first_row, new.shape[1]))

    def _write(self, tensor: Tensor, rows: slice | Tensor, new: Tensor, mask_R: Tensor | None) -> None:
        if isinstance(rows, slice):
            tensor[rows] = new
            return
        if mask_R is not None:
            # Entries left out may name a row that another entry moves; they write what that list's first entry writes.
            slots_R = torch.where(mask_R, torch.arange(len(rows), device=rows.device), 0)
            rows, new = rows[slots_R], new[slots_R]
        tensor.index_copy_(0, rows, new)

    @property
    def _first_row(self) -> int:
        return self.classes.start * self.num_subcentres

    def _draw_initial(self) -> None:
        keys = stream_keys(Stream.INITIAL_CENTRES, self.seed)
        num_rows, width = self.weight_RD.shape
        device = self.weight_RD.device
        block = max(1, _BLOCK_ELEMENTS.get(device.type, 1 << 15) // max(1, width))
        for start in range(0, num_rows, block):
            stop = min(start + block, num_rows)
            ids = torch.arange(self._first_row + start, self._first_row + stop, device=device)
            normals = normals_from_bits(random_bits_rows(keys, ids, width), self.work_dtype)
            self.weight_RD[start:stop] = normals.mul_(_INITIAL_DEVIATION)
