"""Images per second of a model of keras.applications on random images, written for Horovod.

megaclass run --horovod -np 2 python examples/tensorflow/synthetic_benchmark.py --model MobileNetV2 --image-size 96
"""

import argparse
import timeit

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="ResNet50", help="a name in tf.keras.applications")
parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
parser.add_argument("--image-size", type=int, default=224)
parser.add_argument("--num-warmup-batches", type=int, default=10)
parser.add_argument("--num-batches-per-iter", type=int, default=10)
parser.add_argument("--num-iters", type=int, default=10)
parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients in 16 bits")
options = parser.parse_args()

hvd.init()
gpus = tf.config.list_physical_devices("GPU")
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

shape = (options.image_size, options.image_size, 3)
model = getattr(tf.keras.applications, options.model)(weights=None, input_shape=shape)
optimizer = tf.keras.optimizers.SGD(0.01)
images = tf.random.uniform([options.batch_size, *shape])
labels = tf.random.uniform([options.batch_size], minval=0, maxval=999, dtype=tf.int64)
compression = hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none
loss_of = tf.keras.losses.SparseCategoricalCrossentropy()
optimizer.build(model.trainable_variables)


@tf.function
def benchmark_step():
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(images, training=True))
    tape = hvd.DistributedGradientTape(tape, compression=compression)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


def log(text):
    if hvd.rank() == 0:
        print(text, flush=True)


benchmark_step()
hvd.broadcast_variables(model.variables, root_rank=0)
hvd.broadcast_variables(optimizer.variables, root_rank=0)
log(f"Model: {options.model}, batch size {options.batch_size}, {hvd.size()} processes")
timeit.timeit(benchmark_step, number=options.num_warmup_batches)
rates = []
for number in range(options.num_iters):
    seconds = timeit.timeit(benchmark_step, number=options.num_batches_per_iter)
    rates.append(options.batch_size * options.num_batches_per_iter / seconds)
    log(f"Iter #{number}: {rates[-1]:.1f} img/sec per process")
mean, spread = np.mean(rates), 1.96 * np.std(rates)
log(f"Img/sec per process: {mean:.1f} +-{spread:.1f}")
log(f"Total img/sec on {hvd.size()} process(es): {hvd.size() * mean:.1f} +-{hvd.size() * spread:.1f}")
