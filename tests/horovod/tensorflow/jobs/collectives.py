"""Run by each of two ranks: every collective eagerly and in a graph, its gradient, its errors, graphs of different order."""

import gc
import json
import os
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd
from horovod.tensorflow import bridge, collectives

# One thread for all nodes of a graph: a node that waited for another rank would stop all others.
tf.config.threading.set_inter_op_parallelism_threads(1)

timeline = Path(sys.argv[1], "timeline.json")
os.environ["HOROVOD_TIMELINE"] = str(timeline)
hvd.init(process_sets="dynamic")
del os.environ["HOROVOD_TIMELINE"]
rank, size = hvd.rank(), hvd.size()
assert size == 2


def equal(found, expected, tolerance=0.0):
    np.testing.assert_allclose(
        tf.cast(found, tf.float64), np.asarray(expected, np.float64), rtol=tolerance, atol=tolerance
    )


def both_ways(function):
    """The function as it is, and as a graph."""
    return [function, tf.function(function)]


def error_of(call):
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("no error")


# ---- values, for every dtype ----

ARITHMETIC = [tf.uint8, tf.int8, tf.int16, tf.int32, tf.int64, tf.float16, tf.bfloat16, tf.float32, tf.float64]
SENT_ONLY = [tf.bool, tf.uint16, tf.uint32, tf.uint64]


def of_every_kind(x):
    return (
        hvd.allreduce(x, op=hvd.Sum),
        hvd.allreduce(x, op=hvd.Average),
        hvd.allreduce(x, op=hvd.Max, name="max"),
        hvd.reducescatter(x, op=hvd.Sum),
    )


def sent(x):
    return hvd.allgather(x), hvd.broadcast(x, 1), *hvd.alltoall(x, splits=[1, 2])


for dtype in ARITHMETIC:
    given = tf.cast(tf.constant([[1, 2], [3, 4], [5, 6]]) + 2 * rank, dtype)
    for run in both_ways(of_every_kind):
        total, mean, most, own = run(given)
        assert {t.dtype for t in (total, mean, most, own)} == {dtype}
        equal(total, [[4, 6], [8, 10], [12, 14]])
        equal(mean, [[2, 3], [4, 5], [6, 7]])
        equal(most, [[3, 4], [5, 6], [7, 8]])
        equal(own, [[4, 6], [8, 10]] if rank == 0 else [[12, 14]])
for dtype in [*ARITHMETIC, *SENT_ONLY]:
    given = tf.cast(tf.constant([[0, 1], [1, 0], [0, 0]]) + (1 - rank) % 2 * tf.eye(3, 2, dtype=tf.int32), dtype)
    of_rank = [
        tf.cast(tf.constant([[0, 1], [1, 0], [0, 0]]) + (1 - r) % 2 * tf.eye(3, 2, dtype=tf.int32), dtype)
        for r in (0, 1)
    ]
    for run in both_ways(sent):
        gathered, from_one, received, splits = run(given)
        assert {t.dtype for t in (gathered, from_one, received)} == {dtype}
        equal(gathered, tf.cast(tf.concat(of_rank, 0), tf.float64))
        equal(from_one, tf.cast(of_rank[1], tf.float64))
        rows = slice(0, 1) if rank == 0 else slice(1, 3)
        equal(received, np.concatenate([tf.cast(part, tf.float64).numpy()[rows] for part in of_rank]))
        equal(splits, [1, 1] if rank == 0 else [2, 2])

# Scalars, empty tensors, groups, factors, rows that differ between ranks.
equal(hvd.allreduce(tf.constant(3.0 + rank), op=hvd.Product), 12)
equal(hvd.allreduce(tf.zeros([0, 3])), np.zeros([0, 3]))
equal(hvd.allreduce(tf.constant([2.0]), prescale_factor=0.5, postscale_factor=3.0), [3.0])
equal(hvd.allgather(tf.fill([rank + 1], rank)), [0, 1, 1])
assert hvd.grouped_allreduce([]) == []
for run in both_ways(lambda a, b: hvd.grouped_allreduce([a, b], op=hvd.Sum)):
    first, second = run(tf.constant([1.0, rank]), tf.constant(7, tf.int64))
    equal(first, [2, 1])
    equal(second, 14)
for run in both_ways(lambda a, b: hvd.grouped_allgather([a, b]) + hvd.grouped_reducescatter([b, b], op=hvd.Sum)):
    first, second, third, _ = run(tf.constant([rank]), tf.constant([1.0, 2.0, 3.0]))
    equal(first, [0, 1])
    equal(second, [1, 2, 3, 1, 2, 3])
    equal(third, [2, 4] if rank == 0 else [6])
