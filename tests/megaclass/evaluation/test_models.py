"""One model in every form it may come in: the same numbers from each."""

import io
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import megaclass
from megaclass.cli.main import main
from megaclass.errors import CheckpointError, DataError
from megaclass.evaluation.protocol import Evaluator
from megaclass.evaluation.sets import evaluate_sets, find_sets
from megaclass.export.run_export import export_model
from megaclass.inference import load
from megaclass_launch.errors import UserError

# InsightFace has no slim backbone, and a MobileFaceNet takes ONNX's exporter long.
FORMS = {
    "mbf": {"safetensors": "model.safetensors", "insightface": "backbone.pth"},
    "slim": {"safetensors": "model.safetensors", "onnx": "model.onnx"},
}


@pytest.mark.ranks
@pytest.mark.parametrize("backbone", FORMS)
def test_the_same_numbers_come_from_each_form(make_run, tmp_path, pairs_bin, backbone):
    pytest.importorskip("onnxruntime", reason="the extra megaclass[onnx] is not installed")
    run, numbers = make_run("faces", backbone=backbone), {}
    assert main(["evaluate", str(run), "--on", str(pairs_bin()), "--device", "cpu"]) == 0
    threshold = load(run).threshold()
    paths = [run, *(export_model(run, form, tmp_path / form) / name for form, name in FORMS[backbone].items())]
    sets = find_sets([pairs_bin()])
    for path in paths:
        model = load(path)
        assert (model.image_size, model.embedding_dim) == (32, 16)
        if path.suffix in ("", ".safetensors", ".onnx"):
            assert model.threshold() == load(path.parent if path.suffix else path).threshold() == threshold
        evaluator = Evaluator(network=model.network, image_size=model.image_size, device=model.device)
        (numbers[path],) = [result.to_json() for result in evaluate_sets(evaluator, sets)]
    for path in paths[1:]:
        assert numbers[path]["accuracy"] == numbers[run]["accuracy"]
        assert numbers[path]["tar_at_far"] == numbers[run]["tar_at_far"]
        assert numbers[path]["xnorm"] == pytest.approx(numbers[run]["xnorm"], rel=1e-4)


def test_ten_lines_of_python(make_run, tmp_path, picture):
    paths = []
    for number, (identity, take) in enumerate([(1, 0), (1, 1), (2, 0)]):
        paths.append(tmp_path / f"{number}.png")
        paths[-1].write_bytes(picture(identity, take))
    model = megaclass.load(make_run())
    embeddings = model.embed(paths)
    assert embeddings.shape == (3, 16)
    cosines = embeddings @ embeddings.T
    assert np.diag(cosines) == pytest.approx(1, abs=1e-5)
    assert cosines[0, 1] > cosines[0, 2]
    assert model.embed([]).shape == (0, 16)


