"""The messages of the negotiation: requests from the ranks, responses from rank 0. No torch, no sockets.

A rank announces requests. The coordinator answers with responses, the same ones in the same order for all ranks; a rank skips
those of process sets that it is not a member of. Lists travel as JSON the first time and as an 8-byte hash of it from then on:
a step that repeats costs each rank nine bytes to the coordinator and nine bytes back.

A request consists of a name and terms. Many requests of a list share their terms, which travel once per message. A list that
is new, which is always so for unnamed operations, therefore costs little more than its names.

Tensors of a few kilobytes travel with these messages: rank 0 adds them up, and the answer carries the sum
(transport/reductions.py).
"""

import functools
import json
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any

Shape = tuple[int, ...]
Key = tuple[int, str, str]
"""Process set, kind and name. Requests of different ranks belong together if their keys are equal."""

# In a job with a million different lists, two have the same hash with a probability below 1e-7.
HASH_BYTES = 8


def short_hash(data: bytes) -> bytes:
    # Not Python's hash(), which is different in every process.
    return blake2b(data, digest_size=HASH_BYTES).digest()


def _to_json(content: list[Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


ITEM_BYTES = {
    "uint8": 1,
    "int8": 1,
    "bool": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}


@dataclass(frozen=True, slots=True)
class Terms:
    """All of a request except its name. Equal terms are shared, so derived values are computed once."""

    kind: str
    """A key of KINDS."""
    process_set: int = 0
    dtypes: tuple[str, ...] = ()
    """One entry per tensor; grouped operations have several."""
    shapes: tuple[Shape, ...] = ()
    op: int = -1
    """Horovod's number of the reduction; -1 if nothing is reduced."""
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    splits: tuple[int, ...] = ()
    """alltoall: rows for each member. add_process_set: the ranks. remove_process_set: the number of the set."""
    device: str = "cpu"
    wire: str = ""
    """Wire format of an allreduce; empty: the dtype of the tensor."""
    keeps_error: bool = False
    """True if the rounding error is added to the next operation of this name."""
    is_grouped: bool = False
    repeats: bool = True
    """False for automatic names, which do not repeat."""
    digest: bytes = field(default=b"", init=False, compare=False)
    """Hash of all of the above."""
    num_bytes: int = field(default=0, init=False, compare=False)
    """Size of all tensors together."""

    def __post_init__(self) -> None:
        # The class is frozen for all others: its objects are shared between threads and used as keys.
        object.__setattr__(self, "digest", short_hash(_to_json(self.to_list())))
        total = 0
        for dtype, shape in zip(self.dtypes, self.shapes, strict=True):
            total += math.prod(shape) * ITEM_BYTES[dtype]
        object.__setattr__(self, "num_bytes", total)

    def __hash__(self) -> int:
        # Faster than a hash of all fields, which Terms as keys of dicts would compute again and again.
        return hash(self.digest)

    @property
    def reduction(self) -> tuple[object, ...]:
        """How tensors are combined and scaled, and where: allreduces with equal values may be computed as one."""
        return _reduction(self)

    def to_list(self) -> list[Any]:
        return [getattr(self, name) for name in _TERMS_FIELDS]


_reduction = attrgetter("process_set", "op", "prescale", "postscale", "device", "wire", "keeps_error")
_TERMS_FIELDS = [each.name for each in fields(Terms) if each.init]

# Equal terms are one object while they are in use, so comparing them compares addresses.
terms_of = functools.lru_cache(maxsize=8192)(Terms)


def _terms_from_list(values: list[Any]) -> Terms:
    kind, process_set, dtypes, shapes, op, root, prescale, postscale, splits, *rest = values
    frozen_shapes = tuple(map(tuple, shapes))
    return terms_of(
        kind, process_set, tuple(dtypes), frozen_shapes, op, root, prescale, postscale, tuple(splits), *rest
    )


class Request:
    """One rank's announcement of an operation: its terms under a name."""

    # A step makes thousands of requests: fields of the terms are read through, not copied, and the key is made once.
    __slots__ = ("key", "name", "terms")

    def __init__(self, name: str, terms: Terms) -> None:
        self.name = name
        self.terms = terms
        self.key: Key = (terms.process_set, terms.kind, name)

    @staticmethod
    def of(kind: str, name: str, *rest: Any, **more: Any) -> "Request":
        """`rest` and `more`: the other fields of Terms."""
        return Request(name, terms_of(kind, *rest, **more))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.terms, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Request) and self.key == other.key and self.terms == other.terms

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def full_name(self) -> str:
        return f"{self.kind}.{self.name}"


JOIN = Request.of("join", "join", repeats=False)
"""Announces that a rank has no more data. The answer, once all ranks have joined, is a Response without requests."""


@dataclass(frozen=True, slots=True)
class Response:
    """An instruction to all members of a process set: run these operations as one, or fail them with this error."""

    requests: tuple[Request, ...]
    """The requests of the first rank: a rank that has joined needs them to contribute zeros."""
    error: str = ""
    sizes: tuple[tuple[int, ...], ...] = ()
    """allgather: the rows of every member, per tensor. alltoall: the splits of every member."""
    last_joined: int = -1
    """The rank that joined last, once all ranks have joined; else -1."""

    @property
    def process_set(self) -> int:
        return self.requests[0].process_set if self.requests else 0

    @property
    def rest(self) -> list[Any]:
        """Everything except the requests, for JSON."""
        return [self.error, self.sizes, self.last_joined]

    @staticmethod
    def of(requests: tuple[Request, ...], rest: list[Any]) -> "Response":
        error, sizes, last_joined = rest
        return Response(requests, error, tuple(map(tuple, sizes)), last_joined)

    @property
    def digest(self) -> bytes:
        return short_hash(digest_of_all(self.requests) + _to_json(self.rest))


class Answer:
    """Responses that are sent together, and what their sender needs to know about them."""

    def __init__(self, responses: list[Response]) -> None:
        self.responses = responses
        # The few terms that a thousand requests share are asked, not the requests.
        terms = distinct_terms([request for response in responses for request in response.requests])
        self.repeats = all(each.repeats for each in terms)
        self.payloads: list[bytes] = []
        """The tensors of every rank, where they were small enough to travel with the requests; else empty."""

    @functools.cached_property
    def digest(self) -> bytes:
        return short_hash(b"".join([response.digest for response in self.responses]))


# The first byte of a message; the hash follows. After _NEW the JSON follows as well.
_NEW, _KNOWN = b"N", b"K"


class Sender:
    """Turns lists of requests or of responses into messages: JSON the first time, a hash once the receiver knows the list."""

    def __init__(self, capacity: int) -> None:
        """`capacity`: number of lists that are remembered; 0: none."""
        self._capacity = capacity
        self._known: set[bytes] = set()

    def pack(self, items: Sequence[Request] | Sequence[Response], digest: bytes, *, repeats: bool) -> bytes:
        """Returns the message. `digest`: hash of the items. `repeats`: they may come again, so they are worth remembering."""
        if digest in self._known:
            return _KNOWN + digest
        remembers = repeats and self._capacity > 0
        # Sender and receiver forget at the same message, so both always know the same lists.
        forgets = remembers and len(self._known) >= self._capacity
        if forgets:
            self._known.clear()
        if remembers:
            self._known.add(digest)
        # Responses travel as the requests of all of them in a row, and where to cut that row.
        responses = [item for item in items if isinstance(item, Response)]
        requests = [item for item in items if isinstance(item, Request)]
        requests += [request for response in responses for request in response.requests]
        terms = distinct_terms(requests)
        numbers = {id(each): number for number, each in enumerate(terms)}
        content = [
            forgets,
            remembers,
            [each.to_list() for each in terms],
            [numbers[id(request.terms)] for request in requests],
            [request.name for request in requests],
            [[len(response.requests), response.rest] for response in responses],
        ]
        return _NEW + digest + _to_json(content)


class Receiver:
    """The other end of a Sender."""

    def __init__(self) -> None:
        self._known: dict[bytes, list[Any]] = {}

    def unpack(self, message: bytes) -> tuple[bytes, list[Any]]:
        """Returns the hash of the message, and its items."""
        tag, digest = message[:1], message[1 : 1 + HASH_BYTES]
        if tag == _KNOWN:
            return digest, self._known[digest]
        forgets, remembers, all_terms, numbers, names, cuts = json.loads(message[1 + HASH_BYTES :])
        if forgets:
            self._known.clear()
        terms = [_terms_from_list(values) for values in all_terms]
        items: list[Any] = [Request(name, terms[number]) for name, number in zip(names, numbers, strict=True)]
        if cuts:
            items = _cut(items, cuts)
        if remembers:
            self._known[digest] = items
        return digest, items


def _cut(requests: list[Request], cuts: list[Any]) -> list[Any]:
    """Divides the requests into responses; a cut is the number of requests and the rest of one response."""
    ends = accumulate([count for count, _ in cuts], initial=0)
    return [
        Response.of(tuple(requests[begin:end]), rest)
        for (begin, end), (_, rest) in zip(pairwise(ends), cuts, strict=True)
    ]


def distinct_terms(requests: Iterable[Request]) -> list[Terms]:
    """Returns the terms of the requests; those that many requests share come once."""
    # By address: computing a thousand hashes would take longer than the callers save.
    return list({id(request.terms): request.terms for request in requests}.values())


def digest_of_all(requests: Sequence[Request]) -> bytes:
    """Returns a hash of the requests in their order."""
    # With the lengths of the names, ["ab", "c"] and ["a", "bc"] have different hashes.
    names = [request.name for request in requests]
    lengths = array("Q", map(len, names)).tobytes()
    terms = b"".join([request.terms.digest for request in requests])
    return short_hash(b"%d;%s%s%s" % (len(names), lengths, terms, "".join(names).encode(errors="surrogatepass")))
