"""The ONNX model that names the closest classes."""

import numpy as np
import pytest
import torch

import megaclass
from megaclass.cli.main import main
from megaclass.evaluation.centres import centres_in_memory
from megaclass.export import onnx_file
from megaclass.export.run_export import export_model

pytest.importorskip("onnxruntime", reason="the extra megaclass[onnx] is not installed")


@pytest.mark.parametrize("is_split", [False, True])
def test_the_file_names_the_classes_that_the_model_names(make_run, tmp_path, monkeypatch, is_split):
    import onnxruntime

    if is_split:
        monkeypatch.setattr(onnx_file, "_MAX_BYTES", 1000)
    model = megaclass.load(make_run("slim"), device="cpu")
    rows = torch.randn(14, model.embedding_dim, generator=torch.Generator().manual_seed(3))
    centres = centres_in_memory(rows, [f"näme {number}" for number in range(7)])  # two sub-centres each
    out = export_model(model.run, "onnx-classifier", tmp_path / "out", centres=centres)
    assert (out / "classifier.onnx.data").exists() == is_split
    session = onnxruntime.InferenceSession(str(out / "classifier.onnx"), providers=["CPUExecutionProvider"])
    images = torch.rand(3, 3, 32, 32) * 2 - 1
    classes, cosines = session.run(["class", "cosine"], {"input": images.numpy()})
    with torch.no_grad():
        embedded = torch.nn.functional.normalize(model(images).double())
    want = (embedded @ torch.nn.functional.normalize(rows.double()).T).unflatten(1, (7, 2)).amax(2).numpy()
    np.testing.assert_allclose(cosines, -np.sort(-want, axis=1)[:, :5], atol=1e-4)
    np.testing.assert_allclose(np.take_along_axis(want, classes, 1), cosines, atol=1e-4)
    assert (out / "classes.txt").read_text(encoding="utf-8").splitlines()[2] == "näme 2"
    assert "names in classes.txt" in (out / "README.md").read_text(encoding="utf-8")
    # The first output is the embedding, so the folder also opens as a model.
    assert megaclass.load(out, device="cpu").embedding_dim == model.embedding_dim


def test_without_centres_nothing_is_written(make_run, tmp_path, capsys):
    assert main(["export", str(make_run("slim")), "--to", "safetensors", "--out", str(tmp_path / "plain")]) == 0
    (tmp_path / "plain" / "centres.safetensors").unlink()
    assert main(["export", str(tmp_path / "plain"), "--to", "onnx-classifier", "--out", str(tmp_path / "out")]) == 2
    assert "has no class centres, so it cannot classify" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_names_and_centres_are_published_on_request_only(make_run, capsys):
    assert main(["push", str(make_run("slim")), "user/name", "--to", "onnx-classifier"]) == 2
    assert "add --with-centres to publish" in capsys.readouterr().err
