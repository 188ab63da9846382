"""State <-> disk: what comes back, on how many ranks, and what a crash or a damaged disk leaves."""

import json
import random
import resource
import shutil
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.conftest import fork_server
from tests.forked import Forked

from megaclass.checkpoint.load import load_shared, newest_whole, saved_rows
from megaclass.checkpoint.manifest import check_files, read_manifest
from megaclass.checkpoint.retention import checkpoint_folder
from megaclass.checkpoint.save import CheckpointWriter, Snapshot
from megaclass.errors import CheckpointError
from megaclass.head.centres import class_range
from megaclass.head.partial_fc import PartialFC
from megaclass_launch.errors import UserError

CPU = torch.device("cpu")
NUM_CLASSES = 13
CONFIG = '[train]\nrun_dir = "Läufe\\\\1"\n'


def shared_at(step):
    return {"backbone.weight": torch.full((3, 2), float(step)), "backbone.num_batches": torch.tensor(step)}


def rows_at(step, start=0, stop=NUM_CLASSES):
    return {"weight": torch.arange(start, stop, dtype=torch.float32)[:, None] + step * torch.ones(1, 4)}


def save_checkpoint(checkpoints, *, keep=9, **snapshot):
    """Collective. Writes one and waits for it."""
    with CheckpointWriter(checkpoints, config=CONFIG, keep=keep, device=CPU) as writer:
        return writer.save(Snapshot(**snapshot))


def save(checkpoints, step, *, keep=9, num_ranks=1, rank=0):
    classes = class_range(NUM_CLASSES, rank, num_ranks)
    return save_checkpoint(
        checkpoints,
        step=step,
        shared=shared_at(step),
        head_rows=rows_at(step, classes.start, classes.stop),
        class_start=classes.start,
        class_stop=classes.stop,
        num_classes=NUM_CLASSES,
        keep=keep,
    )


def load(folder):
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    parts = sorted(saved_rows(folder, manifest, 0, manifest.num_classes), key=lambda part: part[0])
    return manifest, load_shared(folder), torch.cat([rows["weight"] for _, rows in parts])


def holds_step(folder, step):
    manifest, shared, weight = load(folder)
    return (
        manifest.step == step
        and all(torch.equal(shared[name], tensor) for name, tensor in shared_at(step).items())
        and torch.equal(weight, rows_at(step)["weight"])
    )


def names(checkpoints):
    return sorted(path.name for path in checkpoints.iterdir())


# --- what comes back ---


def test_what_was_saved_comes_back_with_step_classes_world_and_settings(tmp_path):
    folder = save(tmp_path, 7)
    assert folder == tmp_path / "step-000000007" == checkpoint_folder(tmp_path, 7)
    assert holds_step(folder, 7)
    manifest = read_manifest(folder)
    assert (manifest.step, manifest.num_classes, manifest.world_size, manifest.config) == (7, NUM_CLASSES, 1, CONFIG)
    assert names(folder) == ["head-0000000000-0000000013.safetensors", "manifest.json", "shared.safetensors"]
    assert newest_whole(tmp_path) == (folder, [])


def test_every_dtype_and_a_view_of_shared_memory_come_back_bit_for_bit(tmp_path):
    whole = torch.randn(4, 6)
    tensors = {
        "view": whole[:, ::2],
        "same memory": whole,
        "bf16": whole.bfloat16(),
        "int64": torch.tensor([2**62]),
        "float64": torch.tensor(1 / 3, dtype=torch.float64),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        "empty": torch.empty(0, 3),
    }
    folder = save_checkpoint(
        tmp_path,
        step=1,
        shared=tensors,
        head_rows=rows_at(1),
        class_start=0,
        class_stop=NUM_CLASSES,
        num_classes=NUM_CLASSES,
    )
    loaded = load_shared(folder)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and loaded[name].shape == tensor.shape
        assert torch.equal(_bytes_of(loaded[name]), _bytes_of(tensor))


