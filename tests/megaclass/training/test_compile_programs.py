"""Programs compiled before the first step: nothing of the model changes, and the first step has nothing left to compile."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from megaclass.config.read import load_config_values
from megaclass.data.augment import parse_augment
from megaclass.data.loader import Batch, Treatment
from megaclass.training.model.build import build_model, generator_states
from megaclass.training.step import compile_programs, training_step
from megaclass_launch.ranks.process_group import process_group
from megaclass_launch.world import World

NUM_CLASSES, BATCH = 5_000, 64


class Source:
    image_size = (112, 112)
    num_classes = NUM_CLASSES


@contextmanager
def compiled_programs() -> Iterator[list[str]]:
    import triton

    names: list[str] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **facts: names.append(facts["fn"].name)
    try:
        yield names
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize(
    ("head", "train"),
    [
        ({"sample_rate": 0.3}, {}),
        ({"margin": "adaface", "subcentres": 2}, {"accumulate": 2}),
        ({"margin": "curricularface", "optimizer": "adamw"}, {"precision": "fp16"}),
    ],
    ids=["sampled", "accumulated", "fp16"],
)
def test_compiling_changes_nothing_and_leaves_nothing_to_the_first_step(head, train):
    tables = {
        "data": {"path": "unused"},
        "backbone": {"name": "iresnet18", "dropout": 0.2},
        "head": head,
        "train": {"run_dir": "unused", "global_batch": BATCH, **train},
    }
    config = load_config_values(tables, where="test")
    with process_group(World()) as device:
        model = build_model(config, Source(), World(), device)  # type: ignore[arg-type]
        model.parallel.train()
        batch = Batch(
            images=torch.randint(0, 256, (BATCH, 112, 112, 3), dtype=torch.uint8, device=device).permute(0, 3, 1, 2),
            labels=torch.randint(NUM_CLASSES, (BATCH,), device=device),
            indices=np.arange(BATCH),
            epoch=0,
            step=0,
            treatment=Treatment(augment=parse_augment("crop,blur:0.5")),
        )

        def state() -> dict[str, torch.Tensor]:
            rows = {f"rows.{name}": values for name, values in model.head.rows().items()}
            tensors = {**model.shared_state(), **rows, **generator_states(device)}
            return {name: tensor.clone() for name, tensor in tensors.items()}

        before = state()
        compile_programs(model, batch, config, step=0, device=device, num_threads=4)
        after = state()
        assert before.keys() == after.keys() and model.head.step_count == 0
        assert [name for name in before if not torch.equal(before[name], after[name])] == []
        with compiled_programs() as names:
            for step in range(2):
                result = training_step(model, batch, config, lr=0.01, step=step, device=device, is_measured=bool(step))
        assert names == [] and torch.isfinite(result.loss) and not result.was_skipped
        model.head.check()
