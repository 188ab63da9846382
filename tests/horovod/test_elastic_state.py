"""Horovod's elastic states, and the loop around the training function, in one process."""

import copy
import socket
import threading

import pytest
import torch

import horovod.torch as hvd
from horovod.common import basics
from horovod.common import elastic as common
from horovod.common.elastic import notification_manager
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.engine.job import current
from horovod.torch.elastic import HostUpdateResult, ObjectState, TorchState, run_fn
from megaclass_launch.elastic import Channel, ElasticWorker
from megaclass_launch.rendezvous.connection_watch import OwnConnections


@pytest.fixture
def world_of_one(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "HOROVOD_RANK", "MEGACLASS_JOB_SECRET"):
        monkeypatch.delenv(name, raising=False)
    hvd.init()
    yield
    hvd.shutdown()


def object_state(**values) -> ObjectState:
    return ObjectState(bcast_object=lambda value: value, get_rank=lambda: 0, **values)


def test_restore_returns_to_the_last_commit_and_not_to_what_was_changed_in_place():
    state = object_state(step=1, losses=[1.0])
    state.step, state.losses[0] = 2, 5.0
    state.restore()
    assert (state.step, state.losses) == (1, [1.0])
    state.step = 3
    state.losses.append(2.0)
    state.commit()
    state.losses.clear()
    state.restore()
    assert (state.step, state.losses) == (3, [1.0, 2.0])


def test_the_drivers_announcement_is_among_the_messages_without_a_commit_and_counts_once(monkeypatch):
    ours, theirs = socket.socketpair()
    worker = ElasticWorker(Channel(theirs))
    monkeypatch.setattr(common, "elastic_worker", lambda: worker)
    state = object_state(step=1)
    assert state._host_messages.empty()
    Channel(ours).send({"say": "changed", "token": "", "only_removals": True})
    # As Horovod's own elastic scripts wait for it.
    while state._host_messages.empty():
        pass
    with pytest.raises(HostsUpdatedInterrupt) as interrupt:
        state.commit()
    assert interrupt.value.skip_sync
    state.check_host_updates()
    state.on_reset()
    with pytest.raises(HostsUpdatedInterrupt):
        state.check_host_updates()
    ours.close()
    theirs.close()


@pytest.mark.parametrize("leaves", [False, True])
def test_news_of_a_lost_member_that_comes_before_init_returns_still_limits_every_wait(
    world_of_one, monkeypatch, leaves
):
    monkeypatch.setattr(basics, "_BROKEN_S", 0.2)
    job, own = current.job, OwnConnections()
    own.note_sockets()
    monkeypatch.setattr(current, "job", None)
    news = threading.Thread(target=basics._end_generation, args=(own, job.has_left))
    news.start()
    news.join(0.3)
    assert news.is_alive()
    if leaves:
        job.has_left.set()
    job.connections = own
    monkeypatch.setattr(current, "job", job)
    news.join(30)
    assert not news.is_alive()
    assert job.controller.closed.startswith("A member of this generation of the elastic job is gone.") is not leaves


def test_sync_takes_over_the_state_of_rank_0():
    sent = {"step": 9}
    state = ObjectState(bcast_object=lambda value: sent, get_rank=lambda: 1, step=1)
    state.sync()
    assert state.step == 9


@pytest.mark.parametrize(
    ("updates", "skips_sync"),
    [([HostUpdateResult.removed], True), ([HostUpdateResult.added], False), ([1, 2], False)],
)
def test_a_changed_host_interrupts_the_next_check(updates, skips_sync):
    state = object_state(step=1)
    state.check_host_updates()
    for time_, update in enumerate(updates, start=1):
        state.on_hosts_updated(time_, update)
    with pytest.raises(HostsUpdatedInterrupt) as interrupt:
        state.commit()
    assert interrupt.value.skip_sync is skips_sync
    state.check_host_updates()


