"""Horovod's callbacks for model.fit() of Keras 3."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from horovod.common.basics import rank, size
from horovod.engine.kinds import Min
from horovod.tensorflow.collectives import allreduce
from horovod.tensorflow.functions import broadcast_variables
from horovod.tensorflow.gradients import variable_key

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class _Callback(keras.callbacks.Callback):
    def set_model(self, model: Any) -> None:
        super().set_model(model)
        # Keras compiles the step with XLA if it finds a GPU. XLA cannot compile nodes that communicate.
        if model is not None and getattr(model, "compiled", False) and model.jit_compile:
            model.jit_compile = False


class BroadcastGlobalVariablesCallback(_Callback):
    """Overwrites weights and optimizer state with the root's when training begins.

    A model that Keras can build only with data is broadcast after the first batch, as in Horovod. `device` is accepted for
    compatibility with Horovod.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        self._local = {variable_key(variable): variable for variable in local_variables or ()}

    def register_local_var(self, var: Any) -> None:
        """Leaves this variable as it is on each rank."""
        self._local[variable_key(var)] = var

    def on_train_begin(self, logs: Any = None) -> None:
        if self.broadcast_done:
            return
        # All ranks broadcast now, or all after the first batch.
        if bool(allreduce(tf.constant(int(self.model.built)), op=Min)):
            optimizer = self.model.optimizer
            if optimizer is not None and not optimizer.built:
                # Keras would do so in the first step.
                optimizer.build(self.model.trainable_variables)
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        # Not `variables`, which includes metrics and the seeds of random layers: these differ between ranks on purpose.
        variables = list(self.model.weights)
        if self.model.optimizer is not None:
            variables += list(self.model.optimizer.variables)
        broadcast_variables([v for v in variables if variable_key(v) not in self._local], self.root_rank)
        self.broadcast_done = True


class MetricAverageCallback(_Callback):
    """Averages the metrics of an epoch over ranks. Place it before callbacks that use the metrics."""

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not logs:
            return
        names = sorted(logs)
        averages = allreduce(
            tf.constant([float(logs[name]) for name in names], tf.float64), name="MetricAverageCallback"
        )
        logs.update(zip(names, averages.numpy().tolist(), strict=True))


class _Momentum(float):
    """A momentum that can change while a traced step uses it: a number to Python, a variable to TensorFlow."""

    variable: Any

    def __new__(cls, value: float) -> "_Momentum":
        momentum = super().__new__(cls, value)
        momentum.variable = tf.Variable(value, trainable=False, dtype=tf.float32, name="momentum")
        return momentum

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Any:
        value = tf.convert_to_tensor(self.variable)
        return value if dtype is None else tf.cast(value, dtype)


class LearningRateScheduleCallback(_Callback):
    """Multiplies the initial learning rate by a factor that depends on the epoch.

    multiplier: a function of the epoch, or a number that is raised to the power of epoch - start_epoch. staircase: the
    epoch is a whole number; otherwise the rate changes with every batch.
    momentum_correction: for an optimizer with momentum, scales the
    momentum of the first step at a new rate, because the accumulated velocity contains the old one.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr = initial_lr
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self._is_momentum_changed = False

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        optimizer: Any = getattr(model, "optimizer", None)
        momentum = getattr(optimizer, "momentum", None)
        if self.momentum_correction and momentum and not isinstance(momentum, _Momentum):
            optimizer.momentum = _Momentum(momentum)
            # A step that was traced before contains the number.
            model.train_function = None

    def on_train_begin(self, logs: Any = None) -> None:
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self.params.get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    f"Could not autodetect the number of steps per epoch. Please specify the steps_per_epoch parameter to the "
                    f"{type(self).__name__}()."
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if self.staircase and batch == 0:
            self._adjust(epoch)
        elif not self.staircase:
            assert self.steps_per_epoch is not None
            self._adjust(epoch + batch / self.steps_per_epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._is_momentum_changed:
            momentum = self.model.optimizer.momentum
            momentum.variable.assign(float(momentum))
            self._is_momentum_changed = False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs["lr"] = self._learning_rate()

    def _learning_rate(self) -> float:
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _adjust(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        old = self._learning_rate()
        new = self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = new
        momentum = getattr(optimizer, "momentum", None)
        if self.momentum_correction and isinstance(momentum, _Momentum) and old:
            momentum.variable.assign(float(momentum) * new / old)
            self._is_momentum_changed = True


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from initial_lr / size to initial_lr over the first epochs.

    initial_lr: the rate after the warm-up, usually that of one process times hvd.size().
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # One step further, so an epoch ends at a round number.
            epoch += 1.0 / (self.steps_per_epoch or 1)
            return 1.0 / size() * (epoch * (size() - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0 and rank() == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._learning_rate():g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """A ModelCheckpoint that saves the best model only; set `filepath` before training."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
    ) -> None:
        # Keras checks the ending of the name now; the user sets the name later.
        ending = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(
            filepath=f"best_model{ending}",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
