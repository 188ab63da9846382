"""Runs on features: training, evaluation, export and plan, on one rank and on two."""

import json

import numpy as np
import pytest
import torch
from tests.forked import megaclass_command, run_forked
from torch.nn.functional import cross_entropy, linear, normalize

import megaclass
from megaclass.backbones import build_backbone
from megaclass.config.read import load_config_values
from megaclass.data.sources.open_source import open_source
from megaclass.errors import CheckpointError, DataError, ExportError
from megaclass.export.run_export import export_model
from megaclass.inference import load
from megaclass.training.model.build import build_model
from megaclass.training.run.run import make_loader
from megaclass.training.step import training_step
from megaclass_launch.errors import ConfigError
from megaclass_launch.ranks.process_group import process_group
from megaclass_launch.world import World

NUM_CLASSES, WIDTH = 24, 16
FAST = ["train.epochs=4", "train.global_batch=32", "export.onnx=false", "train.report_steps=1"]


def drawn(per_class, seed, noise=0.3):
    centres_CW = np.random.default_rng(7).normal(size=(NUM_CLASSES, WIDTH))
    labels_N = np.arange(NUM_CLASSES * per_class) % NUM_CLASSES
    rows_NW = centres_CW[labels_N] + noise * np.random.default_rng(seed).normal(size=(len(labels_N), WIDTH))
    return rows_NW.astype(np.float32), labels_N


@pytest.fixture
def data(tmp_path):
    """train.npy and test.npy."""
    for name, per_class in (("train", 16), ("test", 4)):
        rows, labels = drawn(per_class, seed=per_class)
        np.save(tmp_path / f"{name}.npy", rows)
        np.save(tmp_path / f"{name}.labels.npy", labels)
    return tmp_path


def losses_of(run):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def settings(path, run_dir, *, name="linear", dim=8, **head):
    return {
        "data": {"path": str(path)},
        "backbone": {"name": name, "embedding_dim": dim},
        "head": {"margin": "cosface", "margin_size": 0.1, "scale": 16.0, **head},
        "optimizer": {"lr": 0.1, "clip_norm": 0.0},
        "train": {"run_dir": str(run_dir), "epochs": 2.0, "global_batch": 32, "report_steps": 1},
        "export": {"onnx": False},
    }


@pytest.mark.ranks
@pytest.mark.parametrize("backbone", ["none", "linear", "mlp"])
def test_a_fitted_model_classifies_and_searches(tmp_path, backbone):
    rows, labels = drawn(16, seed=16)
    names = [f"class {label}" for label in labels]
    model = megaclass.fit(rows, names, *FAST, run_dir=tmp_path / "run", backbone=backbone)
    test_rows, test_labels = drawn(4, seed=4)
    found = [one.guesses[0].name for one in model.classify(test_rows, top=2)]
    accuracy = np.mean([name == f"class {label}" for name, label in zip(found, test_labels, strict=True)])
    # Of 24 classes chance gives 4 %. Centres alone need more than these 48 steps.
    assert accuracy > (0.7 if backbone == "none" else 0.95)
    index = model.index(rows)
    assert [one.path for one in index.search(rows[5], k=1)] == ["5"]
    index.save(tmp_path / "index.npy")
    first, again = index.search(rows[5], k=3), model.index(tmp_path / "index.npy").search(rows[5], k=3)
    assert [one.path for one in again] == [one.path for one in first]
    assert [one.similarity for one in again] == pytest.approx([one.similarity for one in first], abs=1e-6)
    assert model.embed(rows[5]).shape == (1, WIDTH if backbone == "none" else 256)
    # One row, as a tensor, is the row of the matrix.
    np.testing.assert_allclose(model.embed(torch.from_numpy(rows[5])), model.embed(rows)[5:6], rtol=1e-5, atol=1e-6)
    assert (tmp_path / "run" / "report.html").is_file()
    with pytest.raises(CheckpointError, match="--overwrite"):
        megaclass.fit(rows, names, *FAST, run_dir=tmp_path / "run", backbone=backbone)


