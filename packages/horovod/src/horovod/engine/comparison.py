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
        # One request may stand for several ranks, which have then announced the same list: nothing to compare.
        if other is first or other == first:
            continue
        for what, one, two in _differences(first, other):
            return (
                f"Mismatched {what} for {first.full_name!r}: {rank_name(ranks[0], hosts)} sent {one}, "
                f"but {rank_name(rank, hosts)} sent {two}."
            )
    return ""


def _impossible(first: Request, has_joined: bool) -> str:
    """Explains why the operation cannot run although all ranks agree; empty if it can."""
    kind = KINDS[first.kind]
    if has_joined and not kind.may_join:
        hint = " Specify sparse_as_dense=True if using DistributedOptimizer." if first.kind == "allgather" else ""
        return f"{first.kind.capitalize()} is not supported with Join at this time.{hint}"
    if kind.needs_rows and any(not shape for shape in first.shapes):
        return f"Tried to {first.kind} a tensor of no dimensions under the name {first.full_name!r}."
    return ""


def _differences(one: Request, two: Request) -> Iterable[tuple[str, str, str]]:
    """Yields (what, value of one, value of two) for every term in which members must agree, the most telling first."""
    kind = one.kind
    if len(one.shapes) != len(two.shapes):
        yield f"{kind} numbers of tensors", str(len(one.shapes)), str(len(two.shapes))
    if one.dtypes != two.dtypes:
        yield "data types", _plain(one.dtypes), _plain(two.dtypes)
    if KINDS[kind].shapes_must_match and one.shapes != two.shapes:
        yield f"{kind} tensor shapes", f"shape {_plain(one.shapes)}", f"shape {_plain(two.shapes)}"
    # Members may bring different numbers of rows here: the response tells each of them the numbers of all.
    if not KINDS[kind].shapes_must_match:
        for left, right in zip(one.shapes, two.shapes, strict=True):
            if len(left) != len(right) or left[1:] != right[1:]:
                yield f"{kind} tensor shapes beyond dimension 0", f"shape {list(left)}", f"shape {list(right)}"
    if one.op != two.op:
        yield "reduction operations", REDUCTIONS[one.op], REDUCTIONS[two.op]
    if (one.prescale, one.postscale) != (two.prescale, two.postscale):
        yield (
            "prescale and/or postscale factors",
            f"factors ({one.prescale}, {one.postscale})",
            f"factors ({two.prescale}, {two.postscale})",
        )
    if one.root != two.root:
        yield f"{kind} root ranks", f"root rank {one.root}", f"root rank {two.root}"
    if KINDS[kind].sizes == "splits" and len(one.splits) != len(two.splits):
        yield "numbers of splits", f"splits {list(one.splits)}", f"splits {list(two.splits)}"
    if KINDS[kind].disagreement and one.splits != two.splits:
        yield KINDS[kind].disagreement, f"ranks {list(one.splits)}", f"ranks {list(two.splits)}"
    if one.device != two.device:
        yield f"{kind} CPU/GPU device selection", f"a tensor on {one.device}", f"a tensor on {two.device}"
    if (one.wire, one.keeps_error) != (two.wire, two.keeps_error):
        yield "compression", one.wire or "none", two.wire or "none"


def _plain(values: tuple[object, ...]) -> str:
    """Formats the values, without brackets if there is a single tensor."""
    listed = [list(value) if isinstance(value, tuple) else value for value in values]
    return str(listed[0] if len(listed) == 1 else listed)
