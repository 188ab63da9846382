"""Images -> embeddings: shapes, published names, and what is refused."""

import itertools

import pytest
import torch

from megaclass.backbones import BACKBONES, OF_FEATURES, build_backbone, check_backbone, recognise
from megaclass.errors import CheckpointError
from megaclass_launch.errors import ConfigError

BLOCKS = {
    "iresnet18": (2, 2, 2, 2),
    "iresnet34": (3, 4, 6, 3),
    "iresnet50": (3, 4, 14, 3),
    "iresnet100": (3, 13, 30, 3),
    "iresnet200": (6, 26, 60, 6),
    "iresnet2060": (3, 128, 896, 3),
}
NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def published_names(blocks):
    """State dict of InsightFace's arcface_torch: conv1 bn1 prelu layer{1-4}.{i}.{…} bn2 fc features, in its order."""
    yield "conv1.weight"
    yield from (f"bn1.{part}" for part in NORM)
    yield "prelu.weight"
    for stage, num_blocks in enumerate(blocks, start=1):
        for block in range(num_blocks):
            prefix = f"layer{stage}.{block}."
            yield from (f"{prefix}bn1.{part}" for part in NORM)
            yield f"{prefix}conv1.weight"
            yield from (f"{prefix}bn2.{part}" for part in NORM)
            yield f"{prefix}prelu.weight"
            yield f"{prefix}conv2.weight"
            yield from (f"{prefix}bn3.{part}" for part in NORM)
            if block == 0:
                yield f"{prefix}downsample.0.weight"
                yield from (f"{prefix}downsample.1.{part}" for part in NORM)
    yield from (f"bn2.{part}" for part in NORM)
    yield from ("fc.weight", "fc.bias")
    yield from (f"features.{part}" for part in NORM)


def on_meta(name, embedding_dim=512, image_size=112):
    """Shapes without memory: the deepest has a thousand million parameters."""
    with torch.device("meta"):
        return build_backbone(name, embedding_dim=embedding_dim, image_size=image_size)


@pytest.mark.parametrize("size", [32, 48, 64, 112])
@pytest.mark.parametrize("name", ["slim", "iresnet18"])
def test_an_image_of_any_side_that_16_divides_becomes_an_embedding(name, size):
    torch.manual_seed(0)
    backbone = build_backbone(name, embedding_dim=24, image_size=size).eval()
    with torch.inference_mode():
        embeddings_BD = backbone(torch.rand(2, 3, size, size) * 2 - 1)
    assert embeddings_BD.shape == (2, 24)
    assert bool(embeddings_BD.isfinite().all())
    assert not torch.allclose(embeddings_BD[0], embeddings_BD[1])


@pytest.mark.parametrize("size", [(112, 96), (32, 64), (16, 144)])
@pytest.mark.parametrize("name", ["slim", "iresnet18", "mbf", "vit_t"])
def test_rectangles_become_embeddings_where_16_divides_both_sides(name, size):
    backbone = build_backbone(name, embedding_dim=24, image_size=size).eval()
    with torch.inference_mode():
        assert backbone(torch.zeros(2, 3, *size)).shape == (2, 24)
    state = backbone.state_dict()
    assert recognise(state, "here", size).image_size == size
    if name == "mbf":
        assert recognise(state, "here").image_size == size
    elif size == (32, 64):
        with pytest.raises(CheckpointError, match=r"which is not a square, so they do not tell the size of its images"):
            recognise(state, "here")
    with pytest.raises(ConfigError, match="multiples of 16 pixels, not 90 × 112"):
        check_backbone(name, (112, 90))


# A small size for one of each family; deep ones take a while even without memory, the deepest with its 1,030 blocks most.
@pytest.mark.parametrize(
    ("name", "size"),
    [
        # Many more of the same layers.
        *(pytest.param(name, 112, marks=pytest.mark.soak) for name in ("iresnet200", "iresnet2060", "vit_h")),
        *itertools.product(sorted({*BACKBONES} - {"iresnet200", "iresnet2060", "vit_h", *OF_FEATURES}), [112]),
        *itertools.product(["iresnet18", "mbf", "mbf_large", "slim", "vit_t"], [32]),
    ],
)
def test_every_backbone_gives_embeddings_of_the_width_asked_for(name, size):
    assert on_meta(name, 64, size)(torch.empty(3, 3, size, size, device="meta")).shape == (3, 64)


@pytest.mark.parametrize("name", OF_FEATURES)
def test_backbones_of_features_give_embeddings_of_the_width_asked_for(name):
    network = build_backbone(name, embedding_dim=24, image_size=(1, 24 if name == "none" else 10))
    assert network(torch.zeros(3, 24 if name == "none" else 10)).shape == (3, 24)
    assert recognise(network.state_dict(), "a file").name == name


@pytest.mark.parametrize("name", [*[*BLOCKS][:-1], pytest.param("iresnet2060", marks=pytest.mark.soak)])
def test_parameters_have_the_names_of_insightfaces_state_dicts(name):
    state = on_meta(name).state_dict()
    assert list(state) == list(published_names(BLOCKS[name]))
    assert recognise(state, "a file").name == name


def test_parameters_have_the_shapes_of_insightfaces_state_dicts():
    state = on_meta("iresnet50").state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    assert shapes["conv1.weight"] == (64, 3, 3, 3)
    assert shapes["layer1.0.downsample.0.weight"] == (64, 64, 1, 1)
    assert shapes["layer3.0.bn1.weight"] == (128,)
    assert shapes["layer3.0.conv1.weight"] == (256, 128, 3, 3)
    assert shapes["layer4.2.conv2.weight"] == (512, 512, 3, 3)
    assert shapes["prelu.weight"] == (64,)
    assert shapes["fc.weight"] == (512, 512 * 7 * 7)


def test_the_last_norm_has_its_weight_fixed_at_one():
    torch.manual_seed(0)
    features = build_backbone("iresnet18", embedding_dim=8, image_size=32).features
    assert torch.equal(features.weight, torch.ones(8)) and not features.weight.requires_grad
    assert features.bias.requires_grad


def test_the_global_generator_fixes_the_weights():
    def weights():
        torch.manual_seed(7)
        return build_backbone("slim", embedding_dim=8, image_size=32).state_dict()

    first, second = weights(), weights()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("iresnet5", "did you mean iresnet50?"),
        ("slimm", "did you mean slim?"),
        ("vgg", f"known: {', '.join(BACKBONES)}."),
    ],
)
def test_an_unknown_name_is_shown_the_nearest(name, hint):
    with pytest.raises(ConfigError) as caught:
        build_backbone(name, embedding_dim=8, image_size=32)
    assert str(caught.value) == f"backbone.name is {name!r}, which is not known; {hint}"


@pytest.mark.parametrize("size", [17, 100, 8])
def test_a_side_that_16_does_not_divide_is_refused(size):
    with pytest.raises(ConfigError, match=f"multiples of 16 pixels, not {size} × {size}"):
        check_backbone("slim", size)
