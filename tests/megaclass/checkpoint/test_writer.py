"""Saves in the background: what is written, when it is published, and what a fault at any of its system calls leaves."""

import contextlib
import errno
import io
import json
import math
import os
import shutil
import subprocess
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tests.forked import run_forked

import megaclass.checkpoint.save as save_module
from megaclass.checkpoint.load import first_whole, load_rank_state, load_shared, newest_whole, saved_rows
from megaclass.checkpoint.manifest import check_files, read_manifest
from megaclass.checkpoint.retention import best_folder, checkpoint_folder
from megaclass.checkpoint.save import CheckpointWriter, Snapshot
from megaclass.checkpoint.tensor_file import write_tensors
from megaclass.distributed import agreement
from megaclass.errors import CheckpointError
from megaclass.head.centres import class_range
from megaclass_launch.errors import UserError, is_transient
from megaclass_launch.messages import messages_on_stderr
from megaclass_launch.rank_status import FD_NAME, StatusPage, own_status

CPU = torch.device("cpu")
NUM_CLASSES = 11


def snapshot_at(step, **metrics):
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    classes = class_range(NUM_CLASSES, rank, size)
    return Snapshot(
        step=step,
        shared={"backbone.weight": torch.full((3, 2), float(step)), "backbone.count": torch.tensor(step)},
        head_rows={"weight": torch.arange(classes.start, classes.stop, dtype=torch.float32)[:, None] + step},
        class_start=classes.start,
        class_stop=classes.stop,
        num_classes=NUM_CLASSES,
        rank_state={"number": torch.tensor(100 * step + rank)},
        metrics=metrics,
    )


def writer_for(checkpoints, *, keep=9, **options):
    return CheckpointWriter(checkpoints, config="[train]\n", keep=keep, device=CPU, **options)


def holds_step(folder, step):
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    rows = sorted(saved_rows(folder, manifest, 0, NUM_CLASSES), key=lambda part: part[0])
    weight = torch.cat([part["weight"] for _, part in rows])[:, 0]
    is_shared_right = bool((load_shared(folder)["backbone.weight"] == step).all())
    return manifest.step == step and is_shared_right and weight.tolist() == [step + c for c in range(NUM_CLASSES)]


def steps(checkpoints):
    return [int(path.name.removeprefix("step-")) for path in sorted(checkpoints.glob("step-*"))]


@pytest.fixture
def rank_page(monkeypatch):
    """rank_page(number): the process reports to the file of this number, as a rank does to that of its agent."""

    def report_to(number: int) -> None:
        monkeypatch.setenv(FD_NAME, str(number))
        own_status.cache_clear()

    yield report_to
    own_status.cache_clear()


def test_a_published_checkpoint_is_reported_to_the_agent_that_keeps_the_rank(tmp_path, rank_page):
    page = StatusPage()
    rank_page(page.fileno())
    assert page.read().checkpoint_step == -1
    with writer_for(tmp_path) as writer:
        writer.save(snapshot_at(3))
        writer.save(snapshot_at(7))
    assert page.read().checkpoint_step == 7


def test_a_step_is_never_written_into_another_file_that_has_the_number(tmp_path, rank_page):
    with (tmp_path / "other").open("w+b") as other:
        rank_page(other.fileno())
        own_status().checkpoint(7)
    assert (tmp_path / "other").read_bytes() == b""


class Gate:
    """Holds every write of the background thread until it is opened."""

    def __init__(self, monkeypatch):
        self.reached = threading.Event()
        self.opened = threading.Event()

        def held(*args):
            self.reached.set()
            assert self.opened.wait(30)
            return write_tensors(*args)

        monkeypatch.setattr(save_module, "write_tensors", held)


# --- in the background ---