@pytest.mark.ranks
@pytest.mark.parametrize("backbone", ["none", "mlp"])
def test_two_ranks_train_evaluate_and_resume_as_one_does(data, backbone):
    dim = WIDTH if backbone == "none" else 8
    given = [
        *("train", "features", f"data.path={data / 'train.npy'}", f"backbone.name={backbone}"),
        *(f"backbone.embedding_dim={dim}", f'train.evaluate_sets=["{data / "test.npy"}"]', *FAST),
        # A learning rate that does not depend on the number of epochs.
        *("optimizer.power=0", "optimizer.warmup_epochs=0"),
    ]
    for num_ranks in (1, 2):
        run = data / f"run{num_ranks}"
        done = run_forked(megaclass_command, *given, f"train.run_dir={run}", f"train.nproc={num_ranks}")
        assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(losses_of(data / "run2"), losses_of(data / "run1"), rtol=5e-4)
    numbers = json.loads((data / "run2" / "summary.json").read_text())
    assert numbers["classification_top_1"] > 0.75 and numbers["image_size"] == [1, WIDTH]
    # Half of the steps, then the others: the same losses to the bit.
    half = [*given, f"train.run_dir={data / 'half'}", "train.nproc=2"]
    assert run_forked(megaclass_command, *half, "train.epochs=2").returncode == 0
    continued = run_forked(megaclass_command, *half, "--resume")
    assert continued.returncode == 0, continued.stderr
    assert losses_of(data / "half") == losses_of(data / "run2")
    # The command, on two ranks.
    evaluated = run_forked(
        megaclass_command, "evaluate", str(data / "run2"), "--classify", str(data / "test.npy"), "--nproc", "2"
    )
    assert evaluated.returncode == 0 and "top-1 " in evaluated.stdout, evaluated.stderr


@pytest.mark.ranks
def test_the_steps_are_those_of_a_plain_float64_loop(data):
    config = load_config_values(settings(data / "train.npy", data / "run"), where="the test")
    source, device = open_source(data / "train.npy"), torch.device("cpu")
    with process_group(World(), device="cpu"):
        model = build_model(config, source, World(), device)
        model.parallel.train()
        layer = model.backbone.layers[0]
        weights = [
            tensor.detach().double().clone() for tensor in (layer.weight, layer.bias, model.head.store.weight_RD)
        ]
        plain = torch.optim.SGD([w.requires_grad_() for w in weights], lr=0.1, momentum=0.9, weight_decay=5e-4)
        for step, batch in enumerate(make_loader(config, source, World(), device).batches(num_steps=8)):
            loss = float(training_step(model, batch, config, lr=0.1, step=step, device=device).loss)
            embeddings = linear(batch.images.double(), weights[0], weights[1])
            cosines = normalize(embeddings) @ normalize(weights[2]).T
            own = torch.nn.functional.one_hot(batch.labels, NUM_CLASSES)
            wanted = cross_entropy(16.0 * (cosines - 0.1 * own), batch.labels)
            assert loss == pytest.approx(wanted.item(), rel=1e-5)
            plain.zero_grad()
            wanted.backward()
            plain.step()


@pytest.mark.ranks
@pytest.mark.parametrize("backbone", ["none", "mlp"])
def test_exports_give_the_embeddings_of_the_run(data, backbone):
    dim = WIDTH if backbone == "none" else 8
    run = megaclass.train(settings(data / "train.npy", data / "run", name=backbone, dim=dim))
    rows, _ = drawn(4, seed=4)
    wanted = run.model.classify(rows, top=1)
    export_model(run.folder, "safetensors", data / "weights")
    opened = load(data / "weights")
    assert (opened.backbone, opened.image_size) == (backbone, (1, WIDTH))
    np.testing.assert_allclose(opened.embed(rows), run.model.embed(rows), atol=1e-6)
    assert [one.guesses[0].name for one in opened.classify(rows, top=1)] == [one.guesses[0].name for one in wanted]
    assert f"features of {WIDTH} numbers" in (data / "weights" / "README.md").read_text()
    pytest.importorskip("onnxruntime")
    export_model(run.folder, "onnx", data / "onnx")
    np.testing.assert_allclose(load(data / "onnx" / "model.onnx").embed(rows), run.model.embed(rows), atol=1e-5)
    with pytest.raises(ExportError, match=f"InsightFace has no backbone '{backbone}'"):
        export_model(run.folder, "insightface", data / "insightface")


