"""Recipes, InsightFace and ONNX files, lists, agents' messages and checkpoints under fire: a result or one clear line."""

import random
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.fuzzing import Target, assert_clean, fuzz, mutate, mutate_text
from tests.launch.test_hostile_agent import assert_harmless, mutated
from tests.megaclass.checkpoint.test_save_and_load import save

from megaclass.checkpoint.load import check_files
from megaclass.checkpoint.manifest import read_manifest
from megaclass.config.read import load_config
from megaclass.evaluation.gallery import read_embeddings, read_megaface_features
from megaclass.evaluation.protocols.pairs import read_pairs_list
from megaclass.evaluation.protocols.templates import read_ijb
from megaclass.inference.load import load
from megaclass.insightface.import_config import import_config, recipe_text
from megaclass_launch.hosts import hosts_from_batch_system, hosts_from_file, hosts_from_option
from megaclass_launch.options import parse_options
from megaclass_launch.wire.agent_messages import MAX_OUTPUT_BYTES, AgentMessageChecker
from megaclass_launch.wire.protocol import MessageReader, ProtocolError

SAMPLE_MUTATIONS = 150
RECIPE = Path(__file__).parents[1] / "recipes" / "demo.toml"

INSIGHTFACE_CONFIG = """\
from easydict import EasyDict as edict

config = edict()
config.margin_list = (1.0, 0.0, 0.4)
config.network = "r50"
config.resume = False
config.output = None
config.embedding_size = 512
config.sample_rate = 0.1
config.fp16 = True
config.momentum = 0.9
config.weight_decay = 5e-4
config.batch_size = 128 * 2
config.lr = 0.1 * config.batch_size / 256
config.verbose = 2000
config.dali = False
config.rec = "/train_tmp/ms1m-retinaface-t1"
config.num_classes = 93431
config.num_image = 5179510
config.num_epoch = 20
config.warmup_epoch = config.num_epoch // 10
config.val_targets = ["lfw", "cfp_fp", "agedb_30"]
def lr_step_func(epoch):
    return [x ** 2 for x in range(3)][-1]
config.lr_func = lr_step_func
"""
HOROVOD_CONFIG = b"""\
verbose: true
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 2.5
  cache_capacity: 1024
  hierarchical_allreduce: false
autotune: {enabled: true, log_filename: "log.txt", warmup_samples: 3}
timeline:
  filename: "timeline.json"
  mark_cycles: true
stall_check: {enabled: true, warning_time_seconds: 60}
"""
IJB = {
    "ijbc_face_tid_mid.txt": "a.png 1 10\nb.png 1 11\nc.png 2 20\n",
    "ijbc_name_5pts_score.txt": "".join(f"{name}.png 1 2 3 4 5 6 7 8 9.5 10 0.9\n" for name in "abc"),
    "ijbc_template_pair_label.txt": "1 2 0\n1 1 1\n",
    "ijbc_1N_gallery_G1.csv": "TEMPLATE_ID,SUBJECT_ID\n1,1\n",
    "ijbc_1N_gallery_G2.csv": "TEMPLATE_ID,SUBJECT_ID\n2,2\n",
    "ijbc_1N_probe_mixed.csv": "TEMPLATE_ID,SUBJECT_ID\n1,1\n2,2\n",
}


def make_target(name: str, folder: Path) -> Target:
    """A real file and its reader. Kinds: NAMES."""
    if name == "hosts":
        text = b"gpu-1:8,10.0.0.1:4,[fd00::1]:2,user@host.domain:1"
        return Target(text, lambda content: hosts_from_option(content.decode("latin1")))
    if name == "SLURM_JOB_NODELIST":
        nodes = b"gpu[01-09,12],rack[1-2]-[4,5],login"
        return Target(nodes, lambda text: _hosts_of_job(name, text.decode("utf-8", "surrogateescape")), mutate_text)
    if name == "ONNX file":
        return Target(_onnx_file(), _written_to(folder / "model.onnx", lambda path: load(path, device="cpu")))
    if name == "agent's messages":
        return Target(b"", _check_messages, _mutated_message, ProtocolError)
    if name == "checkpoint files":
        return _checkpoint_target(folder)
    if name.startswith("IJB "):
        return _ijb_target(name.removeprefix("IJB "), folder)
    whole, change, file, read = {
        "recipe": (RECIPE.read_bytes(), mutate_text, "recipe.toml", load_config),
        "InsightFace config": (INSIGHTFACE_CONFIG.encode(), mutate_text, "ms1mv3_r50.py", _import),
        "config file of horovodrun": (HOROVOD_CONFIG, mutate_text, "config.yaml", _parse_config),
        "PBS_NODEFILE": (
            b"gpu-1\ngpu-1\ngpu-2.cluster\n",
            mutate,
            "nodes",
            lambda path: _hosts_of_job("PBS_NODEFILE", str(path)),
        ),
        "host file": (b"gpu-1 slots=8\n# comment\n10.0.0.1 slots = 4\n", mutate_text, "hosts", hosts_from_file),
        "pairs.txt": (_pairs_list(folder), mutate_text, "pairs.txt", read_pairs_list),
        "MegaFace feature": (
            struct.pack("<4i", 8, 1, 4, 5) + np.arange(8, dtype="<f4").tobytes(),
            mutate,
            "feature.bin",
            lambda path: read_megaface_features([path]),
        ),
        "embeddings.npy": (_embeddings(folder), mutate, "embeddings.npy", lambda path: read_embeddings(path)[0].sum()),
    }[name]
    return Target(whole, _written_to(folder / file, read), change)


