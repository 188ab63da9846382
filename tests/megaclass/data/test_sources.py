"""The other places images come from: folders, lists, tar shards, several joined, and none at all."""

import io
import os
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from megaclass.checkpoint.class_names import class_list
from megaclass.data.decode import IMAGE_SUFFIXES
from megaclass.data.loader import BatchLoader
from megaclass.data.sources.open_source import FORMATS, check_source, open_source, verification_files
from megaclass.data.sources.source import SourceFormat
from megaclass.data.tools.stage import stage, unstage
from megaclass.data.tools.synthesize import synthesize
from megaclass.data.tools.verify import verify
from megaclass.errors import DataError


def jpeg(grey: int, size: tuple[int, int] = (20, 24), kind: str = "JPEG") -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", size, (grey, grey, grey)).save(stream, kind)
    return stream.getvalue()


def write_identities(root: Path) -> Path:
    for identity, greys in {"bob": [10, 20], "alice": [30], "nobody": [], "zoë": [40, 50, 60]}.items():
        (root / identity).mkdir(parents=True)
        for grey in greys:
            (root / identity / f"{grey}.jpg").write_bytes(jpeg(grey))
    (root / "bob" / "notes.txt").write_text("no image")
    (root / ".cache").mkdir()
    return root


def write_tar(path: Path, members: list[tuple[str, bytes]], **options) -> Path:
    with tarfile.open(path, "w", **options) as shard:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            shard.addfile(info, io.BytesIO(content))
    return path


def samples(*labels: int, start: int = 0) -> list[tuple[str, bytes]]:
    return [
        member
        for number, label in enumerate(labels, start=start)
        for member in ((f"a/{number:06d}.jpg", jpeg(number)), (f"a/{number:06d}.cls", str(label).encode()))
    ]


def grey_of(encoded: bytes) -> int:
    return int(np.asarray(Image.open(io.BytesIO(encoded)).convert("L"))[0, 0])


def test_folders_are_identities_in_the_order_of_their_names(tmp_path):
    source = open_source(write_identities(tmp_path / "faces"))
    assert source.labels.tolist() == [0, 1, 1, 3, 3, 3]
    assert [grey_of(source.read(index)) for index in range(6)] == [30, 10, 20, 40, 50, 60]
    assert source.describe() == (
        f"one folder per identity at {tmp_path / 'faces'}: 6 images of 4 classes, 20 × 24; 1 classes without images; "
        f"1 file that is not an image is left out: bob/notes.txt"
    )


def test_folders_hold_images_of_every_suffix_and_name_what_is_none(tmp_path):
    for number, suffix in enumerate(IMAGE_SUFFIXES):
        path = tmp_path / "faces" / "anna" / f"{number:02d}{suffix.upper() if number % 2 else suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (16, 16), 10 * number).save(path, Image.registered_extensions()[suffix])
    for name in ("a.jp2", "b.json", "c.mov", "d.txt", ".hidden"):
        (tmp_path / "faces" / "anna" / name).write_bytes(b"x")
    (tmp_path / "faces" / "lost.jpg").write_bytes(jpeg(1))
    source = open_source(tmp_path / "faces")
    assert source.num_images == len(IMAGE_SUFFIXES)
    batch = BatchLoader(source, global_batch=source.num_images, max_bad_fraction=0).load(0, 0)
    assert len(batch.images) == source.num_images
    left_out = (
        "5 files that are not images are left out: lost.jpg (in no identity's folder), anna/a.jp2, anna/b.json, …"
    )
    assert source.describe().endswith(left_out)


def test_folders_without_any_image_say_what_they_hold(tmp_path):
    (tmp_path / "anna").mkdir()
    (tmp_path / "anna" / "a.heic").write_bytes(b"x")
    with pytest.raises(DataError, match=r"no image in it \(1 file that is not an image is left out: anna/a\.heic\)"):
        open_source(tmp_path)


def test_a_list_names_paths_and_labels(tmp_path):
    root = write_identities(tmp_path)
    (root / "label.txt").write_text("bob/10.jpg\t7\nalice/30.jpg\t60000000\r\n\n")
    source = open_source(root)
    assert source.labels.tolist() == [7, 60000000] and source.num_classes == 60000001
    assert grey_of(source.read(1)) == 30
    assert open_source(root / "label.txt").describe().startswith("list label.txt at ")


