"""Buffers that are kept, and their division into the shapes of tensors."""

import torch

from horovod.transport.reductions import FusionBuffers


def test_each_tensor_has_a_place_of_its_shape_also_after_the_buffer_has_grown():
    buffers = FusionBuffers()
    small = [torch.arange(3.0), torch.arange(4.0).view(2, 2), torch.tensor(9.0), torch.empty(0, 5)]
    flat, places = buffers.for_fusion(small, torch.float32)
    torch._foreach_copy_(places, small)
    assert flat.tolist() == [0, 1, 2, 0, 1, 2, 3, 9]
    again, same_places = buffers.for_fusion([tensor.clone() for tensor in small], torch.float32)
    assert again is flat and same_places is places
    # The same number of elements in other shapes is another layout in the same buffer.
    other, other_places = buffers.for_fusion([torch.ones(2, 4)], torch.float32)
    assert other.data_ptr() == flat.data_ptr() and [tuple(place.shape) for place in other_places] == [(2, 4)]
    large, _ = buffers.for_fusion([torch.ones(1000)], torch.float32)
    moved, moved_places = buffers.for_fusion(small, torch.float32)
    assert moved.data_ptr() == large.data_ptr() != flat.data_ptr()
    assert moved_places[0].data_ptr() == large.data_ptr()


def test_dtypes_and_uses_have_buffers_of_their_own():
    buffers = FusionBuffers()
    flats = [
        buffers.for_fusion([torch.ones(4)], torch.float32)[0],
        buffers.for_fusion([torch.ones(4).double()], torch.float64)[0],
        buffers.flat(4, torch.float32, torch.device("cpu"), "remainders"),
    ]
    assert len({flat.data_ptr() for flat in flats}) == 3
