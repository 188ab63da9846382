"""What is shipped: the wheel holds everything, and the demo's command runs from it in an empty venv."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import megaclass

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[1]
TINY = [
    "synth.identities=20",
    "synth.images_per_identity=4",
    "synth.size=32",
    "synth.pairs=20",
    "backbone.embedding_dim=16",
    "train.epochs=0.5",
    "train.global_batch=16",
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def commands(wheel, tmp_path_factory):
    """Folder with the commands of an empty venv, in which the wheel is installed.

    What the wheel depends on is lent by this test's own site-packages through a .pth file, so nothing is downloaded.
    Other .pth files there are not read through it, so an editable megaclass stays out.
    """
    folder = tmp_path_factory.mktemp("venv") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    lent = {
        sysconfig.get_path("purelib"),
        *(path for path in sys.path if path.endswith(("site-packages", "dist-packages"))),
    }
    (site / "lent.pth").write_text("\n".join(sorted(lent)))
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--ignore-installed", str(wheel)]
    run = subprocess.run(
        [folder / "bin" / "python", *install], capture_output=True, text=True, timeout=240, check=False
    )
    assert run.returncode == 0, run.stderr
    return folder / "bin"


def call(*command, cwd):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    options = {"env": env, "cwd": cwd, "capture_output": True, "text": True, "timeout": 240, "check": False}
    run = subprocess.run([str(part) for part in command], **options)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_wheel_holds_every_module_the_type_marker_and_the_licence(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"megaclass-{megaclass.__version__}.dist-info/METADATA").decode()
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "megaclass").rglob("*.py")}
    assert sources <= names
    report = "megaclass/evaluate/report/report"
    assert {f"{report}.html.j2", f"{report}.css", f"{report}.js"} <= names
    assert "megaclass/inference/search.html.j2" in names
    assert {f"megaclass/recipes/{path.name}" for path in (ROOT / "recipes").glob("*.toml")} <= names
    assert {"hub", "ui", "onnx", "retrieval"} <= set(re.findall(r"^Provides-Extra: (.+)$", metadata, re.MULTILINE))
    assert "megaclass/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"megaclass", f"megaclass-{megaclass.__version__}.dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "License-Expression: Apache-2.0" in metadata
    for extra in ("ui", "tensorboard", "wandb", "onnx", "retrieval", "hvd", "ray", "dev"):
        assert f"Provides-Extra: {extra}\n" in metadata


def test_the_index_would_accept_the_wheel_and_show_its_readme(wheel):
    run = [sys.executable, "-m", "twine", "check", "--strict", str(wheel)]
    checked = subprocess.run(run, capture_output=True, text=True, timeout=120, check=False)
    assert checked.returncode == 0 and "PASSED" in checked.stdout, checked.stdout + checked.stderr


def test_the_demos_command_runs_from_the_wheel_in_an_empty_folder(commands, tmp_path):
    call(commands / "megaclass", "demo", *TINY, cwd=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["datasets", "runs"]
    run_dir = tmp_path / "runs" / "demo"
    names = {path.name for path in run_dir.iterdir()}
    assert names >= {"config.toml", "metrics.jsonl", "summary.json", "report.html", "model.safetensors", "model.onnx"}
    assert json.loads((run_dir / "summary.json").read_text())["world_size"] == 2


def test_the_wheels_own_code_is_what_runs_there(commands, tmp_path):
    where = call(commands / "python", "-c", "import megaclass; print(megaclass.__file__)", cwd=tmp_path)
    assert where.startswith(str(commands.parent))
    assert call(commands / "megaclass", "--version", cwd=tmp_path) == f"megaclass {megaclass.__version__}\n"


def test_importing_the_package_does_not_import_torch(commands, tmp_path):
    code = (
        "import sys, megaclass, megaclass.config.schema, megaclass_launch.world, megaclass_launch.launchers.local\n"
        "print('torch' in sys.modules)"
    )
    assert call(commands / "python", "-c", code, cwd=tmp_path) == "False\n"
