"""model.fit() on several processes, written for Horovod: nothing here is specific to megaclass.

    megaclass run --horovod -np 2 python examples/tensorflow/keras_mnist.py

The images are drawn, so that nothing is downloaded. `Horovod:` marks what Horovod adds to a script for one process.
"""

import argparse

import keras
import tensorflow as tf
from drawn_digits import drawn_digits

import horovod.tensorflow.keras as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--images", type=int, default=8192)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=64, help="images per process and step")
parser.add_argument("--checkpoint", default="", help="file for the model, written by rank 0")
options = parser.parse_args()

# Horovod: start, and give every process a GPU of its own.
hvd.init()
gpus = tf.config.list_physical_devices("GPU")
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

images, labels = drawn_digits(options.images, seed=0)
dataset = tf.data.Dataset.from_tensor_slices((images, labels))
# Horovod: every process trains on its part of the data.
dataset = dataset.shard(hvd.size(), hvd.rank()).repeat().shuffle(4096, seed=1).batch(options.batch_size)

model = keras.Sequential(
    [
        keras.layers.Input((28, 28, 1)),
        keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.MaxPooling2D(2),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.MaxPooling2D(2),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(10, activation="softmax"),
    ]
)

# Horovod: the learning rate grows with the number of processes, and the optimizer averages gradients.
scaled_lr = 0.001 * hvd.size()
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(scaled_lr))
model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False)

callbacks = [
    # Horovod: all processes start from the weights of rank 0, and report averages over all of them.
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=2, verbose=1),
]
# Horovod: only one process writes files and shows progress.
if hvd.rank() == 0 and options.checkpoint:
    callbacks.append(keras.callbacks.ModelCheckpoint(options.checkpoint))
history = model.fit(
    dataset,
    steps_per_epoch=max(1, options.images // options.batch_size // hvd.size()),
    callbacks=callbacks,
    epochs=options.epochs,
    verbose=2 if hvd.rank() == 0 else 0,
)

test_images, test_labels = drawn_digits(1000, seed=1)
loss, accuracy = model.evaluate(test_images, test_labels, verbose=0)
print(f"rank {hvd.rank()} of {hvd.size()}: test accuracy {100 * accuracy:.1f}%")
