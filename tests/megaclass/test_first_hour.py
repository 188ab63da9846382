"""The first hour with data of one's own: each usual mistake is answered with the line to type."""

import io
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import megaclass
from megaclass.cli.main import check_torch, main
from megaclass_launch.messages import wrapped

RECIPE = """
[data]
path = "own"
[train]
run_dir = "runs/a"
global_batch = 8
epochs = 1
device = "cpu"
[backbone]
name = "slim"
embedding_dim = 16
[export]
onnx = false
"""
OWN_NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self, embedding_dim, image_size):
        super().__init__()
        self.linear = torch.nn.Linear(3 * image_size**2, embedding_dim)

    def forward(self, images):
        return self.linear(images.flatten(1))
"""


def draw(root: Path, num_classes: int, images_per_class: int) -> None:
    for label in range(num_classes):
        folder = root / f"person{label}"
        folder.mkdir(parents=True)
        base = np.random.default_rng(label).integers(0, 255, (4, 4, 3))
        for number in range(images_per_class):
            noise = np.random.default_rng([label, number]).integers(-20, 20, (32, 32, 3))
            pixels = (np.kron(base, np.ones((8, 8, 1))) + noise).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}.png")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working folder with a recipe and own/, six identities with eight images each."""
    monkeypatch.chdir(tmp_path)
    Path("recipe.toml").write_text(RECIPE)
    draw(Path("own"), 6, 8)
    return tmp_path


@pytest.fixture
def typed(capsys):
    """typed("megaclass train …"): exit code, standard output and standard error together."""

    def call(line: str) -> tuple[int, str]:
        try:
            code = main(shlex.split(line)[1:])
        except SystemExit as ended:  # argparse's way to end
            code = ended.code
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return call


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("megaclass", "A first one that takes two minutes: megaclass demo\n"),
        ("megaclass train", "required: recipe\nmegaclass recipes lists"),
        ("megaclass train ms1mv3-r50", "Did you mean ms1mv3-r50-arcface?"),
        ("megaclass train recipes/demo.toml", "The package has it, by its name: megaclass train demo\n"),
        ("megaclass train recipe.toml train.device=gpu", "expected one of auto, cpu, cuda; did you mean cuda?"),
        ("megaclass train recipe.toml --resume", "To start it from the beginning, leave out --resume."),
        ("megaclass train own backbone.name=slimm", "which is not known; did you mean slim?"),
        ("megaclass export runs/nothere --to onnx", "There is no model at runs/nothere"),
        ("megaclass train recipe.toml epochs=3", "did you mean train.epochs=3?"),
        ("megaclass train recipe.toml epoch=3", "did you mean train.epochs=3?"),
        ("megaclass train recipe.toml --epochs 3", "section.key=value: megaclass train recipe.toml train.epochs=3\n"),
        (
            "megaclass train recipe.toml --global-batch=3 --resume",
            "section.key=value: megaclass train recipe.toml train.global_batch=3 --resume\n",
        ),
        ("megaclass train recipe.toml --nonsense 3", "unrecognized arguments: --nonsense 3\n"),
        ("megaclass train recipe.toml --gpus 2", "section.key=value: megaclass train recipe.toml train.nproc=2\n"),
        ("megaclass train recipe.toml batch_size=64", "did you mean train.global_batch=64?"),
        ("megaclass demo --epochs 2", "section.key=value: megaclass demo train.epochs=2\n"),
        ("megaclass fit recipe.toml", "Did you mean: megaclass train recipe.toml\n"),
        ("megaclass predict runs/a", "Did you mean: megaclass "),
        ("megaclass help", "Did you mean: megaclass --help\n"),
        ("megaclass help train", "Did you mean: megaclass train --help\n"),
        (
            "megaclass embed recipe.pth own --out a.npy",
            "not a file of torch.save, or holds other objects than tensors. Copy",
        ),
        ("megaclass train recipe.toml train.evaluate_sets=lfw", "there is no lfw.bin next to the data at own"),
        ("megaclass trian recipe.toml", "Did you mean: megaclass train recipe.toml\n"),
        ("megaclass data inspct own", "Did you mean: megaclass data inspect own\n"),
        (
            "megaclass train recipe.toml data.path=both",
            "data.path=both/train, or verify on another with pairs of its images: "
            "megaclass data pairs both/val --out both/train/val.bin\n",
        ),
        ("megaclass train recipe.toml data.path=own/person0", "set data.path=own; otherwise move"),
        ("megaclass train recipe.toml data.path=one", "needs two: expected one subfolder per identity"),
        ("megaclass train recipe.toml train.global_batch=512", "for example with train.global_batch=8."),
        ("megaclass train recipe.toml backbone.name=mynet:Net", "A file mynets.py in this folder with a class Net"),
        ("megaclass train recipe.toml head.margin=arcfac", "of your own; did you mean arcface?"),
        ("megaclass train recipe.toml train.device=cuda", "sees no GPU: check the driver with nvidia-smi"),
    ],
)
@pytest.mark.ranks
def test_a_mistake_is_answered_with_the_line_to_type(here, typed, line, answer):
    if "both" in line:
        draw(Path("both/train"), 3, 3)
        draw(Path("both/val"), 3, 3)
    if "=one" in line:
        draw(Path("one"), 1, 8)
    Path("recipe.pth").write_text("junk")
    code, said = typed(line)
    assert code == 2
    assert answer in said
    assert not Path("runs/a/config.toml").exists()


