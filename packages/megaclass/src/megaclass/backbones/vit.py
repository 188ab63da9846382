"""Vision transformers as InsightFace trains them: patches of 9 pixels, no class token, a linear layer over all patches.

Parameter names and shapes are those of its published state dicts. `regularise` switches on what InsightFace does in
training only: dropping residual branches of whole images (stochastic depth) and leaving out a share of the patches.
`training/model/keyed_dropout.py` makes both depend on (seed, step, image), so the loss curve is the same on any number of
ranks. Without masking, `mask_token`, which published files always carry, is kept and not trained.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from megaclass.backbones.state_sizes import count_blocks, side_of
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


class DropPath(nn.Module):
    """Sets a residual branch to zero for a share p of the images in training, and divides the others by 1 - p."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x_BPD: Tensor) -> Tensor:
        if not self.training:
            return x_BPD
        is_kept_B11 = torch.rand((len(x_BPD), 1, 1), device=x_BPD.device) >= self.p
        return x_BPD * is_kept_B11 / (1 - self.p)


class PatchMask(nn.Module):
    """Chooses the patches that take part in training: all but a share p of each image, each image its own."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x_BPD: Tensor) -> Tensor:
        """Returns the (B, kept) indices of the patches that stay, rising in each row."""
        return kept_patches(torch.rand(x_BPD.shape[:2], device=x_BPD.device), self.p)


def kept_patches(noise_BP: Tensor, p: float) -> Tensor:
    """Indices of the patches with the smallest noise, rising in each row; a share p of the patches is left out."""
    num_kept = max(1, int(noise_BP.shape[1] * (1 - p)))
    return noise_BP.argsort(dim=1, stable=True)[:, :num_kept].sort(dim=1).values


class TransformerBlock(nn.Module):
    """Attention and a two-layer perceptron, each normalised before and added to its input."""

    is_recomputable = True
    """backbone.checkpoint_activations computes this block again in backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.drop_attn: nn.Module = nn.Identity()
        self.drop_mlp: nn.Module = nn.Identity()
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.attn = _Attention(width)
        self.mlp = _Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_attn(self.attn(self.norm1(x)))
        result: Tensor = x + self.drop_mlp(self.mlp(self.norm2(x)))
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
        self.blocks = nn.ModuleList(TransformerBlock(width) for _ in range(depth))
        self.mask: nn.Module | None = None
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
        shape = x_BPD.shape
        kept = None
        if self.training and self.mask is not None:
            kept = self.mask(x_BPD)[:, :, None].expand(-1, -1, shape[2])
            x_BPD = x_BPD.gather(1, kept)
        for block in self.blocks:
            x_BPD = block(x_BPD)
        x_BPD = self.norm(x_BPD)
        if kept is not None:
            # The linear layer below takes all patches: the learned token stands where one was left out.
            x_BPD = self.mask_token.to(x_BPD.dtype).expand(shape).scatter(1, kept, x_BPD)
        embeddings: Tensor = self.feature(x_BPD.flatten(1))
        return embeddings

    @staticmethod
    def arguments_of(
        state: Mapping[str, Tensor], image_size: ImageSize | None
    ) -> tuple[int, int, int, ImageSize] | None:
        """See `SizedBackbone`."""
        if "pos_embed" not in state:
            return None
        _, num_patches, width = state["pos_embed"].shape
        # Sides are multiples of 16, and at most one of those gives a number of patches of 9 pixels.
        image_size = image_size or -(-PATCH_SIZE * side_of(num_patches) // 16) * 16
        return width, count_blocks(state, "blocks."), state["feature.2.weight"].shape[0], image_size

    def regularise(self, drop_path: float, mask_patches: float) -> None:
        """Switches on, for training, dropped branches and left-out patches.

        drop_path: share of the images whose branch the last block drops; it rises linearly from 0 in the first block.
        mask_patches: share of each image's patches that the blocks do not see.
        """
        for index, block in enumerate(self.blocks):
            assert isinstance(block, TransformerBlock)
            share = drop_path * index / max(1, len(self.blocks) - 1)
            if share > 0:
                block.drop_attn, block.drop_mlp = DropPath(share), DropPath(share)
        if mask_patches > 0:
            self.mask = PatchMask(mask_patches)
            nn.init.normal_(self.mask_token, std=0.02)
            self.mask_token.requires_grad = True
