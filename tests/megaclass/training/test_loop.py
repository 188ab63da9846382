"""What the loop leaves behind: numbers of the step they stand for, words about what failed, a folder that is free again."""

import contextlib
import io
import json
import sys
import types
from contextlib import ExitStack
from importlib.machinery import ModuleSpec

import pytest
import torch
import torch.distributed as dist

from megaclass.checkpoint.retention import best_folder, published
from megaclass.config.read import load_config_values
from megaclass.data.sources.records import open_records
from megaclass.data.tools.synthesize import synthesize
from megaclass.evaluation.report.from_runs import read_faces
from megaclass.training.between_steps import evaluate_model
from megaclass.training.finish import finish_run
from megaclass.training.rank_main import RankContext, train_in_group
from megaclass.training.run.folder import RunFolder
from megaclass.training.start.restart import FolderLock, StartMode
from megaclass_launch.errors import UserError
from megaclass_launch.world import World

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """60 images, the first of which is gone; a set of pairs, and one that is none."""
    folder = tmp_path_factory.mktemp("loop")
    synthesize(folder / "drawn", num_identities=6, images_per_identity=10, image_size=32, num_pairs=20, num_processes=1)
    source = open_records(folder / "drawn" / "train.rec")
    for index, label in enumerate(source.labels.tolist()):
        identity = folder / "data" / f"person-{label}"
        identity.mkdir(parents=True, exist_ok=True)
        (identity / f"{index:03d}.jpg").write_bytes(source.read(index))
    (folder / "data" / "person-0" / "000.jpg").unlink()
    (folder / "data" / "person-0" / "000.jpg").symlink_to("gone")
    (folder / "drawn" / "verification.bin").rename(folder / "data" / "pairs.bin")
    (folder / "data" / "broken.bin").write_bytes(b"junk")
    return folder / "data"


def settings(data, run_dir, **changes):
    return {
        "data": {"path": str(data), "max_bad_fraction": 0.5},
        "backbone": {"name": "slim", "embedding_dim": 16},
        "head": {"scale": 16.0},
        "train": {"run_dir": str(run_dir), "global_batch": 20, "device": "cpu", "keep_checkpoints": 9, **changes},
        "export": {"onnx": False},
    }


def this_world():
    rank, size = dist.get_rank(), dist.get_world_size()
    return World(rank=rank, size=size, local_rank=rank, local_size=size, starter="tests", port=1)


def context_of(config, held):
    return RankContext(config=config, world=this_world(), mode=StartMode(), lock=FolderLock(held))


