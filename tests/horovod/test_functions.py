"""Broadcasts of objects, parameters and optimizer states; pickling; calls before init()."""

import threading

import pytest
import torch
from tests.horovod.jobs import error_of, in_job, job
from torch import nn

import horovod.torch as hvd

_NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."


def _one_parameter() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: hvd.rank(), "ValueError"),
        (lambda: hvd.size(), "ValueError"),
        (lambda: hvd.cross_size(), "ValueError"),
        (lambda: hvd.broadcast_object(1), "ValueError"),
        (lambda: hvd.add_process_set([0]), "ValueError"),
        (lambda: hvd.DistributedOptimizer(_one_parameter()), "ValueError"),
        (lambda: hvd.allreduce(torch.ones(1)), "HorovodInternalError"),
        (lambda: hvd.allgather(torch.ones(1)), "HorovodInternalError"),
        (lambda: hvd.broadcast(torch.ones(1), 0), "HorovodInternalError"),
        (lambda: hvd.alltoall(torch.ones(1)), "HorovodInternalError"),
        (lambda: hvd.reducescatter(torch.ones(1)), "HorovodInternalError"),
        (lambda: hvd.allgather_object(1), "HorovodInternalError"),
        (lambda: hvd.broadcast_parameters([torch.ones(1)], 0), "HorovodInternalError"),
        (lambda: hvd.barrier(), "HorovodInternalError"),
        (lambda: hvd.join(), "HorovodInternalError"),
    ],
)
def test_before_init_every_call_raises_what_horovod_raises(call, error):
    assert error_of(call) == (error, _NOT_INITIALIZED)


def test_before_init_there_are_no_handles():
    assert hvd.synchronize(3) is None
    assert error_of(lambda: hvd.poll(3)) == ("ValueError", "Handle 3 was not created or has been cleared.")
    assert not hvd.is_initialized()
    hvd.shutdown()  # does nothing


# ---- parameters ----


def _filled(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    for tensor in model.state_dict().values():
        tensor.fill_(value)
    return model


def _parameters(rank: int, size: int) -> None:
    root = size - 1
    forms = [
        lambda model: model.state_dict(),
        lambda model: list(model.named_parameters()),
        lambda model: model.named_parameters(),
        lambda model: list(model.parameters()),
        lambda model: model.parameters(),
    ]
    for form in forms:
        model = _filled(rank + 1)
        hvd.broadcast_parameters(form(model), root_rank=root)
        assert all(parameter.unique().tolist() == [root + 1] for parameter in model.parameters())
    # Buffers belong to the state, and are no parameters: the last model keeps its own.
    assert model[1].running_mean.unique().tolist() == [rank + 1]
    model = _filled(rank + 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=root)
    assert model[1].running_mean.unique().tolist() == [root + 1] and int(model[1].num_batches_tracked) == root + 1
    # Memory that is laid out unlike the shape.
    columns = torch.full((4, 3), float(rank)).t()
    hvd.broadcast_parameters({"columns": columns}, root_rank=root)
    assert columns.shape == (3, 4) and columns.unique().tolist() == [root]
    hvd.broadcast_parameters({}, root_rank=0)
    hvd.broadcast_parameters([], root_rank=0)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_parameters_are_overwritten_in_every_form_that_scripts_pass_them(run_ranks, size):
    run_ranks(size, in_job, _parameters)


@pytest.mark.parametrize("given", [3, "weights", torch.ones(2), None], ids=str)
def test_what_is_no_collection_of_parameters_is_refused(given):
    assert error_of(lambda: hvd.broadcast_parameters(given, 0)) == (
        "ValueError",
        f"invalid params of type: {type(given)}",
    )


def test_an_entry_that_is_no_tensor_is_named():
    name, text = error_of(lambda: hvd.broadcast_parameters({"epoch": 3}, 0))
    assert name == "ValueError" and text.startswith("broadcast_parameters: 'epoch' has type <class 'int'>")


# ---- optimizer states ----


def _state_of_sparse_parameters(rank: int, size: int) -> None:
    torch.manual_seed(0)
    model = nn.Embedding(6, 2, sparse=True)
    weights = model.weight.detach().clone()
    adam, plain = torch.optim.SparseAdam(model.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)
    for optimizer in (adam, plain):
        optimizer.param_groups[0]["lr"] += rank
        hvd.broadcast_optimizer_state(optimizer, 0, model=model)
        assert optimizer.param_groups[0]["lr"] == 0.1
    assert torch.equal(model.weight, weights) and adam.state[model.weight]
    # The momentum of sparse gradients is sparse, which no broadcast takes, in Horovod neither.
    momentum = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    name, text = error_of(lambda: hvd.broadcast_optimizer_state(momentum, 0, model=model))
    assert name == "ValueError" and "sparse" in text and "is not supported" in text


def test_the_state_of_optimizers_of_sparse_gradients_is_created_and_sent(run_ranks):
    run_ranks(2, in_job, _state_of_sparse_parameters)


def _groups_of_options(rank: int, size: int) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [
            {"params": model[0].parameters(), "lr": 0.1 + rank, "weight_decay": 0.0},
            {"params": model[1].parameters(), "lr": 0.2 + rank, "betas": (0.5, 0.9 + 0.01 * rank)},
        ]
    )
    if rank == 0:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    assert optimizer.param_groups[0]["weight_decay"] == 0.0 and optimizer.param_groups[1]["betas"] == (0.5, 0.9)
    steps = {float(state["step"]) for state in optimizer.state.values()}
    assert steps == {1.0}
    moments = torch.cat([state["exp_avg"].flatten() for state in optimizer.state.values()])
    gathered = hvd.allgather(moments[None])
    assert torch.equal(gathered[0], gathered[-1]) and gathered.any()
    assert model[0].bias not in optimizer.state


