"""horovod.tensorflow against horovod.torch for torch, and a step of model.fit() with and without communication.

    python benchmarks/hvd_tensorflow.py [--pairs 40] [--ranks 2] [--only-bridge | --step NAME] [--out FILE]

Two ranks on this machine, float32, one thread each. Both APIs use the same engine in the same processes, so the ratio of
their times is the cost of the bridge between TensorFlow and the engine. Figures are medians over alternating pairs, as in
benchmarks/hvd.py. The aim of the project's issue: the bridge adds at most 15 % at 1 MiB and above.

A step of model.fit() is compared with the same step without Horovod, in turns in the same processes, and with two floors of
the same run: the same step with its gradients reduced by hand (one Python node that calls torch's gloo, without names,
negotiation or checks), and the step without Horovod plus gloo's bare allreduce of as many bytes. CPU time is that of all
threads of all ranks, user and system. The aim of the project's issue: at most 1.15 of the time without Horovod.

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
import torch.distributed as dist
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
    parser.add_argument("--step", choices=STEPS, help="only this step of model.fit()")
    parser.add_argument("--only-bridge", action="store_true", help="without the steps of model.fit()")
    parser.add_argument("--out", type=Path, help="file for the table")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit(start_ranks(options.ranks))
    torch.set_num_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    dist.init_process_group("gloo")
    hvd.init()
    load = os.getloadavg()[0]
    tables = []
    if not options.step:
        tables.append(render_bridge(reductions(options.pairs), bridge_alone()))
    if not options.only_bridge:
        names = [options.step] if options.step else STEPS
        tables.append(render_steps([step_of_fit(name, *STEPS[name], options.pairs) for name in names]))
    if hvd.rank() == 0:
        page = "\n".join([*head(options, load), "\n".join(tables)])
        print(page)
        if options.out:
            options.out.write_text(page)


def reductions(pairs: int) -> list[list[str]]:
    rows = []
    for label, count, repeats, length in SIZES:
        # Ones: torch maps zeros to a single page of memory until they are written, so they would be read from the cache.
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


def mnist_net() -> Any:
    """1.2 million parameters: the net of Horovod's Keras example for MNIST, without its dropout."""
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


def resnet50() -> Any:
    """25.6 million parameters: the model of Horovod's synthetic benchmark, without the softmax at its end."""
    return keras.applications.ResNet50(weights=None, classifier_activation=None)


# Model, shape of an image, images per rank, steps per run, share of the pairs. Horovod's example for MNIST takes batches of
# 128. Its synthetic benchmark takes 32 images; 8 need less memory and make communication a larger part of the step.
STEPS: dict[str, tuple[Callable[[], Any], tuple[int, ...], int, int, float]] = {
    "mnist-32": (mnist_net, (28, 28, 1), 32, 8, 1.0),
    "mnist-128": (mnist_net, (28, 28, 1), 128, 4, 1.0),
    "resnet50-8": (resnet50, (224, 224, 3), 8, 1, 0.25),
}


class ByHand(keras.optimizers.SGD):
    """Averages gradients over ranks in one Python node: the least that a script without Horovod has to do."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        averaged = tf.numpy_function(average_by_hand, grads, [gradient.dtype for gradient in grads])
        for result, gradient in zip(averaged, grads, strict=True):
            result.set_shape(gradient.shape)
        super().apply(averaged, trainable_variables)


def average_by_hand(*arrays: Any) -> list[Any]:
    gradients = [torch.from_numpy(array) for array in arrays]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    flat.div_(dist.get_world_size())
    parts = flat.split([gradient.numel() for gradient in gradients])
    return [part.view(gradient.shape).numpy() for part, gradient in zip(parts, gradients, strict=True)]


def step_of_fit(
    name: str, make: Callable[[], Any], shape: tuple[int, ...], batch: int, steps: int, share: float, pairs: int
) -> list[str]:
    """Returns the row of a step: without Horovod, with it, by hand, and gloo's allreduce of as many bytes."""
    count = batch * steps
    images, labels = np.random.default_rng(0).normal(size=(count, *shape)).astype("float32"), np.arange(count) % 10

    def epoch(optimizer: Any) -> Callable[[], Any]:
        model = make()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss=loss, jit_compile=False)
        return lambda: model.fit(images, labels, batch_size=batch, epochs=1, verbose=0)

    num_parameters = sum(int(np.prod(variable.shape)) for variable in make().trainable_variables)
    bytes_of_step = torch.ones(num_parameters)

    def gloo() -> None:
        for _ in range(steps):
            dist.all_reduce(bytes_of_step)

    runs: dict[str, Callable[[], Any]] = {
        "alone": epoch(keras.optimizers.SGD(0.01)),
        "hvd": epoch(keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))),
        "by hand": epoch(ByHand(0.01)),
        "gloo": gloo,
    }
    times = over_ranks(alternate(runs, 1, max(4, round(pairs * share))))
    times = {key: [Time(one.wall / steps, one.cpu / steps) for one in found] for key, found in times.items()}
    alone, gloo_times = times["alone"], times["gloo"]
    times["gloo"] = [Time(a.wall + b.wall, a.cpu + b.cpu) for a, b in zip(alone, gloo_times, strict=True)]
    ratios = {key: ratio([a.cpu / b.cpu for a, b in zip(times[key], alone, strict=True)]) for key in times}
    return [
        f"{name}: {num_parameters / 1e6:.1f}M parameters, {batch} images per rank",
        milliseconds([one.cpu for one in alone]),
        milliseconds([one.cpu for one in times["hvd"]]),
        interval(*ratios["hvd"]),
        verdict(ratios["hvd"][0], LIMIT),
        interval(*ratios["by hand"]),
        interval(*ratios["gloo"]),
        interval(*ratio([a.wall / b.wall for a, b in zip(times["hvd"], alone, strict=True)])),
        str(len(alone)),
    ]