def test_the_loop_goes_on_while_a_save_is_written_and_what_it_changes_is_not_in_it(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    with writer_for(tmp_path) as writer:
        snapshot = snapshot_at(1)
        writer.save(snapshot)
        for tensor in (*snapshot.shared.values(), *snapshot.head_rows.values()):
            tensor.fill_(-1)
        assert newest_whole(tmp_path) == (None, [])
        gate.opened.set()
    assert holds_step(checkpoint_folder(tmp_path, 1), 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_a_gpu_does_next_is_not_in_the_save(tmp_path):
    device = torch.device("cuda")
    rows = torch.arange(NUM_CLASSES, device=device, dtype=torch.float32)[:, None] * torch.ones(
        1, 1 << 18, device=device
    )
    images = torch.randn(8, 3, 64, 64, device=device).to(memory_format=torch.channels_last)
    expected = images.cpu().contiguous()
    snapshot = Snapshot(
        step=1,
        shared={"backbone.images": images},
        head_rows={"weight": rows},
        class_start=0,
        class_stop=NUM_CLASSES,
        num_classes=NUM_CLASSES,
    )
    with CheckpointWriter(tmp_path, config="", keep=1, device=device) as writer:
        for _ in range(3):
            writer.save(snapshot)
            rows.add_(100)
            images.mul_(2)
            writer.finish()
            folder = checkpoint_folder(tmp_path, 1)
            check_files(folder, read_manifest(folder))
            [(_, saved)] = saved_rows(folder, read_manifest(folder), 0, NUM_CLASSES)
            assert torch.equal(saved["weight"], (rows - 100).cpu())
            assert torch.equal(load_shared(folder)["backbone.images"], expected)
            expected = expected * 2


def test_without_async_the_checkpoint_is_there_when_the_call_returns(tmp_path):
    with writer_for(tmp_path, is_asynchronous=False) as writer:
        assert holds_step(writer.save(snapshot_at(1)), 1)


def test_a_save_waits_for_the_one_before_it(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    with writer_for(tmp_path) as writer:
        writer.save(snapshot_at(1))
        threading.Timer(0.2, gate.opened.set).start()
        writer.save(snapshot_at(2))
        assert holds_step(checkpoint_folder(tmp_path, 1), 1)
    assert holds_step(checkpoint_folder(tmp_path, 2), 2)


def _save_with_a_slow_rank(checkpoints):
    with writer_for(checkpoints) as writer:
        writer.save(snapshot_at(1))
        writer.finish()
        if dist.get_rank() == 1:
            go = checkpoints / "go"

            def slow(*args):
                while not go.exists():
                    time.sleep(0.01)
                return write_tensors(*args)

            save_module.write_tensors = slow
        try:
            writer.save(snapshot_at(2))
            if dist.get_rank() == 0:
                time.sleep(0.3)
                assert newest_whole(checkpoints)[0] == checkpoint_folder(checkpoints, 1)
                (checkpoints / "go").touch()
            writer.finish()
        finally:
            save_module.write_tensors = write_tensors
        return holds_step(checkpoint_folder(checkpoints, 2), 2)


def test_nothing_is_published_before_every_rank_has_written(run_ranks, tmp_path):
    assert run_ranks(3, _save_with_a_slow_rank, tmp_path) == [True] * 3


def _save_on_a_disk_slower_than_the_time_out(checkpoints):
    group = dist.new_group(timeout=timedelta(seconds=2))

    def slow(*args):
        time.sleep(3.0)
        return write_tensors(*args)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(agreement, "_SIGN_OF_LIFE_S", 0.3)
        if dist.get_rank() == 1:
            monkeypatch.setattr(save_module, "write_tensors", slow)
        with writer_for(checkpoints, group=group) as writer:
            folder = writer.save(snapshot_at(1))
    return holds_step(folder, 1)


def test_a_disk_slower_than_the_time_out_of_collectives_is_waited_for(run_ranks, tmp_path):
    assert run_ranks(2, _save_on_a_disk_slower_than_the_time_out, tmp_path) == [True, True]


def _save_where_rank_1_fails(checkpoints, code, num_failures, last_step, asked_after=None):
    """Steps 1 to `last_step`; from step 2 on rank 1's disk refuses `num_failures` times. What was raised and what was said.

    asked_after: number of warnings after which rank 0 is asked to stop.
    """
    left, said = num_failures, io.StringIO()

    def broken(*args):
        nonlocal left
        left -= 1
        if left < 0:
            return write_tensors(*args)
        raise OSError(code, os.strerror(code))

    with messages_on_stderr(), contextlib.redirect_stderr(said), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(save_module, "_PAUSES_S", (0.1, 0.1, 0.1))
        monkeypatch.setattr(save_module, "_FULL_PAUSE_S", 0.1)
        monkeypatch.setattr(save_module, "_FULL_LOOK_S", 0.1)

        def is_asked():
            return asked_after is not None and dist.get_rank() == 0 and said.getvalue().count("WARNING") > asked_after

        try:
            with writer_for(checkpoints, is_asked_to_stop=is_asked) as writer:
                writer.save(snapshot_at(1))
                writer.finish()
                if dist.get_rank() == 1:
                    monkeypatch.setattr(save_module, "write_tensors", broken)
                for step in range(2, last_step + 1):
                    writer.save(snapshot_at(step))
        except UserError as error:
            return str(error), is_transient(error), said.getvalue()
    return "saved", None, said.getvalue()


def test_training_goes_on_after_a_save_for_which_a_disk_was_full_and_the_next_one_works(run_ranks, tmp_path):
    (raised, _, said), *others = run_ranks(3, _save_where_rank_1_fails, tmp_path, errno.ENOSPC, 1, 3)
    assert raised == "saved" and all(raised == "saved" for raised, _, _ in others)
    assert "WARNING megaclass: rank 1: Rank 1 on " in said and "No space left on device" in said
    assert "training continues" in said
    assert not any(text for _, _, text in others), "one rank warns for all"
    assert steps(tmp_path) == [1, 3] and holds_step(checkpoint_folder(tmp_path, 3), 3)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EMFILE], ids=["ENOSPC", "EIO", "EMFILE"])
def test_the_last_save_is_tried_again_where_a_disk_fails_for_a_moment(run_ranks, tmp_path, code):
    results = run_ranks(2, _save_where_rank_1_fails, tmp_path, code, 2, 2)
    assert [raised for raised, _, _ in results] == ["saved", "saved"]
    assert "the save is repeated in 0.1 s" in results[0][2]
    assert steps(tmp_path) == [1, 2] and holds_step(checkpoint_folder(tmp_path, 2), 2)


def test_the_last_save_waits_on_a_full_disk_until_there_is_room(run_ranks, tmp_path):
    results = run_ranks(3, _save_where_rank_1_fails, tmp_path, errno.ENOSPC, 12, 2)
    assert [raised for raised, _, _ in results] == ["saved"] * 3
    said = results[0][2]
    assert "the finished run stays in memory, and its last save is repeated every 0.1 s: make room at" in said
    assert steps(tmp_path) == [1, 2] and holds_step(checkpoint_folder(tmp_path, 2), 2)


def test_a_rank_that_is_asked_to_stop_ends_the_wait_for_room_on_all_ranks_and_allows_a_restart(run_ranks, tmp_path):
    results = run_ranks(3, _save_where_rank_1_fails, tmp_path, errno.ENOSPC, 99, 2, 6)
    assert all("Rank 1 on " in raised and "No space left on device" in raised for raised, _, _ in results)
    assert all(may_pass for _, may_pass, _ in results)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"], "nothing unfinished is left"
    assert holds_step(checkpoint_folder(tmp_path, 1), 1)


def test_a_disk_with_errors_that_last_ends_the_last_save_after_four_attempts(run_ranks, tmp_path):
    results = run_ranks(2, _save_where_rank_1_fails, tmp_path, errno.EIO, 99, 2)
    assert all("Input/output error" in raised and may_pass for raised, may_pass, _ in results)
    assert results[0][2].count("the save is repeated in 0.1 s") == 3


def _save_without_permission(checkpoints):
    """The folder loses its write permission after the first save. Errors of the last save; the second is permanent."""
    if os.getuid() == 0:
        os.chown(checkpoints, 65534, 65534)
        os.setuid(65534)
    with pytest.raises(CheckpointError) as caught, writer_for(checkpoints) as writer:
        writer.save(snapshot_at(1))
        writer.finish()
        checkpoints.chmod(0o500)
        writer.save(snapshot_at(2))
    is_whole = holds_step(checkpoint_folder(checkpoints, 1), 1)
    print(json.dumps([str(caught.value), is_transient(caught.value), is_whole]))


@pytest.mark.parametrize("last_step", [3, 2], ids=["at the next save", "at the end"])
def test_an_error_that_does_not_pass_is_raised_on_all_ranks(run_ranks, tmp_path, last_step):
    results = run_ranks(3, _save_where_rank_1_fails, tmp_path, errno.EACCES, 99, last_step)
    assert all("Rank 1 on " in raised and "Permission denied" in raised for raised, _, _ in results)
    assert not any(may_pass for _, may_pass, _ in results)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"], "nothing unfinished is left"


def test_a_folder_that_loses_its_write_permission_ends_the_run_at_once_and_keeps_the_older_checkpoint():
    outside = Path(tempfile.mkdtemp(dir="/tmp"))
    checkpoints = outside / "checkpoints"
    checkpoints.mkdir()
    outside.chmod(0o755)
    ended = run_forked(_save_without_permission, checkpoints)
    shutil.rmtree(outside)
    assert ended.returncode == 0, ended.stderr
    error, may_pass, is_whole = json.loads(ended.stdout)
    assert "Permission denied" in error and str(checkpoints) in error and "older checkpoints are unchanged" in error
    assert not may_pass and is_whole


def test_a_loop_that_ends_with_an_error_first_lets_the_save_finish(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    with pytest.raises(ZeroDivisionError), writer_for(tmp_path) as writer:
        writer.save(snapshot_at(1))
        threading.Timer(0.2, gate.opened.set).start()
        raise ZeroDivisionError
    assert holds_step(checkpoint_folder(tmp_path, 1), 1)


def _lose_the_other_rank(checkpoints):
    said = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        contextlib.redirect_stderr(said),
        messages_on_stderr(),
        contextlib.suppress(ConnectionResetError),
        writer_for(checkpoints) as writer,
    ):
        monkeypatch.setattr(save_module, "_LAST_WAIT_S", 0.3)
        # Rank 1 never comes to this save: as if it had died in the step before.
        if dist.get_rank() == 0:
            writer.save(snapshot_at(1))
            raise ConnectionResetError
    return said.getvalue()


def test_a_save_that_cannot_be_finished_any_more_says_so(run_ranks, tmp_path):
    said = run_ranks(2, _lose_the_other_rank, tmp_path)[0]
    assert (
        "step-000000001 was not finished: rank-00001.json never appeared. The older checkpoints are unchanged." in said
    )
    assert newest_whole(tmp_path) == (None, [])


def test_what_each_rank_keeps_for_itself_comes_back_to_it(run_ranks, tmp_path):
    run_ranks(3, _save_once, tmp_path)
    folder = checkpoint_folder(tmp_path, 1)
    manifest = read_manifest(folder)
    assert [int(load_rank_state(folder, manifest, rank)["number"]) for rank in range(3)] == [100, 101, 102]
    assert all(set(rows) == {"weight"} for _, rows in saved_rows(folder, manifest, 0, NUM_CLASSES))


def _save_once(checkpoints):
    with writer_for(checkpoints) as writer:
        writer.save(snapshot_at(1))


def test_a_process_that_outlived_its_job_cannot_write_into_the_saves_of_the_next_one(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    old = writer_for(tmp_path)
    old.save(snapshot_at(1))
    # Its thread must be held by the gate before the gate is removed for the next job.
    assert gate.reached.wait(30)
    monkeypatch.setattr(save_module, "write_tensors", write_tensors)
    with writer_for(tmp_path) as new:
        new.save(snapshot_at(1))
    before = {path.name: path.read_bytes() for path in checkpoint_folder(tmp_path, 1).iterdir()}
    gate.opened.set()
    with pytest.raises(CheckpointError, match="cannot write"):
        old.finish()
    assert {path.name: path.read_bytes() for path in checkpoint_folder(tmp_path, 1).iterdir()} == before


# --- which are kept ---


def save_all(checkpoints, metrics, *, keep):
    with writer_for(checkpoints, keep=keep) as writer:
        for step, values in enumerate(metrics, start=1):
            writer.save(snapshot_at(step, **values))


def test_the_last_ones_and_the_one_of_the_lowest_loss_are_kept(tmp_path):
    save_all(tmp_path, [{"loss": loss} for loss in (3.0, 1.0, 2.0, math.nan, 2.5)], keep=2)
    assert steps(tmp_path) == [2, 4, 5]
    assert best_folder(sorted(tmp_path.iterdir())) == checkpoint_folder(tmp_path, 2)


def test_verification_accuracy_counts_before_the_loss(tmp_path):
    metrics = [{"loss": 1.0}, {"loss": 3.0, "verification_accuracy": 0.9}, {"loss": 2.0, "verification_accuracy": 0.8}]
    save_all(tmp_path, [*metrics, {"loss": 2.0}], keep=1)
    assert steps(tmp_path) == [2, 4]


def test_without_verification_the_accuracy_of_classification_counts_before_the_loss(tmp_path):
    metrics = [{"loss": 1.0}, {"loss": 3.0, "classification_top_1": 0.9}, {"loss": 2.0, "classification_top_1": 0.8}]
    save_all(tmp_path, [*metrics, {"loss": 2.0}], keep=1)
    assert steps(tmp_path) == [2, 4]
    assert best_folder(sorted(tmp_path.iterdir())) == checkpoint_folder(tmp_path, 2)


def test_a_damaged_checkpoint_is_never_the_best(tmp_path):
    save_all(tmp_path, [{"loss": 1.0}], keep=1)
    (checkpoint_folder(tmp_path, 1) / "manifest.json").write_text("{}")
    assert best_folder([checkpoint_folder(tmp_path, 1)]) is None
    with writer_for(tmp_path, keep=1) as writer:
        writer.save(snapshot_at(2, loss=2.0))
    assert steps(tmp_path) == [2]


def test_a_checkpoint_that_stepped_aside_for_one_that_never_came_is_still_found_and_comes_back(tmp_path):
    save_all(tmp_path, [{}, {}], keep=9)
    # The moment between the two renames of a save of a step that is there already.
    checkpoint_folder(tmp_path, 2).rename(tmp_path / ".step-000000002.replaced")
    found, _ = newest_whole(tmp_path)
    assert found is not None and holds_step(found, 2)
    with writer_for(tmp_path) as writer:
        writer.save(snapshot_at(3))
    assert steps(tmp_path) == [1, 2, 3]
    assert holds_step(checkpoint_folder(tmp_path, 2), 2)


def test_what_users_put_beside_the_checkpoints_is_neither_resumed_nor_removed(tmp_path):
    save_all(tmp_path, [{}], keep=1)
    copies = {"step-000000001-keep", "step-1", ".step-000000001.mine.partial", ".step-000000001-mine.replaced"}
    for name in copies:
        shutil.copytree(checkpoint_folder(tmp_path, 1), tmp_path / name)
    with writer_for(tmp_path, keep=1) as writer:
        writer.save(snapshot_at(2))
        writer.save(snapshot_at(3))
    assert {path.name for path in tmp_path.iterdir()} == copies | {"step-000000003"}
    shutil.rmtree(checkpoint_folder(tmp_path, 3))
    assert newest_whole(tmp_path) == (None, [])


def test_checkpoints_that_do_not_fit_are_passed_over_with_the_reason(tmp_path):
    save_all(tmp_path, [{}, {}, {}], keep=9)

    def fits(folder, manifest):
        if manifest.step > 1:
            raise CheckpointError(f"{folder.name} is of another run")

    found, reasons = newest_whole(tmp_path, fits)
    assert found == checkpoint_folder(tmp_path, 1)
    assert reasons == ["step-000000003 is of another run", "step-000000002 is of another run"]
    assert first_whole([], fits) == (None, [])


# --- the files ---


def test_any_tool_reads_the_files(tmp_path):
    torch.manual_seed(0)
    tensors = {
        "float": torch.randn(3, 5),
        "double": torch.randn(2, dtype=torch.float64),
        "half": torch.randn(7).half(),
        "bf16": torch.randn(3, 3).bfloat16(),
        "long": torch.arange(4),
        "int": torch.arange(3, dtype=torch.int32),
        "byte": torch.arange(5, dtype=torch.uint8),
        "unsigned": torch.arange(5).to(torch.uint16),
        "eight": torch.arange(5).to(torch.float8_e4m3fn),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5),
        "nothing": torch.zeros(0, 4),
        'a "name" ü': torch.ones(1),
    }
    saved = write_tensors(tmp_path / "x.safetensors", tensors)
    assert saved.num_bytes == (tmp_path / "x.safetensors").stat().st_size
    found = load_file(tmp_path / "x.safetensors")
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_a_file_larger_than_what_one_call_writes_is_whole(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, bytes(data[:1000])))
    tensor = torch.arange(10_000)
    write_tensors(tmp_path / "x.safetensors", {"x": tensor})
    monkeypatch.undo()
    assert torch.equal(load_file(tmp_path / "x.safetensors")["x"], tensor)


