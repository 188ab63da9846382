"""Top-1 on three designs that training does not have: our head, and baselines on the same images.

    megaclass data glyphs --out datasets/glyphs
    python benchmarks/glyphs.py --data datasets/glyphs --device cuda --rates 1,0.1,0.01 --seeds 0,1,2 --out benchmarks/glyphs.md
    python benchmarks/glyphs.py --data datasets/glyphs --device cpu --rows pixels,rapidocr --sample 1000

Rows:
head         `megaclass train RECIPE` with each rate, and `megaclass evaluate RUN --classify`
linear       the same network and recipe with torch.nn.Linear and cross entropy
insightface  PartialFC as InsightFace's torch code has it, at each rate below 1: positives count in the rate, and momentum and
             decay also move the rows that were not sampled. No setting of our head does that, so the loop is written here.
pixels       the training image with the highest correlation of pixels answers, for a random sample of the test images
rapidocr     the recogniser in the wheel rapidocr (pip install rapidocr onnxruntime), on a sample of the characters that it
             knows. The likeliest of them answers. Size, width and blur of its input are chosen on the validation design.
"""

import argparse
import datetime
import importlib.util
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch import nn

from megaclass import CosFace, PartialFC, RowSGD
from megaclass.backbones import build_backbone
from megaclass.config.read import load_config, recipe_path
from megaclass.config.schema import Config
from megaclass.data.augment import parse_augment
from megaclass.data.decode import decode_batch
from megaclass.data.loader import BatchLoader
from megaclass.data.sources.open_source import format_of, open_source
from megaclass.data.sources.source import ImageSource
from megaclass.head.sampling import rate_of_negatives, sample_classes
from megaclass.training.schedule import learning_rate

TESTS = ("test-a", "test-b", "test-c")
SIDE = 48
# Side of the glyph, width of the image and blur of its pixels, as the input of rapidocr.
OCR_INPUTS = [
    (side, width, blur) for side in (28, 32, 36, 40, 48) for width in (48, 64, 80, 120) for blur in (0, 0.6, 1.0)
]
OCR_VALIDATION_IMAGES = 300


