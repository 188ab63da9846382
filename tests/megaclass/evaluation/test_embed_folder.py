"""embeddings.npy of a folder: right, the same on any number of ranks, and never done twice."""

import os
import shutil
import socket
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megaclass.distributed import agreement
from megaclass.errors import DataError
from megaclass.evaluation.images import find_images
from megaclass.inference import LoadedModel, load
from megaclass.inference import embed_folder as module
from megaclass.inference.embed_folder import EmbeddedFolder, embed_folder
from megaclass_launch.errors import UserError

_NUM_IMAGES = 11


@pytest.fixture
def folder(tmp_path, picture):
    for number in range(_NUM_IMAGES):
        path = tmp_path / "images" / f"person-{number % 3}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(number))
    return tmp_path / "images"


@pytest.fixture
def model(make_run) -> LoadedModel:
    return load(make_run())


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 4)


def _embed_on_this_rank(run: str, folder: str, out: str) -> int:
    module._CHUNK = 4
    return embed_folder(load(run), Path(folder), Path(out)).num_embedded


def test_rows_are_those_of_the_model_in_the_order_of_the_list(tmp_path, folder, model):
    done: list[tuple[int, int]] = []
    out = tmp_path / "embeddings.npy"
    embedded = embed_folder(model, folder, out, on_progress=lambda *report: done.append(report))
    assert embedded == EmbeddedFolder(num_embedded=_NUM_IMAGES, num_bad=0)
    names = out.with_suffix(".txt").read_text().splitlines()
    assert names == sorted(names)
    np.testing.assert_allclose(np.load(out), model.embed([folder / name for name in names]), atol=1e-6)
    assert done == [(4, 11), (8, 11), (11, 11)]
    assert not list(tmp_path.glob(".embeddings*")), "nothing unfinished is left"


@pytest.mark.parametrize("num_ranks", [2, 4], ids=["two", "more ranks than chunks"])
def test_any_number_of_ranks_writes_the_same(run_ranks, tmp_path, folder, make_run, num_ranks):
    run = make_run("one")
    _embed_on_this_rank(str(run), str(folder), str(tmp_path / "one.npy"))
    counts = run_ranks(num_ranks, _embed_on_this_rank, str(run), str(folder), str(tmp_path / "many.npy"))
    assert counts == [_NUM_IMAGES] * num_ranks
    np.testing.assert_array_equal(np.load(tmp_path / "many.npy"), np.load(tmp_path / "one.npy"))


def _embed_what_rank_0_lists(run: str, folder: str, out: str, hidden: str) -> str:
    """Embeds on a rank that, unless it is rank 0, must not list the folder and does not see the hidden file."""
    as_ever = os.path.lexists
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(module, "_CHUNK", 4)
        if dist.get_rank() > 0:
            monkeypatch.setattr(module, "find_images", None)
            monkeypatch.setattr(os.path, "lexists", lambda path: str(path) != hidden and as_ever(path))
        try:
            return str(embed_folder(load(run), Path(folder), Path(out)).num_embedded)
        except UserError as error:
            return str(error)


def test_all_ranks_embed_the_list_of_rank_0_and_a_file_that_one_does_not_see_is_named(
    run_ranks, tmp_path, folder, make_run
):
    arguments = (str(make_run("one")), str(folder), str(tmp_path / "e.npy"))
    assert run_ranks(2, _embed_what_rank_0_lists, *arguments, "") == [str(_NUM_IMAGES)] * 2
    # The second chunk is that of rank 1.
    missing = find_images(folder)[5]
    first, second = run_ranks(2, _embed_what_rank_0_lists, *arguments, str(missing))
    assert f"Cannot read {missing} on {socket.gethostname()} (rank 1): rank 0 has listed it" in second
    assert first == f"rank 1: {second}"


def _embed_slowly(run: str, folder: str, out: str) -> int:
    """Rank 1 works for longer than a collective may take."""
    group, embed_part = dist.new_group(timeout=timedelta(seconds=2)), module.embed_part

    def slow_embed_part(*arguments, **options):
        time.sleep(3.0 * dist.get_rank())
        return embed_part(*arguments, **options)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(module, "_CHUNK", 4)
        monkeypatch.setattr(module, "embed_part", slow_embed_part)
        monkeypatch.setattr(agreement, "_SIGN_OF_LIFE_S", 0.3)
        return embed_folder(load(run), Path(folder), Path(out), group=group).num_embedded


def test_a_rank_may_work_for_longer_than_a_collective_may_take(run_ranks, tmp_path, folder, make_run):
    counts = run_ranks(2, _embed_slowly, str(make_run("one")), str(folder), str(tmp_path / "e.npy"))
    assert counts == [_NUM_IMAGES] * 2


class StoppedError(Exception):
    pass


def _interrupt(model, folder, out):
    def stop(done: int, total: int) -> None:
        if done >= 8:
            raise StoppedError

    with pytest.raises(StoppedError):
        embed_folder(model, folder, out, on_progress=stop)


def _counting(model: LoadedModel) -> list[int]:
    batches: list[int] = []
    model.network.register_forward_pre_hook(lambda _, inputs: batches.append(len(inputs[0])))
    return batches


def test_what_was_done_before_an_interruption_is_not_done_again(tmp_path, folder, model, capsys):
    out = tmp_path / "embeddings.npy"
    _interrupt(model, folder, out)
    assert not out.exists()
    batches = _counting(model)
    embed_folder(model, folder, out)
    assert batches == [3, 3], "both flips of the last chunk alone"
    assert "resuming with 2 chunk(s)" in capsys.readouterr().err
    fresh = tmp_path / "fresh.npy"
    embed_folder(model, folder, fresh)
    np.testing.assert_array_equal(np.load(out), np.load(fresh))


