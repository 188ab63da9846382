"""Compressed all-reduce: sends 16 or 8 bits per float32.

    reduce-scatter  every rank rounds its vector and sends each other rank one part of it (all-to-all)
    sum             each rank adds the received parts in float32
    all-gather      every rank sends its sums, rounded again

Both steps send the narrow format, so the traffic falls by two or four on any number of ranks: a ring all-reduce sends
2 (W-1)/W x 4 bytes per number and rank, this one 2 (W-1)/W x 2 or 1. Sums cannot overflow. With error feedback, what
rounding lost is added to the next vector.

The 8-bit formats share one exponent (one byte) per block: scaled float8 (E4M3) in blocks of 128 numbers, or linear int8 in
blocks of 32, because its even steps lose numbers that are small beside their neighbours. A block that contains an infinity
or NaN arrives as NaN.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaclass_launch.errors import ConfigError
from megaclass_launch.ranks.collectives import all_gather_single

# Vectors are padded to a multiple of this, whatever the format.
_ALIGNMENT = 128
_EXPONENT_BIAS = 127
_NOT_FINITE = 255


@dataclass(frozen=True)
class WireFormat:
    """Representation of numbers on the wire."""

    name: str
    dtype: torch.dtype
    largest: float = 0.0
    """Blocks are scaled so that their largest number is at most this; 0 disables scaling."""
    block: int = _ALIGNMENT
    """Number of values that share an exponent."""

    def num_bytes(self, count: int) -> int:
        """Returns the encoded size of `count` numbers, a multiple of the block."""
        return count * self.dtype.itemsize + (count // self.block if self.largest else 0)

    def encode(self, numbers_RN: Tensor) -> Tensor:
        """Encodes (R, N) float32, N a multiple of the block, as (R, bytes) uint8."""
        if not self.largest:
            return numbers_RN.to(self.dtype).view(torch.uint8)
        num_rows, count = numbers_RN.shape
        blocks = numbers_RN.reshape(num_rows, -1, self.block)
        # Two passes that write nothing are faster than one that writes the absolute values.
        largest = torch.maximum(blocks.amax(-1), blocks.amin(-1).neg_())
        exponents = _block_exponents(largest, self.largest)
        scaled = blocks * _powers_of_two(-exponents)[..., None]
        if self.dtype is torch.int8:
            scaled.round_()
        encoded = numbers_RN.new_empty((num_rows, self.num_bytes(count)), dtype=torch.uint8)
        # The payload of a block that is not finite does not matter: its exponent marks it as NaN.
        encoded[:, :count].view(self.dtype).view(blocks.shape).copy_(scaled)
        bytes_of_exponents = (exponents + _EXPONENT_BIAS).clamp_(0, 254)
        encoded[:, count:] = bytes_of_exponents.masked_fill_(~largest.isfinite(), _NOT_FINITE)
        return encoded

    def decode(self, encoded_RB: Tensor, count: int) -> Tensor:
        """Decodes (R, bytes) uint8 to (R, count) float32."""
        if not self.largest:
            return encoded_RB.view(self.dtype).float()
        num_rows = encoded_RB.shape[0]
        payload = encoded_RB[:, :count].contiguous()
        numbers = _float_of_e4m3(payload) if self.dtype is torch.float8_e4m3fn else payload.view(self.dtype).float()
        numbers = numbers.view(num_rows, -1, self.block)
        exponents = encoded_RB[:, count:].int()
        scales = _powers_of_two(exponents - _EXPONENT_BIAS)
        scales.masked_fill_(exponents == _NOT_FINITE, float("nan"))
        return numbers.mul_(scales[..., None]).view(num_rows, count)


WIRE_FORMATS = {
    "fp16": WireFormat("fp16", torch.float16),
    "bf16": WireFormat("bf16", torch.bfloat16),
    "fp8": WireFormat("fp8", torch.float8_e4m3fn, largest=448.0),
    "int8": WireFormat("int8", torch.int8, largest=127.0, block=32),
}


def compressed_all_reduce_(
    flat_N: Tensor,
    wire: WireFormat,
    group: dist.ProcessGroup | None,
    *,
    divisor: float = 1.0,
    remainder_N: Tensor | None = None,
) -> Tensor:
    """Replaces `flat_N` (float32) by its sum over ranks divided by `divisor`; the result has the same bits on every rank.

    One all-to-all and one all-gather in the format `wire`. A world of one sends nothing and therefore rounds nothing.

    Args:
        remainder_N: error feedback. Its values are added before rounding, and it receives what rounding loses now: the loss
            of this rank's own vector, and of the sums that this rank formed for the others.
    """
    size = dist.get_world_size(group)
    if size == 1 or not flat_N.numel():
        return flat_N.div_(divisor) if divisor != 1.0 else flat_N
    vector = _padded(flat_N, size, remainder_N)
    parts_WP = vector.view(size, -1)
    count = parts_WP.shape[1]
    sent_WB = wire.encode(parts_WP)
    received_WB = torch.empty_like(sent_WB)
    scattering = dist.all_to_all_single(received_WB, sent_WB, group=group, async_op=True)
    if remainder_N is not None:
        parts_WP.sub_(wire.decode(sent_WB, count))
    _wait(scattering)
    sum_P = wire.decode(received_WB, count).sum(0)
    if divisor != 1.0:
        sum_P /= divisor
    sum_1B = wire.encode(sum_P[None])
    gathering = all_gather_single(received_WB.view(-1), sum_1B.view(-1), group=group, async_op=True)
    if remainder_N is not None:
        parts_WP[group.rank() if group is not None else dist.get_rank()].add_(
            sum_P.sub_(wire.decode(sum_1B, count)[0]), alpha=divisor
        )
        # An infinity or NaN must not stay in the remainder forever.
        remainder_N.copy_(vector[: flat_N.numel()].nan_to_num_(0.0, 0.0, 0.0))
    _wait(gathering)
    return flat_N.copy_(wire.decode(received_WB, count).view(-1)[: flat_N.numel()])


def _wait(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()


def compression_hook(
    wire_name: str,
) -> tuple["HookState", Callable[["HookState", Any], torch.futures.Future[Tensor]]]:
    """Returns state and hook for `DistributedDataParallel.register_comm_hook` that average gradients in this format."""
    if wire_name not in WIRE_FORMATS:
        raise ConfigError(f"Unknown compression {wire_name!r}: expected none, {', '.join(WIRE_FORMATS)}.")
    return HookState(WIRE_FORMATS[wire_name]), _average_bucket


@dataclass
class HookState:
    """State of the hook for one data-parallel model on one rank."""

    wire: WireFormat
    group: dist.ProcessGroup | None = None
    remainders: dict[int, Tensor] = field(default_factory=dict)
    stream: torch.cuda.Stream | None = None
    """On a GPU the exchange runs on this stream, beside the rest of the backward."""


def _average_bucket(
    state: HookState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Called by DDP during backward, bucket by bucket.

    On a GPU rounding and exchange run on a stream of their own, so that the backward of earlier layers runs meanwhile; DDP
    waits for the future at the end. On a CPU the backward waits here, as it does without compression.
    """
    gradients: Tensor = bucket.buffer()
    if not gradients.is_cuda:
        _average_gradients_(state, bucket.index(), gradients)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(gradients)
        return done
    if state.stream is None:
        state.stream = torch.cuda.Stream(gradients.device)
    state.stream.wait_stream(torch.cuda.current_stream(gradients.device))
    with torch.cuda.stream(state.stream):
        _average_gradients_(state, bucket.index(), gradients)
        # A future of a device notes the streams on which its value becomes ready: whoever waits for it, waits for them.
        done = torch.futures.Future(devices=[gradients.device])
        done.set_result(gradients)
    return done


