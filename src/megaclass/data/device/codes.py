"""Numbers by which the host tells the program which augmentations to apply."""

import triton.language as tl

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
