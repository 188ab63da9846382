"""Parquet and Arrow files with an image column are the images and classes that are in them."""

import io
import json

import numpy as np
import pytest
from PIL import Image
from tests.commands import ended_in_this_process

from megaclass.data.sources.open_source import format_of, open_source
from megaclass.data.sources.parquet import as_records
from megaclass.errors import DataError

pa = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'megaclass[parquet]'")
pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def png(*seed):
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def table(labels, *, names=None, image="image", label="label", is_struct=True, seed=0):
    """As `datasets` writes it: images as structs, and features in the metadata."""
    payloads = [png(seed, number) for number in range(len(labels))]
    images = pa.array([{"bytes": one, "path": None} for one in payloads] if is_struct else payloads)
    found = pa.table({image: images, label: pa.array(labels), "note": pa.array(["…"] * len(labels))})
    if names is not None:
        features = {image: {"_type": "Image"}, label: {"names": names, "_type": "ClassLabel"}}
        found = found.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    return found, payloads


def test_images_and_classes_of_a_repository_of_the_hub(tmp_path):
    """Several files in data/, several splits of which train is taken, and names of classes in the metadata."""
    (tmp_path / "data").mkdir()
    names, wanted = ["anna", "bert", "zoë"], []
    for number, labels in enumerate(([2, 0, 0], [1, 2])):
        rows, payloads = table(labels, names=names, seed=number)
        pq.write_table(rows, tmp_path / f"data/train-0000{number}-of-00002.parquet", row_group_size=2)
        wanted += zip(payloads, labels, strict=True)
    pq.write_table(table([0], names=names, seed=9)[0], tmp_path / "data/test-00000-of-00001.parquet")
    source = open_source(tmp_path)
    assert [(source.read(i), int(source.labels[i])) for i in range(source.num_images)] == wanted
    assert source.num_classes == 3 and source.image_size == (16, 16)
    assert format_of(tmp_path).class_names() == [name.encode() for name in names]
    assert open_source(f"{tmp_path}?split=test").num_images == 1
    with pytest.raises(DataError, match=r"has the splits test, train: choose one of them"):
        open_source(f"{tmp_path}?split=dev")


def test_texts_are_classes_in_their_order(tmp_path):
    rows, _ = table(["zoë", "anna", "zoë", "bert"], is_struct=False, image="jpg", label="person")
    pq.write_table(rows, tmp_path / "people.parquet")
    path = f"{tmp_path / 'people.parquet'}?label=person"
    source = open_source(path)
    assert source.labels.tolist() == [2, 0, 2, 1]
    assert format_of(path).class_names() == [b"anna", b"bert", "zoë".encode()]


def test_arrow_files_of_save_to_disk(tmp_path):
    rows, payloads = table([1, 0, 1])
    with (
        pa.OSFile(str(tmp_path / "data-00000-of-00001.arrow"), "wb") as file,
        pa.ipc.new_stream(file, rows.schema) as out,
    ):
        out.write_table(rows, max_chunksize=2)
    source = open_source(tmp_path)
    assert [source.read(i) for i in range(3)] == payloads and source.labels.tolist() == [1, 0, 1]


def test_a_changed_file_is_converted_again_and_an_unchanged_one_is_not(tmp_path, caplog):
    caplog.set_level("INFO", logger="megaclass.data")
    pq.write_table(table([0, 1])[0], tmp_path / "a.parquet")
    for _ in range(2):
        assert open_source(tmp_path).num_images == 2
    assert caplog.text.count("converting") == 1
    pq.write_table(table([0, 1, 1])[0], tmp_path / "a.parquet")
    assert open_source(tmp_path).num_images == 3


