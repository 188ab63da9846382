"""Evaluation between two steps, on all ranks: training goes on as if it had not happened."""

import json
from pathlib import Path

import pytest
import torch

from megaclass.backbones import build_backbone
from megaclass.distributed.data_parallel import data_parallel
from megaclass.evaluation.protocol import Evaluator
from megaclass.evaluation.sets import evaluate_sets, find_sets

_CPU = torch.device("cpu")


def _train(path: str, evaluates: bool) -> tuple[list[torch.Tensor], dict]:
    torch.manual_seed(0)
    backbone = build_backbone("slim", embedding_dim=16, image_size=32)
    parallel = data_parallel(backbone)
    optimizer = torch.optim.SGD(backbone.parameters(), lr=0.1, momentum=0.9)
    numbers: dict = {}
    for step in range(3):
        images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(step))
        parallel(images).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if evaluates and step == 1:
            evaluator = Evaluator(network=backbone, image_size=32, device=_CPU, batch_size=16)
            (result,) = evaluate_sets(evaluator, find_sets([Path(path)]))
            numbers = result.to_json()
    assert backbone.training
    return [tensor.clone() for tensor in backbone.state_dict().values()], numbers


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_curve_is_the_same_and_every_rank_has_the_numbers(run_ranks, pairs_bin, num_ranks):
    path = str(pairs_bin())
    plain = run_ranks(num_ranks, _train, path, False)
    evaluated = run_ranks(num_ranks, _train, path, True)
    for (want, _), (got, numbers) in zip(plain, evaluated, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
        assert json.dumps(numbers) == json.dumps(evaluated[0][1])
        assert numbers["num_pairs"] == 40


class _Source:
    num_images, num_classes, image_size = 64, 12, (32, 32)


def _evaluate_between_steps(folder: str) -> tuple[dict[str, float], bool]:
    from types import SimpleNamespace

    import torch.distributed as dist

    from megaclass.config.read import load_config_values
    from megaclass.training.between_steps import accuracies, evaluate_between_steps
    from megaclass.training.model.build import build_model
    from megaclass_launch.world import World

    config = load_config_values(
        {
            "data": {"path": folder},
            "backbone": {"name": "slim", "embedding_dim": 16},
            "train": {"run_dir": "unused", "global_batch": 8},
        },
        where="test",
    )
    world = World(rank=dist.get_rank(), size=dist.get_world_size(), starter="tests")
    model = build_model(config, _Source(), world, _CPU)
    model.parallel.train()
    # Batch statistics differ between ranks, as they do while training with local batch norm.
    with torch.no_grad():
        model.backbone(torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(world.rank)))
    before = [parameter.clone() for parameter in model.backbone.parameters()]
    run = SimpleNamespace(config=config, world=world, device=_CPU, image_size=(32, 32))
    numbers = accuracies(evaluate_between_steps(run, model, 0, set()))
    is_unchanged = all(torch.equal(a, b) for a, b in zip(before, model.backbone.parameters(), strict=True))
    return numbers, is_unchanged and model.backbone.training


def test_the_loop_gets_accuracies_for_its_row_and_a_bad_set_does_not_end_it(run_ranks, pairs_bin, tmp_path):
    pairs_bin("lfw")
    (tmp_path / "broken.bin").write_bytes(b"junk")
    outcomes = run_ranks(2, _evaluate_between_steps, str(tmp_path))
    assert outcomes[0] == outcomes[1]
    numbers, is_unchanged = outcomes[0]
    assert is_unchanged
    assert set(numbers) == {"verification_accuracy", "accuracy_lfw"}
    assert numbers["verification_accuracy"] == numbers["accuracy_lfw"]
