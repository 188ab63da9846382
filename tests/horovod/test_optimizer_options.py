"""DistributedOptimizer: arguments, groups, accumulated passes, process sets, closures, and optimizers that are replaced."""

import copy
import gc
import itertools
import warnings

import pytest
import torch
from tests.horovod.jobs import error_of, in_job
from torch import Tensor, nn

import horovod.torch as hvd
from horovod.torch.optimizer import checked_groups, checked_names


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def _images(rank: int, step: int = 0) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * rank + step))


def _loss(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    return model(_images(rank, step)).square().mean()


def _wrapped(model: nn.Module, lr: float = 0.1, **options):
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr), named_parameters=model.named_parameters(), **options
    )


def _mean_gradients(ranks: list[int], steps: tuple[int, ...] = (0,), is_sum: bool = False) -> list[Tensor]:
    """Of one process that sees the images of these ranks."""
    model = _model()
    for rank, step in itertools.product(ranks, steps):
        (_loss(model, rank, step) / (1 if is_sum else len(ranks))).backward()
    return [parameter.grad for parameter in model.parameters()]


def _assert_gradients(model: nn.Module, expected: list[Tensor]) -> None:
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-7)


# ---- arguments, without a job ----


def test_names_are_made_up_by_position_if_none_are_given():
    parameters = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    assert [name for name, _ in checked_names(groups, None)] == [
        "allreduce.noname.0.0",
        "allreduce.noname.0.1",
        "allreduce.noname.1.0",
    ]


def test_every_parameter_needs_one_name_of_its_own():
    one, two = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    groups = [{"params": [one, two]}]
    assert checked_names(groups, iter([("a", one), ("b", two)])) == [("a", one), ("b", two)]
    for named, text in (
        ([("a", one)], f"one or more model parameters were not named. Python object ids: {id(two)}"),
        ([("a", one), ("a", two)], "must be unique. Found duplicates: a"),
        ([one, two], "should be a sequence of tuples (name, parameter)"),
    ):
        name, said = error_of(lambda named=named: checked_names(groups, named))
        assert name == "ValueError" and text in said


@pytest.mark.parametrize("groups", [None, 1, 5, []], ids=str)
def test_groups_are_a_number_or_lists_of_parameters(groups):
    assert checked_groups(groups) == groups


@pytest.mark.parametrize("groups", [0, -1, 1.5, "two", ()], ids=str)
def test_other_groups_are_refused(groups):
    with pytest.raises(ValueError, match="groups should be a non-negative integer or a list of list"):
        checked_groups(groups)


def test_a_parameter_stands_in_one_group():
    one, two = torch.ones(1), torch.ones(1)
    assert checked_groups([[one], [two]]) == [[one], [two]]
    with pytest.raises(ValueError, match="can only appear once"):
        checked_groups([[one, two], [one]])
    with pytest.raises(ValueError, match=r"must consist of torch\.Tensor"):
        checked_groups([[one, "two"]])


# ---- gradients ----


def _all_groupings(rank: int, size: int) -> None:
    expected = _mean_gradients(list(range(size)))
    model = _model()
    lists = [[model[0].weight, model[2].bias], [model[0].bias]]
    # More groups than parameters, lists that leave some out, an empty list, and compression in groups.
    for groups, tolerance in ((1, 1e-6), (3, 1e-6), (9, 1e-6), (lists, 1e-6), ([], 1e-6), (2, 1e-2)):
        model.zero_grad()
        options = {"compression": hvd.Compression.fp16} if tolerance == 1e-2 else {}
        optimizer = _wrapped(model, lr=0.0, groups=groups, **options)
        for _step in range(2):
            optimizer.zero_grad()
            _loss(model, rank).backward()
            optimizer.step()
            for parameter, gradient in zip(model.parameters(), expected, strict=True):
                torch.testing.assert_close(parameter.grad, gradient, rtol=tolerance, atol=tolerance)
        del optimizer
        gc.collect()


