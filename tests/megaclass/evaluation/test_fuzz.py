"""Models, checkpoints and results under fire: any bytes give what they say or a UserError of one line."""

import io
import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from tests.fuzzing import Target, assert_clean, fuzz, mutate, mutate_json, mutate_lines

from megaclass.backbones import recognise
from megaclass.checkpoint.load import load_rank_state, load_shared, newest_whole, saved_rows
from megaclass.checkpoint.manifest import _digest, read_manifest
from megaclass.checkpoint.save import CheckpointWriter, Snapshot
from megaclass.evaluation import training_images
from megaclass.evaluation.examples import ConfusedImage, Examples, WorstClass
from megaclass.evaluation.protocols.pairs import result_of_pairs
from megaclass.evaluation.protocols.verification import score_embeddings
from megaclass.evaluation.report.from_runs import report_of_runs, write_faces
from megaclass.evaluation.report.page import render_report
from megaclass.evaluation.results import write_results
from megaclass.evaluation.training_images import write_training_images
from megaclass.inference import load
from megaclass.insightface.checkpoints import read_backbone
from megaclass.phases import PHASES
from megaclass.training.top import draw, read_run

SAMPLE_MUTATIONS = 60


def with_its_digest(whole: bytes, rng: np.random.Generator) -> bytes:
    """A manifest by somebody who knows how to write one."""
    content = mutate_json(whole, rng)
    try:
        values = json.loads(content)
        values.pop("sha256", None)
        return json.dumps({**values, "sha256": _digest(values)}).encode()
    except (ValueError, TypeError, AttributeError):
        return content


STATE = {
    "stem.0.weight": torch.arange(8.0),
    "fc.weight": torch.ones(2, 128),
    "layer1.0.conv1.weight": torch.zeros(2, 2, dtype=torch.float16),
    "bn.num_batches_tracked": torch.tensor(3),
}


def params_file() -> bytes:
    """An MXNet .params of three arrays, of three versions of the format."""
    array = np.arange(4, dtype="<f4").tobytes()
    new = struct.pack("<IiIqqiii", 0xF993FAC9, 0, 2, 2, 2, 1, 0, 0) + array
    older = struct.pack("<IIqqiii", 0xF993FAC8, 2, 2, 2, 1, 0, 0) + array
    oldest = struct.pack("<IIIiii", 2, 2, 2, 1, 0, 0) + array
    names = [b"arg:fc1_gamma", b"arg:bn0_beta", b"aux:bn1_moving_mean"]
    listed = b"".join(struct.pack("<Q", len(name)) + name for name in names)
    return struct.pack("<QQQ", 0x112, 0, 3) + new + older + oldest + struct.pack("<Q", 3) + listed