def test_one_image_in_every_form_gives_the_same_row(make_run, tmp_path, picture, capsys):
    path = tmp_path / "one.png"
    path.write_bytes(picture(1))
    model = megaclass.load(make_run())
    pixels = np.array(Image.open(path))
    bytes_3HW = torch.from_numpy(pixels).permute(2, 0, 1)
    inputs_3HW = bytes_3HW / 127.5 - 1
    expected = model.embed([path])
    content = path.read_bytes()
    files = [path, str(path), content, bytearray(content), io.BytesIO(content), Image.open(path)]
    for given in (*files, pixels, pixels[None], bytes_3HW, bytes_3HW[None], inputs_3HW):
        assert model.embed(given).shape == (1, 16)
        assert model.embed(given) == pytest.approx(expected, abs=1e-5)
    mixture = model.embed([str(path), Image.open(path), pixels, bytes_3HW])
    assert mixture == pytest.approx(np.repeat(expected, 4, 0), abs=1e-5)
    # Grey images are the same in all three channels.
    grey = Image.open(path).convert("L")
    assert model.embed(grey) == pytest.approx(model.embed(np.asarray(grey)), abs=1e-6)

    batch = torch.stack([inputs_3HW, inputs_3HW.flip(2)])
    embeddings = model(batch)
    assert embeddings.shape == (2, 16)
    assert embeddings.requires_grad
    added = torch.nn.functional.normalize(embeddings.sum(0, keepdim=True)).detach().numpy()
    assert added == pytest.approx(expected, abs=1e-5)
    assert "expects [-1, 1]" not in capsys.readouterr().err
    model.embed(inputs_3HW / 2 + 0.5)
    assert "none of them below 0: the network expects [-1, 1]" in capsys.readouterr().err
    for bad, words in (
        (pixels.astype(np.float32), "expected RGB bytes"),
        (bytes_3HW.float(), r"values from \d+ to \d+: they must lie in \[-1, 1\]"),
        (np.zeros((32, 32, 4), np.uint8), r"shape \(32, 32, 4\) and uint8: expected RGB bytes"),
        (7, "an object of int: expected the path of an image"),
        ([None], "Cannot embed image 0"),
        (b"no image", r"image 0 \(bytes\)"),
        ("https://example.org/a.jpg", "nothing is downloaded. Fetch it and give the bytes"),
        ([tmp_path], "is a folder: give its files"),
        (np.zeros((16, 16, 3), np.uint8), 'fit="pad"'),
    ):
        with pytest.raises(DataError, match=words):
            model.embed(bad)
    with pytest.raises(DataError, match=r"it takes a tensor \(B, 3, 32, 32\) of a floating dtype"):
        model(inputs_3HW)
    with pytest.raises(
        DataError, match=r"called with an object of str: .* Files, Pillow images, bytes and sequences go to embed\(\)"
    ):
        model("photo.jpg")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match=r"megaclass.load was asked for device 'cuda', but torch .* sees no GPU"):
            megaclass.load(path, device="cuda")


def test_a_running_mean_of_the_weights_is_what_is_loaded(make_run):
    plain, averaged = load(make_run("plain")), load(make_run("averaged", ema=True))
    assert torch.equal(averaged.network.fc.weight, plain.network.fc.weight + 1)
    assert torch.equal(averaged.network.features.running_mean, plain.network.features.running_mean)
    assert plain.fingerprint() != averaged.fingerprint()


def test_a_run_whose_checkpoints_are_gone_gives_its_exported_model(make_run, tmp_path, capsys):
    run = make_run()
    want = load(run).network.fc.weight
    export_model(run, "safetensors", tmp_path / "exported")
    shutil.copy(tmp_path / "exported" / "model.safetensors", run)
    (shared,) = (run / "checkpoints").glob("step-*/shared.safetensors")
    shared.write_bytes(shared.read_bytes()[:-1])
    assert torch.equal(load(run).network.fc.weight, want)
    assert "passed over a checkpoint" in capsys.readouterr().err


class Malicious:
    def __reduce__(self):
        return exec, ("open('harmed', 'w')",)


def test_a_pth_that_wants_to_run_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"conv1.weight": Malicious()}, tmp_path / "backbone.pth")
    with pytest.raises(CheckpointError, match=r"Cannot read .*backbone\.pth as tensors only"):
        load(tmp_path / "backbone.pth")
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors", b"junk" * 10, r"Cannot read .*model\.safetensors as safetensors"),
        ("model.onnx", b"junk" * 10, r"Cannot open .*model\.onnx as an ONNX model"),
        ("model.pth", b"junk" * 10, r"Cannot read .*model\.pth"),
        ("model.h5", b"", r"Cannot tell what model .*model\.h5 is"),
    ],
)
def test_a_file_that_is_no_model_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / name)


def test_what_is_not_there_or_holds_no_backbone_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"There is no model at .*nowhere"):
        load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="is not a run folder with a model"):
        load(tmp_path)
    torch.save({"some.weight": torch.zeros(3)}, tmp_path / "other.pth")
    with pytest.raises(CheckpointError, match=r"other\.pth holds no backbone known here \(first names: some\.weight\)"):
        load(tmp_path / "other.pth")