# --- faults at every system call ---

CALLS = ("open", "write", "fsync", "close", "mkdir", "rename", "unlink", "rmdir")


def at_call(monkeypatch, kth, happens):
    """`happens` before the kth call that changes the disk in a save's own thread; how many there were, so far."""
    seen = [0]

    def counted(name):
        call = getattr(os, name)

        def wrapper(*args, **keywords):
            if threading.current_thread().name.startswith("megaclass-checkpoint"):
                seen[0] += 1
                if seen[0] == kth:
                    happens(name)
            return call(*args, **keywords)

        return wrapper

    for name in CALLS:
        monkeypatch.setattr(os, name, counted(name))
    return seen


def save_over(checkpoints, step):
    """A save that removes an older checkpoint and steps over one of the same number: every kind of call. Tried once."""
    options = {"keep": 1, "is_asked_to_stop": lambda: True}
    with pytest.MonkeyPatch.context() as monkeypatch, writer_for(checkpoints, **options) as writer:
        monkeypatch.setattr(save_module, "_PAUSES_S", ())
        # Asked to stop, it looks once for room on a full disk and ends.
        monkeypatch.setattr(save_module, "_FULL_LOOK_S", 0.0)
        monkeypatch.setattr(save_module, "_FULL_PAUSE_S", 0.0)
        writer.save(snapshot_at(step))


