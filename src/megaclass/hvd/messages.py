"""What ranks tell each other about operations before any tensor travels. No torch, no sockets.

A rank announces requests; the coordinator answers with responses, the same and in the same order for all ranks they
concern. Both travel as JSON the first time and as a hash of that JSON from then on: a step that repeats costs each rank
nine bytes to the coordinator and nine bytes back. Tensors of a few kilobytes come along: rank 0 adds them up, and the
answer carries the sum.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

Shape = tuple[int, ...]
Key = tuple[int, str, str]
"""Process set, kind, name: what ranks must have in common to meet."""

HASH_BYTES = 8


def short_hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=HASH_BYTES).digest()


@dataclass(frozen=True, slots=True)
class Request:
    """One rank's wish to take part in the operation `kind` under `name`; equal wishes are equal objects."""

    kind: str
    """allreduce, allgather, broadcast, alltoall, reducescatter, barrier, add_process_set or remove_process_set."""
    name: str
    process_set: int = 0
    dtypes: tuple[str, ...] = ()
    """One a tensor: more than one only in grouped operations."""
    shapes: tuple[Shape, ...] = ()
    op: int = -1
    """Reduction, as Horovod numbers them; -1 where nothing is reduced."""
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    splits: tuple[int, ...] = ()
    """Rows for each rank in alltoall; the ranks of the set in add_process_set."""
    device: str = "cpu"
    wire: str = ""
    """Width in which an allreduce travels; empty: that of the tensor."""
    keeps_error: bool = False
    """Whether what rounding loses is added to the next operation of this name."""
    is_grouped: bool = False
    repeats: bool = True
    """False under automatic names, which do not come again."""
    digest: bytes = field(default=b"", compare=False)
    """Hash of all of the above."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", short_hash(_to_json(self.to_list())))

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def key(self) -> Key:
        return (self.process_set, self.kind, self.name)

    @property
    def full_name(self) -> str:
        return f"{self.kind}.{self.name}"

    def to_list(self) -> list[Any]:
        return [getattr(self, name) for name in _REQUEST_FIELDS]

    @staticmethod
    def from_list(values: list[Any]) -> "Request":
        kind, name, process_set, dtypes, shapes, op, root, prescale, postscale, splits, *rest = values
        frozen_shapes = tuple(map(tuple, shapes))
        return Request(
            kind, name, process_set, tuple(dtypes), frozen_shapes, op, root, prescale, postscale, tuple(splits), *rest
        )


_REQUEST_FIELDS = [name for name in Request.__slots__ if name != "digest"]


@dataclass(frozen=True, slots=True)
class Response:
    """What all members of a process set do next: run these operations as one, or fail them with this error."""

    requests: tuple[Request, ...]
    """As the first rank made them: what a rank that has joined must know to contribute zeros."""
    error: str = ""
    sizes: tuple[tuple[int, ...], ...] = ()
    """allgather: for each tensor, rows of every member; alltoall: splits of every member."""
    last_joined: int = -1
    """Set when all ranks have joined: the rank that came last."""

    @property
    def process_set(self) -> int:
        return self.requests[0].process_set if self.requests else 0

    @property
    def rest(self) -> list[Any]:
        """Everything but the requests."""
        return [self.error, self.sizes, self.last_joined]

    @staticmethod
    def of(requests: tuple[Request, ...], rest: list[Any]) -> "Response":
        error, sizes, last_joined = rest
        return Response(requests, error, tuple(map(tuple, sizes)), last_joined)

    @property
    def digest(self) -> bytes:
        return short_hash(b"".join([request.digest for request in self.requests]) + _to_json(self.rest))


class Answer:
    """Responses that are sent together, with what the sending needs to know about them, computed once."""

    def __init__(self, responses: list[Response]) -> None:
        self.responses = responses
        self.digest = short_hash(b"".join([response.digest for response in responses]))
        requests = [request for response in responses for request in response.requests]
        self.repeats = all(request.repeats for request in requests)
        self.is_global = not any(request.process_set for request in requests)
        self.payloads: list[bytes] = []
        """The tensors themselves, by rank, where they are small enough to have come along."""


_NEW, _ONCE, _KNOWN, _FORGET = b"N", b"O", b"K", b"F"


class Sender:
    """Turns lists of requests or of responses into messages: JSON at first, a hash once the other side has seen them.

    Requests that the other side knows from another list are numbers in that JSON.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._known: set[bytes] = set()
        self._numbers: dict[Request, int] = {}

    def pack(self, items: Sequence[Request | Response], digest: bytes, *, repeats: bool) -> bytes:
        """`digest` identifies the items; `repeats` says that they may come again, so are worth remembering."""
        if digest in self._known:
            return _KNOWN + digest
        if not repeats or not self._capacity:
            return _ONCE + digest + _to_json([_parts(item, Request.to_list) for item in items])
        tag = _NEW
        if len(self._known) >= self._capacity or len(self._numbers) >= 16 * self._capacity:
            self._known.clear()
            self._numbers.clear()
            tag = _FORGET
        self._known.add(digest)
        return tag + digest + _to_json([_parts(item, self._short) for item in items])

    def _short(self, request: Request) -> Any:
        number = self._numbers.get(request)
        if number is not None:
            return number
        self._numbers[request] = len(self._numbers)
        return request.to_list()


class Receiver:
    """The other end of a Sender."""

    def __init__(self) -> None:
        self._known: dict[bytes, list[Any]] = {}
        self._requests: list[Request] = []

    def unpack(self, message: bytes) -> tuple[bytes, list[Any]]:
        """The hash, and the items it stands for."""
        tag, digest = message[:1], message[1 : 1 + HASH_BYTES]
        if tag == _KNOWN:
            return digest, self._known[digest]
        content = json.loads(message[1 + HASH_BYTES :])
        if tag == _ONCE:
            return digest, [_whole(parts, Request.from_list) for parts in content]
        if tag == _FORGET:
            self._known.clear()
            self._requests.clear()
        items = [_whole(parts, self._long) for parts in content]
        self._known[digest] = items
        return digest, items

    def _long(self, entry: Any) -> Request:
        if isinstance(entry, int):
            return self._requests[entry]
        request = Request.from_list(entry)
        self._requests.append(request)
        return request


def _parts(item: Request | Response, shorten: Callable[[Request], Any]) -> list[Any]:
    """[requests] of a request, [requests, rest] of a response."""
    if isinstance(item, Request):
        return [[shorten(item)]]
    return [[shorten(request) for request in item.requests], item.rest]


def _whole(parts: list[Any], lengthen: Callable[[Any], Request]) -> Request | Response:
    requests = tuple([lengthen(entry) for entry in parts[0]])
    return requests[0] if len(parts) == 1 else Response.of(requests, parts[1])


def digest_of_all(requests: list[Request]) -> bytes:
    return short_hash(b"".join([request.digest for request in requests]))


def _to_json(content: list[Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()
