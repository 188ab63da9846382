"""The run folder: which job may write to it, its lock, and its files."""

import errno
import json
import logging
import os
import shlex
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megaclass.checkpoint.retention import published, step_of, written_by_runs
from megaclass.distributed.agreement import on_every_rank, on_main_rank
from megaclass.errors import CheckpointError
from megaclass.metrics_file import read_metrics
from megaclass_launch.files import make_private_folder, open_private, write_private, write_text
from megaclass_launch.operating_system import lock_at_once, open_flags
from megaclass_launch.ranks.collectives import gather_blocks, group_rank

_logger = logging.getLogger("megaclass.training")

# Network file systems may show a new file with a delay.
_NETWORK_DELAY_S = 5.0
_LOCK_POLL_S = 0.2
_LOOK_POLL_S = 0.05
# Content of the lock file once the running job has put its own run into the folder (see start/restart.py).
_TAKEN = "taken"
_OWN_NAMES = (
    "config.toml",
    "metrics.jsonl",
    "events.jsonl",
    "hang",
    "profile",
    "summary.json",
    "report.html",
    "model.safetensors",
    "model.onnx",
    "checkpoints",
    "tensorboard",
    "evaluation",
    "evaluation.json",
    "baselines",
    "faces.npz",
    "training_images.npz",
    "subcentres.tsv",
)
# Fields of a row of metrics that a resumed run continues with.
_READ_BACK = ("loss", "images_per_second")
# Written by other commands and services from a run; a folder that holds only these holds no run.
_DERIVED_NAMES = ("export", "wandb", "teacher.npy", "teacher.json")


