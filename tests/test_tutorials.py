"""The tutorials run as they are written, page by page, with small drawn data; both languages have the same commands.

The commands of a page run one after another in one forked process, through the command line's own entry point.
"""

import glob
import importlib.util
import io
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests import pages
from tests.forked import run_forked
from tests.pages import ROOT, run_in_this_process, unused_reasons, why_not_run

from megaclass.backbones import BACKBONES
from megaclass.cli.main import main

TUTORIALS = ROOT / "docs" / "tutorials"
PAGES = sorted(TUTORIALS.glob("*.md"))
TRANSLATED = [(ROOT / "README.md", ROOT / "README.zh-CN.md")]
TRANSLATED += [(page.with_name(page.name.replace(".zh-CN", "")), page) for page in PAGES if ".zh-CN" in page.name]

NOT_RUN = {
    r"glyphs": "600 MB of fonts; tests/megaclass/data/test_glyphs.py draws with fonts that it makes",
    r"gpu-1|^srun|^sbatch": "several hosts or Slurm; tests/launch runs such lines with hosts in network namespaces",
    r"train\.nproc=8": "eight processes; tests/megaclass/training starts two and four",
    r"127\.0\.0\.1": "two agents; tests/launch runs it",
    r"work_dirs": "InsightFace's own checkpoints; tests/megaclass/training/test_insightface.py writes some",
}
# What makes a command small: (pattern, replacement).
SMALLER = [
    (r"--identities 300 --images-per-identity 12 --size 64", "--identities 20 --images-per-identity 6 --size 32"),
    (r"/train_tmp/ms1m-retinaface-t1", "drawn"),
    (r"train\.epochs=\d+", "train.epochs=1"),
    (r"runs/r50 --to onnx", "runs/slim --to onnx"),  # ONNX's exporter takes long, and less for fewer layers
]
SMALL_SETTINGS = [
    "backbone.name=slim",
    "backbone.embedding_dim=16",
    "train.global_batch=16",
    "train.epochs=1e-9",
    "train.device=cpu",
    "train.nproc=1",
    "train.precision=float32",
    "export.onnx=false",
]
SMALL_DEMO = ["synth.identities=20", "synth.images_per_identity=4", "synth.size=32", "synth.pairs=20"]


def commands(page: Path) -> list[str]:
    return [command.text for command in pages.commands(page)]


def python_blocks(page: Path) -> list[str]:
    return [block.text for block in pages.python_blocks(page)]


@pytest.mark.parametrize("english, chinese", TRANSLATED, ids=lambda page: page.name)
def test_both_languages_have_the_same_commands_and_code(english, chinese):
    assert commands(chinese) == commands(english) != []
    in_text = [
        re.findall(r"`(megaclass (?:run|check|plan|train|push|recipes)\b.*?)`", page.read_text())
        for page in (chinese, english)
    ]
    assert in_text[0] == in_text[1] != []
    without_remarks = [[re.sub(r"\s*#.*", "", block) for block in python_blocks(page)] for page in (chinese, english)]
    assert without_remarks[0] == without_remarks[1]


def test_every_reason_not_to_run_a_command_is_still_needed():
    assert not unused_reasons([command for page in PAGES for command in pages.commands(page)], NOT_RUN)


def run(command: str) -> None:
    """Runs one command of a page in this process, as a user would type it, only smaller."""
    for pattern, replacement in SMALLER:
        command = re.sub(pattern, replacement, command)
    words = [found for word in shlex.split(command) for found in (sorted(glob.glob(word)) or [word])]  # noqa: PTH207
    if words[1] == "train":
        given = {word.partition("=")[0] for word in words}
        words += [setting for setting in SMALL_SETTINGS if setting.partition("=")[0] not in given]
        words += SMALL_DEMO if words[2] == "demo" and "synth.identities" not in given else []
    run_in_this_process(words)


def run_page(page: str) -> None:
    for command in commands(TUTORIALS / page):
        if not why_not_run(command, NOT_RUN):
            run(command)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def output_of(function: Callable[[], None]) -> str:
    """Calls the function in a forked process and returns what it printed."""
    done = run_forked(function)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def photos_to_model() -> None:
    run_page("photos-to-model.md")
    for block in python_blocks(TUTORIALS / "photos-to-model.md"):
        exec(compile(block, "photos-to-model.md", "exec"), {})


@pytest.mark.ranks
def test_from_photos_to_a_model(folder):
    printed = output_of(photos_to_model)
    assert "data:image/" in Path("search.html").read_text()
    assert re.search(r"(same|different): cosine .* \(false accept rate .* on holdout\)", printed)
    assert len(re.findall(r"^-?[\d.]+ holdout/", printed, re.MULTILINE)) == 5


def many_gpus() -> None:
    # The page resumes the run of eight processes; here that of one.
    first, *_, last = commands(TUTORIALS / "many-gpus.md")
    run(first)
    run(last.replace("runs/eight", "runs/one"))


@pytest.mark.ranks
def test_many_gpus(folder):
    output_of(many_gpus)
    assert Path("runs/one/report.html").exists()


CONFIG = """
from easydict import EasyDict as edict
config = edict()
config.margin_list = (1.0, 0.5, 0.0)
config.network = "mbf"
config.embedding_size = 512
config.sample_rate = 1.0
config.fp16 = True
config.batch_size = 128
config.lr = 0.02
config.rec = "/train_tmp/ms1m-retinaface-t1"
config.num_classes = 93431
config.num_image = 5179510
config.num_epoch = 20
config.warmup_epoch = 0
config.val_targets = ["lfw"]
"""


