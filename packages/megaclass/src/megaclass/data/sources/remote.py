"""Data at an address, such as s3://bucket/faces, hf://datasets/user/name or https://host/shards: a copy in the cache folder.

fsspec lists and reads; which addresses work depends on the packages that are installed (s3fs, gcsfs, huggingface_hub,
aiohttp). The copy lies in ~/.cache/megaclass/remote/HASH-NAME ($XDG_CACHE_HOME). A file is fetched in ranges of 8 MiB into a
hidden file, whose name holds a hash of address, size and version of the original, and renamed when its size is right:
an interrupted download continues at its last range, also in another process. .copy.json tells that a copy is complete; it is
used from then on without asking the server. One process per host fetches and the others wait.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import unquote

from megaclass.data.ordered_map import ordered_map
from megaclass.data.sources.column_cache import user_cache
from megaclass.errors import DataError
from megaclass.file_lock import locked
from megaclass.progress import progress_bar
from megaclass_launch.files import flush, write_text

_logger = logging.getLogger("megaclass.data")
_RANGE_BYTES = 2**23
_NUM_THREADS = 8
# Waits of 1, 2, 4, 8 and 16 seconds between the attempts.
_NUM_ATTEMPTS = 6
_SILENCE_S = 60.0
# A file of the original never has this name: those that start with a dot are left out.
_COMPLETE_FILE = ".copy.json"
Result = TypeVar("Result")


def is_remote(path: str) -> bool:
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+://", path) is not None


def copy_of(address: str) -> Path:
    """Returns the place of the copy: a folder, or the file in it if the address is that of one file."""
    folder = cache_folder("remote", address)
    try:
        file = json.loads((folder / _COMPLETE_FILE).read_bytes()).get("file")
    except (OSError, ValueError, AttributeError):
        file = None
    return folder / file if isinstance(file, str) else folder


def cache_folder(kind: str, key: str) -> Path:
    """Returns the folder of the user's cache for a key; it need not exist."""
    try:
        base = user_cache()
    except RuntimeError:
        raise DataError(f"There is no home folder for a copy of {key}: set XDG_CACHE_HOME to a folder.") from None
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", PurePosixPath(key).name)[-40:]
    return base / kind / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}-{name}"


def fetch(address: str) -> Path:
    """Returns the local copy of a file, a folder or a pattern (such as hf://datasets/a/b/data/train-*.parquet)."""
    folder = cache_folder("remote", address)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not (folder / _COMPLETE_FILE).is_file():
            with locked(folder / ".lock"):
                if not (folder / _COMPLETE_FILE).is_file():
                    _fetch_all(address, folder)
    except OSError as error:
        raise DataError(f"Cannot write the copy of {address} in {folder}: {error.strerror or error}.") from error
    return copy_of(address)


def _fetch_all(address: str, folder: Path) -> None:
    try:
        import fsspec
    except ImportError:
        raise DataError(f"Reading {address} needs fsspec: pip install 'megaclass[remote]'") from None
    options: dict[str, Any] = {}
    if address.startswith("http"):
        with contextlib.suppress(ImportError):
            import aiohttp

            # Otherwise a silent server is waited for during five minutes, and a slow one cut off after them.
            options["client_kwargs"] = {"timeout": aiohttp.ClientTimeout(sock_connect=_SILENCE_S, sock_read=_SILENCE_S)}
    try:
        files, top = fsspec.core.url_to_fs(address, **options)
    # Unknown protocols and missing packages: fsspec names the package to install.
    except (ValueError, ImportError) as error:
        raise DataError(f"Cannot read {address}: {error}") from error
    is_web = address.startswith("http")
    # What follows the ? of a web address, such as a signature, is not part of the name.
    place = top.partition("?")[0] if is_web else top
    is_pattern = bool(set("*?[") & set(place))
    if is_web:
        # Web servers do not tell files from folders.
        is_file = not is_pattern and "." in PurePosixPath(place).name and not place.endswith("/")
    else:
        is_file = not is_pattern and _with_retries(lambda: bool(files.isfile(top)), address)
    if is_file:
        wanted = {unquote(place.rpartition("/")[2]): {"path": top}}
    else:
        wanted = _with_retries(lambda: dict(_listed(files, top, is_pattern)), address)
    if not wanted:
        raise DataError(f"There is no file at {address}.")
    _logger.info(f"fetching {len(wanted):,} files from {address} to {folder}")
    with progress_bar("fetching, files", len(wanted)) as bar:
        fetched = ordered_map(lambda name: _fetch_file(files, wanted[name], folder / name), wanted, _NUM_THREADS)
        for done, _ in enumerate(fetched, start=1):
            bar.advance_to(done)
    facts = {"address": address, "file": next(iter(wanted)) if is_file else None, "files": len(wanted)}
    write_text(folder / _COMPLETE_FILE, json.dumps(facts) + "\n")


