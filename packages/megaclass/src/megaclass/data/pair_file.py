"""Verification pairs in InsightFace's `.bin` format (lfw.bin, …): a pickle, read without executing anything in it."""

import io
import pickle
import pickletools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaclass.errors import DataError
from megaclass_launch.files import published_file

# The first protocol with long bytes objects; InsightFace reads it with any Python 3.
_PICKLE_PROTOCOL = 4


@dataclass(frozen=True)
class PairSet:
    """Pair i is images 2i and 2i + 1; `is_same[i]` tells whether they show one identity."""

    images: list[bytes]
    is_same: NDArray[np.bool_]

    @property
    def num_pairs(self) -> int:
        return len(self.is_same)


def write_pairs(path: Path, pair_set: PairSet) -> None:
    """Writes the pairs; a reader sees the old file or the new one, never a part."""
    _require_two_images_per_pair(path, len(pair_set.images), len(pair_set.is_same))
    content = (list(pair_set.images), [bool(same) for same in pair_set.is_same])
    try:
        with published_file(path) as unfinished, unfinished.open("wb") as file:
            pickle.dump(content, file, protocol=_PICKLE_PROTOCOL)
    except OSError as error:
        raise DataError(f"Cannot write the pairs {path}: {error.strerror}.") from error


def read_pairs(path: Path) -> PairSet:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"Cannot read the pairs {path}: {error.strerror}.") from error
    try:
        _check_opcodes(content)
        found = _PairUnpickler(content, path).load()
    except _BAD_PICKLE as error:
        raise DataError(
            f"Cannot read the pairs {path}: not a whole pickle of (images, is_same) ({error or type(error).__name__})."
        ) from error
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise DataError(f"Cannot read the pairs {path}: expected (images, is_same), found {_describe(found)}.")
    images = _as_images(_as_list(found[0], "images", path), path)
    is_same = [_as_bool(item, number, path) for number, item in enumerate(_as_list(found[1], "is_same", path))]
    _require_two_images_per_pair(path, len(images), len(is_same))
    return PairSet(images, np.array(is_same, dtype=bool))


def _require_two_images_per_pair(path: Path, num_images: int, num_pairs: int) -> None:
    if num_images != 2 * num_pairs:
        raise DataError(
            f"The pairs {path} hold {num_images} images and {num_pairs} labels: expected two images per label."
        )


# Everything that Python's unpickler raises on bytes that are not a pickle.
_BAD_PICKLE = (
    pickle.UnpicklingError,
    EOFError,
    AttributeError,
    IndexError,
    KeyError,
    TypeError,
    ValueError,
    OverflowError,
    AssertionError,
    MemoryError,
    struct.error,
)


# Opcodes for numbers, bytes, text, lists, tuples and arrays, with which every tool and version of Python writes pairs. No
# dictionaries or sets (hashing a deeply nested key overflows the stack) and no instances of classes.
_ADMITTED = """
    PROTO FRAME STOP MARK POP POP_MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4
    STRING BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8
    UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 EMPTY_LIST LIST APPEND APPENDS
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET
    GLOBAL STACK_GLOBAL REDUCE BUILD
"""


def _check_opcodes(content: bytes) -> None:
    """Refuses other opcodes, lengths beyond the end of the file, and numbers that would make the table of objects huge."""
    admitted = frozenset(_ADMITTED.split())
    for number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if opcode.name not in admitted or (opcode.name.endswith("PUT") and (argument or 0) > number):
            raise pickle.UnpicklingError(f"{opcode.name} {argument}")


class _PairUnpickler(pickle.Unpickler):
    """Admits arrays of numbers and bytes, and refuses every other name.

    The file never gets a class or function of NumPy: stand-ins take the pickled state and check it, so the file can call
    nothing. The result is at most a few times as large as the file.
    """

    def __init__(self, content: bytes, path: Path) -> None:
        # Python 2 wrote images as its `str`, which Python 3 would decode as text.
        super().__init__(io.BytesIO(content), encoding="bytes")
        self._path = path
        # Old protocols make one object out of another: at most twice the file, and some room.
        self._left = _Allowance(4 * len(content))

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" in _BYTES:
            return self._make_bytes
        if f"{module}.{name}" not in _STAND_INS:
            raise DataError(
                f"The pairs {self._path} ask for {module}.{name} when opened: only bytes and arrays are admitted. "
                f"Do not trust this file."
            )
        return _STAND_INS[f"{module}.{name}"]

    def _make_bytes(self, content: Any = b"", encoding: Any = "latin1") -> bytes:
        """`bytes(…)` and `_codecs.encode(…)` as pickles use them; `bytes(10**12)` would be a request for memory."""
        if isinstance(content, str | bytes | bytearray | list):
            self._left.take(len(content))
        if isinstance(content, str) and encoding in ("latin1", "latin-1", b"latin1", b"latin-1"):
            return content.encode("latin1")
        if isinstance(content, bytes | bytearray | list):
            return bytes(content)
        raise pickle.UnpicklingError(f"bytes made of {_describe(content)}")


