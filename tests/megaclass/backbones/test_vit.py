"""The transformers' names and shapes are those of InsightFace's published files; attention against its formula."""

import pytest
import torch

from megaclass.backbones import build_backbone, recognise
from megaclass.backbones.vit import DropPath, PatchMask, VisionTransformer
from megaclass.errors import CheckpointError
from megaclass.training.model.keyed_dropout import key_dropout

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
    ("name", "width", "depth"),
    [("vit_t", 256, 12), ("vit_s", 512, 12), ("vit_b", 512, 24), ("vit_l", 768, 24), ("vit_h", 1024, 48)],
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


def tiny(**shares: float) -> VisionTransformer:
    torch.manual_seed(0)
    backbone = VisionTransformer(32, 3, 8, 32)
    backbone.regularise(shares.get("drop_path", 0.0), shares.get("mask_patches", 0.0))
    return backbone


def test_the_share_of_dropped_branches_rises_linearly_from_0_in_the_first_block():
    shares = [getattr(block.drop_attn, "p", 0.0) for block in tiny(drop_path=0.3).blocks]
    assert shares == pytest.approx([0.0, 0.15, 0.3])
    assert [getattr(block.drop_mlp, "p", 0.0) for block in tiny(drop_path=0.3).blocks] == shares


def test_a_dropped_branch_is_zero_for_the_whole_image_and_its_mean_stays():
    drop = DropPath(0.25).train()
    torch.manual_seed(0)
    x_BPD = torch.ones(4000, 2, 3)
    dropped = drop(x_BPD)
    values = sorted({tuple(image.unique().tolist()) for image in dropped})
    assert values == [(0.0,), (pytest.approx(1 / 0.75),)]
    assert float(dropped.mean()) == pytest.approx(1.0, abs=0.03)
    assert drop.eval()(x_BPD) is x_BPD


@pytest.mark.parametrize(("share", "num_kept"), [(0.1, 129), (0.05, 136)])
def test_as_many_patches_are_kept_as_insightface_keeps(share, num_kept):
    kept = PatchMask(share)(torch.empty(5, 144, 1))
    assert kept.shape == (5, num_kept)
    assert bool((kept.diff(dim=1) > 0).all())
    assert len({tuple(row.tolist()) for row in kept}) == 5


def test_the_blocks_do_not_see_masked_patches_and_the_token_stands_in_their_place():
    backbone = tiny(mask_patches=0.4).train()
    seen, flattened = [], []
    backbone.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    backbone.feature.register_forward_pre_hook(lambda _, inputs: flattened.append(inputs[0]))
    backbone(torch.randn(4, 3, 32, 32)).sum().backward()
    assert seen[0].shape == (4, 5, 32)
    is_token = (flattened[0].view(4, 9, 32) == backbone.mask_token).all(dim=2)
    assert is_token.sum(dim=1).tolist() == [4, 4, 4, 4]
    assert backbone.mask_token.grad is not None


def test_evaluation_and_the_state_dict_know_nothing_of_dropping_and_masking():
    plain, other = tiny().eval(), tiny(drop_path=0.5, mask_patches=0.5).eval()
    other.load_state_dict(plain.state_dict())
    plain.load_state_dict(other.state_dict())
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(plain(images), other(images))


def test_keyed_draws_depend_on_image_and_step_alone():
    backbone = tiny(drop_path=0.5, mask_patches=0.4).train()
    keyed = key_dropout(backbone, seed=3)
    # Two blocks with two branches each (the first has share 0), and the mask.
    assert len(keyed) == 5
    # Batch statistics are those of the batch, and not what is tested.
    backbone.feature.eval()
    images, numbers = torch.randn(6, 3, 32, 32), torch.tensor([4, 9, 1, 7, 30, 2])

    def embed(rows: list[int], step: int) -> torch.Tensor:
        for one in keyed:
            one.expect(numbers[rows], step)
        with torch.no_grad():
            return backbone(images[rows])

    whole = embed([0, 1, 2, 3, 4, 5], 8)
    torch.testing.assert_close(torch.cat([embed([0, 1], 8), embed([2, 3, 4, 5], 8)]), whole, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(embed([0, 1, 2, 3, 4, 5], 9), whole)
