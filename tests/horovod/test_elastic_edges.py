"""Elastic states and samplers at their edges: updates that are old, handlers of programs, ranks that come and go."""

import copy
import sys
from types import SimpleNamespace

import pytest
import torch
from tests.horovod.jobs import in_job

import horovod.torch as hvd
from horovod.common import elastic as common
from horovod.common.elastic import notification_manager
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.torch.elastic import ElasticSampler, HostUpdateResult, ObjectState, State, TorchState, run_fn
from horovod.torch.elastic import sampler as sampler_module
from horovod.torch.elastic.state import StateHandler, get_handler_registry, set_handler_registry
from megaclass_launch.errors import StateLostError


def _state(**values) -> ObjectState:
    return ObjectState(bcast_object=lambda value: value, get_rank=lambda: 0, **values)


def test_what_a_subclass_must_have_is_an_error_until_it_has_it():
    state = State(bcast_object=lambda value: value, get_rank=lambda: 0)
    for call in (state.save, state.restore, state.sync, state.commit):
        with pytest.raises(NotImplementedError):
            call()
    handler = StateHandler(3)
    for call in (handler.save, handler.restore, handler.sync, lambda: handler.set_value(4)):
        with pytest.raises(NotImplementedError):
            call()
    handler.reset()
    state.reset()


def test_an_update_that_is_not_newer_than_the_last_one_changes_nothing():
    state = _state(step=1)
    state.on_hosts_updated(5.0, HostUpdateResult.added)
    with pytest.raises(HostsUpdatedInterrupt):
        state.check_host_updates()
    for timestamp in (5.0, 4.0):
        state.on_hosts_updated(timestamp, HostUpdateResult.removed)
        state.check_host_updates()
    state.on_hosts_updated(6.0, HostUpdateResult.removed)
    # A new generation starts without the messages of the one before.
    state.on_reset()
    state.check_host_updates()


def test_a_rank_follows_rank_0_and_not_what_it_knows_itself():
    said = [(0, 0, HostUpdateResult.no_update)]
    state = ObjectState(bcast_object=lambda value: said[-1], get_rank=lambda: 1, step=1)
    state.on_hosts_updated(3.0, HostUpdateResult.added)
    state.check_host_updates()
    said.append((0, 7.0, HostUpdateResult.removed))
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.check_host_updates()
    assert caught.value.skip_sync is True


def test_only_named_attributes_are_committed_and_an_empty_state_sends_nothing():
    sent = []
    state = ObjectState(bcast_object=lambda value: sent.append(value) or value, get_rank=lambda: 0)
    state.sync()
    assert sent == []
    state = _state(step=1)
    state.other = 5
    state.commit()
    state.other, state.step = 6, 2
    state.restore()
    assert (state.step, state.other) == (1, 6)


def test_reset_comes_before_the_callbacks_in_the_order_of_their_registration():
    log = []

    class Counting(ObjectState):
        def reset(self) -> None:
            log.append("reset")

    state = Counting(bcast_object=lambda value: value, get_rank=lambda: 0, step=0)
    state.register_reset_callbacks([lambda: log.append("first")])
    state.register_reset_callbacks(iter([lambda: log.append("second"), lambda: log.append("third")]))
    state.on_reset()
    assert log == ["reset", "first", "second", "third"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, StopIteration])
def test_other_errors_leave_the_loop_and_the_state_hears_of_no_more_changes(error):
    state, resets = _state(step=0), []

    def train(state: ObjectState, by: int = 1) -> None:
        """Documented."""
        state.step += by
        raise error

    wrapped = run_fn(train, lambda: resets.append(1))
    assert wrapped.__name__ == "train" and wrapped.__doc__ == "Documented."
    with pytest.raises(error):
        wrapped(state, by=3)
    assert state.step == 3 and resets == []
    notification_manager.handle_hosts_updated(1.0, HostUpdateResult.added)
    state.check_host_updates()


def test_a_failure_during_the_sync_is_tried_again():
    state, log = _state(step=0), []

    def sync() -> None:
        log.append("sync")
        if len(log) < 3:
            raise HorovodInternalError("a rank is gone")

    state.sync = sync
    assert run_fn(lambda state: "done", lambda: log.append("reset"))(state) == "done"
    assert log == ["sync", "reset", "sync"]


def test_a_program_may_bring_a_handler_of_its_own():
    class Table:
        rows = 1

    class TableHandler(StateHandler):
        def __init__(self, value: Table) -> None:
            super().__init__(value)
            self.save()

        def save(self) -> None:
            self.kept = self.value.rows

        def restore(self) -> None:
            self.value.rows = self.kept

    before = get_handler_registry()
    set_handler_registry([(Table, TableHandler), *before])
    try:
        table = Table()
        state = TorchState(table=table, note="x")
        assert state.model is None and state.optimizer is None and state.table is table
        table.rows, state.note = 9, "y"
        state.restore()
        assert (table.rows, state.note) == (1, "x")
        # Without a handler the object itself is copied.
        set_handler_registry(before)
        assert TorchState(table=table).table is not table
    finally:
        set_handler_registry(before)


@pytest.fixture
def world(monkeypatch):
    """Sets the rank and size that samplers see."""

    def become(rank: int, size: int) -> None:
        monkeypatch.setattr(sampler_module, "rank", lambda: rank)
        monkeypatch.setattr(sampler_module, "size", lambda: size)

    become(0, 1)
    return become


