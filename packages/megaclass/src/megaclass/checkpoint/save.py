"""Saves checkpoints: each rank writes its centres, rank 0 also the backbone; a rename publishes the complete folder.

A save on rank r of W, while training continues:

    loop      copies the state to host memory; it waits for nothing else
    thread    writes, hashes and flushes the files of the rank in a folder that is not a checkpoint yet,
              then writes a note next to them: rank-r.json, with sizes and digests
    thread 0  waits for W notes, writes the manifest, renames the folder, removes checkpoints that are not kept
    loop      at the next save, or at the end: all ranks agree on the outcome

If a save fails for a reason that may pass (a full disk, an I/O error), rank 0 logs a warning and training continues: the
next save tries again. The last save is tried several times, because no other save follows; while the disk is full, it is tried
until there is room or a signal asks the run to stop, because the finished state is nowhere but in memory.

The threads of different ranks exchange nothing but files; only the loop calls collectives.

State of CheckpointWriter, all of it used by the loop's thread only, without a lock:

    _under_way           the save that the background thread works on, or None
    _last                the snapshot of the last save, for another attempt
    _failure             why the last save failed, if the reason may pass; None or not None on all ranks alike
    _rows_copy           host memory; the loop fills it before a save starts, the background thread reads it until the
    _shared_copy         save is settled, and the loop never fills it earlier (_settle comes first)

State of _Save: `written` and `published` are futures of the background thread; `is_abandoned` is set by the loop and ends
the waiting of thread 0 for notes.
"""

import json
import logging
import math
import os
import shutil
import socket
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
    checkpoint_folder,
    final_of,
    folders_to_delete,
    set_aside_folders,
    set_aside_name,
    step_of,
    unfinished_saves,
)
from megaclass.checkpoint.tensor_file import write_tensors
from megaclass.data.fingerprint import DataFingerprint
from megaclass.distributed.agreement import when_done_on_every_rank
from megaclass.errors import CheckpointError
from megaclass_launch.errors import UserError, is_full_disk, is_transient
from megaclass_launch.files import flush, make_private_folder
from megaclass_launch.rank_status import own_status
from megaclass_launch.ranks.collectives import gather_blocks, group_rank, group_size

