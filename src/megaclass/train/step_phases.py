"""Time per phase of a step on this rank, and the rank that is slower than the others.

    data       waiting for the loader (measured on the host)
    forward    backbone and head, without their collectives
    backward   gradients of head and backbone, without their collectives
    exchange   collectives, including the wait for slower ranks
    update     optimizers

On a CPU the clock is the host's; on a GPU every change of phase records a CUDA event on the stream, which costs the host about
2 µs and is read only when the loop reports and has waited for the device anyway. A rank that waits for a slow one shows the
time as exchange, so the time without exchange is a rank's own: it tells which one is slow.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megaclass.distributed.collectives import exchanges_reported, gather_blocks

PHASES = ("data", "forward", "backward", "exchange", "update")
SLOW = 0.2
"""A rank is named if its own time is more than this share above that of the median of the others."""
_LEAST_EXCESS_S = 0.001


class PhaseClock:
    """Adds up the time per phase. Called by the thread that works on the step: the loop, or autograd's on a GPU."""

    def __init__(self, device: torch.device, backbone: nn.Module | None = None) -> None:
        """backbone: on a GPU, the end of its backward is where DDP begins to wait for the other ranks."""
        self._is_cuda = device.type == "cuda"
        self._phase = ""
        self._since = 0.0
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._events: list[torch.cuda.Event] = []
        self._phases_of_events: list[str] = []
        first = next((p for p in backbone.parameters() if p.requires_grad), None) if backbone is not None else None
        if self._is_cuda and first is not None:
            # The gradient of the first layer is the last one to be computed.
            first.register_hook(self._note_last_gradient)

    def begin(self, phase: str) -> None:
        """Ends the current phase and begins another; an empty name is time that does not count."""
        if self._is_cuda:
            number = len(self._phases_of_events)
            if number == len(self._events):
                self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[number].record()
            self._phases_of_events.append(phase)
        else:
            now = time.perf_counter()
            if self._phase:
                self._seconds[self._phase] += now - self._since
            self._since = now
        self._phase = phase

    @contextmanager
    def counting_exchanges(self) -> Iterator[None]:
        """Counts the collectives of the block, a step, as exchange; afterwards no phase is current."""
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
                self.begin("")

    def read(self, waited_s: float, num_steps: int) -> dict[str, float]:
        """Returns the seconds per step since the last call. waited_s: time spent waiting for data. The device must be idle."""
        for index, phase in enumerate(self._phases_of_events[:-1]):
            if phase:
                self._seconds[phase] += self._events[index].elapsed_time(self._events[index + 1]) / 1000
        self._phases_of_events.clear()
        found = {**self._seconds, "data": waited_s}
        self._seconds = dict.fromkeys(PHASES, 0.0)
        return {phase: seconds / max(1, num_steps) for phase, seconds in found.items()}

    def _note_last_gradient(self, gradient: Tensor) -> None:
        if self._phase == "backward":
            self.begin("exchange")


class NoClock(PhaseClock):
    """Measures nothing, for steps outside a run."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def begin(self, phase: str) -> None:
        pass


NO_CLOCK = NoClock()


@dataclass(frozen=True, slots=True)
class SlowRank:
    rank: int
    phase: str
    """The phase in which it loses the most."""
    slower: float
    """Its own time above the median of the other ranks: 0.3 for 30 %."""


def gather_phases(seconds: dict[str, float], device: torch.device) -> tuple[dict[str, list[float]], list[float]]:
    """Collective: one all-gather of 24 bytes per rank.

    Returns the seconds per step of every rank, by phase, and the GPU memory of every rank in GiB: its largest allocation.
    """
    memory = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0
    own = torch.tensor([*(seconds[phase] for phase in PHASES), memory], dtype=torch.float32, device=device)
    table_WP = gather_blocks(own, None).tolist()
    phases = {phase: [_rounded(row[index]) for row in table_WP] for index, phase in enumerate(PHASES)}
    return phases, [_rounded(row[-1]) for row in table_WP]


def find_slow_rank(phases: dict[str, list[float]]) -> SlowRank | None:
    """Returns the slowest rank if its own time is more than 20 % above the median of the others', else None."""
    own_phases = [phase for phase in PHASES if phase != "exchange"]
    own_W = [sum(values) for values in zip(*(phases[phase] for phase in own_phases), strict=True)]
    if len(own_W) < 2:
        return None
    rank = max(range(len(own_W)), key=own_W.__getitem__)
    usual = statistics.median(_without(own_W, rank))
    excess = own_W[rank] - usual
    if excess <= SLOW * usual or excess < _LEAST_EXCESS_S:
        return None
    loss = {phase: phases[phase][rank] - statistics.median(_without(phases[phase], rank)) for phase in own_phases}
    return SlowRank(rank, max(loss, key=loss.__getitem__), excess / max(usual, 1e-9))


def phase_row(phases: dict[str, list[float]], slow: SlowRank | None) -> dict[str, Any]:
    """Returns the fields of metrics.jsonl about phases and ranks."""
    row: dict[str, Any] = {f"{phase}_s": _rounded(statistics.fmean(values)) for phase, values in phases.items()}
    row["rank_seconds"] = phases
    if slow is not None:
        row |= {"slow_rank": slow.rank, "slow_phase": slow.phase, "slower": _rounded(slow.slower)}
    return row


def _without(values: Sequence[float], index: int) -> list[float]:
    return [value for number, value in enumerate(values) if number != index]


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
