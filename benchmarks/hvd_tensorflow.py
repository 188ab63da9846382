"""horovod.tensorflow against horovod.torch for torch, and a step of model.fit() with and without communication.

    python benchmarks/hvd_tensorflow.py [--pairs 40] [--ranks 2] [--only-bridge | --only-step] [--out FILE]

Two ranks on this machine, float32, one thread each. Both APIs use the same engine in the same processes, so that the ratio of
their times is the cost of the bridge between TensorFlow and the engine. Figures are medians over alternating pairs, as in
benchmarks/hvd.py. The aim of the project's issue: the bridge adds at most 15 % at 1 MiB and above.

The call of a tf.function costs a fraction of a millisecond even if the function does nothing, which is not the bridge's. The
bridge in graphs is therefore measured by functions that reduce several tensors as one group, as the tape and the optimizers do
with the gradients of a step, against the same group in the torch API. Rows without a limit show what a node of a graph costs:
several allreduces in a row, of which each needs the result of the previous one, one allreduce, and none.
"""

import argparse
import datetime
import functools
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import keras
import numpy as np
import tensorflow as tf
import torch
from hvd import Time, alternate, milliseconds, ratio, start_ranks, verdict

import horovod.keras as keras_hvd
import horovod.tensorflow as hvd
import horovod.torch as torch_hvd
from horovod.tensorflow import bridge

# Name, count of numbers, repeats per pair, collectives in a row.
SIZES = [
    ("4 KB", 1024, 10, 16),
    ("1 MiB", 256 * 1024, 6, 16),
    ("16 MiB", 4 * 1024 * 1024, 2, 4),
    ("64 MiB", 16 * 1024 * 1024, 1, 2),
]
LIMIT = 1.15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only-step", action="store_true", help="only the step of model.fit()")
    parser.add_argument("--only-bridge", action="store_true", help="without the step of model.fit()")
    parser.add_argument("--out", type=Path, help="file for the table")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit(start_ranks(options.ranks))
    torch.set_num_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    load = os.getloadavg()[0]
    rows = [] if options.only_step else reductions(options.pairs)
    if not options.only_bridge:
        rows.append(step_of_fit(options.pairs))
    memory = bridge_alone()
    if hvd.rank() == 0:
        table = render(rows, memory, options.pairs, load)
        print(table)
        if options.out:
            options.out.write_text(table)


def reductions(pairs: int) -> list[list[str]]:
    rows = []
    for label, count, repeats, length in SIZES:
        # Ones: torch maps zeros to a single page of memory until they are written, so that they would be read from the cache.
        ours, theirs = tf.ones([count]), torch.ones(count)
        one = tf.function(functools.partial(in_a_row, name=f"graph {label}", length=1))
        several = tf.function(functools.partial(in_a_group, name=f"group {label}", length=length))
        chain = tf.function(functools.partial(in_a_row, name=f"row {label}", length=length))
        empty = tf.function(lambda t: tf.identity(t))
        runs: dict[str, Callable[[], Any]] = {
            "torch": functools.partial(torch_in_a_row, theirs, name=f"torch {label}", length=1),
            "eager": functools.partial(hvd.allreduce, ours, name=f"eager {label}", op=hvd.Average),
            "graph": functools.partial(one, ours),
            "empty": functools.partial(empty, ours),
            "torch group": functools.partial(
                torch_hvd.grouped_allreduce, [theirs] * length, name=f"torch group {label}", op=hvd.Average
            ),
            "graph group": functools.partial(several, ours),
            "torch row": functools.partial(torch_in_a_row, theirs, name=f"torch row {label}", length=length),
            "graph row": functools.partial(chain, ours),
        }
        times = alternate(runs, repeats, pairs)
        limit = LIMIT if count * 4 >= 1024 * 1024 else None
        graph = "in tf.function"
        rows += [
            row(f"allreduce, {label}, eager", times["eager"], times["torch"], limit),
            row(f"group of {length}, {label} each, {graph}", times["graph group"], times["torch group"], limit),
            row(f"{length} allreduces in a row, {label}, {graph}", times["graph row"], times["torch row"], None),
            row(f"one allreduce, {label}, {graph}", times["graph"], times["torch"], None),
            row(f"no allreduce, {label}, {graph}", times["empty"], times["torch"], None),
        ]
    return rows


