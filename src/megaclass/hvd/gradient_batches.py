"""Which gradients are handed over together, learned from the order in which backward made them.

A batch is negotiated by one message each way and wakes the controller's thread once. Batches decide only when gradients
are submitted: ranks that cut them differently, or whose models differ in a step, still meet by name.
"""

from torch import Tensor

from megaclass.hvd.engine.coordinator import FUSED_TENSOR_BYTES

# As DistributedDataParallel cuts its buckets: the first one small, so that sending begins early.
_FIRST_BYTES = 1024 * 1024
_BATCH_BYTES = 25 * 1024 * 1024


class GradientBatches:
    """Of one optimizer."""

    def __init__(self, most_bytes: int) -> None:
        """`most_bytes`: where a batch ends at the latest; 0: every gradient by itself."""
        self._most_bytes = most_bytes
        self._arrived: list[Tensor] = []
        self._planned: list[Tensor] = []
        self._batch_of: dict[Tensor, int] = {}
        self._batches: list[list[Tensor]] = []
        self._num_missing: list[int] = []
        self._last = -1

    def __contains__(self, parameter: Tensor) -> bool:
        """Whether it is part of a batch; in the first step none is."""
        return parameter in self._batch_of

    def arrive(self, parameter: Tensor) -> list[Tensor]:
        """Notes that its gradient is ready; the parameters to submit now: a whole batch, this one alone, or none yet.

        None for the last batch either: who waits for the gradients submits what is left, and nobody else is woken.
        """
        self._arrived.append(parameter)
        number = self._batch_of.get(parameter)
        if number is None:
            return [parameter]
        # Backward may run in one thread a device: the number each one sees must be its own.
        num_missing = self._num_missing[number] = self._num_missing[number] - 1
        return self._batches[number] if num_missing == 0 and number != self._last else []

    def end_step(self) -> None:
        """All gradients were submitted. Where they came in a new order, later steps follow that one."""
        if self._arrived and list(map(id, self._arrived)) != list(map(id, self._planned)):
            self._plan(self._arrived)
        self._num_missing = [len(batch) for batch in self._batches]
        self._arrived = []

    def _plan(self, parameters: list[Tensor]) -> None:
        self._planned = parameters
        # Large gradients, which travel one by one, are cut by themselves: small ones may then travel with the negotiation.
        small = [parameter for parameter in parameters if _num_bytes(parameter) <= FUSED_TENSOR_BYTES]
        large = [parameter for parameter in parameters if _num_bytes(parameter) > FUSED_TENSOR_BYTES]
        self._batches = [*self._cut(small), *self._cut(large)]
        self._batch_of = {parameter: number for number, batch in enumerate(self._batches) for parameter in batch}
        self._last = self._batch_of[parameters[-1]]

    def _cut(self, parameters: list[Tensor]) -> list[list[Tensor]]:
        batches: list[list[Tensor]] = []
        num_bytes, limit = 0, 0
        for parameter in parameters:
            if num_bytes >= limit:
                num_bytes, limit = 0, min(_BATCH_BYTES if batches else _FIRST_BYTES, self._most_bytes)
                batches.append([])
            batches[-1].append(parameter)
            num_bytes += _num_bytes(parameter)
        return batches


def _num_bytes(parameter: Tensor) -> int:
    return parameter.numel() * parameter.element_size()