@pytest.mark.parametrize("change", ["model", "images"])
def test_chunks_of_another_model_or_folder_are_not_used(tmp_path, folder, model, picture, change):
    out = tmp_path / "embeddings.npy"
    _interrupt(model, folder, out)
    if change == "model":
        with torch.no_grad():
            model.network.fc.weight += 1
    else:
        (folder / "person-0" / "more.png").write_bytes(picture(99))
    batches = _counting(model)
    embed_folder(model, folder, out)
    assert sum(batches) == 2 * (_NUM_IMAGES + (change == "images"))


def test_bad_files_are_left_out_named_and_listed(tmp_path, folder, model, capsys):
    out = tmp_path / "embeddings.npy"
    embed_folder(model, folder, tmp_path / "all.npy")
    rows = dict(zip((tmp_path / "all.txt").read_text().splitlines(), np.load(tmp_path / "all.npy"), strict=True))
    (folder / "person-2" / "8.png").write_bytes(b"no image")
    (folder / "person-0" / "empty.jpg").write_bytes(b"")
    (folder / "person-0" / "gone.jpg").symlink_to("nowhere")
    assert embed_folder(model, folder, out) == EmbeddedFolder(num_embedded=_NUM_IMAGES - 1, num_bad=3)
    names = out.with_suffix(".txt").read_text().splitlines()
    assert names == [name for name in rows if name != "person-2/8.png"]
    np.testing.assert_allclose(np.load(out), [rows[name] for name in names], atol=1e-6)
    bad = ["person-0/empty.jpg", "person-0/gone.jpg", "person-2/8.png"]
    assert out.with_suffix(".bad.txt").read_text().splitlines() == bad
    said = capsys.readouterr().err
    assert all(f"{folder / name}" in said for name in bad)
    for name in bad:
        (folder / name).unlink()
    embed_folder(model, folder, out)
    assert not out.with_suffix(".bad.txt").exists()


def test_an_image_that_was_mended_after_an_interruption_gets_its_row(tmp_path, folder, model):
    out = tmp_path / "embeddings.npy"
    broken = folder / "person-0" / "0.png"
    whole = broken.read_bytes()
    broken.write_bytes(b"no image".ljust(len(whole)))
    _interrupt(model, folder, out)
    broken.write_bytes(whole)
    assert embed_folder(model, folder, out).num_bad == 0


def test_a_folder_in_which_nothing_can_be_read_is_an_error(tmp_path, model):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.jpg").write_bytes(b"no image")
    with pytest.raises(DataError, match="None of the 1 images can be read"):
        embed_folder(model, tmp_path / "images", tmp_path / "e.npy")


def test_files_that_are_no_images_are_counted_and_named(tmp_path, folder, model, picture, capsys):
    (folder / "person-0" / "notes.txt").write_text("x")
    (folder / "person-0" / "a.PGM").write_bytes(picture(5, image_format="PPM"))
    (folder / "person-0" / "a.tif").write_bytes(picture(5, image_format="TIFF"))
    (folder / "person-0" / "._a.jpg").write_bytes(b"a Macintosh was here")
    assert embed_folder(model, folder, tmp_path / "e.npy").num_embedded == _NUM_IMAGES + 2
    assert f"{folder}: 1 file that is not an image is left out: person-0/notes.txt" in capsys.readouterr().err


def test_linked_folders_are_embedded_and_links_that_lead_upwards_are_named(tmp_path, folder, model, picture, capsys):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.png").write_bytes(picture(5))
    (tmp_path / "elsewhere" / "again").symlink_to(folder)
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "person-0" / "up").symlink_to("..")
    assert embed_folder(model, folder, tmp_path / "e.npy").num_embedded == _NUM_IMAGES + 1
    assert "linked/a.png" in (tmp_path / "e.txt").read_text().splitlines()
    said = capsys.readouterr().err
    assert "linked/again (a link to a folder above it), person-0/up (a link to a folder above it)" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_a_folder_that_cannot_be_read_is_an_error():
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        (Path(place) / "person").mkdir(mode=0o700)
        os.seteuid(65534)
        try:
            with pytest.raises(DataError, match=f"Cannot read the folder {place}/person: Permission denied"):
                find_images(Path(place))
        finally:
            os.seteuid(0)


def test_images_of_another_size_are_fitted_and_counted(tmp_path, folder, model, picture, capsys):
    (folder / "large.png").write_bytes(picture(1, size=48))
    embed_folder(model, folder, tmp_path / "e.npy", fit="pad")
    assert "1 of 12 images" in capsys.readouterr().err


def test_what_cannot_be_embedded_is_refused(tmp_path, folder, model, picture):
    with pytest.raises(DataError, match=r"written as \.npy"):
        embed_folder(model, folder, tmp_path / "embeddings.csv")
    with pytest.raises(DataError, match="the folder does not exist"):
        embed_folder(model, tmp_path / "nowhere", tmp_path / "e.npy")
    shutil.rmtree(folder)
    folder.mkdir()
    with pytest.raises(DataError, match="holds no images"):
        embed_folder(model, folder, tmp_path / "e.npy")
    (folder / "a.png").write_bytes(picture(0, 0, 48))
    with pytest.raises(DataError, match=r"a\.png has 48 × 48 pixels, but the model takes 32 × 32"):
        embed_folder(model, folder, tmp_path / "e.npy")
