"""Centres from class means: at the start of a fine-tuning and after the last step, on any number of ranks, and when not."""

import contextlib
import io
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import save_file

from megaclass.backbones import build_backbone
from megaclass.checkpoint.load import load_shared, newest_whole
from megaclass.checkpoint.tensor_file import tensors_with_prefix
from megaclass.config.read import load_config_values
from megaclass.data.decode import decode_image
from megaclass.data.loader import BatchLoader
from megaclass.data.sources.open_source import open_source
from megaclass.data.sources.records import open_records
from megaclass.data.tools.synthesize import synthesize
from megaclass.errors import DataError
from megaclass.evaluation.centres import read_run_centres
from megaclass.training.model.build import build_model
from megaclass.training.rank_main import RankContext, train_in_group
from megaclass.training.run.folder import RunFolder
from megaclass.training.run.run import OpenedData, open_run
from megaclass.training.start.restart import FolderLock, StartMode
from megaclass.training.start.resume import load_initial_weights
from megaclass_launch.errors import ConfigError, UserError
from megaclass_launch.world import World

CPU = torch.device("cpu")
WIDTH, NUM_CLASSES = 16, 7
EMPTY, BROKEN = 3, 5  # a class without images, one with an image that cannot be decoded


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Folders of identities of different sizes."""
    folder = tmp_path_factory.mktemp("means")
    synthesize(
        folder / "drawn",
        num_identities=NUM_CLASSES,
        images_per_identity=9,
        image_size=32,
        seed=0,
        num_pairs=20,
        on_progress=lambda done, total: None,
    )
    source = open_records(folder / "drawn" / "train.rec")
    for index, label in enumerate(source.labels.tolist()):
        identity = folder / "data" / f"person-{label}"
        identity.mkdir(parents=True, exist_ok=True)
        if label != EMPTY and index % 9 <= label + 2:
            (identity / f"{index:03d}.jpg").write_bytes(source.read(index))
    (folder / "data" / f"person-{BROKEN}" / "000.jpg").write_bytes(b"no image")
    return folder / "data"


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    """As after training: statistics of batch norm that are not those of a new network."""
    torch.manual_seed(5)
    network = build_backbone("slim", embedding_dim=WIDTH, image_size=32)
    for name, buffer in network.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.uniform_(0.5, 1.5)
    path = tmp_path_factory.mktemp("backbone") / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in network.state_dict().items()}, path)
    return path, network


def settings(data, run_dir, backbone, **changes):
    values = {
        "data": {"path": str(data), "max_bad_fraction": 0.1, "augment": "crop:0.9,blur"},
        "backbone": {"name": "slim", "embedding_dim": WIDTH, "batch_norm": "sync", "dropout": 0.5},
        "head": {"scale": 16.0},
        "optimizer": {},
        "train": {"run_dir": str(run_dir), "epochs": 1, "global_batch": 10, "report_steps": 1, "device": "cpu"},
        "export": {"onnx": False},
    }
    values["train"] |= {"init_backbone": str(backbone), "init_centres": "class_means"}
    for name, value in changes.items():
        section, key = name.split("__")
        values[section][key] = value
    return values


def this_world():
    rank, size = dist.get_rank(), dist.get_world_size()
    return World(rank=rank, size=size, local_rank=rank, local_size=size, starter="tests", port=1)


def _initialised(values):
    """(C, M, D) centres after the start of a run, and what was said or the error."""
    config = load_config_values(values, where="test")
    source = open_source(config.data.path)
    model = build_model(config, source, this_world(), CPU)
    model.backbone.train()
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            world, folder = this_world(), RunFolder(Path(config.train.run_dir))
            run = open_run(config, world, CPU, folder, ("here",) * world.size, OpenedData())
            load_initial_weights(run, model, StartMode())
        except UserError as error:
            return None, str(error)
    assert model.backbone.training
    centres = model.head.centres(torch.arange(source.num_classes))
    return centres.reshape(source.num_classes, -1, WIDTH), said.getvalue()


def class_means(data, network):
    """The truth: one image at a time, in float64."""
    source, network = open_source(data), network.double().eval()
    sums = torch.zeros(NUM_CLASSES, WIDTH, dtype=torch.float64)
    for index in range(source.num_images):
        encoded = source.read(index)
        if encoded != b"no image":
            pixels = torch.from_numpy(decode_image(encoded, "").astype(np.float64)).permute(2, 0, 1)[None]
            with torch.no_grad():
                sums[source.labels[index]] += F.normalize(network(pixels / 127.5 - 1))[0]
    return F.normalize(sums)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_centres_begin_at_the_normalised_mean_of_unit_embeddings_on_any_number_of_ranks(
    run_ranks, data, backbone, tmp_path, size
):
    path, network = backbone
    truth = class_means(data, network)
    fresh = settings(data, tmp_path, path)
    del fresh["train"]["init_centres"]
    random_start, _ = run_ranks(1, _initialised, fresh)[0]
    has_images = torch.arange(NUM_CLASSES) != EMPTY
    for rank, (centres, said) in enumerate(run_ranks(size, _initialised, settings(data, tmp_path, path))):
        assert ("6 of 7 centres start at the mean of their images" in said) == (rank == 0)
        found = centres[:, 0].double()
        torch.testing.assert_close(F.normalize(found)[has_images], truth[has_images], rtol=0, atol=1e-5)
        lengths = found[has_images].norm(dim=1)
        torch.testing.assert_close(lengths, torch.full_like(lengths, 0.01 * WIDTH**0.5), rtol=1e-5, atol=0)
        assert torch.equal(centres[EMPTY], random_start[EMPTY])


def test_the_same_run_begins_with_the_same_bits(run_ranks, data, backbone, tmp_path):
    first, second = (run_ranks(2, _initialised, settings(data, tmp_path, backbone[0]))[0][0] for _ in range(2))
    assert torch.equal(first, second)


def test_with_sub_centres_one_begins_at_the_mean_and_the_others_at_random(run_ranks, data, backbone, tmp_path):
    path, network = backbone
    values = settings(data, tmp_path, path, head__subcentres=3, head__storage="bf16")
    centres = run_ranks(2, _initialised, values)[0][0].double()
    has_images = torch.arange(NUM_CLASSES) != EMPTY
    cosines = torch.einsum("cmd,cd->cm", F.normalize(centres, dim=2), class_means(data, network))[has_images]
    assert (cosines[:, 0] > 0.999).all() and (cosines[:, 1:] < 0.95).all()


def test_a_backbone_that_makes_nan_is_named_on_all_ranks(run_ranks, data, backbone, tmp_path):
    state = {name: tensor.clone() for name, tensor in backbone[1].float().state_dict().items()}
    name = next(name for name in state if name.endswith("running_var"))
    state[name].fill_(float("nan"))
    save_file(state, tmp_path / "nan.safetensors")
    for _, error in run_ranks(2, _initialised, settings(data, tmp_path, tmp_path / "nan.safetensors")):
        assert "The embeddings of class " in error and "nan.safetensors are not finite" in error


@pytest.mark.parametrize("batch", [10, 37], ids=["in the middle", "in the last batch"])
def test_too_many_bad_images_on_one_rank_are_told_to_all(run_ranks, data, backbone, tmp_path, batch):
    values = settings(data, tmp_path, backbone[0], data__max_bad_fraction=0.0, train__global_batch=batch)
    errors = [error for _, error in run_ranks(3, _initialised, values)]
    assert all("1 of 37 images could not be read, more than data.max_bad_fraction = 0.0 allows" in e for e in errors)
    assert sum(error.startswith("rank ") for error in errors) == 2


def test_class_means_without_a_backbone_are_refused():
    values = settings("data", "run", "unused")
    del values["train"]["init_backbone"]
    with pytest.raises(
        ConfigError, match=r"train\.init_centres is class_means; it must be a path if train\.init_backb"
    ):
        load_config_values(values, where="test")


def _train(values, beginning):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), ExitStack() as held:
        context = RankContext(
            config=load_config_values(values, where="test"), world=this_world(), mode=beginning, lock=FolderLock(held)
        )
        train_in_group(context, CPU)
    return said.getvalue()


def test_a_resumed_run_keeps_its_centres(run_ranks, data, backbone, tmp_path):
    values = settings(data, tmp_path / "run", backbone[0])
    assert "start at the mean" in run_ranks(2, _train, values, StartMode())[0]
    values["train"]["epochs"] = 2
    said = run_ranks(2, _train, values, StartMode(resume="auto"))[0]
    assert "resuming from" in said and "start at the mean" not in said


def _trained(run_ranks, size, data, run_dir, backbone, **changes):
    """Backbone and centres after the last step, in the order of the classes, and what rank 0 said."""
    values = settings(data, run_dir, backbone, **{"head__sample_rate": 0.5, "train__global_batch": 12} | changes)
    del values["train"]["init_centres"]
    said = run_ranks(size, _train, values, StartMode())[0]
    network = build_backbone("slim", embedding_dim=WIDTH, image_size=32)
    saved = load_shared(newest_whole(run_dir / "checkpoints")[0])
    network.load_state_dict(tensors_with_prefix(saved, "backbone."))
    return network, read_run_centres(run_dir).all_rows().double(), said


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("weight", [None, 0.5], ids=["by default", "chosen"])
def test_after_the_last_step_of_a_sampled_run_centres_turn_to_the_means_of_their_classes(
    run_ranks, data, backbone, tmp_path, size, weight
):
    chosen = {} if weight is None else {"train__mean_weight": weight}
    _, before, silent = _trained(run_ranks, size, data, tmp_path / "a", backbone[0], train__mean_weight=0.0)
    network, after, said = _trained(run_ranks, size, data, tmp_path / "b", backbone[0], **chosen)
    assert "centres were moved towards the means" in said and "centres were moved" not in silent
    means = class_means(data, network)
    truth = F.normalize(before) + (2.0 if weight is None else weight) / 0.5**0.5 * means
    truth = F.normalize(truth) * before.norm(dim=1, keepdim=True)
    has_images = torch.arange(NUM_CLASSES) != EMPTY
    torch.testing.assert_close(after[has_images], truth[has_images], rtol=0, atol=1e-5)
    assert torch.equal(after[EMPTY], before[EMPTY])


def test_with_all_negatives_centres_stay_as_they_were_trained(run_ranks, data, backbone, tmp_path):
    _, before, silent = _trained(
        run_ranks, 1, data, tmp_path / "a", backbone[0], head__sample_rate=1.0, train__mean_weight=0.0
    )
    _, after, said = _trained(run_ranks, 1, data, tmp_path / "b", backbone[0], head__sample_rate=1.0)
    assert torch.equal(before, after) and "centres were moved" not in said + silent


def test_class_means_that_fail_leave_the_centres_and_the_run_as_they_are(run_ranks, data, backbone, tmp_path):
    """The images disappear after the last step."""
    values = settings(data, tmp_path / "run", backbone[0], head__sample_rate=0.5, train__global_batch=12)
    del values["train"]["init_centres"]
    said = run_ranks(2, _train_without_images_at_the_end, values)
    assert "the centres stay as they were trained, because their class means failed" in said[0]
    assert (tmp_path / "run" / "checkpoints").is_dir() and read_run_centres(tmp_path / "run").num_classes == NUM_CLASSES


def _train_without_images_at_the_end(values):
    def fail(self, global_batch):
        raise DataError("the disk with the images is gone")
        yield

    # Only on one rank: the other must leave with it.
    BatchLoader.once = fail if dist.get_rank() == 1 else BatchLoader.once
    return _train(values, StartMode())
