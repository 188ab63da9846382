"""Data that fails on one rank: every rank of the job ends, at once, and knows why."""

from contextlib import ExitStack

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megaclass.config.read import load_config_values
from megaclass.data.sources.records import open_records
from megaclass.data.tools.synthesize import synthesize
from megaclass.training.rank_main import RankContext, train_in_group
from megaclass.training.start.restart import FolderLock, StartMode
from megaclass_launch.errors import UserError
from megaclass_launch.world import World

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Folders of identities, one image of 60 damaged."""
    folder = tmp_path_factory.mktemp("data")
    synthesize(folder / "drawn", num_identities=6, images_per_identity=10, image_size=32, num_pairs=20, num_processes=1)
    source = open_records(folder / "drawn" / "train.rec")
    for index, label in enumerate(np.asarray(source.labels).tolist()):
        identity = folder / "data" / f"person-{label}"
        identity.mkdir(parents=True, exist_ok=True)
        (identity / f"{index:03d}.jpg").write_bytes(b"no image" if index == 37 else source.read(index))
    return folder / "data"


def _train(values) -> tuple[str, str, int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank=rank, size=size, local_rank=rank, local_size=size, starter="tests", port=1)
    config = load_config_values(values, where="test")
    try:
        with ExitStack() as held:
            train_in_group(RankContext(config=config, world=world, mode=StartMode(), lock=FolderLock(held)), CPU)
    except UserError as error:
        # They are where they can still speak with each other.
        total = torch.ones(1)
        dist.all_reduce(total)
        return type(error).__name__, str(error), int(total)
    return "", "", 0


@pytest.mark.parametrize(
    "changes",
    [{}, {"accumulate": 3, "on_nan": "skip", "report_steps": 50}],
    ids=["whole batches", "in parts, skipping what is not finite"],
)
def test_too_many_bad_images_on_one_rank_end_all_of_them_in_that_step_and_all_know_why(
    run_ranks, data, tmp_path, changes
):
    values = {
        "data": {"path": str(data), "max_bad_fraction": 0.0},
        "backbone": {"name": "slim", "embedding_dim": 16},
        "head": {"scale": 16.0},
        "train": {"run_dir": str(tmp_path), "global_batch": 20, "report_steps": 1, "device": "cpu", **changes},
        "export": {"onnx": False},
    }
    outcomes = run_ranks(3, _train, values)
    kinds = [kind for kind, _, _ in outcomes]
    assert sorted(kinds) == ["AgreedError", "AgreedError", "DataError"], outcomes
    failed = kinds.index("DataError")
    message = "1 of 60 images could not be read, more than data.max_bad_fraction = 0.0 allows"
    assert message in outcomes[failed][1] and "037.jpg" in outcomes[failed][1]
    for kind, told, size in outcomes:
        assert size == 3
        assert kind == "DataError" or told == f"rank {failed}: {outcomes[failed][1]}"
    # It was met in the first epoch, at whose end a checkpoint would have been written.
    assert not list((tmp_path / "checkpoints").glob("step-*"))