@pytest.mark.ranks
def test_a_damaged_row_ends_the_run_on_both_ranks_with_its_name(data):
    rows = np.load(data / "train.npy")
    rows[100] = np.inf
    np.save(data / "train.npy", rows)
    run = [f"train.run_dir={data / 'run'}", "train.nproc=2", *FAST]
    done = run_forked(megaclass_command, "train", "features", f"data.path={data / 'train.npy'}", *run)
    assert done.returncode == 2
    assert "row 100 of" in done.stderr and "holds NaN or infinity" in done.stderr


@pytest.mark.ranks
def test_sampled_classes_are_moved_to_the_means_of_their_rows(data, caplog):
    given = settings(data / "train.npy", data / "run", sample_rate=0.5)
    given["train"]["evaluate_sets"] = [str(data / "test.npy")]
    run = megaclass.train(given)
    assert run.numbers["classification_top_1"] > 0.9
    events = [json.loads(line) for line in (data / "run" / "events.jsonl").read_text().splitlines()]
    assert not [event for event in events if event["event"] == "warning"]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"backbone": {"name": "iresnet18"}}, "backbone.name is iresnet18, but the data has samples of 16 numbers"),
        ({"backbone": {"name": "none", "embedding_dim": 8}}, "set backbone.embedding_dim=16, or backbone.name=linear"),
        (
            {"distil": {"teacher": "t", "cache": True}},
            "distil.cache is True, but .* or embedded in advance: leave it out",
        ),
        (
            {"data": {"augment": "blur"}},
            "data.augment is blur, but .* not decoded, resized, augmented or embedded in advance",
        ),
        ({"data": {"size": 32}}, "data.size is 32, but"),
        ({"data": {"workers": 2}}, "data.workers is 2, but"),
    ],
)
def test_settings_that_features_do_not_have_are_refused(data, changed, says):
    given = settings(data / "train.npy", data / "run")
    for section, values in changed.items():
        given[section] = given.get(section, {}) | values
    with pytest.raises(ConfigError, match=says):
        megaclass.train(given)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("setting", "purpose"),
    [({"data": {"order": "classes"}}, "data.order=classes"), ({"train": {"mean_weight": 1.0}}, "train.mean_weight")],
)
def test_what_needs_one_label_per_row_says_so(data, setting, purpose):
    labels = np.load(data / "train.labels.npy")
    np.save(data / "train.labels.npy", np.stack([labels, np.full_like(labels, -1)], axis=1))
    given = settings(data / "train.npy", data / "run")
    for section, values in setting.items():
        given[section] |= values
    with pytest.raises(DataError, match=f"{purpose} needs one label per sample"):
        megaclass.train(given)


def test_images_need_a_backbone_for_images():
    with pytest.raises(ConfigError, match=r"backbone\.name is mlp, but the data has samples of 112 × 112"):
        build_backbone("mlp", embedding_dim=8, image_size=112)


def test_fit_says_what_is_missing(tmp_path):
    with pytest.raises(DataError, match="features without labels"):
        megaclass.fit(np.zeros((4, 3)))
    with pytest.raises(DataError, match="its labels are in the file"):
        megaclass.fit(tmp_path / "x.npy", [1, 2])
    with pytest.raises(DataError, match=r"There is no file .*x\.npy"):
        megaclass.fit(tmp_path / "x.npy")
    with pytest.raises(DataError, match="Cannot read features of list"):
        megaclass.fit(["a", "b"], [0, 1], run_dir=tmp_path / "run")


@pytest.mark.parametrize("backbone", ["none", "mlp"])
def test_a_plan_is_made_without_training(data, capsys, backbone):
    from megaclass.cli.main import main

    dim = WIDTH if backbone == "none" else 8
    given = [f"data.path={data / 'train.npy'}", f"backbone.name={backbone}", f"backbone.embedding_dim={dim}"]
    assert main(["plan", "features", *given, "-np", "2", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"]


def test_the_recipe_is_chosen_for_a_file_of_features(data, capsys):
    from megaclass.cli.main import main

    assert main(["train", str(data / "train.npy"), "--show-config"]) == 0
    assert 'name = "linear"' in capsys.readouterr().out
