"""Decoded pixels as tensors: for training and evaluation. Apart from decode.py, which loader processes use without torch."""

import numpy as np
import torch
from numpy.typing import NDArray


def to_tensor(images_BHW3: NDArray[np.uint8]) -> torch.Tensor:
    """Returns (B, 3, H, W), contiguous and still uint8, which is a quarter of the traffic to the device."""
    return torch.from_numpy(images_BHW3).permute(0, 3, 1, 2).contiguous()


def normalise(images: torch.Tensor) -> torch.Tensor:
    """Converts uint8 in [0, 255] to float32 in [-1, 1], as every InsightFace model expects."""
    return images.to(torch.float32).div_(255).sub_(0.5).div_(0.5)