def test_a_dataset_without_samples_gives_none_to_every_rank(world):
    world(1, 3)
    sampler = ElasticSampler([])
    assert (list(sampler), len(sampler), sampler.total_size) == ([], 0, 0)


def test_orders_depend_on_seed_and_epoch_alone(world):
    def order(seed: int, epoch: int) -> list[int]:
        sampler = ElasticSampler(range(50), seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(1, 2) == order(1, 2) and sorted(order(1, 2)) == list(range(50))
    assert len({tuple(order(seed, epoch)) for seed in (0, 10) for epoch in (0, 1, 2)}) == 6
    assert list(ElasticSampler(range(5), shuffle=False)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("sizes", [(1, 2, 4), (4, 2, 1), (3, 1, 3), (2, 5, 3)])
def test_every_sample_is_seen_once_per_epoch_however_the_ranks_change(world, sizes):
    """Each generation processes two batches of 3 per rank, the last one all that is left."""
    seen: list[int] = []
    state = {"epoch": 4, "processed_num": 0}
    for generation, size in enumerate(sizes):
        samplers = []
        for rank in range(size):
            world(rank, size)
            sampler = ElasticSampler(range(101), seed=9)
            sampler.load_state_dict(copy.deepcopy(state))
            samplers.append(sampler)
        assert len({len(sampler) for sampler in samplers}) == 1
        is_last = generation == len(sizes) - 1
        for sampler in samplers:
            indices = list(sampler)
            seen += indices if is_last else indices[:6]
            for batch in range(2):
                sampler.record_batch(batch, 3)
        state = samplers[0].state_dict()
    # The last generation fills up to the same number per rank with samples it has dealt out already.
    assert set(seen) == set(range(101)) and len(seen) < 101 + sizes[-1]


def _synced(rank: int, size: int) -> None:
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    sampler = ElasticSampler(range(12))
    state = TorchState(model, optimizer, scheduler=scheduler, sampler=sampler, epoch=rank, best=[rank])
    if rank == 0:
        for _ in range(3):
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
            scheduler.step()
        sampler.record_batch(0, 2)
    state.sync()
    assert (state.epoch, state.best) == (0, [0])
    parts = hvd.allgather_object([part.state_dict() for part in (model, optimizer, scheduler, sampler)])
    assert all(str(part) == str(parts[0]) for part in parts)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01) and sampler.processed_num == 2 * size
    # What was synchronized counts as committed.
    with torch.no_grad():
        model[0].weight.zero_()
    state.epoch, sampler.epoch = 7, 7
    state.restore()
    assert state.epoch == sampler.epoch == 0 and model[0].weight.any()
    state.on_reset()
    assert len(sampler) * size >= 12 - sampler.processed_num
    # Rank 0 alone knows of a change: all ranks are interrupted by the same commit.
    if rank == 0:
        state.on_hosts_updated(1.0, HostUpdateResult.removed)
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.commit()
    assert caught.value.skip_sync
    state.commit()


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_take_over_every_part_of_the_state_of_rank_0(run_ranks, size):
    run_ranks(size, in_job, _synced)


class _Worker:
    """A worker of an elastic job in whose earlier generations a rank has made a commit, or none has."""

    def __init__(self, *, has_progressed: bool) -> None:
        self.here = SimpleNamespace(has_progressed=has_progressed, needs_sync=True)


@pytest.mark.parametrize("has_progressed", [True, False])
def test_a_job_whose_state_is_lost_ends_with_an_error_instead_of_starting_again_at_step_0(
    monkeypatch, capsys, has_progressed
):
    """Rank 0 joined a running job, and the only rank that held the state was lost before it was sent."""
    monkeypatch.setattr(common, "elastic_worker", lambda: _Worker(has_progressed=has_progressed))
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    trained = []
    train = run_fn(lambda state: trained.append(state.step), reset=lambda: None)
    if has_progressed:
        with pytest.raises(
            StateLostError, match=r"No rank of this elastic job holds the state .* latest checkpoint"
        ) as at:
            train(_state(step=0))
        # A script that does not handle the error: the driver ends the job at once.
        with pytest.raises(SystemExit, match="2"):
            sys.excepthook(at.type, at.value, None)
        assert "No rank of this elastic job holds the state" in capsys.readouterr().err
    else:
        train(_state(step=0))
    assert trained == ([] if has_progressed else [0])


def test_a_rank_that_received_the_state_holds_it_in_the_next_generation(monkeypatch):
    """A newcomer that took the state over from rank 0 may become rank 0 itself."""
    worker = _Worker(has_progressed=True)
    monkeypatch.setattr(common, "elastic_worker", lambda: worker)
    heard: list[bool] = []

    def from_rank_0(value):
        # In the first generation rank 0 is another process, which holds the state.
        if not isinstance(value, bool):
            return value
        heard.append(value)
        return True if len(heard) == 1 else value

    state = ObjectState(bcast_object=from_rank_0, get_rank=lambda: 0, step=0)
    calls = []

    def train(state):
        calls.append(state.step)
        if len(calls) == 1:
            raise HostsUpdatedInterrupt(False)

    run_fn(train, reset=lambda: None)(state)
    assert (len(calls), heard) == (2, [False, True])
