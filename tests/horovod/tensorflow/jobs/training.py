"""Run by each of two ranks: training on two ranks equals one process with the double batch, in every way to train."""

import sys
from functools import partial

import keras
import numpy as np
import tensorflow as tf

import horovod.keras as hvd_keras
import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_tf_keras
from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelper

hvd.init()
rank, size = hvd.rank(), hvd.size()
folder = sys.argv[-1]
random = np.random.default_rng(0)
images, labels = random.normal(3, 2, (16, 6)).astype(np.float32), random.integers(0, 3, 16)
mine = slice(8 * rank, 8 * rank + 8)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def error_of(call):
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("no error")


def model(norm=None, seed=3):
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(5, activation="tanh"), *([norm] if norm else []), keras.layers.Dense(3)]
    return keras.Sequential([keras.layers.Input([6]), *layers])


def close(found, expected, tolerance=2e-5):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            tf.convert_to_tensor(one), tf.convert_to_tensor(other), rtol=tolerance, atol=tolerance
        )


def step_of(net, optimizer, wrap=lambda tape: tape, in_graph=True):
    """One step of the usual training loop, as a function of images and labels."""

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, net(x, training=True))
        gradients = wrap(tape).gradient(loss, net.trainable_variables)
        optimizer.apply_gradients(zip(gradients, net.trainable_variables, strict=True))

    run = tf.function(step) if in_graph else step
    return lambda x, y: run(tf.constant(x), tf.constant(y))


def steps(net, optimizer, x, y, passes=4, **more):
    step = step_of(net, optimizer, **more)
    for _ in range(passes):
        step(x, y)
    return net.weights


def on_one_process(optimizer=None, passes=4):
    """The truth, computed eagerly: a graph would take longer to trace than it saves."""
    return steps(model(), optimizer or sgd(), images, labels, passes, in_graph=False)


def sgd():
    return keras.optimizers.SGD(0.3, momentum=0.9)


# ---- the tape ----

truth = on_one_process()
for in_graph in (True, False):
    for options in (
        {},
        {"gradient_predivide_factor": 2.0},
        {"groups": 2},
        {"op": hvd.Sum, "groups": 1, "halves": True},
    )[:: 1 if in_graph else 2]:
        options = dict(options)
        half = options.pop("halves", False)
        optimizer = keras.optimizers.SGD(0.15 if half else 0.3, momentum=0.9)
        wrap = partial(hvd.DistributedGradientTape, **options)
        close(steps(model(), optimizer, images[mine], labels[mine], wrap=wrap, in_graph=in_graph), truth)
wrap = partial(hvd.DistributedGradientTape, compression=hvd.Compression.fp16)
close(steps(model(), sgd(), images[mine], labels[mine], wrap=wrap), truth, 2e-2)
# Groups under each compression, against the mean of both ranks' gradients in float64.
slopes = [[np.random.default_rng([r, n]).normal(size=n) for n in (300, 7, 40)] for r in range(size)]
for name, error in {"none": 1e-6, "fp16": 1e-3, "bf16": 1e-2, "fp8": 0.08, "int8": 0.08}.items():
    parts = [tf.Variable(tf.zeros(len(slope))) for slope in slopes[rank]]
    with tf.GradientTape() as tape:
        value = tf.add_n([tf.reduce_sum(v * s.astype(np.float32)) for v, s in zip(parts, slopes[rank], strict=True)])
    grouped = hvd.DistributedGradientTape(tape, compression=getattr(hvd.Compression, name), groups=2)
    for gradient, *both in zip(grouped.gradient(value, parts), *slopes, strict=True):
        mean = np.mean(both, axis=0)
        assert np.linalg.norm(gradient.numpy() - mean) < error * np.linalg.norm(mean), (name, len(mean))
with hvd.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
    tape.watch(variable := tf.constant([1.0, 2.0]))
    value = tf.reduce_sum(variable * (rank + 1.0))
close([tape.gradient(value, variable)], [tf.constant([1.5, 1.5])])
close([tape.gradient(value, {"v": variable})["v"]], [tf.constant([1.5, 1.5])])
net = model()
local = net.layers[0]
with tf.GradientTape() as tape:
    loss = loss_of(labels[mine], net(images[mine]))
own = tape.gradient(loss, net.trainable_variables)
with tf.GradientTape() as again:
    loss = loss_of(labels[mine], net(images[mine]))