def over_ranks(times: dict[str, list[Time]]) -> dict[str, list[Time]]:
    """Returns the CPU seconds of all ranks together, and the clock's seconds of the slowest."""
    everyone = hvd.allgather_object(times)
    return {
        name: [
            Time(max(one.wall for one in ranks), sum(one.cpu for one in ranks))
            for ranks in zip(*[each[name] for each in everyone], strict=True)
        ]
        for name in times
    }


def row(what: str, ours: list[Time], theirs: list[Time], limit: float | None) -> list[str]:
    middle, low, high = ratio([one.wall / two.wall for one, two in zip(ours, theirs, strict=True)])
    cpu = ratio([one.cpu / two.cpu for one, two in zip(ours, theirs, strict=True)])
    return [
        what,
        milliseconds([one.wall for one in ours]),
        milliseconds([one.wall for one in theirs]),
        interval(middle, low, high),
        "" if limit is None else str(limit),
        "" if limit is None else verdict(middle, limit),
        milliseconds([one.cpu for one in ours]),
        milliseconds([one.cpu for one in theirs]),
        interval(*cpu),
    ]


def interval(middle: float, low: float, high: float) -> str:
    return f"{middle:.2f} ({low:.2f} – {high:.2f})"


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


def head(options: argparse.Namespace, load: float) -> list[str]:
    return [
        "# Horovod's API for TensorFlow",
        "",
        f"{datetime.date.today()} · TensorFlow {tf.__version__}, Keras {keras.__version__}, torch {torch.__version__} · "
        f"{os.cpu_count()} cores ({platform.machine()}), load {load:.1f} before the start · {hvd.size()} ranks, float32, "
        f"one thread each · written by `python benchmarks/hvd_tensorflow.py --ranks {hvd.size()} --pairs {options.pairs}`",
        "",
    ]


def table_of(titles: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|", *(f"| {' | '.join(entry)} |" for entry in rows)]


def render_bridge(rows: list[list[str]], memory: list[str]) -> str:
    titles = ["what", "TensorFlow", "torch", "ratio (95 % interval)", "at most", "met"]
    titles += ["CPU, TensorFlow", "CPU, torch", "CPU ratio (95 % interval)"]
    lines = [
        *table_of(titles, rows),
        "",
        "Rows about allreduce are compared with the same calls of the torch API into new tensors. A group is what the tape and",
        "the optimizers make of the gradients of a step; in a row means that each allreduce needs the result of the last one.",
        "In `tf.function` the time includes the call of the function itself, which is that of the row without an allreduce.",
        "",
        f"To pass a tensor to torch and back, without a collective: {', '.join(memory)}.",
        "The time does not depend on the size: nothing is copied.",
    ]
    return "\n".join(lines) + "\n"


def render_steps(rows: list[list[str]]) -> str:
    titles = ["step of model.fit()", "CPU of all ranks, without Horovod", "with hvd", "ratio (95 % interval)"]
    titles += [f"at most {LIMIT}", "by hand", "with gloo alone", "ratio by the clock", "pairs"]
    lines = [
        *table_of(titles, rows),
        "",
        "All ratios are to the step without Horovod. By hand: one Python node per step that calls torch's allreduce over gloo.",
        "With gloo alone: the step without Horovod plus a bare allreduce of as many bytes.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
