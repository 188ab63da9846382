"""Training with a teacher: the loss in float64, the same on one rank and two, with and without stored embeddings."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from tests.commands import ended_in_this_process

import megaclass
from megaclass.backbones import build_backbone
from megaclass.config.schema import DistilConfig
from megaclass.errors import CheckpointError
from megaclass.inference import load
from megaclass.training.model.distil import Distiller
from megaclass.training.model.precision import Precision
from megaclass_launch.errors import ConfigError

FLOAT32 = Precision(torch.float32)


@pytest.fixture
def photos(tmp_path):
    for label in range(4):
        (tmp_path / f"photos/{label}").mkdir(parents=True)
        base = np.random.default_rng(label).integers(0, 255, (4, 4, 3))
        for number in range(6):
            noise = np.random.default_rng([label, number]).integers(-40, 40, (32, 32, 3))
            pixels = (np.kron(base, np.ones((8, 8, 1))) + noise).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / f"photos/{label}/{number}.png")
    (tmp_path / "recipe.toml").write_text("")
    return tmp_path / "photos"


def train(photos, run, *more):
    settings = [
        f"data.path={photos}",
        f"train.run_dir={run}",
        "train.nproc=1",
        "train.global_batch=8",
        "train.device=cpu",
    ]
    settings += ["train.precision=float32", "train.epochs=4", "backbone.name=slim", "backbone.embedding_dim=16"]
    settings += ["export.onnx=false", *more]
    ended = ended_in_this_process(["train", str(photos.parent / "recipe.toml"), *settings])
    assert ended.returncode == 0, ended.stderr
    return run


def likeness(photos, one, other):
    """Mean cosine between the embeddings of two runs."""
    images = sorted(photos.rglob("*.png"))
    rows = [megaclass.load(run, device="cpu").embed(images, fit="squash") for run in (one, other)]
    first, second = (row / np.linalg.norm(row, axis=1, keepdims=True) for row in rows)
    return float((first * second).sum(1).mean())


@pytest.fixture
def teacher(tmp_path):
    from megaclass.export.safetensors_file import save_model

    torch.manual_seed(3)
    backbone = build_backbone("slim", embedding_dim=16, image_size=48)
    backbone(torch.rand(8, 3, 48, 48) * 2 - 1)
    facts = {"backbone": "slim", "embedding_dim": "16", "image_size": "48"}
    save_model(tmp_path / "teacher.safetensors", backbone, metadata=facts)
    return tmp_path / "teacher.safetensors"


def test_the_loss_is_that_of_float64(teacher):
    torch.manual_seed(0)
    model = load(teacher, device="cpu")
    inputs, embeddings = torch.rand(6, 3, 48, 48) * 2 - 1, torch.randn(6, 16, requires_grad=True)
    with torch.no_grad():
        want = model.network(inputs).double().numpy()
    have = embeddings.detach().double().numpy()
    want, have = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (want, have))
    cosine, relations = np.mean(1 - (want * have).sum(1)), np.mean((have @ have.T - want @ want.T) ** 2)
    for weights in ((3.0, 0.0), (0.0, 2.0), (1.5, 0.5)):
        settings = DistilConfig(teacher="t", cosine=weights[0], relations=weights[1])
        loss = Distiller(settings, model, 16, FLOAT32).loss((inputs,), np.arange(6), embeddings, 6)
        assert loss.item() == pytest.approx(weights[0] * cosine + weights[1] * relations, rel=1e-5)
        (gradient,) = torch.autograd.grad(loss, embeddings)
        assert gradient.abs().max() > 0
    settings = DistilConfig(teacher="t", cosine=1.0)
    parts = [Distiller(settings, model, 16, FLOAT32).loss((inputs[at],), np.arange(6)[at], embeddings[at], 6).item()
             for at in (slice(0, 2), slice(2, 6))]  # fmt: skip
    assert sum(parts) == pytest.approx(cosine, rel=1e-5)
    assert not any(parameter.requires_grad for parameter in model.network.parameters())


def test_a_teacher_of_another_embedding_size_needs_relations_alone(teacher):
    model = load(teacher, device="cpu")
    with pytest.raises(ConfigError, match=r"gives 16 numbers per embedding, and backbone\.embedding_dim is 8"):
        Distiller(DistilConfig(teacher="t"), model, 8, FLOAT32)
    Distiller(DistilConfig(teacher="t", cosine=0.0, relations=1.0), model, 8, FLOAT32)
    with pytest.raises(ConfigError, match=r"distil\.cosine is 0\.0; it must be above 0 if distil\.relations is 0"):
        DistilConfig(teacher="t", cosine=0.0)


@pytest.mark.ranks
def test_students_become_like_their_teacher_with_and_without_stored_embeddings(tmp_path, photos, teacher):
    """At another image size than the teacher's."""
    alone = train(photos, tmp_path / "alone", "train.epochs=12")
    given = [f"distil.teacher={teacher}", "distil.cosine=100", "train.epochs=12"]
    live = train(photos, tmp_path / "live", *given)
    stored = train(photos, tmp_path / "stored", *given, "distil.cache=true")
    without, by_live, by_stored = (likeness(photos, run, teacher) for run in (alone, live, stored))
    assert min(by_live, by_stored) > max(0.6, without + 0.3), (without, by_live, by_stored)
    rows = np.load(stored / "teacher.npy")
    want = megaclass.load(teacher, device="cpu").embed(sorted(photos.rglob("*.png")), fit="squash")
    assert (rows.astype(np.float64) * want).sum(1) / np.linalg.norm(want, axis=1) == pytest.approx(1, abs=1e-3)
    related = train(photos, tmp_path / "related", *given[:1], "distil.cosine=0", "distil.relations=20",
                    "backbone.embedding_dim=8")  # fmt: skip
    assert megaclass.load(related, device="cpu").embedding_dim == 8


