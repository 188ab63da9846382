"""Host memory for copies of the state: exactly as much as the tensors need, pinned on a GPU, used again."""

import math

import pytest
import torch

from megaclass.checkpoint.host_copy import HostCopy, block_layout


@pytest.mark.unit
def test_tensors_from_a_gpu_share_a_block_of_their_size_and_not_of_the_next_power_of_two():
    wanted = {
        "weight": ((1_100_000, 512), torch.float32),
        "momentum": ((1_100_000, 512), torch.bfloat16),
        "count": ((), torch.int64),
        "empty": ((0, 512), torch.float32),
        "odd": ((3,), torch.uint8),
    }
    offsets, num_bytes = block_layout(wanted)
    needed = sum(math.prod(shape) * dtype.itemsize for shape, dtype in wanted.values())
    assert needed <= num_bytes < needed + 64 * len(wanted) + 4096
    ends = [offsets[name] + math.prod(shape) * dtype.itemsize for name, (shape, dtype) in wanted.items()]
    assert all(end <= start for end, start in zip(ends, [*list(offsets.values())[1:], num_bytes], strict=True))
    assert all(offset % 64 == 0 for offset in offsets.values()) and num_bytes % 4096 == 0
    assert block_layout({})[1] == 4096


@pytest.mark.unit
def test_the_memory_is_used_again_until_a_shape_changes():
    copy = HostCopy()
    first = copy.reserve({"weight": torch.ones(5, 2)})["weight"]
    assert copy.take({"weight": torch.full((5, 2), 3.0)})["weight"].data_ptr() == first.data_ptr()
    assert torch.equal(first, torch.full((5, 2), 3.0))
    room = copy.reserve({"weight": torch.ones(5, 2)}, num_rows=7)["weight"]
    assert room.shape == (7, 2) and room.data_ptr() != first.data_ptr()


@pytest.mark.gpu
def test_copies_from_a_gpu_are_pinned_exact_and_survive_a_change_of_shape():
    copy = HostCopy()
    for num_rows in (1000, 3001, 10):
        weight = torch.randn(num_rows, 512, device="cuda")
        state = {"weight": weight, "half": weight.bfloat16(), "count": torch.tensor(num_rows), "none": weight[:0]}
        for _ in range(2):
            expected = weight.cpu()
            taken = copy.take(state)
            # Runs after the copy, which must not contain it.
            weight.add_(1.0)
            copy.wait()
            assert torch.equal(taken["weight"], expected) and int(taken["count"]) == num_rows
            # torch asks CUDA about the beginning of a tensor's memory: the block has pages before it that are not pinned.
            assert torch.from_numpy(taken["weight"].numpy()).is_pinned()
