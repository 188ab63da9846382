"""One model in every form it may come in: the same numbers from each."""

import shutil

import numpy as np
import pytest
import torch

import megaclass
from megaclass.errors import CheckpointError
from megaclass.evaluate.protocol import Evaluator
from megaclass.evaluate.sets import evaluate_sets, find_sets
from megaclass.export.run_export import export_model
from megaclass.model import load

FORMS = ("run", "safetensors", "insightface", "onnx")


@pytest.fixture
def forms(make_run, tmp_path):
    """Paths of one MobileFaceNet as a run, .safetensors, .pth and .onnx."""
    pytest.importorskip("onnxruntime", reason="the extra megaclass[onnx] is not installed")
    run = make_run("faces", backbone="mbf")
    files = {"safetensors": "model.safetensors", "insightface": "backbone.pth", "onnx": "model.onnx"}
    for form, name in files.items():
        export_model(run, form, tmp_path / form)
        files[form] = tmp_path / form / name
    return {"run": run, **files}


@pytest.mark.ranks
def test_the_same_numbers_come_from_each_form(forms, pairs_bin):
    path = pairs_bin()
    numbers = {}
    for form in FORMS:
        model = load(forms[form])
        assert (model.image_size, model.embedding_dim) == (32, 16)
        evaluator = Evaluator(network=model.network, image_size=model.image_size, device=model.device)
        (numbers[form],) = [result.to_json() for result in evaluate_sets(evaluator, find_sets([path]))]
    for form in FORMS[1:]:
        assert numbers[form]["accuracy"] == numbers["run"]["accuracy"]
        assert numbers[form]["tar_at_far"] == numbers["run"]["tar_at_far"]
        assert numbers[form]["xnorm"] == pytest.approx(numbers["run"]["xnorm"], rel=1e-4)


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
