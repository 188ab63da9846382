"""The transformers' names and shapes are those of InsightFace's published files; attention against its formula."""

import pytest
import torch

from megaclass.backbones import build_backbone
from megaclass.backbones.recognise import recognise
from megaclass.errors import CheckpointError

_BN = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
_BLOCK = [
    "norm1.weight",
    "norm1.bias",
    "norm2.weight",
    "norm2.bias",
    "attn.qkv.weight",
    "attn.proj.weight",
    "attn.proj.bias",
    "mlp.fc1.weight",
    "mlp.fc1.bias",
    "mlp.fc2.weight",
    "mlp.fc2.bias",
]
_REST = [
    "pos_embed",
    "mask_token",
    "patch_embed.proj.weight",
    "patch_embed.proj.bias",
    "norm.weight",
    "norm.bias",
    "feature.0.weight",
    *(f"feature.1.{part}" for part in _BN),
    "feature.2.weight",
    *(f"feature.3.{part}" for part in _BN),
]


@pytest.mark.parametrize(
    ("name", "width", "depth"), [("vit_t", 256, 12), ("vit_s", 512, 12), ("vit_b", 512, 24), ("vit_l", 768, 24)]
)
def test_names_and_shapes_are_the_published_ones(name, width, depth):
    with torch.device("meta"):
        state = build_backbone(name, embedding_dim=512, image_size=112).state_dict()
    assert set(state) == {*_REST, *(f"blocks.{place}.{part}" for place in range(depth) for part in _BLOCK)}
    # 112 // 9 = 12 patches a side.
    assert tuple(state["pos_embed"].shape) == (1, 144, width)
    assert tuple(state["patch_embed.proj.weight"].shape) == (width, 3, 9, 9)
    assert tuple(state["blocks.0.attn.qkv.weight"].shape) == (3 * width, width)
    assert tuple(state["blocks.0.mlp.fc1.weight"].shape) == (4 * width, width)
    assert tuple(state["feature.0.weight"].shape) == (width, 144 * width)
    assert recognise(state, "a file").name == name


@pytest.mark.parametrize("image_size", [16, 48, 112])
def test_any_size_divisible_by_16_is_taken_and_recognised(image_size):
    backbone = build_backbone("vit_t", embedding_dim=24, image_size=image_size).eval()
    with torch.no_grad():
        assert backbone(torch.zeros(2, 3, image_size, image_size)).shape == (2, 24)
    shape = recognise(backbone.state_dict(), "a file")
    assert (shape.name, shape.embedding_dim, shape.image_size) == ("vit_t", 24, image_size)


def test_attention_is_that_of_eight_heads_written_out():
    torch.manual_seed(0)
    attention = build_backbone("vit_t", embedding_dim=8, image_size=32).blocks[0].attn.double()
    x = torch.randn(2, 5, 256, dtype=torch.float64)
    query, key, value = (attention.qkv(x)[..., part * 256 : (part + 1) * 256] for part in range(3))
    heads = []
    for head in range(8):
        q, k, v = (one[..., head * 32 : (head + 1) * 32] for one in (query, key, value))
        heads.append((q @ k.transpose(1, 2) / 32**0.5).softmax(dim=-1) @ v)
    torch.testing.assert_close(attention(x), attention.proj(torch.cat(heads, dim=-1)))


def test_every_parameter_but_the_mask_token_is_trained():
    backbone = build_backbone("vit_t", embedding_dim=8, image_size=32)
    backbone(torch.randn(4, 3, 32, 32)).square().sum().backward()
    untrained = [name for name, parameter in backbone.named_parameters() if parameter.grad is None]
    assert untrained == ["mask_token"]


def test_an_image_gives_one_embedding_whatever_else_is_in_the_batch():
    backbone = build_backbone("vit_t", embedding_dim=8, image_size=32).eval()
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(backbone(images)[:1], backbone(images[:1]), rtol=1e-4, atol=1e-5)


def test_a_transformer_of_another_size_is_refused_by_name():
    state = build_backbone("vit_t", embedding_dim=8, image_size=32).state_dict()
    shallow = {name: tensor for name, tensor in state.items() if not name.startswith("blocks.11.")}
    with pytest.raises(CheckpointError, match=r"vit\.pth looks like a backbone"):
        recognise(shallow, "vit.pth")
