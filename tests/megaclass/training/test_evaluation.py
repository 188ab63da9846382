"""Evaluation during training: on which of the .bin files next to the data."""

import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megaclass.checkpoint.class_names import class_list
from megaclass.config.read import load_config_values
from megaclass.data.sources.open_source import open_source
from megaclass.data.tools.synthesize import synthesize
from megaclass.training.between_steps import evaluate_model
from megaclass.training.model.build import build_model
from megaclass.training.start.restart import StartMode, check_start
from megaclass_launch.errors import ConfigError
from megaclass_launch.world import World

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluation") / "data"
    synthesize(folder, num_identities=4, images_per_identity=3, image_size=16, num_pairs=20, num_processes=1)
    (folder / "verification.bin").rename(folder / "lfw.bin")
    shutil.copy(folder / "lfw.bin", folder / "agedb_30.bin")
    return folder


def _evaluated(data: str, sets: list[str]) -> list[tuple[str, str | None]]:
    """Names of the results and why there are no numbers."""
    values = {
        "data": {"path": data},
        "backbone": {"name": "slim", "embedding_dim": 8},
        "train": {"run_dir": "unused", "evaluate_sets": sets},
    }
    config = load_config_values(values, where="test")
    world = World(rank=dist.get_rank(), size=dist.get_world_size(), local_rank=0, local_size=1)
    source = open_source(data)
    model = build_model(config, source, world, CPU)
    run = SimpleNamespace(
        config=config, world=world, device=CPU, image_size=(16, 16), source=source, classes=class_list(data, source)
    )
    return [(result.name, result.error) for result in evaluate_model(run, model, model.backbone)]


def test_without_names_every_set_is_evaluated(run_ranks, data):
    assert run_ranks(1, _evaluated, str(data), []) == [[("agedb_30", None), ("lfw", None), ("holdout-classes", None)]]


def test_with_names_those_alone_are_evaluated(run_ranks, data):
    assert run_ranks(2, _evaluated, str(data), ["lfw"]) == [[("lfw", None)]] * 2


def test_labelled_images_anywhere_are_named_by_their_path(run_ranks, data):
    wanted = [("holdout-classes", None), ("data-classes", None)]
    assert run_ranks(2, _evaluated, str(data), ["holdout-classes", str(data)]) == [wanted] * 2


def test_a_set_that_is_not_there_is_refused_before_the_run_starts(data, tmp_path):
    values = {"data": {"path": str(data)}, "train": {"run_dir": str(tmp_path / "run"), "evaluate_sets": ["lfw", "cfp"]}}
    with pytest.raises(
        ConfigError, match=r"names cfp, but there is no cfp\.bin next to .*: those next to it are agedb_30, lfw"
    ):
        check_start(load_config_values(values, where="test"), StartMode(), ["megaclass", "train"])
    values["train"]["evaluate_sets"] = ["lfw", str(data)]
    check_start(load_config_values(values, where="test"), StartMode(), ["megaclass", "train"])
