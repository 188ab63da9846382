"""The model that a recipe describes."""

from typing import Any

import pytest

from megaclass import (
    AdaFace,
    ArcFace,
    CombinedMargin,
    CosFace,
    DynamicArcFace,
    InterTopK,
    Margin,
    NormalisedSoftmax,
)
from megaclass.config.read import load_config_values
from megaclass.config.schema import HeadConfig
from megaclass.training.model.build import build_margin
from megaclass_launch.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "margin"),
    [
        ({}, ArcFace(scale=64.0, margin=0.5)),
        ({"gradient": "straight-through"}, ArcFace(scale=64.0, margin=0.5, gradient="straight-through")),
        ({"margin": "cosface", "margin_size": 0.35, "gradient": "straight-through"}, CosFace(margin=0.35)),
        ({"margin": "softmax", "gradient": "straight-through"}, NormalisedSoftmax()),
        ({"margin": "combined"}, CombinedMargin()),
        ({"margin": "combined", "margin_size": 0.3}, CombinedMargin(angle=0.3)),
        ({"margin": "combined", "margin_size": 0.3, "m3": 0.2}, CombinedMargin(angle=0.3, cosine=0.2)),
        (
            {"margin": "combined", "m1": 0.9, "m2": 0.4, "m3": 0.15, "gradient": "straight-through"},
            CombinedMargin(multiplier=0.9, angle=0.4, cosine=0.15, gradient="straight-through"),
        ),
        ({"margin": "adaface", "margin_size": 0.4}, AdaFace(margin=0.4)),
        (
            {"margin": "dynamic", "margin_size": 0.3, "margin_options": (("exponent", 0.5), ("offset", 0.1))},
            DynamicArcFace(factor=0.3, exponent=0.5, offset=0.1),
        ),
        ({"margin": "intertopk", "margin_options": (("k", 7.0),)}, InterTopK(k=7)),
    ],
    ids=str,
)
def test_a_recipe_s_margin_is_the_one_it_names(settings: dict[str, Any], margin: Margin):
    assert build_margin(HeadConfig(**settings)) == margin


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"margin": "adaface", "gradient": "straight-through"},
            "head.gradient is straight-through; it must be exact for the margin adaface, which has no other derivative.",
        ),
        (
            {"margin": "combined", "margin_size": 0.3, "m2": 0.3},
            "head.margin_size is 0.3; it must be unset if head.m2 is set: both are the angle of the margin combined.",
        ),
    ],
)
def test_settings_of_the_margin_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as raised:
        HeadConfig(**settings)
    assert str(raised.value) == message


@pytest.mark.parametrize("options", [(("exponen", 0.5),), (("factor", 0.5),), (("scale", 3.0),)])
def test_an_option_that_the_margin_does_not_take_is_refused(options):
    with pytest.raises(ConfigError, match=r"head\.margin_options names .*takes factor, exponent, offset, each once"):
        build_margin(HeadConfig(margin="dynamic", margin_size=0.4, margin_options=options))


def test_a_margin_schedule_starts_at_0_and_rises():
    with pytest.raises(ConfigError, match=r"head\.margin_schedule .* a list of increasing steps that starts at 0"):
        HeadConfig(margin_schedule=((5, 0.0), (9, 1.0)))


@pytest.mark.parametrize(
    ("setting", "backbone", "on_gpu", "expected"),
    [
        ("auto", "vit_b", True, True),
        ("auto", "vit_b", False, False),
        ("auto", "iresnet50", True, False),
        (True, "iresnet50", False, True),
        (False, "vit_b", True, False),
    ],
)
def test_auto_compiles_transformers_on_a_gpu_and_nothing_else(setting, backbone, on_gpu, expected):
    tables = {"data": {"path": "x"}, "train": {"run_dir": "x", "compile": setting}, "backbone": {"name": backbone}}
    assert load_config_values(tables, where="test").is_compiled(on_gpu=on_gpu) is expected
