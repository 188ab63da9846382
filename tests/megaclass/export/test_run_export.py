"""What `megaclass export` publishes: whole folders that give the checkpoint's embeddings, or nothing."""

import json
from pathlib import Path

import pytest
import torch

from megaclass.backbones import build_backbone
from megaclass.errors import DataError, ExportError
from megaclass.evaluation.centres import read_run_centres
from megaclass.evaluation.protocol import SetResult
from megaclass.evaluation.results import write_results
from megaclass.export.run_export import export_model
from megaclass.export.safetensors_file import load_centres
from megaclass.inference import ImageTreatment, load
from megaclass_launch.errors import UserError
from megaclass_launch.files import published_folder


def test_safetensors_come_with_config_card_and_centres_by_name(make_run, tmp_path):
    run = make_run("slim")
    numbers = {"accuracy": 0.9983, "accuracy_std": 0.0021, "threshold": 1.2, "fold_accuracies": [0.9983]}
    numbers |= {"num_pairs": 6000, "num_same": 3000, "auc": 0.999, "eer": 0.002, "tar_at_far": {"1e-3": 0.998}}
    seen = {"images": 12, "found": 9, "looked_at": 1234, "training_images": 1234, "is_held_out": False}
    results = [
        SetResult(name="lfw", kind="pairs", path="lfw.bin", numbers=numbers),
        SetResult(
            name="own", kind="pairs", path="own.bin", numbers={**numbers, "training_data": seen, "mirror": False}
        ),
    ]
    write_results(run, {}, results)
    out = export_model(run, "safetensors", tmp_path / "out", licence="CC-BY-4.0")
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md",
        "centres.safetensors",
        "config.json",
        "model.safetensors",
    ]
    config = json.loads((out / "config.json").read_text())
    assert (config["backbone"], config["embedding_dim"], config["image_size"]) == ("slim", 16, 32)
    card = (out / "README.md").read_text()
    for part in (
        "CC-BY-4.0",
        "| lfw | 10 folds, both flips | 99.83 % ± 0.21 |",
        "\n\n- own: Without the embeddings of mirrored images.\n",
        "- own: WARNING: 9 of its 12 images are in the training data",
        "1,234 images",
        "ab12cd",
        "megaclass.load",
    ):
        assert part in card
    model = load(out / "model.safetensors")
    assert (model.backbone, model.embedding_dim, model.image_size) == ("slim", 16, 32)
    centres = load_centres(out / "centres.safetensors")
    assert list(centres) == ["anna", "bert", "zoë"]
    assert torch.equal(centres["zoë"][0], read_run_centres(run).all_rows()[2])


def test_insightface_gets_the_state_dict_it_loads(make_run, tmp_path):
    run = make_run("iresnet18")
    out = export_model(run, "insightface", tmp_path / "out")
    state = torch.load(out / "backbone.pth", weights_only=True)
    build_backbone("iresnet18", embedding_dim=16, image_size=32).load_state_dict(state, strict=True)
    assert "layer1.0.downsample.0.weight" in state
    assert 'get_model("r18", num_features=16)' in (out / "README.md").read_text()


@pytest.mark.parametrize("form", ["safetensors", pytest.param("onnx", marks=pytest.mark.ranks)])
def test_a_model_of_rectangles_carries_its_size_and_how_images_are_treated(make_run, tmp_path, form):
    if form == "onnx":
        onnxruntime = pytest.importorskip("onnxruntime", reason="the extra megaclass[onnx] is not installed")
    settings = '[data]\nsize = [32, 48]\nfit = "crop"\nmirror = false\n'
    run = make_run("slim", size=(32, 48), settings=settings)
    out = export_model(run, form, tmp_path / "out")
    for model in (load(run), load(out / f"model.{form}")):
        assert (model.image_size, model.embedding_dim) == ((32, 48), 16)
        assert model.treatment == ImageTreatment(fit="crop", mirror=False)
    assert json.loads((out / "config.json").read_text())["image_size"] == [32, 48]
    assert "48 × 32 (width × height) pixels" in (out / "README.md").read_text()
    if form == "onnx":
        session = onnxruntime.InferenceSession(str(out / "model.onnx"), providers=["CPUExecutionProvider"])
        for num_images in (1, 3):
            images = torch.rand(num_images, 3, 32, 48) * 2 - 1
            (got,) = session.run(["embedding"], {"input": images.numpy()})
            with torch.no_grad():
                want = load(run).network.eval()(images)
            torch.testing.assert_close(torch.from_numpy(got), want, rtol=1e-3, atol=1e-4 * float(want.abs().max()))


