"""How a run begins: with which checkpoint and data, on all ranks alike, and without losing what lies in its folder."""

import hashlib
import json
import random
import re
import shutil
import threading
from contextlib import ExitStack, chdir
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.megaclass.training.test_resume import (
    FROZEN,
    NUM_CLASSES,
    Reference,
    _train,
    checkpoint_at,
    newest,
    renumbered,
    settings,
    tensors_of,
)
from torch import nn

from megaclass.checkpoint import manifest as manifest_module
from megaclass.checkpoint.manifest import read_manifest
from megaclass.data.tools.synthesize import synthesize
from megaclass.errors import TrainError
from megaclass.training import rank_main
from megaclass.training.run.folder import RunFolder
from megaclass.training.start import restart
from megaclass.training.start.restart import StartMode

EPOCHS_LEFT = 1.2
"""One step after the checkpoint of step 5."""


@pytest.fixture(scope="module")
def begun(rank_pool, tmp_path_factory):
    """A run of three epochs by three ranks; its classes have numbers only."""
    folder = tmp_path_factory.mktemp("begun")
    draw(folder / "data", seed=0)
    losses, _, error = rank_pool.run(3, _train, settings(folder / "data", folder / "run"))[0]
    assert not error
    return Reference(folder / "data", folder / "run", losses)


def draw(folder, seed):
    synthesize(
        folder,
        num_identities=NUM_CLASSES,
        images_per_identity=8,
        image_size=32,
        seed=seed,
        num_pairs=20,
        num_processes=1,
    )
    return folder


def content_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


# --- which data ---


def resumed_with(run_ranks, begun, data, run_dir, *, folder=None, **options):
    """(what was said, the error of every rank) of going on from step 5 with this data."""
    beginning = StartMode(resume=str(folder or checkpoint_at(begun.run_dir, 5)), **options)
    outcomes = run_ranks(2, _train, settings(data, run_dir, train__epochs=EPOCHS_LEFT), beginning)
    return outcomes[0][1], [error for _, _, error in outcomes]


def fingerprints_in(text):
    return set(re.findall(r"\b[0-9a-f]{16}\b", text))


def test_other_data_with_as_many_numbered_classes_is_refused_on_all_ranks_and_both_fingerprints_are_told(
    run_ranks, begun, tmp_path
):
    others = draw(tmp_path / "others", seed=5)
    swapped = renumbered(begun.data, tmp_path / "swapped", [0, *range(2, NUM_CLASSES), 1])
    for data, foreign in ((others, 0), (swapped, 1)):
        said, errors = resumed_with(run_ranks, begun, data, tmp_path / "run")
        for error in errors:
            assert "was trained on other data" in error and f"class {foreign} holds none of the images" in error
            assert len(fingerprints_in(error)) == 2 and "use --same-numbers" in error
        assert "resuming from" not in said
    # Numbers that match say nothing about people: --match-classes does not help where there are no names.
    fewer = renumbered(others, tmp_path / "fewer", list(range(NUM_CLASSES - 2)))
    for data in (others, fewer):
        _, errors = resumed_with(run_ranks, begun, data, tmp_path / "run", matches_classes=True)
        assert all("class 0 holds none of the images recorded" in error for error in errors)
    said, errors = resumed_with(run_ranks, begun, others, tmp_path / "run", trusts_numbers=True)
    assert errors == ["", ""] and "the data has changed, continuing with it" in said and len(fingerprints_in(said)) == 2


def test_centres_of_other_people_under_the_same_numbers_are_refused(run_ranks, begun, tmp_path):
    values = settings(draw(tmp_path / "others", seed=5), tmp_path / "run", train__epochs=1)
    values["train"]["init_centres"] = str(begun.run_dir)
    for beginning in (StartMode(), StartMode(matches_classes=True)):
        for _, _, error in run_ranks(2, _train, values, beginning):
            assert "was trained on other data: class 0 holds none of the images" in error
    assert run_ranks(2, _train, values, StartMode(trusts_numbers=True))[0][2] == ""


def test_names_that_look_like_numbers_are_no_proof_where_only_one_side_has_names(run_ranks, begun, tmp_path):
    named = shutil.copytree(begun.data, tmp_path / "named")
    order = [*range(1, NUM_CLASSES), 0]
    (named / "classes.txt").write_text("".join(f"{number}\n" for number in order))
    _, errors = resumed_with(run_ranks, begun, named, tmp_path / "run", matches_classes=True)
    # Line 0 says 1, so the name stands for the saved class 1, whose images are those of class 1 here.
    assert all("class 0 holds none of the images recorded in the checkpoint" in error for error in errors)
    (named / "classes.txt").write_text("".join(f"{number}\n" for number in range(NUM_CLASSES)))
    said, errors = resumed_with(run_ranks, begun, named, tmp_path / "again", matches_classes=True)
    assert errors == ["", ""] and "classes matched by name" in said


