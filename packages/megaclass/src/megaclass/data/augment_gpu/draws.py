"""Shared parts of the programs of all augmentations: their numbers, and random draws equal to those of keyed_random.py."""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

import triton
import triton.language as tl

# The host tells the program by these numbers which augmentations to apply, four bits each.
CROP = tl.constexpr(1)
AFFINE = tl.constexpr(2)
WARP = tl.constexpr(3)
LOW_RESOLUTION = tl.constexpr(4)
BLUR = tl.constexpr(5)
COLOUR = tl.constexpr(6)
GREY = tl.constexpr(7)
OCCLUSION = tl.constexpr(8)
JPEG = tl.constexpr(9)
ERASE = tl.constexpr(10)


@triton.jit
def mix_64(x):
    """keyed_random.mix64_int on a uint64."""
    x += tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    x = (x ^ (x >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def combine(state, part):
    """One more key in keyed_random.combine64."""
    return mix_64(mix_64(part) ^ state)


@triton.jit
def unsigned(x):
    return x.to(tl.int64).to(tl.uint64, bitcast=True)


@triton.jit
def uniform(key, number: tl.constexpr):
    """Draw `number` of an image's key, in [0, 1)."""
    bits = combine(combine(tl.full((), 0, tl.uint64), key), tl.full((), number, tl.uint64))
    return (bits >> 40).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def between(uniform, low, high):
    return low + uniform * (high - low)


@triton.jit
def clamp(x):
    return tl.minimum(tl.maximum(x, -1.0), 1.0)
