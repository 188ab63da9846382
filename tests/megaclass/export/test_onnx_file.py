import random
import shutil
import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.shared_folder import made_once
from torch import nn

from megaclass.backbones import BACKBONES, OF_FEATURES
from megaclass.backbones.iresnet import IResNet
from megaclass.backbones.mobilefacenet import MobileFaceNet
from megaclass.backbones.vit import VisionTransformer
from megaclass.errors import CheckpointError, ExportError
from megaclass.export.onnx_file import export_onnx
from megaclass.inference.loaded_model import OnnxNetwork

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


class DiffersFromItsExport(TinyBackbone):
    """For an exporter that gets an operation wrong: its file is that of a TinyBackbone."""

    def __init__(self, scale: float = 1.0, shift: float = 0.0, shift_per_image: float = 0.0) -> None:
        super().__init__()
        self.scale, self.shift, self.shift_per_image = scale, shift, shift_per_image

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale + self.shift + self.shift_per_image * (x.shape[0] - 1)


class FixesTheBatch(TinyBackbone):
    """len() makes a plain number of the batch size, and the exporter writes down the example's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).reshape(len(x), -1)


class LooksAtValues(nn.Module):
    """What no exporter can trace: Python decides by the content of a tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1) if float(x.sum()) > 0 else -x.flatten(1)


def _trained(backbone: nn.Module) -> nn.Module:
    """With statistics of its own, so forgetting eval mode would show."""
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


@pytest.fixture(scope="module")
def file_of_tiny(tmp_path_factory):
    """The export of a TinyBackbone drawn with seed 0."""

    def export(folder):
        export_onnx(folder / "model.onnx", _drawn(TinyBackbone), image_size=_SIZE)

    return made_once(tmp_path_factory, "onnx-file-of-tiny", export) / "model.onnx"


@pytest.fixture
def exporter_gives(monkeypatch):
    """exporter_gives(file): torch's exporter writes a copy of this file, whatever it is given. An export takes seconds."""

    def replace_exporter(file):
        def save(path, external_data):
            shutil.copyfile(file, path)

        program = SimpleNamespace(model=SimpleNamespace(metadata_props={}), save=save)
        monkeypatch.setattr(torch.onnx, "export", lambda *arguments, **options: program)

    return replace_exporter


def _drawn(build):
    torch.manual_seed(0)
    return build()


def _assert_refused(folder, backbone, message):
    path = folder / "model.onnx"
    path.write_bytes(b"the model of before")
    with pytest.raises(ExportError, match=message):
        export_onnx(path, backbone, image_size=_SIZE)
    assert path.read_bytes() == b"the model of before"
    assert list(folder.iterdir()) == [path]


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        ({"shift": 0.5}, r"lowest cosine \S+ \(at least 0.99999 is required\)"),
        ({"scale": 0.5}, "norms differ by up to 100.00%"),
        ({"shift_per_image": 1.0}, r"For 7 image\(s\) .* lowest cosine"),
    ],
    ids=["other direction", "other scale", "right for one image"],
)
def test_a_wrong_export_is_refused_and_leaves_what_was_there(
    tmp_path, file_of_tiny, exporter_gives, difference, message
):
    exporter_gives(file_of_tiny)
    backbone = _drawn(partial(DiffersFromItsExport, **difference))
    _assert_refused(tmp_path, backbone, message)


def test_an_export_that_gives_another_number_of_rows_is_refused(tmp_path, file_of_tiny, exporter_gives, monkeypatch):
    import onnxruntime

    run = onnxruntime.InferenceSession.run

    def one_row_too_many(*arguments):
        (rows,) = run(*arguments)
        return [np.concatenate([rows, rows[:1]])]

    monkeypatch.setattr(onnxruntime.InferenceSession, "run", one_row_too_many)
    exporter_gives(file_of_tiny)
    _assert_refused(
        tmp_path,
        _drawn(TinyBackbone),
        r"on 1 image\(s\): .* for 1 images: expected .* of shape \(batch, embedding size\)",
    )


def test_an_export_that_holds_for_one_size_of_batch_is_refused(tmp_path):
    _assert_refused(tmp_path, FixesTheBatch(), r"takes batches of 2 only, .*uses the batch size as a plain number")


def test_a_backbone_that_has_diverged_is_refused(tmp_path, file_of_tiny, exporter_gives):
    exporter_gives(file_of_tiny)
    backbone = _drawn(TinyBackbone)
    with torch.no_grad():
        backbone.fc.weight[0, 0] = torch.nan
    with pytest.raises(ExportError, match="lowest cosine nan"):
        export_onnx(tmp_path / "model.onnx", backbone, image_size=_SIZE)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_onnxruntime_cannot_run_is_refused(tmp_path, file_of_tiny, exporter_gives, monkeypatch):
    import onnxruntime
    from onnxruntime.capi.onnxruntime_pybind11_state import RuntimeException

    def fail(*_):
        raise RuntimeException("a node failed")

    exporter_gives(file_of_tiny)
    monkeypatch.setattr(onnxruntime.InferenceSession, "run", fail)
    with pytest.raises(
        ExportError, match=r"cannot run the ONNX model of TinyBackbone on 1 image\(s\): .*a node failed"
    ):
        export_onnx(tmp_path / "model.onnx", _drawn(TinyBackbone), image_size=_SIZE)
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
    # The slim one is exported by tests/megaclass/export/test_run_export.py.
}
# Too large for a test: 1,030 blocks, and 750 million parameters.
_HUGE = ("iresnet2060", "vit_h")


@pytest.mark.parametrize("family", _FAMILIES)
def test_every_family_of_backbones_runs_in_onnxruntime_at_any_batch(run_ranks, tmp_path, family):
    # In another process: here the exporter, much Python code, takes twice as long while coverage is measured.
    run_ranks(1, _assert_runs_in_onnxruntime, tmp_path, _FAMILIES[family], timeout_s=280)


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted({*BACKBONES} - {*_HUGE, *OF_FEATURES}))
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


def test_a_damaged_file_is_refused_with_its_name_or_still_gives_embeddings(file_of_tiny, tmp_path):
    sound = file_of_tiny.read_bytes()
    images = torch.zeros(2, 3, _SIZE, _SIZE)
    rng, path, num_refused = random.Random(0), tmp_path / "damaged.onnx", 0
    for _ in range(250):
        damaged = bytearray(sound)
        kind = rng.randrange(4)
        # Structure and names are at both ends; the weights are between them.
        at = rng.choice((rng.randrange(2000), len(sound) - 1 - rng.randrange(4000))) % len(sound)
        if kind == 0:
            damaged = damaged[:at]
        elif kind == 1:
            damaged[at : at + 4] = rng.randbytes(4)
        elif kind == 2:
            damaged[at] ^= 1 << rng.randrange(8)
        else:
            damaged[at:at] = rng.randbytes(rng.randrange(1, 16))
        path.write_bytes(damaged)
        try:
            OnnxNetwork(path, torch.device("cpu"))(images)
        except CheckpointError as error:
            num_refused += 1
            assert str(path) in str(error)
    assert num_refused > 50
