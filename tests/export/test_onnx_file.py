import sys
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from megaclass.backbones import BACKBONES
from megaclass.backbones.iresnet import IResNet
from megaclass.backbones.mobilefacenet import MobileFaceNet
from megaclass.backbones.vit import VisionTransformer
from megaclass.errors import ExportError
from megaclass.export.onnx_file import export_onnx

pytest.importorskip("onnxruntime")
# Whole exports, of which each takes seconds.
pytestmark = pytest.mark.ranks
_SIZE = 16


class TinyBackbone(nn.Module):
    """The operations of an IResNet at the smallest size, dropout and batch norm included."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.prelu = nn.PReLU(4)
        self.dropout = nn.Dropout(0.4)
        self.fc = nn.Linear(4 * 8 * 8, 6)
        self.features = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.prelu(self.bn1(self.conv(x)))
        return self.features(self.fc(torch.flatten(self.dropout(x), 1)))


class DiffersWhenExported(TinyBackbone):
    """Stands for an exporter that gets an operation wrong."""

    def __init__(self, scale: float, shift: float) -> None:
        super().__init__()
        self.scale, self.shift = scale, shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        embeddings = super().forward(x)
        return embeddings * self.scale + self.shift if torch.compiler.is_exporting() else embeddings


class DiffersInLargerBatches(TinyBackbone):
    """Stands for an export that holds for one image only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        embeddings = super().forward(x)
        return embeddings + (x.shape[0] - 1) if torch.compiler.is_exporting() else embeddings


class FixesTheBatch(TinyBackbone):
    """len() makes a plain number of the batch size, and the exporter writes down the example's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).reshape(len(x), -1)


class OneRowTooMany(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(1)
        return torch.cat([flat, flat[:1]])


class LooksAtValues(nn.Module):
    """What no exporter can trace: Python decides by the content of a tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1) if float(x.sum()) > 0 else -x.flatten(1)


def _trained(backbone: nn.Module) -> nn.Module:
    """With statistics of its own, so that forgetting eval mode would show."""
    torch.manual_seed(0)
    for _ in range(3):
        backbone(torch.randn(8, 3, _SIZE, _SIZE) * 2 + 1)
    return backbone


def test_onnxruntime_gives_the_embeddings_of_torch_for_any_batch(tmp_path, capfd):
    import onnxruntime

    backbone, path = _trained(TinyBackbone()).train(), tmp_path / "model.onnx"
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    backbone.bn1.eval()
    export_onnx(path, backbone, image_size=_SIZE, metadata={"backbone": "tiny"})

    assert list(tmp_path.iterdir()) == [path], "one file, no external data, nothing unfinished"
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")
    assert backbone.training
    assert not backbone.bn1.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in backbone.state_dict().items())

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert [(one.name, one.shape, one.type) for one in session.get_inputs()] == [
        ("input", ["batch", 3, _SIZE, _SIZE], "tensor(float)")
    ]
    assert [(one.name, one.shape) for one in session.get_outputs()] == [("embedding", ["batch", 6])]
    assert session.get_modelmeta().custom_metadata_map == {"backbone": "tiny"}
    for num_images in (1, 2, 5):
        images = torch.randn(num_images, 3, _SIZE, _SIZE)
        (got,) = session.run(None, {"input": images.numpy()})
        with torch.no_grad():
            np.testing.assert_allclose(got, backbone.eval()(images).numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        (DiffersWhenExported(1.0, 0.5), r"lowest cosine \S+ \(at least 0.99999 is required\)"),
        (DiffersWhenExported(2.0, 0.0), "norms differ by up to 100.00%"),
        (DiffersInLargerBatches(), r"For 7 image\(s\) .* lowest cosine"),
        (FixesTheBatch(), r"takes batches of 2 only, .*uses the batch size as a plain number"),
        (OneRowTooMany(), r"For 1 image\(s\) .* expected one row per image"),
    ],
    ids=[
        "other direction",
        "other scale",
        "right for one image",
        "right for one size of batch",
        "other number of rows",
    ],
)
def test_a_wrong_export_is_refused_and_leaves_what_was_there(tmp_path, backbone, message):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"the model of before")
    with pytest.raises(ExportError, match=message):
        export_onnx(path, backbone, image_size=_SIZE)
    assert path.read_bytes() == b"the model of before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_backbone_that_has_diverged_is_refused(tmp_path):
    backbone = TinyBackbone()
    with torch.no_grad():
        backbone.fc.weight[0, 0] = torch.nan
    with pytest.raises(ExportError, match="lowest cosine nan"):
        export_onnx(tmp_path / "model.onnx", backbone, image_size=_SIZE)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_onnxruntime_cannot_run_is_refused(tmp_path, monkeypatch):
    import onnxruntime
    from onnxruntime.capi.onnxruntime_pybind11_state import RuntimeException

    def fail(*_):
        raise RuntimeException("a node failed")

    monkeypatch.setattr(onnxruntime.InferenceSession, "run", fail)
    with pytest.raises(ExportError, match=r"cannot run the ONNX model of TinyBackbone on 1 image\(s\): a node failed"):
        export_onnx(tmp_path / "model.onnx", TinyBackbone(), image_size=_SIZE)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_traced_says_so(tmp_path):
    with pytest.raises(ExportError, match=r"Cannot export LooksAtValues to .*model\.onnx"):
        export_onnx(tmp_path / "model.onnx", LooksAtValues(), image_size=_SIZE)
    assert list(tmp_path.iterdir()) == []


