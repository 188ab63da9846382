"""The backbone, the same on every rank."""

import torch
import torch.distributed as dist
from torch import nn

from megaclass.distributed.data_parallel import average_buffers_, data_parallel


def _network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def _images():
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(1))


def _own_part(images):
    return images.chunk(dist.get_world_size())[dist.get_rank()]


def _gradients_and_statistics():
    backbone = _network()
    backbone[1].eval()  # batch statistics are each rank's own; without them the halves add up to the whole
    parallel = data_parallel(backbone)
    parallel(_own_part(_images())).square().mean().backward()
    gradients = [parameter.grad.clone() for parameter in backbone.parameters()]
    backbone.train()
    backbone(_own_part(_images()))
    own = backbone[1].running_mean.clone()
    average_buffers_(backbone)
    return gradients, own, backbone[1].running_mean, int(backbone[1].num_batches_tracked)


def test_gradients_are_those_of_the_whole_batch(run_ranks):
    alone = _network()
    alone[1].eval()
    alone(_images()).square().mean().backward()
    for gradients, *_ in run_ranks(2, _gradients_and_statistics):
        for gradient, parameter in zip(gradients, alone.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=1e-7)


def test_batch_statistics_are_each_ranks_own_until_they_are_averaged(run_ranks):
    (_, first, first_mean, first_count), (_, second, second_mean, second_count) = run_ranks(
        2, _gradients_and_statistics
    )
    assert not torch.equal(first, second)
    assert torch.equal(first_mean, second_mean)
    torch.testing.assert_close(first_mean, (first + second) / 2)
    assert first_count == second_count == 1


def _average_without_buffers():
    backbone = nn.Linear(2, 2)
    average_buffers_(backbone)
    return [name for name, _ in backbone.named_buffers()]


def test_a_backbone_without_statistics_sends_none(run_ranks):
    assert run_ranks(2, _average_without_buffers) == [[], []]
