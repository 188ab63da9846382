import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megaclass.cli.main import main
from megaclass.data.loader import BatchLoader
from megaclass.data.sources.features import FeatureSource, write_features
from megaclass.data.sources.open_source import check_source, format_of, open_source
from megaclass.data.sources.tensors import collated, given_samples
from megaclass.errors import DataError

NUM_ROWS, WIDTH = 40, 6


@pytest.fixture
def rows():
    random = np.random.default_rng(0)
    return random.normal(size=(NUM_ROWS, WIDTH)).astype(np.float32), np.arange(NUM_ROWS) % 5


def written(folder, features, labels, name="x.npy"):
    if name.endswith(".npy"):
        np.save(folder / name, features)
        np.save((folder / name).with_suffix(".labels.npy"), labels)
    else:
        save_file({"features": torch.as_tensor(features), "labels": torch.as_tensor(labels)}, folder / name)
    return folder / name


class Sequences:
    """Sequences of 1 to 7 rows of three numbers; row t of sample i is (i, t, 1)."""

    num_images, num_classes, image_size = 20, 4, (0, 3)
    labels = np.arange(20) % 4

    def tensors(self, indices):
        return [
            torch.tensor([[index, t, 1] for t in range(1 + index % 7)], dtype=torch.float32)
            for index in indices.tolist()
        ]

    def read(self, index):
        return b"%d" % index

    def name_of(self, index):
        return f"sound {index}"

    def describe(self):
        return "20 sounds"


@pytest.mark.parametrize("name", ["x.npy", "x.safetensors"])
def test_a_file_of_features_has_its_rows_and_labels(tmp_path, rows, name):
    source = open_source(written(tmp_path, *rows, name=name))
    assert isinstance(source, FeatureSource)
    assert (source.num_images, source.num_classes, source.image_size) == (NUM_ROWS, 5, (1, WIDTH))
    places = np.array([3, 0, 39])
    np.testing.assert_array_equal(source.tensors(places).numpy(), rows[0][places])
    np.testing.assert_array_equal(source.labels, rows[1])
    assert source.read(7) == rows[0][7].tobytes()
    assert "40 rows of 5 classes" in source.describe()


@pytest.mark.parametrize("name", ["x.npy", "x.safetensors"])
def test_features_stay_in_the_file_until_their_rows_are_read(tmp_path, name):
    """The mapping is private to no one: a number that is changed in the file afterwards is read."""
    path = written(tmp_path, np.zeros((NUM_ROWS, 1024), np.float32), np.zeros(NUM_ROWS, np.int64), name=name)
    source = open_source(path)
    end_of_row_20 = path.stat().st_size - 19 * 4096 if name == "x.npy" else None
    if end_of_row_20 is None:
        content = path.read_bytes()
        header = 8 + int.from_bytes(content[:8], "little")
        # safetensors sorts tensors by the size of their dtype: the labels come first.
        end_of_row_20 = header + NUM_ROWS * 8 + 21 * 4096
    with path.open("r+b") as file:
        file.seek(end_of_row_20 - 4)
        file.write(np.float32(5).tobytes())
    assert float(source.tensors(np.array([20]))[0, -1]) == 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floats_are_trained_on_as_float32(tmp_path, rows, dtype):
    path = tmp_path / "x.safetensors"
    save_file({"features": torch.from_numpy(rows[0]).to(dtype), "labels": torch.from_numpy(rows[1])}, path)
    batch = BatchLoader(open_source(path), global_batch=8).load(0, 0)
    (inputs,) = batch.inputs(torch.device("cpu"))
    assert inputs.dtype == torch.float32
    torch.testing.assert_close(inputs, torch.from_numpy(rows[0][batch.indices]), rtol=1e-2, atol=1e-2)


def test_names_of_classes_lie_next_to_the_file(tmp_path, rows):
    path = write_features(rows[0], [f"class {label}" for label in rows[1]], tmp_path)
    assert format_of(path).class_names() == [b"class 0", b"class 1", b"class 2", b"class 3", b"class 4"]
    np.testing.assert_array_equal(open_source(path).labels, rows[1])
    assert set(format_of(path).files()) == {path, tmp_path / "classes.txt"}
    # Held-out rows in the same folder, without the last class.
    assert open_source(written(tmp_path, rows[0][:3], rows[1][:3])).num_classes == 5


