"""Use after shutdown(), and a second job in the same process: nothing of the first one is left in it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.horovod.jobs import error_of, in_job, job
from tests.launch.conftest import wait_until

import horovod.torch as hvd

_NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."


def _kept_handles(rank: int, size: int) -> None:
    kept = [hvd.allreduce_async(torch.ones(2), name=f"kept.{i}") for i in range(3)]
    hvd.barrier()
    hvd.shutdown()
    for handle in kept:
        assert error_of(lambda handle=handle: hvd.poll(handle)) == (
            "ValueError",
            f"Handle {handle} was not created or has been cleared.",
        )
        assert hvd.synchronize(handle) is None
    hvd.init()
    new = [hvd.allreduce_async(torch.full((2,), 5.0), op=hvd.Sum, name=f"kept.{i}") for i in range(3)]
    # A handle of the first job is none of the second.
    assert not set(kept) & set(new)
    assert [hvd.synchronize(handle) for handle in kept] == [None] * 3
    assert [hvd.synchronize(handle).tolist() for handle in new] == [[5.0 * size] * 2] * 3


def test_a_handle_of_an_earlier_job_is_not_taken_for_one_of_the_next(run_ranks):
    run_ranks(2, in_job, _kept_handles)


def _after_shutdown(rank: int, size: int) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    hvd.shutdown()
    for call in (
        lambda: hvd.allreduce(torch.ones(1)),
        lambda: hvd.grouped_allreduce([torch.ones(1)]),
        lambda: hvd.allgather_async(torch.ones(1)),
        lambda: hvd.broadcast_(torch.ones(1), 0),
        lambda: hvd.reducescatter(torch.ones(1)),
        lambda: hvd.join(),
        lambda: model(torch.ones(1, 2)).sum().backward(),
    ):
        assert error_of(call) == ("HorovodInternalError", _NOT_INITIALIZED)
    for call in (hvd.rank, hvd.local_size, lambda: hvd.start_timeline("x"), lambda: optimizer.synchronize()):
        assert error_of(call) == ("ValueError", _NOT_INITIALIZED)
    hvd.shutdown()  # a second one does nothing


def test_after_shutdown_every_call_says_that_there_is_no_job(run_ranks):
    run_ranks(2, in_job, _after_shutdown)


def _unequal_numbers_of_calls(rank: int, size: int) -> None:
    # Ranks have used different numbers of automatic names, barriers and objects in a set of their own.
    hvd.shutdown()
    alone = [hvd.ProcessSet([r]) for r in range(size)]
    hvd.init(process_sets=alone)
    for _ in range(rank + 1):
        hvd.allreduce(torch.ones(1), process_set=alone[rank])
        hvd.barrier(process_set=alone[rank])
        hvd.broadcast_object(1, rank, process_set=alone[rank])
    # The first rank that leaves ends the job for all.
    hvd.barrier()
    hvd.shutdown()
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    hvd.barrier()
    assert hvd.allgather_object(rank) == list(range(size))
    assert hvd.join() in range(size)


def test_automatic_names_start_again_with_every_job(run_ranks):
    run_ranks(3, in_job, _unequal_numbers_of_calls)


def _members_by_comm(rank: int, size: int) -> None:
    hvd.shutdown()
    # An array of numpy, as mpi4py programs build it.
    if rank < 2:
        hvd.init(comm=np.array([0, 1]))
        assert hvd.size() == 2 and hvd.allreduce(torch.tensor(rank), op=hvd.Sum).item() == 1
        hvd.shutdown()
    for everybody in ([], None, tuple(range(size)), np.arange(size)):
        hvd.init(comm=everybody)
        assert (hvd.rank(), hvd.size()) == (rank, size)
        hvd.shutdown()
    name, text = error_of(lambda: hvd.init(comm=object()))
    assert name == "ValueError" and "Horovod has not been built with MPI support" in text
    assert not hvd.is_initialized()


def test_comm_is_a_sequence_of_ranks_of_any_kind(run_ranks):
    run_ranks(3, in_job, _members_by_comm)


NAMES = ["", " ", "a/b:c;d,e", "ü\n\t\0", "\udc80 from bytes", "x" * 5000, '"quoted"', "noname.1", 7, 1.5]


def _odd_names(rank: int, size: int) -> None:
    handles = [hvd.allreduce_async(torch.full((2,), float(i)), op=hvd.Sum, name=n) for i, n in enumerate(NAMES)]
    for number in list(range(len(NAMES)))[:: 1 if rank else -1]:
        assert hvd.synchronize(handles[number]).tolist() == [number * size] * 2
    for name in NAMES:
        assert hvd.allgather(torch.tensor([rank]), name=name).tolist() == list(range(size))
    # 7 and "7" are one name. Rank 1 submits its part only after rank 0 has looked: until then the name is in use.
    if rank == 1:
        hvd.barrier()
    handle = hvd.allreduce_async(torch.ones(2), name=7)
    if rank == 0:
        name, text = error_of(lambda: hvd.allreduce_async(torch.ones(2), name="7"))
        assert name == "ValueError" and "same name as another tensor" in text
        hvd.barrier()
    assert hvd.synchronize(handle).tolist() == [1, 1]


def test_any_text_or_number_is_a_name(run_ranks):
    run_ranks(2, in_job, _odd_names)


def _traced_failures(path: str) -> None:
    with job(TIMELINE=path, TIMELINE_MARK_CYCLES="1") as (rank, size):
        hvd.allreduce(torch.ones(2), name="good")
        error, _ = error_of(lambda: hvd.allreduce(torch.ones(2 + rank), name="bad"))
        assert error == "HorovodInternalError"
        # Another kind of operation under the same name has a row of its own.
        hvd.allgather(torch.ones(rank), name="good")
        hvd.grouped_allreduce([torch.ones(2), torch.ones(3, dtype=torch.int64)], name="group")
        # A trace that was not announced as DYNAMIC may be ended, and another one started.
        hvd.stop_timeline()
        hvd.start_timeline(f"{path}.next")
        # Rank 0 writes both traces, and what rank 1 announces before belongs to the first one.
        wait_until(Path(f"{path}.next").exists, what="the second trace of rank 0")
        hvd.alltoall(torch.ones(size), name="next")


def test_the_trace_closes_what_it_opens_also_for_operations_that_fail(run_ranks, tmp_path):
    run_ranks(2, _traced_failures, str(tmp_path / "trace.json"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.json", "trace.json.next"]
    events = json.loads((tmp_path / "trace.json").read_text())
    rows = {e["args"]["name"]: e["pid"] for e in events if e.get("name") == "process_name" and e["pid"]}
    assert set(rows) == {"allreduce.good", "allreduce.bad", "allgather.good", "allreduce.group"}
    for name, pid in rows.items():
        phases = [event["ph"] for event in events if event.get("pid") == pid]
        assert phases.count("B") == phases.count("E") > 0, name
    shown = {event["name"] for event in events if event.get("pid") == rows["allreduce.bad"] and event["ph"] == "B"}
    assert shown == {"NEGOTIATE_ALLREDUCE"}
    announced = [event["name"] for event in events if event.get("pid") == rows["allgather.good"] and event["ph"] == "X"]
    assert sorted(announced) == ["0", "1"]
    following = json.loads((tmp_path / "trace.json.next").read_text())
    assert "alltoall.next" in {event["args"].get("name") for event in following if event["ph"] == "M"}


def _gradients(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(35_000, generator=generator) for _ in range(6)]


def _fused(threshold: str, path: str) -> list[torch.Tensor]:
    with job(FUSION_THRESHOLD=threshold, CYCLE_TIME="50", TIMELINE=path) as (rank, _):
        handles = [hvd.allreduce_async(tensor, name=str(i)) for i, tensor in enumerate(_gradients(rank))]
        return [hvd.synchronize(handle) for handle in handles]


@pytest.mark.parametrize("threshold", ["0", "1", "300000", "1000000000"])
def test_every_fusion_threshold_gives_the_same_bits(run_ranks, tmp_path, threshold):
    path = tmp_path / "trace.json"
    means = [(one + two) / 2 for one, two in zip(_gradients(0), _gradients(1), strict=True)]
    for results in run_ranks(2, _fused, threshold, str(path)):
        assert all(map(torch.equal, results, means))
    # Two of these tensors fit into 300,000 bytes.
    is_fused = "MEMCPY_IN_FUSION_BUFFER" in {event.get("name") for event in json.loads(path.read_text())}
    assert is_fused == (int(threshold) >= 300_000)
