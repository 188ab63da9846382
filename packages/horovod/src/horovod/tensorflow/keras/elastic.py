"""Elastic training with model.fit(): KerasState, and callbacks that commit it and note how far training is."""

from typing import Any

import keras

from horovod.tensorflow.elastic import TensorFlowKerasState, run

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "TensorFlowKerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class KerasState(TensorFlowKerasState):
    """State of a training: a Keras model and its optimizer, and plain Python objects as attributes."""

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer=optimizer, **kwargs)


class _StateCallback(keras.callbacks.Callback):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state


class CommitStateCallback(_StateCallback):
    """Commits the state after every `batches_per_commit` batches and at the end of each epoch. Place it last."""

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__(state)
        self.batches_per_commit = batches_per_commit
        self._num_left = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        # Ranks may join at different batches: all count from here.
        self._num_left = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._num_left -= 1
        if self._num_left == 0:
            self.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.commit()

    def commit(self) -> None:
        self._num_left = self.batches_per_commit
        self.state.commit()


class UpdateBatchStateCallback(_StateCallback):
    """Keeps `state.batch` at the number of the last batch of this epoch, so fit() may leave out those before it."""

    _steps_per_epoch: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self._steps_per_epoch = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self.params.get("steps"):
            self._steps_per_epoch = self._steps_per_epoch or self.params["steps"]
            self.params["steps"] = self._steps_per_epoch - self.state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = 0


class UpdateEpochStateCallback(_StateCallback):
    """Keeps `state.epoch` at the number of epochs that are done, over all calls of fit()."""

    _initial_epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch = self._initial_epoch + epoch + 1
