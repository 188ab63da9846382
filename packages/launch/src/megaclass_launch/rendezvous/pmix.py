"""Sends a text from rank 0 to all ranks of an mpirun through its PMIx library: without MPI, an address or a file.

Used by `rank0_address` when ranks on several hosts must learn where rank 0 is. Each rank talks to mpirun's daemon on its own
host, and the daemons are already connected. Takes about 20 ms.
"""

import ctypes
import ctypes.util

from megaclass_launch.errors import LaunchError

# From pmix_common.h; the same in PMIx 2 to 5.
_SUCCESS = 0
_GLOBAL = 3
_STRING = 3
_KEY = b"megaclass.rendezvous"
_SIZE_0 = ctypes.c_size_t(0)


class _Process(ctypes.Structure):
    _fields_ = (("namespace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _Value(ctypes.Structure):
    # The union's largest member is smaller than this padding, which is never read.
    _fields_ = (("kind", ctypes.c_uint16), ("text", ctypes.c_void_p), ("rest", ctypes.c_char * 64))


# PMIx cannot be initialised twice in one process, so the text is kept for a second process group.
_heard: list[str | None] = []


def tell_all(text: str, is_main: bool) -> str | None:
    """Returns rank 0's text on every rank, or None without a PMIx library. Collective; exchanged once per process."""
    if not _heard:
        _heard.append(_exchange(text, is_main))
    return _heard[0]


def _exchange(text: str, is_main: bool) -> str | None:
    library = _library()
    if library is None:
        return None
    own = _Process()
    _call(library, "PMIx_Init", ctypes.byref(own), None, _SIZE_0)
    try:
        if is_main:
            # Kept in a variable until PMIx_Put has copied it: the structure holds a bare pointer.
            held = ctypes.create_string_buffer(text.encode("ascii"))
            value = _Value(kind=_STRING, text=ctypes.cast(held, ctypes.c_void_p))
            _call(library, "PMIx_Put", ctypes.c_uint8(_GLOBAL), _KEY, ctypes.byref(value))
            _call(library, "PMIx_Commit")
        _call(library, "PMIx_Fence", None, _SIZE_0, None, _SIZE_0)
        main = _Process(namespace=own.namespace, rank=0)
        found = ctypes.POINTER(_Value)()
        _call(library, "PMIx_Get", ctypes.byref(main), _KEY, None, _SIZE_0, ctypes.byref(found))
        told = ctypes.cast(found.contents.text, ctypes.c_char_p).value
        assert found.contents.kind == _STRING and told is not None
        # The text is fetched from rank 0's host on demand, so rank 0 must not leave before the last rank has it.
        _call(library, "PMIx_Fence", None, _SIZE_0, None, _SIZE_0)
        return told.decode("ascii")
    finally:
        library.PMIx_Finalize(None, _SIZE_0)


def _library() -> ctypes.CDLL | None:
    for name in ("libpmix.so.2", ctypes.util.find_library("pmix")):
        try:
            return ctypes.CDLL(name) if name else None
        except OSError:
            continue
    return None


def _call(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    code = getattr(library, name)(*arguments)
    if code != _SUCCESS:
        raise LaunchError(
            f"mpirun's PMIx refused {name} with {code}, so the ranks cannot learn where rank 0 is: "
            f"add -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=<a free port there>."
        )
