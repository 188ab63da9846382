"""Files in the layouts written out in docs/formats.md, made here by hand, not by our own writers."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from megaclass.backbones import build_backbone
from megaclass.errors import CheckpointError
from megaclass.insightface.checkpoints import load_backbone_, read_backbone, read_centre_shards
from megaclass.insightface.mxnet_params import read_params


def mxnet_array(array: np.ndarray, version: int) -> bytes:
    codes = {"float32": 0, "float64": 1, "float16": 2, "uint8": 3, "int32": 4, "int8": 5, "int64": 6}
    tail = struct.pack("<iii", 1, 0, codes[str(array.dtype)]) + array.tobytes()
    if version == 0:
        return struct.pack(f"<I{array.ndim}I", array.ndim, *array.shape) + tail
    shape = struct.pack(f"<I{array.ndim}q", array.ndim, *array.shape)
    if version == 1:
        return struct.pack("<I", 0xF993FAC8) + shape + tail
    return struct.pack("<Ii", 0xF993FAC9 if version == 2 else 0xF993FACA, 0) + shape + tail


def mxnet_file(path: Path, arrays: dict[str, np.ndarray], version: int = 2, named: bool = True) -> Path:
    body = struct.pack("<QQQ", 0x112, 0, len(arrays)) + b"".join(mxnet_array(a, version) for a in arrays.values())
    names = b"".join(struct.pack("<Q", len(name)) + name.encode() for name in arrays) if named else b""
    path.write_bytes(body + struct.pack("<Q", len(arrays) if named else 0) + names)
    return path


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_every_version_of_mxnet_params_is_read(tmp_path, version):
    arrays = {
        "arg:w": np.arange(6, dtype=np.float32).reshape(2, 3),
        "aux:m": np.array([1.5, -2], dtype=np.float16),
        "arg:i": np.array([[7]], dtype=np.int64),
    }
    found = read_params(mxnet_file(tmp_path / "m.params", arrays, version))
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array)


def test_truncated_or_altered_params_are_an_error_with_the_place(tmp_path):
    path = mxnet_file(tmp_path / "m.params", {"arg:w": np.ones((4, 4), np.float32)})
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(300):
        data = bytearray(whole)
        if rng.random() < 0.5:
            data = data[: rng.integers(len(whole))]
        else:
            data[rng.integers(len(whole))] ^= 1 << rng.integers(8)
        path.write_bytes(bytes(data))
        try:
            read_params(path)
        except CheckpointError as error:
            assert str(path) in str(error)


def mxnet_name(name: str) -> str:
    """Our name of an iresnet parameter -> InsightFace's in MXNet."""
    *layer, kind = name.split(".")
    tops = {"conv1": "conv0", "bn1": "bn0", "prelu": "relu0", "bn2": "bn1", "fc": "pre_fc1", "features": "fc1"}
    units = {"prelu": "relu1", "downsample.0": "conv1sc", "downsample.1": "sc"}
    if layer[0].startswith("layer"):
        inner = ".".join(layer[2:])
        base = f"stage{layer[0][5:]}_unit{int(layer[1]) + 1}_{units.get(inner, inner)}"
    else:
        inner = layer[0]
        base = tops[inner]
    is_norm = inner.startswith("bn") or inner in ("features", "downsample.1")
    if kind in ("running_mean", "running_var"):
        return f"aux:{base}_moving_{kind[8:]}"
    kinds = {"weight": "gamma", "bias": "beta"} if is_norm else {"weight": "gamma"} if inner == "prelu" else {}
    return f"arg:{base}_{kinds.get(kind, kind)}"


def test_an_mxnet_backbone_gives_the_embeddings_of_the_same_weights_in_torch(tmp_path):
    torch.manual_seed(0)
    backbone = build_backbone("iresnet18", embedding_dim=16, image_size=32)
    backbone(torch.randn(8, 3, 32, 32))
    backbone.eval()
    norms = [module for module in backbone.modules() if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d))]
    # Variances so small that the eps decides.
    norms[3].running_var.mul_(1e-7)
    arrays = {
        mxnet_name(name): tensor.numpy()
        for name, tensor in backbone.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }
    path = mxnet_file(tmp_path / "model-0000.params", arrays)
    other = build_backbone("iresnet18", embedding_dim=16, image_size=32).eval()
    load_backbone_(other, read_backbone(path), path)
    # MXNet's network: eps 2e-5 in every norm, and pixels divided by 128.
    for norm in norms:
        norm.eps = 2e-5
    pixels = torch.randint(0, 256, (3, 3, 32, 32)).double()
    with torch.no_grad():
        expected = backbone.double()((pixels - 127.5) / 128)
        found = other.double()((pixels - 127.5) / 127.5)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_half_precision_params_of_mxnet_keep_the_eps(tmp_path):
    array = np.full(64, 1e-3, dtype=np.float16)
    path = mxnet_file(tmp_path / "model-0000.params", {"aux:bn0_moving_var": array})
    variance = read_backbone(path)["bn1.running_var"]
    torch.testing.assert_close(variance, torch.from_numpy(array).float() + 1e-5)