def test_weights_of_rectangles_without_their_size_are_not_exported(make_run, tmp_path):
    run = make_run("iresnet18", size=(32, 48), settings="[data]\nsize = [32, 48]\n")
    with pytest.raises(ExportError, match="they do not tell the size of its images"):
        export_model(run, "insightface", tmp_path / "out")


def test_an_export_can_be_exported_again_in_another_form(make_run, tmp_path):
    first = export_model(make_run(), "safetensors", tmp_path / "first")
    second = export_model(first / "model.safetensors", "insightface", tmp_path / "second")
    one, two = load(first / "model.safetensors").network, load(second / "backbone.pth").network
    assert all(torch.equal(two.state_dict()[name], tensor) for name, tensor in one.state_dict().items())


def _spoilt_save(monkeypatch):
    """Stands for a disk or a library that writes something else than it was given."""
    save = torch.save

    def spoil(state, file):
        save({name: tensor * 1.01 if tensor.ndim == 4 else tensor for name, tensor in state.items()}, file)

    monkeypatch.setattr(torch, "save", spoil)


def test_an_export_that_gives_other_embeddings_is_refused_and_leaves_nothing(make_run, tmp_path, monkeypatch):
    run, out = make_run(), tmp_path / "out"
    before = sorted(path.name for path in tmp_path.iterdir())
    _spoilt_save(monkeypatch)
    with pytest.raises(ExportError, match=r"Not written: .*out/backbone\.pth\. .* differ from the backbone's"):
        export_model(run, "insightface", out)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_failed_export_leaves_the_one_of_before(make_run, tmp_path, monkeypatch):
    run, out = make_run(), tmp_path / "out"
    export_model(run, "insightface", out)
    content = (out / "backbone.pth").read_bytes()
    _spoilt_save(monkeypatch)
    with pytest.raises(ExportError):
        export_model(run, "insightface", out)
    assert (out / "backbone.pth").read_bytes() == content
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out"}


def test_an_export_replaces_the_one_of_before_as_a_whole(make_run, tmp_path):
    run, out = make_run("slim"), tmp_path / "out"
    export_model(run, "safetensors", out)
    (out / "README.md").unlink()
    before = (out / "model.safetensors").stat().st_ino
    export_model(run, "safetensors", out)
    assert (out / "README.md").is_file() and (out / "model.safetensors").stat().st_ino != before
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out"}


def test_a_folder_that_holds_something_else_is_left_alone(make_run, tmp_path, monkeypatch):
    run, out = make_run(), tmp_path / "out"
    export_model(run, "insightface", out)
    with pytest.raises(ExportError, match=r"holds backbone\.pth, which does not belong to an export to safetensors"):
        export_model(run, "safetensors", out)
    before = sorted(path.name for path in run.iterdir())
    monkeypatch.chdir(run)
    with pytest.raises(ExportError, match="name another folder with --out"):
        export_model(run, "safetensors", Path())
    assert sorted(path.name for path in run.iterdir()) == before


def test_a_backbone_insightface_does_not_have_is_refused(make_run, tmp_path):
    with pytest.raises(ExportError, match="InsightFace has no backbone 'slim'"):
        export_model(make_run("slim"), "insightface", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_whose_filling_fails_never_appears(tmp_path):
    with pytest.raises(RuntimeError, match="inside"), published_folder(tmp_path / "out") as unfinished:
        (unfinished / "half").write_text("half")
        raise RuntimeError("inside")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").write_text("a file")
    with pytest.raises(UserError, match="a file with that name exists"), published_folder(tmp_path / "out"):
        pass


def test_what_holds_no_centres_is_named(tmp_path):
    (tmp_path / "centres.safetensors").write_bytes(b"junk")
    with pytest.raises(DataError, match=r"Cannot read .*centres\.safetensors as class centres"):
        load_centres(tmp_path / "centres.safetensors")
