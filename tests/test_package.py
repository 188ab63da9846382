"""What is shipped: the wheels hold everything, and their commands run from them in empty environments."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import megaclass
import megaclass_launch

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[1]
# Folder in packages/ -> the import package and the name of the wheel.
PACKAGES = {
    "launch": ("megaclass_launch", "megaclass_launch"),
    "horovod": ("horovod", "megaclass_horovod"),
    "megaclass": ("megaclass", "megaclass"),
}
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
def wheels(tmp_path_factory):
    """The wheel of each package, keyed by the folder in packages/."""
    found = {}
    for name in PACKAGES:
        out = tmp_path_factory.mktemp("dist")
        source = ROOT / "packages" / name
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(source)]
        built = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert built.returncode == 0, built.stdout + built.stderr
        (found[name],) = out.glob("*.whl")
    return found


def environment(folder, wheels, *, lends):
    """Returns the folder with the commands of a new venv, in which the wheels are installed.

    lends: whether what the wheels depend on is lent by this test's own site-packages through a .pth file, so nothing is
    downloaded. Other .pth files there are not read through it, so editable packages stay out.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    if lends:
        site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        lent = {
            sysconfig.get_path("purelib"),
            *(path for path in sys.path if path.endswith(("site-packages", "dist-packages"))),
        }
        (site / "lent.pth").write_text("\n".join(sorted(lent)))
    install = ["--python", str(folder), "install", "--quiet", "--no-deps", "--no-index", "--ignore-installed"]
    run = subprocess.run(
        [sys.executable, "-m", "pip", *install, *map(str, wheels)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return folder / "bin"


@pytest.fixture(scope="module")
def commands(wheels, tmp_path_factory):
    """What `pip install megaclass` gives."""
    folder = tmp_path_factory.mktemp("megaclass") / "venv"
    return environment(folder, [wheels["launch"], wheels["megaclass"]], lends=True)


@pytest.fixture(scope="module")
def horovod_commands(wheels, tmp_path_factory):
    """What `pip install megaclass-horovod` gives."""
    folder = tmp_path_factory.mktemp("horovod") / "venv"
    return environment(folder, [wheels["launch"], wheels["horovod"]], lends=True)


def call(*command, cwd):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    options = {"env": env, "cwd": cwd, "capture_output": True, "text": True, "timeout": 240, "check": False}
    run = subprocess.run([str(part) for part in command], **options)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize(("name", "module", "dist"), [(name, *both) for name, both in PACKAGES.items()])
def test_a_wheel_holds_every_module_the_type_marker_and_the_licence(wheels, name, module, dist):
    with zipfile.ZipFile(wheels[name]) as archive:
        names = set(archive.namelist())
        info = f"{dist}-{megaclass.__version__}.dist-info"
        metadata = archive.read(f"{info}/METADATA").decode()
    source = ROOT / "packages" / name / "src"
    assert {str(path.relative_to(source)) for path in source.rglob("*.py")} | {f"{module}/py.typed"} <= names
    assert {name.split("/")[0] for name in names} == {module, info}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "License-Expression: Apache-2.0" in metadata


def test_the_wheel_of_megaclass_holds_recipes_and_pages_and_has_its_extras(wheels):
    with zipfile.ZipFile(wheels["megaclass"]) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"megaclass-{megaclass.__version__}.dist-info/METADATA").decode()
    source = ROOT / "packages" / "megaclass" / "src"
    data = {
        str(path.relative_to(source)) for path in source.rglob("*") if path.suffix in (".j2", ".css", ".js", ".toml")
    }
    assert len(data) > 4 and data <= names
    extras = set(re.findall(r"^Provides-Extra: (.+)$", metadata, re.MULTILINE))
    assert {"ui", "tensorboard", "wandb", "onnx", "hub", "horovod", "dev"} <= extras


def test_the_packages_have_one_version_and_pin_each_other_exactly():
    projects = {
        name: tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"] for name in PACKAGES
    }
    assert {project["version"] for project in projects.values()} == {megaclass.__version__}
    assert megaclass.__version__ == megaclass_launch.__version__
    pins = [
        wanted
        for project in projects.values()
        for group in [project["dependencies"], *project["optional-dependencies"].values()]
        for wanted in group
        if wanted.startswith("megaclass")
    ]
    assert len(pins) == 3 and all(pin.endswith(f"=={megaclass.__version__}") for pin in pins), pins
    assert projects["launch"]["dependencies"] == []


@pytest.mark.parametrize("name", PACKAGES)
def test_the_index_would_accept_the_wheel_and_show_its_readme(wheels, name):
    run = [sys.executable, "-m", "twine", "check", "--strict", str(wheels[name])]
    checked = subprocess.run(run, capture_output=True, text=True, timeout=120, check=False)
    assert checked.returncode == 0 and "PASSED" in checked.stdout, checked.stdout + checked.stderr


def test_the_launcher_works_without_torch(wheels, tmp_path):
    commands = environment(tmp_path / "venv", [wheels["launch"]], lends=False)
    program = "import os, importlib.util as u; print(os.environ['RANK'], u.find_spec('torch'))"
    printed = call(commands / "megaclass-run", "-np", "2", commands / "python", "-c", program, cwd=tmp_path)
    assert sorted(printed.splitlines()) == ["[0]<stdout>:0 None", "[1]<stdout>:1 None"]
    assert "--hosts" in call(commands / "megaclass-check", "--help", cwd=tmp_path)
    modules = (
        "import importlib, pathlib, megaclass_launch\n"
        "folder = pathlib.Path(megaclass_launch.__file__).parent\n"
        "for file in sorted(folder.rglob('*.py')):\n"
        "    parts = file.relative_to(folder.parent).with_suffix('').parts\n"
        "    if parts[1] not in ('ranks', '__main__') and parts[-1] not in ('__init__', 'ray_worker'):\n"
        "        importlib.import_module('.'.join(parts))\n"
    )
    call(commands / "python", "-c", modules, cwd=tmp_path)


def test_horovods_package_works_without_megaclass(horovod_commands, tmp_path):
    program = (
        "import importlib.util as u, torch, horovod.torch as hvd; hvd.init(); "
        "print(int(hvd.allreduce(torch.ones(1), op=hvd.Sum)), u.find_spec('megaclass'), hvd.rank())"
    )
    python = horovod_commands / "python"
    printed = call(horovod_commands / "horovodrun", "-np", "2", python, "-c", program, cwd=tmp_path)
    assert sorted(printed.splitlines()) == ["[0]<stdout>:2 None 0", "[1]<stdout>:2 None 1"]
    version = "import horovod; print(horovod.__version__, horovod.__file__)"
    told, where = call(python, "-c", version, cwd=tmp_path).split()
    assert told == "0.28.1" and where.startswith(str(horovod_commands.parent))


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