def _bytes_of(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def _head():
    return PartialFC(4, NUM_CLASSES, sample_rate=0.5, seed=3)


def _train_and_save(checkpoints):
    head = _head()
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        embeddings = torch.randn(5, 4, generator=generator, requires_grad=True)
        head(embeddings, torch.randint(NUM_CLASSES, (5,), generator=generator)).backward()
        head.step(lr=0.1)
    save_checkpoint(
        checkpoints,
        step=2,
        shared={},
        head_rows=head.rows(),
        class_start=head.classes.start,
        class_stop=head.classes.stop,
        num_classes=NUM_CLASSES,
    )
    return {name: rows.clone() for name, rows in head.rows().items()}


def _load(folder):
    head = _head()
    for first_class, rows in saved_rows(folder, read_manifest(folder), head.classes.start, head.classes.stop):
        head.load_rows(first_class, rows)
    return {name: rows.clone() for name, rows in head.rows().items()}


def test_centres_and_their_momentum_saved_by_3_ranks_load_on_1_2_or_4_bit_for_bit(run_ranks, tmp_path):
    saved = run_ranks(3, _train_and_save, tmp_path)
    folder = checkpoint_folder(tmp_path, 2)
    check_files(folder, read_manifest(folder))
    assert read_manifest(folder).world_size == 3
    assert len(saved[0]) > 1 and all(bool(rows.any()) for rows in saved[0].values())
    for size in (1, 2, 4):
        loaded = run_ranks(size, _load, folder)
        for name in saved[0]:
            whole = torch.cat([part[name] for part in saved])
            assert torch.equal(torch.cat([part[name] for part in loaded]), whole), (size, name)


# --- how many are kept ---


def test_the_newest_are_kept(tmp_path):
    for step in (1, 2, 3, 10, 200):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-000000010", "step-000000200"]
    save(tmp_path, 300, keep=1)
    assert names(tmp_path) == ["step-000000300"]


def test_a_checkpoint_just_saved_is_never_removed_for_one_of_a_later_step(tmp_path):
    save(tmp_path, 100)
    (save(tmp_path, 200) / "manifest.json").unlink()
    save(tmp_path, 150, keep=1)
    assert names(tmp_path) == ["step-000000150", "step-000000200"]
    assert newest_whole(tmp_path)[0] == checkpoint_folder(tmp_path, 150)


def test_what_a_crash_left_unfinished_is_ignored_and_cleared_by_the_next_save(tmp_path):
    save(tmp_path, 1)
    for leftover in (".step-000000002.partial", ".step-000000005.partial"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "shared.safetensors").write_bytes(b"half")
    assert newest_whole(tmp_path) == (checkpoint_folder(tmp_path, 1), [])
    assert holds_step(save(tmp_path, 2), 2)
    assert names(tmp_path) == ["step-000000001", "step-000000002"]


def test_a_step_saved_again_replaces_what_was_there(tmp_path):
    (save(tmp_path, 4) / "shared.safetensors").write_bytes(b"damaged")
    assert holds_step(save(tmp_path, 4), 4)


# --- what is damaged ---


def truncate(folder):
    path = folder / "shared.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    return f"{path} has {path.stat().st_size} bytes, but manifest.json says {path.stat().st_size + 1}."


def flip(folder):
    path = next(folder.glob("head-*"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x10
    path.write_bytes(content)
    return f"{path} is damaged: its SHA-256 is not the one in manifest.json."


def remove_shard(folder):
    path = next(folder.glob("head-*"))
    path.unlink()
    return f"{path} is missing, though manifest.json lists it."


def remove_manifest(folder):
    (folder / "manifest.json").unlink()
    return f"{folder / 'manifest.json'} is missing"


def cut_manifest(folder):
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:100])
    return f"{path} is not a manifest: JSONDecodeError"


def change_step(folder):
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": 3'))
    return f"{path} is damaged: its SHA-256 is not the one it states."


def other_format(folder):
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 99'))
    return f"{path} has format 99, not 1: it was written by another version."


def shard_of_another_step(folder):
    name = next(folder.glob("head-*")).name
    shutil.copy(folder.with_name("step-000000001") / name, folder / name)
    return f"{folder / name} is damaged"


def file_instead_of_folder(folder):
    shutil.rmtree(folder)
    folder.write_text("")
    return f"{folder / 'manifest.json'} is not a manifest: NotADirectoryError"


DAMAGES = [
    truncate,
    flip,
    remove_shard,
    remove_manifest,
    cut_manifest,
    change_step,
    other_format,
    shard_of_another_step,
    file_instead_of_folder,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__.replace("_", " "))
def test_a_damaged_checkpoint_is_passed_over_with_the_reason_and_the_older_one_used(tmp_path, damage):
    older = save(tmp_path, 1)
    reason = damage(save(tmp_path, 2))
    found, reasons = newest_whole(tmp_path)
    assert found == older and holds_step(older, 1)
    assert len(reasons) == 1 and reasons[0].startswith(reason)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"null", b"3", b'{"format": 1}', b"\xff\xfe", b"[" * 100_000], ids=repr
)
def test_what_is_no_manifest_is_refused_as_such(tmp_path, content):
    folder = save(tmp_path, 1)
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="is not a manifest"):
        read_manifest(folder)


