"""Random numbers that are hashes of their purpose, not of when or where they are drawn.

Each number is a hash of its key: the initial centre of class c of (seed, c), whether c is drawn at step t of
(seed, t, c), stochastic rounding of (seed, t, c, element). No state, no order, so nothing changes when the classes are
split over another number of ranks. The arithmetic is 32-bit with wrap-around, the same on CPU, GPU and in Triton.
"""

import math

import torch
from torch import Tensor

from megaclass.keyed_random import MASK_64, mix64_int


def stream_keys(*parts: int) -> tuple[int, int]:
    """Two 32-bit keys (as signed Python ints) from the host-side parts of a key: purpose, seed, step."""
    state = stream_state(*parts)
    return _signed_32(state & 0xFFFFFFFF), _signed_32(state >> 32)


def stream_state(*parts: int) -> int:
    """The 64 bits the keys are cut from. One more part is mixed in as state ^ mix(part), then mixed again."""
    state = 0
    for part in parts:
        # Each part is mixed before it enters, so that (1, 2) and (2, 1), and parts that differ in one bit, have unrelated keys.
        state = mix64_int(state ^ mix64_int(part & MASK_64))
    return state


def random_bits(keys: tuple[int, int], indices: Tensor) -> Tensor:
    """Returns one int32 of random bits per index; `indices` are integers below 2^32."""
    # Two rounds with one key each: one round of a 32-bit key alone would give streams that are permutations of each other.
    return _mix_32_(_mix_32_(indices.to(torch.int32) ^ keys[0]) + keys[1])


def random_bits_rows(keys: tuple[int, int] | tuple[Tensor, Tensor], rows_R: Tensor, num_columns: int) -> Tensor:
    """(R, num_columns) int32 random bits, keyed by (row id, column). Distinct rows never share a row key.

    keys: numbers, or the same as 0-d int32 tensors on the device.
    """
    row_keys_R = _mix_32_(rows_R.to(torch.int32) ^ keys[0])
    columns = torch.arange(num_columns, dtype=torch.int32, device=rows_R.device)
    return _mix_32_(row_keys_R[:, None] ^ _mix_32_(columns ^ keys[1])[None, :])


def normals_from_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Standard normal numbers, one from each int32 of bits."""
    # The middle of each of 2^24 equal cells of (-1, 1): never exactly ±1, where erfinv is infinite.
    uniform = ((bits >> 8).to(dtype) + 0.5) * 2.0**-23
    return torch.erfinv(uniform).mul_(math.sqrt(2.0))


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """float32 -> bfloat16, up or down with the probability that makes the mean right; bits: int32, same shape."""
    # A bfloat16 is the upper half of a float32: adding 16 random bits below it carries with the right probability.
    carried = values.view(torch.int32) + (bits & 0xFFFF)
    rounded = (carried & ~0xFFFF).view(torch.float32)
    return torch.where(torch.isfinite(values), rounded, values).to(torch.bfloat16)


def _mix_32_(x: Tensor) -> Tensor:
    """A bijection of int32 in which every input bit reaches every output bit (Wellons' lowbias32). In place."""
    # int32 shifts copy the sign; the mask makes each shift a logical one, as in Triton's uint32.
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= _signed_32(0x846CA68B)
    x ^= (x >> 16) & 0xFFFF
    return x


def _signed_32(x: int) -> int:
    return x - (1 << 32) if x >= 1 << 31 else x
