"""The messages of the negotiation: requests from the ranks, responses from rank 0. No torch, no sockets.

A rank announces a list of requests: the list itself the first time, and an 8-byte hash of it from then on, if it may repeat.
Rank 0 only compares the hashes if all ranks announce the same list. Its answer then names the list by its hash, and each rank
finds its own operations by their places in the list. Otherwise the answer contains the requests that it is about.

A request consists of a name and terms. Many requests of a list share their terms, which travel once per list. A list that
is new, which is always so for unnamed operations, therefore costs little more than its names.

Tensors of a few kilobytes travel with these messages: rank 0 adds them up, and the answer carries the sum
(transport/arithmetic.py).
"""

import functools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b
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


def _to_json(content: Any) -> bytes:
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
    json: bytes = field(default=b"", init=False, compare=False)
    """All of the above."""
    num_bytes: int = field(default=0, init=False, compare=False)
    """Size of all tensors together."""

    def __post_init__(self) -> None:
        # The class is frozen for all others: its objects are shared between threads.
        object.__setattr__(self, "json", _to_json([getattr(self, each.name) for each in fields(self) if each.init]))
        total = 0
        for dtype, shape in zip(self.dtypes, self.shapes, strict=True):
            total += math.prod(shape) * ITEM_BYTES[dtype]
        object.__setattr__(self, "num_bytes", total)

    @property
    def reduction(self) -> tuple[object, ...]:
        """How tensors are combined and scaled, and where: allreduces with equal values may be computed as one."""
        return _reduction(self)


_reduction = attrgetter("process_set", "op", "prescale", "postscale", "device", "wire", "keeps_error")

# Equal terms are one object while they are in use, so comparing them compares addresses.
terms_of = functools.lru_cache(maxsize=8192)(Terms)


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


# ---- lists of requests ----

# The first byte of a packed list.
_HOLDS, _OPENS = b"=", b"!"


def distinct_terms(requests: Iterable[Request]) -> list[Terms]:
    """Returns the terms of the requests; those that many requests share come once."""
    # By address: comparing a thousand terms would take longer than the callers save.
    return list({id(request.terms): request.terms for request in requests}.values())


def packed(requests: Sequence[Request]) -> bytes:
    """Returns the requests as bytes, which are equal for equal lists."""
    terms = distinct_terms(requests)
    numbers = {id(each): number for number, each in enumerate(terms)}
    content = [[numbers[id(request.terms)] for request in requests], [request.name for request in requests]]
    tag = _OPENS if any(each.process_set or each.kind == JOIN.kind for each in terms) else _HOLDS
    return b"%s[[%s],%s" % (tag, b",".join([each.json for each in terms]), _to_json(content)[1:])


def is_for_some(content: bytes) -> bool:
    """Returns True if not all ranks announce the list: it contains a join, or an operation of a process set."""
    return content[:1] == _OPENS


def unpacked(content: bytes) -> list[Request]:
    all_terms, numbers, names = json.loads(content[1:])
    terms = [_terms_from_list(values) for values in all_terms]
    return [Request(name, terms[number]) for name, number in zip(names, numbers, strict=True)]


def _terms_from_list(values: list[Any]) -> Terms:
    kind, process_set, dtypes, shapes, op, root, prescale, postscale, splits, *rest = values
    frozen_shapes = tuple(map(tuple, shapes))
    return terms_of(
        kind, process_set, tuple(dtypes), frozen_shapes, op, root, prescale, postscale, tuple(splits), *rest
    )


# The first byte of a message that contains or names a list; the hash follows. The list follows as well, except after _KNOWN.
# The receiver remembers a list after _KEEP, and forgets all others before it does so after _FORGET.
_NEW, _KEEP, _FORGET, _KNOWN = b"N", b"R", b"F", b"K"


class Sender:
    """Turns packed lists into messages: the list the first time, its hash once the receiver knows the list."""

    def __init__(self, capacity: int) -> None:
        """`capacity`: number of lists that are remembered; 0: none."""
        self._capacity = capacity
        self._known: set[bytes] = set()

    def message(self, content: bytes, digest: bytes, *, repeats: bool) -> bytes:
        """`digest`: hash of the content. `repeats`: the list may come again, so it is worth remembering."""
        if digest in self._known:
            return _KNOWN + digest
        tag = _NEW
        if repeats and self._capacity:
            tag = _KEEP
            # Sender and receiver forget at the same message, so both always know the same lists.
            if len(self._known) >= self._capacity:
                self._known.clear()
                tag = _FORGET
            self._known.add(digest)
        return tag + digest + content


class Receiver:
    """The other end of a Sender."""

    def __init__(self) -> None:
        self._known: dict[bytes, bytes] = {}

    def read(self, message: bytes) -> tuple[bytes, bytes]:
        """Returns the hash of the list, and the packed list."""
        tag, digest, content = message[:1], message[1 : 1 + HASH_BYTES], message[1 + HASH_BYTES :]
        if tag == _KNOWN:
            return digest, self._known[digest]
        if tag == _FORGET:
            self._known.clear()
        if tag != _NEW:
            self._known[digest] = content
        return digest, content


# ---- responses ----


def packed_responses(responses: Sequence[Response], requests: Sequence[Request], digest: bytes = b"") -> bytes:
    """Returns responses to these requests as bytes. `digest`: hash of the list, if all ranks have announced it."""
    places = {id(request): place for place, request in enumerate(requests)}
    parts = [
        [[places[id(request)] for request in each.requests], each.error, each.sizes, each.last_joined]
        for each in responses
    ]
    # JSON has no zero bytes.
    return _to_json(parts) + b"\0" + (_KNOWN + digest if digest else _NEW + packed(requests))


def unpacked_responses(message: bytes, requests_of: Callable[[bytes], Sequence[Request]]) -> list[Response]:
    """Returns the responses. `requests_of`: returns the list of requests that this rank has announced, by its hash."""
    parts, _, listed = message.partition(b"\0")
    requests = requests_of(listed[1:]) if listed[:1] == _KNOWN else unpacked(listed[1:])
    return [
        Response(tuple([requests[place] for place in places]), error, tuple(map(tuple, sizes)), last_joined)
        for places, error, sizes, last_joined in json.loads(parts)
    ]
