"""Fusion: small allreduces that are ready together and are reduced alike travel as one. No torch, no sockets."""

from collections.abc import Sequence

from horovod.common.settings import Settings
from horovod.engine.kinds import Adasum
from horovod.engine.messages import Response, Terms

# A larger tensor gains nothing by fusion: copying it into and out of the buffer takes longer than one latency.
FUSED_TENSOR_BYTES = 1024 * 1024


def fuse(responses: list[Response], settings: Settings) -> list[Response]:
    """Joins allreduces with equal labels into one response each, up to the fusion threshold, in the order of their firsts."""
    terms = [response.requests[0].terms if response.requests and not response.error else None for response in responses]
    return [
        responses[part[0]]
        if len(part) == 1
        else Response(tuple([request for i in part for request in responses[i].requests]))
        for part in fused_positions(terms, settings)
    ]


def fused_positions(all_terms: Sequence[Terms | None], settings: Settings) -> list[list[int]]:
    """Returns the positions of the operations that run as one, for each of these. None: an operation that runs alone."""
    fused: list[list[int]] = []
    open_parts: dict[tuple[object, ...], tuple[int, list[int]]] = {}
    # A thousand operations in a row mostly share their terms, and thus the label.
    latest: Terms | None = None
    label: tuple[object, ...] | None = None
    for position, terms in enumerate(all_terms):
        if terms is None or terms is not latest:
            label, latest = _fusion_label(terms, settings), terms
        if terms is None or label is None:
            fused.append([position])
            continue
        # Parts of different labels are open at the same time, so that alternating dtypes still fuse.
        used, part = open_parts.get(label, (settings.fusion_threshold, None))
        if part is None or used + terms.num_bytes > settings.fusion_threshold:
            used, part = 0, []
            fused.append(part)
        part.append(position)
        open_parts[label] = (used + terms.num_bytes, part)
    return fused


def _fusion_label(terms: Terms | None, settings: Settings) -> tuple[object, ...] | None:
    """Returns a label; operations with equal labels may be fused. None: this one is not fused."""
    if terms is None or terms.kind != "allreduce" or not settings.fusion_threshold:
        return None
    if terms.op == Adasum or len(set(terms.dtypes)) != 1:
        return None
    if terms.is_grouped and not settings.fuse_groups:
        return None
    # Compressed tensors are copied anyway, in order to be encoded.
    if terms.num_bytes > FUSED_TENSOR_BYTES and not terms.wire:
        return None
    return (terms.dtypes[0], terms.reduction)