graph = tf.function(lambda x: hvd.allreduce(x)).get_concrete_function(tf.TensorSpec([None, 3]))
assert graph.structured_outputs.shape.as_list() == [None, 3]

# Sparse rows, compression, a compressor of the user's.
for run in both_ways(lambda v, i: hvd.allreduce(tf.IndexedSlices(v, i, tf.constant([4, 2])))):
    slices = run(tf.ones([1, 2]) * (rank + 1.0), tf.constant([2 * rank]))
    equal(tf.convert_to_tensor(slices), [[0.5, 0.5], [0, 0], [1, 1], [0, 0]])
assert isinstance(
    error_of(lambda: hvd.allreduce(tf.IndexedSlices(tf.ones([1]), [0]), op=hvd.Adasum)), NotImplementedError
)
for compression in (hvd.Compression.fp16, hvd.Compression.bf16, hvd.Compression.fp8, hvd.Compression.int8):
    for run in both_ways(lambda x, c=compression: hvd.allreduce(x, op=hvd.Sum, compression=c)):
        equal(run(tf.linspace(0.5, 1.0, 300)), np.linspace(1, 2, 300), 0.05)
    equal(hvd.allreduce(tf.constant([5, rank]), op=hvd.Sum, compression=compression), [10, 1])


class Halved:
    @staticmethod
    def compress(tensor):
        return tensor / 2, 2.0

    @staticmethod
    def decompress(tensor, ctx):
        return tensor * ctx


equal(hvd.allreduce(tf.constant([3.0 + rank]), op=hvd.Sum, compression=Halved), [7.0])
equal(
    hvd.allreduce(tf.constant([1.0, 2.0 * rank]), op=hvd.Adasum),
    hvd.allreduce(tf.constant([1.0, 2.0 * rank]), op=hvd.Adasum),
)

# ---- gradients ----


def gradient(function, *given):
    with tf.GradientTape() as tape:
        tape.watch(given)
        value = function(*given)
    return tape.gradient(value, given)


weights = tf.reshape(tf.range(1.0, 7.0), [3, 2]) * (rank + 1)
x = tf.ones([3, 2])
CASES = {
    # The average over ranks of the outer gradients is 1.5 times the weights of rank 0.
    "sum": (lambda t: hvd.allreduce(t, op=hvd.Sum) * weights, 3 * np.arange(1, 7).reshape(3, 2)),
    "average": (lambda t: hvd.allreduce(t) * weights, 1.5 * np.arange(1, 7).reshape(3, 2)),
    "scaled": (lambda t: hvd.allreduce(t, prescale_factor=2.0) * weights, 3 * np.arange(1, 7).reshape(3, 2)),
    "grouped": (lambda t: sum(hvd.grouped_allreduce([t, t], op=hvd.Sum)) * weights, 6 * np.arange(1, 7).reshape(3, 2)),
    "broadcast": (lambda t: hvd.broadcast(t, 1) * weights, rank * 1.5 * np.arange(1, 7).reshape(3, 2)),
    "reducescatter": (lambda t: hvd.reducescatter(t, op=hvd.Sum) * 3.0, np.full([3, 2], 6.0)),
    "alltoall": (lambda t: hvd.alltoall(t, splits=[1, 1])[0] * (rank + 1.0), [[1, 1], [2, 2], [0, 0]]),
}
for function, expected in CASES.values():
    for run in both_ways(lambda t, f=function: gradient(f, t)[0]):
        equal(run(x), expected, 1e-6)
    # A tape outside of the graph.
    equal(gradient(tf.function(function), x)[0], expected, 1e-6)
rows = tf.ones([rank + 1, 2])
factors = tf.reshape(tf.range(6.0), [3, 2])
for run in both_ways(lambda t: gradient(lambda u: hvd.allgather(u) * factors, t)[0]):
    equal(run(rows), [[0, 1]] if rank == 0 else [[2, 3], [4, 5]])
with tf.GradientTape() as outer:
    outer.watch(x)
    inner = gradient(lambda t: hvd.allreduce(t, op=hvd.Sum) ** 2, x)[0]
equal(outer.gradient(inner, x), np.full([3, 2], 8.0))

# ---- graphs whose independent collectives have another order on each rank ----


