"""Files and folders for their owner alone: logs, metrics, results and whatever else may tell about the data.

The mode is 0600, for folders 0700, less what the umask takes away: whichever is stricter. Which kinds of files are private and
which follow the umask stands in SECURITY.md. Standard library only.
"""

import os
from functools import partial
from pathlib import Path
from typing import IO, Any

_FILE_MODE = 0o600
_FOLDER_MODE = 0o700


def open_private(path: Path, mode: str, *, follows_links: bool = True, **options: Any) -> IO[Any]:
    """Like `path.open`, for writing; a file that is new belongs to its owner alone.

    follows_links: False refuses a symbolic link in the file's place, which somebody else may have put there.
    """
    return open(path, mode, opener=partial(_open, follows_links), **options)


def write_private(path: Path, text: str) -> None:
    """Writes a text in UTF-8 that replaces what was there; not through a symbolic link."""
    with open_private(path, "w", follows_links=False, encoding="utf-8") as file:
        file.write(text)


def make_private_folder(path: Path) -> None:
    """Makes the folder, with its parents, where it is missing. One that exists, and new parents, keep the user's mode."""
    path.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)


def _open(follows_links: bool, path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | (0 if follows_links else os.O_NOFOLLOW), _FILE_MODE)
