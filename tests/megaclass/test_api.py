"""`megaclass.train` and `megaclass.evaluate` from Python: what they take, return and leave behind."""

import json
import os
import signal
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.forked import Forked, ended_ranks, run_forked, torchrun

import megaclass
from megaclass.api import _saved_optimizer, resolve_recipe
from megaclass.cli.main import main
from megaclass.config.read import load_config, overrides_of
from megaclass.errors import HeadError
from megaclass.training.choose_recipe import choose_recipe
from megaclass.training.start.restart import StartMode
from megaclass_launch.errors import ConfigError, UserError

TINY: dict[str, Any] = {
    "synth": {"identities": 12, "images_per_identity": 8, "size": 32, "pairs": 40},
    "embedding_size": 16,
    "batch_size": 16,
    "report_steps": 2,
    "nproc": 1,
    "warmup": 0,
    "export": {"onnx": False},
}


def draw(root: Path, num_classes: int, images_per_class: int, size: tuple[int, int] = (32, 32)) -> None:
    for label in range(num_classes):
        (root / f"person{label}").mkdir(parents=True)
        for number in range(images_per_class):
            pixels = np.random.default_rng([label, number]).integers(0, 255, (*size, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(root / f"person{label}" / f"{number}.png")


# ---- settings as keywords ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "override"),
    [
        ("epochs", 5, "train.epochs=5"),
        ("batch_size", 64, "train.global_batch=64"),
        ("gpus", 2, "train.nproc=2"),
        ("margin", "cosface", 'head.margin="cosface"'),
        ("step_epochs", [8, 14], "optimizer.step_epochs=[8, 14]"),
        ("run_dir", Path("runs/a"), 'train.run_dir="runs/a"'),
        ("head", {"scale": 32.0}, "head.scale=32.0"),
        ("onnx", False, "export.onnx=false"),
    ],
)
def test_a_keyword_is_a_setting_by_its_own_name_by_another_program_s_or_a_section(name, value, override):
    assert list(overrides_of(name, value)) == [override]
    assert load_config(Path("demo"), [override])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("momentum", 0.5, "momentum may be head.momentum or optimizer.momentum: write head={'momentum': …}."),
        ("epoch", 3, "There is no setting 'epoch'; did you mean epochs?"),
        ("qqq", 3, "There is no setting 'qqq'; megaclass train demo --show-config lists all."),
        ("epochs", {"a": 1}, "epochs is given as {'a': 1}, but sections are data, train, synth, backbone, "
         "head, optimizer, distil, export."),
    ],
)  # fmt: skip
def test_a_keyword_that_is_no_setting_or_several_is_refused(name, value, message):
    with pytest.raises(ConfigError) as caught:
        list(overrides_of(name, value))
    assert str(caught.value) == message


def test_without_recipe_and_data_both_ways_in_are_named():
    with pytest.raises(
        UserError, match=r"neither a recipe nor data: give the name of a recipe .* megaclass train photos/"
    ):
        megaclass.train(margin="cosface")


def test_dir_shows_the_public_names_and_nothing_else():
    names = dir(megaclass)
    assert names == sorted(set(megaclass.__all__)) and {"train", "evaluate", "load", "PartialFC"} <= set(names)
    assert all(getattr(megaclass, name) is not None for name in names)


@pytest.mark.parametrize("given", [{"num_classes": 40.0}, {"embedding_dim": 16.0}, {"num_classes": "40"}])
def test_a_number_of_classes_that_is_not_whole_is_refused_with_the_number_to_write(given):
    with pytest.raises(HeadError, match=r"is (40\.0|16\.0); it must be a whole number; write (40|16)|is '40'; it must"):
        megaclass.PartialFC(**{"embedding_dim": 16, "num_classes": 40, **given})
    assert megaclass.PartialFC(16, np.int64(40)).num_classes == 40


# ---- a folder as the only argument ----------------------------------------------------------------------------------


