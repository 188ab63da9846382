"""The response to the requests of all members of an operation: run it, or fail it with an error that names both sides."""

from collections.abc import Iterable, Sequence

from horovod.engine.kinds import KINDS, REDUCTIONS
from horovod.engine.messages import Request, Response


def rank_name(rank: int, hosts: Sequence[str]) -> str:
    return f"rank {rank} ({hosts[rank]})"


def respond(by_rank: dict[int, Request], hosts: Sequence[str], *, has_joined: bool) -> Response:
    """Returns the response to the requests of all members. `has_joined`: a member takes part with zeros instead."""
    ranks = sorted(by_rank)
    requests = [by_rank[rank] for rank in ranks]
    first = requests[0]
    error = _disagreement(ranks, requests, hosts) or _impossible(first, has_joined)
    if error:
        return Response((first,), error=error)
    # A rank knows its own rows only, and needs those of all others to make room for the result.
    sizes: tuple[tuple[int, ...], ...] = ()
    if KINDS[first.kind].sizes == "rows":
        sizes = tuple(zip(*([shape[0] for shape in request.shapes] for request in requests), strict=True))
    elif KINDS[first.kind].sizes == "splits":
        sizes = tuple(request.splits for request in requests)
    return Response((first,), sizes=sizes)


def _disagreement(ranks: list[int], requests: list[Request], hosts: Sequence[str]) -> str:
    """Describes a difference between the first rank and another one; empty if there is none."""
    first = requests[0]
    for rank, other in zip(ranks[1:], requests[1:], strict=True):
        # If the ranks have announced one list, one request stands for all of them.
        if other is first or other == first:
            continue
        for (what, one, shown), (_, two, other_shown) in zip(_terms_of(first), _terms_of(other), strict=False):
            if one != two:
                return (
                    f"Mismatched {what} for {first.full_name!r}: {rank_name(ranks[0], hosts)} sent {shown}, "
                    f"but {rank_name(rank, hosts)} sent {other_shown}."
                )
    return ""


def _terms_of(request: Request) -> Iterable[tuple[str, object, str]]:
    """Yields (what, value, text) for every term in which members must agree, the most telling first."""
    name, kind, splits = request.kind, KINDS[request.kind], list(request.splits)
    yield f"{name} numbers of tensors", len(request.shapes), str(len(request.shapes))
    yield "data types", request.dtypes, _plain(request.dtypes)
    if kind.shapes_must_match:
        yield f"{name} tensor shapes", request.shapes, f"shape {_plain(request.shapes)}"
    # Members may bring different numbers of rows otherwise: the response tells each of them the numbers of all.
    for shape in () if kind.shapes_must_match else request.shapes:
        yield f"{name} tensor shapes beyond dimension 0", (len(shape), shape[1:]), f"shape {list(shape)}"
    factors = (request.prescale, request.postscale)
    yield "reduction operations", request.op, REDUCTIONS[request.op]
    yield "prescale and/or postscale factors", factors, f"factors {factors}"
    yield f"{name} root ranks", request.root, f"root rank {request.root}"
    if kind.sizes == "splits":
        yield "numbers of splits", len(splits), f"splits {splits}"
    else:
        yield "process sets", splits, f"ranks {splits}"
    yield f"{name} CPU/GPU device selection", request.device, f"a tensor on {request.device}"
    yield "compression", (request.wire, request.keeps_error), request.wire or "none"


def _impossible(first: Request, has_joined: bool) -> str:
    """Explains why the operation cannot run although all ranks agree; empty if it can."""
    kind = KINDS[first.kind]
    if has_joined and not kind.may_join:
        hint = " Specify sparse_as_dense=True if using DistributedOptimizer." if first.kind == "allgather" else ""
        return f"{first.kind.capitalize()} is not supported with Join at this time.{hint}"
    if kind.needs_rows and any(not shape for shape in first.shapes):
        return f"Tried to {first.kind} a tensor of no dimensions under the name {first.full_name!r}."
    return ""


def _plain(values: tuple[object, ...]) -> str:
    """Formats the values, without brackets if there is a single tensor."""
    listed = [list(value) if isinstance(value, tuple) else value for value in values]
    return str(listed[0] if len(listed) == 1 else listed)