def _listed(files: Any, top: str, is_pattern: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (name below the folder, facts) of every file; names that start with a dot are left out."""
    found = files.glob(top, detail=True) if is_pattern else files.find(top, detail=True)
    # Names are counted from the last folder before the first wildcard.
    start = re.split(r"[*?\[]", top)[0].rpartition("/")[0] if is_pattern else top.rstrip("/")
    for path, info in found.items():
        name = unquote(path.removeprefix(start).lstrip("/"))
        parts = PurePosixPath(name).parts
        # Index pages of web servers also link to sorted views of themselves, and to places elsewhere.
        if info.get("type") != "file" or not path.startswith(f"{start}/") or "?" in name or not parts:
            continue
        if ".." in parts or "\0" in name:
            raise DataError(f"{top} lists a file named {name!r}, which cannot be copied. Do not trust this place.")
        if not any(part.startswith(".") for part in parts):
            yield name, {**info, "path": path}


def _fetch_file(files: Any, info: dict[str, Any], target: Path) -> None:
    path = str(info["path"])
    if info.get("size") is None:
        # Listings of web servers have neither sizes nor versions.
        info = _with_retries(lambda: files.info(path), path)
    size: int | None = info.get("size")
    versions = [str(info.get(key)) for key in ("ETag", "etag", "Last-Modified", "LastModified", "mtime", "blob_id")]
    digest = hashlib.sha256(json.dumps([path, size, *versions]).encode()).hexdigest()[:16]
    unfinished = target.with_name(f".{target.name}.{digest}.part")
    if target.is_file() and (size is None or target.stat().st_size == size):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    has_ranges = not path.startswith("http") and size is not None
    if path.startswith("http") and size is not None and size > _RANGE_BYTES:
        has_ranges = _with_retries(lambda: _gives_ranges(files, path), path)
    start = unfinished.stat().st_size if has_ranges and unfinished.exists() else 0
    with unfinished.open("ab" if start else "wb") as file:
        while has_ranges and size is not None and start < size:
            stop = min(start + _RANGE_BYTES, size)
            content = _with_retries(lambda start=start, stop=stop: _range(files, path, start, stop), path)  # type: ignore[misc]
            file.write(content)
            file.flush()
            start = stop
        if not has_ranges:
            _with_retries(lambda: _stream(files, path, size, file), path)
    flush(unfinished)
    unfinished.replace(target)
    # Parts of a version that the server no longer has.
    for old in target.parent.glob(f".{glob.escape(target.name)}.*.part"):
        old.unlink()


def _gives_ranges(files: Any, path: str) -> bool:
    """Asks a web server for the second byte: one that ignores ranges would send the whole file from its first byte."""
    with files.open(path, "rb", block_size=1, cache_type="none") as remote:
        try:
            remote.seek(1)
            return len(remote.read(1)) == 1
        except ValueError:
            return False


def _range(files: Any, path: str, start: int, stop: int) -> bytes:
    # File systems that are not asynchronous, such as hf://, read 5 MiB ahead unless told otherwise.
    options = {} if files.async_impl else {"cache_type": "none"}
    content: bytes = files.cat_file(path, start=start, end=stop, **options)
    if len(content) != stop - start:
        raise OSError(f"{len(content):,} bytes came instead of {stop - start:,}")
    return content


def _stream(files: Any, path: str, size: int | None, file: Any) -> None:
    """Writes the whole file of a server without ranges, from its beginning again after every fault."""
    file.seek(0)
    file.truncate()
    with files.open(path, "rb", block_size=0) as remote:
        while block := remote.read(_RANGE_BYTES):
            file.write(block)
    if size is not None and file.tell() != size:
        raise OSError(f"{file.tell():,} bytes came instead of {size:,}")


def _with_retries(call: Callable[[], Result], what: str) -> Result:
    """Calls a function that reads from the network; repeats it after faults that may pass."""
    for attempt in range(1, _NUM_ATTEMPTS + 1):
        try:
            return call()
        except DataError:
            raise
        except (FileNotFoundError, PermissionError) as error:
            reason = "there is no such file or folder" if isinstance(error, FileNotFoundError) else "access is denied"
            raise DataError(f"Cannot read {what}: {reason} ({str(error) or type(error).__name__}).") from error
        # The libraries below fsspec raise many types, without a common base class.
        except Exception as error:
            shown = str(error) or type(error).__name__
            if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
                raise DataError(
                    f"Cannot read {what}: {shown}. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or for a public place "
                    f"FSSPEC_S3='{{\"anon\": true}}'."
                ) from error
            # Answers 400 to 499 mean that the request is wrong, except "timeout" and "too many requests".
            status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
            if attempt == _NUM_ATTEMPTS or (status in range(400, 500) and status not in (408, 429)):
                raise DataError(
                    f"Cannot read {what}: {shown} (attempt {attempt}). What has been fetched is kept; run again to continue."
                ) from error
            _logger.warning(f"{what}: {shown}; trying again in {_wait_s(attempt):.0f} s")
            time.sleep(_wait_s(attempt))
    raise AssertionError


def _wait_s(attempt: int) -> float:
    return 2.0 ** (attempt - 1)