@pytest.mark.ranks
def test_stored_embeddings_are_used_again_when_resuming_unless_the_teacher_changes(tmp_path, photos, teacher):
    given = [f"distil.teacher={teacher}", "distil.cache=true"]
    run = train(photos, tmp_path / "run", *given, "train.epochs=1")
    made = (run / "teacher.npy").stat().st_mtime_ns
    train(photos, run, *given, "train.epochs=2", "--resume")
    assert (run / "teacher.npy").stat().st_mtime_ns == made
    stamp = json.loads((run / "teacher.json").read_text())
    (run / "teacher.json").write_text(json.dumps(stamp | {"teacher": "another"}) + "\n")
    train(photos, run, *given, "train.epochs=3", "--resume")
    assert (run / "teacher.npy").stat().st_mtime_ns != made
    assert json.loads((run / "teacher.json").read_text()) == stamp
    (run / "teacher.npy").unlink()
    train(photos, run, *given, "train.epochs=4", "--resume")
    made = (run / "teacher.npy").stat().st_mtime_ns
    train(photos, run, *given, "data.fit=pad", "train.epochs=1", "--overwrite")
    assert (run / "teacher.npy").stat().st_mtime_ns != made


@pytest.mark.ranks
@pytest.mark.parametrize("cache", ["true", "false"])
def test_two_ranks_learn_what_one_learns(tmp_path, photos, teacher, cache):
    given = [f"distil.teacher={teacher}", f"distil.cache={cache}", "backbone.batch_norm=sync", "train.epochs=2"]
    given += ["optimizer.schedule=cosine"]
    one = train(photos, tmp_path / "one", *given)
    two = train(photos, tmp_path / "two", *given, "train.nproc=2")
    first, second = (megaclass.load(run, device="cpu").network.state_dict() for run in (one, two))
    for name, weight in first.items():
        assert torch.allclose(weight.float(), second[name].float(), atol=2e-4, rtol=1e-3), name


@pytest.mark.ranks
def test_a_teacher_that_is_not_there_is_named_before_training(tmp_path, photos):
    with pytest.raises(CheckpointError, match=r"There is no model at nowhere\.onnx"):
        load("nowhere.onnx", device="cpu")
    ended = ended_in_this_process(
        ["train", str(tmp_path / "recipe.toml"), f"data.path={photos}", f"train.run_dir={tmp_path / 'run'}",
         "backbone.name=slim", "train.global_batch=8", "distil.teacher=nowhere.onnx", "train.nproc=1"]
    )  # fmt: skip
    assert ended.returncode == 2 and "There is no model at nowhere.onnx" in ended.stderr