@pytest.fixture
def two_checkpoints(tmp_path):
    """Step 2, and in the place of step 3 something that is not it."""
    checkpoints = tmp_path / "two"
    save_over(checkpoints, 2)
    shutil.copytree(checkpoint_folder(checkpoints, 2), checkpoint_folder(checkpoints, 3))
    return checkpoints


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_a_disk_that_fails_at_any_call_of_a_save_leaves_a_whole_checkpoint_and_the_next_save_works(
    tmp_path, two_checkpoints, code
):
    def refuse(name):
        # A close that fails after an fsync has lost nothing; one in the place of a close would leak the handle.
        if name != "close":
            raise OSError(code, os.strerror(code))

    num_errors = 0
    for kth in range(1, 200):
        checkpoints = Path(shutil.copytree(two_checkpoints, tmp_path / str(kth)))
        with pytest.MonkeyPatch.context() as monkeypatch:
            seen = at_call(monkeypatch, kth, refuse)
            try:
                save_over(checkpoints, 3)
            except CheckpointError as error:
                num_errors += 1
                assert "Rank 0 on " in str(error) and os.strerror(code) in str(error)
        found, _ = newest_whole(checkpoints)
        assert found is not None and (holds_step(found, 2) or holds_step(found, 3))
        save_over(checkpoints, 4)
        assert steps(checkpoints) == [4] and holds_step(checkpoint_folder(checkpoints, 4), 4)
        assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000000004"]
        if seen[0] < kth:
            break
    else:
        pytest.fail("a save of so few files makes fewer calls than that")
    assert num_errors > 15


