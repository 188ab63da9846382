import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megaclass_launch.ranks.sync_batch_norm import synchronise_batch_norm


def _step(parts: list[int] | None, dims: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output and input gradient of this rank's rows, parameters' gradient over all ranks, running statistics."""
    generator = torch.Generator().manual_seed(0)
    shape = (9, 5) if dims == 1 else (9, 5, 3, 2)
    x = torch.randn(shape, dtype=torch.float64, generator=generator) * 3 + 100
    grad = torch.randn(shape, dtype=torch.float64, generator=generator)
    norm = nn.Sequential(nn.BatchNorm1d(5) if dims == 1 else nn.BatchNorm2d(5)).double()
    with torch.no_grad():
        norm[0].weight.copy_(torch.linspace(0.5, 2, 5))
    if parts is not None:
        norm = synchronise_batch_norm(norm)
        x, grad = x.split(parts)[dist.get_rank()], grad.split(parts)[dist.get_rank()]
    x = x.clone().requires_grad_()
    y = norm(x)
    y.backward(grad)
    parameters = torch.cat([norm[0].weight.grad, norm[0].bias.grad])
    if parts is not None:
        dist.all_reduce(parameters)
    return y.detach(), x.grad, parameters, norm[0].running_mean, norm[0].running_var


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("parts", [[9], [4, 5], [1, 6, 2], [0, 4, 1, 4]], ids=str)
def test_statistics_and_gradients_are_those_of_the_whole_batch(run_ranks, parts, dims):
    y, grad, parameters, mean, variance = _step(None, dims)
    results = run_ranks(len(parts), _step, parts, dims)
    torch.testing.assert_close(torch.cat([r[0] for r in results]), y, rtol=0, atol=1e-9)
    torch.testing.assert_close(torch.cat([r[1] for r in results]), grad, rtol=0, atol=1e-9)
    for _, _, other_parameters, other_mean, other_variance in results:
        torch.testing.assert_close(other_parameters, parameters, rtol=0, atol=1e-9)
        torch.testing.assert_close(other_mean, mean, rtol=0, atol=1e-9)
        torch.testing.assert_close(other_variance, variance, rtol=0, atol=1e-9)


def test_a_converted_network_keeps_its_names_and_evaluates_alike():
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 4), nn.BatchNorm1d(4))
    x = torch.randn(6, 3, 4, 4)
    plain(x)
    plain.eval()
    before, names = plain(x), list(plain.state_dict())
    converted = synchronise_batch_norm(plain)
    assert torch.equal(converted(x), before)
    assert list(converted.state_dict()) == names