@dataclass(frozen=True)
class RunFolder:
    """The folder train.run_dir. Rank 0 writes to it; the other ranks write their parts of checkpoints only."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def holds_a_run(self) -> bool:
        return any((self.path / name).exists() for name in _OWN_NAMES)

    def check_free(self, command: Sequence[str] = ()) -> None:
        """Refuses a folder that already holds a run.

        command: the command line as typed, to show the one that resumes the run; empty if it is not known.
        """
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointError(f"The run folder {self.path} is a file: choose another train.run_dir.")
        if self.holds_a_run():
            raise CheckpointError(
                f"The run folder {self.path} already holds a run: {self._how_to_continue(command)}, or choose another "
                f"train.run_dir."
            )

    def _how_to_continue(self, command: Sequence[str]) -> str:
        steps = [step_of(folder) for folder in published(self.checkpoints)]
        if not steps:
            return "it ended before its first checkpoint, so start it again with --overwrite"
        typed = f": {shlex.join([*command, '--resume'])}" if command else ""
        return f"continue it with --resume (from step {steps[-1]}{typed}), replace it with --overwrite"

    def clear(self, but: Sequence[str] = ()) -> None:
        """Removes the files of a run and those derived from it, and nothing else. but: names that are kept."""
        names = {*_OWN_NAMES, *_DERIVED_NAMES} - {self.checkpoints.name, *but}
        for target in (*written_by_runs(self.checkpoints), *(self.path / name for name in names)):
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)
        with suppress(OSError):
            # Fails, as intended, if users keep copies of their own in it.
            self.checkpoints.rmdir()

    @property
    def _lock_file(self) -> Path:
        return self.path / ".lock"

    def set_taken(self, is_taken: bool) -> None:
        """Records in the lock file whether this job has already replaced the folder's previous run."""
        try:
            write_private(self._lock_file, _TAKEN if is_taken else "")
        except OSError as error:
            raise _cannot_write(self._lock_file, error) from error

    def is_taken(self) -> bool:
        """Tells whether the job that holds, or last held, the lock had put its own run into the folder."""
        return self._lock_file.is_file() and self._lock_file.read_bytes()[:100] == _TAKEN.encode()

    @contextmanager
    def locked(self, patience_s: float = 0.0) -> Iterator[None]:
        """Holds the folder's lock while the block runs: two jobs in one folder would mix their files.

        The kernel releases the lock when its holder ends, however that happens. patience_s: how long to wait for it.
        `files.locked` is not used, because filelock truncates the lock file, whose content must outlive the lock.
        """
        try:
            make_private_folder(self.path)
            # A run folder may have been copied from elsewhere: do not write through a symbolic link in it.
            handle = os.open(self._lock_file, os.O_RDWR | os.O_CREAT | open_flags("O_NOFOLLOW", "O_CLOEXEC"), 0o600)
        except OSError as error:
            raise CheckpointError(
                f"Cannot write to the run folder {self.path}: {error.strerror}; choose another train.run_dir."
            ) from error
        try:
            self._lock(handle, patience_s)
            yield
        finally:
            os.close(handle)

    def wait_until_free(self) -> None:
        """Waits until rank 0, which holds the lock until it has written the results, releases it or ends.

        Returns at once on a file system without locks.
        """
        with suppress(OSError):
            handle = os.open(self._lock_file, os.O_RDWR | open_flags("O_NOFOLLOW", "O_CLOEXEC"))
            try:
                while True:
                    try:
                        lock_at_once(handle)
                        return
                    except BlockingIOError:
                        time.sleep(_LOCK_POLL_S)
            finally:
                os.close(handle)

    def _lock(self, handle: int, patience_s: float) -> None:
        begun, is_logged = time.monotonic(), False
        while True:
            try:
                # Non-blocking in a loop, because a blocking flock has no timeout.
                lock_at_once(handle)
                return
            except BlockingIOError:
                if time.monotonic() - begun >= patience_s:
                    raise CheckpointError(
                        f"Another job is running in {self.path}: choose another train.run_dir."
                    ) from None
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                    raise CheckpointError(f"Cannot lock the run folder {self.path}: {error.strerror}.") from error
                _logger.warning(
                    f"the file system of {self.path} has no locks ({error.strerror}): nothing keeps "
                    f"a second job out of this run folder. Do not start one."
                )
                return
            if not is_logged:
                is_logged = True
                _logger.info(
                    f"rank 0 of the previous start still holds {self.path}: waiting up to {patience_s:g} s for it to end."
                )
            time.sleep(_LOCK_POLL_S)

    def check_seen_by_all(self, device: torch.device) -> None:
        """Collective. Refuses a folder that is not shared by all hosts: shards written elsewhere would be missing here.

        Rank 0 creates a file with a random name, and every rank looks for it.
        """
        name_bits = torch.tensor([int.from_bytes(os.urandom(7), "little")], device=device)
        token = self.path / f".seen-{int(gather_blocks(name_bits, None)[0]):014x}"
        # Random, because a name used before could still be in the cache of a network file system.
        on_main_rank(lambda: token.touch(0o600), device)
        try:
            on_every_rank(lambda: self._look_for(token), device)
        finally:
            if group_rank(None) == 0:
                token.unlink(missing_ok=True)

    def _look_for(self, token: Path) -> None:
        deadline = time.monotonic() + _NETWORK_DELAY_S
        while not token.exists():
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"Rank {group_rank(None)} on {socket.gethostname()} does not see in {self.path.absolute()} what rank 0 "
                    f"wrote there: the run folder must be the same on all hosts. Put train.run_dir on a file system that they "
                    f"share."
                )
            time.sleep(_LOOK_POLL_S)

    def holds_config(self, toml: str) -> bool:
        """Tells whether the run in the folder was started with these settings."""
        file = self.path / "config.toml"
        return file.is_file() and file.read_bytes() == toml.encode()

    @property
    def _end_request(self) -> Path:
        return self.path / ".end"

    def request_end(self) -> None:
        """Asks the run in the folder to end after its next report, with all its results. Any process may call this."""
        self._end_request.touch(0o600)

    def take_end_request(self) -> bool:
        """Tells whether the end was requested since the last call."""
        try:
            self._end_request.unlink()
        except OSError:
            return False
        return True

    def write_config(self, text: str) -> None:
        self._write("config.toml", text)

    def write_summary(self, summary: dict[str, Any]) -> None:
        self._write("summary.json", json.dumps(summary, indent=1) + "\n")

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        path = self.path / "metrics.jsonl"
        try:
            # Remember the size, to remove a partial row if the disk is full.
            size = path.stat().st_size if path.exists() else 0
            try:
                with open_private(path, "a", follows_links=False, encoding="utf-8") as file:
                    file.write(json.dumps(dict(row)) + "\n")
            except OSError:
                # A partial row would also make the next one unreadable.
                with suppress(OSError):
                    os.truncate(path, size)
                raise
        except OSError as error:
            raise _cannot_write(path, error) from error

    def read_metrics(self) -> list[dict[str, Any]]:
        """Returns the rows of metrics.jsonl that can be read; a crash may cut off the last line, a power cut damage others."""
        return self._rows_and_damaged()[0]

    def forget_metrics_after(self, step: int) -> None:
        """Removes the rows after `step`, which a resumed run writes again, and the lines that cannot be read."""
        rows, num_damaged = self._rows_and_damaged()
        if num_damaged:
            _logger.info(
                f"{num_damaged} of {len(rows) + num_damaged} lines in {self.path / 'metrics.jsonl'} cannot be read "
                f"as rows and are dropped; the curve has a gap there."
            )
        kept = [row for row in rows if row["step"] <= step]
        self._write("metrics.jsonl", "".join(json.dumps(row) + "\n" for row in kept))

    def _rows_and_damaged(self) -> tuple[list[dict[str, Any]], int]:
        """Returns the rows whose fields a resumed run can use, and the number of all other lines."""
        rows, num_damaged = read_metrics(self.path / "metrics.jsonl")
        usable = [row for row in rows if all(isinstance(row.get(key, 0.0), int | float) for key in _READ_BACK)]
        return usable, num_damaged + len(rows) - len(usable)

    def _write(self, name: str, text: str) -> None:
        try:
            write_text(self.path / name, text, is_private=True)
        except OSError as error:
            raise _cannot_write(self.path / name, error) from error


def _cannot_write(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"Cannot write {path}: {error.strerror}. The checkpoints are unchanged: make room, then --resume."
    )