def _labels(labels):
    return lambda: table(labels)[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: table([0, 1])[0].rename_columns(["image", "a", "b"]),
            r"which column of .* is the label: it has image, a, b",
        ),
        (lambda: table([0, 1])[0].drop_columns(["image"]), r"is the image: it has label, note\. Name it in the path"),
        (_labels([0, -1]), r"row 1 of .*a\.parquet has -1 as label"),
        (_labels([0, None]), r"row 1 of .*a\.parquet has None as label"),
        (_labels([0.5, 1.0]), r"row 0 of .* has 0\.5 as label"),
        (lambda: table([0, 3], names=["anna", "bert"])[0], "has class 3, but names 2 classes"),
        (
            lambda: pa.table({"image": pa.array([{"bytes": None, "path": "a.png"}]), "label": [0]}),
            r"row 0 of .* has no bytes in the column image",
        ),
        (lambda: table([0])[0].slice(0, 0), "has no rows"),
    ],
)
def test_what_cannot_be_read_is_named_and_nothing_stays(tmp_path, make, message):
    place = tmp_path / "set"
    place.mkdir()
    rows = make()
    if "bytes" in message:
        rows = rows.cast(
            pa.schema([("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])), ("label", pa.int64())])
        )
    pq.write_table(rows, place / "a.parquet")
    with pytest.raises(DataError, match=message):
        open_source(place)
    assert not list((tmp_path / "cache").rglob("train.rec"))


def test_a_damaged_file_is_named(tmp_path):
    pq.write_table(table([0, 1])[0], tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    for content in (b"", b"PAR1", whole[:-20], whole[:40] + bytes(40) + whole[80:]):
        (tmp_path / "a.parquet").write_bytes(content)
        with pytest.raises(DataError, match=r"a\.parquet"):
            open_source(tmp_path).read(0)


@pytest.mark.ranks
def test_training_reads_it_with_the_names_of_its_classes(tmp_path):
    labels = [number % 4 for number in range(16)]
    pq.write_table(table(labels, names=["a", "b", "c", "d"])[0], tmp_path / "train-00000-of-00001.parquet")
    settings = [f"data.path={tmp_path}", f"train.run_dir={tmp_path / 'run'}", "backbone.name=slim", "train.nproc=1"]
    settings += ["train.global_batch=8", "train.epochs=1", "train.device=cpu", "train.precision=float32"]
    settings += ["backbone.embedding_dim=16", "export.onnx=false"]
    ended = ended_in_this_process(["train", *settings])
    assert ended.returncode == 0, ended.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["num_classes"] == 4 and summary["num_images"] == 16
    (classes,) = (tmp_path / "run/checkpoints").glob("step-*/classes*")
    assert classes.read_text().split() == ["a", "b", "c", "d"]


def test_without_a_split_for_training_one_must_be_chosen(tmp_path):
    for split in ("validation", "test"):
        pq.write_table(table([0, 1])[0], tmp_path / f"{split}-00000-of-00001.parquet")
    with pytest.raises(DataError, match=r"has the splits test, validation: choose one of them"):
        open_source(tmp_path)


def test_files_with_numbers_only_belong_together(tmp_path):
    for number in range(2):
        pq.write_table(table([0, 1])[0], tmp_path / f"000{number}.parquet")
    assert open_source(tmp_path).num_images == 4


def test_a_damaged_first_image_does_not_stop_the_conversion(tmp_path):
    rows, payloads = table([0, 1, 1], is_struct=False)
    images = [b"no image", *payloads[1:]]
    pq.write_table(rows.set_column(0, "image", pa.array(images)), tmp_path / "a.parquet")
    source = open_source(tmp_path)
    assert [source.read(i) for i in range(3)] == images and source.image_size == (16, 16)
    pq.write_table(rows.set_column(0, "image", pa.array([b"none"] * 3)), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="None of the images in the column image"):
        open_source(tmp_path)


def test_a_class_far_beyond_the_number_of_images_is_refused(tmp_path):
    pq.write_table(table([0, 10**12])[0], tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"Row 1 of .* has label 1000000000000, which implies"):
        open_source(tmp_path)


def test_texts_and_numbers_are_not_mixed(tmp_path):
    pq.write_table(table([0, 1])[0], tmp_path / "part-0.parquet")
    pq.write_table(table(["anna", "bert"])[0], tmp_path / "part-1.parquet")
    with pytest.raises(DataError, match="mixes texts and numbers"):
        open_source(tmp_path)


def test_what_a_killed_conversion_has_left_is_removed(tmp_path):
    pq.write_table(table([0, 1])[0], tmp_path / "a.parquet")
    made = as_records(str(tmp_path / "a.parquet"))
    left = made.with_name(f".{made.name[:32]}.host.17.0123abcd.tmp")
    made.rename(left)
    assert as_records(str(tmp_path / "a.parquet")) == made and made.is_dir() and not left.exists()