def test_the_same_classes_with_more_or_fewer_images_in_another_order_and_format_go_on(run_ranks, begun, tmp_path):
    moved = shutil.copytree(begun.data, tmp_path / "moved")
    said, errors = resumed_with(run_ranks, begun, moved, tmp_path / "run")
    assert errors == ["", ""] and "has changed" not in said
    # Image 17 has gone; every class gets one that another had.
    changed = renumbered(begun.data, tmp_path / "changed", list(range(NUM_CLASSES)))
    lines = (changed / "label.txt").read_text().splitlines(keepends=True)
    lines += [f"{8 * label}.jpg\t{(label + 1) % NUM_CLASSES}\n" for label in range(NUM_CLASSES)]
    random.Random(0).shuffle(lines)
    (changed / "label.txt").write_text("".join(lines))
    said, errors = resumed_with(run_ranks, begun, changed, tmp_path / "again")
    assert errors == ["", ""] and "the data has changed, continuing with it" in said


def test_a_checkpoint_of_before_there_were_fingerprints_goes_on(run_ranks, begun, tmp_path):
    folder = Path(shutil.copytree(checkpoint_at(begun.run_dir, 5), tmp_path / "old"))
    values = json.loads((folder / "manifest.json").read_text())
    assert values.pop("data")["fingerprint"]
    del values["sha256"]
    values["sha256"] = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(values))
    others = draw(tmp_path / "others", seed=5)
    said, errors = resumed_with(run_ranks, begun, others, tmp_path / "run", folder=folder)
    assert errors == ["", ""] and "resuming from" in said


# --- every byte is read by one rank ---


def _train_and_list_hashed(values, beginning):
    hashed = []

    def digest(path, real=manifest_module._file_digest):
        hashed.append(path.name)
        return real(path)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(manifest_module, "_file_digest", digest)
        return _train(values, beginning)[2], sorted(hashed)


def test_the_files_of_a_checkpoint_are_hashed_once_each_and_shared_by_the_ranks(run_ranks, begun, tmp_path):
    folder = newest(begun.run_dir)
    shards = sorted(path.name for path in folder.glob("head-*"))
    resuming = settings(begun.data, tmp_path / "run", train__epochs=3.2)
    tuning = settings(begun.data, tmp_path / "tuned", **FROZEN)
    tuning["train"] |= {"init_backbone": str(begun.run_dir), "init_centres": str(begun.run_dir)}
    for values, beginning in ((resuming, StartMode(resume=str(folder))), (tuning, StartMode())):
        outcomes = run_ranks(3, _train_and_list_hashed, values, beginning)
        assert [error for error, _ in outcomes] == [""] * 3
        assert [hashed for _, hashed in outcomes] == [[shards[0]], [shards[1]], [shards[2], "shared.safetensors"]]


def test_damage_that_another_rank_finds_makes_all_ranks_go_on_from_the_one_before(run_ranks, begun, tmp_path):
    run_dir = Path(shutil.copytree(begun.run_dir, tmp_path / "run"))
    shard = sorted(checkpoint_at(run_dir, 15).glob("head-*"))[2]
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    outcomes = run_ranks(3, _train, settings(begun.data, run_dir, train__epochs=2.2), StartMode(resume="auto"))
    assert [error for _, _, error in outcomes] == [""] * 3
    assert f"passed over a checkpoint: rank 2: {shard} is damaged" in outcomes[0][1]
    assert "step-000000010, step 10" in outcomes[0][1]


def _train_where_rank_1_is_elsewhere(values, beginning, elsewhere):
    with chdir(elsewhere if dist.get_rank() == 1 else Path(beginning.resume).parent):
        return _train(values, StartMode(resume=Path(beginning.resume).name))


@pytest.mark.parametrize(
    ("seen", "reason"),
    [("nothing", "manifest.json is missing"), ("another", "its manifest is a different one, of step 10")],
)
def test_a_rank_that_sees_another_checkpoint_in_that_place_ends_all_with_the_reason(
    run_ranks, begun, tmp_path, seen, reason
):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if seen == "another":
        shutil.copytree(checkpoint_at(begun.run_dir, 10), checkpoint_at(elsewhere, 5).parent.parent / "step-000000005")
    values = settings(begun.data, tmp_path / "run", train__epochs=EPOCHS_LEFT)
    beginning = StartMode(resume=str(checkpoint_at(begun.run_dir, 5)))
    for _, _, error in run_ranks(2, _train_where_rank_1_is_elsewhere, values, beginning, elsewhere):
        assert "Rank 1 on " in error and "does not see the checkpoint step-000000005 that rank 0 sees" in error
        assert reason in error