def by_head(options: argparse.Namespace, rate: float, seed: int) -> dict[str, float]:
    """Trains and evaluates by the commands. Returns accuracies, and what the training took."""
    run = options.work / f"rate{rate}-seed{seed}"
    settings = [f"head.sample_rate={rate}", f"train.seed={seed}", f"train.device={options.device}", *options.settings]
    started = time.monotonic()
    command = [sys.executable, "-m", "megaclass", "train", "--quiet", options.recipe]
    subprocess.run(
        [*command, f"data.path={options.data / 'train'}", f"train.run_dir={run}", *settings, "--overwrite"], check=True
    )
    seconds = time.monotonic() - started
    command = [sys.executable, "-m", "megaclass", "evaluate", str(run), "--json", "--device", options.device]
    for test in (*TESTS, "validation"):
        command += ["--classify", str(options.data / test)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    rows = [json.loads(row) for row in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    result = {test: found[f"{test}-classes"]["top_k"]["1"] for test in (*TESTS, "validation")}
    result |= {
        "test-a top-5": found["test-a-classes"]["top_k"]["5"],
        "pairs of unseen characters": summary.get("verification_accuracy"),
        "seconds": seconds,
        "images per second": summary["images_per_second"],
        "GiB": max(row.get("gpu_memory_gib", 0.0) for row in rows),
    }
    print(f"r = {rate:g}, seed {seed}: {json.dumps(result)}", flush=True)
    return result


def trained_here(config: Config, options: argparse.Namespace, kind: str, rate: float, seed: int) -> dict[str, float]:
    """Trains with nn.Linear, whose largest output answers, or with InsightFace's treatment of the rows."""
    torch.manual_seed(seed)
    device = torch.device(options.device)
    source = open_source(options.data / "train")
    dim, batch = config.backbone.embedding_dim, config.train.global_batch
    loader = BatchLoader(
        source,
        global_batch=batch,
        seed=seed,
        mirror=False,
        augment=parse_augment(config.data.augment),
        is_resident=device.type == "cuda",
        device=device,
    )
    num_steps = round(config.train.epochs * loader.steps_per_epoch)
    network = build_backbone(config.backbone.name, embedding_dim=dim, image_size=SIDE)
    network.to(device, memory_format=torch.channels_last)
    groups = [{"params": network.parameters(), "weight_decay": config.optimizer.weight_decay}]
    if kind == "linear":
        head: nn.Module = nn.Linear(dim, source.num_classes, device=device)
        groups.append({"params": head.parameters(), "weight_decay": config.head.weight_decay})
    else:
        head = PartialFC(
            dim,
            source.num_classes,
            margin=CosFace(scale=config.head.scale, margin=config.head.margin_size or 0.35),
            sample_rate=rate,
            sample_positives=True,
            optimizer=RowSGD(momentum=config.head.momentum, weight_decay=config.head.weight_decay),
            seed=seed,
            device=device,
        )
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=config.optimizer.momentum)
    for step, loaded in enumerate(loader.batches(num_steps=num_steps)):
        lr = learning_rate(config.optimizer, step, num_steps, loader.steps_per_epoch)
        head_lr = lr * (config.optimizer.head_lr or config.optimizer.lr) / config.optimizer.lr
        for group, rate_of_group in zip(optimizer.param_groups, (lr, head_lr), strict=False):
            group["lr"] = rate_of_group
        labels = loaded.labels.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            embeddings = network(loaded.prepared(device))
        embeddings = embeddings.float()
        loss = nn.functional.cross_entropy(head(embeddings), labels) if kind == "linear" else head(embeddings, labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), config.optimizer.clip_norm)
        optimizer.step()
        if isinstance(head, PartialFC):
            head.step(lr=head_lr)
            move_unsampled_(head, labels, rate, step, head_lr, config)
    network.eval()
    weight = head.weight if isinstance(head, nn.Linear) else head.rows()["weight"]
    bias = head.bias if isinstance(head, nn.Linear) else None
    parts = (*TESTS, "validation")
    result = {part: accuracy(network, weight, bias, open_source(options.data / part), device) for part in parts}
    print(f"{kind}, r = {rate:g}, seed {seed}: {json.dumps(result)}", flush=True)
    return result


def move_unsampled_(head: PartialFC, labels: torch.Tensor, rate: float, step: int, lr: float, config: Config) -> None:
    """What one dense SGD over all rows does to the rows without gradient."""
    drawn = rate_of_negatives(labels, head.num_classes, rate)
    sampled = sample_classes(labels, 0, head.num_classes, drawn, head.settings.seed, step).classes_S
    is_still = torch.ones(head.num_classes, dtype=torch.bool, device=labels.device)
    is_still[sampled] = False
    rows = head.rows()
    momentum = config.head.momentum * rows["momentum"][is_still] + config.head.weight_decay * rows["weight"][is_still]
    rows["momentum"][is_still] = momentum
    rows["weight"][is_still] -= lr * momentum