partial = hvd.PartialDistributedGradientTape(again, local_layers=local, groups=[net.layers[1].trainable_variables])
found = partial.gradient(loss, net.trainable_variables)
close(found[:2], [gradient / 2 for gradient in own[:2]])
close(found[2:], [hvd.allreduce(gradient) for gradient in own[2:]])

# Sparse gradients of an embedding.
table = tf.Variable(tf.ones([6, 2]))
for sparse_as_dense in (False, True):
    with tf.GradientTape() as tape:
        value = tf.reduce_sum(tf.gather(table, [rank, 5]))
    gradient = hvd.DistributedGradientTape(tape, sparse_as_dense=sparse_as_dense).gradient(value, [table])[0]
    assert isinstance(gradient, tf.IndexedSlices) is not sparse_as_dense
    close([tf.convert_to_tensor(gradient)], [[[0.5] * 2, [0.5] * 2, [0] * 2, [0] * 2, [0] * 2, [1] * 2]])

# ---- the optimizer ----

truth_of_adam = on_one_process(keras.optimizers.Adam(0.05))
for make in (hvd.DistributedOptimizer, hvd_keras.DistributedOptimizer, hvd_tf_keras.DistributedOptimizer):
    optimizer = make(keras.optimizers.Adam(0.05))
    assert isinstance(optimizer, keras.optimizers.Adam) and type(optimizer).__name__ == "Adam"
close(steps(model(), optimizer, images[mine], labels[mine]), truth_of_adam, 1e-4)
truth_of_two_passes = on_one_process(passes=2)
for in_graph in (True, False):
    # The mean of two passes is one pass over both halves.
    optimizer = hvd.DistributedOptimizer(sgd(), backward_passes_per_step=2, average_aggregated_gradients=True)
    net = model()
    step = step_of(net, optimizer, in_graph=in_graph)
    for number in range(4):
        part = slice(8 * rank + 4 * (number % 2), 8 * rank + 4 * (number % 2) + 4)
        before = [weight.numpy() for weight in net.weights]
        step(images[part], labels[part])
        if number % 2 == 0:
            close(net.weights, before)
    close(net.weights, truth_of_two_passes)
    assert int(optimizer.iterations) == 4
# Adasum of equal changes is the change itself; of orthogonal ones their sum.
net = model()
same = hvd.DistributedOptimizer(sgd(), op=hvd.Adasum)
close(steps(net, same, images, labels), truth, 1e-4)
weight = keras.Variable([1.0, 1.0])
apart = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Adasum)
apart.apply([tf.constant([1.0, 0.0] if rank == 0 else [0.0, 2.0])], [weight])
close([weight], [[0.0, -1.0]])
local_optimizer = hvd_keras.PartialDistributedOptimizer(
    keras.optimizers.SGD(1.0), local_layers=net.layers[0], scale_local_gradients=False
)
before = [w.numpy() for w in net.weights]
local_optimizer.apply([tf.ones_like(w) * (rank + 1.0) for w in net.trainable_variables], net.trainable_variables)
close(net.weights[:2], [w - (rank + 1.0) for w in before[:2]])
close(net.weights[2:], [w - 1.5 for w in before[2:]])
hvd.barrier()

for call, text in (
    (lambda: hvd.DistributedOptimizer(optimizer), "DistributedOptimizer already"),
    (lambda: hvd.DistributedOptimizer("adam"), "expected an optimizer of Keras"),
    (
        lambda: hvd.DistributedOptimizer(sgd(), op=hvd.Sum, gradient_predivide_factor=2.0),
        "not supported with op != Average",
    ),
    (lambda: hvd.DistributedOptimizer(sgd(), groups=0), "groups should be a non-negative integer"),
    (
        lambda: hvd.DistributedOptimizer(sgd(), op=hvd.Adasum, average_aggregated_gradients=True),
        "Adasum does not support",
    ),
    (lambda: hvd.DistributedOptimizer(sgd(), backward_passes_per_step=0), "must be > 0"),
):
    assert text in str(error_of(call)), error_of(call)
scaled = keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(sgd()))
text = str(error_of(lambda: scaled.apply([tf.ones([2])], [keras.Variable([1.0, 1.0])])))
assert "Wrap in the other order" in text, text
weight = keras.Variable([1.0, 1.0])
right = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=2.0))
right.apply([tf.constant([2.0, np.inf if rank else 2.0])], [weight])
close([weight], [[1.0, 1.0]])
right.apply([tf.constant([2.0, 4.0])], [weight])
close([weight], [[-1.0, -3.0]])

