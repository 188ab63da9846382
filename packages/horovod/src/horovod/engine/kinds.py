"""The kinds of operations and the numbers of the reductions: what differs between operations, as a table. No torch.

A new operation is a line in KINDS, its function in collectives/operations.py (and in tensorflow/collectives.py), and a method
of its name in transport/executor.py, which runs it.
"""

from dataclasses import dataclass

__all__ = ["Adasum", "Average", "Max", "Min", "Product", "Sum"]

Average = 0
Sum = 1
Adasum = 2
Min = 3
Max = 4
Product = 5
REDUCTIONS = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
"""Names of the reductions, by Horovod's number."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Properties of a kind of operation that the negotiation needs."""

    may_join: bool = False
    """True if a rank that has joined may take part: it contributes zeros, which means something only in a sum."""
    needs_rows: bool = False
    """True if a tensor must have at least one dimension."""
    keeps_shapes: bool = False
    """True if the results have the shapes of the tensors, so there may be room for them before the negotiation."""
    shapes_must_match: bool = False
    """True if all members bring the same shape; otherwise they may differ in dimension 0."""
    is_arithmetic: bool = False
    """True if tensors are added up, so they cannot be bool."""
    sizes: str = ""
    """Sizes of all members that the response tells each of them: `rows` (of each tensor), `splits` or none."""


KINDS = {
    "allreduce": Kind(may_join=True, keeps_shapes=True, shapes_must_match=True, is_arithmetic=True),
    "allgather": Kind(needs_rows=True, sizes="rows"),
    "broadcast": Kind(keeps_shapes=True, shapes_must_match=True),
    "alltoall": Kind(needs_rows=True, sizes="splits"),
    "reducescatter": Kind(needs_rows=True, shapes_must_match=True, is_arithmetic=True),
    "barrier": Kind(may_join=True),
    "add_process_set": Kind(may_join=True),
    "remove_process_set": Kind(may_join=True),
}
"""By the name in a request."""
