"""Adasum: a sum of gradients that does not grow where they point in the same direction.

    adasum(a, b) = (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b

Orthogonal gradients are added, equal ones are averaged. More than two gradients are combined in a tree, by recursive doubling,
over any backend and any number of ranks. Each rank sends its vector log2(W) times.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def adasum_(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Combines the tensors of all ranks of the group in place; the result has the same bits on every rank."""
    rank, size = group.rank(), group.size()
    vector = tensor.view(-1).float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.view(-1)
    # The largest power of two that is at most W.
    paired = 1 << (size.bit_length() - 1)
    # If W is not a power of two, the first ranks combine with a neighbour first, which then receives the result.
    num_folded = size - paired
    if rank < 2 * num_folded and rank % 2:
        group.send([vector], rank - 1, 0).wait()
        group.recv([vector], rank - 1, 0).wait()
    else:
        if rank < 2 * num_folded:
            vector = _combined(vector, _received_from(vector, rank + 1, group))
        place = rank // 2 if rank < 2 * num_folded else rank - num_folded
        vector = _doubling(vector, place, paired, num_folded, group)
        if rank < 2 * num_folded:
            group.send([vector], rank + 1, 0).wait()
    return tensor.copy_(vector.view_as(tensor))


def _doubling(vector: Tensor, place: int, paired: int, num_folded: int, group: dist.ProcessGroup) -> Tensor:
    distance = 1
    while distance < paired:
        partner = place ^ distance
        partner_rank = 2 * partner if partner < num_folded else partner + num_folded
        theirs = torch.empty_like(vector)
        # One sends while the other receives, then the other way round. NCCL runs them in the order in which they are posted:
        # two ranks that both post recv first wait for each other forever.
        if place < partner:
            group.send([vector], partner_rank, 0).wait()
            group.recv([theirs], partner_rank, 0).wait()
        else:
            group.recv([theirs], partner_rank, 0).wait()
            group.send([vector], partner_rank, 0).wait()
        # Both ranks take the lower place first, so that both get the same bits.
        vector = _combined(vector, theirs) if place < partner else _combined(theirs, vector)
        distance *= 2
    return vector


def _received_from(like: Tensor, rank: int, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(like)
    group.recv([received], rank, 0).wait()
    return received


def _combined(one: Tensor, two: Tensor) -> Tensor:
    # The weights are ratios of long sums, which float32 would not form alike for different orders of summation.
    a, b = one.double(), two.double()
    product, length_a, length_b = torch.dot(a, b), torch.dot(a, a), torch.dot(b, b)
    # A vector of zeros, which a rank that has joined sends, leaves the other one unchanged.
    weight_a = torch.where(length_a > 0, 1 - product / (2 * length_a), 1.0)
    weight_b = torch.where(length_b > 0, 1 - product / (2 * length_b), 1.0)
    return (weight_a * a + weight_b * b).to(one.dtype)