def test_groups_of_every_kind_give_the_same_gradients(run_ranks):
    run_ranks(2, in_job, _all_groupings)


def _accumulation(rank: int, size: int) -> None:
    everyone = list(range(size))
    model = _model()
    optimizer = _wrapped(model, lr=0.0, backward_passes_per_step=3)
    for again in range(3):
        _loss(model, rank, again).backward()
        assert error_of(optimizer.zero_grad)[0] == "AssertionError"
    optimizer.step()
    _assert_gradients(model, _mean_gradients(everyone, (0, 1, 2)))
    # A step after fewer passes reduces what there is.
    optimizer.zero_grad()
    _loss(model, rank, 5).backward()
    optimizer.step()
    _assert_gradients(model, _mean_gradients(everyone, (5,)))
    # A fourth pass before the step is refused.
    for again in range(3):
        _loss(model, rank, again).backward()
    name, text = error_of(lambda: _loss(model, rank, 3).backward())
    assert name == "AssertionError" and "Increase backward_passes_per_step to accumulate gradients locally" in text
    optimizer.synchronize()
    optimizer.set_backward_passes_per_step(1)
    optimizer.zero_grad()
    _loss(model, rank, 7).backward()
    optimizer.synchronize()
    _assert_gradients(model, _mean_gradients(everyone, (7,)))


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_of_several_passes_are_added_before_they_are_sent(run_ranks, size):
    run_ranks(size, in_job, _accumulation)


def _in_a_process_set(rank: int, size: int) -> None:
    pair = hvd.ProcessSet([0, 2])
    hvd.shutdown()
    hvd.init(process_sets=[pair])
    model = _model()
    optimizer = _wrapped(model, lr=0.1, process_set=pair)
    _loss(model, rank).backward()
    if not pair.included():
        # A rank outside of the set trains by itself; synchronize() has nothing to wait for.
        optimizer.synchronize()
    optimizer.step()
    expected = _mean_gradients([0, 2] if pair.included() else [rank])
    _assert_gradients(model, expected)
    for parameter, start, gradient in zip(model.parameters(), _model().parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), start.detach() - 0.1 * gradient)
    name, text = error_of(lambda: _wrapped(model, op=hvd.Adasum, process_set=pair))
    assert name == "NotImplementedError" and "Adasum does not support non-global process sets" in text
    # A rank that leaves the job ends it for all, and rank 1 has waited for nobody.
    hvd.barrier()


def test_an_optimizer_of_a_process_set_leaves_the_other_ranks_alone(run_ranks):
    run_ranks(3, in_job, _in_a_process_set)


def _ops_and_factors(rank: int, size: int) -> None:
    everyone = list(range(size))
    for options, factor in (
        ({"op": hvd.Sum}, size),
        ({"op": hvd.Average}, 1),
        ({"gradient_predivide_factor": 4.0}, 1),
        ({"gradient_predivide_factor": 0.5}, 1),
    ):
        model = _model()
        optimizer = _wrapped(model, lr=0.0, **options)
        _loss(model, rank).backward()
        optimizer.step()
        _assert_gradients(model, [gradient * factor for gradient in _mean_gradients(everyone)])


def test_sums_and_averages_by_any_split_of_the_factor_agree(run_ranks):
    run_ranks(2, in_job, _ops_and_factors)


class _Doubled:
    """A compressor of the user's own."""

    @staticmethod
    def compress(tensor):
        return tensor.double(), tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tensor.to(ctx)


def _own_compressor(rank: int, size: int) -> None:
    for options in ({}, {"groups": 2}):
        model = _model()
        optimizer = _wrapped(model, lr=0.0, compression=_Doubled, **options)
        for _ in range(3):
            optimizer.zero_grad()
            _loss(model, rank).backward()
            optimizer.step()
        _assert_gradients(model, _mean_gradients(list(range(size))))
        assert all(parameter.grad.dtype is torch.float32 for parameter in model.parameters())