# ---- batch norm over ranks equals batch norm over the double batch ----

for x, parts in ((images, (slice(0, 8), slice(8, 16))), (images + 300, (slice(0, 3), slice(3, 16)))):
    whole = model(keras.layers.BatchNormalization())
    split = model(hvd.SyncBatchNormalization())
    with tf.GradientTape() as tape:
        value = tf.reduce_sum(whole(x, training=True)[:, 0] ** 2)
    expected = tape.gradient(value, whole.trainable_variables)
    with tf.GradientTape() as tape:
        value = tf.reduce_sum(split(x[parts[rank]], training=True)[:, 0] ** 2)
    found = hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(value, split.trainable_variables)
    close(split.non_trainable_variables[:2], whole.non_trainable_variables[:2], 1e-4)
    close(found, expected, 2e-3)
    close([split(x)], [whole(x)], 1e-3)
assert "fused" in str(error_of(lambda: hvd.SyncBatchNormalization(fused=True)))

# ---- model.fit() ----


def fitted(optimizer, x, y, batch_size, callbacks, seed=3, epochs=3, **how):
    net = model(seed=seed)
    net.compile(optimizer, loss=loss_of, metrics=["accuracy"], **how)
    history = net.fit(x, y, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)
    return net, history.history


expected, its_history = fitted(sgd(), images, labels, 16, [], run_eagerly=True)
callbacks = [hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0), hvd_keras.callbacks.MetricAverageCallback()]
# Rank 1 starts from other weights, which the broadcast overwrites.
net, history = fitted(hvd_keras.DistributedOptimizer(sgd()), images[mine], labels[mine], 8, callbacks, seed=3 + rank)
close(net.weights, expected.weights)
for metric in ("loss", "accuracy"):
    np.testing.assert_allclose(history[metric], its_history[metric], rtol=1e-5)
close([hvd.allreduce(net.weights[0], op=hvd.Max)], [hvd.allreduce(net.weights[0], op=hvd.Min)], 0)

# Learning rates: a warm-up to 0.4 from 0.4 / size over 2 epochs of 4 steps, then a tenth of it.
seen = []
record = keras.callbacks.LambdaCallback(
    on_train_batch_begin=lambda batch, logs: seen.append(
        (float(net.optimizer.learning_rate), float(tf.convert_to_tensor(net.optimizer.momentum)))
    )
)
net = model()
net.compile(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.4, momentum=0.5)), loss=loss_of)
schedule = [
    hvd_tf_keras.callbacks.LearningRateWarmupCallback(initial_lr=0.4, warmup_epochs=2, verbose=1),
    hvd_tf_keras.callbacks.LearningRateScheduleCallback(initial_lr=0.4, multiplier=0.1, start_epoch=2, end_epoch=3),
    hvd_tf_keras.callbacks.LearningRateScheduleCallback(
        initial_lr=0.4, multiplier=lambda epoch: 0.5, start_epoch=3, momentum_correction=False
    ),
]
log = net.fit(images[mine], labels[mine], batch_size=2, epochs=4, verbose=0, callbacks=[*schedule, record]).history
rates = [0.2 * (1 + (step + 1) / 8) for step in range(8)] + [0.4] * 4 + [0.2] * 4
np.testing.assert_allclose([rate for rate, _ in seen], rates, rtol=1e-5)
before = [0.4, *rates]
corrected = [0.5 * rate / old for rate, old in zip(rates[:8], before, strict=False)] + [0.5] * 8
np.testing.assert_allclose([momentum for _, momentum in seen], corrected, rtol=1e-5)
np.testing.assert_allclose(log["lr"], [0.3, 0.4, 0.4, 0.2], rtol=1e-5)

# Callbacks by hand, at their edges.
calls = hvd_keras.callbacks
for logs in (None, {}):
    calls.MetricAverageCallback().on_epoch_end(0, logs)
    assert not logs