def test_several_labels_end_with_minus_one(tmp_path, rows):
    labels = np.stack([rows[1], np.where(rows[1] > 2, 7, -1)], axis=1)
    source = open_source(written(tmp_path, rows[0], labels))
    assert source.num_classes == 8 and source.labels.shape == (NUM_ROWS, 2)
    batch = BatchLoader(source, global_batch=8).load(0, 0)
    np.testing.assert_array_equal(batch.labels.numpy(), labels[batch.indices])


@pytest.mark.parametrize(
    ("features", "labels", "says"),
    [
        (
            np.zeros((4, 3)),
            np.zeros(5, np.int64),
            r"labels .* shape \(5,\) and dtype int64: expected integers of shape \(4,\)",
        ),
        (np.zeros((4, 3)), np.zeros(4), r"labels .* dtype float64: expected integers"),
        (np.zeros((4, 3)), np.zeros((4, 2, 1), np.int64), r"labels .* shape \(4, 2, 1\)"),
        (np.zeros(4), np.zeros(4, np.int64), r"features .* shape \(4,\).* expected a matrix \(N, W\)"),
        (np.zeros((4, 3), np.int32), np.zeros(4, np.int64), "features .* dtype int32: expected a matrix"),
        (np.zeros((0, 3)), np.zeros(0, np.int64), r"features .* shape \(0, 3\)"),
        (np.zeros((4, 3)), np.array([0, 1, -1, 2]), r"Row 2 of .* has the labels \[-1\]"),
        (
            np.zeros((3, 3)),
            np.array([[0, 1], [-1, -1], [2, 0]]),
            r"Row 1 of .* has the labels \[-1, -1\]: .* at least one",
        ),
        (
            np.zeros((2, 3)),
            np.array([[0, -1, 1], [0, 1, 2]]),
            r"Row 0 of .* has the labels \[0, -1, 1\]: .* after the last",
        ),
        (np.zeros((2, 3)), np.array([[0, -2], [0, 1]]), r"Row 0 of .* has the labels \[0, -2\]"),
        (np.zeros((2, 3)), np.array([0, 2**40]), r"Row 1 of .* has label 1099511627776, which implies"),
    ],
)
def test_features_and_labels_that_do_not_fit_are_refused_with_the_reason(tmp_path, features, labels, says):
    with pytest.raises(DataError, match=says):
        open_source(written(tmp_path, features, labels))
    with pytest.raises(DataError, match=says):
        write_features(features, labels, tmp_path)


