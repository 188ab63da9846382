"""Run by each of two ranks: what is left of TensorFlow 1, and the names under which Horovod's modules have things."""

import importlib
import inspect
import json

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd

# ---- names, as JSON for the test ----

MODULES = ["torch", "tensorflow", "tensorflow.keras", "keras", "tensorflow.keras.callbacks", "keras.callbacks"]
MODULES += ["tensorflow.mpi_ops", "tensorflow.functions", "tensorflow.compression", "tensorflow.sync_batch_norm"]
MODULES += ["tensorflow.gradient_aggregation", "tensorflow.gradient_aggregation_eager", "tensorflow.util"]


def parameters(value):
    try:
        return list(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        return None


found = {}
for name in MODULES:
    module = importlib.import_module(f"horovod.{name}")
    names = [n for n in {*dir(module), *getattr(module, "__all__", ())} if not n.startswith("_")]
    found[name] = {n: parameters(getattr(module, n)) for n in names}
assert hvd.keras.callbacks is importlib.import_module("horovod.tensorflow.keras.callbacks")
for absent in (lambda: importlib.import_module("horovod.mxnet"), lambda: hvd.no_such_name):
    try:
        absent()
    except (ImportError, AttributeError):
        continue
    raise AssertionError(absent)

# ---- sessions ----

hvd.init()
rank = hvd.rank()
v1 = tf.compat.v1
v1.disable_eager_execution()
with tf.Graph().as_default():
    weight = v1.get_variable("weight", initializer=np.array([1.0, 2.0], np.float32) * (rank + 1))
    old_style = v1.get_variable("old", initializer=float(rank), use_resource=False)
    loss = tf.reduce_sum(weight * (rank + 1.0))
    optimizer = hvd.DistributedOptimizer(v1.train.MomentumOptimizer(1.0, 0.5))
    train = optimizer.minimize(loss)
    summed = hvd.allreduce(tf.constant([1.0, rank]), op=hvd.Sum)
    gathered = hvd.allgather(tf.fill([rank + 1], rank))
    slope = tf.gradients(hvd.allreduce(weight, op=hvd.Sum), weight)[0]
    with v1.train.MonitoredTrainingSession(hooks=[hvd.BroadcastGlobalVariablesHook(0)]) as session:
        assert session.run(weight).tolist() == [1.0, 2.0] and session.run(old_style) == 0.0
        session.run(train)
        assert session.run(weight).tolist() == [-0.5, 0.5]
        assert session.run(summed).tolist() == [2.0, 1.0] and session.run(gathered).tolist() == [0, 1, 1]
        assert session.run(slope).tolist() == [2.0, 2.0]
    assert optimizer.get_slot_names() == ["momentum"] and optimizer.get_slot(weight, "momentum") is not None
with tf.Graph().as_default():
    weight = v1.get_variable("weight", initializer=float(rank))
    again = hvd.broadcast_global_variables(1)
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        session.run(again)
        assert session.run(weight) == 1.0
        # Objects need no session.
        assert hvd.broadcast_object({"of": rank}, root_rank=1, session=session) == {"of": 1}
# Two threads for 64 collectives that the ranks begin from opposite ends: none may keep a thread while it waits.
with tf.Graph().as_default():
    places = range(64) if rank == 0 else reversed(range(64))
    given = {place: v1.placeholder(tf.float32, [None], f"given_{place}") for place in places}
    totals = {place: hvd.allreduce(tensor, op=hvd.Sum, name=f"total_{place}") for place, tensor in given.items()}
    two_threads = v1.ConfigProto(inter_op_parallelism_threads=2, use_per_session_threads=True)
    with v1.Session(config=two_threads) as session:
        for step in range(3):
            sums = session.run(totals, {given[place]: [place, rank + step] for place in given})
            assert {place: total.tolist() for place, total in sums.items()} == {
                place: [2.0 * place, 1.0 + 2 * step] for place in range(64)
            }, sums
        # Only what is asked for runs: rank 1 has made the others before these.
        assert session.run([totals[63], totals[0]], {given[0]: [1.0], given[63]: [2.0]})[1].tolist() == [2.0]
for call, text in (
    (lambda: hvd.DistributedOptimizer(v1.train.AdamOptimizer(), op=hvd.Adasum), "op=Adasum needs a Keras optimizer"),
    (lambda: hvd.DistributedOptimizer(v1.train.AdamOptimizer(), backward_passes_per_step=2), "needs a Keras optimizer"),
):
    try:
        call()
    except (ValueError, NotImplementedError) as error:
        assert text in str(error), error
    else:
        raise AssertionError(text)
hvd.shutdown()
print(json.dumps(found))
print("sessions: all good")
