"""Small models, pairs and run folders that several tests of evaluation need."""

import io
import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

SIZE, WIDTH, NUM_CLASSES = 32, 16, 6


def encode(pixels: np.ndarray, image_format: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, image_format)
    return file.getvalue()


def write_megaface_feature(path: Path, vector_D: np.ndarray) -> None:
    """As MegaFace's tools write it: int32 length, 1, 4, 5, then float32."""
    path.write_bytes(struct.pack("<4i", len(vector_D), 1, 4, 5) + vector_D.astype("<f4").tobytes())


@pytest.fixture(autouse=True)
def messages():
    """Messages of the library on stderr, as under the command line."""
    from megaclass_launch.messages import messages_on_stderr

    with messages_on_stderr():
        yield


@pytest.fixture
def picture() -> Callable[..., bytes]:
    """picture(identity, take): an encoded image; takes of one identity look alike."""

    def draw(identity: int, take: int = 0, size: int = SIZE, image_format: str = "PNG") -> bytes:
        base = np.random.default_rng(identity).integers(0, 256, (4, 4, 3))
        noise = np.random.default_rng([identity, take]).integers(-20, 20, (size, size, 3))
        pixels = np.kron(base, np.ones((size // 4, size // 4, 1), dtype=np.int64)) + noise
        return encode(pixels.clip(0, 255).astype(np.uint8), image_format)

    return draw


@pytest.fixture
def network() -> torch.nn.Module:
    """A slim backbone with statistics of its own."""
    return trained_backbone("slim")


def trained_backbone(name: str, size: int = SIZE, width: int = WIDTH) -> torch.nn.Module:
    from megaclass.backbones import build_backbone

    torch.manual_seed(0)
    backbone = build_backbone(name, embedding_dim=width, image_size=size)
    for module in backbone.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.momentum = None  # plain means: statistics that fit after two batches
    for _ in range(2):
        backbone(torch.rand(8, 3, size, size) * 2 - 1)
    return backbone.eval()


@pytest.fixture
def pairs_bin(tmp_path, picture) -> Callable[..., Path]:
    """pairs_bin("lfw"): 40 pairs, every second one of one identity."""

    def write(name: str = "lfw", num_pairs: int = 40, size: int = SIZE) -> Path:
        from megaclass.data.pair_file import PairSet, write_pairs

        images, is_same = [], np.arange(num_pairs) % 2 == 0
        for pair in range(num_pairs):
            images += [picture(pair, 0, size), picture(pair if is_same[pair] else 1000 + pair, 1, size)]
        path = tmp_path / f"{name}.bin"
        write_pairs(path, PairSet(images, is_same))
        return path

    return write


@pytest.fixture
def make_run(tmp_path) -> Callable[..., Path]:
    """make_run("demo"): a run folder as training leaves it, with one checkpoint."""

    def make(
        name: str = "demo", backbone: str = "slim", class_names: bytes = b"", ema: bool = False, own: str = ""
    ) -> Path:
        """own: what the settings call a backbone of the user's own, a linear layer."""
        from megaclass.checkpoint.save import CheckpointWriter, Snapshot

        run = tmp_path / name
        width = 8 if own else WIDTH
        model = torch.nn.ModuleDict({"linear": torch.nn.Linear(768, width)}) if own else trained_backbone(backbone)
        run.mkdir()
        config = f'[backbone]\nname = "{own or backbone}"\nembedding_dim = {width}\n'
        shared = {f"backbone.{key}": tensor for key, tensor in model.state_dict().items()}
        if ema:
            shared |= {f"ema.{key}": parameter.detach() + 1 for key, parameter in model.named_parameters()}
        centres = torch.randn(NUM_CLASSES, width, generator=torch.Generator().manual_seed(1))
        with CheckpointWriter(
            run / "checkpoints", config=config, keep=1, device=torch.device("cpu"), class_names=class_names
        ) as writer:
            rows = {"weight": centres}
            writer.save(
                Snapshot(
                    step=20,
                    shared=shared,
                    head_rows=rows,
                    class_start=0,
                    class_stop=NUM_CLASSES,
                    num_classes=NUM_CLASSES,
                )
            )
        (run / "config.toml").write_text(config)
        rows_of_metrics = [
            {
                "step": step,
                "loss": 9.0 / (1 + step),
                "learning_rate": 0.1,
                "images_per_second": 900.0 + step,
                "data_wait_share": 0.25,
                "elapsed_s": float(step),
            }
            for step in range(1, 21)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of_metrics))
        summary = {
            "num_classes": NUM_CLASSES,
            "num_images": 60,
            "world_size": 2,
            "steps": 20,
            "data_fingerprint": "ab12",
        }
        (run / "summary.json").write_text(json.dumps(summary))
        return run

    return make
