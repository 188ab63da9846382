"""Does sampling cost accuracy? The same small training with all classes, a tenth of them, and a schedule, three seeds each.

    python benchmarks/sampling_accuracy.py [--out benchmarks/sampling_accuracy.md]

Also compared: rows that were not sampled left alone (this project, the Partial FC paper) against moved by their momentum
and decay at every step (InsightFace's torch code, which keeps one dense optimizer over all rows).
"""

import argparse
import datetime
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch

from megaclass import CosFace, PartialFC, RowAdagrad, RowSGD
from megaclass.backbones import build_backbone
from megaclass.config.schema import OptimizerConfig
from megaclass.data.loader import BatchLoader
from megaclass.data.pair_file import read_pairs
from megaclass.data.sources.open_source import open_source
from megaclass.data.tools.synthesize import synthesize
from megaclass.evaluation.images import PairImages
from megaclass.evaluation.protocol import Evaluator
from megaclass.evaluation.protocols.verification import score_embeddings
from megaclass.head.sampling import sample_classes
from megaclass.training.schedule import learning_rate

IMAGE_SIZE, EMBEDDING_DIM, BATCH, EPOCHS = 48, 128, 128, 5
MOMENTUM, DECAY = 0.9, 5e-4
# The default of `megaclass train` for sampled runs.
ADAGRAD_LR = 0.2


def drift_unsampled_(head: PartialFC, labels: torch.Tensor, step: int, lr: float) -> None:
    """What a dense SGD does to rows without gradient: momentum and decay move them all the same."""
    rate = head.settings.rates.at(step)
    if rate == 1:
        return
    rows = head.rows()
    is_still = torch.ones(head.num_classes, dtype=torch.bool)
    is_still[sample_classes(labels, 0, head.num_classes, rate, head.settings.seed, step).classes_S] = False
    momentum = MOMENTUM * rows["momentum"][is_still] + DECAY * rows["weight"][is_still]
    rows["momentum"][is_still] = momentum
    rows["weight"][is_still] -= lr * momentum


def accuracy(data: Path, sample_rate: object, kind: str, seed: int) -> float:
    torch.manual_seed(seed)
    source = open_source(data)
    loader = BatchLoader(source, global_batch=BATCH, seed=seed)
    num_steps = EPOCHS * loader.steps_per_epoch
    if sample_rate == "schedule":
        sample_rate = [(0, 0.1), (round(0.7 * num_steps), 1.0)]
    backbone = build_backbone("slim", embedding_dim=EMBEDDING_DIM, image_size=IMAGE_SIZE)
    backbone.to(memory_format=torch.channels_last)
    head = PartialFC(
        EMBEDDING_DIM,
        source.num_classes,
        margin=CosFace(scale=32, margin=0.2),
        sample_rate=sample_rate,  # type: ignore[arg-type]
        optimizer=RowAdagrad(weight_decay=DECAY)
        if kind == "adagrad"
        else RowSGD(momentum=MOMENTUM, weight_decay=DECAY),
        seed=seed,
    )
    optimizer = torch.optim.SGD(backbone.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = OptimizerConfig(lr=0.1, warmup_epochs=0.3, power=1.0)
    for step, batch in enumerate(loader.batches(num_steps=num_steps)):
        lr = learning_rate(schedule, step, num_steps, loader.steps_per_epoch)
        optimizer.param_groups[0]["lr"] = lr
        loss = head(backbone(batch.prepared(torch.device("cpu"))), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(backbone.parameters(), 5.0)
        optimizer.step()
        head.step(lr=ADAGRAD_LR / schedule.lr * lr if kind == "adagrad" else lr)
        if kind == "dense":
            drift_unsampled_(head, batch.labels, step, lr)
    pairs = read_pairs(data / "verification.bin")
    images = PairImages(pair_set=pairs, image_size=IMAGE_SIZE, set_name="the pairs", fit=None)
    evaluator = Evaluator(network=backbone, image_size=IMAGE_SIZE, device=torch.device("cpu"))
    embeddings = evaluator.embed(images).normalised_ND()
    return score_embeddings(embeddings, pairs.is_same).verification.accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--identities", type=int, default=1000)
    parser.add_argument("--images-per-identity", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", help="only the row of this number, to run several at once")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    variants = [
        ("SGD, all classes, r = 1", 1.0, "rows"),
        ("SGD, r = 0.1, unsampled rows left alone", 0.1, "rows"),
        ("SGD, r = 0.1, unsampled rows moved (dense momentum)", 0.1, "dense"),
        ("SGD, r = 0.1 for 70 % of the steps, then r = 1", "schedule", "rows"),
        ("Adagrad, all classes, r = 1", 1.0, "adagrad"),
        ("Adagrad, r = 0.1", 0.1, "adagrad"),
    ]
    lines = ["| head | accuracy on unseen identities, mean | by seed |", "|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        synthesize(
            data,
            num_identities=options.identities,
            images_per_identity=options.images_per_identity,
            image_size=IMAGE_SIZE,
            num_pairs=3000,
            num_processes=1,
        )
        for name, rate, kind in variants if options.only is None else [variants[int(options.only)]]:
            begun = time.monotonic()
            values = [accuracy(data, rate, kind, seed) for seed in range(options.seeds)]
            mean, spread = statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0
            by_seed = ", ".join(f"{value:.2%}" for value in values)
            lines.append(f"| {name} | {mean:.2%} ± {spread:.2%} | {by_seed} |")
            print(lines[-1], f"{time.monotonic() - begun:.0f} s", flush=True)
    head = (
        f"{datetime.date.today()}, {platform.processor() or platform.machine()}, one CPU core, torch {torch.__version__}; "
        f"{options.identities} identities x {options.images_per_identity} images at {IMAGE_SIZE} px, {EPOCHS} epochs, batch "
        f"{BATCH}, slim backbone, CosFace 0.2 at scale 32, 3,000 pairs; ± is the standard deviation over seeds.\n"
    )
    text = "\n".join(["# Does sampling cost accuracy?", "", head, *lines, ""])
    if options.out:
        options.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
