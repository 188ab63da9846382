"""The ring against a float64 reference: ranks, dtypes, odd lengths; neighbours that die, or fall silent, in the middle."""

import json
import re
import signal
import textwrap

import pytest
import torch
import torch.distributed as dist
from tests.forked import ended_ranks, forked_ranks, python_script
from tests.hvd.jobs import error_of, in_job, job

import megaclass.hvd as hvd
from megaclass.distributed.network.store import SignedStore
from megaclass.errors import LaunchError
from megaclass.hvd.settings import Settings, settings_from_environment
from megaclass.hvd.transport.ring import connect_ring

SIZES = [1, 2, 3, 4]
DTYPES = [torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]


def _numbers(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + count)
    return torch.randint(-40, 40, (count,), generator=generator).to(dtype)


def _lengths(rank: int, size: int) -> None:
    store = SignedStore(dist.distributed_c10d._get_default_store(), b"key", "ring")
    ring = connect_ring(store, b"key", rank, [f"rank {place}" for place in range(size)], "127.0.0.1", Settings())
    if size == 1:
        assert ring is None
        return
    for dtype in DTYPES:
        # Fewer than ranks, uneven blocks, blocks of several pieces that are no whole number of elements.
        for count in (0, 1, 2, 3, 5, 1021, 700_001):
            everybody = torch.stack([_numbers(r, count, dtype) for r in range(size)]).double()
            for combine, expected in ((torch.add, everybody.sum(0)), (torch.maximum, everybody.amax(0))):
                # Whole numbers below 256: exact in every dtype, but for bytes, which wrap around.
                expected = expected.long().to(dtype)
                given, out = _numbers(rank, count, dtype), torch.empty(count, dtype=dtype)
                ring.reduce(given, out, combine, lambda part: None)
                assert torch.equal(out, expected), (dtype, count)
                assert torch.equal(given, _numbers(rank, count, dtype))
                ring.reduce(given, given, combine, lambda part: None)
                assert torch.equal(given, expected), (dtype, count)
    ring.close()


@pytest.mark.parametrize("size", SIZES)
def test_every_length_and_dtype_comes_out_right_in_place_and_not(run_ranks, size):
    run_ranks(size, _in_group, _lengths)


def _in_group(function):
    return function(dist.get_rank(), dist.get_world_size())


def _values(rank: int, size: int, count: int) -> list[bytes]:
    mine = torch.randn(count, generator=torch.Generator().manual_seed(rank))
    everybody = torch.stack([torch.randn(count, generator=torch.Generator().manual_seed(r)) for r in range(size)])
    results = []
    for compare in (
        (hvd.allreduce(mine), everybody.double().mean(0)),
        (hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0), everybody.double().sum(0) * 1.5),
        (hvd.allreduce_(mine.clone(), op=hvd.Min), everybody.double().amin(0)),
        (hvd.allreduce(mine, op=hvd.Product), everybody.double().prod(0)),
    ):
        torch.testing.assert_close(compare[0].double(), compare[1], rtol=1e-5, atol=1e-6)
        results.append(compare[0].numpy().tobytes())
    half = hvd.allreduce(mine.bfloat16())
    torch.testing.assert_close(half.double(), everybody.bfloat16().double().mean(0), rtol=0.02, atol=0.03)
    return [*results, half.view(torch.int16).numpy().tobytes()]


@pytest.mark.parametrize("size", SIZES)
def test_large_allreduces_agree_with_float64_and_bit_by_bit_between_ranks(run_ranks, size):
    by_rank = run_ranks(size, in_job, _values, 600_011)
    assert all(results == by_rank[0] for results in by_rank)


def _values_with(transport: str) -> list[bytes]:
    with job(CPU_OPERATIONS=transport) as (rank, size):
        for dtype in DTYPES:
            everybody = torch.stack([_numbers(r, 200_000, dtype) for r in range(size)]).double()
            found = hvd.allreduce(_numbers(rank, 200_000, dtype), op=hvd.Sum)
            assert torch.equal(found, everybody.sum(0).long().to(dtype)), dtype
        return _values(rank, size, 100_003)


@pytest.mark.parametrize("size", [1, 3])
def test_gloo_reduces_every_dtype_where_it_is_chosen(run_ranks, size):
    by_rank = run_ranks(size, _values_with, "GLOO")
    assert all(results == by_rank[0] for results in by_rank)


def _trace_with(transport: str, path: str) -> None:
    with job(CPU_OPERATIONS=transport, TIMELINE=path):
        hvd.allreduce(torch.ones(200_000), name="one")
        for handle in [hvd.allreduce_async(torch.ones(100_000), name=f"fused.{i}") for i in range(3)]:
            hvd.synchronize(handle)
        hvd.allreduce(torch.ones(2), name="little")
        hvd.allreduce(torch.ones(200_000), op=hvd.Adasum, name="adasum")
        hvd.allgather(torch.ones(2), name="rows")
        hvd.allreduce(torch.ones(600_000), name="large")