def _average_gradients_(state: HookState, number: int, gradients: Tensor) -> None:
    flat = gradients if gradients.dtype is torch.float32 else gradients.float()
    remainder = state.remainders.get(number)
    # DDP rebuilds its buckets after the first step; a remainder of another shape is dropped.
    if remainder is None or remainder.shape != flat.shape:
        remainder = state.remainders[number] = torch.zeros_like(flat)
    size = dist.get_world_size(state.group)
    compressed_all_reduce_(flat, state.wire, state.group, divisor=size, remainder_N=remainder)
    if flat is not gradients:
        gradients.copy_(flat)


def _block_exponents(largest: Tensor, limit: float) -> Tensor:
    """Returns exponents of powers of two; blocks divided by them have no number above the limit."""
    mantissas, exponents = torch.frexp(largest)
    limit_mantissa, limit_exponent = math.frexp(limit)
    needed = exponents - limit_exponent + (mantissas > limit_mantissa).int()
    # Both 2^n and 2^-n must be normal float32 numbers.
    return needed.clamp_(-126, 126)


def _powers_of_two(exponents: Tensor) -> Tensor:
    return torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)


def _float_of_e4m3(numbers: Tensor) -> Tensor:
    """Converts E4M3 bytes to float32. Shifted into place, the bits are a float16 of value / 256: faster than torch's cast."""
    # Widening repeats the sign in bits 7 to 15, so after the shift it is in bits 14 and 15. Bit 14 belongs to float16's
    # exponent and is cleared.
    halves = numbers.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    return halves.view(torch.float16).float().mul_(256.0)


def _padded(flat_N: Tensor, size: int, addend_N: Tensor | None = None) -> Tensor:
    """Returns a copy plus the addend, if any, padded with zeros to whole blocks per rank."""
    count = flat_N.numel()
    padded = flat_N.new_empty(count + -count % (size * _ALIGNMENT))
    padded[count:] = 0.0
    if addend_N is None:
        padded[:count] = flat_N
    else:
        torch.add(flat_N, addend_N, out=padded[:count])
    return padded