@pytest.mark.parametrize("layout", ["bare", "module.", "checkpoint_gpu"])
def test_backbones_of_arcface_torch_load(tmp_path, layout):
    torch.manual_seed(0)
    backbone = build_backbone("iresnet18", embedding_dim=16, image_size=32).eval()
    state = backbone.state_dict()
    saved = {
        "bare": state,
        "module.": {f"module.{name}": tensor for name, tensor in state.items()},
        "checkpoint_gpu": {"epoch": 3, "global_step": 9, "state_dict_backbone": state, "state_dict_softmax_fc": {}},
    }[layout]
    torch.save(saved, tmp_path / "model.pt")
    other = build_backbone("iresnet18", embedding_dim=16, image_size=32).eval()
    load_backbone_(other, read_backbone(tmp_path / "model.pt"), tmp_path / "model.pt")
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(other(images), backbone(images))


def test_a_backbone_of_other_shapes_is_refused_with_the_difference(tmp_path):
    small = build_backbone("iresnet18", embedding_dim=16, image_size=32)
    torch.save(small.state_dict(), tmp_path / "model.pt")
    large = build_backbone("iresnet34", embedding_dim=32, image_size=32)
    before = {name: tensor.clone() for name, tensor in large.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"missing layer.*fc\.weight is \(16, 2048\), expected \(32, 2048\)"):
        load_backbone_(large, read_backbone(tmp_path / "model.pt"), tmp_path / "model.pt")
    assert all(torch.equal(before[name], tensor) for name, tensor in large.state_dict().items())


def _joined(shards):
    """Every shard begins where the one before it ended."""
    assert [first for first, _ in shards] == [sum(len(s) for _, s in shards[:place]) for place in range(len(shards))]
    return torch.cat([shard for _, shard in shards])


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_centres_saved_by_any_number_of_ranks_come_back_whole(tmp_path, world_size):
    centres = torch.randn(13, 4)
    sizes = [13 // world_size + (rank < 13 % world_size) for rank in range(world_size)]
    for rank, shard in enumerate(centres.split(sizes)):
        saved = {"epoch": 1, "state_dict_backbone": {}, "state_dict_softmax_fc": {"weight": shard.clone()}}
        torch.save(saved, tmp_path / f"checkpoint_gpu_{rank}.pt")
    assert torch.equal(_joined(read_centre_shards(tmp_path)), centres)


def test_mxnet_centres_come_back_whole(tmp_path):
    centres = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)
    for rank, shard in enumerate(np.split(centres, [3, 5])):
        mxnet_file(tmp_path / f"{rank}_centers.param", {"x": np.ascontiguousarray(shard)}, named=False)
    assert np.array_equal(_joined(read_centre_shards(tmp_path)).numpy(), centres)


def test_a_set_with_a_rank_missing_or_of_another_run_is_refused(tmp_path):
    for rank, size in ((0, 4), (2, 4)):
        saved = {"state_dict_softmax_fc": {"weight": torch.zeros(size, 4)}}
        torch.save(saved, tmp_path / f"checkpoint_gpu_{rank}.pt")
    with pytest.raises(CheckpointError, match="has no file of rank 1"):
        read_centre_shards(tmp_path)
    torch.save({"state_dict_softmax_fc": {"weight": torch.zeros(9, 4)}}, tmp_path / "checkpoint_gpu_1.pt")
    with pytest.raises(CheckpointError, match=r"hold \[4, 9, 4\] classes.*\[6, 6, 5\]"):
        read_centre_shards(tmp_path)


class _Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/megaclass-was-here",)


def test_a_pickle_that_wants_to_run_code_is_refused(tmp_path):
    torch.save({"x": _Evil()}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="tensors only"):
        read_backbone(tmp_path / "model.pt")
    assert not Path("/tmp/megaclass-was-here").exists()