logs = {"loss": 2.0 * rank, "accuracy": np.float32(0.25 + rank / 2), "count": 3}
calls.MetricAverageCallback().on_epoch_end(0, logs)
assert logs == {"loss": 1.0, "accuracy": 0.5, "count": 3.0}, logs
net = model()
net.compile(keras.optimizers.SGD(0.8), loss=loss_of)
halving = calls.LearningRateScheduleCallback(initial_lr=0.8, multiplier=0.5, start_epoch=1, end_epoch=3)
halving.set_model(net)
halving.set_params({"steps": 4})
halving.on_train_begin()
rates = []
for epoch in range(4):
    halving.on_epoch_begin(epoch)
    for batch in range(2):
        # A staircase changes the rate in the first batch only; before and after its epochs the rate stays.
        halving.on_train_batch_begin(batch)
        rates.append(round(float(net.optimizer.learning_rate), 6))
        halving.on_train_batch_end(batch)
        net.optimizer.learning_rate = rates[-1] if batch else 0.9
assert rates == [0.8, 0.9, 0.8, 0.9, 0.4, 0.9, 0.9, 0.9], rates
smooth = calls.LearningRateScheduleCallback(initial_lr=1.0, multiplier=lambda epoch: 1 + epoch, staircase=False)
smooth.set_model(net)
smooth.set_params({"steps": None})
text = str(error_of(smooth.on_train_begin))
assert "specify the steps_per_epoch parameter to the LearningRateScheduleCallback()" in text, text
smooth.set_params({"steps": 5})
smooth.on_train_begin()
smooth.on_epoch_begin(2)
smooth.on_train_batch_begin(1)
logs = {}
smooth.on_epoch_end(2, logs)
np.testing.assert_allclose(logs["lr"], 1 + 2.2, rtol=1e-6)
assert "`initial_lr` is required" in str(error_of(lambda: calls.LearningRateScheduleCallback(None, 0.1)))
# A variable that is registered as local, and the second start of a training, are left alone.
net, start = model(seed=10 + rank), model(seed=10)
net.compile(keras.optimizers.SGD(0.1), loss=loss_of)
once = calls.BroadcastGlobalVariablesCallback(0)
once.register_local_var(net.weights[3])
once.set_model(net)
net.weights[3].assign([1.0, 2.0, 3.0 + rank])
once.on_train_begin()
close(net.weights[:3], start.weights[:3], 0)
close([net.weights[3]], [[1.0, 2.0, 3.0 + rank]], 0)
net.weights[0].assign(net.weights[0] + rank)
once.on_train_begin()
once.on_train_batch_end(0)
close([net.weights[0]], [start.weights[0] + rank], 0)

# Plain values, the compressors by themselves, and gradients that are added up on one rank.
close([hvd_keras.allreduce([1.0, rank]), hvd_keras.allreduce(np.float64(rank), op=hvd.Sum)], [[1.0, 0.5], 1.0])
close([hvd_keras.allgather([[rank, 7]]), hvd_keras.broadcast([rank, 5], 1)], [[[0, 7], [1, 7]], [1, 5]])
close([hvd_keras.reducescatter([[2.0 * rank], [4.0]])], [[[1.0]] if rank == 0 else [[4.0]]])
for compressor in (hvd.Compression.fp16, hvd.Compression.bf16):
    for dtype in (tf.float32, tf.float64, tf.int32):
        packed, context = compressor.compress(tf.constant([1, -3], dtype))
        assert packed.dtype.size == (2 if dtype.is_floating else 4)
        unpacked = compressor.decompress(packed, context)
        assert unpacked.dtype == dtype and unpacked.numpy().tolist() == [1, -3]
for compressor in (hvd.Compression.fp8, hvd.Compression.int8):
    assert "for allreduce with op=Sum and op=Average only" in str(
        error_of(lambda c=compressor: c.compress(tf.ones([2])))
    )
    assert compressor.compress(tf.constant([3]))[0].numpy().tolist() == [3]
for is_mean, expected in ((False, [3.0, 6.0]), (True, [1.5, 3.0])):
    helper, applied, skipped = LocalGradientAggregationHelper(2, average_aggregated_gradients=is_mean), [], []
    for number in range(4):
        helper.step([tf.constant([1.0, 2.0]) * (number % 2 + 1), None], applied.append, lambda: skipped.append(1))  # noqa: B023
    # Sums start again after each step, and a variable without a gradient stays without.
    assert [[t if t is None else t.numpy().tolist() for t in each] for each in applied] == [[expected, None]] * 2
    assert len(skipped) == 2
    text = str(error_of(lambda: helper.step([None, tf.ones([1])], applied.append, skipped.clear)))  # noqa: B023
    assert "needs gradients for the same variables in every pass" in text, text
