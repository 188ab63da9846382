"""Memory of large results: used again, but never while a tensor holds any part of it."""

import sys

import pytest
import torch

from horovod.transport.arithmetic import empty_result, release_memory


@pytest.mark.parametrize("takes_borrowed", [False, True], ids=["as this Python counts", "as Python 3.14 counts"])
def test_a_result_is_written_into_memory_that_no_tensor_uses(takes_borrowed, monkeypatch):
    if takes_borrowed:
        # There a call borrows a local variable and counts one reference less; the lambda itself adds one.
        count = sys.getrefcount
        monkeypatch.setattr(sys, "getrefcount", lambda thing: count(thing) - 2)
    release_memory()
    like = torch.empty(3, 2**20, dtype=torch.float64)
    first, second = empty_result(like), empty_result(like)
    assert first.shape == like.shape and first.dtype == like.dtype
    assert first.data_ptr() != second.data_ptr()
    row, memory = second[1], second.data_ptr()
    del second
    assert empty_result(like).data_ptr() != memory, "a row of it is still held"
    del row
    again = [empty_result(like) for _ in range(2)]
    assert memory in [result.data_ptr() for result in again]
    assert first.data_ptr() not in [result.data_ptr() for result in again]
    release_memory()
