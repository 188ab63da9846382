"""horovod.tensorflow and .keras on real ranks. Each job checks many things: TensorFlow takes seconds to import."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.forked import python_script, run_forked
from tests.shared_folder import made_once

JOBS = Path(__file__).parent / "jobs"
ROOT = Path(__file__).parents[3]
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "TF_ENABLE_ONEDNN_OPTS": "0"}

needs_tensorflow = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None,
    reason="TensorFlow is not installed: pip install 'megaclass-horovod[tensorflow]'",
)


# Runs scripts one after another, each with its own arguments, as `python script arguments…` would.
# By path: TensorFlow reads the source of functions whose loops it turns into loops of the graph.
IN_TURN = """
import os, runpy, sys
for path, *sys.argv[1:] in {scripts!r}:
    sys.path.insert(0, os.path.dirname(path))
    runpy.run_path(path, run_name="__main__")
    del sys.path[0]
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Path:
    """Folder with the output of a job of two ranks, and what its scripts have written."""

    def run(folder: Path) -> None:
        examples = ROOT / "examples" / "tensorflow"
        small = "--model MobileNet --image-size 32 --batch-size 2 --num-warmup-batches 1 --num-batches-per-iter 1"
        scripts = [
            [str(JOBS / "collectives.py"), str(folder)],  # sets the number of TensorFlow's threads
            [str(JOBS / "training.py"), str(folder)],
            [str(examples / "keras_mnist.py"), *f"--images 2048 --epochs 2 --checkpoint {folder}/digits.keras".split()],
            [str(examples / "gradient_tape.py"), *["--images", "2048", "--steps", "100", "--fp16-allreduce"]],
            [str(examples / "synthetic_benchmark.py"), *small.split(), "--num-iters", "2"],
            [str(JOBS / "sessions.py")],  # ends eager execution for its process
        ]
        (folder / "in_turn.py").write_text(IN_TURN.format(scripts=scripts))
        command = [sys.executable, "-m", "megaclass", "run", "--horovod", "-np", "2", sys.executable]
        env = {**os.environ, **QUIET, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, str(folder / "in_turn.py")], capture_output=True, text=True, timeout=580, env=env, check=False
        )
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
        (folder / "stdout").write_text(done.stdout)

    return made_once(tmp_path_factory, "tensorflow-job", run)


@needs_tensorflow
@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_every_collective_works_as_do_v1_sessions_and_all_names_of_horovod_are_there(job):
    """Collectives run eagerly and in graphs, with their gradients and errors."""
    printed = (job / "stdout").read_text()
    assert printed.count("collectives: all good") == printed.count("sessions: all good") == 2, printed
    found = json.loads(re.findall(r"^\[0\]<stdout>:(\{.*)$", printed, re.MULTILINE)[-1])
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
    # Modules are names of their package once they are imported.
    package = ROOT / "packages" / "horovod" / "src" / "horovod" / "tensorflow"
    modules = {path.stem for folder in (package, package / "keras") for path in folder.iterdir()}
    modules |= {"is_version_greater_equal_than"}
    assert set(found["tensorflow"]) | set(found["keras"]) | set(found["tensorflow.keras"]) <= listed | modules


@needs_tensorflow
@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_training_equals_one_process_with_the_double_batch_and_unmodified_scripts_in_horovods_idiom_learn(job):
    printed = (job / "stdout").read_text()
    assert printed.count("training: all good") == 2, printed
    accuracies = re.findall(r"rank (\d) of 2: test accuracy ([\d.]+)%$", printed, re.MULTILINE)
    # Both ranks have the same model, and it has learned; guessing gives 10 %.
    assert len(accuracies) == 2 and accuracies[0][1] == accuracies[1][1] and float(accuracies[0][1]) > 25, printed
    assert "finished gradual learning rate warmup to 0.002" in printed and (job / "digits.keras").exists()
    accuracies = re.findall(r"test accuracy ([\d.]+)%, weights differ by 0\.0\b", printed)
    assert len(accuracies) == 2 and float(accuracies[0]) > 25, printed
    assert float(re.findall(r"Total img/sec on 2 process\(es\): ([\d.]+)", printed)[0]) > 0


# Imports every module but those for TensorFlow, and prints those of TensorFlow and Keras that came along.
IMPORTS = """
import importlib, pathlib, sys
import horovod
folder = pathlib.Path(horovod.__file__).parent
for file in sorted(folder.rglob("*.py")):
    parts = file.relative_to(folder.parent).with_suffix("").parts
    if "__main__" in parts or parts[1] in ("tensorflow", "keras", "mxnet", "spark", "ray"):
        continue
    importlib.import_module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
print(sorted({name.partition(".")[0] for name in sys.modules} & {"horovod", "keras", "tensorflow"}))
"""


@needs_tensorflow
@pytest.mark.ranks
def test_no_other_module_imports_tensorflow_or_keras():
    done = run_forked(python_script, IMPORTS)
    assert done.stdout == "['horovod']\n", done.stdout + done.stderr


def test_a_missing_tensorflow_is_reported_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    for name in [name for name in sys.modules if name.startswith("horovod.tensorflow")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(
        ImportError, match=r"needs TensorFlow 2\.16 or later, .*pip install 'megaclass-horovod\[tensorflow\]'"
    ):
        importlib.import_module("horovod.tensorflow")
