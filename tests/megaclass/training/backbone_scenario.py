"""Training with everything that may come between two steps whose backbone is replayed as CUDA graphs."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megaclass.config.read import load_config_values
from megaclass.config.schema import Config
from megaclass.data.loader import Batch
from megaclass.training.model.build import Model, build_model
from megaclass.training.step import training_step
from megaclass_launch.world import World

NUM_STEPS = 12
NUM_REPLAYED_FORWARDS = 14
"""Of 12 steps all but the first three and the smaller one; and six forwards besides. A seventh finds another one open."""
NUM_REPLAYED_BACKWARDS = 12
"""Without a forward that has none and the step that is skipped, whose backward a GPU runs."""


@dataclass(frozen=True)
class Scenario:
    """Sizes of images, batches and head."""

    device: torch.device
    side: int
    batch: int
    num_classes: int = 12
    embedding_dim: int = 16

    @property
    def image_size(self) -> tuple[int, int]:
        return self.side, self.side

    def config(self, **changes: object) -> Config:
        """changes: section__key=value."""
        tables: dict[str, dict[str, object]] = {
            "data": {"path": "unused"},
            "backbone": {"embedding_dim": self.embedding_dim},
            "head": {"scale": 16.0, "margin_size": 0.2},
            "train": {"run_dir": "unused", "global_batch": self.batch, "on_nan": "skip"},
        }
        for name, value in changes.items():
            section, key = name.split("__")
            tables.setdefault(section, {})[key] = value
        return load_config_values(tables, where="test")

    def model(self, config: Config) -> Model:
        model = build_model(config, self, World(), self.device)  # type: ignore[arg-type]
        model.parallel.train()
        return model

    def batch_of(self, number: int, size: int | None = None) -> Batch:
        generator = torch.Generator().manual_seed(number)
        shape = (self.batch, self.side, self.side, 3)
        images = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        labels = torch.randint(self.num_classes, (self.batch,), generator=generator)
        return Batch(
            images=images[:size].permute(0, 3, 1, 2).to(self.device),
            labels=labels[:size].to(self.device),
            indices=np.arange(self.batch)[:size],
            epoch=0,
            step=number,
            index_tensor=torch.arange(self.batch, device=self.device)[:size],
        )

    def step(self, model: Model, config: Config, number: int, batch: Batch | None = None) -> Tensor:
        batch = self.batch_of(number) if batch is None else batch
        return training_step(model, batch, config, lr=0.05, step=number, device=self.device).loss


class PoisonedBatch(Batch):
    """A batch with NaN in its images."""

    def prepared(self, device: torch.device, rows: slice = slice(None)) -> Tensor:
        images = super().prepared(device, rows)
        images[1].fill_(math.nan)
        return images


def train_with_interruptions(scenario: Scenario, config: Config) -> tuple[list[float], dict[str, Tensor]]:
    """Returns the losses, and the state afterwards: weights, momenta, running statistics, moving average, centres."""
    model = scenario.model(config)
    losses, more = [], {}
    for number in range(NUM_STEPS):
        batch = None
        if number == 3:
            saved = _state(model)
        if number == 4:
            batch = scenario.batch_of(number, size=scenario.batch // 2)
        if number == 5:
            before = _state(model)
            poisoned = PoisonedBatch(**vars(scenario.batch_of(number)))
            assert math.isnan(scenario.step(model, config, number, poisoned).item())
            after = _state(model)
            changed = [name for name in before if not torch.equal(before[name], after[name])]
            assert all(name.startswith("loss_scale") for name in changed), changed
        if number == 6:
            more["evaluated"] = _evaluate(model, scenario.batch_of(50))
        if number == 7:
            kept = _embeddings(model, scenario.batch_of(51))
            held, copy = kept.detach(), kept.detach().clone()
            model.optimizer.zero_grad()
            for key, embeddings in (("second", _embeddings(model, scenario.batch_of(52))), ("first", kept)):
                more |= _gradients(model, embeddings, key)
            del kept, embeddings
        if number == 8:
            _embeddings(model, scenario.batch_of(53))  # no backward will come
        if number == 9:
            more |= _accumulated_gradients(model, [scenario.batch_of(60 + i) for i in range(3)])
        if number == 10:
            model.load_shared_state({**saved, **{name: saved[name] * 0.5 for name in saved if name.endswith("weight")}})
        losses.append(scenario.step(model, config, number, batch).item())
    assert torch.equal(held, copy)
    return losses, {**_state(model), **more}


def _state(model: Model) -> dict[str, Tensor]:
    rows = {f"rows.{name}": tensor for name, tensor in model.head.rows().items()}
    return {name: tensor.clone() for name, tensor in {**model.shared_state(), **rows}.items()}


def _evaluate(model: Model, batch: Batch) -> Tensor:
    with model.for_evaluation() as backbone, torch.no_grad():
        backbone.eval()
        embeddings: Tensor = backbone(batch.prepared(batch.images.device))
        backbone.train()
    return embeddings


def _embeddings(model: Model, batch: Batch) -> Tensor:
    device = batch.images.device
    with (
        model.parallel.no_sync(),
        model.precision.autocast(device),
    ):
        embeddings: Tensor = model.parallel(batch.prepared(device))
    return embeddings


def _accumulated_gradients(model: Model, batches: list[Batch]) -> dict[str, Tensor]:
    """Adds up gradients of several batches in the parameters, as torch's users do; returns those of each moment."""
    gradients = {}
    model.optimizer.zero_grad()
    for number, batch in enumerate(batches):
        gradients |= _gradients(model, _embeddings(model, batch), str(number))
    return gradients


def _gradients(model: Model, embeddings: Tensor, key: str) -> dict[str, Tensor]:
    with model.parallel.no_sync():
        embeddings.float().square().mean().backward()
    named = model.backbone.named_parameters()
    return {f"gradient.{key}.{name}": p.grad.clone() for name, p in named if p.grad is not None}


def assert_same_bits(
    ours: tuple[list[float], dict[str, Tensor]], theirs: tuple[list[float], dict[str, Tensor]]
) -> None:
    assert ours[0] == theirs[0]
    assert ours[1].keys() == theirs[1].keys()
    different = [name for name in ours[1] if not torch.equal(_bits(ours[1][name]), _bits(theirs[1][name]))]
    assert not different, different


def _bits(tensor: Tensor) -> Tensor:
    # NaN, which overflowing float16 gradients may contain, does not equal itself.
    return tensor.flatten().view(torch.uint8)


def with_graphs(config: Config, setting: Any) -> Config:
    return replace(config, train=replace(config.train, cuda_graph=setting))
