"""Fusion: small allreduces that are ready together and are reduced alike travel as one. No torch, no sockets."""

from horovod.common.settings import Settings
from horovod.engine.kinds import Adasum
from horovod.engine.messages import Response, Terms

# A larger tensor gains nothing by fusion: copying it into and out of the buffer takes longer than one latency.
FUSED_TENSOR_BYTES = 1024 * 1024


def fuse(responses: list[Response], settings: Settings) -> list[Response]:
    """Joins allreduces with equal labels into one response each, up to the fusion threshold, in the order of their firsts."""
    fused: list[list[Response]] = []
    open_parts: dict[tuple[object, ...], tuple[int, list[Response]]] = {}
    # A thousand operations in a row mostly share their terms, and thus the label.
    latest: Terms | None = None
    label: tuple[object, ...] | None = None
    for response in responses:
        terms = response.requests[0].terms if response.requests and not response.error else None
        if terms is None or terms is not latest:
            label, latest = _fusion_label(terms, settings), terms
        if terms is None or label is None:
            fused.append([response])
            continue
        # Parts of different labels are open at the same time, so alternating dtypes still fuse.
        used, part = open_parts.get(label, (settings.fusion_threshold, []))
        if not part or used + terms.num_bytes > settings.fusion_threshold:
            used, part = 0, []
            fused.append(part)
        part.append(response)
        open_parts[label] = (used + terms.num_bytes, part)
    return [
        part[0] if len(part) == 1 else Response(tuple([request for each in part for request in each.requests]))
        for part in fused
    ]


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
