"""Going on from a checkpoint: on any number of ranks, with a changed list of classes, or not at all and why."""

import contextlib
import io
import os
import random
import re
import resource
import shutil
import signal
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tests.forked import forked_ranks, megaclass_command

from megaclass import api
from megaclass.checkpoint.load import load_shared, saved_rows
from megaclass.checkpoint.manifest import read_manifest
from megaclass.cli.main import main
from megaclass.config.read import load_config_values, to_toml
from megaclass.data.sources.records import open_records
from megaclass.data.tools.synthesize import synthesize
from megaclass.training.rank_main import RankContext, train_in_group
from megaclass.training.run import folder as run_folder
from megaclass.training.start.restart import FolderLock, StartMode
from megaclass_launch.errors import UserError
from megaclass_launch.world import World

CPU = torch.device("cpu")
NUM_CLASSES = 20
STEPS_PER_EPOCH, NUM_STEPS, MIDDLE = 5, 15, 5


def settings(data, run_dir, **changes):
    """A run with everything that has a state: batch norm, dropout, momentum, AdaFace's norms, a running mean.

    Not CurricularFace: its loss jumps where a negative is as hard as the target, so a difference of one rounding (1e-7)
    becomes 6e-5 in that step and 1e-2 ten steps later. AdaFace, continuous, stays within 1e-6 on any number of ranks.
    """
    values = {
        "data": {"path": str(data), "max_bad_fraction": 0.1},
        "backbone": {"name": "slim", "embedding_dim": 16, "batch_norm": "sync", "dropout": 0.2},
        "head": {"margin": "adaface", "margin_size": 0.1, "scale": 16.0, "sample_rate": 0.5, "optimizer": "sgd"},
        "optimizer": {"warmup_epochs": 0.5},
        "train": {"run_dir": str(run_dir), "epochs": 3, "global_batch": 32, "report_steps": 1, "ema": 0.9},
    }
    # Centres that turn to class means at the end are in test_class_means.py.
    values["train"] |= {"keep_checkpoints": 9, "device": "cpu", "mean_weight": 0.0}
    values["export"] = {}
    for name, value in changes.items():
        section, key = name.split("__")
        values[section][key] = value
    return values


def _train(values, beginning=None):
    """On every rank: losses by step on rank 0, what was said, and the error if there was one."""
    config = load_config_values(values, where="test")
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank=rank, size=size, local_rank=rank, local_size=size, starter="tests", port=1)
    said, error = io.StringIO(), ""
    with contextlib.redirect_stderr(said), ExitStack() as held:
        try:
            train_in_group(
                RankContext(config=config, world=world, mode=beginning or StartMode(), lock=FolderLock(held)), CPU
            )
        except UserError as caught:
            error = str(caught)
    return losses_of(Path(config.train.run_dir)), said.getvalue(), error


def losses_of(run_dir):
    return {row["step"]: row["loss"] for row in run_folder.RunFolder(run_dir).read_metrics()}


def checkpoint_at(run_dir, step):
    return Path(run_dir) / "checkpoints" / f"step-{step:09d}"


def tensors_of(folder):
    """Everything a checkpoint holds, as if saved by one rank; counters of steps and the ranks' own state left out."""
    manifest = read_manifest(folder)
    parts = sorted(saved_rows(folder, manifest, 0, manifest.num_classes), key=lambda part: part[0])
    rows = {f"rows.{name}": torch.cat([part[name] for _, part in parts]) for name in parts[0][1]}
    return load_shared(folder) | rows


