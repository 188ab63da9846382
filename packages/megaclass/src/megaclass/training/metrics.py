"""Measurements of the steps of a rank: durations, phases (phases.py), loss, speed, waiting for data, skipped steps.

On a CPU the clock is the host's. On a GPU every change of phase records a CUDA event on the stream, which costs the host about
2 µs and is read only when the loop reports and has waited for the device anyway.
"""

import itertools
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megaclass.data.loader import Batch
from megaclass.errors import TrainError
from megaclass.head.step import HeadStats
from megaclass.phases import PHASES, SlowRank
from megaclass_launch.rank_status import wait_for_gpu
from megaclass_launch.ranks.collectives import exchanges_reported, gather_blocks

_Moment = float | torch.cuda.Event
_MAX_SKIPPED_IN_ROW = 100
"""A loss scale falls from 65,536 to its smallest value within 16 steps; more skipped steps in a row train nothing."""


@dataclass(frozen=True)
class StepResult:
    """Result of a step, on the device: reading it makes the host wait, so the loop reads it only when it reports."""

    loss: Tensor
    """Mean over the global batch, the same on every rank; NaN if the embeddings were."""
    was_skipped: Tensor
    """0-d bool, the same on every rank."""
    head_stats: HeadStats | None = None
    """Only if requested; meaningless if the step was skipped."""


class StepClock:
    """Records moments. Called by the thread that works on the step: the loop, or autograd's on a GPU.

    _moments   (phase that begins, moment), since the last reading; the phase is empty if nothing counts
    _ends      moments at which steps ended; the last one of the previous reading comes first
    """

    def __init__(self, device: torch.device, backbone: nn.Module | None = None) -> None:
        """backbone: on a GPU, the end of its backward is where DDP begins to wait for the other ranks."""
        self._device = device
        self._phase = ""
        self._moments: list[tuple[str, _Moment]] = []
        self._ends: list[_Moment] = []
        first = next((p for p in backbone.parameters() if p.requires_grad), None) if backbone is not None else None
        if device.type == "cuda" and first is not None:
            # The gradient of the first layer is the last one to be computed.
            first.register_hook(lambda _: self.begin("exchange") if self._phase == "backward" else None)

    def begin(self, phase: str) -> None:
        """Ends the current phase and begins another; an empty name is time that does not count."""
        moment: _Moment = time.perf_counter()
        if self._device.type == "cuda":
            moment = torch.cuda.Event(enable_timing=True)
            moment.record(torch.cuda.current_stream(self._device))
        self._moments.append((phase, moment))
        self._phase = phase

    def end_step(self) -> None:
        """Notes that a step is over; afterwards no phase is current."""
        self.begin("")
        self._ends.append(self._moments[-1][1])

    def forget(self) -> None:
        """Leaves the time until the next step's end out of the durations: something else ran in between."""
        self._ends.clear()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Wraps one step, whose collectives count as exchange."""
        outer = ""

        def on_exchange(is_begin: bool) -> None:
            nonlocal outer
            if is_begin:
                outer = self._phase
            self.begin("exchange" if is_begin else outer)

        with exchanges_reported(on_exchange):
            try:
                yield
            finally:
                self.end_step()

    def read(self) -> tuple[dict[str, float], list[float]]:
        """Returns the seconds in each phase, and the milliseconds from each step's end to the next, since the last call.

        On a GPU the caller has waited for the steps.
        """
        moments, self._moments = self._moments, []
        ends, self._ends = self._ends, self._ends[-1:]
        seconds = dict.fromkeys(PHASES, 0.0)
        for (phase, begun), (_, ended) in itertools.pairwise(moments):
            if phase:
                seconds[phase] += _milliseconds(begun, ended) / 1000
        return seconds, [_milliseconds(begun, ended) for begun, ended in itertools.pairwise(ends)]


def gather_phases(seconds: dict[str, float], device: torch.device) -> tuple[dict[str, list[float]], list[float]]:
    """Collective: one all-gather of 24 bytes per rank.

    Returns the seconds per step of every rank, by phase, and the GPU memory of every rank in GiB: its largest allocation.
    """
    memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    own = torch.tensor([*(seconds[phase] for phase in PHASES), memory], dtype=torch.float32, device=device)
    *phases, memory_W = ([_rounded(value) for value in column] for column in gather_blocks(own, None).T.tolist())
    return dict(zip(PHASES, phases, strict=True)), memory_W


def phase_row(phases: dict[str, list[float]], slow: SlowRank | None) -> dict[str, Any]:
    """Returns the fields of metrics.jsonl about phases and ranks."""
    row: dict[str, Any] = {f"{phase}_s": _rounded(statistics.fmean(values)) for phase, values in phases.items()}
    row["rank_seconds"] = phases
    if slow is not None:
        row |= {"slow_rank": slow.rank, "slow_phase": slow.phase, "slower": _rounded(slow.slower)}
    return row


def _milliseconds(begun: _Moment, ended: _Moment) -> float:
    if isinstance(begun, torch.cuda.Event):
        assert isinstance(ended, torch.cuda.Event)
        return float(begun.elapsed_time(ended))
    assert isinstance(ended, float)
    return 1000 * (ended - begun)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


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
