"""Sends the state of an elastic training between ranks, as plain bytes. Nothing that arrives is unpickled."""

import json
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from megaclass.checkpoint.tensor_file import DTYPE_NAMES

_CHUNK_BYTES = 64 << 20
_MAX_HEADER_BYTES = 64 << 20
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def swap_rows(
    own: Mapping[str, Tensor], kept: Mapping[str, Tensor], *, to: int, source: int, device: torch.device
) -> None:
    """Collective. Sends this rank's rows to rank `to` and fills `kept`, in host memory, with those of rank `source`.

    own, kept: the same names on every rank. Traffic: the rows of one rank, per rank, in pieces of up to 64 MiB.
    """
    for name in own:
        sent, received = _pieces(own[name]), _pieces(kept[name])
        # Shards differ by at most one class, so one side may have a piece more.
        while True:
            part, place = next(sent, None), next(received, None)
            if part is None and place is None:
                break
            # Both in one batch: a send that waits for its receiver, on every rank at once, would never end.
            operations = []
            if part is not None:
                operations.append(dist.P2POp(dist.isend, part.contiguous(), to))
            buffer = None
            if place is not None:
                # NCCL receives on the GPU only; one piece at a time, because there may be no room for a second shard.
                buffer = place if device.type == "cpu" else torch.empty_like(place, device=device)
                operations.append(dist.P2POp(dist.irecv, buffer, source))
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            if place is not None and buffer is not None and buffer is not place:
                place.copy_(buffer)


def send_rows(rows: Mapping[str, Tensor], target: int, device: torch.device) -> None:
    """Sends rows to another rank, which calls receive_rows with rows of the same names and sizes."""
    for tensor in rows.values():
        for part in _pieces(tensor):
            dist.send(part.to(device).contiguous(), target)


def receive_rows(rows: Mapping[str, Tensor], source: int) -> None:
    """Fills the rows, on the device of the process group, with those that another rank sends."""
    for tensor in rows.values():
        for part in _pieces(tensor):
            dist.recv(part, source)


def tensors_of_rank(tensors: Mapping[str, Tensor], source: int, device: torch.device) -> dict[str, Tensor]:
    """Collective. Returns the tensors of rank `source` on every rank, in host memory; the other ranks' own do not matter.

    Two broadcasts of names, types and shapes, then one per tensor.
    """
    is_source = dist.get_rank() == source
    rows = [[name, DTYPE_NAMES[tensor.dtype], list(tensor.shape)] for name, tensor in tensors.items()]
    header = json.dumps(rows).encode() if is_source else b""
    length = torch.tensor([len(header)], device=device)
    dist.broadcast(length, source)
    # Before memory is taken for it.
    assert 0 < int(length) <= _MAX_HEADER_BYTES, int(length)
    text = torch.zeros(int(length), dtype=torch.uint8)
    text[: len(header)] = torch.frombuffer(bytearray(header or b"\0"), dtype=torch.uint8)[: len(header)]
    text = text.to(device)
    dist.broadcast(text, source)
    found = {}
    for name, dtype, shape in json.loads(bytes(text.cpu().numpy())):
        value = tensors[name] if is_source else torch.empty(shape, dtype=_DTYPES[dtype])
        for part in _pieces(value.reshape(-1).view(torch.uint8)):
            sent = part.to(device)
            dist.broadcast(sent, source)
            if not is_source and sent is not part:
                part.copy_(sent)
        found[name] = value
    return found


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yields views of whole rows of up to 64 MiB; none of a tensor without rows."""
    if tensor.numel():
        yield from tensor.split(max(1, _CHUNK_BYTES // (tensor[0].numel() * tensor.element_size())))
