"""DistributedOptimizer, parameters, states, objects, batch norm."""

import copy
import itertools
import warnings

import pytest
import torch
from tests.horovod.jobs import error_of, in_job
from torch import nn

import horovod.torch as hvd


def _model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def _batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + step))


def _reference(size: int, steps: int, passes: int = 1, op_is_sum: bool = False) -> list[torch.Tensor]:
    """One process that sees all batches."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for rank, again in itertools.product(range(size), range(passes)):
            loss = model(_batch(rank, step * passes + again)).square().mean()
            (loss if op_is_sum else loss / size).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def _train(rank: int, size: int, passes: int = 1, **options) -> list[torch.Tensor]:
    model = _model(seed=rank)
    hvd.broadcast_parameters(_model().state_dict() if rank == 0 else model.state_dict(), root_rank=0)
    model.load_state_dict(_model().state_dict())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=passes,
        **options,
    )
    for step in range(3):
        optimizer.zero_grad()
        for again in range(passes):
            model(_batch(rank, step * passes + again)).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def _all_options(rank: int, size: int) -> None:
    def same(got, expected, **tolerance):
        for one, two in zip(got, expected, strict=True):
            torch.testing.assert_close(one, two, **({"rtol": 1e-5, "atol": 1e-6} | tolerance))

    plain = _reference(size, 3)
    same(_train(rank, size), plain)
    same(_train(rank, size, passes=2), _reference(size, 3, passes=2))
    same(_train(rank, size, op=hvd.Sum), _reference(size, 3, op_is_sum=True))
    same(_train(rank, size, gradient_predivide_factor=2.0), plain)
    same(_train(rank, size, groups=2), plain)
    same(_train(rank, size, compression=hvd.Compression.fp16), plain, rtol=0.01, atol=1e-3)
    same(_train(rank, size, compression=hvd.Compression.bf16), plain, rtol=0.05, atol=5e-3)
    same(_train(rank, size, compression=hvd.Compression.fp8), plain, rtol=0.2, atol=0.02)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_training_on_several_ranks_is_training_on_all_their_batches(run_ranks, size):
    run_ranks(size, in_job, _all_options)


def _details(rank: int, size: int) -> None:
    model = _model()
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters())
    assert isinstance(optimizer, torch.optim.Adam) and type(optimizer).__name__ == "Adam"
    # Only the first layer has a gradient on rank 0: the others' are reduced with zeros.
    output = model[0](_batch(rank, 0)) if rank == 0 else model(_batch(rank, 0))
    output.sum().backward()
    assert error_of(optimizer.zero_grad)[0] == "AssertionError"
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    for parameter in model.parameters():
        gathered = hvd.allgather(parameter.detach()[None].contiguous())
        assert torch.equal(gathered[0], gathered[-1])
    optimizer.zero_grad(set_to_none=False)
    assert all(not parameter.grad.any() for parameter in model.parameters())
    model(_batch(rank, 1)).sum().backward()
    kind, text = error_of(lambda: model(_batch(rank, 1)).sum().backward())
    assert kind == "AssertionError" and "more than backward_passes_per_step times" in text
    optimizer.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with optimizer.skip_synchronize():
        optimizer.step()
    model(_batch(rank, 2)).sum().backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert ["without optimizer.skip_synchronize()" in str(w.message) for w in caught] == [True]
    optimizer.set_backward_passes_per_step(2)
    for _ in range(2):
        model(_batch(rank, 3)).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_the_wrapped_optimizer_stays_what_it_was_and_says_when_it_is_misused(run_ranks):
    run_ranks(2, in_job, _details)


def _same_everywhere(model: nn.Module) -> bool:
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    gathered = hvd.allgather(flat[None])
    return all(torch.equal(gathered[0], other) for other in gathered)


def _without_forced_reductions(rank: int, size: int) -> None:
    model = _model()
    unused = nn.Linear(2, 2)
    both = nn.ModuleDict({"model": model, "unused": unused})
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(both.parameters(), lr=0.1, weight_decay=0.1), named_parameters=both.named_parameters()
    )
    optimizer._requires_update = set()
    before = unused.weight.detach().clone()
    for step in range(4):
        optimizer.zero_grad()
        model(_batch(rank, step)).square().mean().backward()
        if step == 2:
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        assert _same_everywhere(model)
    # A gradient of zeros would have let the weight decay.
    assert unused.weight.grad is None and torch.equal(unused.weight, before)


def test_parameters_without_a_gradient_can_be_left_out_as_scripts_do_it(run_ranks):
    run_ranks(2, in_job, _without_forced_reductions)


def _parameters_that_come_later(rank: int, size: int, **options) -> None:
    model = _model()
    last = list(model[2].parameters())
    model[0].bias.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([model[0].weight, model[0].bias], lr=0.1), **options)
    for step in range(4):
        if step == 1:
            optimizer.add_param_group({"params": last, "lr": 0.05})
        if step == 2:
            model[0].bias.requires_grad_(True)
        optimizer.zero_grad()
        model.zero_grad()
        model(_batch(rank, step)).square().mean().backward()
        optimizer.step()
        assert _same_everywhere(model)
    assert not torch.equal(last[1], _model()[2].bias) and not torch.equal(model[0].bias, _model()[0].bias)


def _all_that_come_later(rank: int, size: int) -> None:
    _parameters_that_come_later(rank, size)
    _parameters_that_come_later(rank, size, groups=2)
    _parameters_that_come_later(rank, size, op=hvd.Adasum)


def test_parameters_that_are_added_or_thawed_later_are_reduced_too(run_ranks):
    run_ranks(2, in_job, _all_that_come_later)


def _two_optimizers(rank: int, size: int) -> None:
    """Weights and an architecture, as differentiable search trains them: each backward feeds both optimizers."""
    model = _model()
    architecture = nn.Parameter(torch.ones(6))
    weights = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    search = hvd.DistributedOptimizer(
        torch.optim.Adam([architecture], lr=0.1), named_parameters=[("architecture", architecture)]
    )
    for step in range(3):
        if step:
            search.zero_grad()
            model(_batch(rank, 10 + step) * architecture).square().mean().backward()
            search.step()
            weights.synchronize()
        weights.zero_grad()
        search._handles.clear()
        model(_batch(rank, step) * architecture).square().mean().backward()
        weights.step()
        search.synchronize()
        assert _same_everywhere(model)
        assert _same_everywhere(nn.ParameterList([architecture]))


@pytest.mark.filterwarnings("ignore:optimizer.step\\(\\) called without optimizer.skip_synchronize")
def test_one_backward_may_feed_two_optimizers(run_ranks):
    run_ranks(2, in_job, _two_optimizers)


def _gradient_scaler(rank: int, size: int) -> None:
    model = _model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters()), named_parameters=model.named_parameters()
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        # A gradient overflows on one rank: all of them must skip the step.
        factor = float("inf") if rank == 1 and step == 1 else 1.0
        scaler.scale(model(_batch(rank, step)).square().mean() * factor).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        assert _same_everywhere(model)
    assert scales == [1024.0, 512.0, 512.0, 1024.0]


def test_a_gradient_scaler_skips_the_same_steps_on_all_ranks(run_ranks):
    run_ranks(2, in_job, _gradient_scaler)


def _arguments(rank: int, size: int) -> None:
    one, two = _model(), _model(1)
    both = torch.optim.SGD(itertools.chain(one.parameters(), two.parameters()), lr=0.1)
    names = list(one.named_parameters())

    def wrap(**options):
        return error_of(lambda: hvd.DistributedOptimizer(both, **options))

    assert "Found duplicates" in wrap(named_parameters=names + list(two.named_parameters()))[1]
    assert "were not named" in wrap(named_parameters=names)[1]
    assert "sequence of tuples" in wrap(named_parameters=list(one.parameters()))[1]
    assert wrap(op=hvd.Sum, gradient_predivide_factor=2.0)[0] == "ValueError"
    assert wrap(backward_passes_per_step=0)[0] == "ValueError"
    assert wrap(groups=-1)[0] == "ValueError"
    assert wrap(groups=[[1]])[1] == "groups must consist of torch.Tensor."
    weight = one[0].weight
    assert wrap(groups=[[weight], [weight]])[1] == "A parameter can only appear once in groups."
    with pytest.warns(DeprecationWarning, match="num_groups"):
        wrapped = hvd.DistributedOptimizer(both, num_groups=2)
    name, text = error_of(lambda: hvd.DistributedOptimizer(wrapped))
    assert name == "TypeError" and "is a DistributedOptimizer already" in text


def test_wrong_arguments_are_refused_in_horovods_words(run_ranks):
    run_ranks(2, in_job, _arguments)


def _sparse(rank: int, size: int, sparse_as_dense: bool) -> None:
    torch.manual_seed(0)
    table = nn.Embedding(10, 3, sparse=True)
    start = table.weight.detach().clone()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=1.0),
        named_parameters=table.named_parameters(),
        sparse_as_dense=sparse_as_dense,
    )
    table(torch.tensor([rank, 5])).sum().backward()
    optimizer.step()
    expected = start.clone()
    expected[:size] -= 1 / size
    expected[5] -= 1
    torch.testing.assert_close(table.weight.detach(), expected)
    handle = hvd.sparse_allreduce_async(torch.eye(size)[rank].to_sparse(), "sparse", hvd.Sum)
    assert callable(handle) and handle().to_dense().tolist() == [1.0] * size


@pytest.mark.parametrize("sparse_as_dense", [False, True], ids=["gathered", "made dense"])
def test_sparse_gradients_are_averaged(run_ranks, sparse_as_dense):
    run_ranks(2, in_job, _sparse, sparse_as_dense)


def _grouped_by_hand_and_adasum(rank: int, size: int) -> None:
    model = _model()
    lists = [[model[0].weight, model[2].bias]]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), groups=lists
    )
    model(_batch(rank, 0)).square().mean().backward()
    optimizer.step()
    reference = _model()
    for r in range(size):
        (reference(_batch(r, 0)).square().mean() / size).backward()
    for one, two in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, two - 0.1 * two.grad)
    model = _model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), op=hvd.Adasum
    )
    before = _model()
    before(_batch(rank, 0)).square().mean().backward()
    steps = [hvd.allreduce(-0.1 * parameter.grad, op=hvd.Adasum) for parameter in before.parameters()]
    model(_batch(rank, 0)).square().mean().backward()
    optimizer.step()
    for parameter, old, step in zip(model.parameters(), before.parameters(), steps, strict=True):
        torch.testing.assert_close(parameter, old + step)
    assert error_of(lambda: optimizer.skip_synchronize().__enter__())[0] == "AssertionError"


def test_groups_by_hand_and_the_adasum_optimizer(run_ranks):
    run_ranks(3, in_job, _grouped_by_hand_and_adasum)


def _states(rank: int, size: int) -> None:
    makers = [
        lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, weight_decay=0.1),
        lambda p, lr: torch.optim.SGD(p, lr=lr),
        lambda p, lr: torch.optim.Adam(p, lr=lr, betas=(0.8 + lr, 0.9)),
        lambda p, lr: torch.optim.RMSprop(p, lr=lr, centered=True),
        lambda p, lr: torch.optim.Adagrad(p, lr=lr),
    ]
    for make, wrapped in itertools.product(makers, [False, True]):
        model = _model(rank)
        optimizer = make(model.parameters(), 0.1 if rank == 0 else 0.05)
        if rank == 0:
            # Rank 0 comes from a checkpoint; the others are new.
            model(_batch(0, 0)).sum().backward()
            optimizer.step()
            model.zero_grad()
        if wrapped:
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert all(map(torch.equal, weights, model.parameters()))
        states = hvd.allgather_object(optimizer.state_dict())
        assert str(states[0]) == str(states[-1])
    assert (
        error_of(lambda: hvd.broadcast_optimizer_state(torch.optim.LBFGS(_model().parameters()), 0))[0] == "ValueError"
    )


def test_optimizer_states_and_options_become_those_of_the_root(run_ranks):
    run_ranks(2, in_job, _states)


def _objects(rank: int, size: int) -> None:
    # Types differ between ranks, as in scripts that broadcast a checkpoint.
    assert hvd.broadcast_object({"hello": 123, 0: [1, 2]} if rank == 1 else None, root_rank=1) == {
        "hello": 123,
        0: [1, 2],
    }
    assert hvd.allgather_object("x" * rank) == ["x" * r for r in range(size)]
    model = _model(rank)
    hvd.broadcast_parameters(list(model.named_parameters()), root_rank=1)
    assert torch.equal(model[0].weight, _model(1)[0].weight)
    hvd.broadcast_parameters(list(_model(rank).parameters()), root_rank=0)
    # A scheduler travels with the optimizer that it drives.
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.5 if rank == 0 else 0.1))
    received = hvd.broadcast_object(torch.optim.lr_scheduler.StepLR(optimizer, 3), root_rank=0)
    assert received.base_lrs == [0.5] and isinstance(received.optimizer, torch.optim.Adam)
    assert error_of(lambda: hvd.broadcast_parameters(3, root_rank=0))[0] == "ValueError"


def test_objects_and_parameters_travel(run_ranks):
    run_ranks(2, in_job, _objects)