def test_without_any_whole_checkpoint_there_is_none_and_every_reason_is_given(tmp_path):
    assert newest_whole(tmp_path / "nowhere") == (None, [])
    for step in (1, 2):
        remove_manifest(save(tmp_path, step))
    found, reasons = newest_whole(tmp_path)
    assert found is None and len(reasons) == 2


def forge(folder, change):
    """A manifest that is in order by itself, with other files in it."""
    from dataclasses import replace

    manifest = read_manifest(folder)
    files = dict(manifest.files)
    change(files)
    replace(manifest, files=files).write(folder)


@pytest.mark.parametrize(("field", "value"), [("num_classes", 0), ("world_size", 0), ("step", -1)])
def test_a_forged_manifest_with_an_impossible_number_is_refused(tmp_path, field, value):
    from dataclasses import replace

    folder = save(tmp_path, 1)
    replace(read_manifest(folder), **{field: value}).write(folder)
    with pytest.raises(CheckpointError, match=rf"is not a manifest: TypeError: {field} is '{value}', expected"):
        read_manifest(folder)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/b", "..", ".", "", "a\0b"])
def test_a_file_name_that_climbs_out_of_the_folder_is_refused(tmp_path, name):
    folder = save(tmp_path, 1)
    shutil.copy(folder / "shared.safetensors", tmp_path / "outside")
    forge(folder, lambda files: files.update({name: files["shared.safetensors"]}))
    with pytest.raises(CheckpointError):
        check_files(folder, read_manifest(folder))


def test_a_checkpoint_that_lacks_classes_or_the_backbone_is_not_whole(tmp_path):
    folder = save(tmp_path, 1)
    forge(folder, lambda files: files.pop("head-0000000000-0000000013.safetensors"))
    with pytest.raises(CheckpointError, match="centres up to class 0 of 13 without a gap, and the file shared"):
        check_files(folder, read_manifest(folder))
    folder = save(tmp_path, 2)
    forge(folder, lambda files: files.pop("shared.safetensors"))
    with pytest.raises(CheckpointError, match="centres up to class 13 of 13 without a gap, and no file shared"):
        check_files(folder, read_manifest(folder))


def mutate(folder, chance):
    """Flips a bit, cuts, or swaps a byte of one file; True when the checkpoint is refused or holds the same all the same."""
    path = chance.choice(sorted(folder.iterdir()))
    original = path.read_bytes()
    content = bytearray(original)
    place = chance.randrange(len(content))
    kind = chance.randrange(3)
    if kind == 0:
        content[place] ^= 1 << chance.randrange(8)
    elif kind == 1:
        del content[place:]
    else:
        content[place] = chance.randrange(256)
    path.write_bytes(content)
    try:
        manifest = read_manifest(folder)
        check_files(folder, manifest)
    except CheckpointError:
        return True
    finally:
        path.write_bytes(original)
    # What is left: no change at all, or one that JSON does not see.
    return bytes(content) == original or (path.name == "manifest.json" and manifest == read_manifest(folder))