NAMES = [
    "recipe",
    "InsightFace config",
    "hosts",
    "host file",
    "SLURM_JOB_NODELIST",
    "PBS_NODEFILE",
    "config file of horovodrun",
    "ONNX file",
    "pairs.txt",
    *(f"IJB {name}" for name in ("ijbc_face_tid_mid.txt", "ijbc_name_5pts_score.txt", "ijbc_1N_gallery_G1.csv")),
    "MegaFace feature",
    "embeddings.npy",
    "agent's messages",
    "checkpoint files",
]


def _written_to(path: Path, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    def attempt(content: bytes) -> None:
        path.write_bytes(content)
        read(path)

    return attempt


def _hosts_of_job(variable: str, value: str) -> None:
    hosts_from_batch_system({variable: value})


def _parse_config(path: Path) -> None:
    parse_options(["-np", "1", "--config-file", str(path), "true"], {})


def _onnx_file() -> bytes:
    """A small network of the operations of an IResNet, in the form in which `megaclass export` writes them."""
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    shapes = {"filters": (4, 3, 3, 3), "slopes": (4, 1, 1), "weight": (6, 4 * 8 * 8), "bias": (6,)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    nodes = [
        helper.make_node("Conv", ["images", "filters"], ["a"], strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("PRelu", ["a", "slopes"], ["b"]),
        helper.make_node("Flatten", ["b"], ["c"]),
        helper.make_node("Gemm", ["c", "weight", "bias"], ["embeddings"], transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "backbone",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, 16, 16])],
        [helper.make_tensor_value_info("embeddings", TensorProto.FLOAT, ["batch", 6])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return bytes(model.SerializeToString())


def _import(path: Path) -> None:
    config, remarks = import_config(path)
    text = recipe_text(config, remarks, path)
    (path.parent / "imported.toml").write_text(text)
    assert load_config(path.parent / "imported.toml") == config


def _pairs_list(folder: Path) -> bytes:
    for name in ("Ann/Ann_0001.jpg", "Ann/Ann_0002.jpg", "Bob/Bob_0001.jpg"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"")
    return b"10\t300\nAnn\t1\t2\nAnn\t1\tBob\t1\nAnn/Ann_0001.jpg Bob/Bob_0001.jpg 0\n"


def _embeddings(folder: Path) -> bytes:
    path = folder / "embeddings.npy"
    np.save(path, np.arange(12, dtype=np.float32).reshape(3, 4))
    (folder / "embeddings.txt").write_text("a/1.jpg\na/2.jpg\nb/1.jpg\n")
    return path.read_bytes()


def _ijb_target(file: str, folder: Path) -> Target:
    (folder / "meta").mkdir()
    for name, text in IJB.items():
        (folder / "meta" / name).write_text(text)
    return Target(
        IJB[file].encode(), _written_to(folder / "meta" / file, lambda path: read_ijb(path.parents[1])), mutate_text
    )


def _mutated_message(whole: bytes, rng: np.random.Generator) -> bytes:
    return mutated(random.Random(int(rng.integers(2**62))))


def _check_messages(wire: bytes) -> None:
    talk = AgentMessageChecker([1, 2])
    reader = MessageReader(max_line_bytes=1 << 20, max_payload_bytes=MAX_OUTPUT_BYTES)
    for message, payload in reader.feed(wire):
        assert_harmless(talk.checked(message, payload, is_running=True), payload)


def _checkpoint_target(folder: Path) -> Target:
    """One file of a checkpoint is damaged: it must be found before use, unless nothing that counts has changed."""
    saved = save(folder, 1)
    original = {path: path.read_bytes() for path in sorted(saved.iterdir())}
    manifest = read_manifest(saved)

    def change(whole: bytes, rng: np.random.Generator) -> bytes:
        path = list(original)[int(rng.integers(len(original)))]
        return path.name.encode() + b"\0" + mutate(original[path], rng)

    def attempt(content: bytes) -> None:
        name, _, damaged = content.partition(b"\0")
        path = saved / name.decode()
        path.write_bytes(damaged)
        try:
            found = read_manifest(saved)
            check_files(saved, found)
            assert damaged == original[path] or found == manifest, "a damaged file was taken"
        finally:
            path.write_bytes(original[path])

    return Target(b"", attempt, change)


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_of_damaged_files_gives_a_result_or_one_line(name):
    counts = fuzz(make_target, name, range(SAMPLE_MUTATIONS))
    assert_clean(counts)
    assert counts.refused > 0
