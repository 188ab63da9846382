"""Every command and every Python block of README and docs runs as it is written, in one folder with small real data.

Commands run one after another in the order of the pages, through the command line's own entry point, then the Python blocks
in the same forked process; blocks that use several ranks run once more under torchrun. `SMALLER` shows what is replaced to
make them quick, and `NOT_RUN` what cannot run here, and why.
"""

import importlib.util
import os
import re
import shlex
import shutil
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
import torch
from PIL import Image
from tests import pages
from tests.forked import run_forked, torchrun
from tests.pages import ROOT, Snippet, run_in_this_process, unused_reasons, why_not_run

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

NOT_RUN = {
    r"^make ": "make is what runs these tests, and the demo; tests/megaclass/examples and CI run the targets",
    r"^pip install": "installs into the environment that runs these tests",
    r"(-H |--hostfile|-hostfile)\S*(gpu-1|ip1|h1)": "several hosts; tests/launch runs these with hosts in network namespaces",
    r"^(mpirun|srun|sbatch|ray) |--launcher (slurm|ray|mpi)": "needs that scheduler; tests/launch/test_starters*.py run them",
    r"^torchrun --standalone --nproc-per-node 8": "eight processes; tests/launch/test_starters.py runs it with two",
    r"import-config|work_dirs": "InsightFace's own files; tests/megaclass/training has some",
    r"--host-discovery-script": "needs a script of the user; tests/launch has one",
    r"--distractors": "MegaFace's folders; tests/megaclass/evaluation/test_identification.py runs it",
    r"--reject": "needs an evaluation on many images of unknown classes; tests/megaclass/evaluation/test_classify.py has one",
    r"data\.path=(hf|s3|https)://": "an address; tests/megaclass/data/test_remote.py has a server",
    r"/data/birds": "Parquet files; tests/megaclass/data/test_parquet.py writes some",
    r"backbone\.name=timm/": "downloads weights; tests/megaclass/backbones/test_timm_network.py has some in a file",
    r"train\.shard_backbone": "a ViT-H on eight ranks; tests/megaclass/training/test_sharded.py splits a small one",
    r"own-pretrained": "downloads weights; tests/megaclass/training/test_own_recipes.py trains it without",
    r"distil\.teacher=": "a second trained model; tests/megaclass/training/test_distil.py has one",
    r"--detector": "a face detector of the user; tests/megaclass/face_detectors.py makes some",
    r"^megaclass push": "publishes; tests/megaclass/evaluation/test_trained_models.py pushes to a small hub of its own",
    r"^megaclass demo": "the demo's recipe in full; tests/test_package.py runs it small from the wheel",
    r"^torch.save": "one line of Python about a file of the user",
    r"^megaclass check$|check --json": "tests/launch/test_check.py runs it",
}
# Python blocks that are no whole programs, by a part of their text.
BLOCKS_NOT_RUN = {
    "hvd.elastic.TorchState": "an outline; examples/elastic_torch.py is the whole program, which tests start",
    "make_store(world": "two lines of a script under a launcher; tests/horovod runs them",
}
# Without torchvision timm cannot be imported.
HAS_TIMM = all(importlib.util.find_spec(name) for name in ("timm", "torchvision"))
SMALLER = [
    (r"/data/", "data/"),
    (r"datasets/ms1m", "data/ms1m"),
    (r"synthetic:1000000", "synthetic:100x200@32"),
    (r"data\.size=112", "data.size=48"),
    (r"data\.size=\[112,96\]", "data.size=[48,32]"),
    (r"\bmodel\.onnx", "exported/model.onnx"),  # that of an earlier command
    (r"^(megaclass plan (?!features).*)", r"\1 backbone.name=slim"),
    (r" IJBC\b", ""),  # IJB-C may not be distributed; tests/megaclass/evaluation/test_templates.py draws one
    (r"train\.nproc=8", "train.nproc=1"),
    (r"\bRECIPE\b", "recipe.toml"),
    (r"--classify DATA\b", "--classify data/own"),
    (r"--classify split/holdout", "--classify data/own"),  # before the command that makes it
    (r"--images 0\.1", "--images 0.3"),  # of four images each
    (r"train\.epochs=\d+", "train.epochs=0.1"),
    # ONNX's exporter takes long, and less for fewer layers.
    (r"runs/ms1m --to onnx", "runs/slim --to onnx"),
    (r"backbone\.pth --to onnx", "runs/slim/model.safetensors --to onnx"),
]
SMALL_SETTINGS = {
    "backbone.name": "slim",
    "backbone.embedding_dim": "16",
    "train.global_batch": "8",
    "train.epochs": "1e-9",
    "train.device": "cpu",
    "train.nproc": "1",
    "train.precision": "float32",
    "export.onnx": "false",
    "synth.size": "32",
    "synth.images_per_identity": "4",
    "synth.pairs": "20",
}