@tf.function
def in_another_order(x, y):
    names = ["a", "b", "c", "d"] if rank == 0 else ["d", "b", "c", "a"]
    return {name: hvd.allreduce(x if name in "ab" else y, op=hvd.Sum, name=name) for name in names}


for number in range(25):
    results = in_another_order(tf.fill([3], number), tf.fill([300_000], 1.0))
    equal(results["a"], [2 * number] * 3)
    equal(results["d"][:2], [2, 2])


@tf.function
def many_in_another_order(x):
    """64 independent collectives: far more than there are threads for nodes."""
    numbers = range(64) if rank == 0 else reversed(range(64))
    return {number: hvd.allreduce(x * number, op=hvd.Sum, name=f"many {number}") for number in numbers}


for _ in range(3):
    found = many_in_another_order(tf.fill([3000], 1.0))
    equal([found[number][0] for number in range(64)], 2.0 * np.arange(64))


@tf.function
def in_branches_and_loops(x):
    y = tf.cond(tf.reduce_sum(x) > 0, lambda: hvd.allreduce(x, op=hvd.Sum), lambda: hvd.allreduce(-x, op=hvd.Sum))
    for _ in tf.range(3):
        y = hvd.allreduce(y)
    return y


equal(in_branches_and_loops(tf.constant([1.0])), [2.0])
equal(in_branches_and_loops(tf.constant([-1.0])), [2.0])


@tf.function
def unused(x):
    hvd.allreduce(x, name="nobody reads this")
    return x


def choose(op, average):
    callers.append(sys._getframe(1).f_code.co_name)
    return op if op is not None else hvd.Average


# A function that AutoGraph has rewritten has another name, and calls others through AutoGraph.
callers: list[str] = []
with mock.patch.object(collectives, "handle_average_backwards_compatibility", choose):
    unused(tf.ones([2]))
assert callers == ["allreduce"], callers

# ---- memory is shared, and results stay what they are ----

tensor = tf.random.normal([1000])
shared = bridge.to_torch(tensor)
assert shared.data_ptr() == tensor.__array__().ctypes.data
assert bridge.to_tensorflow(shared, tf.float32).__array__().ctypes.data == shared.data_ptr()
large = tf.Variable(tf.fill([1_500_000], 1.0 + rank))
kept = [hvd.allreduce(large, op=hvd.Sum) for _ in range(3)]
in_graph = tf.function(lambda: hvd.allreduce(large, op=hvd.Sum))()
large.assign_add(tf.ones_like(large))
for result in [*kept, in_graph]:
    equal(tf.stack([tf.reduce_min(result), tf.reduce_max(result)]), [3, 3])
equal(tf.reduce_max(large), 2.0 + rank)
for number, result in enumerate([hvd.allreduce(tf.fill([300_000], 1.0 + n)) for n in range(3)]):
    equal(result, np.full(300_000, 1.0 + number))


@tf.function
def read_again(x):
    """Only the last of these may be written where its input is: nothing else reads that."""
    y = x * 2.0
    return hvd.allreduce(y, op=hvd.Sum), y + 1.0, hvd.broadcast(x + 3.0, 1), hvd.allreduce(x * 4.0, op=hvd.Sum)


given = tf.fill([1000], rank + 1.0)
for found, expected in zip(read_again(given), [6.0, 2.0 * rank + 3.0, 5.0, 12.0], strict=True):
    equal(found, np.full(1000, expected))
equal(given, np.full(1000, rank + 1.0))

# ---- graphs keep what their nodes need ----

branches = tf.function(lambda x: tf.cond(x[0] > 0, lambda: hvd.allreduce(x), lambda: -x))
equal(branches(tf.ones([2])), [1, 1])
gc.collect()
equal(branches(tf.ones([2])), [1, 1])

# ---- process sets, objects, join, questions ----

alone = hvd.add_process_set([1])
if rank == 1:
    equal(hvd.allreduce(tf.constant([4.0]), process_set=alone), [4.0])
    assert hvd.allgather_object("me", process_set=alone) == ["me"]
    equal(hvd.size_op(alone.process_set_id), 1)
else:
    assert "not a member" in str(error_of(lambda: hvd.allreduce(tf.constant([4.0]), process_set=alone)))
assert hvd.remove_process_set(alone)
assert hvd.allgather_object({"rank": rank}) == [{"rank": 0}, {"rank": 1}]
assert hvd.broadcast_object([rank], root_rank=1) == [1] and hvd.broadcast_object_fn(root_rank=0)(rank) == 0
for question, expected in ((hvd.rank_op, rank), (hvd.size_op, 2), (hvd.local_rank_op, rank), (hvd.local_size_op, 2)):
    equal(tf.stack([run() for run in both_ways(question)]), [expected, expected])
