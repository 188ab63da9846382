"""Whole `megaclass train` runs on 1, 2 and 4 ranks over NCCL. Run with `make test-gpu`."""

import json
import os
import shutil
import sys
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from tests.be_host import be_host
from tests.forked import ended_ranks, megaclass_command
from tests.launch.conftest import Here, Run, run, wait_until  # noqa: F401 (fixture)
from tests.many_gpus.conftest import DEVICE, GpuRanks

from megaclass.cli.main import main
from megaclass.training.model import graphed_backbone

HERE = Path(__file__).parent
RECIPE = """
[data]
path = "{data}"
[backbone]
name = "slim"
embedding_dim = 64
batch_norm = "sync"
[head]
margin = "cosface"
margin_size = 0.1
scale = 16.0
sample_rate = 0.5
[optimizer]
lr = 0.003
[train]
run_dir = "runs"
device = "{device}"
epochs = 4
global_batch = 32
report_steps = 1
evaluate_epochs = 2
precision = "float32"
[export]
onnx = false
"""
NUM_STEPS = 20
WITHOUT_TF32 = {"NVIDIA_TF32_OVERRIDE": "0"}


def _train(is_host: bool, *arguments: str) -> None:
    if is_host:
        be_host(int(os.environ["RANK"]))
    capture = graphed_backbone.CapturedBackbone.__init__

    def counted(*args: Any) -> None:
        capture(*args)
        print("captured", flush=True)

    graphed_backbone.CapturedBackbone.__init__ = counted
    megaclass_command("train", *arguments)


class Runs:
    """Runs of one recipe. A run that was asked for before is not repeated."""

    def __init__(self, folder: Path, ranks: GpuRanks) -> None:
        self.folder, self.are_hosts = folder, ranks.are_hosts
        self.recipe = folder / "recipe.toml"
        options = ["--identities", "20", "--images-per-identity", "8", "--size", "32", "--pairs", "40"]
        assert main(["data", "synth", *options, "--out", str(folder / "data")]) == 0
        self.recipe.write_text(RECIPE.format(data=folder / "data", device=DEVICE))

    def train(self, size: int, run_dir: Path, *settings: str) -> list[CompletedProcess[str]]:
        are_hosts = self.are_hosts(size)
        done = ended_ranks(
            *(size, _train, are_hosts, str(self.recipe), f"train.run_dir={run_dir}", *settings),
            ranks_per_host=1 if are_hosts else 0,
            env=WITHOUT_TF32,
            timeout_s=90,
        )
        assert [rank.returncode for rank in done] == [0] * size, "\n".join(rank.stderr[-3000:] for rank in done)
        return done

    def of(self, size: int) -> Path:
        run_dir = self.folder / f"run-{size}"
        if not (run_dir / "summary.json").exists():
            self.train(size, run_dir)
        return run_dir


def curve(run_dir: Path) -> list[tuple[int, Any]]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows]


def same(expected: list[tuple[int, float]], rel: float) -> list[tuple[int, Any]]:
    return [(step, pytest.approx(loss, rel=rel)) for step, loss in expected]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, gpu_ranks: GpuRanks) -> Runs:
    gpu_ranks.skip_if_impossible(4)
    return Runs(tmp_path_factory.mktemp("many-gpus"), gpu_ranks)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
def test_loss_curve_and_accuracies_are_those_of_one_rank(runs, size):
    one, several = runs.of(1), runs.of(size)
    assert [step for step, _ in curve(one)] == list(range(1, NUM_STEPS + 1))
    assert curve(several) == same(curve(one), rel=1e-3)
    summaries = [json.loads((run_dir / "summary.json").read_text()) for run_dir in (one, several)]
    assert summaries[1]["world_size"] == size
    accuracies = [summary["verification_accuracy"] for summary in summaries]
    # One of 40 pairs may lie on the threshold.
    assert accuracies[1] == pytest.approx(accuracies[0], abs=0.03)


@pytest.mark.gpu
def test_what_4_ranks_saved_2_ranks_resume_with_the_curve_of_4(runs, tmp_path):
    whole = runs.of(4)
    run_dir = Path(shutil.copytree(whole, tmp_path / "run"))
    (run_dir / "summary.json").unlink()
    shutil.rmtree(run_dir / "checkpoints" / f"step-{NUM_STEPS:09d}")
    done = runs.train(2, run_dir, "--resume")
    assert f"step-{NUM_STEPS - 5:09d}, step {NUM_STEPS - 5}" in done[0].stderr
    assert curve(run_dir) == same(curve(whole), rel=1e-3)
    assert json.loads((run_dir / "summary.json").read_text())["world_size"] == 2


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
def test_cuda_graphs_on_several_ranks_change_nothing(runs, tmp_path, size):
    curves = {}
    for setting in ("off", "on"):
        run_dir = tmp_path / setting
        settings = ("backbone.batch_norm=local", f"train.cuda_graph={setting}")
        done = runs.train(size, run_dir, *settings, "train.evaluate_epochs=0")
        assert not any("could not be captured" in rank.stderr for rank in done), done[0].stderr
        are_captured = ["captured" in rank.stdout.splitlines() for rank in done]
        assert are_captured == [setting == "on" and DEVICE == "cuda"] * size
        curves[setting] = curve(run_dir)
    assert curves["on"] == same(curves["off"], rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("number_format", ["bf16", "fp8"])
def test_compressed_gradients_train_with_nearly_the_same_curve(runs, tmp_path, number_format):
    """On a GPU they travel on a stream of their own, during the backward pass."""
    run_dir = tmp_path / "run"
    runs.train(2, run_dir, f"train.compression={number_format}", "train.evaluate_epochs=0")
    assert curve(run_dir) == same(curve(runs.of(1)), rel=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("fault", ["forward", "backward", "memory", "evaluation", "save"])
def test_one_rank_that_fails_is_heard_and_all_ranks_are_gone_within_15_s(runs, run, tmp_path, fault, size):  # noqa: F811
    job = start(run, runs, ("-np", str(size)), tmp_path / "run", "backbone.name=faulty_backbone:FaultyNet", FAULT=fault)
    job.says("the fault happens now", timeout_s=90)
    assert job.wait(15) != 0, job.story()
    run.seconds_until_nothing_is_left(1.0)
    assert ("ran out of memory on" if fault == "memory" else f"planned failure in {fault}") in job.err, job.story()


def start(run: Here, runs: Runs, options: tuple[str, ...], run_dir: Path, *settings: str, **env: str) -> Run:  # noqa: F811
    """Starts `megaclass run options… megaclass train`; ranks that share a GPU are hosts of their own."""
    train = ("-m", "megaclass", "train", str(runs.recipe), f"train.run_dir={run_dir}", *settings)
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    one_gpu = "1" if runs.are_hosts(4) else "0"
    env |= {**WITHOUT_TF32, "PYTHONPATH": path, "MEGACLASS_TEST_ONE_GPU": one_gpu}
    return run.start(*options, sys.executable, str(HERE / "as_host.py"), *train, env=env)