def test_options_of_every_parameter_group_become_those_of_the_root(run_ranks):
    run_ranks(2, in_job, _groups_of_options)


# ---- objects ----


class _Point:
    def __init__(self, x: int) -> None:
        self.x = x


def _objects(rank: int, size: int) -> None:
    for obj in (None, 0, "text", b"\0" * 5, [1, {"a": (2, 3)}], {"weights": torch.arange(3)}, "x" * 3_000_000):
        assert str(hvd.broadcast_object(obj if rank == 1 else "other", root_rank=1)) == str(obj)
    assert hvd.broadcast_object(_Point(rank), root_rank=0).x == 0
    # The root gets its own object back, not a copy.
    mine = _Point(7)
    assert (hvd.broadcast_object(mine, root_rank=rank, name=f"own {rank}") is mine) if size == 1 else True
    # A name may be used again, and again by several kinds of calls.
    for number in range(3):
        assert hvd.broadcast_object((number, rank), root_rank=1, name="again") == (number, 1)
        assert hvd.allgather_object((number, rank), name="again") == [(number, r) for r in range(size)]
    assert [point.x for point in hvd.allgather_object(_Point(rank * rank))] == [r * r for r in range(size)]
    assert hvd.allgather_object(torch.ones(rank, 2))[1].shape == (1, 2)


@pytest.mark.parametrize("size", [2, 3])
def test_objects_of_any_size_and_class_are_exchanged(run_ranks, size):
    run_ranks(size, in_job, _objects)


def _objects_in_sets(rank: int, size: int) -> None:
    pair = hvd.ProcessSet([0, size - 1])
    hvd.shutdown()
    hvd.init(process_sets=[pair])
    if pair.included():
        assert hvd.broadcast_object({"from": rank}, root_rank=size - 1, process_set=pair) == {"from": size - 1}
    # Ranks outside of the set have used no name of the others'.
    assert hvd.broadcast_object(rank, root_rank=1) == 1
    assert hvd.allgather_object(rank) == list(range(size))


def test_an_object_may_be_sent_within_a_process_set(run_ranks):
    run_ranks(3, in_job, _objects_in_sets)


def _objects_of_any_kind(rank: int, size: int) -> tuple[str, str]:
    assert [each(1) for each in hvd.allgather_object(lambda x: x + rank)] == [1, 2]
    return error_of(lambda: hvd.allgather_object(threading.Lock()))


def test_lambdas_travel_and_an_object_that_cannot_be_pickled_is_an_error_before_anything_is_sent(run_ranks):
    for name, text in run_ranks(2, in_job, _objects_of_any_kind):
        assert name == "TypeError" and "lock" in text


def _different_names(name: str) -> tuple[str, str]:
    with job(STALL_CHECK_TIME_SECONDS="1", STALL_SHUTDOWN_TIME_SECONDS="2") as (rank, _):
        return error_of(lambda: hvd.broadcast_object(1, name=f"{name} {rank}"))


def test_objects_under_names_that_differ_end_as_a_stall(run_ranks):
    for error, _ in run_ranks(2, _different_names, "object"):
        assert error == "HorovodInternalError"
