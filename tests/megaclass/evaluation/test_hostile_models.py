"""Model files and run folders from strangers: they give weights or an error, and never choose what code runs."""

import struct
import sys
import zipfile
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from megaclass.checkpoint.manifest import read_manifest
from megaclass.cli.main import main
from megaclass.errors import CheckpointError
from megaclass.evaluation.centres import read_run_centres
from megaclass.inference import load

OWN = """
from pathlib import Path
from torch import nn

Path("harmed").touch()

class Own(nn.Module):
    def __init__(self, embedding_dim, image_size):
        super().__init__()
        self.linear = nn.Linear(3 * image_size * image_size, embedding_dim)

    def forward(self, images):
        return self.linear(images.flatten(1))
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """A module that leaves the file `harmed` in the working folder when it is imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_networks.py").write_text(OWN)
    yield "own_networks:Own"
    sys.modules.pop("own_networks", None)


def write_model(path, name: str, **said: str) -> None:
    state = {"linear.weight": torch.zeros(8, 3 * 16 * 16), "linear.bias": torch.zeros(8)}
    save_file(state, path, metadata={"backbone": name, "embedding_dim": "8", "image_size": "16"} | said)


@pytest.mark.parametrize("name", ["own_networks:Own", "os:system", "builtins:exec", "subprocess:call"])
def test_a_safetensors_file_does_not_choose_what_is_imported(own_module, tmp_path, name):
    write_model(tmp_path / "model.safetensors", name)
    with pytest.raises(
        CheckpointError, match=r"Files never choose the code that runs.*--backbone package\.module:Class"
    ):
        load(tmp_path / "model.safetensors")
    assert not (tmp_path / "harmed").exists()


def test_a_run_folder_does_not_choose_what_is_imported(own_module, tmp_path, make_run):
    run = make_run("foreign", own=own_module)
    write_model(run / "model.safetensors", own_module)
    for command in (["evaluate", str(run), "--on", "lfw.bin"], ["export", str(run), "--to", "safetensors"]):
        assert main(command) == 2
    for reason in ("whole", "without a checkpoint"):
        with pytest.raises(CheckpointError, match="Files never choose the code that runs"):
            load(run)
        if reason == "whole":
            (run / "checkpoints").rename(run / "gone")
    assert not (tmp_path / "harmed").exists()


def test_a_backbone_that_the_user_names_is_built(own_module, tmp_path, make_run, pairs_bin):
    run = make_run("own", own=own_module)
    write_model(run / "model.safetensors", own_module)
    assert load(run, backbone=own_module).backbone == own_module
    assert load(run / "model.safetensors", backbone=own_module).embedding_dim == 8
    command = ["evaluate", str(run), "--on", str(pairs_bin(size=16)), "--backbone", own_module]
    assert main(command) == 0
    assert main(["export", str(run), "--to", "safetensors", "--backbone", own_module]) == 0
    assert (run / "export" / "safetensors" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "said", [{"embedding_dim": "60000", "image_size": "4096"}, {"embedding_dim": "-1"}, {"image_size": "9" * 30}]
)
def test_sizes_that_the_weights_do_not_have_are_refused_before_they_are_allocated(tmp_path, said):
    write_model(tmp_path / "model.safetensors", "iresnet50", **said)
    with pytest.raises(CheckpointError, match=r"does not fit this backbone|are accepted"):
        load(tmp_path / "model.safetensors")


@pytest.mark.parametrize("dims", [(-2, -2), (0, 2**62), (2**40, 1), (-1, 4)])
def test_odd_dimensions_in_params_are_one_line(tmp_path, dims):
    array = struct.pack("<IiIqqiii", 0xF993FAC9, 0, 2, *dims, 1, 0, 0) + bytes(16)
    name = b"arg:fc1_gamma"
    content = struct.pack("<QQQ", 0x112, 0, 1) + array + struct.pack("<QQ", 1, len(name)) + name
    (tmp_path / "model.params").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"an array of shape .* does not fit into \d+ bytes"):
        load(tmp_path / "model.params")


def test_an_archive_that_unpacks_to_more_than_itself_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "model.pth", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(2**24))
    with pytest.raises(CheckpointError, match=r"would unpack to 16,777,216"):
        load(tmp_path / "model.pth")


def test_a_tensor_that_shows_one_number_in_many_places_is_refused(tmp_path):
    torch.save({"fc.weight": torch.zeros(1).expand(2**20, 2**20)}, tmp_path / "model.pth")
    with pytest.raises(CheckpointError, match=r"fc\.weight of shape \(1048576, 1048576\) does not fit into"):
        load(tmp_path / "model.pth")


def test_settings_that_are_no_toml_are_an_error_of_the_checkpoint(make_run):
    run = make_run()
    (folder,) = (run / "checkpoints").glob("step-*")
    manifest = read_manifest(folder)
    replace(manifest, config="NaN").write(folder)
    for opened in (read_run_centres, load):
        with pytest.raises(CheckpointError, match=r"no undamaged checkpoint|not a run folder with a model"):
            opened(run)