@dataclass
class Reference:
    data: Path
    run_dir: Path
    losses: dict[int, float]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Twenty identities, one of whose images cannot be decoded."""
    folder = tmp_path_factory.mktemp("resume") / "data"
    synthesize(
        folder,
        num_identities=NUM_CLASSES,
        images_per_identity=8,
        image_size=32,
        seed=0,
        num_pairs=20,
        on_progress=lambda done, total: None,
    )
    source = open_records(folder / "train.rec")
    encoded = source.read(17)
    content = (folder / "train.rec").read_bytes()
    assert content.count(encoded) == 1
    (folder / "train.rec").write_bytes(content.replace(encoded, bytes(len(encoded))))
    return folder


@pytest.fixture(scope="module")
def by_four(data, rank_pool, tmp_path_factory):
    """Four ranks, never stopped."""
    run_dir = tmp_path_factory.mktemp("by-four") / "run"
    losses, _, error = rank_pool.run(4, _train, settings(data, run_dir))[0]
    assert not error and sorted(losses) == list(range(1, NUM_STEPS + 1))
    return Reference(data, run_dir, losses)


# --- any number of ranks ---


@pytest.mark.parametrize("size", [4, 1, 3, *(pytest.param(size, marks=pytest.mark.soak) for size in (2, 8))])
def test_saved_by_4_ranks_and_resumed_by_any_number_the_run_ends_like_one_never_stopped(
    run_ranks, by_four, tmp_path, size
):
    changes = {"train__nproc": size, "train__run_dir": str(tmp_path / "run")}
    beginning = StartMode(resume=str(checkpoint_at(by_four.run_dir, MIDDLE)))
    losses, said, error = run_ranks(size, _train, settings(by_four.data, "-", **changes), beginning)[0]
    assert not error and f"step {MIDDLE}" in said
    assert sorted(losses) == list(range(MIDDLE + 1, NUM_STEPS + 1))
    ended, expected = (tensors_of(checkpoint_at(run, NUM_STEPS)) for run in (tmp_path / "run", by_four.run_dir))
    assert set(ended) == set(expected)
    for step, loss in losses.items():
        if size == 4:
            assert loss == by_four.losses[step], step
        else:
            assert loss == pytest.approx(by_four.losses[step], rel=1e-4), step
    for name, tensor in expected.items():
        if size == 4:
            assert torch.equal(ended[name], tensor), name
        elif tensor.is_floating_point():
            # Another order of addition: the difference grows over the steps, in single elements most.
            assert (ended[name] - tensor).norm() <= 0.02 * tensor.norm() + 1e-3, name


def test_a_run_passed_on_from_4_to_3_to_5_to_1_ranks_keeps_the_curve(run_ranks, by_four, tmp_path):
    begun, losses = checkpoint_at(by_four.run_dir, MIDDLE), {}
    for size, stop in ((3, 9), (5, 12), (1, NUM_STEPS)):
        values = settings(by_four.data, tmp_path / str(size), train__checkpoint_epochs=0.6)
        found, _, error = run_ranks(size, _train, values, StartMode(resume=str(begun)))[0]
        assert not error
        losses |= {step: loss for step, loss in found.items() if step <= stop}
        begun = checkpoint_at(tmp_path / str(size), stop)
    assert losses == pytest.approx({step: by_four.losses[step] for step in losses}, rel=1e-4)
    assert len(losses) == NUM_STEPS - MIDDLE


def test_the_state_that_goes_on_is_all_of_it(by_four):
    names = {name.split(".")[0] for name in tensors_of(checkpoint_at(by_four.run_dir, MIDDLE))}
    assert names == {"backbone", "optimizer", "head", "ema", "loss_scale", "rows"}


def test_the_command_line_says_how_a_run_begins(data, tmp_path, monkeypatch):
    begun = []

    def start(recipe, overrides, mode, *, output):
        begun.append(replace(mode, command=()))
        return api.TrainedRun(tmp_path / "run")

    monkeypatch.setattr(api, "start_training", start)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(load_config_values(settings(data, tmp_path / "run"), where="test")))
    for options in ([], ["--resume"], ["--resume=best", "--match-classes"], ["--overwrite"]):
        assert main(["train", str(recipe), *options]) == 0
    assert begun == [
        StartMode(),
        StartMode(resume="auto"),
        StartMode(resume="best", matches_classes=True),
        StartMode(overwrite=True),
    ]


# --- killed again and again ---


def run_with_kills(recipe, run_dir, num_kills):
    """Starts two ranks, kills them with -9 somewhere after a new checkpoint, and resumes, until they are left alone."""
    chance = random.Random(num_kills)
    command = ["train", str(recipe), f"train.run_dir={run_dir}"]
    for attempt in range(num_kills + 1):
        options = ["--resume"] if (run_dir / "checkpoints").exists() else ["--overwrite"]
        before = newest_name(run_dir)
        with forked_ranks(2, megaclass_command, *command, *options, ranks_per_host=1) as ranks:
            if attempt < num_kills:
                while ranks[0].is_alive() and newest_name(run_dir) == before:
                    time.sleep(0.002)
                time.sleep(chance.uniform(0, 0.3))
                for rank in ranks:
                    os.kill(rank.pid, signal.SIGKILL)
            allowed = (0, -9) if attempt < num_kills else (0,)
            assert ranks[0].wait() in allowed, ranks[0].stderr
            # The second may have failed because the first was killed before it.
            code = ranks[1].wait()
            assert code is not None and (attempt < num_kills or code == 0), ranks[1].stderr


def newest_name(run_dir):
    return max((path.name for path in run_dir.glob("checkpoints/step-*")), default="")


def check_kills(rank_pool, data, folder, num_kills, **changes):
    changes |= {"train__nproc": 2, "train__checkpoint_epochs": 0.2, "train__keep_checkpoints": 2}
    undisturbed = rank_pool.run(2, _train, settings(data, folder / "undisturbed", **changes))[0][0]
    recipe = folder / "recipe.toml"
    recipe.write_text(to_toml(load_config_values(settings(data, "-", **changes, export__onnx=False), where="test")))
    run_with_kills(recipe, folder / "run", num_kills)
    assert losses_of(folder / "run") == undisturbed
    last = max(undisturbed)
    ended, expected = (tensors_of(checkpoint_at(folder / run, last)) for run in ("run", "undisturbed"))
    assert all(torch.equal(ended[name], expected[name]) for name in expected)


def test_a_run_of_two_ranks_killed_while_it_saves_has_the_curve_of_one_never_stopped(rank_pool, data, tmp_path):
    check_kills(rank_pool, data, tmp_path, 1, train__epochs=3)


@pytest.mark.soak
def test_a_run_killed_30_times_has_the_curve_of_one_never_stopped(rank_pool, data, tmp_path):
    check_kills(rank_pool, data, tmp_path, 30, train__epochs=60)


# --- a run folder that is not the same on all ranks ---


def _train_in_own_folder(values, folders):
    with contextlib.chdir(folders[dist.get_rank()]), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(run_folder, "_NETWORK_DELAY_S", 0.5)
        return _train(values)


def test_a_run_folder_that_another_host_does_not_see_is_refused_with_the_reason(run_ranks, data, tmp_path):
    folders = [tmp_path / "host-a", tmp_path / "host-b"]
    for folder in folders:
        folder.mkdir()
    outcomes = run_ranks(2, _train_in_own_folder, settings(data, "run"), folders)
    for _, _, error in outcomes:
        assert "Rank 1 on " in error and f"does not see in {folders[1]}/run what rank 0 wrote there" in error
        assert "Put train.run_dir on a file system that they share." in error
    assert not list(folders[1].iterdir())
    assert not list((folders[0] / "run").glob(".seen-*"))


def _train_until_rank_0_may_write_no_more(values, num_bytes):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        return _train(values)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("num_bytes", "name"), [(100, "config.toml"), (2500, "metrics.jsonl")])
def test_a_disk_that_takes_no_more_of_the_metrics_ends_all_ranks_with_the_reason(
    run_ranks, data, tmp_path, num_bytes, name
):
    values = settings(data, tmp_path / "run", train__checkpoint_epochs=1000)
    open_records(data / "train.rec")  # so that its caches are there already
    for losses, _, error in run_ranks(2, _train_until_rank_0_may_write_no_more, values, num_bytes):
        assert f"Cannot write {tmp_path / 'run' / name}: File too large." in error
        assert len(losses) < NUM_STEPS


# --- changed lists of classes ---


def renumbered(data, target, old_of_new, names=None):
    """A copy of the data in which class old_of_new[k] has become class k; classes left out lose their images."""
    source = open_records(data / "train.rec")
    target.mkdir(parents=True)
    lines, new_of_old = [], {old: new for new, old in enumerate(old_of_new)}
    for index in range(source.num_images):
        label = new_of_old.get(int(source.labels[index]))
        if label is not None and index != 17:
            (target / f"{index}.jpg").write_bytes(source.read(index))
            lines.append(f"{index}.jpg\t{label}\n")
    # A class that is not in the old data gets copies of another's images.
    for new, old in enumerate(old_of_new):
        if old >= NUM_CLASSES:
            shutil.copy(target / "0.jpg", target / f"new-{new}.jpg")
            lines += [f"new-{new}.jpg\t{new}\n"] * 8
    (target / "label.txt").write_text("".join(lines))
    if names is not None:
        (target / "classes.txt").write_text("".join(f"{names(old)}\n" for old in old_of_new))
    return target


@pytest.fixture(scope="module")
def named(data, rank_pool, tmp_path_factory):
    """A run over classes with names."""
    folder = tmp_path_factory.mktemp("named")
    identities = renumbered(data, folder / "data", list(range(NUM_CLASSES)), names=identity)
    losses, _, error = rank_pool.run(2, _train, settings(identities, folder / "run", train__epochs=1))[0]
    assert not error
    return Reference(data, folder / "run", losses)


def identity(old):
    return f"Person {old:02d} ü"


# Old classes 3 and 7 have gone, 4 has become the first, and two new ones stand in between.
CHANGED = [4, 0, 1, 2, 20, *(old for old in range(5, NUM_CLASSES) if old != 7), 21]


@pytest.mark.parametrize("size", [1, 3])
def test_centres_are_matched_by_name_when_classes_came_went_and_moved(run_ranks, named, tmp_path, size):
    changed = renumbered(named.data, tmp_path / "data", CHANGED, names=identity)
    values = settings(changed, tmp_path / "run", train__epochs=2)
    beginning = StartMode(resume=str(checkpoint_at(named.run_dir, 4)), matches_classes=True)
    _, said, error = run_ranks(size, _train, values, beginning)[0]
    assert not error
    table = [line.rsplit(maxsplit=1) for line in said.split("matched by name")[1].splitlines()[1:5]]
    counts = {kind.strip(): int(count) for kind, count in table}
    num_same = sum(new == old for new, old in enumerate(CHANGED))
    assert counts == {
        "kept, under the same number": num_same,
        "kept, renumbered": len(CHANGED) - 2 - num_same,
        "new, initialised": 2,
        "gone, dropped": 3 - 1,
    }


def test_matched_rows_are_those_of_the_same_name_and_new_ones_are_as_drawn(run_ranks, named, tmp_path):
    changed = renumbered(named.data, tmp_path / "data", CHANGED, names=identity)
    # A learning rate of nothing shows the rows as they were loaded.
    frozen = {"optimizer__lr": 1e-30, "head__weight_decay": 0.0, "head__momentum": 0.0}
    still = settings(changed, tmp_path / "still", train__epochs=1, **frozen)
    _, _, error = run_ranks(1, _train, still)[0]
    assert not error
    drawn = tensors_of(newest(tmp_path / "still"))["rows.weight"]
    values = settings(changed, tmp_path / "run", train__epochs=1, **frozen)
    values["train"]["init_centres"] = str(named.run_dir)
    _, said, error = run_ranks(3, _train, values, StartMode(matches_classes=True))[0]
    assert not error and "matched by name" in said
    begun = tensors_of(newest(tmp_path / "run"))["rows.weight"]
    saved = tensors_of(newest(named.run_dir))["rows.weight"]
    for new, old in enumerate(CHANGED):
        assert torch.equal(begun[new], saved[old] if old < NUM_CLASSES else drawn[new]), (new, old)


def newest(run_dir):
    return sorted((Path(run_dir) / "checkpoints").glob("step-*"))[-1]


def test_without_the_request_a_changed_list_is_refused_with_the_difference(run_ranks, named, tmp_path):
    changed = renumbered(named.data, tmp_path / "data", CHANGED, names=identity)
    values = settings(changed, tmp_path / "run", train__epochs=2)
    for error in [o[2] for o in run_ranks(2, _train, values, StartMode(resume=str(newest(named.run_dir))))]:
        assert "20 classes were saved, the data has 20" in error
        assert "2 new (Person 20 ü, Person 21 ü)" in error and "2 gone (Person 03 ü, Person 07 ü)" in error
        assert "with another number" in error and "--match-classes keeps the centres" in error


def test_names_that_have_nothing_in_common_with_the_saved_ones_are_refused(run_ranks, named, tmp_path):
    other = renumbered(named.data, tmp_path / "data", list(range(NUM_CLASSES)), names=lambda old: f"Someone {old}")
    values = settings(other, tmp_path / "run", train__epochs=2)
    beginning = StartMode(resume=str(newest(named.run_dir)), matches_classes=True)
    for _, _, error in run_ranks(2, _train, values, beginning):
        assert "None of the 20 classes of the data is among the 20 of" in error


def test_classes_without_names_are_matched_by_number_and_that_is_said(run_ranks, by_four, tmp_path):
    fewer = renumbered(by_four.data, tmp_path / "data", list(range(NUM_CLASSES - 2)))
    values = settings(fewer, tmp_path / "run", train__epochs=1.5)
    begun = str(checkpoint_at(by_four.run_dir, MIDDLE))
    assert (
        "keeps the centres of those with the same number" in run_ranks(1, _train, values, StartMode(resume=begun))[0][2]
    )
    _, said, error = run_ranks(2, _train, values, StartMode(resume=begun, matches_classes=True))[0]
    assert not error and "classes matched by number with" in said


def test_a_run_on_folders_goes_on_with_their_packed_copy(run_ranks, data, tmp_path):
    source = open_records(data / "train.rec")
    for index in range(source.num_images):
        person = tmp_path / "people" / identity(int(source.labels[index]))
        person.mkdir(parents=True, exist_ok=True)
        if index != 17:
            (person / f"{index:04d}.jpg").write_bytes(source.read(index))
    whole, _, error = run_ranks(2, _train, settings(tmp_path / "people", tmp_path / "whole", train__epochs=2))[0]
    assert not error and main(["data", "pack", str(tmp_path / "people"), "--out", str(tmp_path / "rec")]) == 0
    values = settings(tmp_path / "rec", tmp_path / "run", train__epochs=2)
    beginning = StartMode(resume=str(checkpoint_at(tmp_path / "whole", 4)))
    resumed, said, error = run_ranks(2, _train, values, beginning)[0]
    assert not error and "matched" not in said
    assert resumed == {step: loss for step, loss in whole.items() if step > 4} and len(resumed) == 4


def test_a_list_of_names_that_does_not_fit_the_data_is_refused(run_ranks, data, tmp_path):
    folder = renumbered(data, tmp_path / "data", list(range(NUM_CLASSES)))
    (folder / "classes.txt").write_text("one\ntwo\n")
    _, _, error = run_ranks(1, _train, settings(folder, tmp_path / "run"))[0]
    assert "names 2 classes, but has labels for 20" in error


# --- refused with the difference ---


@pytest.mark.parametrize(
    ("name", "value", "difference"),
    [
        ("head__optimizer", "adamw", "head.optimizer was sgd, is adamw"),
        ("optimizer__name", "adamw", "optimizer.name was sgd, is adamw"),
        ("backbone__embedding_dim", 8, "backbone.embedding_dim was 16, is 8"),
        ("head__subcentres", 2, "head.subcentres was 1, is 2"),
    ],
)
def test_another_optimizer_or_width_is_refused_with_the_difference(
    run_ranks, by_four, tmp_path, name, value, difference
):
    changes = {name: value, "train__run_dir": str(tmp_path / "run")}
    beginning = StartMode(resume=str(checkpoint_at(by_four.run_dir, MIDDLE)))
    for _, _, error in run_ranks(2, _train, settings(by_four.data, "-", **changes), beginning):
        assert "belongs to another run" in error and difference in error


def test_a_setting_that_is_newer_than_the_checkpoint_counts_as_its_default(run_ranks, by_four, tmp_path):
    folder = Path(shutil.copytree(checkpoint_at(by_four.run_dir, MIDDLE), tmp_path / "old"))
    rewrite_config(folder, lambda text: "\n".join(line for line in text.split("\n") if "on_nan" not in line))
    values = settings(by_four.data, tmp_path / "run", train__epochs=1.2)
    assert run_ranks(1, _train, values, StartMode(resume=str(folder)))[0][2] == ""
    rewrite_config(folder, lambda text: text.replace("[train]", "[train]\nnovelty = 1"))
    error = run_ranks(1, _train, settings(by_four.data, tmp_path / "other"), StartMode(resume=str(folder)))[0][2]
    assert "settings that this version does not know" in error and "novelty" in error


def rewrite_config(folder, change):
    manifest = read_manifest(folder)
    replace(manifest, config=change(manifest.config)).write(folder)


def test_newer_checkpoints_that_are_damaged_or_of_another_run_are_passed_over_with_the_reasons(
    run_ranks, by_four, tmp_path
):
    shutil.copytree(by_four.run_dir, tmp_path / "run")
    rewrite_config(checkpoint_at(tmp_path / "run", 15), lambda text: text.replace("seed = 0", "seed = 7", 1))
    shard = next(checkpoint_at(tmp_path / "run", 10).glob("head-*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    values = settings(by_four.data, tmp_path / "run", train__epochs=1.2)
    _, said, error = run_ranks(1, _train, values, StartMode(resume="auto"))[0]
    assert not error
    assert "step-000000015 belongs to another run: train.seed was 7, is 0" in said
    assert f"{shard} has" in said and f"resuming from {checkpoint_at(tmp_path / 'run', 5)}, step 5" in said


def test_the_best_checkpoint_can_be_asked_for(run_ranks, by_four, tmp_path):
    shutil.copytree(by_four.run_dir, tmp_path / "run")
    best = min((5, 10, 15), key=lambda step: by_four.losses[step])
    _, said, error = run_ranks(1, _train, settings(by_four.data, tmp_path / "run"), StartMode(resume="best"))[0]
    assert not error and f"step-{best:09d}, step {best}" in said


# --- beginning with what others trained ---


def centres_of_insightface(folder, centres, world_size):
    folder.mkdir()
    sizes = [len(centres) // world_size + (rank < len(centres) % world_size) for rank in range(world_size)]
    for rank, shard in enumerate(centres.split(sizes)):
        state = {"state_dict_backbone": {}, "state_dict_softmax_fc": {"weight": shard.clone()}}
        torch.save(state, folder / f"checkpoint_gpu_{rank}.pt")
    return folder


FROZEN = {"train__epochs": 0.2, "optimizer__lr": 1e-30, "head__weight_decay": 0.0, "train__ema": 0.0}


def test_a_run_begins_with_the_backbone_and_centres_it_is_given(run_ranks, by_four, tmp_path):
    centres = torch.randn(NUM_CLASSES, 16)
    begun = checkpoint_at(by_four.run_dir, MIDDLE)
    values = settings(by_four.data, tmp_path / "run", **FROZEN)
    values["train"]["init_backbone"] = str(begun)
    values["train"]["init_centres"] = str(centres_of_insightface(tmp_path / "centres", centres, 3))
    assert run_ranks(2, _train, values)[0][2] == ""
    found, given = tensors_of(newest(tmp_path / "run")), tensors_of(begun)
    assert torch.equal(found["rows.weight"], centres)
    for name in [name for name in given if name.startswith("ema.")]:
        # What a run with a running mean stands for is that mean.
        assert torch.equal(found[name.replace("ema.", "backbone.")], given[name]), name


@pytest.mark.parametrize("kind", ["model.safetensors", "backbone.pth", "run folder"])
def test_backbones_of_every_kind_are_taken(run_ranks, by_four, tmp_path, kind):
    shared = load_shared(checkpoint_at(by_four.run_dir, NUM_STEPS))
    state = {n.removeprefix("backbone."): t for n, t in shared.items() if n.startswith("backbone.")}
    path = tmp_path / kind
    if kind == "backbone.pth":
        torch.save({f"module.{name}": tensor for name, tensor in state.items()}, path)
    elif kind == "model.safetensors":
        save_file(state, path)
    else:
        path = by_four.run_dir
    values = settings(by_four.data, tmp_path / "run", **FROZEN)
    values["train"]["init_backbone"] = str(path)
    assert run_ranks(1, _train, values)[0][2] == ""
    found = load_shared(newest(tmp_path / "run"))
    weight = "blocks.0.residual.0.weight"
    expected = shared[f"ema.{weight}"] if kind == "run folder" else state[weight]
    assert torch.equal(found[f"backbone.{weight}"], expected)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("init_backbone", "does not fit this backbone"),
        ("init_centres", r"rows of 'weight' have shape \(10, 8\), but this run has \(10, 16\)"),
        ("no file", "There is no file"),
        ("no folder", "There is no folder"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_difference_on_all_ranks(run_ranks, data, tmp_path, setting, message):
    values = settings(data, tmp_path / "run")
    if setting == "init_backbone":
        torch.save({"fc.weight": torch.zeros(3, 3)}, tmp_path / "backbone.pth")
        values["train"]["init_backbone"] = str(tmp_path / "backbone.pth")
    elif setting == "init_centres":
        folder = centres_of_insightface(tmp_path / "centres", torch.zeros(NUM_CLASSES, 8), 2)
        values["train"]["init_centres"] = str(folder)
    else:
        name = "init_backbone" if setting == "no file" else "init_centres"
        values["train"][name] = str(tmp_path / "nothing.pth")
    for _, _, error in run_ranks(2, _train, values):
        assert re.search(message, error), error


def test_centres_of_fewer_classes_need_the_request_and_are_then_taken_by_number(run_ranks, data, tmp_path):
    centres = torch.randn(NUM_CLASSES - 4, 16)
    values = settings(data, tmp_path / "run", **FROZEN)
    values["train"]["init_centres"] = str(centres_of_insightface(tmp_path / "centres", centres, 2))
    assert "4 new (16, 17, 18, …)" in run_ranks(2, _train, values)[0][2]
    values["train"]["run_dir"] = str(tmp_path / "matched")
    assert run_ranks(2, _train, values, StartMode(matches_classes=True))[0][2] == ""
    found = tensors_of(newest(tmp_path / "matched"))["rows.weight"]
    assert torch.equal(found[: len(centres)], centres)
    assert np.isfinite(found.numpy()).all() and bool(found[len(centres) :].any(dim=1).all())
