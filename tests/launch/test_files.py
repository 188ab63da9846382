"""Logs, metrics and results belong to their owner alone, whatever the umask; what a user makes to share follows the umask."""

import errno
import importlib.util
import os
import socket
import stat
import sys
from pathlib import Path

import pytest
from tests.forked import run_forked

from megaclass.cli.main import main
from megaclass_launch import files
from megaclass_launch.files import (
    flush,
    make_private_folder,
    open_private,
    published_file,
    published_folder,
    unique_name,
    write_private,
    write_text,
)

RECIPE = Path(__file__).parents[2] / "recipes" / "demo.toml"
TINY = (
    *("synth.identities=12", "synth.images_per_identity=8", "synth.size=32", "synth.pairs=40"),
    *("backbone.embedding_dim=16", "train.global_batch=16", "train.epochs=1", "export.onnx=false"),
)
HAS_TENSORBOARD = importlib.util.find_spec("tensorboard") is not None
# Models are made to be shared; who may enter the run folder decides its owner.
SHARED = ("model.safetensors",)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize(
    ("mask", "file_mode", "folder_mode"),
    [(0o000, 0o600, 0o700), (0o022, 0o600, 0o700), (0o077, 0o600, 0o700), (0o277, 0o400, 0o500)],
    ids=oct,
)
def test_the_stricter_of_0600_and_the_umask_counts(tmp_path, umask, mask, file_mode, folder_mode):
    umask(mask)
    write_private(tmp_path / "text", "x")
    open_private(tmp_path / "bytes", "ab").close()
    make_private_folder(tmp_path / "folder")
    assert [mode(tmp_path / name) for name in ("text", "bytes", "folder")] == [file_mode, file_mode, folder_mode]


def test_a_link_that_somebody_put_there_is_not_written_through(tmp_path):
    (tmp_path / "victim").write_text("as it was")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic link"):
        write_private(tmp_path / "link", "owned")
    assert (tmp_path / "victim").read_text() == "as it was"


@pytest.mark.parametrize("is_private", [False, True], ids=["shared", "private"])
def test_a_link_under_the_name_of_an_unfinished_file_is_not_written_through(tmp_path, monkeypatch, is_private):
    (tmp_path / "victim").write_text("as it was")
    monkeypatch.setattr(os, "urandom", bytes)  # as if somebody had guessed it
    link = tmp_path / f".{unique_name('model')}.tmp.txt"
    link.symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        write_text(tmp_path / "model.txt", "owned", is_private=is_private)
    assert (tmp_path / "victim").read_text() == "as it was"
    assert link.is_symlink() and not (tmp_path / "model.txt").exists()


@pytest.mark.parametrize("name", ["model.txt", "é" * 120 + ".txt"], ids=["short", "long"])
def test_two_writers_with_the_same_process_number_do_not_meet(tmp_path, name):
    # As in two containers that share a folder: the later one wins, and neither sees the bytes of the other.
    path = tmp_path / name
    with published_file(path) as first:
        first.write_text("first")
        with published_file(path) as second:
            assert first.read_text() == "first" and second.read_text() == ""
            second.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first"
    assert socket.gethostname()[:32] in first.name and str(os.getpid()) in first.name
    assert [*tmp_path.iterdir()] == [path], "nothing unfinished is left"


def test_two_writers_of_a_folder_with_the_same_process_number_do_not_meet(tmp_path):
    path = tmp_path / "out"
    with published_folder(path) as first:
        (first / "first").touch()
        with published_folder(path) as second:
            assert [*second.iterdir()] == []
        assert (first / "first").exists() and [*path.iterdir()] == []
    assert [*path.iterdir()] == [path / "first"]
    assert [*tmp_path.iterdir()] == [path], "nothing unfinished is left"


def megaclass(*arguments: str, mask: int) -> None:
    done = run_forked(_main_with_umask, mask, arguments)
    assert done.returncode == 0, done.stderr


def _main_with_umask(mask: int, arguments: tuple[str, ...]) -> None:
    os.umask(mask)
    for name in [name for name in os.environ if name.startswith("MEGACLASS_")]:
        del os.environ[name]
    sys.exit(main([*arguments]))