equal(tf.function(hvd.process_set_included_op)(), 1)
variables = [tf.Variable([1.0 * rank, 2.0]), tf.Variable(rank, dtype=tf.int64)]
hvd.broadcast_variables(variables, root_rank=1)
equal(variables[0], [1, 2])
equal(variables[1], 1)
variables[0].assign([5.0 * rank, 0.0])
tf.function(lambda: hvd.broadcast_variables(variables, root_rank=0))()
equal(variables[0], [0, 0])
equal(hvd.broadcast_([variables[1]], 0)[0], 1)
text = str(error_of(lambda: hvd.broadcast_variables(variables[: 1 + rank], root_rank=0)))
assert "different numbers of variables: [1, 2]" in text, text
hvd.barrier()
tf.function(hvd.barrier)()
for _ in range(3 if rank == 0 else 1):
    hvd.allreduce(tf.ones([2]), name="until joined")
assert int(hvd.join()) == 0

# ---- errors, on both ranks at once; the job continues ----

for number, run in enumerate(both_ways(lambda x: hvd.allreduce(x, name="mismatch"))):
    error = error_of(lambda run=run: run(tf.ones([2 + rank])))
    assert isinstance(error, tf.errors.UnknownError if number else hvd.HorovodInternalError)
    assert "rank 0 (" in str(error) and "sent shape [2], but rank 1 (" in str(error), error
    error = error_of(lambda run=run: run(tf.ones([2], tf.float32 if rank else tf.float64)))
    assert "float64" in str(error), error
    # Scripts catch TensorFlow's error, as Horovod raises it.
    assert number or isinstance(error, tf.errors.FailedPreconditionError), error
    equal(run(tf.ones([2])), [1, 1])
error = error_of(lambda: tf.function(lambda x: hvd.allreduce(x), jit_compile=True)(tf.ones([2])))
assert "jit_compile" in str(error), error
error = error_of(lambda: hvd.broadcast(tf.ones([1]), root_rank=rank, name="roots differ"))
assert isinstance(error, hvd.HorovodInternalError) and "root" in str(error), error
for call, text in (
    (lambda: hvd.allreduce(tf.constant("text")), "Tensor type string is not supported by allreduce"),
    (lambda: hvd.allreduce(tf.constant(True)), "Tensor type bool is not supported by allreduce"),
    (lambda: hvd.allgather(tf.constant(1.0)), "allgather needs a tensor with at least one dimension"),
    (lambda: hvd.reducescatter(tf.constant(1.0)), "reducescatter needs a tensor with at least one dimension"),
    (lambda: hvd.broadcast(tf.ones([1]), root_rank=7), "invalid root rank 7"),
    (lambda: hvd.alltoall(tf.ones([3])), "not an even multiple"),
    (lambda: hvd.allreduce(tf.ones([1]), average=True, op=hvd.Sum), "supersedes average"),
    (lambda: hvd.broadcast_global_variables(0), "does not support eager execution"),
):
    error = error_of(call)
    assert isinstance(error, (ValueError, RuntimeError)) and text in str(error), error
    if "root rank" in text or "even multiple" in text:
        assert isinstance(error, tf.errors.InvalidArgumentError), error
equal(hvd.allreduce(tf.ones([1])), [1])
hvd.shutdown()
assert "Horovod has not been initialized" in str(error_of(lambda: hvd.allreduce(tf.ones([1]))))
if rank == 0:
    trace = json.loads(timeline.read_text())
    named = {event["args"].get("name") for event in trace if event and event.get("name") == "process_name"}
    assert {"allreduce.a", "allreduce.until joined"} <= named, named

# ---- a rank that never submits is named on all ranks, also in a graph, and the job is over ----

os.environ |= {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "1"}
hvd.init()
has_failed = Path(sys.argv[1], "rank 0 has failed")
while rank == 1 and not has_failed.exists():
    time.sleep(0.05)
error = error_of(lambda: tf.function(lambda x: hvd.allreduce(x, name="lost"))(tf.ones([300_000])))
has_failed.touch()
assert isinstance(error, tf.errors.UnknownError), error
assert "Missing ranks:\n1 (" in str(error) and "allreduce.lost" in str(error), error
hvd.shutdown()
for name in ("HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"):
    del os.environ[name]
print("collectives: all good")
