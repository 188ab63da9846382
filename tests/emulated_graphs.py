"""CUDA graphs on a CPU: launches and torch's operations are recorded with their arguments and repeated on the same memory.

As in a real graph, numbers are those of the capture, tensors are addresses, nothing that was recorded has changed anything,
and the host may not look at a value or bring one. What is not shown: a real capture gives freed memory to later operations.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_REFUSED = ("aten::_local_scalar_dense", "aten::lift_fresh", "aten::nonzero", "aten::equal", "aten::is_nonzero")
_EMPTY = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided")


class EmulatedGraph:
    def __init__(self) -> None:
        self.actions: list[Callable[[], None]] = []
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        for action in self.actions:
            action()


class _Recording(TorchDispatchMode):
    def __init__(self, graph: EmulatedGraph) -> None:
        super().__init__()
        self._graph = graph
        self._made: set[int] = set()
        self._before: dict[int, tuple[Any, Any]] = {}
        self._kept: list[Any] = []
        self.is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        name = func._schema.name
        if name in _REFUSED:
            raise RuntimeError(f"{name} is not permitted while a graph is captured")
        self._remember((args, kwargs))
        outcome = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(outcome) if isinstance(leaf, Tensor)]
        inputs = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        self._made |= {_address(output) for output in outputs} - inputs
        self._kept.append(outputs)

        def again() -> None:
            if name in _EMPTY:
                for output in outputs:
                    output.untyped_storage().fill_(255)  # NaN as a float: nobody may rely on what was there
                return
            for new, old in zip(tree_leaves(func(*args, **kwargs)), tree_leaves(outcome), strict=True):
                if isinstance(new, Tensor) and _address(new) != _address(old):
                    old.copy_(new)

        self._graph.actions.append(again)
        return outcome

    def restore(self) -> None:
        for storage, before in self._before.values():
            storage.copy_(before)

    def _remember(self, values: Any) -> None:
        """Keeps what is in memory that was there before the capture."""
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor) and _address(leaf) not in self._made and _address(leaf) not in self._before:
                storage = leaf.untyped_storage()
                self.is_paused = True
                self._before[_address(leaf)] = storage, storage.clone()
                self.is_paused = False


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class EmulatedRecorder:
    """In place of graphed_backbone.Recorder."""

    graphs: list[EmulatedGraph]
    recording: _Recording | None = None

    def __init__(self, device: torch.device) -> None:
        pass

    def record(self, function: Callable[[], Any]) -> tuple[EmulatedGraph, Any]:
        graph = EmulatedGraph()
        recording = EmulatedRecorder.recording = _Recording(graph)
        try:
            with recording:
                result = function()
        finally:
            EmulatedRecorder.recording = None
            recording.restore()
        self.graphs.append(graph)
        return graph, result


def emulate_backbone_graphs(monkeypatch: pytest.MonkeyPatch) -> list[EmulatedGraph]:
    """Lets backbones on a CPU capture their steps; returns the list that receives their graphs, forward and backward."""
    from megaclass.training.model import build, graphed_backbone

    can_capture = graphed_backbone.can_capture
    EmulatedRecorder.graphs = []
    monkeypatch.setattr(graphed_backbone, "Recorder", EmulatedRecorder)
    monkeypatch.setattr(graphed_backbone, "_allocated_bytes", lambda device: 0)
    monkeypatch.setattr(graphed_backbone, "_device_bytes", lambda device: 16 << 30)
    monkeypatch.setattr(build, "can_capture", lambda device, backbone: can_capture(torch.device("cuda"), backbone))
    capture = graphed_backbone.CapturedBackbone.__init__

    def capture_with_shared_memory(self: graphed_backbone.CapturedBackbone, *args: Any) -> None:
        # On a GPU gradients take the memory of activations that backward has freed, which the next forward writes again.
        capture(self, *args)
        forward, replay = self._forward_graph, self._forward_graph.replay

        def overwrite_gradients_and_replay() -> None:
            for gradient in self._gradients:
                gradient.fill_(torch.nan)
            replay()

        forward.replay = overwrite_gradients_and_replay  # type: ignore[method-assign]

    monkeypatch.setattr(graphed_backbone.CapturedBackbone, "__init__", capture_with_shared_memory)
    return EmulatedRecorder.graphs
