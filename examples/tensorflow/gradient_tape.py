"""A training loop with tf.GradientTape on several processes, written for Horovod.

    megaclass run --horovod -np 2 python examples/tensorflow/gradient_tape.py

`Horovod:` marks what Horovod adds to a script for one process.
"""

import argparse

import tensorflow as tf
from drawn_digits import drawn_digits

import horovod.tensorflow as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--images", type=int, default=8192)
parser.add_argument("--steps", type=int, default=200, help="steps, divided by the number of processes")
parser.add_argument("--batch-size", type=int, default=64, help="images per process and step")
parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients in 16 bits")
options = parser.parse_args()

# Horovod: start, and give every process a GPU of its own.
hvd.init()
gpus = tf.config.list_physical_devices("GPU")
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

dataset = tf.data.Dataset.from_tensor_slices(drawn_digits(options.images, seed=hvd.rank()))
dataset = dataset.repeat().shuffle(4096).batch(options.batch_size)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Input((28, 28, 1)),
        tf.keras.layers.Conv2D(16, 3, activation="relu"),
        tf.keras.layers.MaxPooling2D(2),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(64, activation="relu"),
        tf.keras.layers.Dense(10),
    ]
)
loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
# Horovod: the learning rate grows with the number of processes.
optimizer = tf.keras.optimizers.Adam(0.001 * hvd.size())
optimizer.build(model.trainable_variables)


@tf.function
def training_step(images, labels):
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(images, training=True))
    # Horovod: the tape averages gradients over processes.
    compression = hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none
    tape = hvd.DistributedGradientTape(tape, compression=compression)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


for step, (images, labels) in enumerate(dataset.take(options.steps // hvd.size())):
    loss = training_step(images, labels)
    if step == 0:
        # Horovod: all processes continue from the state of rank 0. Here, after the first step, all variables exist.
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables, root_rank=0)
    if step % 20 == 0 and hvd.rank() == 0:
        print(f"step {step}: loss {float(loss):.4f}", flush=True)

test_images, test_labels = drawn_digits(1000, seed=1000)
predicted = tf.argmax(model(test_images), axis=1)
accuracy = tf.reduce_mean(tf.cast(predicted == test_labels, tf.float32))
# Horovod: the same model on all processes.
weights = tf.concat([tf.reshape(weight, [-1]) for weight in model.trainable_variables], 0)
spread = tf.reduce_max(hvd.allreduce(weights, op=hvd.Max) - hvd.allreduce(weights, op=hvd.Min))
print(
    f"rank {hvd.rank()} of {hvd.size()}: test accuracy {100 * float(accuracy):.1f}%, weights differ by {float(spread)}"
)