def test_a_users_compressor_packs_and_unpacks_gradients(run_ranks):
    run_ranks(2, in_job, _own_compressor)


# ---- life of an optimizer ----


def _closures(rank: int, size: int) -> None:
    model = _model()
    optimizer = _wrapped(model)

    def closure() -> Tensor:
        return _loss(model, rank)

    # SGD evaluates the closure without gradients of ours; Horovod's step() passes it on.
    loss = optimizer.step(closure)
    assert float(loss) == pytest.approx(float(_loss(_model(), rank)))
    plain = torch.optim.SGD(_model().parameters(), lr=0.1)
    assert set(optimizer.state_dict()) == set(plain.state_dict())


def test_step_passes_a_closure_on(run_ranks):
    run_ranks(2, in_job, _closures)


def _replaced(rank: int, size: int) -> None:
    model = _model()
    first = _wrapped(model)
    _loss(model, rank).backward()
    first.step()
    del first
    gc.collect()
    # The hooks of the first one do nothing any more: no gradient is sent twice under one name.
    second = _wrapped(model, lr=0.0)
    start = copy.deepcopy(model.state_dict())
    for step in range(2):
        second.zero_grad()
        _loss(model, rank, step).backward()
        second.step()
    assert all(torch.equal(value, start[name]) for name, value in model.state_dict().items())


def test_an_optimizer_that_was_replaced_stops_reducing(run_ranks):
    run_ranks(2, in_job, _replaced)


def _load_state(rank: int, size: int) -> None:
    model = _model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), named_parameters=model.named_parameters()
    )
    _loss(model, rank).backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    # Loading in the middle of a step drops the gradients that were counted, so the next pass is a first one.
    optimizer.set_backward_passes_per_step(2)
    optimizer.zero_grad()
    _loss(model, rank, 1).backward()
    optimizer.load_state_dict(saved)
    optimizer.set_backward_passes_per_step(1)
    optimizer.zero_grad()
    _loss(model, rank, 2).backward()
    optimizer.step()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    gathered = hvd.allgather(weights[None])
    assert torch.equal(gathered[0], gathered[-1])


def test_loading_a_state_starts_a_new_step(run_ranks):
    run_ranks(2, in_job, _load_state)


def _one_rank(rank: int, size: int) -> None:
    """On one rank nothing is sent, Adasum is a plain step, and the warnings are those of several ranks."""
    for op in (hvd.Average, hvd.Adasum):
        model, plain = _model(), _model()
        optimizer = _wrapped(model, op=op)
        inner = torch.optim.SGD(plain.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            inner.zero_grad()
            _loss(model, 0, step).backward()
            _loss(plain, 0, step).backward()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
            inner.step()
        assert all(map(torch.equal, model.parameters(), plain.parameters()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_on_one_rank_it_is_the_plain_optimizer(run_ranks):
    run_ranks(1, in_job, _one_rank)


def _adasum_passes(rank: int, size: int) -> None:
    model = _model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(),
        op=hvd.Adasum,
        backward_passes_per_step=2,
    )
    losses = []
    for step in range(6):
        optimizer.zero_grad()
        for again in range(2):
            _loss(model, rank, again).backward()
        losses.append(float(optimizer.step(lambda: _loss(model, rank, 0))))
        optimizer.synchronize()  # does nothing
        assert not optimizer._handles, step
    assert losses[-1] < losses[0]
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    gathered = hvd.allgather(weights[None])
    assert torch.equal(gathered[0], gathered[-1])
    optimizer.zero_grad(set_to_none=False)
    assert all(not parameter.grad.any() for parameter in model.parameters())


def test_the_adasum_optimizer_trains_with_accumulated_passes_and_keeps_ranks_equal(run_ranks):
    run_ranks(2, in_job, _adasum_passes)
