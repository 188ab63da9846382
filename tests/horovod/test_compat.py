"""Horovod's helper modules `common.util` and `data`."""

import os

import pytest
import torch

import horovod.torch as hvd
from horovod.common import util
from horovod.common.exceptions import HorovodVersionMismatchError, HostsUpdatedInterrupt
from horovod.data.data_loader_base import AsyncDataLoaderMixin, BaseDataLoader
from horovod.engine.kinds import Average, Sum
from megaclass_launch.check.build_table import build_table

# ---- horovod.common.util ----


@pytest.mark.parametrize(
    ("num_values", "n", "sizes"), [(7, 3, [3, 2, 2]), (2, 4, [1, 1, 0, 0]), (6, 3, [2, 2, 2]), (0, 2, [0, 0])]
)
def test_a_list_is_split_into_parts_whose_lengths_differ_by_one(num_values, n, sizes):
    parts = util.split_list(list(range(num_values)), n)
    assert [len(part) for part in parts] == sizes
    assert [value for part in parts for value in part] == list(range(num_values))


@pytest.mark.parametrize(
    ("version", "target", "expected"),
    [
        ("2.11.0+cu130", "2.11.0", True),
        ("2.9.1", "2.11.0", False),
        ("2.11.0a0", "2.11.0", True),
        ("1.10", "1.9.0", True),
        ("2.11", "2.11.0", True),
        ("2.11", "2.11.1", False),
        ("3", "2.11.0", True),
    ],
)
def test_versions_are_compared_as_numbers(version, target, expected):
    assert util.is_version_greater_equal_than(version, target) is expected


def test_versions_of_the_wrong_form_are_refused():
    with pytest.raises(ValueError, match="only accepts string arguments"):
        util.is_version_greater_equal_than(2, "2.11.0")
    with pytest.raises(ValueError, match=r"major\.minor\.patch\. Received: 2\.11"):
        util.is_version_greater_equal_than("2.11.0", "2.11")


@pytest.mark.ranks
def test_the_table_of_check_build_agrees_with_the_functions():
    lines = build_table().splitlines()
    for name, is_built in {"MPI": hvd.mpi_built(), "DDL": hvd.ddl_built(), "CCL": hvd.ccl_built()}.items():
        rows = [line for line in lines if line.endswith(f"] {name}")]
        assert rows and all(("[X]" in row) == is_built for row in rows), rows
    assert any("[X] Gloo" in line for line in lines) == hvd.gloo_built()


def test_environment_variables_hold_within_the_block_only(monkeypatch):
    monkeypatch.setenv("KNOWN", "before")
    monkeypatch.delenv("UNKNOWN", raising=False)
    with pytest.raises(KeyError), util.env(KNOWN="within", UNKNOWN="within", UNTOUCHED=None):
        assert (os.environ["KNOWN"], os.environ["UNKNOWN"]) == ("within", "within")
        assert "UNTOUCHED" not in os.environ
        raise KeyError
    assert os.environ["KNOWN"] == "before" and "UNKNOWN" not in os.environ


def test_an_extension_is_available_if_its_framework_is_installed(monkeypatch):
    monkeypatch.setattr(util, "tensorflow_version", lambda: "2.15.1")
    assert util.extension_available("torch") and not util.extension_available("tensorflow")
    assert util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__) is None
    with pytest.raises(
        ImportError,
        match=r"horovod\.tensorflow has not been built: it needs TensorFlow 2\.16 or later, and found 2\.15\.1",
    ):
        util.check_extension("horovod.tensorflow", "HOROVOD_WITH_TENSORFLOW", __file__)
    with pytest.raises(ImportError, match=r"MXNet is retired since 2023"):
        util.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", __file__)
    monkeypatch.setattr(util, "tensorflow_version", lambda: "2.21.0")
    assert util.extension_available("tensorflow") and not util.extension_available("mxnet")
    assert util.check_extension("horovod.tensorflow", "HOROVOD_WITH_TENSORFLOW", __file__) is None
    monkeypatch.setattr(util, "tensorflow_version", lambda: None)
    assert util.gpu_available("torch") == torch.cuda.is_available() and not util.gpu_available("tensorflow")


def test_the_build_has_gloo_and_no_mpi():
    assert util.gloo_built() is True
    assert (util.mpi_built(), util.ddl_built(), util.ccl_built()) == (False, False, False)
    assert isinstance(util.nccl_built(), int)


def test_the_version_check_raises_only_what_it_is_given():
    util.check_installed_version("torch", "2.0.0")
    mismatch = HorovodVersionMismatchError("torch", "2.0.0", "1.0.0")
    with pytest.raises(HorovodVersionMismatchError, match=r"installed with version 1\.0\.0 but found version 2\.0\.0"):
        util.check_installed_version("torch", "2.0.0", mismatch)
    assert (mismatch.name, mismatch.version, mismatch.installed_version) == ("torch", "2.0.0", "1.0.0")
    assert isinstance(mismatch, ImportError)
    assert HostsUpdatedInterrupt(skip_sync=True).skip_sync is True


def test_small_questions():
    assert [number for number in range(-2, 10) if util.num_rank_is_power_2(number)] == [1, 2, 4, 8]
    assert util.is_iterable("text") and util.is_iterable([]) and not util.is_iterable(3)
    calls = []
    cached = util._cache(lambda key: calls.append(key) or key)
    assert [cached("a"), cached("a"), cached("b")] == ["a", "a", "b"] and calls == ["a", "b"]


def test_average_is_the_deprecated_form_of_op():
    op_of = util.get_average_backwards_compatibility_fun(None)
    assert op_of(None, None) == Average and op_of(Sum, None) == Sum
    with pytest.warns(DeprecationWarning, match="`average` has been replaced with `op`"):
        assert (op_of(None, True), op_of(None, False)) == (Average, Sum)
    with pytest.raises(ValueError, match="op parameter supersedes average"):
        op_of(Sum, True)


# ---- horovod.data ----


class _Numbers(BaseDataLoader):
    def __init__(self, count: int, fails_at: int = -1) -> None:
        self.count, self.fails_at = count, fails_at

    def __len__(self) -> int:
        return self.count

    def _iterate(self):
        for number in range(self.count):
            if number == self.fails_at:
                raise KeyError(number)
            yield number

    def _process_batch(self, batch):
        return 10 * batch


class _Ahead(AsyncDataLoaderMixin, _Numbers):
    pass


@pytest.mark.parametrize("queue_size", [0, 1, 5])
def test_reading_ahead_gives_the_same_batches_in_every_epoch(queue_size):
    loader = _Ahead(queue_size, 4)
    assert [list(loader) for _ in range(3)] == [list(_Numbers(4))] * 3 == [[0, 10, 20, 30]] * 3
    assert len(loader) == 4
    loader.close_async_loader()
    assert not loader.thread.is_alive()


@pytest.mark.parametrize("queue_size", [0, 2])
def test_an_error_while_reading_ahead_is_raised_in_the_consumer_each_time(queue_size):
    loader = _Ahead(queue_size, 4, fails_at=2)
    for first in ([0, 10], []) if queue_size else ([0, 10], [0, 10]):
        seen = []
        with pytest.raises(KeyError):
            for batch in loader:
                seen.append(batch)  # noqa: PERF402 (what came before the error counts)
        assert seen == first
    loader.close_async_loader()


def test_a_loader_without_iterate_or_length_says_so():
    with pytest.raises(NotImplementedError):
        len(BaseDataLoader())
    with pytest.raises(NotImplementedError):
        list(BaseDataLoader())