def _save_and_die(checkpoints, kth):
    with pytest.MonkeyPatch.context() as monkeypatch:
        at_call(monkeypatch, kth, lambda name: os.kill(os.getpid(), 9))
        save_over(checkpoints, 3)


def _die_at_every_call(two_checkpoints, folder):
    """Forks a process per call of a save, which dies at it; the last one finds no call left. Writes their exit codes."""
    codes = []
    while len(codes) < 200 and (not codes or codes[-1] != 0):
        kth = len(codes) + 1
        checkpoints = Path(shutil.copytree(two_checkpoints, folder / str(kth)))
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                _save_and_die(checkpoints, kth)
                code = 0
            finally:
                os._exit(code)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    (folder / "codes.json").write_text(json.dumps(codes))


@pytest.mark.ranks
def test_a_process_killed_at_any_call_of_a_save_leaves_a_whole_checkpoint_and_the_next_save_works(
    tmp_path, two_checkpoints
):
    # A process that has no threads, so it can fork; it imports this module once for all of them.
    done = run_forked(_die_at_every_call, two_checkpoints, tmp_path)
    assert done.returncode == 0, done.stderr
    codes = json.loads((tmp_path / "codes.json").read_text())
    assert set(codes[:-1]) == {-9} and codes[-1] == 0
    assert 15 < len(codes) < 200
    for kth in range(1, len(codes) + 1):
        checkpoints = tmp_path / str(kth)
        found, _ = newest_whole(checkpoints)
        assert found is not None and (holds_step(found, 2) or holds_step(found, 3)), kth
        save_over(checkpoints, 4)
        assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000000004"], kth


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root may mount a small disk")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.ranks
def test_a_disk_that_is_full_ends_the_save_and_frees_what_it_had_taken(small_disk: Path, monkeypatch):
    monkeypatch.setattr(save_module, "_PAUSES_S", (0.0,))
    monkeypatch.setattr(save_module, "_FULL_LOOK_S", 0.0)
    checkpoints = small_disk / "checkpoints"
    no_room = pytest.raises(CheckpointError, match="No space left on device")
    with no_room, writer_for(checkpoints, is_asked_to_stop=lambda: True) as writer:
        writer.save(snapshot_at(1))
        writer.finish()
        big = Snapshot(
            step=2,
            shared={"backbone.weight": torch.zeros(200_000)},
            head_rows=snapshot_at(2).head_rows,
            class_start=0,
            class_stop=NUM_CLASSES,
            num_classes=NUM_CLASSES,
        )
        writer.save(big)
    assert [path.name for path in checkpoints.iterdir()] == ["step-000000001"]
    save_over(checkpoints, 3)
    assert holds_step(checkpoint_folder(checkpoints, 3), 3)
