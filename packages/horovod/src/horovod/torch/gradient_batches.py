"""Batches of gradients that are submitted together, learned from the order in which backward computed them.

A batch costs one message each way in the negotiation and wakes the controller's thread once. Batches only decide when
gradients are submitted: ranks whose batches or models differ in a step still find each other's gradients by name.
"""

from collections.abc import Sequence

from torch import Tensor

from horovod.engine.coordinator import FUSED_TENSOR_BYTES

# The sizes of DistributedDataParallel's buckets: the first one is small, so sending starts early.
_FIRST_BYTES = 1024 * 1024
_BATCH_BYTES = 25 * 1024 * 1024


class GradientBatches:
    """The batches of one optimizer.

    backward's threads call arrive(), the thread that waits for the gradients calls end_step(). The first step, in which
    nothing is known yet, only records the order; later steps follow it until the order changes.
    """

    def __init__(self, most_bytes: int) -> None:
        """Ends a batch as soon as it holds `most_bytes`; 0 makes a batch of each gradient."""
        self._most_bytes = most_bytes
        self._arrived: list[Tensor] = []
        self._planned: list[Tensor] = []
        self._batch_of: dict[Tensor, int] = {}
        self._batches: Sequence[Sequence[Tensor]] = []
        self._num_missing: list[int] = []
        self._last = -1
        self._is_fixed = False

    def fix(self, batches: list[tuple[Tensor, ...]]) -> None:
        """Makes these the batches of all steps."""
        self._is_fixed = True
        self._set_batches(batches)

    def _set_batches(self, batches: Sequence[Sequence[Tensor]]) -> None:
        self._batches = batches
        self._batch_of = {parameter: number for number, batch in enumerate(batches) for parameter in batch}
        self._num_missing = [len(batch) for batch in batches]

    def batch_of(self, parameter: Tensor) -> Sequence[Tensor]:
        """Returns the batch of the parameter, or the parameter alone if it is in none."""
        number = self._batch_of.get(parameter)
        return [parameter] if number is None else self._batches[number]

    def __contains__(self, parameter: Tensor) -> bool:
        """Returns True if the parameter is part of a batch; in the first step none is."""
        return parameter in self._batch_of

    def arrive(self, parameter: Tensor) -> Sequence[Tensor]:
        """Records that the parameter's gradient is ready and returns the parameters to submit now.

        These are a whole batch, this parameter alone if it is in no batch, or none while the batch is incomplete. Also
        none for the last batch that was learned: synchronize() submits it, so the controller's thread is not woken.
        """
        self._arrived.append(parameter)
        number = self._batch_of.get(parameter)
        if number is None:
            return [parameter]
        # backward may run one thread per device. Reading the count back from the list could return another thread's.
        num_missing = self._num_missing[number] = self._num_missing[number] - 1
        return self._batches[number] if num_missing == 0 and number != self._last else []

    def end_step(self) -> None:
        """Ends a step, all of whose gradients were submitted. If their order was new, later steps follow it."""
        is_new = list(map(id, self._arrived)) != list(map(id, self._planned))
        if self._arrived and is_new and not self._is_fixed:
            self._plan(self._arrived)
        self._num_missing = [len(batch) for batch in self._batches]
        self._arrived = []

    def _plan(self, parameters: list[Tensor]) -> None:
        self._planned = parameters
        # Large gradients are sent one by one. In batches of their own they do not delay the small ones, which may be sent
        # together with the negotiation.
        small = [parameter for parameter in parameters if _num_bytes(parameter) <= FUSED_TENSOR_BYTES]
        large = [parameter for parameter in parameters if _num_bytes(parameter) > FUSED_TENSOR_BYTES]
        self._set_batches([*self._cut(small), *self._cut(large)])
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