def test_missing_packages_are_named_with_the_line_that_installs_them(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ExportError, match=r"needs onnxscript: pip install 'megaclass\[onnx\]'"):
        export_onnx(tmp_path / "model.onnx", TinyBackbone(), image_size=_SIZE)


# Every kind of layer of each family, but few of them: the exporter's time grows with the number of layers.
_FAMILIES = {
    "an iresnet": partial(IResNet, (2, 1, 1, 1)),
    "a mobilefacenet": partial(MobileFaceNet, (1, 2, 1, 1), 1),
    "a vision transformer": partial(VisionTransformer, 64, 2),
}
# Too large for a test: 1,030 blocks, and 750 million parameters.
_HUGE = ("iresnet2060", "vit_h")


@pytest.mark.parametrize("family", _FAMILIES)
def test_every_family_of_backbones_runs_in_onnxruntime_at_any_batch(tmp_path, family):
    _assert_runs_in_onnxruntime(tmp_path, _FAMILIES[family])


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted({*BACKBONES} - {*_HUGE}))
def test_every_backbone_runs_in_onnxruntime_at_any_batch(tmp_path, name):
    _assert_runs_in_onnxruntime(tmp_path, BACKBONES[name])


def _assert_runs_in_onnxruntime(tmp_path, build):
    import onnx
    import onnxruntime

    torch.manual_seed(0)
    size = 32
    backbone = build(24, size)
    for module in backbone.modules():
        if isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d):
            module.momentum = None  # plain means: without statistics that fit, a hundred layers overflow
    with torch.no_grad():
        backbone(torch.rand(8, 3, size, size) * 2 - 1)
    backbone.eval()
    export_onnx(tmp_path / "model.onnx", backbone, image_size=size)
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    # InsightFace's tools take names that begin with Sub or Mul among the first nodes for a normalisation of the input.
    first_nodes = onnx.load(tmp_path / "model.onnx").graph.node[:8]
    assert not any(node.name.startswith(("Sub", "Mul", "_minus", "bn_data")) for node in first_nodes)
    for num_images in (1, 3):
        images = torch.rand(num_images, 3, size, size) * 2 - 1
        (got,) = session.run(["embedding"], {"input": images.numpy()})
        with torch.no_grad():
            want = backbone(images).numpy()
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4 * np.abs(want).max())
