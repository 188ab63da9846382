"""Measures every step of this rank: how long it took, and how much of that each phase took (see phases.py).

On a CPU the clock is the host's. On a GPU every change of phase records a CUDA event on the stream, which costs the host about
2 µs and is read only when the loop reports and has waited for the device anyway.
"""

import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megaclass.phases import PHASES, SlowRank
from megaclass_launch.ranks.collectives import exchanges_reported, gather_blocks

_Moment = float | torch.cuda.Event


class StepClock:
    """Records moments. Called by the thread that works on the step: the loop, or autograd's on a GPU.

    _moments   (phase that begins, moment), since the last reading; the phase is empty if nothing counts
    _ends      moments at which steps ended; the last one of the previous reading comes first
    _spare     events that have been read and are recorded again
    """

    def __init__(self, device: torch.device, backbone: nn.Module | None = None) -> None:
        """backbone: on a GPU, the end of its backward is where DDP begins to wait for the other ranks."""
        self._device = device
        self._phase = ""
        self._moments: list[tuple[str, _Moment]] = []
        self._ends: list[_Moment] = []
        self._spare: list[torch.cuda.Event] = []
        first = next((p for p in backbone.parameters() if p.requires_grad), None) if backbone is not None else None
        if device.type == "cuda" and first is not None:
            # The gradient of the first layer is the last one to be computed.
            first.register_hook(self._note_last_gradient)

    def begin(self, phase: str) -> None:
        """Ends the current phase and begins another; an empty name is time that does not count."""
        self._moments.append((phase, self._now()))
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
        step_ms = [_milliseconds(begun, ended) for begun, ended in itertools.pairwise(ends)]
        read = {
            id(one): one for one in [*ends, *(moment for _, moment in moments)] if isinstance(one, torch.cuda.Event)
        }
        self._spare += [event for event in read.values() if event not in self._ends]
        return seconds, step_ms

    def _now(self) -> _Moment:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _note_last_gradient(self, gradient: Tensor) -> None:
        if self._phase == "backward":
            self.begin("exchange")


class NoClock(StepClock):
    """Measures nothing, for steps outside a run."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def begin(self, phase: str) -> None:
        pass


NO_CLOCK = NoClock()


def gather_phases(seconds: dict[str, float], device: torch.device) -> tuple[dict[str, list[float]], list[float]]:
    """Collective: one all-gather of 24 bytes per rank.

    Returns the seconds per step of every rank, by phase, and the GPU memory of every rank in GiB: its largest allocation.
    """
    memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    own = torch.tensor([*(seconds[phase] for phase in PHASES), memory], dtype=torch.float32, device=device)
    table_WP = gather_blocks(own, None).tolist()
    phases = {phase: [_rounded(row[index]) for row in table_WP] for index, phase in enumerate(PHASES)}
    return phases, [_rounded(row[-1]) for row in table_WP]


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