@pytest.mark.ranks
def test_training_on_own_images_tells_how_to_measure_and_how_to_go_on(here, typed):
    code, said = typed("megaclass train recipe.toml")
    assert code == 0
    assert "no accuracy will be measured, because there is no .bin file next to own" in said
    split = "megaclass data split own --images 0.1 --out own-split"
    assert (
        f"  {split}\n  megaclass train runs/a/config.toml data.path=own-split/train train.run_dir=runs/own-split"
        in said
    )
    assert "your own images" not in said and "all 6 steps are done" in said
    assert "comparing the class centres for the report 6/6" in said

    # A changed setting: both ways out are shown, and both work as shown.
    code, said = typed("megaclass train recipe.toml --resume optimizer.lr=0.2")
    assert code == 2 and "optimizer.lr was 0.1, is 0.2. Continue it as it was:" in said
    unchanged, anew = re.findall(r": (megaclass train .*)", said)
    assert unchanged == "megaclass train runs/a/config.toml --resume"
    assert anew == (
        "megaclass train recipe.toml optimizer.lr=0.2 train.run_dir=runs/a-2 train.init_backbone=runs/a "
        "train.init_centres=runs/a"
    )
    assert typed(anew)[0] == 0
    code, said = typed(f"{unchanged} train.epochs=2")
    assert code == 0
    assert "the learning rate jumps from 0.00278 to 0.025 at step 7, because train.epochs was 1 and is 2" in said
    assert "learning rate jumps" not in typed(unchanged)[1]


@pytest.mark.ranks
def test_held_out_images_of_the_classes_are_classified_without_being_named(here, typed):
    draw(Path("more"), 8, 6)
    assert typed("megaclass data split more --images 0.3 --out split --pairs 20")[0] == 0
    code, said = typed("megaclass train recipe.toml data.path=split/train train.evaluate_epochs=1")
    assert code == 0
    assert re.search(r"step \d+: .*holdout-classes top-1 [\d.]+ % of 8 classes", said), said
    assert re.search(r"Classification of holdout-classes: top-1 [\d.]+ % of 8 classes\.", said)
    sets = json.loads(Path("runs/a/evaluation.json").read_text())["sets"]
    assert sets["holdout-classes"]["by_training_images"]["3-4"]["classes"] == 8
    # The run alone gives the same numbers.
    assert typed("megaclass evaluate runs/a --classify split/holdout")[0] == 0
    again = json.loads(Path("runs/a/evaluation.json").read_text())["sets"]["holdout-classes"]
    assert again["top_k"] == sets["holdout-classes"]["top_k"] and again["by_training_images"] == {}


@pytest.mark.ranks
def test_a_held_out_set_is_evaluated_and_its_accuracy_is_printed_at_each_evaluation(here, typed):
    draw(Path("more"), 20, 4)
    assert typed("megaclass data split more --identities 0.3 --out split --pairs 20")[0] == 0
    code, said = typed("megaclass train recipe.toml data.path=split/train train.epochs=2 train.evaluate_epochs=1")
    assert code == 0
    assert re.findall(r"megaclass: step (\d+): holdout [\d.]+ %", said) == ["7", "14"]
    assert "No accuracy" not in said and "megaclass evaluate runs/a --on FILE.bin" in said
    assert "comparing the verification sets with the training images 56/56" in said


@pytest.mark.ranks
def test_a_class_in_the_working_folder_is_a_backbone_and_single_images_are_warned_about(here, typed):
    Path("mynets.py").write_text(OWN_NET)
    draw(Path("single"), 8, 1)
    line = "megaclass train recipe.toml backbone.name=mynets:Net data.path=single data.size=32 train.run_dir=runs/own"
    code, said = typed(line)
    assert code == 0
    assert "WARNING megaclass: each of the 8 classes at single has one image" in said
    model = megaclass.load("runs/own", backbone="mynets:Net")
    assert model.embed("own/person0/0.png").shape == (1, 16)


@pytest.mark.ranks
def test_out_of_memory_is_told_with_figures_and_what_to_lower(here, typed):
    """Ten million classes of 32,768 numbers: the allocator refuses at once."""
    assert typed("megaclass data pack own --out packed")[0] == 0
    Path("packed/classes.txt").unlink()
    Path("packed/property").write_text("10000000,32,32\n")
    code, said = typed("megaclass train recipe.toml data.path=packed backbone.embedding_dim=32768")
    assert code == 2 and "Traceback" not in said
    assert (
        "rank 0 of 1" in said
        and "ran out of memory on cpu: it asked for 1220.70 GiB, and this process has used" in said
    )
    assert "take 244.14 GiB per million classes (backbone.embedding_dim=32768, head.optimizer=sgd)" in said
    assert "Lower one of: train.global_batch=4 (is 8); train.accumulate=2" in said and "head.sample_rate=0.1" in said


@pytest.mark.parametrize(
    ("installed", "words"),
    [("2.4.1", "torch 2.4.1 is installed .* needs torch 2.11 or later: pip install"), ("2.11.0", "")],
)
def test_the_version_of_torch_is_checked_without_importing_it(tmp_path, monkeypatch, typed, installed, words):
    record = tmp_path / f"torch-{installed}.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {installed}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    if not words:
        check_torch()
        return
    with pytest.raises(megaclass.UserError, match=words):
        check_torch()
    with pytest.raises(megaclass.UserError, match=words):
        _ = megaclass.PartialFC
    code, said = typed("megaclass data inspect nowhere")
    assert code == 2 and re.search(words, said) and said.count("\n") == 1


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_text_on_a_terminal_is_broken_between_words_and_elsewhere_left_alone(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = "megaclass: " + "several words that do not end here " * 5 + "/a/path/of-more-than/eighty-characters" * 3
    broken = wrapped(text, _Terminal())
    assert broken.split() == text.split(), "no word is broken"
    assert all(len(line) <= 80 for line in broken.splitlines()[:-1])
    assert wrapped(text, io.StringIO()) == text