class _Allowance:
    """Counts how many bytes may still be made out of a file: copying its content again and again would fill any memory."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    def take(self, num_bytes: int) -> None:
        self._num_bytes -= num_bytes
        if self._num_bytes < 0:
            raise pickle.UnpicklingError("it asks for more bytes than it holds")


class _Array:
    """Stand-in for a NumPy array that is being rebuilt."""

    __slots__ = ("flat", "shape")

    def __init__(self, shape: tuple[int, ...] = (0,)) -> None:
        self.shape = shape
        self.flat: NDArray[Any] | list[Any] = []

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.shape, dtype, _, content = state
        self.fill(content, dtype)

    def fill(self, content: Any, dtype: Any) -> None:
        if not isinstance(dtype, _Dtype):
            raise pickle.UnpicklingError(f"an array of {_describe(dtype)}")
        if isinstance(content, list):
            self.flat = content
        else:
            self.flat = np.frombuffer(content, dtype=dtype.numpy_name)
        if len(self.shape) > 2 or int(np.prod(self.shape, dtype=np.int64)) != len(self.flat):
            raise pickle.UnpicklingError(f"an array of shape {self.shape} with {len(self.flat)} entries")


class _Dtype:
    __slots__ = ("numpy_name",)

    # Pixels, truth values and the integers some tools write for them; O holds a list of such arrays.
    _NAMES = frozenset({"u1", "b1", "i1", "i4", "i8", "O8", "O"})

    def __init__(self, name: Any) -> None:
        text = name.decode("ascii", "replace") if isinstance(name, bytes) else str(name)
        if text.lstrip("<|") not in self._NAMES:
            raise pickle.UnpicklingError(f"an array of type {text!r}")
        self.numpy_name = text

    def __setstate__(self, state: Any) -> None:
        """Ignores byte order and alignment, which the name implies for the admitted types."""


def _filled(shape: Any, content: Any, dtype: Any) -> _Array:
    array = _Array(shape)
    array.fill(content, dtype)
    return array


# What a file may ask for: the names are NumPy's, the arguments those that it pickles, and nothing of NumPy is called.
_STAND_INS: dict[str, Callable[..., Any] | None] = {
    "numpy.ndarray": None,
    "numpy.dtype": lambda name, *alignment: _Dtype(name),
}
for _core in ("numpy.core", "numpy._core"):
    _STAND_INS |= {
        f"{_core}.multiarray._reconstruct": lambda array_type, shape, code: _Array(),
        f"{_core}.numeric._frombuffer": lambda content, dtype, shape, order: _filled(shape, content, dtype),
        f"{_core}.multiarray.scalar": lambda dtype, content: int(_filled((1,), content, dtype).flat[0]),
    }
_BYTES = {"_codecs.encode", "builtins.bytes", "builtins.bytearray", "__builtin__.bytes", "__builtin__.bytearray"}


def _as_list(found: Any, what: str, path: Path) -> list[Any]:
    if isinstance(found, _Array):
        # A (2N, L) array of pixels would be sliced by rows; encoded images differ in length, so only flat lists occur.
        return list(found.flat)
    if isinstance(found, list | tuple):
        return list(found)
    raise DataError(f"Cannot read the pairs {path}: {what} is {_describe(found)}, expected a list.")


def _as_images(items: list[Any], path: Path) -> list[bytes]:
    """Converts each object once, since a small file may refer to one a million times."""
    converted: dict[int, bytes] = {}
    for number, item in enumerate(items):
        if id(item) not in converted:
            converted[id(item)] = _as_bytes(item, number, path)
    return [converted[id(item)] for item in items]


def _as_bytes(item: Any, number: int, path: Path) -> bytes:
    if isinstance(item, bytes | bytearray):
        return bytes(item)
    if isinstance(item, _Array) and isinstance(item.flat, np.ndarray) and item.flat.dtype == np.uint8:
        return item.flat.tobytes()
    raise DataError(
        f"Cannot read the pairs {path}: image {number} is {_describe(item)}, expected bytes or an array of uint8."
    )


def _as_bool(item: Any, number: int, path: Path) -> bool:
    if isinstance(item, bool | int | np.bool_ | np.integer) and item in (0, 1):
        return bool(item)
    raise DataError(f"Cannot read the pairs {path}: label {number} is {_describe(item)}, expected true or false.")


def _describe(found: Any) -> str:
    if isinstance(found, _Array):
        return f"an array of shape {found.shape}"
    if isinstance(found, list | tuple):
        return f"a {type(found).__name__} of {len(found)}"
    if isinstance(found, int) and found.bit_length() > 64:
        return f"a number of {found.bit_length()} bits"
    return (
        f"{type(found).__name__} {str(found)[:40]!r}"
        if isinstance(found, int | float | str)
        else f"a {type(found).__name__}"
    )
