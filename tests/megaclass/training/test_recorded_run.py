"""Runs of earlier versions go on with this version: recorded runs, and the names of the weights of 0.1.0.

recorded/run_0_1_0/run has the settings, the losses of all eight steps and the checkpoint of step 4, as 0.1.0 wrote them on
three ranks; ended_model.safetensors is the model that it had after step 8. run_0_2_0 is the same of 0.2.0 on 2026-11-19, on
two ranks, with all of the head's state: AdaFace, AdamW, bf16, sub-centres. Both sample classes and average the weights.
"""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.forked import ended_ranks, megaclass_command

from megaclass.backbones import build_backbone

RECORDED = Path(__file__).parent / "recorded"
# SHA-256 of the sorted lines "name shape dtype" of the state dict, for embeddings of 512 numbers and images of 112 pixels.
WEIGHTS_OF_0_1_0 = {
    "slim": "06653f3cb7fda97e",
    "iresnet18": "54131c53e65d2eee",
    "iresnet34": "853c7ff07e06d4ea",
    "iresnet50": "77b106ae04fc44f3",
    "iresnet100": "fd646aebba2db3d5",
    "iresnet200": "ffebb87d0ad1960a",
    "mbf": "f3fc49383b7c68e4",
    "mbf_large": "c6f0997e6db5d13f",
    "vit_t": "4eab8fb47e8628b3",
    "vit_s": "50c3e47eaa38cd89",
    "vit_b": "f9e03f0167a95c02",
    "vit_l": "6d752bcd0e0bdbe8",
}


def losses_in(metrics: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows}


@pytest.mark.ranks
@pytest.mark.parametrize(("name", "num_ranks"), [("run_0_1_0", 3), ("run_0_2_0", 2)])
def test_a_recorded_run_is_resumed_with_its_recipe_and_has_the_losses_that_it_had(
    name, num_ranks, tmp_path, monkeypatch
):
    monkeypatch.chdir(shutil.copytree(RECORDED / name, tmp_path / "copy"))
    recorded = losses_in(Path("run/metrics.jsonl"))
    assert sorted(recorded) == [1, 2, 3, 4, 5, 6, 7, 8]
    first_rows = Path("run/metrics.jsonl").read_text().splitlines(keepends=True)[:4]
    Path("run/metrics.jsonl").write_text("".join(first_rows))
    ranks = ended_ranks(num_ranks, megaclass_command, "train", "recipe.toml", "--resume", env={"PYTHONPATH": "."})
    assert [rank.returncode for rank in ranks] == [0] * num_ranks, [rank.stderr for rank in ranks]
    assert "resuming from run/checkpoints/step-000000004, step 4\n" in ranks[0].stderr
    # Bit for bit on the kind of processor where it was recorded; others add in another order.
    assert losses_in(Path("run/metrics.jsonl")) == pytest.approx(recorded, rel=1e-5)
    model, expected = load_file("run/model.safetensors"), load_file("ended_model.safetensors")
    assert model.keys() == expected.keys()
    for name, values in model.items():
        torch.testing.assert_close(values, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", WEIGHTS_OF_0_1_0)
def test_weights_of_every_backbone_have_the_names_and_shapes_of_0_1_0(name):
    with torch.device("meta"):
        state = build_backbone(name, embedding_dim=512, image_size=112).state_dict()
    lines = sorted(f"{key} {tuple(value.shape)} {value.dtype}" for key, value in state.items())
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] == WEIGHTS_OF_0_1_0[name]
