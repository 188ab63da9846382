"""The folder of a run: who may write there, and what is kept."""

import errno
import fcntl
import json
import os
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megaclass.checkpoint.retention import published, step_of, written_by_runs
from megaclass.distributed.agreement import on_every_rank, on_main_rank
from megaclass.distributed.collectives import gather_blocks, group_rank
from megaclass.errors import CheckpointError
from megaclass.files import make_private_folder, open_private, write_private

# Network file systems may show a new file a moment late.
_NETWORK_DELAY_S = 5.0
_LOCK_POLL_S = 0.2
_TAKEN = "taken"
_OWN_NAMES = (
    "config.toml",
    "metrics.jsonl",
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
)
# Of a row of metrics: what a resumed run goes on with.
_READ_BACK = ("loss", "images_per_second")
# What other commands and services made of a run; a folder that holds nothing else holds no run.
_MADE_OF_A_RUN = ("export", "wandb")


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def holds_a_run(self) -> bool:
        return any((self.path / name).exists() for name in _OWN_NAMES)

    def check_free(self, command: Sequence[str] = ()) -> None:
        """Refuses a folder that holds another run, or files that are none of ours.

        command: the command line that was typed, to show the one that resumes the run; empty where it is not known.
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
            return "it ended before its first checkpoint, so begin it again with --overwrite"
        typed = f": {shlex.join([*command, '--resume'])}" if command else ""
        return f"continue it with --resume (from step {steps[-1]}{typed}), replace it with --overwrite"

    def clear(self) -> None:
        """Removes what a run writes, what was made of it, and nothing else."""
        for target in (
            *written_by_runs(self.checkpoints),
            *(self.path / name for name in (*_OWN_NAMES, *_MADE_OF_A_RUN) if name != self.checkpoints.name),
        ):
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)
        with suppress(OSError):
            # Stays where users keep copies of their own in it.
            self.checkpoints.rmdir()

    @property
    def _lock_file(self) -> Path:
        return self.path / ".lock"

    def set_taken(self, is_taken: bool) -> None:
        """Whether the run in this locked folder is that of the job that holds it, or still the one of before."""
        try:
            write_private(self._lock_file, _TAKEN if is_taken else "")
        except OSError as error:
            raise _cannot_write(self._lock_file, error) from error

    def is_taken(self) -> bool:
        return self._lock_file.is_file() and self._lock_file.read_bytes()[:100] == _TAKEN.encode()

    @contextmanager
    def locked(self, patience_s: float = 0.0) -> Iterator[None]:
        """Two jobs in one folder would mix their files: the second is refused, however the first ended.

        patience_s: how long it may take the one before to end.
        """
        try:
            make_private_folder(self.path)
            # A run folder may have come from somewhere else: a link in it must not have another file truncated.
            handle = os.open(self._lock_file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise CheckpointError(
                f"Cannot write to the run folder {self.path}: {error.strerror}; choose another train.run_dir."
            ) from error
        try:
            self._lock(handle, patience_s)
            yield
        finally:
            os.close(handle)

    def _lock(self, handle: int, patience_s: float) -> None:
        begun, was_told = time.monotonic(), False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() - begun >= patience_s:
                    raise CheckpointError(
                        f"Another job is running in {self.path}: choose another train.run_dir."
                    ) from None
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                    raise CheckpointError(f"Cannot lock the run folder {self.path}: {error.strerror}.") from error
                print(
                    f"WARNING megaclass: the file system of {self.path} has no locks ({error.strerror}): nothing keeps "
                    f"a second job out of this run folder. Start none.",
                    file=sys.stderr,
                    flush=True,
                )
                return
            if not was_told:
                was_told = True
                print(
                    f"megaclass: rank 0 of the start before still holds {self.path}: waiting up to {patience_s:g} s "
                    f"for it to end.",
                    file=sys.stderr,
                    flush=True,
                )
            time.sleep(_LOCK_POLL_S)

    def check_seen_by_all(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        """Collective. Refuses a folder that is another one on some host: shards written there would be missing here.

        Rank 0 leaves a file with a name that nobody can have seen before, and every rank looks for it.
        """
        name_bits = torch.tensor([int.from_bytes(os.urandom(7), "little")], device=device)
        token = self.path / f".seen-{int(gather_blocks(name_bits, group)[0]):014x}"
        on_main_rank(lambda: token.touch(0o600), device, group)
        try:
            on_every_rank(lambda: self._look_for(token, group_rank(group)), device, group)
        finally:
            if group_rank(group) == 0:
                token.unlink(missing_ok=True)

    def _look_for(self, token: Path, rank: int) -> None:
        deadline = time.monotonic() + _NETWORK_DELAY_S
        while not token.exists():
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"Rank {rank} on {socket.gethostname()} does not see in {self.path.absolute()} what rank 0 wrote there: "
                    f"the run folder must be the same on all hosts. Put train.run_dir on a file system they share."
                )
            time.sleep(0.05)

    def holds_config(self, toml: str) -> bool:
        """Whether the run that the folder holds was started with these settings."""
        file = self.path / "config.toml"
        return file.is_file() and file.read_bytes() == toml.encode()

    def write_config(self, text: str) -> None:
        self._write("config.toml", text)

    def write_summary(self, summary: dict[str, Any]) -> None:
        self._write("summary.json", json.dumps(summary, indent=1) + "\n")

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        path = self.path / "metrics.jsonl"
        try:
            size = path.stat().st_size if path.exists() else 0
            try:
                with open_private(path, "a", follows_links=False, encoding="utf-8") as file:
                    file.write(json.dumps(dict(row)) + "\n")
            except OSError:
                # Half a row would spoil the next one.
                with suppress(OSError):
                    os.truncate(path, size)
                raise
        except OSError as error:
            raise _cannot_write(path, error) from error

    def read_metrics(self) -> list[dict[str, Any]]:
        """Whole rows; a last one cut off by a crash is left out, and so is what a power cut left in place of others."""
        return [row for row in map(_row, self._lines_of_metrics()) if row is not None]

    def forget_metrics_after(self, step: int) -> None:
        """A resumed run writes the rows after its checkpoint again. Lines that are no rows go, and that is said."""
        rows, num_lines = self.read_metrics(), len(self._lines_of_metrics())
        if len(rows) < num_lines:
            print(
                f"megaclass: {num_lines - len(rows)} of {num_lines} lines in {self.path / 'metrics.jsonl'} cannot be read "
                f"as rows and are dropped; the curve has a gap there.",
                file=sys.stderr,
                flush=True,
            )
        kept = [row for row in rows if row["step"] <= step]
        self._write("metrics.jsonl", "".join(json.dumps(row) + "\n" for row in kept))

    def _lines_of_metrics(self) -> list[str]:
        path = self.path / "metrics.jsonl"
        return path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1] if path.exists() else []

    def _write(self, name: str, text: str) -> None:
        unfinished = self.path / f".{name}.tmp"
        try:
            write_private(unfinished, text)
            unfinished.replace(self.path / name)
        except OSError as error:
            raise _cannot_write(self.path / name, error) from error


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_row = isinstance(row, dict) and isinstance(row.get("step"), int)
    return row if is_row and all(isinstance(row.get(key, 0.0), int | float) for key in _READ_BACK) else None


def _cannot_write(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"Cannot write {path}: {error.strerror}. The checkpoints are as they were: make room, then --resume."
    )