# --- starts after a failure, and checkpoints of a branch that was left ---


def _fail(*_, **__):
    raise TrainError("a fault")


def _start_again(values, beginning, number, fails_in=None):
    """As `megaclass run --restarts` does; rank 1 has an old view of the folder, as a network file system may give."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("MEGACLASS_RESTART", str(number))
        if dist.get_rank() == 1:
            monkeypatch.setattr(restart, "published", lambda checkpoints: [])
        if fails_in is not None:
            monkeypatch.setattr(rank_main, fails_in, _fail)
        return _train(values, beginning)


def names_in(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


@pytest.mark.parametrize("where", ["in the folder", "elsewhere"])
def test_a_run_that_left_a_branch_does_not_come_back_to_it_at_its_next_start(run_ranks, begun, tmp_path, where):
    run_dir = Path(shutil.copytree(begun.run_dir, tmp_path / "run"))
    elsewhere = shutil.copytree(checkpoint_at(run_dir, 5), tmp_path / "copy")
    beginning = StartMode(resume=str(checkpoint_at(run_dir, 5) if where == "in the folder" else elsewhere))
    values = settings(begun.data, run_dir, train__epochs=1.4, train__checkpoint_epochs=0.2)
    # The first start fails before anything is decided, the second when the branch has been left, the third after a save.
    for number, fails_in in enumerate(["build_model", "train"]):
        for _, _, error in run_ranks(2, _start_again, values, beginning, number, fails_in):
            assert "a fault" in error
        if number == 0:
            assert names_in(run_dir) == ["step-000000005", "step-000000010", "step-000000015"]
    left = ["step-000000010.abandoned-1", "step-000000015.abandoned-1"]
    assert names_in(run_dir) == ["step-000000005", *left]
    outcomes = run_ranks(2, _start_again, values, beginning, 2)
    assert [error for _, _, error in outcomes] == ["", ""] and f"resuming from {beginning.resume}" in outcomes[0][1]
    values = settings(begun.data, run_dir, train__epochs=1.6, train__checkpoint_epochs=0.2)
    said = run_ranks(2, _start_again, values, beginning, 3)[0][1]
    assert "step-000000007, step 7" in said
    assert names_in(run_dir) == [*(f"step-{step:09d}" for step in (5, 6, 7, 8)), *left]
    # What was set aside can be gone back to, and is not set aside under a name that is taken.
    values = settings(begun.data, run_dir, train__epochs=3)
    back = str(run_dir / "checkpoints" / left[0])
    _, said, error = run_ranks(2, _train, values, StartMode(resume=back))[0]
    assert not error and f"resuming from {back}, step 10" in said
    again = StartMode(resume=str(checkpoint_at(run_dir, 5)))
    _, said, error = run_ranks(1, _train, settings(begun.data, run_dir, train__epochs=EPOCHS_LEFT), again)[0]
    assert not error and "set aside as step-000000015.abandoned-2: a checkpoint of a later step" in said


def test_a_new_run_that_failed_begins_anew_or_goes_on_from_what_it_saved_and_waits_for_the_one_that_is_dying(
    run_ranks, begun, tmp_path
):
    values = settings(begun.data, tmp_path / "run", train__epochs=1)
    assert "a fault" in run_ranks(2, _start_again, values, StartMode(), 0, "train")[0][2]
    assert (tmp_path / "run" / "config.toml").exists()
    with ExitStack() as dying:
        dying.enter_context(RunFolder(tmp_path / "run").locked())
        threading.Timer(4.0, dying.pop_all().close).start()
        said, error = run_ranks(2, _start_again, values, StartMode(), 1)[0][1:]
    assert not error and "still holds" in said and "waiting up to 120 s" in said
    said, error = run_ranks(2, _start_again, values, StartMode(), 2)[0][1:]
    assert not error and "step-000000005, step 5" in said


def test_a_run_to_be_replaced_is_replaced_once_and_only_when_nothing_is_in_the_way(run_ranks, begun, tmp_path):
    run_dir = Path(shutil.copytree(begun.run_dir, tmp_path / "run"))
    before = content_of(run_dir)
    overwrite = StartMode(overwrite=True)
    missing = str(tmp_path / "mistyped")
    changes = [
        ({"train__global_batch": 512}, "more than the 160 there are"),
        ({"data__path": missing}, "there is no such folder"),
        ({"train__init_backbone": missing}, "There is no file"),
    ]
    for change, message in changes:
        for _, _, error in run_ranks(2, _train, settings(begun.data, run_dir, **change), overwrite):
            assert message in error
        assert content_of(run_dir) == before
    values = settings(begun.data, run_dir, train__epochs=1)
    for number, fails_in in enumerate(["build_model", "train"]):
        assert "a fault" in run_ranks(2, _start_again, values, overwrite, number, fails_in)[0][2]
        assert (content_of(run_dir) == before) == (number == 0)
    for number, begins in ((2, False), (3, True)):
        _, said, error = run_ranks(2, _start_again, values, overwrite, number)[0]
        assert not error and ("resuming from" in said) == begins
    assert names_in(run_dir) == ["step-000000005"]


# --- what a checkpoint or the curve cannot hold ---


class TurningNet(nn.Module):
    """With a table of complex numbers, as rotary position embeddings keep one."""

    def __init__(self, embedding_dim, image_size):
        super().__init__()
        self.linear = nn.Linear(3 * image_size**2, embedding_dim)
        self.register_buffer("turns", torch.zeros(3, dtype=torch.complex64))

    def forward(self, images):
        return self.linear(images.flatten(1))


def test_a_buffer_that_no_checkpoint_can_hold_is_told_before_the_run_begins(run_ranks, begun, tmp_path):
    values = settings(begun.data, tmp_path / "run", backbone__name=f"{__name__}:TurningNet", backbone__dropout=0.0)
    for losses, _, error in run_ranks(2, _train, values):
        assert "backbone.turns has the type torch.complex64, which checkpoints cannot hold" in error
        assert not losses
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


def test_what_a_power_cut_left_in_the_curve_is_dropped_and_that_is_told(run_ranks, begun, tmp_path):
    run_dir = Path(shutil.copytree(begun.run_dir, tmp_path / "run"))
    lines = (run_dir / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines[3:4] = [b"\0" * 100 + b"\n", b'{"step": \xff\n', b"7\n"]
    (run_dir / "metrics.jsonl").write_bytes(b"".join(lines) + b"\0" * 50)
    values = settings(begun.data, run_dir, train__epochs=3.2)
    losses, said, error = run_ranks(2, _train, values, StartMode(resume="auto"))[0]
    assert not error
    assert f"3 of 17 lines in {run_dir / 'metrics.jsonl'} cannot be read as rows and are dropped" in said
    assert sorted(losses) == [step for step in range(1, 17) if step != 4]


def test_the_run_folder_stands_for_one_state_of_the_run(run_ranks, begun, tmp_path):
    """Its newest whole checkpoint, though a model of an earlier end of the run lies there; only without any, that model."""
    run_dir = Path(shutil.copytree(begun.run_dir, tmp_path / "run"))
    shutil.copytree(begun.run_dir, tmp_path / "early")
    shared = tensors_of(newest(run_dir))
    export_backbone(checkpoint_at(run_dir, 5), run_dir / "model.safetensors")
    values = settings(begun.data, tmp_path / "tuned", **FROZEN)
    values["train"] |= {"init_backbone": str(run_dir), "init_centres": str(run_dir)}
    assert run_ranks(2, _train, values)[0][2] == ""
    found = tensors_of(newest(tmp_path / "tuned"))
    for name, expected in shared.items():
        if name == "rows.weight" or name.startswith("ema."):
            assert torch.equal(found[name.replace("ema.", "backbone.")], expected), name
    for step in (5, 10, 15):
        (checkpoint_at(run_dir, step) / "shared.safetensors").unlink()
    values["train"]["run_dir"] = str(tmp_path / "again")
    errors = [error for _, _, error in run_ranks(2, _train, values)]
    assert all(f"There is no whole checkpoint in {run_dir}: " in error for error in errors)
    del values["train"]["init_centres"]
    assert run_ranks(2, _train, values)[0][2] == ""
    weight = "linear.weight" if "backbone.linear.weight" in found else "blocks.0.residual.0.weight"
    expected = tensors_of(checkpoint_at(tmp_path / "early", 5))[f"ema.{weight}"]
    assert torch.equal(tensors_of(newest(tmp_path / "again"))[f"backbone.{weight}"], expected)


def export_backbone(folder, path):
    from safetensors.torch import save_file

    tensors = tensors_of(folder)
    parts = ("backbone.", "ema.")
    save_file({n.removeprefix(p): t.contiguous() for p in parts for n, t in tensors.items() if n.startswith(p)}, path)


def test_marks_are_in_every_manifest(begun):
    marks = read_manifest(newest(begun.run_dir)).data
    assert len(marks.fingerprint) == 16 and set(marks.class_images) == {str(label) for label in range(NUM_CLASSES)}
    assert all(len(digests) == 3 for digests in marks.class_images.values())