def test_missing_and_damaged_files_are_named(tmp_path, rows):
    with pytest.raises(DataError, match=r"There is no file .*nothing\.npy: expected features"):
        check_source(tmp_path / "nothing.npy")
    np.save(tmp_path / "x.npy", rows[0])
    with pytest.raises(
        DataError, match=r"There is no file .*x\.labels\.npy: expected integers .*, the labels of .*x\.npy"
    ):
        open_source(tmp_path / "x.npy")
    np.save(tmp_path / "x.labels.npy", rows[1])
    (tmp_path / "x.npy").write_bytes((tmp_path / "x.npy").read_bytes()[:-40])
    with pytest.raises(DataError, match=r"Cannot read .*x\.npy: .* Expected a NumPy array"):
        open_source(tmp_path / "x.npy")
    np.save(tmp_path / "x.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(DataError, match=r"Cannot read .*x\.npy"):
        open_source(tmp_path / "x.npy")
    (tmp_path / "y.safetensors").write_bytes(b"nothing of that kind")
    with pytest.raises(DataError, match=r"Cannot read .*y\.safetensors"):
        open_source(tmp_path / "y.safetensors")
    save_file({"rows": torch.zeros(2, 2)}, tmp_path / "y.safetensors")
    with pytest.raises(DataError, match="it has no tensor features and no tensor labels"):
        open_source(tmp_path / "y.safetensors")


def test_a_number_that_is_not_finite_is_named_by_its_row(tmp_path, rows):
    features = rows[0].copy()
    features[17, 3] = np.nan
    loader = BatchLoader(open_source(written(tmp_path, features, rows[1])), global_batch=NUM_ROWS)
    with pytest.raises(DataError, match=r"row 17 of .*x\.npy holds NaN or infinity"):
        loader.load(0, 0)


def test_images_and_features_are_not_joined(tmp_path, rows):
    path = written(tmp_path, *rows)
    with pytest.raises(DataError, match="Only images can be joined with commas"):
        open_source(f"{path},synthetic:4x8")


@pytest.mark.parametrize("source", ["features", "sequences"])
def test_ranks_share_the_batches_of_one_process(tmp_path, rows, source):
    source = open_source(written(tmp_path, *rows)) if source == "features" else Sequences()
    alone = BatchLoader(source, global_batch=8, seed=3).load(1, 1)
    parts = [BatchLoader(source, global_batch=8, seed=3, rank=rank, world_size=2).load(1, 1) for rank in range(2)]
    np.testing.assert_array_equal(np.concatenate([part.indices for part in parts]), alone.indices)
    rows_of_parts = [row for part in parts for row in part.images]
    for row, whole in zip(rows_of_parts, alone.images, strict=True):
        # A rank pads to its own longest sequence.
        torch.testing.assert_close(row, whole[: len(row)])
        assert not whole[len(row) :].any()


def test_sequences_are_padded_and_come_with_their_lengths():
    batch = BatchLoader(Sequences(), global_batch=6).load(0, 0)
    padded, lengths = batch.inputs(torch.device("cpu"))
    np.testing.assert_array_equal(lengths.numpy(), 1 + batch.indices % 7)
    assert padded.shape == (6, int(lengths.max()), 3)
    for row, index, length in zip(padded, batch.indices.tolist(), lengths.tolist(), strict=True):
        assert (row[:length, 0] == index).all() and row[:length, 1].tolist() == list(range(length))
        assert not row[length:].any()
    part, part_lengths = batch.inputs(torch.device("cpu"), slice(2, 4))
    torch.testing.assert_close(part, padded[2:4])
    torch.testing.assert_close(part_lengths, lengths[2:4])


def test_every_sample_occurs_once_in_a_pass():
    seen = [index for batch in BatchLoader(Sequences(), global_batch=6).once(8) for index in batch.indices.tolist()]
    assert seen == list(range(20))


class Odd(Sequences):
    def __init__(self, samples):
        self.samples = samples

    def tensors(self, indices):
        return [self.samples[index] for index in indices.tolist()]


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        ([torch.ones(2, 3), torch.ones(0, 3)], "sound 1 is empty: expected at least one row"),
        (
            [torch.ones(2, 3), torch.ones(2, 4)],
            "sound 0 and others of its batch have rows of different shapes or dtypes",
        ),
        ([torch.ones(2, 3), torch.ones(2, 3).long()], "different shapes or dtypes"),
        ([torch.ones(2, 3), torch.full((1, 3), torch.inf)], "sound 1 holds NaN or infinity"),
    ],
)
def test_sequences_that_cannot_form_a_batch_are_named(samples, says):
    source = Odd(samples)
    with pytest.raises(DataError, match=says):
        collated(source.tensors, np.arange(2), source.name_of)


def test_sequences_are_not_kept_on_the_device():
    with pytest.raises(DataError, match=r"data\.on_gpu is true, but the samples differ in length: 20 sounds"):
        BatchLoader(Sequences(), global_batch=6, is_resident=True)


def test_features_may_be_kept_on_the_device(tmp_path, rows):
    source = open_source(written(tmp_path, *rows))
    kept = BatchLoader(source, global_batch=8, is_resident=True, device=torch.device("cpu"))
    for read, resident in zip(BatchLoader(source, global_batch=8).batches(), kept.batches(), strict=True):
        torch.testing.assert_close(resident.images, read.images)
        torch.testing.assert_close(resident.labels, read.labels)
        np.testing.assert_array_equal(resident.indices, read.indices)


@pytest.mark.parametrize(
    ("given", "size", "says"),
    [
        (
            np.zeros((3, 5), np.float32),
            (1, 6),
            r"Cannot embed ndarray: a matrix of shape \(3, 5\).*matrix \(N, 6\)",
        ),
        (np.zeros((3, 6), np.int64), (1, 6), r"torch.int64.*matrix \(N, 6\) of floats"),
        ("photo.jpg", (1, 6), r"matrix \(N, 6\)"),
        ([object()], (0, 6), r"Cannot embed list: .* list of tensors \(T, 6\)"),
    ],
)
def test_samples_that_a_model_cannot_take_are_refused(given, size, says):
    with pytest.raises(DataError, match=says):
        given_samples(given, size)


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_tools_for_images_say_so(tmp_path, rows, command, capsys):
    path = written(tmp_path, *rows)
    assert main(["data", command, str(path)]) == 2
    assert f"megaclass data {command} is for images, but {path} is a file of features" in capsys.readouterr().err


def test_inspect_counts_the_rows_of_each_class(tmp_path, rows, capsys):
    assert main(["data", "inspect", str(written(tmp_path, *rows))]) == 0
    text = capsys.readouterr().out
    assert "6 numbers" in text and "0 unreadable" not in text and "smallest 8" in text
