"""State -> disk: every rank its own centres, rank 0 the backbone; published by a rename once every byte is there.

A save on rank r of W, while training goes on:

    loop      copies the state to host memory, and that is all it waits for
    thread    writes, hashes and flushes the rank's files in a folder that is not a checkpoint yet,
              then leaves a note there: rank-r.json, with sizes and digests
    thread 0  waits for W notes, writes the manifest, renames the folder, removes checkpoints no longer wanted
    loop      at the next save, or at the end: all ranks agree how it went

A save that fails because a disk is full or gives an error for a while is warned about, and training goes on: the next save
tries again. The last one is tried several times, because nothing comes after it.

Nothing but files passes between the threads of different ranks: collectives belong to the loop.
"""

import json
import math
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megaclass.checkpoint.host_copy import HostCopy
from megaclass.checkpoint.manifest import CLASSES, RANK_PREFIX, SHARED, Manifest, SavedFile, write_file
from megaclass.checkpoint.retention import (
    aside_of,
    asides,
    checkpoint_folder,
    final_of,
    step_of,
    superfluous,
    unfinished_saves,
)
from megaclass.checkpoint.tensor_file import write_tensors
from megaclass.data.fingerprint import DataMarks
from megaclass.distributed.agreement import when_done_on_every_rank
from megaclass.distributed.collectives import gather_blocks, group_rank, group_size
from megaclass.distributed.restart_progress import report_progress
from megaclass.errors import CheckpointError, UserError, is_transient
from megaclass.files import flush, make_private_folder

