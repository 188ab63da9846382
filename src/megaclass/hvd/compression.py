"""Gradient compression, by Horovod's interface and on the wire.

A compressor of one's own is a class with static `compress(tensor) -> (tensor, context)` and
`decompress(tensor, context)`; what it returns is reduced in its dtype. The ones below are narrow on the wire itself
(distributed/wire_formats.py): each rank sends 16 or 8 bits a number, sums are made in float32.
"""

from typing import Any

import torch
from torch import Tensor

from megaclass.distributed.wire_formats import WIRE_FORMATS

__all__ = ["Compression"]


class Compressor:
    """Interface for compressing and decompressing a given tensor."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """The tensor to send, and what decompress() needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor


class FP16Compressor(Compressor):
    """16 bits: float16."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.type(torch.float16) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.type(ctx) if ctx.is_floating_point else tensor


class BF16Compressor(Compressor):
    """16 bits: bfloat16, with the range of float32."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return (tensor.type(torch.bfloat16) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.type(ctx) if ctx.is_floating_point else tensor


class _ScaledCompressor(Compressor):
    """8 bits with a shared exponent a block; encoded tensors cannot be added, so allreduce treats it by itself."""

    wire_name = ""

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        """Bytes: the numbers, then the exponents."""
        if not tensor.dtype.is_floating_point:
            return tensor, None
        flat = tensor.detach().reshape(-1).float()
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % 128))
        return WIRE_FORMATS[cls.wire_name].encode(padded[None])[0], (tensor.shape, tensor.dtype, padded.numel())

    @classmethod
    def decompress(cls, tensor: Tensor, ctx: Any) -> Tensor:
        if ctx is None:
            return tensor
        shape, dtype, count = ctx
        return WIRE_FORMATS[cls.wire_name].decode(tensor[None], count)[0, : shape.numel()].view(shape).to(dtype)


class FP8Compressor(_ScaledCompressor):
    """8 bits: scaled float8 (E4M3)."""

    wire_name = "fp8"


class Int8Compressor(_ScaledCompressor):
    """8 bits: linear."""

    wire_name = "int8"


class Compression:
    """What gradients travel as."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    fp8 = FP8Compressor
    int8 = Int8Compressor


_WIRES: dict[Any, str] = {
    FP16Compressor: "fp16",
    BF16Compressor: "bf16",
    FP8Compressor: "fp8",
    Int8Compressor: "int8",
}


def wire_of(compression: Any, tensor: Tensor) -> str:
    """The wire format for this tensor; empty if the compressor changes the tensor itself, or has nothing to gain."""
    wire = _WIRES.get(compression, "")
    if not wire or not tensor.dtype.is_floating_point:
        return ""
    return wire if WIRE_FORMATS[wire].dtype.itemsize < tensor.dtype.itemsize else ""


def is_scaled(compression: Any) -> bool:
    return isinstance(compression, type) and issubclass(compression, _ScaledCompressor)