@torch.inference_mode()
def accuracy(
    network: nn.Module, weight: torch.Tensor, bias: torch.Tensor | None, source: ImageSource, device: torch.device
) -> float:
    classes = weight if bias is not None else nn.functional.normalize(weight)
    num_right = 0
    for rows in np.array_split(np.arange(source.num_images), -(-source.num_images // 512)):
        images = torch.from_numpy(decoded(source, rows)).to(device).permute(0, 3, 1, 2)
        embeddings = network(images.float().div(127.5).sub(1)).float()
        answers = nn.functional.linear(embeddings, classes, bias).argmax(1).cpu().numpy()
        num_right += int((answers == source.labels[rows]).sum())
    return num_right / source.num_images


def decoded(source: ImageSource, rows: np.ndarray) -> np.ndarray:
    """Returns pixels (B, 48, 48, 3) of some images."""
    return decode_batch([source.read(int(row)) for row in rows], (SIDE, SIDE), [source.name_of(int(r)) for r in rows])


def sampled(source: ImageSource, rows: np.ndarray, number: int) -> np.ndarray:
    return np.sort(np.random.default_rng(0).permutation(rows)[:number])


def by_pixels(options: argparse.Namespace) -> dict[str, float]:
    """Compares a sample of each test with all training images."""
    device = torch.device(options.device)
    tests = {test: open_source(options.data / test) for test in TESTS}
    rows = {test: sampled(source, np.arange(source.num_images), options.sample) for test, source in tests.items()}
    queries = torch.cat([standardised(tests[test], rows[test], device) for test in TESTS])
    truth = np.concatenate([tests[test].labels[rows[test]] for test in TESTS])
    best = torch.full((len(queries),), -2.0, device=device)
    answer = torch.zeros(len(queries), dtype=torch.int64, device=device)
    train = open_source(options.data / "train")
    for block in np.array_split(np.arange(train.num_images), -(-train.num_images // 8192)):
        score, place = (queries @ standardised(train, block, device).T).max(1)
        is_better = score > best
        best[is_better] = score[is_better]
        answer[is_better] = torch.from_numpy(train.labels[block]).to(device)[place[is_better]]
    is_right = np.split(answer.cpu().numpy() == truth, np.cumsum([len(rows[test]) for test in TESTS])[:-1])
    return {test: float(right.mean()) for test, right in zip(TESTS, is_right, strict=True)}


def standardised(source: ImageSource, rows: np.ndarray, device: torch.device) -> torch.Tensor:
    """Returns pixels (B, 2304) whose products are correlations."""
    images = torch.from_numpy(np.ascontiguousarray(decoded(source, rows)[..., 0])).to(device).flatten(1).float()
    return nn.functional.normalize(images - images.mean(1, keepdim=True))


class RapidOcr:
    """The recogniser in the wheel. Output 0 is CTC's blank, output i + 1 is character i."""

    def __init__(self, names: list[str]) -> None:
        import onnxruntime

        package = importlib.util.find_spec("rapidocr")
        if package is None or package.origin is None:
            raise SystemExit("The row rapidocr needs the package: pip install rapidocr onnxruntime")
        (path,) = (Path(package.origin).parent / "models").glob("*rec_small.onnx")
        self.session = onnxruntime.InferenceSession(str(path))
        characters = self.session.get_modelmeta().custom_metadata_map["character"].split("\n")
        outputs = {character: number + 1 for number, character in enumerate(characters)}
        self.known = np.array([label for label, name in enumerate(names) if name in outputs])
        self.outputs = np.array([outputs[names[label]] for label in self.known])

    def rows_of(self, source: ImageSource, number: int) -> np.ndarray:
        return sampled(source, np.flatnonzero(np.isin(source.labels, self.known)), number)

    def accuracy(self, source: ImageSource, rows: np.ndarray, given: tuple[int, int, float]) -> float:
        num_right = 0
        for block in np.array_split(rows, -(-len(rows) // 64)):
            images = np.stack([self._input(image, *given) for image in decoded(source, block)[..., 0]])
            (scores,) = self.session.run(None, {"x": images})
            answers = self.known[scores.max(axis=1)[:, self.outputs].argmax(axis=1)]
            num_right += int((answers == source.labels[block]).sum())
        return num_right / len(rows)

    @staticmethod
    def _input(image: np.ndarray, side: int, width: int, blur: float) -> np.ndarray:
        """Black on white, in the middle of a line of 48 pixels."""
        glyph = Image.fromarray(image).filter(ImageFilter.GaussianBlur(blur)).resize((side, side))
        line = Image.new("L", (max(side, width), SIDE))
        line.paste(glyph, ((line.width - side) // 2, (SIDE - side) // 2))
        return np.repeat(1 - np.asarray(line, dtype=np.float32)[None] / 127.5, 3, axis=0)


def by_rapidocr(options: argparse.Namespace) -> tuple[dict[str, float], str]:
    """Returns the accuracies, and how the input was chosen."""
    names = [name.decode() for name in format_of(options.data / "train").class_names() or []]
    model = RapidOcr(names)
    validation = open_source(options.data / "validation")
    rows = model.rows_of(validation, OCR_VALIDATION_IMAGES)
    found = {given: model.accuracy(validation, rows, given) for given in OCR_INPUTS}
    best = max(found, key=lambda given: found[given])
    how = f"glyph {best[0]} px, line {best[1]} x 48, blur {best[2]}, {found[best]:.1%} on {len(rows)} validation images"
    tests = {test: open_source(options.data / test) for test in TESTS}
    accuracies = {
        test: model.accuracy(source, model.rows_of(source, options.sample), best) for test, source in tests.items()
    }
    return accuracies, f"{len(model.known):,} of our characters are known to it; {how}"


def table_rows(options: argparse.Namespace, config: Config) -> Iterator[str]:
    rates = [float(rate) for rate in options.rates.split(",")]
    for row in options.rows.split(","):
        if row == "pixels":
            yield line(f"nearest neighbour on pixels, {options.sample:,} images per test", [by_pixels(options)])
        elif row == "rapidocr":
            accuracies, how = by_rapidocr(options)
            yield line(f"rapidocr (PP-OCRv6 small), {options.sample:,} images per test; {how}", [accuracies])
        elif row == "head":
            for rate in rates:
                results = [by_head(options, rate, seed) for seed in options.seeds]
                seconds = statistics.mean(found["seconds"] for found in results)
                yield line(f"{options.recipe}, r = {rate:g}, {seconds:.0f} s per run", results)
        else:
            used = [1.0] if row == "linear" else [rate for rate in rates if rate < 1]
            names = {"linear": "nn.Linear and cross entropy", "insightface": "InsightFace's PartialFC"}
            for rate in used:
                results = [trained_here(config, options, row, rate, seed) for seed in options.seeds]
                yield line(f"{names[row]}, r = {rate:g}", results)


def line(name: str, results: list[dict[str, float]]) -> str:
    cells = []
    for test in TESTS:
        each = [found[test] for found in results]
        spread = f" ± {statistics.stdev(each):.2%}" if len(each) > 1 else ""
        cells.append(f"{statistics.mean(each):.2%}{spread}")
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that `megaclass data glyphs` wrote")
    parser.add_argument("--work", type=Path, default=Path("runs/glyphs-benchmark"), help="folder for runs")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--recipe", default="glyphs")
    parser.add_argument("--rows", default="head,linear,insightface,pixels,rapidocr")
    parser.add_argument("--rates", default="1,0.1,0.01")
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--sample", type=int, default=1000, help="images per test for pixels and rapidocr")
    parser.add_argument("--out", type=Path, help="append the table to this file")
    parser.add_argument("settings", nargs="*", help="settings as for `megaclass train`")
    options = parser.parse_args()
    config = load_config(recipe_path(Path(options.recipe)), [f"data.path={options.data / 'train'}", *options.settings])
    machine = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    facts = json.loads((options.data / "glyphs.json").read_text(encoding="utf-8"))
    train = facts["parts"]["train"]
    head = [
        f"{datetime.date.today()}, {machine}, torch {torch.__version__}, Python {platform.python_version()}; "
        f"{train['characters']:,} classes, {train['images']:,} training images (sha256 {train['sha256'][:12]}), "
        f"seeds {', '.join(map(str, options.seeds))}.",
        "",
        "| method | test A, TW-Kai | test B, Kouzan | test C, Reggae |",
        "|---|---|---|---|",
    ]
    print("\n".join(head), flush=True)
    lines = []
    for text in table_rows(options, config):
        print(text, flush=True)
        lines.append(text)
    if options.out:
        with options.out.open("a", encoding="utf-8") as file:
            file.write("\n" + "\n".join(head + lines) + "\n")


if __name__ == "__main__":
    main()