def test_a_failure_restores_and_a_change_keeps_the_state_and_both_call_reset_and_the_callbacks():
    state = object_state(step=0)
    log = []
    state.register_reset_callbacks([lambda: log.append("callback")])
    state.sync = lambda: log.append("sync")
    ends = [HorovodInternalError("gone"), HostsUpdatedInterrupt(False), HostsUpdatedInterrupt(True)]

    def train(state: ObjectState, number: int) -> str:
        log.append(f"train from {state.step}")
        state.step += 1
        if ends:
            end = ends.pop(0)
            if len(ends) == 2:
                state.save()
                state.step += 10
            raise end
        return f"done {number}"

    assert run_fn(train, lambda: log.append("reset"))(state, 7) == "done 7"
    again = ["reset", "callback"]
    assert log == [
        "sync", "train from 0", *again, "sync", "train from 1", *again, "sync", "train from 2", *again, "train from 3",
    ]  # fmt: skip


def test_a_program_may_announce_a_change_itself():
    state = object_state(step=0)
    calls = []

    def train(state: ObjectState) -> None:
        calls.append(state.step)
        if len(calls) == 1:
            notification_manager.handle_hosts_updated(1.0, HostUpdateResult.added)
        state.step += 1
        state.commit()

    run_fn(train, lambda: None)(state)
    assert calls == [0, 1]
    notification_manager.handle_hosts_updated(2.0, HostUpdateResult.added)
    state.check_host_updates()


def test_a_torch_state_restores_model_optimizer_scheduler_and_sampler_exactly(world_of_one):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    sampler = hvd.elastic.ElasticSampler(range(10))
    state = TorchState(model, optimizer, scheduler=scheduler, sampler=sampler, epoch=0)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
        sampler.record_batch(0, 2)
        state.epoch += 1

    def snapshot():
        parts = (model, optimizer, scheduler, sampler)
        return copy.deepcopy([part.state_dict() for part in parts]), state.epoch

    step()
    state.commit()
    committed = snapshot()
    for _ in range(2):
        step()
        assert str(snapshot()) != str(committed)
        # Twice: what was restored must not be what was saved.
        state.restore()
        assert str(snapshot()) == str(committed)
    state.sync()
    assert str(snapshot()) == str(committed)
    assert state.model is model
    # Another object under the same name counts as committed.
    state.model = torch.nn.Linear(3, 2)
    weight = state.model.weight.detach().clone()
    state.model.weight.data.zero_()
    state.restore()
    assert torch.equal(state.model.weight, weight)


def test_the_samples_left_are_dealt_out_evenly_to_the_ranks_there_are(world_of_one, monkeypatch):
    import horovod.torch.elastic.sampler as module

    def dealt(size: int, state_dict: dict) -> list[list[int]]:
        found = []
        for rank in range(size):
            monkeypatch.setattr(module, "size", lambda size=size: size)
            monkeypatch.setattr(module, "rank", lambda rank=rank: rank)
            sampler = hvd.elastic.ElasticSampler(range(23), seed=3)
            sampler.load_state_dict(state_dict)
            found.append(list(sampler))
            assert len(found[-1]) == len(sampler)
        return found

    whole = [index for row in zip(*dealt(1, {"epoch": 2, "processed_num": 0}), strict=True) for index in row]
    assert sorted(whole) == list(range(23))
    # Two ranks have processed 2 batches of 3 samples each: 12 samples. Three ranks get the other 11, and one of them twice.
    parts = dealt(3, {"epoch": 2, "processed_num": 12})
    assert [len(part) for part in parts] == [4, 4, 4]
    assert [index for row in zip(*parts, strict=True) for index in row] == [*whole[12:], whole[12]]
    # More ranks than samples.
    assert dealt(5, {"epoch": 2, "processed_num": 21}) == [[i] for i in (whole[21:] * 3)[:5]]
    assert dealt(2, {"epoch": 2, "processed_num": 40}) == [[], []]
    sampler = hvd.elastic.ElasticSampler(range(23), shuffle=False)
    sampler.record_batch(0, 4)
    assert sampler.state_dict() == {"epoch": 0, "processed_num": 4 * sampler.num_replicas}
    sampler.set_epoch(1)
    assert sampler.state_dict() == {"epoch": 1, "processed_num": 0} and sorted(sampler.remaining_indices) == list(
        range(23)
    )