def from_insightface() -> None:
    Path("configs").mkdir()
    Path("configs/ms1mv3_r50.py").write_text(CONFIG)
    run("megaclass data synth --identities 300 --images-per-identity 12 --size 64 --out drawn --pairs 20")
    # What the page's reader has from earlier: a verification set and a model of InsightFace.
    shutil.copy("drawn/verification.bin", "lfw.bin")
    shutil.copy("drawn/verification.bin", "drawn/lfw.bin")
    page = commands(TUTORIALS / "from-insightface.md")
    for command in page:
        if "evaluate" in command or why_not_run(command, NOT_RUN):
            continue
        if " train " in command:
            run(command.replace("runs/r50", "runs/slim"))
            command += " backbone.name=mbf"  # InsightFace has no slim backbone
        run(command)
    shutil.copy("exported-pth/backbone.pth", "backbone.pth")
    for command in page:
        if "evaluate" in command:
            # InsightFace's files do not say how images are fitted; drawn images are smaller than 112.
            run(f"{command} --fit squash")


@pytest.mark.ranks
def test_from_insightface(folder):
    output_of(from_insightface)
    assert Path("exported-onnx/model.onnx").exists()


def run_under_horovod(number: int, name: str) -> str:
    """Runs the script and the command of this number on the page about Horovod, and returns what was printed."""
    page = TUTORIALS / "from-horovod.md"
    command = re.findall(r"^    (horovodrun .+)$", page.read_text(), re.MULTILINE)[number]
    assert name in command
    Path(name).write_text(python_blocks(page)[number])
    arguments = shlex.split(command.replace(" python ", f" {sys.executable} "))
    done = subprocess.run(
        [str(Path(sys.executable).parent / arguments[0]), *arguments[1:]],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.ranks
def test_from_horovod(folder):
    printed = run_under_horovod(0, "train_horovod.py")
    loss = re.search(r"2 ranks, loss ([\d.]+)", printed)
    assert loss and float(loss[1]) < 8, printed


@pytest.mark.ranks
@pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None,
    reason="TensorFlow is not installed: pip install 'megaclass-horovod[tensorflow]'",
)
def test_from_horovod_with_keras(folder, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    printed = run_under_horovod(1, "train_keras.py")
    found = re.search(r"2 ranks, loss ([\d.]+), weights differ by 0\.0\b", printed)
    # The labels' variance, 8, is the loss of a model that has learned nothing.
    assert found and float(found[1]) < 4, printed


def test_the_page_on_healthy_runs_names_recipes_settings_and_backbones_that_exist(capsys):
    page = (TUTORIALS / "healthy-run.md").read_text()
    recipes = [name for name in re.findall(r"`([\w-]+)`[:,]? ", page) if (ROOT / "recipes" / f"{name}.toml").exists()]
    recipes += re.findall(r"`([\w]+(?:-[\w]+)+)`", page)
    assert len(set(recipes)) >= 5
    for name in sorted(set(recipes)):
        assert main(["train", name, "--show-config"]) == 0, name
    shown = capsys.readouterr().out
    settings = set(re.findall(r"`((?:optimizer|head|backbone|train|data)\.(\w+))", page))
    assert len(settings) > 4
    assert [whole for whole, key in settings if not re.search(rf"^{key} = ", shown, re.MULTILINE)] == []
    rows = page.split("## By backbone")[1].split("\n\n")[1].splitlines()[2:]
    named = {name for row in rows for name in re.findall(r"`([\w]+)`", row.split("|")[1])}
    assert named and named <= set(BACKBONES)


def character(number: int, take: int) -> bytes:
    pixels = np.kron(np.random.default_rng(number).integers(0, 2, (5, 5)), np.ones((21, 21))) * 255
    pixels = np.roll(pixels, take, axis=(0, 1)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert("1").save(file, "PNG")
    return file.getvalue()


def handwriting() -> None:
    script, train, search = commands(TUTORIALS / "handwriting.md")
    small = "train.epochs=1 train.global_batch=16 backbone.name=slim backbone.embedding_dim=16 data.size=32 export.onnx=false"
    words = shlex.split(script.replace("benchmarks/", f"{ROOT}/benchmarks/"))[1:] + small.split()
    sys.argv = [*words, "--device", "cpu"]
    runpy.run_path(words[0], run_name="__main__")
    run(train + " data.size=32")
    run(search + " --device cpu")


@pytest.mark.ranks
def test_handwriting(folder):
    """With archives in the authors' layout: SET/ALPHABET/characterNN/*.png, and runNN/{class_labels.txt,test,training}."""
    Path("omniglot").mkdir()
    with zipfile.ZipFile("omniglot/images_background_small1.zip", "w") as archive:
        for number in range(4):
            for take in range(3):
                name = f"images_background_small1/Greek/character{number + 1:02}/{number:04}_{take:02}.png"
                archive.writestr(name, character(number, take))
    with zipfile.ZipFile("omniglot/all_runs.zip", "w") as archive:
        pairs = [(f"run01/test/item{n:02}.png", f"run01/training/class{n:02}.png") for n in (1, 2, 3)]
        archive.writestr("run01/class_labels.txt", "".join(f"{test} {known}\n" for test, known in pairs))
        for number, (test, known) in enumerate(pairs):
            archive.writestr(test, character(50 + number, 1))
            archive.writestr(known, character(50 + number, 0))
    printed = output_of(handwriting)
    assert re.search(r"split 1, seed 0: [\d.]+% in", printed)
    assert "item01.png" in Path("search.html").read_text()