def in_a_group(tensor: Any, name: str, length: int) -> Any:
    return hvd.grouped_allreduce([tensor] * length, name=name, op=hvd.Average)


def in_a_row(tensor: Any, name: str, length: int) -> Any:
    for number in range(length):
        tensor = hvd.allreduce(tensor, name=f"{name} {number}", op=hvd.Average)
    return tensor


def torch_in_a_row(tensor: torch.Tensor, name: str, length: int) -> torch.Tensor:
    for number in range(length):
        tensor = torch_hvd.allreduce(tensor, name=f"{name} {number}", op=hvd.Average)
    return tensor


def net() -> Any:
    """1.2 million parameters: the classic MNIST net."""
    return keras.Sequential(
        [
            keras.layers.Input((28, 28, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def step_of_fit(pairs: int) -> list[str]:
    """Epochs of eight steps of 32 images per rank; the difference is communication, bridge and waiting for the other rank."""
    images, labels = np.random.default_rng(0).normal(size=(256, 28, 28, 1)), np.arange(256) % 10

    def epoch(optimizer: Any) -> Callable[[], Any]:
        model = net()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss=loss, jit_compile=False)
        return lambda: model.fit(images, labels, batch_size=32, epochs=1, verbose=0)

    runs = {
        "alone": epoch(keras.optimizers.SGD(0.01)),
        "hvd": epoch(keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))),
    }
    times = alternate(runs, 1, max(3, pairs // 4))
    per_step = {name: [Time(one.wall / 8, one.cpu / 8) for one in found] for name, found in times.items()}
    return row("step of model.fit, 1.2M parameters, against no communication", per_step["hvd"], per_step["alone"], None)


def row(what: str, ours: list[Time], theirs: list[Time], limit: float | None) -> list[str]:
    middle, low, high = ratio([one.wall / two.wall for one, two in zip(ours, theirs, strict=True)])
    cpu = ratio([one.cpu / two.cpu for one, two in zip(ours, theirs, strict=True)])
    return [
        what,
        milliseconds([one.wall for one in ours]),
        milliseconds([one.wall for one in theirs]),
        f"{middle:.2f} ({low:.2f} – {high:.2f})",
        "" if limit is None else str(limit),
        "" if limit is None else verdict(middle, limit),
        milliseconds([one.cpu for one in ours]),
        milliseconds([one.cpu for one in theirs]),
        "{:.2f} ({:.2f} – {:.2f})".format(*cpu),
    ]


def bridge_alone() -> list[str]:
    """Microseconds to pass a tensor to torch and back, by its size: the same for all sizes if nothing is copied."""
    found = []
    for label, count, *_ in SIZES:
        tensor = tf.zeros([count])
        begun = time.perf_counter()
        for _ in range(200):
            bridge.to_tensorflow(bridge.to_torch(tensor), tf.float32)
        found.append(f"{label} {(time.perf_counter() - begun) / 200 * 1e6:.1f} µs")
    return found


def render(rows: list[list[str]], memory: list[str], pairs: int, load: float) -> str:
    titles = ["what", "TensorFlow", "compared with", "ratio (95 % interval)", "at most", "met"]
    titles += ["CPU, TensorFlow", "CPU, compared with", "CPU ratio (95 % interval)"]
    lines = [
        "# Horovod's API for TensorFlow against the one for torch",
        "",
        f"{datetime.date.today()} · TensorFlow {tf.__version__}, Keras {keras.__version__}, torch {torch.__version__} · "
        f"{os.cpu_count()} cores ({platform.machine()}), load {load:.1f} before the start · {hvd.size()} ranks, float32, "
        f"one thread each · {pairs} alternating pairs · written by `python benchmarks/hvd_tensorflow.py --ranks {hvd.size()} "
        f"--pairs {pairs}`",
        "",
        f"| {' | '.join(titles)} |",
        "|---" * len(titles) + "|",
        *(f"| {' | '.join(entry)} |" for entry in rows),
        "",
        "Rows about allreduce are compared with the same calls of the torch API into new tensors. A group is what the tape and",
        "the optimizers make of the gradients of a step; in a row means that each allreduce needs the result of the last one.",
        "In `tf.function` the time includes the call of the function itself, which is that of the row without an allreduce.",
        "",
        f"To pass a tensor to torch and back, without a collective: {', '.join(memory)}.",
        "The time does not depend on the size: nothing is copied.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
