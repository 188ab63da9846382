"""A backbone that is split over the ranks: parameters, gradients and the state of their optimizer (`train.shard_backbone`).

torch's FSDP2 gathers each block before its forward and again before its backward, and averages its gradients over the ranks
afterwards, so a rank holds one W-th of everything and at most two blocks whole. Autocast's narrow copies of the weights stay
until backward, unless activations are recomputed.

Bytes that a rank sends per step and parameter, times (W - 1) / W: 4 to gather it for forward, 4 for backward, 4 for its
gradient; DDP sends 8.

    module      the backbone; FSDP2 owns its parameters, and its forward must be called on all ranks together
    own         this rank's rows of every parameter, in the memory that FSDP2 reads: optimizer, clipping and the moving average
                work on them, as plain tensors
    whole       a copy of the backbone in host memory, through which weights are loaded, evaluated and exported

Rows are split as torch.chunk does: each rank has ceil(n / W) of n, the last ones fewer or none.
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from megaclass_launch.errors import ConfigError
from megaclass_launch.ranks.collectives import gather_blocks, group_rank, group_size, sum_over_ranks_


class ShardedBackbone(nn.Module):
    """Stands for DDP around a backbone that is split over all ranks."""

    def __init__(self, backbone: nn.Module, blocks: Iterable[nn.Module], device: torch.device) -> None:
        """backbone: on the CPU and the same on all ranks, so it is never whole on a GPU. blocks: gathered one by one."""
        super().__init__()
        self._device = device
        # In a tuple, because it is not a submodule.
        self._whole = (copy.deepcopy(backbone),)
        assert dist.group.WORLD is not None
        mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)
        # FSDP2 refuses weights that are not contiguous, such as those of convolutions in channels-last.
        backbone.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        try:
            for block in (*blocks, backbone):
                fully_shard(block, mesh=mesh)
        except (ValueError, NotImplementedError) as error:
            raise ConfigError(f"train.shard_backbone cannot split {type(backbone).__name__}: {error}") from error
        self.module = backbone
        self.own = {
            name: nn.Parameter(parameter.to_local().detach(), requires_grad=parameter.requires_grad)  # type: ignore[attr-defined]
            for name, parameter in backbone.named_parameters()
        }

    def forward(self, *inputs: Tensor) -> Tensor:
        device = self._device.type
        dtype, is_enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        # Without autocast's cache, which would keep a narrow copy of every block until the end of the forward.
        with torch.autocast(device, dtype, enabled=is_enabled, cache_enabled=False):
            embeddings: Tensor = self.module(*inputs)
        return embeddings

    def no_sync(self) -> AbstractContextManager[None]:
        """Gradients of the parts of a batch are added up over the ranks part by part: whole ones would have to be kept."""
        return nullcontext()

    def take_gradients(self) -> None:
        """Moves the gradients from FSDP2's parameters to `own`."""
        for name, parameter in self.module.named_parameters():
            gradient = parameter.grad
            self.own[name].grad = None if gradient is None else gradient.to_local()  # type: ignore[attr-defined]
            parameter.grad = None

    def norm_over_ranks(self, norm: Tensor) -> Tensor:
        """Collective. Returns the norm of all gradients from that of this rank's rows: an all-reduce of one number."""
        return sum_over_ranks_(norm.square(), None).sqrt()

    @torch.no_grad()
    def gathered(self, name: str, rows: Tensor) -> Tensor:
        """Collective. Returns a tensor from every rank's rows of it; it has the shape of the parameter of this name."""
        shape = self._whole_parameters[name].shape
        block = rows.new_zeros((-(-shape[0] // group_size(None)), *shape[1:]))
        block[: len(rows)] = rows
        return gather_blocks(block, None).flatten(0, 1)[: shape[0]]

    def rows_of(self, tensor: Tensor) -> Tensor:
        """Returns this rank's rows of a tensor."""
        size = -(-len(tensor) // group_size(None))
        return tensor[group_rank(None) * size :][:size]

    @property
    def whole(self) -> nn.Module:
        return self._whole[0]

    @property
    def _whole_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.whole.named_parameters())

    @torch.no_grad()
    def take_from_whole(self) -> None:
        """Copies this rank's rows of the weights in `whole`, and the buffers."""
        for name, parameter in self._whole_parameters.items():
            self.own[name].copy_(self.rows_of(parameter))
        for mine, theirs in zip(self.module.buffers(), self.whole.buffers(), strict=True):
            mine.copy_(theirs)

    @contextmanager
    def whole_on_device(self) -> Iterator[nn.Module]:
        """Collective. Gathers the backbone for evaluation, which needs four bytes per parameter on every GPU."""
        with torch.no_grad():
            for name, parameter in self._whole_parameters.items():
                parameter.copy_(self.gathered(name, self.own[name]))
            for theirs, mine in zip(self.whole.buffers(), self.module.buffers(), strict=True):
                theirs.copy_(mine)
        self.whole.to(self._device)
        try:
            yield self.whole
        finally:
            self.whole.to("cpu")