def write_run(run: Path, *, has_results: bool) -> None:
    """A run folder with a curve, and results or pictures of faces: reports on less are read faster."""
    rng = np.random.default_rng(0)
    pictures = [b"\x89PNG\r\n\x1a\n" + bytes([number]) for number in range(24)]
    if has_results:
        scored = score_embeddings(rng.normal(size=(24, 4)), np.arange(12) % 2 == 0, xnorm=2.0)
        write_results(run, {"name": "run"}, [result_of_pairs("lfw", "lfw.bin", scored, pictures.__getitem__)])
    else:
        write_faces(run, [pictures[:2], pictures[2:4]])
    (run / "summary.json").write_text(json.dumps({"num_classes": 3, "final_loss": 1.5, "image_size": 16, "steps": 7}))
    rows = [{"step": step, "loss": 1.0, "elapsed_s": step, "data_wait_share": 0.1} for step in range(1, 4)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


EVENTS = (
    "start",
    "resume",
    "rank_change",
    "save",
    "evaluation",
    "skip",
    "slow_rank",
    "profile",
    "warning",
    "hang",
    "end",
)
"""As in docs/formats.md."""


def write_diary(run: Path) -> None:
    """Rows of metrics and events with all that a report and `megaclass top` show of them."""
    phases = {phase: [0.1, 0.2] for phase in PHASES}
    row = {"loss": 1.0, "images_per_second": 9.5, "learning_rate": 0.1, "target_cosine": 0.5, "evaluation_s": 0.5}
    row |= {f"{phase}_s": 0.15 for phase in PHASES} | {"rank_seconds": phases, "rank_gpu_memory_gib": [1.0, 2.0]}
    row |= {"slow_rank": 1, "slow_phase": "data", "slower": 0.5, "skipped_steps": 1, "data_wait_share": 0.1}
    rows = [{"step": step, "elapsed_s": step, **row} for step in range(1, 6)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {"num_steps": 5, "world_size": 2, "version": "1", "text": "x", "seconds": 0.5, "outcome": "finished"}
    events = [{"time": 1.7e9 + at, "event": event, "step": at, **fields} for at, event in enumerate(EVENTS)]
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


def write_checkpoint(run: Path) -> Path:
    with CheckpointWriter(run / "checkpoints", config="[backbone]\n", keep=1, device=torch.device("cpu")) as writer:
        writer.save(
            Snapshot(
                step=20,
                shared={f"backbone.{name}": tensor for name, tensor in STATE.items()},
                head_rows={"weight": torch.ones(3, 4)},
                class_start=0,
                class_stop=3,
                num_classes=3,
                rank_state={"generator": torch.zeros(4, dtype=torch.uint8)},
                metrics={"loss": 1.0},
            )
        )
    return next((run / "checkpoints").glob("step-*")) / "manifest.json"


def make_target(name: str, folder: Path) -> Target:
    def at(path: Path, read: Callable[[], object], change: Callable[..., bytes] = mutate) -> Target:
        whole = path.read_bytes()

        def attempt(content: bytes) -> None:
            path.write_bytes(content)
            read()

        return Target(whole, attempt, change)

    def weights() -> None:
        for tensor in (state := read_backbone(path)).values():
            tensor.float().sum()
        recognise(state, str(path))

    if name.endswith(".pth"):
        path = folder / "model.pth"
        torch.save(STATE, path, _use_new_zipfile_serialization=name == "archive .pth")
        return at(path, weights)
    if name == ".params":
        path = folder / "model.params"
        path.write_bytes(params_file())
        return at(path, weights)
    if name == ".safetensors":
        path = folder / "model.safetensors"
        said = {"backbone": "slim", "embedding_dim": "2", "image_size": "16"}
        save_file({"fc.weight": torch.ones(2, 128), "stem.0.weight": torch.ones(3)}, path, metadata=said)
        return at(path, lambda: load(path))
    if name == "manifest":
        write_run(folder, has_results=False)
        path = write_checkpoint(folder)
        return at(path, lambda: read_checkpoint(folder), with_its_digest)
    write_run(folder, has_results=name.startswith("evaluation"))
    if name in DIARIES:
        write_diary(folder)
        return at(folder / DIARIES[name], lambda: look_at(folder), mutate_lines)
    if name.startswith(training_images.FILE):
        worst = WorstClass(name="a", mean_cosine=0.1, num_images=2, num_closer_to_another=1, pictures=[b"p"])
        confused = ConfusedImage(
            name="i", own_class="a", own_cosine=0.1, other_class="b", other_cosine=0.5, pictures=[b"p", b"q"]
        )
        found = Examples(num_classes=2, num_images=9, num_confused=1, worst=[worst], confused=[confused])
        write_training_images(folder, found)
        return at(folder / training_images.FILE, lambda: look_at(folder), mutate_findings)
    change = mutate_json if name.endswith(".json") else mutate
    return at(folder / name, lambda: render_report(report_of_runs([folder], device=torch.device("cpu"))), change)


def mutate_findings(whole: bytes, rng: np.random.Generator) -> bytes:
    """Changes the JSON among the arrays of training_images.npz."""
    with np.load(io.BytesIO(whole)) as found:
        arrays = dict(found)
    arrays["findings"] = np.frombuffer(mutate_json(arrays["findings"].tobytes(), rng), dtype=np.uint8)
    content = io.BytesIO()
    np.savez(content, **arrays)
    return content.getvalue()


def look_at(run: Path) -> None:
    render_report(report_of_runs([run], device=torch.device("cpu")))
    console = Console(width=80, force_terminal=False)
    with console.capture() as shown:
        console.print(draw(read_run(run), 1.7e9))
    assert "\x1b" not in shown.get()


def read_checkpoint(run: Path) -> None:
    found, reasons = newest_whole(run / "checkpoints")
    assert found is not None or reasons
    if found is not None:
        manifest = read_manifest(found)
        load_shared(found)
        assert sum(len(rows["weight"]) for _, rows in saved_rows(found, manifest, 0, manifest.num_classes)) == 3
        load_rank_state(found, manifest, manifest.world_size - 1)
        report_of_runs([run], device=torch.device("cpu"))
        load(run)


DIARIES = {"metrics.jsonl, values": "metrics.jsonl", "events.jsonl, values": "events.jsonl"}
NAMES = [
    "legacy .pth",
    "archive .pth",
    ".params",
    ".safetensors",
    "manifest",
    "faces.npz",
    "evaluation.json",
    "evaluation/lfw.npz",
    "summary.json",
    "metrics.jsonl",
    *DIARIES,
    "training_images.npz, values",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_of_damaged_files_gives_a_result_or_one_line(name, capfd):
    counts = fuzz(make_target, name, range(SAMPLE_MUTATIONS))
    assert_clean(counts)
    # Damaged lines of metrics are left out, and the report is written without them.
    # The same holds for the other records of a training.
    has_records = name.startswith(("metrics.jsonl", "events.jsonl", "training_images"))
    assert counts.refused == 0 if has_records else counts.refused > 0
