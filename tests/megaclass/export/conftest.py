"""Run folders to export from."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

SIZE, WIDTH = 32, 16
NAMES = ["anna", "bert", "zoë"]


@pytest.fixture
def make_run(tmp_path) -> Callable[..., Path]:
    """make_run("mbf"): a run folder as training leaves it, with one checkpoint of three named classes."""

    def make(backbone: str = "mbf", size: int | tuple[int, int] = SIZE, settings: str = "") -> Path:
        from megaclass.backbones import build_backbone
        from megaclass.checkpoint.save import CheckpointWriter, Snapshot
        from megaclass.image_size import height_and_width

        torch.manual_seed(0)
        run, model = tmp_path / "run", build_backbone(backbone, embedding_dim=WIDTH, image_size=size)
        run.mkdir()
        model(torch.rand(4, 3, *height_and_width(size)) * 2 - 1)
        centres = torch.randn(len(NAMES), WIDTH)
        with CheckpointWriter(
            run / "checkpoints",
            config=f'[backbone]\nname = "{backbone}"\nembedding_dim = {WIDTH}\n{settings}',
            keep=1,
            device=torch.device("cpu"),
            class_names="".join(f"{name}\n" for name in NAMES).encode(),
        ) as writer:
            writer.save(
                Snapshot(
                    step=7,
                    shared={f"backbone.{key}": tensor for key, tensor in model.state_dict().items()},
                    head_rows={"weight": centres},
                    class_start=0,
                    class_stop=len(NAMES),
                    num_classes=len(NAMES),
                )
            )
        summary = {"num_classes": 3, "num_images": 1234, "world_size": 1, "steps": 7, "data_fingerprint": "ab12cd"}
        (run / "summary.json").write_text(json.dumps(summary))
        return run

    return make