BAD_LISTS = {
    "no label": "bob/10.jpg",
    "a name for a label": "bob/10.jpg\tbob",
    "a negative label": "bob/10.jpg\t-1",
    "a path that climbs out": "../secret.jpg\t1",
    "an absolute path": "/etc/passwd\t1",
}


@pytest.mark.parametrize("line", BAD_LISTS.values(), ids=BAD_LISTS.keys())
def test_a_bad_line_of_a_list_is_named(tmp_path, line):
    (tmp_path / "label.txt").write_text(f"a.jpg\t0\n{line}\n")
    with pytest.raises(DataError, match=r"label\.txt, line 2"):
        open_source(tmp_path)


@pytest.mark.parametrize("kind", ["tar", "list"])
def test_a_label_that_asks_for_absurdly_many_classes_is_refused_and_named(tmp_path, kind):
    write_tar(tmp_path / "a.tar", samples(3, 900_000_000_000))
    (tmp_path / "a.txt").write_text("x.jpg\t3\ny.jpg\t900000000000\n")
    named = r"a\.tar, byte \d+" if kind == "tar" else r"y\.jpg"
    message = named + r" has label 900000000000, which implies 900,000,000,001 classes for 2 images: at most 67,108,864"
    with pytest.raises(DataError, match=message):
        open_source(tmp_path / ("a.tar" if kind == "tar" else "a.txt"))


def test_shards_hold_images_and_classes_side_by_side(tmp_path):
    write_tar(tmp_path / "b.tar", samples(5, 6, start=2))
    long_name = "very" * 40
    write_tar(
        tmp_path / "a.tar", [*samples(3, 4), (f"{long_name}.png", jpeg(9, kind="PNG")), (f"{long_name}.cls", b"8\n")]
    )
    source = open_source(tmp_path)
    assert source.labels.tolist() == [3, 4, 8, 5, 6] and source.num_classes == 9
    assert [grey_of(source.read(index)) for index in range(5)] == [0, 1, 9, 2, 3]
    assert source.describe() == f"2 tar shards of (jpg, cls) at {tmp_path}: 5 images of 9 classes, 20 × 24"
    again = open_source(tmp_path)
    assert (tmp_path / "shards.cache").exists() and np.array_equal(again.offsets, source.offsets)