@pytest.mark.ranks
@pytest.mark.parametrize("mask", [0o022, 0o077], ids=oct)
def test_output_files_of_ranks_are_private(tmp_path, mask):
    out = tmp_path / "new" / "logs"
    megaclass("run", "-np", "1", "--output-filename", str(out), "echo", "secret", mask=mask)
    assert [mode(path) for path in (out, out / "rank.0", out / "rank.0" / "stdout")] == [0o700, 0o700, 0o600]


@pytest.mark.ranks
def test_a_link_in_the_place_of_an_output_file_is_not_followed(tmp_path):
    (tmp_path / "victim").write_text("as it was")
    (tmp_path / "logs" / "rank.0").mkdir(parents=True)
    (tmp_path / "logs" / "rank.0" / "stdout").symlink_to(tmp_path / "victim")
    megaclass("run", "-np", "1", "--output-filename", str(tmp_path / "logs"), "echo", "owned", mask=0o022)
    assert (tmp_path / "victim").read_text() == "as it was"


@pytest.mark.ranks
@pytest.mark.parametrize(("mask", "num_ranks"), [(0o022, 2), (0o077, 1)], ids=["0o22", "0o77"])
def test_everything_in_a_run_folder_but_the_model_is_private(tmp_path, mask, num_ranks):
    run, data = tmp_path / "run", tmp_path / "data"
    places = (f"data.path={data}", f"train.run_dir={run}", f"train.tensorboard={str(HAS_TENSORBOARD).lower()}")
    megaclass("train", str(RECIPE), *TINY, *places, f"train.nproc={num_ranks}", mask=mask)
    assert mode(run) == 0o700
    # TensorBoard's own files follow the umask, inside a folder that is private.
    assert not HAS_TENSORBOARD or mode(run / "tensorboard") == 0o700
    files = [path for path in run.rglob("*") if path.parent.name != "tensorboard"]
    others = {str(path.relative_to(run)): oct(mode(path)) for path in files if mode(path) & 0o077}
    assert set(others) <= set(SHARED), others
    assert {"metrics.jsonl", "config.toml", "summary.json", "report.html"} <= {path.name for path in files}
    if mask == 0o022:
        assert mode(run / "model.safetensors") == 0o644 and mode(data) == 0o755, "these follow the umask"


@pytest.mark.parametrize("mask", [0o022, 0o077], ids=oct)
def test_horovods_timeline_is_private(tmp_path, umask, mask):
    from horovod.engine.timeline import Timeline

    umask(mask)
    timeline = Timeline()
    timeline.start(str(tmp_path / "timeline.json"), mark_cycles=False)
    timeline.stop()
    assert mode(tmp_path / "timeline.json") == 0o600


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_flush_folders_is_written_to_all_the_same(tmp_path, monkeypatch, code):
    """As some FUSE mounts do."""
    flushed = []
    as_ever = os.fsync

    def refuse_folders(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(code, os.strerror(code))
        flushed.append(handle)
        as_ever(handle)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    write_text(tmp_path / "text", "whole")
    with published_folder(tmp_path / "folder") as unfinished:
        (unfinished / "text").write_text("whole")
    assert (tmp_path / "text").read_text() == (tmp_path / "folder" / "text").read_text() == "whole"
    assert len(flushed) == 2


def test_windows_which_does_not_open_folders_is_written_to_all_the_same(tmp_path, monkeypatch):
    as_ever = os.open

    def refuse_folders(path, flags, *arguments, **options):
        if Path(path).is_dir():
            raise PermissionError(errno.EACCES, "Permission denied")
        return as_ever(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse_folders)
    with pytest.raises(PermissionError):
        flush(tmp_path)
    monkeypatch.setattr(files, "_IS_WINDOWS", True)
    write_text(tmp_path / "text", "whole")
    assert (tmp_path / "text").read_text() == "whole"


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails_to_flush_is_an_error_and_so_is_a_file_that_cannot_be_flushed(tmp_path, monkeypatch, code):
    def fail(handle):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=os.strerror(code)):
        flush(tmp_path)
    (tmp_path / "file").write_text("x")
    code = errno.EINVAL
    with pytest.raises(OSError, match=os.strerror(code)):
        flush(tmp_path / "file")


def test_writing_never_changes_the_umask_that_other_threads_create_files_with(tmp_path, umask, monkeypatch):
    umask(0o027)
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("the umask was set"))
    write_text(tmp_path / "text", "x")
    monkeypatch.undo()
    assert mode(tmp_path / "text") == 0o640
