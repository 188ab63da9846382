"""megaclass.hvd.tensorflow and .keras on real ranks. Each job checks many things: TensorFlow takes seconds to import."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import free_port
from tests.hvd.jobs import outputs_of, start_script

import megaclass.hvd as hvd

JOBS = Path(__file__).parent / "jobs"
ROOT = Path(__file__).parents[3]
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "TF_ENABLE_ONEDNN_OPTS": "0"}

needs_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None,
    reason="TensorFlow is not installed: pip install 'megaclass[tensorflow]'",
)


def _run_job(name: str, *arguments: str, **variables: str) -> list[str]:
    """Lines that rank 0 printed, except for the last one, by which it said that all is good."""
    # By path: TensorFlow reads the source of functions whose loops it turns into loops of the graph.
    script = (
        f"import runpy, sys; sys.argv[1:] = {arguments!r}; runpy.run_path({str(JOBS / name)!r}, run_name='__main__')"
    )
    processes = start_script(script, 2, free_port(), **QUIET, MEGACLASS_JOB_SECRET="ab" * 32, **variables)
    results = outputs_of(processes, timeout_s=280)
    for rank, (code, out, err) in enumerate(results):
        assert (code, out.splitlines()[-1:]) == (0, ["all good"]), f"rank {rank}\n{out[-2000:]}\n{err[-6000:]}"
    return results[0][1].splitlines()[:-1]


@needs_tensorflow
@pytest.mark.ranks
def test_every_collective_works_eagerly_and_in_graphs_with_its_gradient_and_its_errors(tmp_path):
    _run_job("collectives.py", HOROVOD_TIMELINE=str(tmp_path / "timeline.json"))


@needs_tensorflow
@pytest.mark.ranks
def test_training_on_two_ranks_equals_one_process_with_the_double_batch(tmp_path):
    _run_job("training.py", str(tmp_path))


@needs_tensorflow
@pytest.mark.ranks
def test_v1_sessions_work_and_all_names_of_horovod_are_there():
    found = json.loads(_run_job("sessions.py", PYTHONPATH=hvd.shims_folder())[-1])
    lines = (Path(__file__).parent / "signatures.txt").read_text().splitlines()
    for module, name, *parameters in (line.split() for line in lines if not line.startswith("#")):
        assert found[module][name] == parameters, f"horovod.{module}.{name}"
    _check_table(found)


def _check_table(found: dict[str, dict[str, object]]) -> None:
    """The table in docs/horovod.md about TensorFlow and Keras says which names exist."""
    text = (ROOT / "docs" / "horovod.md").read_text().partition("## TensorFlow and Keras")[2]
    rows = re.findall(r"^\| (`[^|]+`) \| (same|differs|absent) \| (same|differs|absent) \|", text, re.MULTILINE)
    assert len(rows) > 20
    listed = set()
    for cell, in_tensorflow, in_keras in rows:
        for name in re.findall(r"`(\w+)`", cell):
            listed.add(name)
            assert (name in found["tensorflow"]) == (in_tensorflow != "absent"), (
                f"{name} in TensorFlow: {in_tensorflow}"
            )
            for module in ("tensorflow.keras", "keras"):
                assert (name in found[module]) == (in_keras != "absent"), f"{name} in {module}: {in_keras}"
    modules = {"compression", "functions", "gradient_aggregation", "gradient_aggregation_eager", "keras", "mpi_ops"}
    modules |= {"sync_batch_norm", "util", "is_version_greater_equal_than"}
    assert set(found["tensorflow"]) | set(found["keras"]) | set(found["tensorflow.keras"]) <= listed | modules


def _run_example(name: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "megaclass", "run", "--horovod", "-np", "2", sys.executable]
    command += [str(ROOT / "examples" / "tensorflow" / name), *arguments]
    env = {**os.environ, **QUIET, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_tensorflow
@pytest.mark.ranks
def test_unmodified_scripts_in_horovods_idiom_run_and_learn(tmp_path):
    model = tmp_path / "digits.keras"
    printed = _run_example("keras_mnist.py", "--images", "2048", "--epochs", "2", "--checkpoint", str(model))
    accuracies = re.findall(r"rank (\d) of 2: test accuracy ([\d.]+)%", printed)
    # Both ranks have the same model, and it has learned; guessing gives 10 %.
    assert len(accuracies) == 2 and accuracies[0][1] == accuracies[1][1] and float(accuracies[0][1]) > 25, printed
    assert "finished gradual learning rate warmup to 0.002" in printed and model.exists()
    printed = _run_example("gradient_tape.py", "--images", "2048", "--steps", "100", "--fp16-allreduce")
    accuracies = re.findall(r"test accuracy ([\d.]+)%, weights differ by 0\.0\b", printed)
    assert len(accuracies) == 2 and float(accuracies[0]) > 25, printed
    small = ("--model", "MobileNet", "--image-size", "32", "--batch-size", "2", "--num-warmup-batches", "1")
    printed = _run_example("synthetic_benchmark.py", *small, "--num-batches-per-iter", "1", "--num-iters", "2")
    assert float(re.findall(r"Total img/sec on 2 process\(es\): ([\d.]+)", printed)[0]) > 0


# Imports every module but those for TensorFlow, and prints those of TensorFlow and Keras that came along.
IMPORTS = """
import importlib, pathlib, sys
import megaclass
folder = pathlib.Path(megaclass.__file__).parent
sys.path.insert(0, sys.argv[1])
for file in sorted(folder.rglob("*.py")):
    parts = file.relative_to(folder.parent).with_suffix("").parts
    if "shims" in parts or "__main__" in parts or parts[1:3] in [("hvd", "tensorflow"), ("hvd", "keras")]:
        continue
    importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
import horovod.torch, horovod.torch.elastic
print(sorted({name.partition(".")[0] for name in sys.modules} & {"megaclass", "keras", "tensorflow"}))
"""


@needs_tensorflow
@pytest.mark.ranks
def test_no_other_module_imports_tensorflow_or_keras():
    command = [sys.executable, "-c", IMPORTS, hvd.shims_folder()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.stdout == "['megaclass']\n", done.stdout + done.stderr


def test_a_missing_tensorflow_is_reported_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    for name in [name for name in sys.modules if name.startswith("megaclass.hvd.tensorflow")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=r"needs TensorFlow 2\.16 or later, .*pip install 'megaclass\[tensorflow\]'"):
        importlib.import_module("megaclass.hvd.tensorflow")