def test_a_folder_chooses_a_recipe_by_its_size_and_says_which(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    draw(Path("photos"), 5, 6)
    chosen = choose_recipe("photos")
    assert chosen.path.stem == "own-cpu"
    assert chosen.overrides == ["data.path=photos", "train.run_dir=runs/photos", "train.global_batch=8"]
    assert (
        "30 images of 5 classes, 32 × 32, and this machine has no GPU: training with the recipe own-cpu"
        in chosen.reason
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    chosen = choose_recipe("photos")
    assert chosen.path.stem == "own-small" and chosen.overrides[2:] == ["data.size=32", "train.global_batch=8"]
    draw(Path("wide"), 3, 3, (48, 32))
    assert choose_recipe("wide").overrides[2:] == ["train.global_batch=8"]  # the recipe's size: 112, with black borders
    for path in ("photos", "wide"):
        assert main(["train", path, "optimizer.lr=0.05", "--show-config"]) == 0
        assert "lr = 0.05" in capsys.readouterr().out


def test_large_data_on_several_gpus_gets_the_large_recipe_and_a_tenth_of_the_classes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    chosen = choose_recipe("synthetic:600000")
    assert chosen.path.stem == "own-large"
    assert chosen.overrides[2:] == ["data.size=112", "train.global_batch=512", "train.nproc=4", "head.sample_rate=0.1"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert choose_recipe("synthetic:600000").overrides[3:5] == ["train.global_batch=1024", "train.nproc=8"]


@pytest.mark.ranks
def test_a_folder_is_trained_and_resumed_with_the_settings_it_began_with(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    draw(Path("photos"), 5, 6)
    assert main(["train", "photos", "train.epochs=1", "export.onnx=false"]) == 0
    assert "training with the recipe own-cpu" in capsys.readouterr().err
    draw(Path("photos/more"), 0, 0)
    assert main(["train", "photos", "--resume", "train.epochs=2", "export.onnx=false"]) == 0
    said = capsys.readouterr().err
    assert "resuming from runs/photos/checkpoints" in said and "the recipe own-cpu" not in said
    assert main(["train", "runs/photos"]) == 2
    assert "To continue it: megaclass train runs/photos --resume" in capsys.readouterr().err
    assert main(["train", "runs/photos", "--resume", "train.epochs=3", "export.onnx=false"]) == 0
    assert json.loads(Path("runs/photos/summary.json").read_text())["steps"] == 3 * 3


def test_what_is_continued_is_the_folder_that_is_named_with_the_data_that_is_named(tmp_path, monkeypatch):
    """Both may have been moved or copied since."""
    monkeypatch.chdir(tmp_path)
    mode = StartMode(resume="auto")
    draw(Path("disk/photos"), 5, 6)
    Path("runs/photos").mkdir(parents=True)
    began = '[data]\npath = "gone/photos"\n[train]\nrun_dir = "runs/first"\nepochs = 7.0\n'
    Path("runs/photos/config.toml").write_text(began)
    config = load_config(*resolve_recipe("disk/photos", [], mode))
    assert (config.data.path, config.train.run_dir, config.train.epochs) == ("disk/photos", "runs/photos", 7.0)
    config = load_config(*resolve_recipe("runs/photos", [], mode))
    assert (config.data.path, config.train.run_dir) == ("gone/photos", "runs/photos")
    config = load_config(*resolve_recipe("runs/photos", ["data.path=new", "train.run_dir=other"], mode))
    assert (config.data.path, config.train.run_dir) == ("new", "other")
    # Data and run in the home folder, from a shell that leaves the ~ as it is.
    monkeypatch.setenv("HOME", str(tmp_path))
    given = ["data.path=~/disk/photos", "train.run_dir=~/runs/photos"]
    config = load_config(*resolve_recipe(None, given, mode))
    assert (config.data.path, config.train.epochs) == (str(tmp_path / "disk/photos"), 7.0)
    assert load_config(*resolve_recipe(None, given, StartMode())).train.epochs != 7.0


def test_the_optimizer_of_the_centres_stays_that_of_the_run_unless_it_is_chosen(tmp_path):
    """What auto means has changed since 0.1.0."""
    (tmp_path / "config.toml").write_text('[head]\noptimizer = "sgd"\n')
    given = ["head.sample_rate=0.1", f"train.run_dir={tmp_path}"]
    for more, optimizer in (([], "sgd"), (["head.optimizer=auto"], "sgd"), (["head.optimizer=adamw"], "")):
        overrides = [*given, *more]
        assert _saved_optimizer(Path("demo"), overrides, load_config(Path("demo"), overrides)) == optimizer


# ---- the run that is returned -----------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_a_run_has_numbers_metrics_model_and_report_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows: list[dict[str, Any]] = []
    run = megaclass.train("demo", epochs=2, callbacks=[rows.append], **TINY)
    assert run.is_finished and run.numbers["steps"] == 12
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10, 12] == [row["step"] for row in run.metrics]
    assert [row["loss"] for row in rows] == [row["loss"] for row in run.metrics]
    assert run.report.is_file() and run.model.embedding_dim == 16
    assert repr(run) == (
        f"TrainedRun(runs/demo: 12 steps, loss {run.numbers['final_loss']:.3f}, "
        f"accuracy {run.numbers['verification_accuracy']:.1%})"
    )
    assert repr(run.model) == "LoadedModel(demo: slim, images of 32 × 32, 16 numbers, on cpu)"

    # The same numbers as at the end of the run, by the folder and by the model.
    of_run = megaclass.evaluate(run, "datasets/demo/verification.bin")
    of_model = megaclass.evaluate(run.model, ["datasets/demo/verification.bin"])
    assert of_run.numbers["verification"]["accuracy"] == run.numbers["verification_accuracy"]
    assert of_model.numbers["verification"] == of_run.numbers["verification"]
    assert repr(of_run).startswith("Evaluation(verification: ") and "\n" not in repr(of_run)

    # A callback ends the continued run after its first report, with all its results.
    seen = []
    again = run.resume(epochs=9, callbacks=[lambda row: seen.append(row["step"]) or True])
    assert seen == [14] and again.is_finished and again.numbers["steps"] == 14
    with pytest.raises(UserError, match="already holds a run"):
        megaclass.train("demo", **TINY)
    with pytest.raises(UserError, match="Nothing to evaluate on"):
        megaclass.evaluate(run)


@pytest.mark.ranks
def test_a_run_ends_when_its_evaluations_bring_no_better_accuracy(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # So slow that nothing is learned, and accuracies are those of chance.
    run = megaclass.train("demo", lr=1e-9, epochs=200, evaluate_epochs=0.5, patience=2, **TINY)
    found = [row["verification_accuracy"] for row in run.metrics if "verification_accuracy" in row]
    late = [len(part) - 1 - part.index(max(part)) for part in (found[:num] for num in range(1, len(found) + 1))]
    assert late[-1] == 2 and max(late[:-1]) < 2
    assert run.is_finished and run.numbers["steps"] == 3 * len(found) < 200 * 6
    assert "the last 2 evaluations brought no better accuracy than" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"train\.patience is 2; it must be 0 if train\.evaluate_epochs is 0"):
        megaclass.train("demo", patience=2)


@pytest.mark.ranks
def test_a_run_that_only_classifies_ends_by_that_accuracy(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    draw(Path("photos"), 6, 6)
    draw(Path("others"), 6, 3)
    settings = {"lr": 1e-9, "epochs": 200, "evaluate_epochs": 0.5, "patience": 2, "evaluate_sets": ["others"]}
    small = {name: value for name, value in TINY.items() if name != "synth"}
    run = megaclass.train("photos", data={"path": "photos", "size": 32}, head={"sample_rate": 0.5}, **settings, **small)
    found = [row["classification_top_1"] for row in run.metrics if "classification_top_1" in row]
    assert len(found) - 1 - found.index(max(found)) == 2 and len(found) < 400
    # With the centres as they were saved, which have moved to the means of their classes after the last evaluation.
    of_saved = megaclass.evaluate(run, classify="others").numbers["others-classes"]["top_k"]["1"]
    assert run.numbers["classification_top_1"] == of_saved != found[-1]
    assert "the last 2 evaluations brought no better accuracy than" in capsys.readouterr().err


@pytest.mark.ranks
def test_settings_may_be_a_config_and_a_run_may_have_a_warm_up_that_is_too_long(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    overrides = [one for name, value in TINY.items() for one in overrides_of(name, value)]
    config = load_config(Path("demo"), [*overrides, "train.epochs=1", "optimizer.warmup_epochs=50"])
    assert megaclass.train(config).numbers["steps"] == 6
    with pytest.raises(ConfigError, match=r"the settings: unknown setting train\.epoch; did you mean train\.epochs\?"):
        megaclass.train({"data": {"path": "photos"}, "train": {"run_dir": "a", "epoch": 3}})
    said = capsys.readouterr().err
    assert (
        "optimizer.warmup_epochs is 50, and the run has 1 epochs: the learning rate rises until the last step" in said
    )


_TWO = """
import megaclass
settings = dict(synth={"identities": 12, "images_per_identity": 8, "size": 32, "pairs": 40}, embedding_size=16,
    batch_size=16, report_steps=2, warmup=0, export={"onnx": False})
rows = []
run = megaclass.train("demo", nproc=2, epochs=200, callbacks=[rows.append, lambda row: row["step"] >= 4], **settings)
assert run.is_finished and run.numbers["world_size"] == 2, run
results = []
found = megaclass.evaluate(run, "datasets/demo/verification.bin", nproc=2, on_result=results.append)
assert results == found.results and len(results) == 1
assert found.numbers["verification"]["accuracy"] == run.numbers["verification_accuracy"], found
steps = [row["step"] for row in rows]
assert steps == [row["step"] for row in run.metrics] and steps[-1] < 200, steps
try:
    megaclass.train("demo", nproc=2, overwrite=True, callbacks=[lambda row: 1 / 0], **settings)
except ZeroDivisionError:
    print("the error of the callback is raised here")
try:
    megaclass.train("demo", nproc=2, overwrite=True, resume=False, kernel="triton_fused", **settings)
except megaclass.UserError as error:
    print(error)
"""


@pytest.mark.ranks
def test_several_processes_are_started_and_a_callback_here_sees_their_rows_and_ends_them(tmp_path):
    done = run_forked(_script, _TWO, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the error of the callback is raised here" in done.stdout
    assert "The run in runs/demo has failed with exit code 2: its error is printed above." in done.stdout
    assert "kernel='triton_fused' cannot run here" in done.stderr


def _script(text: str) -> None:
    exec(text, {"__name__": "__main__"})


_ENDLESS = """
import megaclass, sys
run = megaclass.train("demo", nproc=2, epochs=3000, report_steps=2, overwrite=True, synth={"identities": 12,
    "images_per_identity": 8, "size": 32, "pairs": 40}, embedding_size=16, batch_size=16, export={"onnx": False})
print(run)
"""


@pytest.mark.ranks
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_an_interrupted_cell_saves_returns_the_run_and_leaves_no_process(tmp_path):
    with Forked(_script, _ENDLESS, cwd=tmp_path) as process:
        metrics = tmp_path / "runs" / "demo" / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
            assert process.wait(0.1) is None, process.stderr
        os.kill(process.pid, signal.SIGINT)
        assert process.wait() == 0, process.stderr
    assert "interrupted after step" in process.stdout and "resume() continues it)" in process.stdout
    # Their working folder is this test's own.
    left = [place for place in Path("/proc").glob("[0-9]*") if _folder_of(place) == str(tmp_path)]
    assert left == []


def _folder_of(process: Path) -> str:
    try:
        return str((process / "cwd").readlink())
    except OSError:
        return ""


@pytest.mark.ranks
def test_under_a_launcher_every_process_is_one_rank_of_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = _ENDLESS.replace("epochs=3000", "epochs=1").replace("print(run)", "print(run.numbers.get('world_size'))")
    ranks = ended_ranks(2, _script, script)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks
    # The results are the work of rank 0, for which the other rank waits.
    assert [rank.stdout.splitlines()[-1] for rank in ranks] == ["2", "2"]


@pytest.mark.ranks
def test_one_script_under_torchrun_may_train_twice(tmp_path):
    """torchrun's store keeps the addresses of the first group, at which nobody answers any more."""
    script = _ENDLESS.replace("epochs=3000", "epochs=1").replace("print(run)", "print(run.resume(epochs=2))")
    done = torchrun(2, _script, script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("TrainedRun(runs/demo: 12 steps") == 2, "each rank sees the results of both trainings"


def test_an_unfinished_run_says_in_one_line_what_is_the_matter(tmp_path):
    rows = [{"step": 2, "loss": 1.0}, {"step": 1500, "loss": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for code, text in (
        (130, "interrupted after step 1,500; resume() continues it"),
        (0, "not finished, last row of step 1,500"),
    ):
        run = megaclass.TrainedRun(tmp_path, code)
        assert not run.is_finished and run.numbers == {} and text in repr(run) and "\n" not in repr(run)


def test_a_loaded_model_goes_through_torch_export(tmp_path, monkeypatch):
    from safetensors.torch import save_file

    from megaclass.backbones import build_backbone

    torch.manual_seed(0)
    network = build_backbone("iresnet18", embedding_dim=16, image_size=32)
    save_file(network.state_dict(), tmp_path / "net.safetensors")
    model = megaclass.load(tmp_path / "net.safetensors")
    images = torch.rand(3, 3, 32, 32) * 2 - 1
    program = torch.export.export(model.network, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    for batch in (images, images[:2]):
        torch.testing.assert_close(program.module()(batch), model(batch), rtol=0, atol=1e-5)


def test_a_tar_of_a_folder_in_place_of_a_recipe_gets_the_command_that_unpacks_it(tmp_path, capsys):
    (tmp_path / "photos" / "anna").mkdir(parents=True)
    Image.new("RGB", (32, 32)).save(tmp_path / "photos" / "anna" / "1.jpg")
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        tar.add(tmp_path / "photos", "photos")
    assert main(["train", str(tmp_path / "photos.tar")]) == 2
    assert f"extract it (tar -xf {tmp_path / 'photos.tar'}) and name the folder" in capsys.readouterr().err
