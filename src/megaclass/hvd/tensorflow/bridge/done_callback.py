"""Keeps the callback by which an asynchronous kernel reports its end, beyond the call in which TensorFlow passes it.

TensorFlow passes a pointer to a `std::function<void()>` that is a variable of the calling function. The pointer is valid
during the call only, too short for an asynchronous kernel. KeptCallback therefore moves the function into memory of its own, as
the move constructor of libstdc++ does: four words are copied, and the original's manager becomes null, so that its destructor
does nothing.

    words 0 and 1   what is called: the object itself or its address
    word 2          the manager, a function that copies and destroys it
    word 3          the invoker, a function that calls it

is_known_layout() looks at one such pointer and tells whether all this is true of the TensorFlow that is in use.
"""

import ctypes
import functools
from ctypes import byref
from typing import Any

_MANAGER, _INVOKER = 2, 3
_DESTROY = 3
_Words = ctypes.c_uint64 * 4
_Manager = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)


class KeptCallback:
    """A callback that was moved; the owner calls TensorFlow with its address, and destroy() after that."""

    def __init__(self, pointer: int) -> None:
        original = _Words.from_address(pointer)
        self._words = _Words.from_buffer_copy(original)
        original[_MANAGER] = 0
        self.address = ctypes.addressof(self._words)

    def destroy(self) -> None:
        _manager(self._words[_MANAGER])(self.address, self.address, _DESTROY)


@functools.cache
def _manager(address: int) -> Any:
    return _Manager(address)


class _Symbol(ctypes.Structure):
    """Dl_info of dlfcn.h."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def is_known_layout(pointer: int) -> bool:
    """Returns whether the pointer is a std::function of TensorFlow's on the stack of this thread.

    Raises AttributeError where the C library has no such questions.
    """
    if not _is_on_stack(pointer):
        return False
    words = _Words.from_address(pointer)
    return all(_is_of_tensorflow(words[number]) for number in (_MANAGER, _INVOKER))


def _is_on_stack(pointer: int) -> bool:
    library = ctypes.CDLL(None)
    # Larger than pthread_attr_t, which has 56 or 64 bytes.
    attributes = ctypes.create_string_buffer(256)
    start, size = ctypes.c_void_p(), ctypes.c_size_t()
    library.pthread_self.restype = ctypes.c_void_p
    library.pthread_getattr_np.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    if library.pthread_getattr_np(library.pthread_self(), attributes):
        return False
    library.pthread_attr_getstack(attributes, byref(start), byref(size))
    library.pthread_attr_destroy(attributes)
    return (start.value or 0) <= pointer <= (start.value or 0) + size.value - ctypes.sizeof(_Words)


def _is_of_tensorflow(address: int) -> bool:
    library, symbol = ctypes.CDLL(None), _Symbol()
    library.dladdr.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return bool(address and library.dladdr(address, byref(symbol))) and b"tensorflow" in (symbol.file or b"")