def _train(values):
    """What was said, and the names of the sets whose results the loop handed over."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), ExitStack() as held:
        _, _, outcome = train_in_group(context_of(load_config_values(values, where="test"), held), CPU)
    return said.getvalue(), [result.name for result in outcome.results or []]


def rows_of(run_dir):
    return {row["step"]: row for row in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())}


def metrics_of(run_dir):
    folders = published(run_dir / "checkpoints")
    return {int(f.name[-9:]): json.loads((f / "manifest.json").read_text())["metrics"] for f in folders}


def test_a_checkpoint_carries_the_numbers_of_its_own_step_or_none(run_ranks, data, tmp_path):
    values = settings(
        data, tmp_path, epochs=7 / 3, evaluate_epochs=2 / 3, checkpoint_epochs=1.0, report_steps=5, on_nan="skip"
    )
    outcomes = run_ranks(2, _train, values)
    rows, metrics = rows_of(tmp_path), metrics_of(tmp_path)
    # A row every five steps, where it is evaluated (2, 4, 6 and the last) and where it is saved (3, 6 and the last).
    assert list(rows) == [2, 3, 4, 5, 6, 7]
    assert [step for step, row in rows.items() if "verification_accuracy" in row] == [2, 4, 6, 7]
    names = ("loss", "verification_accuracy", "accuracy_pairs")
    assert metrics == {step: {name: rows[step][name] for name in names if name in rows[step]} for step in (3, 6, 7)}
    best = best_folder(published(tmp_path / "checkpoints"))
    more_accurate = max((6, 7), key=lambda step: (rows[step]["verification_accuracy"], step))
    assert best is not None and best.name == f"step-{more_accurate:09d}"
    # Said once, by one rank, although four evaluations failed; and the last is not done again for the summary.
    assert [said.count("megaclass: not evaluated: broken: ") for said, _ in outcomes] == [1, 0]
    assert [names for _, names in outcomes] == [["broken", "pairs"]] * 2


def test_evaluations_that_are_asked_for_more_often_than_a_step_come_every_step(run_ranks, data, tmp_path):
    run_ranks(1, _train, settings(data, tmp_path, epochs=1.0, evaluate_epochs=0.01))
    assert [step for step, row in rows_of(tmp_path).items() if "verification_accuracy" in row] == [1, 2, 3]


def _finish(values, damage):
    """What was said by a finished run whose folder was damaged before its report was written."""
    config = load_config_values(values, where="test")
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()), ExitStack() as held:
        run, model, outcome = train_in_group(context_of(config, held), CPU)
        for name in damage:
            path = run.folder.path / name
            path.write_text("{ damaged") if "json" in name else path.mkdir()
        held.enter_context(model.for_evaluation())
        finish_run(run, model, model.backbone, outcome, evaluate_model(run, model, model.backbone))
    return said.getvalue()


def test_an_image_that_cannot_be_read_or_a_damaged_evaluation_costs_neither_summary_nor_report(
    run_ranks, data, tmp_path
):
    (said,) = run_ranks(1, _finish, settings(data, tmp_path, epochs=1.0), ["evaluation.json"])
    assert "Cannot read " in said and "evaluation.json" in said and "It is replaced." in said
    assert json.loads((tmp_path / "summary.json").read_text())["verification"]["pairs"]["num_pairs"] == 20
    assert list(json.loads((tmp_path / "evaluation.json").read_text())["sets"]) == ["broken", "pairs"]
    assert (tmp_path / "report.html").is_file()
    # Six classes; of the first the image that is gone is left out.
    assert [len(row) for row in read_faces(tmp_path)] == [7, 8, 8, 8, 8, 8]


def test_a_run_without_evaluation_sets_has_no_file_of_their_numbers(run_ranks, data, tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    for folder in data.glob("person-*"):
        (images / folder.name).symlink_to(folder)
    run_ranks(1, _finish, settings(images, tmp_path / "run", epochs=1.0), [])
    assert (tmp_path / "run" / "report.html").is_file()
    assert not (tmp_path / "run" / "evaluation.json").exists()


def test_a_report_that_cannot_be_written_is_a_warning(run_ranks, data, tmp_path):
    (said,) = run_ranks(1, _finish, settings(data, tmp_path, epochs=1.0), ["report.html"])
    assert f"megaclass: The report, which megaclass report {tmp_path} can make later, could not be made: " in said
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 3
    assert (tmp_path / "model.safetensors").is_file()


class _LoggedOut(types.ModuleType):
    """The part of wandb that is used, of a user who never logged in."""

    class Error(Exception):
        pass

    def __init__(self):
        super().__init__("wandb")
        self.__spec__ = ModuleSpec("wandb", None, origin="tests")

    def init(self, **options):
        raise self.Error("No API key configured.")


def _train_where_rank_0_has(values, name, module):
    """Every rank's error. module: what an import of this name finds on rank 0; None: nothing."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 0:
                patch.setitem(sys.modules, name, module and module())
            return _train(values)
    except UserError as error:
        # They are where they can still speak with each other.
        dist.barrier()
        return str(error)


@pytest.mark.parametrize(
    ("changes", "name", "module", "error"),
    [
        ({"tensorboard": True}, "tensorboard", None, "train.tensorboard needs tensorboard: pip install"),
        ({"wandb_project": "x"}, "wandb", _LoggedOut, "did not open train.wandb_project=x: No API key configured."),
    ],
    ids=["not installed", "refuses"],
)
def test_a_sink_that_fails_ends_every_rank_with_the_reason_and_leaves_the_folder_free(
    run_ranks, data, tmp_path, changes, name, module, error
):
    own, told = run_ranks(2, _train_where_rank_0_has, settings(data, tmp_path, **changes), name, module)
    assert error in own and told == f"rank 0: {own}"
    RunFolder(tmp_path).check_free()
