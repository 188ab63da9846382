"""MobileFaceNet's names and shapes are those of InsightFace's published files, written out here by hand."""

import pytest
import torch

from megaclass.backbones import build_backbone, recognise

_BN = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def _conv_names(prefix: str, *, has_prelu: bool = True) -> list[str]:
    names = [f"{prefix}.layers.0.weight", *(f"{prefix}.layers.1.{part}" for part in _BN)]
    return names + ([f"{prefix}.layers.2.weight"] if has_prelu else [])


def _bottleneck_names(prefix: str) -> list[str]:
    return [
        *_conv_names(f"{prefix}.layers.0"),
        *_conv_names(f"{prefix}.layers.1"),
        *_conv_names(f"{prefix}.layers.2", has_prelu=False),
    ]


def _published_names(blocks: tuple[int, ...]) -> list[str]:
    """layers.0 and 1 at the full map, then a bottleneck that halves (2, 4, 6) before each chain of residuals (3, 5, 7)."""
    names = _conv_names("layers.0")
    if blocks[0] == 1:
        names += _conv_names("layers.1")
    else:
        names += [name for i in range(blocks[0]) for name in _bottleneck_names(f"layers.1.layers.{i}")]
    for halving, num_blocks in zip((2, 4, 6), blocks[1:], strict=True):
        names += _bottleneck_names(f"layers.{halving}")
        names += [name for i in range(num_blocks) for name in _bottleneck_names(f"layers.{halving + 1}.layers.{i}")]
    names += _conv_names("conv_sep") + _conv_names("features.layers.0", has_prelu=False)
    return [*names, "features.layers.2.weight", *(f"features.layers.3.{part}" for part in _BN)]


@pytest.mark.parametrize(
    ("name", "blocks", "num_parameters"), [("mbf", (1, 4, 6, 2), 2_059_520), ("mbf_large", (2, 8, 12, 4), 6_314_880)]
)
def test_parameter_names_are_the_published_ones(name, blocks, num_parameters):
    backbone = build_backbone(name, embedding_dim=512, image_size=112)
    assert list(backbone.state_dict()) == _published_names(blocks)
    assert sum(parameter.numel() for parameter in backbone.parameters()) == num_parameters


def test_shapes_are_the_published_ones():
    state = build_backbone("mbf", embedding_dim=512, image_size=112).state_dict()
    for name, shape in {
        "layers.0.layers.0.weight": (128, 3, 3, 3),
        "layers.1.layers.0.weight": (128, 2, 3, 3),
        "layers.2.layers.0.layers.0.weight": (128, 128, 1, 1),
        "layers.4.layers.1.layers.0.weight": (256, 1, 3, 3),
        "layers.6.layers.2.layers.0.weight": (256, 512, 1, 1),
        "layers.7.layers.1.layers.1.layers.0.weight": (256, 1, 3, 3),
        "conv_sep.layers.0.weight": (512, 256, 1, 1),
        "features.layers.0.layers.0.weight": (512, 1, 7, 7),
        "features.layers.2.weight": (512, 512),
    }.items():
        assert tuple(state[name].shape) == shape


@pytest.mark.parametrize("image_size", [16, 48, 112])
def test_any_size_divisible_by_16_is_taken_and_recognised(image_size):
    backbone = build_backbone("mbf", embedding_dim=24, image_size=image_size).eval()
    assert backbone(torch.zeros(2, 3, image_size, image_size)).shape == (2, 24)
    shape = recognise(backbone.state_dict(), "a file")
    assert (shape.name, shape.embedding_dim, shape.image_size) == ("mbf", 24, image_size)


def test_every_parameter_gets_a_gradient():
    backbone = build_backbone("mbf", embedding_dim=8, image_size=32)
    backbone(torch.randn(4, 3, 32, 32)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in backbone.parameters())