def check_mutations(tmp_path, number):
    folder = save(tmp_path, 1)
    chance = random.Random(1)
    assert all(mutate(folder, chance) for _ in range(number))
    assert holds_step(folder, 1)


def test_mutated_files_are_all_found_before_use(tmp_path):
    check_mutations(tmp_path, 300)


# --- a disk that refuses ---


@contextmanager
def _files_at_most(num_bytes):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _save_where_one_rank_cannot_write(checkpoints, broken):
    """broken: rank -> the folder it takes for the run's, as on a host that does not see the others' disk."""
    rank = dist.get_rank()
    try:
        save(broken.get(rank, checkpoints), 2, num_ranks=dist.get_world_size(), rank=rank)
    except UserError as error:
        return str(error)
    return "saved"


def _save_with_full_disk_on_rank_1(checkpoints):
    with _files_at_most(10 if dist.get_rank() == 1 else resource.RLIM_INFINITY):
        return _save_where_one_rank_cannot_write(checkpoints, {})


def test_a_rank_that_cannot_write_ends_the_save_on_all_ranks_and_is_named(run_ranks, tmp_path):
    checkpoints = tmp_path / "checkpoints"
    save(checkpoints, 1)
    (tmp_path / "file").write_text("")
    messages = run_ranks(3, _save_where_one_rank_cannot_write, checkpoints, {1: tmp_path / "file" / "checkpoints"})
    assert messages[1].startswith("Rank 1 on ") and "cannot write the checkpoint" in messages[1]
    assert messages[0] == messages[2] == f"rank 1: {messages[1]}"
    assert newest_whole(checkpoints) == (checkpoint_folder(checkpoints, 1), [])


def test_a_disk_that_takes_no_more_ends_the_save_on_all_ranks_and_the_next_one_works(run_ranks, tmp_path):
    save(tmp_path, 1)
    messages = run_ranks(2, _save_with_full_disk_on_rank_1, tmp_path)
    assert all("Rank 1 on " in message and "cannot write the checkpoint" in message for message in messages)
    assert newest_whole(tmp_path) == (checkpoint_folder(tmp_path, 1), [])
    assert run_ranks(2, _save_where_one_rank_cannot_write, tmp_path, {}) == ["saved", "saved"]
    assert holds_step(checkpoint_folder(tmp_path, 2), 2)


def test_a_file_where_the_folder_should_be_is_an_error_that_names_it(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(CheckpointError, match=r"Rank 0 on .* cannot write the checkpoint .*checkpoints/step-000000001"):
        save(tmp_path / "checkpoints", 1)


# --- killed while saving ---


def _save_for_ever(checkpoints, first_step, saved):
    for step in range(first_step, first_step + 10_000):
        save(checkpoints, step, keep=2)
        saved.send(step)


def check_kills(checkpoints: Path, number: int) -> None:
    """Kills a process that does nothing but save, again and again in one folder."""
    chance = random.Random(2)
    newest = 0
    for _ in range(number):
        ours, theirs = fork_server.Pipe(duplex=False)
        with Forked(_save_for_ever, checkpoints, newest + 1, theirs):
            theirs.close()
            assert ours.poll(60)
            time.sleep(chance.uniform(0, 0.03))
        acknowledged = newest
        try:
            while True:
                acknowledged = ours.recv()
        except EOFError:
            pass
        found, reasons = newest_whole(checkpoints)
        assert found is not None and reasons == []
        newest = read_manifest(found).step
        # The one after the last that was told may have been published, too.
        assert newest - acknowledged in (0, 1)
        assert holds_step(found, newest)


@pytest.mark.ranks
def test_a_process_killed_while_saving_leaves_the_previous_checkpoint_whole(tmp_path):
    check_kills(tmp_path, 5)


@pytest.mark.soak
def test_200_processes_killed_while_saving_leave_the_previous_checkpoint_whole(tmp_path):
    check_kills(tmp_path, 200)


def test_the_manifest_is_json_that_any_tool_reads(tmp_path):
    values = json.loads((save(tmp_path, 3) / "manifest.json").read_text())
    assert values["format"] == 1 and values["step"] == 3
    assert values["files"]["shared.safetensors"]["num_bytes"] > 0
