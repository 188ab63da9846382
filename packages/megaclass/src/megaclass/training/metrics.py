"""Metrics of the steps between two reports: loss, speed, waiting for data, skipped steps."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from megaclass.data.loader import Batch
from megaclass.errors import TrainError
from megaclass.training.clock import StepClock
from megaclass.training.step import StepResult
from megaclass_launch.rank_status import wait_for_gpu

_MAX_SKIPPED_IN_ROW = 100
"""A loss scale falls from 65,536 to its smallest value within 16 steps; more skipped steps in a row train nothing."""


class Meter:
    """Collects results of steps without waiting for the device; `read` waits for it."""

    def __init__(
        self,
        global_batch: int,
        earlier: Sequence[Mapping[str, float]],
        device: torch.device,
        clock: StepClock | None = None,
    ) -> None:
        """earlier: rows of the run that is resumed; if it has no steps left, they provide its last loss and speed.

        clock: measures the steps.
        """
        self._global_batch, self._device = global_batch, device
        self._begun = self._last = time.monotonic()
        self._results: list[StepResult] = []
        self._clock = clock or StepClock(device)
        self.phase_s: dict[str, float] = {}
        """Seconds per step in each phase on this rank, at the last row."""
        self._waited_s = 0.0
        # Seconds spent on evaluations: since the last row, and in total.
        self._paused_s = self._all_paused_s = 0.0
        self.last_pause_s = self.last_step_s = 0.0
        self._num_steps = 0
        self.skipped_in_row = 0
        """Steps that were skipped since the last one that counted, up to the last row."""
        self.last_loss = earlier[-1].get("loss", float("nan")) if earlier else float("nan")
        self._last_speed = earlier[-1].get("images_per_second", 0.0) if earlier else 0.0

    def batches(self, source: Iterable[Batch]) -> Iterator[Batch]:
        """Yields the batches and measures the time spent waiting for them."""
        iterator = iter(source)
        while True:
            begun = time.monotonic()
            batch = next(iterator, None)
            self._waited_s += time.monotonic() - begun
            if batch is None:
                return
            yield batch

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the block, an evaluation, from the speed. Waits for steps that still run on the device."""
        self._wait_for_device()
        begun = time.monotonic()
        try:
            yield
        finally:
            self._wait_for_device()
            self._clock.forget()
            self.last_pause_s = passed = time.monotonic() - begun
            self._paused_s += passed
            self._all_paused_s += passed

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def add(self, result: StepResult) -> None:
        self._results.append(result)
        self._num_steps += 1

    def read(self) -> dict[str, float]:
        """Returns the row of metrics since the last call; waits for the device. Skipped steps do not count in means.

        The head's statistics are those of the last step; they are missing if that one was skipped.
        """
        # One transfer for all steps since the last row.
        losses = wait_for_gpu(lambda: torch.stack([result.loss for result in self._results]).double().cpu())
        is_counted = ~torch.stack([result.was_skipped for result in self._results]).cpu()
        if is_counted.any():
            self.last_loss = float(losses[is_counted].mean())
        counted = is_counted.nonzero()
        last_counted = int(counted[-1]) + 1 if len(counted) else -self.skipped_in_row
        self.skipped_in_row = len(is_counted) - last_counted
        now = time.monotonic()
        trained_s = now - self._last - self._paused_s
        row = {
            "loss": self.last_loss,
            "images_per_second": len(self._results) * self._global_batch / trained_s,
            "data_wait_share": self._waited_s / trained_s,
            "skipped_steps": int((~is_counted).sum()),
            "elapsed_s": now - self._begun,
        }
        seconds, step_ms = self._clock.read()
        self.phase_s = {
            phase: spent / len(self._results) for phase, spent in (seconds | {"data": self._waited_s}).items()
        }
        if step_ms:
            row["step_ms"], row["step_ms_p99"] = (float(np.percentile(step_ms, share)) for share in (50, 99))
        if self._paused_s:
            row["evaluation_s"] = self._paused_s
        head_stats = self._results[-1].head_stats
        if head_stats is not None and is_counted[-1]:
            row |= {
                "target_cosine": float(head_stats.target_cosine),
                "head_gradient_norm": float(head_stats.gradient_norm),
                "sampled_share": float(head_stats.sampled_share),
            }
        if self._device.type == "cuda":
            row["gpu_memory_gib"] = torch.cuda.max_memory_allocated(self._device) / 2**30
        self.last_step_s = trained_s / len(self._results)
        self._last, self._results, self._waited_s, self._paused_s = now, [], 0.0, 0.0
        return row

    def images_per_second(self) -> float:
        """Returns the mean speed since the start or resume, including checkpoints, excluding evaluations."""
        if not self._num_steps:
            return self._last_speed
        return self._num_steps * self._global_batch / (time.monotonic() - self._begun - self._all_paused_s)


def check_finite(row: Mapping[str, float], step: int, on_nan: str, is_scaled: bool, skipped_in_row: int = 0) -> None:
    """Raises on every rank if gradients were not finite, unless a loss scale is in use, which expects that and adapts."""
    if is_scaled and skipped_in_row >= _MAX_SKIPPED_IN_ROW:
        raise TrainError(
            f"The last {skipped_in_row} steps before step {step} were skipped, because their gradients were not finite in "
            f"float16 at any loss scale: nothing is being trained. Lower optimizer.lr, raise optimizer.warmup_epochs, or use "
            f"train.precision=bf16 or float32."
        )
    if row["skipped_steps"] and on_nan == "stop" and not is_scaled:
        raise TrainError(
            f"{int(row['skipped_steps'])} of the steps before step {step} had gradients that are not finite; they were not "
            f"applied. Lower optimizer.lr or raise optimizer.warmup_epochs, or continue anyway with train.on_nan=skip."
        )