@pytest.mark.parametrize("transport", ["ring", "gloo", "auto"])
def test_the_timeline_names_the_transport_that_carried_the_tensors(run_ranks, tmp_path, transport):
    run_ranks(2, _trace_with, transport, str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())
    tensors = {event["pid"]: event["args"].get("name") for event in events if event.get("name") == "process_name"}
    phases = {(tensors[event["pid"]], event["name"]) for event in events if event["ph"] == "B"}
    used = {name: phase for name, phase in phases if "_ALL" in phase and not phase.startswith("NEGOTIATE_")}
    of_allreduce = "GLOO_ALLREDUCE" if transport == "gloo" else "RING_ALLREDUCE"
    assert used == {
        "allreduce.one": of_allreduce,
        **{f"allreduce.fused.{i}": of_allreduce for i in range(3)},
        "allreduce.little": "RANK_0_ALLREDUCE",
        "allreduce.adasum": "GLOO_ALLREDUCE",
        "allgather.rows": "GLOO_ALLGATHER",
        # 2.4 MB: above the size up to which `auto` uses the ring.
        "allreduce.large": "RING_ALLREDUCE" if transport == "ring" else "GLOO_ALLREDUCE",
    }


def test_an_unknown_transport_is_refused_with_those_that_are_allowed():
    assert settings_from_environment({}).cpu_operations == "auto"
    with pytest.raises(
        LaunchError, match=r"^HOROVOD_CPU_OPERATIONS='MPI' in the environment: expected auto or ring or gloo\.$"
    ):
        settings_from_environment({"HOROVOD_CPU_OPERATIONS": "MPI"})


def _with_own_choice(choices: list[str]) -> tuple[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_CPU_OPERATIONS", choices[dist.get_rank()])
        return error_of(hvd.init)


def test_ranks_that_chose_different_transports_are_told_which(run_ranks):
    for kind, text in run_ranks(2, _with_own_choice, ["ring", "gloo"]):
        assert kind == "LaunchError"
        found = r"HOROVOD_CPU_OPERATIONS is ring on rank 0 \(.+\), but gloo on rank 1 \(.+\): it must be the same .*"
        assert re.fullmatch(found, text), text


def _of_sets(rank: int, size: int) -> None:
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    for _ in range(2):
        outer = hvd.add_process_set([0, 2])
        if rank in (0, 2):
            total = hvd.allreduce(torch.full((600_000,), float(rank + 1)), op=hvd.Sum, process_set=outer)
            assert total.eq(4).all()
        hvd.remove_process_set(outer)


def test_process_sets_have_rings_of_their_own(run_ranks):
    run_ranks(3, in_job, _of_sets)


_IN_THE_MIDDLE = """
import os, signal, torch, torch.distributed as dist
from megaclass.distributed.network.store import SignedStore
from megaclass.hvd.exceptions import HorovodInternalError
from megaclass.hvd.transport.ring import connect_ring
from megaclass.hvd.settings import Settings

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
names = [f"rank {{place}}" for place in range(size)]
store = SignedStore(dist.distributed_c10d._get_default_store(), b"key", "ring")
ring = connect_ring(store, b"key", rank, names, "127.0.0.1", Settings(gloo_timeout_s={timeout_s}))

def combine(one, two, *, out):
    if rank == 1:
        os.kill(os.getpid(), signal.{signal})
    return torch.add(one, two, out=out)

try:
    ring.reduce(torch.ones(4_000_000), torch.empty(4_000_000), combine, lambda part: None)
except HorovodInternalError as error:
    print(error, flush=True)
os._exit(0)
"""


@pytest.mark.ranks
def test_when_a_rank_dies_in_the_middle_all_others_hear_of_it():
    # A rank that hears of it leaves, so that its other neighbour, too, may hear of that first; rank 3 hears of nothing else.
    ranks = ended_ranks(4, python_script, _IN_THE_MIDDLE.format(signal="SIGKILL", timeout_s=300.0))
    assert [rank.returncode for rank in ranks] == [0, -signal.SIGKILL, 0, 0]
    texts = [rank.stdout.strip() for rank in ranks]
    assert texts[2] in ("rank 1 has ended its connection to rank 2", "rank 3 has ended its connection to rank 2")
    assert texts[0] in ("rank 1 has ended its connection to rank 0", "rank 3 has ended its connection to rank 0")
    assert texts[3] in ("rank 2 has ended its connection to rank 3", "rank 0 has ended its connection to rank 3")


@pytest.mark.ranks
def test_a_rank_that_falls_silent_in_the_middle_is_named():
    with forked_ranks(4, python_script, _IN_THE_MIDDLE.format(signal="SIGSTOP", timeout_s=1.0)) as ranks:
        said = {rank: ranks[rank].end().stdout for rank in (0, 2, 3)}
    assert said[2].startswith(("rank 2 waited 1 s for rank 1", "rank 3 has ended"))
    for rank in (0, 3):
        assert "has ended its connection" in said[rank] or "waited 1 s" in said[rank]


@pytest.mark.ranks
def test_a_job_whose_rank_is_killed_between_large_operations_ends_with_its_name():
    script = """
    import os, signal, threading, torch, megaclass.hvd as hvd
    hvd.init()
    if hvd.rank() == 1:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
    tensor = torch.zeros(500_000)
    try:
        while True:
            hvd.allreduce_(tensor, name="large")
    except hvd.HorovodInternalError as error:
        print("rank 1 (" in str(error).lower())
    """
    first, killed = ended_ranks(2, python_script, textwrap.dedent(script))
    assert (first.returncode, first.stdout, killed.returncode) == (0, "True\n", -signal.SIGKILL), first.stderr