_log = logging.getLogger("megaclass.checkpoint")
T = TypeVar("T")
_POLL_S = 0.05
# How long rank 0 waits for the notes of other ranks when training ended with an error.
_LAST_WAIT_S = 20.0
# Pauses before further attempts of the last save.
_PAUSES_S = (1.0, 4.0, 15.0)
# Pause while the disk stays full, in parts after which the ranks exchange whether one of them was asked to stop.
_FULL_PAUSE_S, _FULL_LOOK_S = 30.0, 1.0


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state that one rank saves at a step."""

    step: int
    shared: Mapping[str, Tensor]
    """Tensors that are the same on all ranks (backbone, its optimizer), written by rank 0."""
    head_rows: Mapping[str, Tensor]
    """This rank's centres and their state, for classes [class_start, class_stop) of num_classes."""
    class_start: int
    class_stop: int
    num_classes: int
    rank_state: Mapping[str, Tensor] = field(default_factory=dict)
    """State of this rank that is not a row of the head: random number generators."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """`loss`, and `verification_accuracy` if it was evaluated: they decide which checkpoint is the best."""


class CheckpointWriter:
    """Saves the checkpoints of one run. The constructor, `save` and `finish` are collective.

    A crash at any moment leaves the older checkpoints unchanged. If one rank cannot write, the save fails on all ranks. If
    the reason may pass (a full disk, an I/O error), this is a warning, and an error only for the last save.
    As a context manager it calls finish() at the end. If the block raises, it lets a save under way finish and reports
    its error.
    """

    def __init__(
        self,
        checkpoints: Path,
        *,
        config: str,
        keep: int,
        device: torch.device,
        class_names: bytes = b"",
        data: DataFingerprint | None = None,
        is_asynchronous: bool = True,
        group: dist.ProcessGroup | None = None,
        on_published: Callable[[int], None] = lambda step: None,
        last_wait_s: float | None = None,
        is_asked_to_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """keep: number of last checkpoints to keep besides the best. class_names: see checkpoint/class_names.py.

        data: fingerprint of the training data; only rank 0 needs it. on_published: called on rank 0, in the background
        thread, with the step of each checkpoint that is complete. last_wait_s: how long rank 0 waits for the notes of other
        ranks when training ended with an error; by default 20 s. is_asked_to_stop: ends the wait of the last save for room on
        a full disk; one rank that was asked suffices.
        """
        self._checkpoints, self._config, self._keep, self._class_names = checkpoints, config, keep, class_names
        self._data = data or DataFingerprint()
        self._on_published, self._last_wait_s, self._is_asked_to_stop = on_published, last_wait_s, is_asked_to_stop
        self._device, self._group, self._is_asynchronous = device, group, is_asynchronous
        self._rank, self._world_size = group_rank(group), group_size(group)
        self._rows_copy, self._shared_copy = HostCopy(), HostCopy()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="megaclass-checkpoint")
        self._under_way: _Save | None = None
        self._last: Snapshot | None = None
        self._failure: UserError | OSError | None = None
        """Why the last save failed, if the reason may pass. Set on all ranks or none; each rank has its own message."""
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
        """Allocates the host memory now, so the first save takes no longer than the others."""
        self._rows_copy.reserve(head_rows)
        if self._rank == 0:
            self._shared_copy.reserve(shared)

    def save(self, snapshot: Snapshot) -> Path:
        """Collective. Copies the state and starts to write checkpoints/step-N; returns that folder.

        Waits for the previous save first. Its errors are raised here, on all ranks; one that may pass is only logged.
        """
        # The background thread reads the host copies until the previous save is settled: only then may they be filled again.
        self._settle()
        if self._failure is not None:
            self._warn("training continues, and the checkpoint of this step is written now")
        self._last = snapshot
        return self._start(snapshot)

    def _start(self, snapshot: Snapshot) -> Path:
        self._failure = None
        # A rank's own state travels in the file with its centres: no further file per rank, and no further digest.
        own = {RANK_PREFIX + name: tensor for name, tensor in snapshot.rank_state.items()}
        rows = self._rows_copy.take({**snapshot.head_rows, **own})
        shared = self._shared_copy.take(snapshot.shared) if self._rank == 0 else {}
        final = checkpoint_folder(self._checkpoints, snapshot.step)
        unfinished = self._checkpoints / f".{final.name}.{self._job}.partial"
        save = self._under_way = _Save(final, unfinished)
        # One thread runs both tasks in order: on rank 0 publishing starts when its own files are written.
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

        The state must still be that of the last save: if the save failed for a reason that may pass, it is written again,
        and while the disk is full for as long as it takes.
        """
        self._settle()
        pauses_s = iter(_PAUSES_S)
        while self._failure is not None and self._last is not None:
            pause_s = next(pauses_s, None)
            if pause_s is not None:
                self._warn(f"the save is repeated in {pause_s:g} s")
                time.sleep(pause_s)
            elif not self._any_rank(is_full_disk(self._failure)) or not self._wait_for_room():
                raise self._failure
            self._start(self._last)
            self._settle()

    # ---- in the loop ---------------------------------------------------------------------------------------------

    def _agree_on_job(self) -> str:
        """Returns a name that no other job has: a process that outlived its job cannot write into folders of this one."""
        # Rank 0's random bits count for all. Seven bytes fit into a signed 64-bit integer.
        own_bits = torch.tensor([int.from_bytes(os.urandom(7), "little")], device=self._device)
        return f"{int(gather_blocks(own_bits, self._group)[0]):014x}"

    def _settle(self) -> None:
        save, self._under_way = self._under_way, None
        if save is None:
            return
        try:
            # Without a time limit: the slowest disk decides.
            when_done_on_every_rank(save.written, self._device, self._group)
            when_done_on_every_rank(save.published or _done(), self._device, self._group)
        except BaseException as error:
            save.is_abandoned.set()
            if save.published is not None:
                save.published.exception()
                # No rank writes there any more: all ranks have reported.
                shutil.rmtree(save.unfinished, ignore_errors=True)
            # Errors of these types are raised on all ranks or none, so the collective below is called by all.
            if not isinstance(error, UserError | OSError) or not self._is_transient_for_all(error):
                raise
            self._failure = error

    def _is_transient_for_all(self, error: UserError | OSError) -> bool:
        # One permanent error makes the failure permanent: that rank could not write the next checkpoint either.
        return not self._any_rank(not is_transient(error))

    def _any_rank(self, is_true: bool) -> bool:
        """Collective. One all-gather of one byte per rank."""
        mine = torch.tensor([is_true], dtype=torch.uint8, device=self._device)
        return bool(gather_blocks(mine, self._group).any())

    def _wait_for_room(self) -> bool:
        """Collective. Waits before the next attempt on a full disk; returns False if a rank was asked to stop."""
        self._warn(
            f"the finished run stays in memory, and its last save is repeated every {_FULL_PAUSE_S:g} s: make room at "
            f"{self._checkpoints}, or end the run without its last steps with Ctrl-C or SIGTERM"
        )
        for _ in range(max(1, round(_FULL_PAUSE_S / max(_FULL_LOOK_S, 1e-3)))):
            time.sleep(_FULL_LOOK_S)
            if self._any_rank(self._is_asked_to_stop()):
                return False
        return True

    def _warn(self, what_follows: str) -> None:
        if self._rank == 0:
            _log.warning("%s Therefore %s.", self._failure, what_follows)

    def _end_alone(self) -> None:
        """Waits for the save under way after an error in the loop of this rank, and perhaps of others: calls no collective."""
        save, self._under_way = self._under_way, None
        if save is None:
            return
        try:
            save.written.result()
            # Other ranks may be dead, and their notes may never come: rank 0 waits for them only for a limited time.
            try:
                _result(save.published, _LAST_WAIT_S if self._last_wait_s is None else self._last_wait_s)
            except TimeoutError:
                save.is_abandoned.set()
                _result(save.published)
        except CheckpointError as error:
            _log.warning("%s", error)

    # ---- in the background ---------------------------------------------------------------------------------------

    def _write_own(
        self, save: "_Save", snapshot: Snapshot, rows: Mapping[str, Tensor], shared: Mapping[str, Tensor]
    ) -> None:
        start, stop = snapshot.class_start, snapshot.class_stop
        if self._rank == 0:
            _clear_leftovers(self._checkpoints, but=save.unfinished)
        make_private_folder(self._checkpoints)
        make_private_folder(save.unfinished)
        # In this thread: the loop must not wait for the copy from the GPU.
        self._rows_copy.wait()
        self._shared_copy.wait()
        name = f"head-{start:010d}-{stop:010d}.safetensors"
        entries = {name: write_tensors(save.unfinished / name, rows, start, stop)}
        if self._rank == 0:
            entries[SHARED] = write_tensors(save.unfinished / SHARED, shared)
            if self._class_names:
                entries[CLASSES] = write_file(save.unfinished / CLASSES, [self._class_names])
        text = json.dumps({name: asdict(saved) for name, saved in entries.items()})
        # The note appears by a rename, because rank 0 polls the folder and must never read half of it.
        note = save.note(self._rank)
        write_file(note.with_suffix(".tmp"), [text.encode()])
        note.with_suffix(".tmp").rename(note)

    def _publish(self, save: "_Save", snapshot: Snapshot) -> None:
        if save.written.exception() is not None:
            return  # the loop raises that error on all ranks
        entries = self._wait_for_notes(save)
        # JSON has no NaN and no infinity.
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
        # The manifest has what the notes said; they are not part of a checkpoint.
        for rank in range(self._world_size):
            save.note(rank).unlink()
        # Everything in the folder is on the disk before the folder gets the name of a checkpoint.
        flush(save.unfinished)
        _rename_over(save.unfinished, save.final)
        flush(self._checkpoints)
        # Only now: a restart counts as progress what a later start can resume from.
        own_status().checkpoint(snapshot.step)
        self._on_published(snapshot.step)
        for old in folders_to_delete(self._checkpoints, save.final, self._keep):
            # Renamed first: a partly removed checkpoint must not look like a complete one.
            name = checkpoint_folder(self._checkpoints, step_of(old)).name
            _remove(old.rename(old.with_name(f".{name}.{self._job}.partial")))

    def _wait_for_notes(self, save: "_Save") -> dict[str, SavedFile]:
        notes = [save.note(rank) for rank in range(self._world_size)]
        while missing := set(notes) - set(save.unfinished.iterdir()):
            # Polled, because the ranks share nothing but the file system, and it may be on the network.
            if save.is_abandoned.wait(_POLL_S):
                raise CheckpointError(
                    f"The checkpoint {save.final} was not finished: {', '.join(sorted(note.name for note in missing)[:8])} "
                    f"never appeared. The older checkpoints are unchanged."
                )
        entries: dict[str, SavedFile] = {}
        for note in notes:
            values = json.loads(note.read_text(encoding="utf-8"))
            entries |= {name: SavedFile(**entry) for name, entry in values.items()}
        return entries

    def _named(self, action: Callable[[], T], final: Path) -> Callable[[], T]:
        """Wraps an action of the background thread: errors of the disk become errors that name rank, host and checkpoint."""

        def act() -> T:
            try:
                return action()
            # torch raises a RuntimeError if a GPU fails during the copy.
            except (OSError, RuntimeError) as error:
                raise CheckpointError(
                    f"Rank {self._rank} on {socket.gethostname()} cannot write the checkpoint {final}: {error}. "
                    f"The older checkpoints are unchanged."
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
    """Publishes the folder. A folder cannot be replaced in one step, so an existing one is first moved aside, to a name
    under which `published` still finds it.
    """
    aside = set_aside_name(final)
    if final.exists():
        _remove(aside)
        final.rename(aside)
    unfinished.rename(final)
    _remove(aside)


def _clear_leftovers(checkpoints: Path, *, but: Path) -> None:
    """Cleans up after a crash: removes unfinished saves, and restores checkpoints whose replacement never appeared."""
    for leftover in unfinished_saves(checkpoints):
        if leftover != but:
            _remove(leftover)
    for aside in set_aside_folders(checkpoints):
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


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


def _result(future: Future[None] | None, timeout_s: float | None = None) -> None:
    if future is not None:
        future.result(timeout_s)