T = TypeVar("T")
_POLL_S = 0.05
# How long the notes of other ranks are waited for when this rank is ending because of an error.
_LAST_WAIT_S = 20.0
# Before each further attempt of the last save.
_PAUSES_S = (1.0, 4.0, 15.0)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What one rank has to save at a step."""

    step: int
    shared: Mapping[str, Tensor]
    """Tensors that are the same on all ranks (backbone, its optimizer), written by rank 0."""
    head_rows: Mapping[str, Tensor]
    """This rank's centres and their state, for classes [class_start, class_stop) of num_classes."""
    class_start: int
    class_stop: int
    num_classes: int
    rank_state: Mapping[str, Tensor] = field(default_factory=dict)
    """What is this rank's own and not a row: random number generators."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """`loss`, and `verification_accuracy` where it was evaluated: they decide which checkpoint is the best."""


class CheckpointWriter:
    """Saves the checkpoints of one run. The constructor, save and finish are collective; none runs in another thread.

    A crash at any moment leaves the older checkpoints as they were; a rank that cannot write ends the save on all. Where
    the reason may pass (a full disk, an I/O error) that is a warning, and an error only when the last save fails.
    As a context manager it ends with finish(), or, when the block raised, says what became of a save under way.
    """

    def __init__(
        self,
        checkpoints: Path,
        *,
        config: str,
        keep: int,
        device: torch.device,
        class_names: bytes = b"",
        data: DataMarks | None = None,
        is_asynchronous: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """keep: how many of the last ones stay, beside the best. class_names: see checkpoint/class_names.py.

        data: what the data is known by; only rank 0 needs it.
        """
        self._checkpoints, self._config, self._keep, self._class_names = checkpoints, config, keep, class_names
        self._data = data or DataMarks()
        self._device, self._group, self._is_asynchronous = device, group, is_asynchronous
        self._rank, self._world_size = group_rank(group), group_size(group)
        self._rows_copy, self._shared_copy = HostCopy(), HostCopy()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="megaclass-checkpoint")
        self._under_way: _Save | None = None
        self._last: Snapshot | None = None
        self._failure: UserError | OSError | None = None
        """Why the last save did not succeed, if the reason may pass; the same on all ranks but for the words."""
        self._job = self._agree_on_job()

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.finish()
            else:
                self._end_alone()
        finally:
            self._thread.shutdown()

    def reserve(self, head_rows: Mapping[str, Tensor], shared: Mapping[str, Tensor]) -> None:
        """Takes the host memory for what is there already now, so that the first save waits no longer than the others."""
        self._rows_copy.reserve(head_rows)
        if self._rank == 0:
            self._shared_copy.reserve(shared)

    def save(self, snapshot: Snapshot) -> Path:
        """Collective. Copies the state and starts to write checkpoints/step-N; returns the folder it will be.

        First waits for the save before. Its errors are raised here, on all ranks; those that may pass are warned about.
        """
        self._settle()
        if self._failure is not None:
            self._warn("training goes on, and the checkpoint of this step is tried now")
        self._last = snapshot
        return self._start(snapshot)

    def _start(self, snapshot: Snapshot) -> Path:
        self._failure = None
        rows = self._rows_copy.take({**snapshot.head_rows, **_prefixed(snapshot.rank_state)})
        shared = self._shared_copy.take(snapshot.shared) if self._rank == 0 else {}
        final = checkpoint_folder(self._checkpoints, snapshot.step)
        unfinished = self._checkpoints / f".{final.name}.{self._job}.partial"
        save = self._under_way = _Save(final, unfinished)
        write = partial(self._write_own, save, snapshot, rows, shared)
        save.written = self._thread.submit(self._named(write, final))
        if self._rank == 0:
            publish = partial(self._publish, save, snapshot)
            save.published = self._thread.submit(self._named(publish, final))
        if not self._is_asynchronous:
            self._settle()
        return final

    def finish(self) -> None:
        """Collective. Waits until the last save is published; its errors are raised here, on all ranks.

        The state must still be that of the last save: it is written again where that failed and the reason may pass.
        """
        self._settle()
        for pause_s in _PAUSES_S:
            if self._failure is None or self._last is None:
                break
            self._warn(f"it is tried again in {pause_s:g} s")
            time.sleep(pause_s)
            self._start(self._last)
            self._settle()
        if self._failure is not None:
            raise self._failure

    # ---- in the loop ---------------------------------------------------------------------------------------------

    def _agree_on_job(self) -> str:
        """A name no other job has: a process that outlived its job cannot write into the folders of this one."""
        own_bits = torch.tensor([int.from_bytes(os.urandom(7), "little")], device=self._device)
        return f"{int(gather_blocks(own_bits, self._group)[0]):014x}"

    def _settle(self) -> None:
        save, self._under_way = self._under_way, None
        if save is None:
            return
        try:
            # However long the slowest disk takes.
            when_done_on_every_rank(save.written, self._device, self._group)
            when_done_on_every_rank(save.published or _done(), self._device, self._group)
        except BaseException as error:
            save.is_abandoned.set()
            if save.published is not None:
                save.published.exception()
                # Nobody writes there any more: all ranks have been heard.
                shutil.rmtree(save.unfinished, ignore_errors=True)
            # Errors of this kind are raised on all ranks or none; what follows is collective.
            if not isinstance(error, UserError | OSError) or not self._is_transient_for_all(error):
                raise
            self._failure = error

    def _is_transient_for_all(self, error: UserError | OSError) -> bool:
        is_permanent = torch.tensor([not is_transient(error)], dtype=torch.uint8, device=self._device)
        return not gather_blocks(is_permanent, self._group).any()

    def _warn(self, what_follows: str) -> None:
        if self._rank == 0:
            print(f"WARNING megaclass: {self._failure} Therefore {what_follows}.", file=sys.stderr, flush=True)

    def _end_alone(self) -> None:
        """The loop of this rank, and perhaps others, ended with an error: no collective may be called any more."""
        save, self._under_way = self._under_way, None
        if save is None:
            return
        try:
            save.written.result()
            try:
                _result(save.published, _LAST_WAIT_S)
            except TimeoutError:
                save.is_abandoned.set()
                _result(save.published)
        except CheckpointError as error:
            print(f"megaclass: {error}", file=sys.stderr, flush=True)

    # ---- in the background ---------------------------------------------------------------------------------------

    def _write_own(
        self, save: "_Save", snapshot: Snapshot, rows: Mapping[str, Tensor], shared: Mapping[str, Tensor]
    ) -> None:
        start, stop = snapshot.class_start, snapshot.class_stop
        if self._rank == 0:
            _clear_leftovers(self._checkpoints, but=save.unfinished)
        make_private_folder(self._checkpoints)
        make_private_folder(save.unfinished)
        self._rows_copy.wait()
        self._shared_copy.wait()
        name = f"head-{start:010d}-{stop:010d}.safetensors"
        entries = {name: write_tensors(save.unfinished / name, rows, start, stop)}
        if self._rank == 0:
            entries[SHARED] = write_tensors(save.unfinished / SHARED, shared)
            if self._class_names:
                entries[CLASSES] = write_file(save.unfinished / CLASSES, [self._class_names])
        text = json.dumps({name: asdict(saved) for name, saved in entries.items()})
        note = save.note(self._rank)
        write_file(note.with_suffix(".tmp"), [text.encode()])
        note.with_suffix(".tmp").rename(note)

    def _publish(self, save: "_Save", snapshot: Snapshot) -> None:
        if save.written.exception() is not None:
            return
        entries = self._wait_for_notes(save)
        # JSON has no NaN.
        metrics = {name: float(value) for name, value in snapshot.metrics.items() if math.isfinite(value)}
        Manifest(
            step=snapshot.step,
            num_classes=snapshot.num_classes,
            world_size=self._world_size,
            config=self._config,
            metrics=metrics,
            data=self._data,
            files=entries,
        ).write(save.unfinished)
        for rank in range(self._world_size):
            save.note(rank).unlink()
        flush(save.unfinished)
        _rename_over(save.unfinished, save.final)
        flush(self._checkpoints)
        report_progress(snapshot.step)
        for old in superfluous(self._checkpoints, save.final, self._keep):
            # Out of sight first: half of a checkpoint must not look like one.
            name = checkpoint_folder(self._checkpoints, step_of(old)).name
            _remove(old.rename(old.with_name(f".{name}.{self._job}.partial")))

    def _wait_for_notes(self, save: "_Save") -> dict[str, SavedFile]:
        notes = [save.note(rank) for rank in range(self._world_size)]
        while missing := set(notes) - set(save.unfinished.iterdir()):
            if save.is_abandoned.wait(_POLL_S):
                raise CheckpointError(
                    f"The checkpoint {save.final} was not finished: {', '.join(sorted(note.name for note in missing)[:8])} "
                    f"did not come. "
                    f"The older ones are as they were."
                )
        entries: dict[str, SavedFile] = {}
        for note in notes:
            values = json.loads(note.read_text(encoding="utf-8"))
            entries |= {name: SavedFile(**entry) for name, entry in values.items()}
        return entries

    def _named(self, action: Callable[[], T], final: Path) -> Callable[[], T]:
        """The action, with what the disk refuses turned into an error that says whose disk and what for."""

        def act() -> T:
            try:
                return action()
            # A GPU that fails under the copy is a RuntimeError of torch.
            except (OSError, RuntimeError) as error:
                raise CheckpointError(
                    f"Rank {self._rank} on {socket.gethostname()} cannot write the checkpoint {final}: {error}. "
                    f"The older ones are as they were."
                ) from error

        return act


class _Save:
    """One save under way on this rank."""

    def __init__(self, final: Path, unfinished: Path) -> None:
        self.final, self.unfinished = final, unfinished
        self.is_abandoned = threading.Event()
        self.written: Future[None]
        self.published: Future[None] | None = None

    def note(self, rank: int) -> Path:
        return self.unfinished / f"rank-{rank:05d}.json"


def _rename_over(unfinished: Path, final: Path) -> None:
    """A folder cannot be replaced in one step: what stood there steps aside under a name that is still looked at."""
    aside = aside_of(final)
    if final.exists():
        _remove(aside)
        final.rename(aside)
    unfinished.rename(final)
    _remove(aside)


def _clear_leftovers(checkpoints: Path, *, but: Path) -> None:
    """What a crash left: unfinished saves go; a checkpoint that stepped aside for one that never came, comes back."""
    for leftover in unfinished_saves(checkpoints):
        if leftover != but:
            _remove(leftover)
    for aside in asides(checkpoints):
        final = final_of(aside)
        if final.exists():
            _remove(aside)
        else:
            aside.rename(final)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _prefixed(rank_state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {RANK_PREFIX + name: tensor for name, tensor in rank_state.items()}


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


def _result(future: Future[None] | None, timeout_s: float | None = None) -> None:
    if future is not None:
        future.result(timeout_s)