slices = tf.IndexedSlices(tf.ones([1, 2]), [0], [3, 2])
text = str(error_of(lambda: LocalGradientAggregationHelper(2).step([slices], print, print)))
assert "pass sparse_as_dense=True" in text, text
assert "backward_passes_per_step=0: must be > 0" in str(error_of(lambda: LocalGradientAggregationHelper(0)))

# Saved models load without hvd, and hvd's load_model() restores state and wraps the optimizer.
file = f"{folder}/model.keras"
best = hvd_keras.callbacks.BestModelCheckpoint(monitor="loss")
best.filepath = f"{folder}/best.{rank}.keras"
net, _ = fitted(hvd_keras.DistributedOptimizer(keras.optimizers.Adam(0.01)), images[mine], labels[mine], 8, [best])
if rank == 0:
    net.save(file)
hvd.barrier()
assert type(keras.models.load_model(file).optimizer) is keras.optimizers.Adam
assert hvd_keras.load_model is hvd_tf_keras.load_model
loaded = hvd_keras.load_model(file)
close(loaded.optimizer.variables, net.optimizer.variables, 0)
loaded.fit(images[mine], labels[mine], batch_size=8, epochs=1, shuffle=False, verbose=0)
net.fit(images[mine], labels[mine], batch_size=8, epochs=1, shuffle=False, verbose=0)
close(loaded.weights, net.weights, 0)
assert len(keras.models.load_model(best.filepath).weights) == 4

# The functions for plain values.
assert float(hvd_keras.allreduce(float(rank))) == 0.5 and hvd_tf_keras.allgather([rank]).numpy().tolist() == [0, 1]
assert (
    int(hvd_keras.broadcast(rank, 1)) == 1
    and hvd_keras.reducescatter([2.0, 4.0]).numpy().tolist() == [[2.0], [4.0]][rank]
)
# Nodes that communicate cannot be compiled by XLA, which Keras does by itself where there is a GPU.
net.compile(hvd_keras.DistributedOptimizer(sgd()), loss=loss_of, jit_compile=True)
net.fit(images[mine], labels[mine], verbose=0, callbacks=[hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)])

# ---- elastic states ----

net = model(seed=rank)
net.compile(hvd_keras.DistributedOptimizer(sgd()), loss=loss_of)
state = hvd_keras.elastic.KerasState(net, epoch=rank, batch=0)
weights = [w.numpy() for w in net.weights]
numbers = tf.Variable([float(rank)])
other = hvd.elastic.TensorFlowState([numbers], step=rank)
other.sync()
assert (numbers.numpy().tolist(), other.step) == ([0.0], 0)
numbers.assign([7.0])
other.step = 5
other.restore()
assert (numbers.numpy().tolist(), other.step) == ([0.0], 0)
graph = tf.function(lambda x: hvd.allreduce(x, name="after a change"))
attempts = []


@hvd.elastic.with_plain_errors
def train(state):
    attempts.append([w.numpy() for w in net.weights])
    if len(attempts) == 1:
        keras.utils.set_random_seed(100 + rank)
        net.weights[0].assign(keras.random.normal([6, 5]))
        # The ranks disagree, as they do when one of them is gone: an error of the graph on both.
        graph(tf.ones([2 + rank]))
    done = (hvd_keras.elastic.UpdateEpochStateCallback(state), hvd_keras.elastic.UpdateBatchStateCallback(state))
    commit = hvd_keras.elastic.CommitStateCallback(state, batches_per_commit=3)
    net.fit(images[mine], labels[mine], batch_size=2, epochs=2, shuffle=False, verbose=0, callbacks=[*done, commit])
    return "done"


assert hvd.elastic.run_fn(train, lambda: None)(state) == "done" and len(attempts) == 2
# Both attempts began with the weights of rank 0: by the first sync, and by the restored commit.
close(attempts[0], [hvd.broadcast(w, 0) for w in weights], 0)
close(attempts[1], attempts[0], 0)
assert (state.epoch, state.batch) == (2, 0)
after = [w.numpy() for w in net.weights]
net.weights[0].assign(net.weights[0] + 1.0)
state.restore()
close(net.weights, after, 0)
hvd.shutdown()
print("training: all good", flush=True)