@pytest.mark.parametrize("tar_format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_all_three_dialects_of_tar_are_read(tmp_path, tar_format):
    deep = "/".join(["folder-of-some-length"] * 6)
    path = write_tar(tmp_path / "a.tar", [(f"{deep}/x.jpg", jpeg(1)), (f"{deep}/x.cls", b"2")], format=tar_format)
    assert open_source(path).labels.tolist() == [2]


BAD_TARS = {
    "climbs out": ([("../x.jpg", jpeg(1)), ("../x.cls", b"1")], r"'\.\./x\.jpg', whose path leads out"),
    "absolute": ([("/etc/x.jpg", jpeg(1)), ("/etc/x.cls", b"1")], "'/etc/x.jpg', whose path leads out"),
    "no class": (
        [("x.jpg", jpeg(1)), ("y.jpg", jpeg(1)), ("y.cls", b"1")],
        r"sample 'x' .* has no class.*tar -xf .*\.tar",
    ),
    "no image": ([("x.cls", b"1")], "sample 'x' .* has no image"),
    "no number": ([("x.jpg", jpeg(1)), ("x.cls", b"one")], "b'one'; expected a class"),
    "nothing": ([], "no sample of"),
}


@pytest.mark.parametrize(("members", "message"), BAD_TARS.values(), ids=BAD_TARS.keys())
def test_a_bad_shard_is_refused_by_name(tmp_path, members, message):
    with pytest.raises(DataError, match=message):
        open_source(write_tar(tmp_path / "a.tar", members))


def test_a_link_in_a_shard_is_not_followed(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as shard:
        link = tarfile.TarInfo("x.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        shard.addfile(link)
        label = tarfile.TarInfo("x.cls")
        label.size = 1
        shard.addfile(label, io.BytesIO(b"1"))
    with pytest.raises(DataError, match="has no image"):
        open_source(tmp_path / "a.tar")


@pytest.mark.parametrize("end", [700, 1500])
def test_a_truncated_shard_is_noticed(tmp_path, end):
    path = write_tar(tmp_path / "a.tar", samples(1, 2, 3))
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(DataError, match=r"is it truncated|has no class"):
        open_source(path)


def test_joined_sources_keep_their_label_ranges_apart(tmp_path):
    faces, shard = write_identities(tmp_path / "faces"), write_tar(tmp_path / "a.tar", samples(0, 2))
    source = open_source(f"{faces},{shard}")
    assert source.num_classes == 4 + 3
    assert source.labels.tolist() == [0, 1, 1, 3, 3, 3, 4, 6]
    assert grey_of(source.read(5)) == 60 and grey_of(source.read(7)) == 1
    assert source.name_of(7).startswith(str(shard))
    assert "classes 0 to 3: one folder per identity" in source.describe()
    assert "classes 4 to 6: 1 tar shards" in source.describe()


def test_a_folder_whose_name_has_a_comma_is_one_source(tmp_path):
    assert open_source(write_identities(tmp_path / "a,b")).num_images == 6


def test_synthetic_labels_are_spread_over_any_number_of_classes():
    source = open_source("synthetic:1000000000x5000@16")
    assert (source.num_classes, source.num_images, source.image_size) == (10**9, 5000, (16, 16))
    assert source.labels.min() == 0 and source.labels.max() >= 10**9 * 0.999
    assert len(np.unique(source.labels // 10**8)) == 10
    batch = next(BatchLoader(source, global_batch=8).batches())
    assert batch.images.shape == (8, 3, 16, 16) and batch.images.float().std() > 50
    assert np.array_equal(batch.labels.numpy(), source.labels[batch.indices])


@pytest.mark.parametrize("text", ["synthetic:", "synthetic:0", "synthetic:ten", "synthetic:5x0", "synthetic:5x5@4"])
def test_a_synthetic_source_that_cannot_be_is_explained(text):
    with pytest.raises(DataError, match=r"expected synthetic:C, synthetic:CxN"):
        open_source(text)


def test_debug_repeats_real_images_from_memory(tmp_path):
    synthesize(tmp_path / "set", num_identities=6, images_per_identity=50, image_size=16, num_pairs=2, num_processes=1)
    source = open_source(f"debug:{tmp_path / 'set'}")
    assert (source.num_images, source.num_classes) == (300, 6)
    # Nothing is read any more: a truncated map would be an error.
    (tmp_path / "set" / "train.rec").write_bytes(b"")
    batch = next(BatchLoader(source, global_batch=64, mirror=False).batches())
    assert batch.images.shape == (64, 3, 16, 16)
    assert np.array_equal(batch.labels.numpy(), source.labels[batch.indices])
    assert len(np.unique(source.labels)) == 6
    assert source.describe().startswith("debug: 256 images repeated from memory, of InsightFace RecordIO")


def test_debug_without_data_draws_its_own():
    batch = next(BatchLoader(open_source("debug"), global_batch=16).batches())
    assert batch.images.shape == (16, 3, 112, 112) and batch.labels.max() < 32


def test_every_source_feeds_the_loader(tmp_path):
    faces, shard = write_identities(tmp_path / "faces"), write_tar(tmp_path / "a.tar", samples(0, 2, 1))
    for path in (faces, shard, f"{faces},{shard}"):
        loader = BatchLoader(open_source(path), global_batch=3, mirror=False)
        for batch in loader.batches():
            for row, index in enumerate(batch.indices):
                assert torch.all((batch.images[row].int() - grey_of(loader.source.read(int(index)))).abs() <= 2)


def test_a_file_that_vanishes_or_hangs_is_an_error_with_its_name(tmp_path):
    root = write_identities(tmp_path / "faces")
    (root / "bob" / "pipe.jpg").write_bytes(b"")
    source = open_source(root)
    (root / "bob" / "10.jpg").unlink()
    (root / "bob" / "pipe.jpg").unlink()
    os.mkfifo(root / "bob" / "pipe.jpg")
    with pytest.raises(DataError, match=r"bob/10\.jpg: No such file"):
        source.read(1)
    with pytest.raises(DataError, match=r"bob/pipe\.jpg: it is not a regular file"):
        source.read(3)


def test_verification_sets_are_found_beside_any_source(tmp_path):
    (tmp_path / "lfw.bin").write_bytes(b"")
    (tmp_path / "a.tar").write_bytes(b"")
    assert verification_files(tmp_path) == verification_files(tmp_path / "a.tar") == [tmp_path / "lfw.bin"]
    assert verification_files(f"debug:{tmp_path}") == [tmp_path / "lfw.bin"]
    assert verification_files("synthetic:10") == []


def test_what_is_missing_is_said_before_anything_is_read(tmp_path):
    check_source("synthetic:10x20")
    check_source(write_identities(tmp_path / "faces"))
    with pytest.raises(DataError, match="no such folder"):
        check_source(f"{tmp_path / 'faces'},{tmp_path / 'absent'}")
    (tmp_path / "two").mkdir()
    for name in ("a.rec", "b.rec"):
        (tmp_path / "two" / name).write_bytes(b"")
    with pytest.raises(DataError, match=r"it holds a\.rec, b\.rec and no train\.rec"):
        check_source(tmp_path / "two")
    (tmp_path / "two" / "b.rec").unlink()
    with pytest.raises(DataError, match=r"a\.rec and a\.idx, a\.idx missing.* verify --repair"):
        check_source(tmp_path / "two")
    (tmp_path / "x.zip").write_bytes(b"")
    with pytest.raises(DataError, match=r"expected a folder, or a \.npy, \.safetensors, \.rec, \.txt or \.tar file"):
        check_source(tmp_path / "x.zip")


class NumpySource:
    """Pixels of one .npz file, as a user of the package might add them."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as content:
            self._images, self.labels = content["images"], content["labels"].astype(np.int64)
        self.num_images, self.num_classes = len(self.labels), int(self.labels.max()) + 1
        self.image_size = self._images.shape[1:3]

    def read(self, index: int) -> bytes:
        stream = io.BytesIO()
        Image.fromarray(self._images[index]).save(stream, "PNG")
        return stream.getvalue()

    def name_of(self, index: int) -> str:
        return f"image {index}"

    def describe(self) -> str:
        return f"{self.num_images} images in an array"


class NumpyFormat(SourceFormat):
    suffix = ".npz"

    @classmethod
    def matches(cls, path: str) -> bool:
        return path.endswith(cls.suffix)

    def check(self) -> None:
        if not self.place.is_file():
            raise DataError(f"There is no {self.place}.")

    def open(self) -> NumpySource:
        return NumpySource(self.place)

    def files(self) -> list[Path]:
        return [self.place]

    def class_names(self) -> list[bytes]:
        return [b"cat", b"dog"]


def test_a_format_from_outside_the_package_is_one_class_and_one_line(tmp_path):
    path = tmp_path / "pets.npz"
    np.savez(path, images=np.full((4, 16, 16, 3), [[[[7]]], [[[8]]], [[[9]]], [[[10]]]], np.uint8), labels=[0, 1, 1, 0])
    with pytest.raises(DataError, match=r"expected a folder, or a \.npy, \.safetensors, \.rec, \.txt or \.tar file"):
        open_source(path)
    FORMATS.insert(0, NumpyFormat)
    try:
        source = open_source(path)
        assert next(BatchLoader(source, global_batch=4).batches()).images.float().mean().item() == 8.5
        assert verify(path)[0].is_sound and verify(path)[0].num_images == 4
        assert class_list(str(path), source).text == b"cat\ndog\n"
        staged = stage(f"{path},synthetic:5x10@16", tmp_path / "ram")
        (copy,) = (tmp_path / "ram").glob("*/*/0")
        assert staged == f"{copy / 'pets.npz'},synthetic:5x10@16"
        assert open_source(staged).num_classes == 7
        unstage(tmp_path / "ram")
        assert not (tmp_path / "ram").exists()
        with pytest.raises(DataError, match=r"There is no .*absent\.npz"):
            check_source(f"{path},{tmp_path / 'absent.npz'}")
    finally:
        FORMATS.remove(NumpyFormat)


def test_folders_of_folders_are_answered_with_paths_that_work(tmp_path):
    write_identities(tmp_path / "nest" / "0")
    for name in ("carl", "dora"):
        (tmp_path / "nest" / "1" / name).mkdir(parents=True)
        (tmp_path / "nest" / "1" / name / "x.jpg").write_bytes(jpeg(70))
    with pytest.raises(DataError, match="the identities are in the folders 0 and 1 below it") as caught:
        open_source(tmp_path / "nest")
    proposed = re.findall(r"data\.path=([^ ,]+(?:,/[^ ,]+)*)", str(caught.value))
    assert [open_source(path).num_classes for path in proposed] == [4, 6]
    # Identities of equal names are the same people: joined, they would be two classes.
    write_identities(tmp_path / "again" / "train")
    write_identities(tmp_path / "again" / "val")
    with pytest.raises(DataError) as caught:
        open_source(tmp_path / "again")
    assert "train on all" not in str(caught.value) and "again/val" in str(caught.value)
