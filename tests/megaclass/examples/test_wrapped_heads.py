"""The head inside a LightningModule and inside a model that Accelerate prepares: real trainers, real DDP, real files."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.forked import python_script, torchrun
from torch import Tensor
from torch.nn.functional import linear, normalize

from megaclass import ArcFace, PartialFC

EXAMPLES = Path(__file__).parents[3] / "examples"
NUM_CLASSES, WIDTH = 25, 16


def _run(script: str, num_ranks: int, folder: Path) -> str:
    run = torchrun(num_ranks, python_script, EXAMPLES / script, str(folder))
    assert run.returncode == 0, run.stderr
    return run.stdout


def _top_1(state: dict[str, Tensor]) -> float:
    """Of the centres in a saved state, after it went through a head on one rank."""
    head = PartialFC(WIDTH, NUM_CLASSES, margin=ArcFace(scale=16, margin=0.3), seed=99)
    head.load_state_dict({name.removeprefix("head."): t for name, t in state.items() if name.startswith("head.")})
    prototypes = torch.randn(NUM_CLASSES, WIDTH, generator=torch.Generator().manual_seed(7))
    embeddings = linear(prototypes, state["backbone.weight"], state["backbone.bias"])
    cosines = normalize(embeddings) @ normalize(head.centres(torch.arange(NUM_CLASSES))).T
    return (cosines.argmax(1) == torch.arange(NUM_CLASSES)).double().mean().item()


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_under_lightning_the_centres_are_learned_and_the_checkpoint_holds_all_of_them(num_ranks, tmp_path):
    pytest.importorskip("lightning", reason="Lightning is not installed: it is part of the dev group")
    assert "top-1 of the centres 1.00" in _run("lightning_head.py", num_ranks, tmp_path)
    state = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]
    assert len(state["head.store.weight_RD"]) == NUM_CLASSES
    assert _top_1(state) == 1.0


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_under_accelerate_the_centres_are_learned_and_the_saved_state_holds_all_of_them(num_ranks, tmp_path):
    pytest.importorskip("accelerate")
    assert "top-1 of the centres 1.00" in _run("accelerate_head.py", num_ranks, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    assert len(state["head.store.weight_RD"]) == NUM_CLASSES
    assert _top_1(state) == 1.0