def python_blocks() -> list[Snippet]:
    return [block for page in PAGES for block in pages.python_blocks(page)]


def commands() -> list[Snippet]:
    return [command for page in PAGES for command in pages.commands(page)]


def draw(folder: Path, num_identities: int, images_per_identity: int, size: int = 32) -> None:
    for label in range(num_identities):
        place = folder / f"person{label}"
        place.mkdir(parents=True)
        base = np.random.default_rng(label).integers(0, 255, (4, 4, 3))
        for number in range(images_per_identity):
            noise = np.random.default_rng([label, number]).integers(-20, 20, (size, size, 3))
            pixels = (np.kron(base, np.ones((size // 4, size // 4, 1))) + noise).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(place / f"{number}.png")


def fill_folder() -> None:
    """Make what a reader of the pages has: own images, a packed set with lfw.bin next to it, trained runs and exports."""
    shutil.copytree(ROOT / "recipes", "recipes")
    for name in ("own", "faces", "photos"):
        draw(Path("data") / name, 12, 4)
    for name, source in (("known", "own"), ("seen", "own"), ("photos", "own"), ("other-photos", "photos")):
        shutil.copytree(Path("data") / source, name)
    draw(Path("new-people"), 2, 3)
    for number, folder in enumerate(sorted(Path("new-people").iterdir())):
        folder.rename(f"new-people/new{number}")
    shutil.copytree("data/own/person1", "more-images")
    for name, images in (("shop", (0, 1)), ("seen", (2, 3))):
        lines = [f"data/own/person{one}/{image}.png\tperson{one}\n" for one in range(12) for image in images]
        Path(f"{name}.txt").write_text("".join(lines))
    points = "8 10 20 10 14 16 9 22 19 22"
    photos = sorted(file.relative_to("photos") for file in Path("photos").rglob("*.png"))
    Path("landmarks.txt").write_text("".join(f"{photo} {points}\n" for photo in photos))
    for name in ("anna", "anna-again", "bert", "image"):
        shutil.copy("data/own/person0/0.png", f"{name}.jpg")
    for name in ("features", "held-out"):
        np.save(f"{name}.npy", np.random.default_rng(0).normal(size=(48, 16)).astype(np.float32))
        np.save(f"{name}.labels.npy", np.arange(48) % 6)
    Path("recipe.toml").write_text(
        '[data]\npath = "data/own"\n[synth]\nidentities = 0\n[train]\nrun_dir = "runs/recipe"\n'
    )
    run("megaclass data pack data/own --out data/ms1m")
    run("megaclass data pairs data/own --out data/ms1m/lfw.bin --pairs 20")
    shutil.copy("data/ms1m/lfw.bin", "lfw.bin")
    shutil.copy("data/ms1m/lfw.bin", "cfp_fp.bin")
    shutil.copy("data/ms1m/lfw.bin", "own.bin")
    lines = [f"person{number}\t1\t2" for number in range(4)]
    lines += [f"person{number}\t1\tperson{number + 4}\t2" for number in range(4)]
    Path("lfw").mkdir()
    Path("lfw/pairs.txt").write_text("1\t4\n" + "\n".join(lines) + "\n")
    for number in range(8):
        (Path("lfw") / f"person{number}").mkdir()
        for take in (1, 2):
            source = f"data/own/person{number}/{take}.png"
            Image.open(source).save(f"lfw/person{number}/person{number}_{take:04d}.jpg")
    run("megaclass train recipe.toml")
    run("megaclass train recipe.toml data.path=data/ms1m train.run_dir=runs/ms1m")
    run("megaclass train recipe.toml data.path=data/ms1m train.run_dir=runs/other train.seed=1")
    run("megaclass train recipe.toml data.path=data/ms1m train.run_dir=runs/slim")
    run("megaclass export runs/ms1m --to insightface --out pth")
    run("megaclass export runs/ms1m --to safetensors --out centres")
    shutil.copy("pth/backbone.pth", "backbone.pth")
    shutil.copy("centres/centres.safetensors", "centres.safetensors")


def smaller(command: str) -> list[str]:
    for pattern, replacement in SMALLER:
        command = re.sub(pattern, replacement, command)
    words = shlex.split(command)
    if words[1] == "train" and "--show-config" not in words:
        given = {word.partition("=")[0] for word in words}
        if "synth.identities" not in given and any(word.startswith("recipes/demo") for word in words):
            words.append("synth.identities=20")
        if "train.run_dir=runs/ms1m" in words:
            words.append("backbone.name=mbf")  # InsightFace has it, too, for the export
            given.add("backbone.name")
        is_resumed = any(word.startswith("--resume") for word in words)
        words += [f"{name}={value}" for name, value in SMALL_SETTINGS.items() if name not in given]
        if not is_resumed and "--overwrite" not in words:
            words.append("--overwrite")
    return words


def run(command: str) -> None:
    """Runs one command of `megaclass` in this process, as a user would type it, only smaller."""
    words = smaller(command)
    # A checkpoint that "PATH" stands for.
    latest = sorted(Path().glob("runs/recipe/checkpoints/step-*"))
    words = [word.replace("=PATH", f"={latest[-1]}") if latest else word for word in words]
    run_in_this_process(words)


def run_commands_and_blocks(blocks: list[Snippet]) -> None:
    """Print what ran, and why commands failed."""
    fill_folder()
    for command in commands():
        if why_not_run(command.text, NOT_RUN):
            continue
        try:
            run(command.text)
            print(f"typed {command.place}")
        except AssertionError as error:
            print(f"FAILED {command.place}: {error}")
    run_blocks(blocks)


# Variables of a script live until its process ends. Freed earlier, a DistributedDataParallel joins gloo's threads while it
# holds the interpreter, for which one of them may wait (megaclass_launch/ranks/gloo_exit.py).
VARIABLES: list[dict[str, object]] = []


def run_blocks(blocks: list[Snippet]) -> None:
    for block in blocks:
        code = compile(block.text.replace('"anna"', '"person0"'), block.place, "exec")
        VARIABLES.append({"__name__": "__main__"})
        exec(code, VARIABLES[-1])
        if os.environ.get("RANK", "0") == "0":
            print(f"ran {block.place}")


def blocks_that_run() -> list[Snippet]:
    blocks = [block for block in python_blocks() if HAS_TIMM or "import timm" not in block.text]
    return [block for block in blocks if not any(part in block.text for part in BLOCKS_NOT_RUN)]


def assert_blocks_ran(done: CompletedProcess[str], blocks: list[Snippet], num_losses: int) -> None:
    ran = re.findall(r"^ran (.*)$", done.stdout, re.MULTILINE)
    assert ran == [block.place for block in blocks] and done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"^epoch \d: loss ([\d.]+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == num_losses and (not losses or losses[-1] < losses[0])


@pytest.mark.ranks
@pytest.mark.timeout(1500)  # about half a minute on an idle machine
def test_every_command_and_every_python_block_of_the_pages_runs(tmp_path):
    blocks = blocks_that_run()
    assert len(blocks) >= 7
    done = run_forked(run_commands_and_blocks, blocks, cwd=tmp_path, timeout_s=1400)
    failures = re.findall(r"^FAILED .*?(?=^typed |^FAILED |^ran |\Z)", done.stdout, re.MULTILINE | re.DOTALL)
    assert not failures, "\n\n".join(failures)
    typed = re.findall(r"^typed (.*)$", done.stdout, re.MULTILINE)
    expected = [command.place for command in commands() if not why_not_run(command.text, NOT_RUN)]
    assert typed == expected and len(typed) > 25, done.stdout[-1000:] + done.stderr[-3000:]
    assert_blocks_ran(done, blocks, num_losses=5)


def test_commands_that_do_not_run_here_have_a_reason_that_is_still_needed():
    assert not unused_reasons(commands(), NOT_RUN)


@pytest.mark.ranks
def test_python_blocks_of_several_ranks_run_under_torchrun(tmp_path):
    blocks = [block for block in blocks_that_run() if re.search(r"init_process_group|Accelerator\(\)", block.text)]
    assert len(blocks) >= 2
    for block in blocks:
        # Each block gets processes of its own: torch's store keeps the keys of a group that was destroyed, and a second group
        # of the same processes can wait for ranks of the first one.
        done = torchrun(2, run_blocks, [block], cwd=tmp_path)
        assert_blocks_ran(done, [block], num_losses=10 if "# started by torchrun" in block.text else 0)


@pytest.mark.gpu
def test_on_a_gpu_the_whole_loop_runs_there_as_it_stands(capsys):
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU here")
    (loop,) = [block for block in python_blocks() if "# started by torchrun" in block.text]
    names = {"__name__": "__main__"}
    exec(compile(loop.text, loop.place, "exec"), names)
    assert names["head"].device.type == "cuda" and names["embeddings"].device.type == "cuda"
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert losses[-1] < 0.1 * losses[0]
