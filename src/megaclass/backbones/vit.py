"""Vision transformers as InsightFace trains them: patches of 9 pixels, no class token, a linear layer over all patches.

Parameter names and shapes are those of its published state dicts. Its training-time masking of patches and dropping of
paths are left out: an embedding is then a function of the image alone, and the loss curve does not depend on the
number of ranks. `mask_token`, which published files carry for the masking, is kept and not trained.
"""

import torch
from torch import Tensor, nn

from megaclass.image_size import ImageSize, height_and_width

PATCH_SIZE = 9
_NUM_HEADS = 8
_HIDDEN_FACTOR = 4
_BN_EPS = 2e-5


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)

    def forward(self, x_BPD: Tensor) -> Tensor:
        # (B, P, 3 D) -> 3 x (B, heads, P, D / heads)
        heads = self.qkv(x_BPD).unflatten(2, (3, _NUM_HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(heads[0], heads[1], heads[2])
        result: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return result


class _Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, _HIDDEN_FACTOR * width)
        self.act = nn.ReLU6()
        self.fc2 = nn.Linear(_HIDDEN_FACTOR * width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc2(self.act(self.fc1(x)))
        return result


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.attn = _Attention(width)
        self.mlp = _Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class _PatchEmbed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, width, PATCH_SIZE, PATCH_SIZE)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, P, D)"""
        patches: Tensor = self.proj(x)
        return patches.flatten(2).transpose(1, 2)


class VisionTransformer(nn.Module):
    """Letters here: P patches, D the transformer's width."""

    def __init__(self, width: int, depth: int, embedding_dim: int, image_size: ImageSize) -> None:
        super().__init__()
        height, image_width = height_and_width(image_size)
        num_patches = (height // PATCH_SIZE) * (image_width // PATCH_SIZE)
        self.patch_embed = _PatchEmbed(width)
        self.pos_embed = nn.Parameter(torch.zeros(1, num_patches, width))
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width), requires_grad=False)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.feature = nn.Sequential(
            nn.Linear(width * num_patches, width, bias=False),
            nn.BatchNorm1d(width, eps=_BN_EPS),
            nn.Linear(width, embedding_dim, bias=False),
            nn.BatchNorm1d(embedding_dim, eps=_BN_EPS),
        )
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) in [-1, 1] -> (B, D). Sides that 9 does not divide lose the rest at the right and the bottom."""
        x_BPD = self.patch_embed(x) + self.pos_embed
        for block in self.blocks:
            x_BPD = block(x_BPD)
        embeddings: Tensor = self.feature(self.norm(x_BPD).flatten(1))
        return embeddings
