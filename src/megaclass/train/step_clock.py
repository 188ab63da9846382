"""Durations of single steps, measured where they run: by events on a GPU, which nothing waits for, by the clock on a CPU."""

import itertools
import time

import torch


class StepClock:
    """Notes the end of every step. `read` returns how long the steps took; on a GPU the caller has waited for it before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ends: list[float | torch.cuda.Event] = []

    def end_step(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._ends.append(event)
        else:
            self._ends.append(time.perf_counter())

    def forget(self) -> None:
        """Leaves out the time until the next step's end: something else ran in between."""
        self._ends.clear()

    def read(self) -> list[float]:
        """Returns milliseconds from each step's end to the next one, since the last call."""
        ends, self._ends = self._ends, self._ends[-1:]
        return [_milliseconds(begun, ended) for begun, ended in itertools.pairwise(ends)]


def _milliseconds(begun: float | torch.cuda.Event, ended: float | torch.cuda.Event) -> float:
    if isinstance(begun, torch.cuda.Event):
        assert isinstance(ended, torch.cuda.Event)
        return float(begun.elapsed_time(ended))
    assert isinstance(ended, float)
    return 1000 * (ended - begun)
