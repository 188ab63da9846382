import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from megaclass.checkpoint.tensor_file import read_tensors
from megaclass.errors import CheckpointError, ExportError
from megaclass.export import safetensors_file
from megaclass.export.safetensors_file import save_model
from megaclass_launch.errors import UserError

_METADATA = {"backbone": "tiny", "image_size": "32", "ünïcode": 'quotes " and\nlines', "a": "1", "b": "2", "c": "3"}


def _backbone() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.PReLU(4), nn.Flatten(), nn.Linear(4 * 30 * 30, 8))


def test_weights_buffers_and_metadata_come_back(tmp_path):
    backbone, path = _backbone(), tmp_path / "model.safetensors"
    save_model(path, backbone, metadata=_METADATA)
    restored = read_tensors(path)
    assert restored.keys() == backbone.state_dict().keys()
    for name, tensor in backbone.state_dict().items():
        assert torch.equal(restored[name], tensor)
        assert restored[name].dtype == tensor.dtype
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == _METADATA
    assert list(tmp_path.iterdir()) == [path]


_SAVE = """
import sys, torch
from pathlib import Path
from torch import nn
from megaclass.export.safetensors_file import save_model
torch.manual_seed(0)
save_model(Path(sys.argv[1]), nn.Linear(3, 2), metadata={letter: letter for letter in "abcdefgh"})
"""


@pytest.mark.ranks
def test_the_same_model_gives_the_same_bytes_in_another_process(tmp_path):
    digests = set()
    for place in range(2):
        path = tmp_path / f"{place}.safetensors"
        subprocess.run(
            [sys.executable, "-c", _SAVE, str(path)], check=True, env={**os.environ, "PYTHONHASHSEED": str(place)}
        )
        digests.add(hashlib.sha256(path.read_bytes()).hexdigest())
    assert len(digests) == 1


def test_tied_and_transposed_weights_are_written_out(tmp_path):
    backbone = nn.Module()
    backbone.one = nn.Linear(3, 3)
    backbone.two = nn.Linear(3, 3)
    backbone.two.weight = backbone.one.weight
    backbone.register_buffer("turned", torch.arange(6.0).reshape(2, 3).T)
    save_model(tmp_path / "model.safetensors", backbone, metadata={})
    restored = read_tensors(tmp_path / "model.safetensors")
    assert torch.equal(restored["two.weight"], backbone.one.weight)
    assert torch.equal(restored["turned"], backbone.turned)


def test_the_backbone_is_not_touched(tmp_path):
    backbone = _backbone().train()
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    save_model(tmp_path / "model.safetensors", backbone, metadata={})
    assert backbone.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in backbone.state_dict().items())


def test_a_file_that_reads_back_wrong_is_not_published(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"the model of before")
    monkeypatch.setattr(
        safetensors_file,
        "read_tensors",
        lambda _: {name: tensor + 1 for name, tensor in _backbone().state_dict().items()},
    )
    with pytest.raises(ExportError, match=r"'0.weight' read back differs"):
        save_model(path, _backbone(), metadata={})
    assert path.read_bytes() == b"the model of before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(UserError, match=r"the folder .*nowhere does not exist"):
        save_model(tmp_path / "nowhere" / "model.safetensors", _backbone(), metadata={})


@pytest.mark.parametrize(
    "content", [None, b"", b"\x00" * 100, b"\xff" * 100], ids=["no file", "empty", "zeros", "ones"]
)
def test_what_is_not_safetensors_is_refused_by_name(tmp_path, content):
    path = Path(tmp_path / "model.safetensors")
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"Cannot read .*model\.safetensors as safetensors"):
        read_tensors(path)
