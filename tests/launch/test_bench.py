"""`bench allreduce`: the time, bandwidth and correctness of all-reduce by size."""

import argparse
import json
import sys

import pytest
import torch
import torch.distributed as dist

from megaclass_launch.command import add_allreduce_command
from megaclass_launch.errors import ConfigError, LaunchError
from megaclass_launch.ranks import bench_allreduce as bench
from megaclass_launch.ranks.bench_allreduce import measure, sizes_between
from megaclass_launch.world import World


def measured():
    return [*measure(sizes_between(8, 4096, 8), "gloo", torch.device("cpu"), None)]


def measured_with_a_bad_wire():
    """Rank 1 gets one wrong element out of every all-reduce that carries values."""
    working = dist.all_reduce

    def with_a_flaw(tensor, *others, **options):
        working(tensor, *others, **options)
        if dist.get_rank() == 1 and tensor.dtype == torch.float32:
            tensor[-1] += 1

    dist.all_reduce = with_a_flaw
    try:
        return [row.num_wrong for row in measured()]
    finally:
        dist.all_reduce = working


@pytest.mark.parametrize("size", [1, 2, 3], ids=["one rank", "two", "three"])
def test_every_rank_sees_the_same_table_and_no_wrong_value(run_ranks, size):
    first, *others = run_ranks(size, measured)
    assert all(rows == first for rows in others)
    assert all(row.num_wrong == 0 and row.time_us > 0 and row.ranks == size for row in first)
    for row, nominal in zip(first, (8, 64, 512, 4096), strict=True):
        assert row.bytes == nominal
        # What nccl-tests say of the share that each link carries.
        assert row.bus_gbps == pytest.approx(row.algorithm_gbps * {1: 0, 2: 1, 3: 4 / 3}[size])
        assert row.algorithm_gbps == pytest.approx(row.bytes / row.time_us / 1000)


def test_a_wrong_element_on_one_rank_is_counted(run_ranks):
    for num_wrong in run_ranks(2, measured_with_a_bad_wire):
        assert num_wrong == [1, 1, 1, 1]


def parsed(*arguments):
    parser = argparse.ArgumentParser()
    add_allreduce_command(parser.add_subparsers())
    return parser.parse_args(["allreduce", *arguments])


def test_the_default_sizes_are_those_of_all_reduce_perf():
    options = parsed()
    sizes = sizes_between(options.min_bytes, options.max_bytes, options.factor)
    assert (sizes[0], sizes[1], sizes[-1], len(sizes)) == (8, 16, 256 << 20, 26)


@pytest.mark.parametrize(("text", "size"), [("8", 8), ("64K", 65536), ("256M", 1 << 28), ("1g", 1 << 30)])
def test_sizes_are_read_as_all_reduce_perf_reads_them(text, size):
    assert parsed("-b", text).min_bytes == size


@pytest.mark.parametrize("text", ["", "M", "8.5", "1e3", "8T", "٣"])
def test_what_is_no_size_is_shown(text, capsys):
    with pytest.raises(SystemExit):
        parsed("-b", text)
    assert f"{text!r} is not a size: expected bytes, or for example 64K" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"), [((16, 8, 2), "go from 16 to 8 bytes"), ((8, 16, 1), "-f is 1, the factor")]
)
def test_sizes_out_of_range_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        sizes_between(*given)


def test_a_backend_that_is_none_is_refused(capsys):
    with pytest.raises(SystemExit):
        parsed("--backend=mpi")
    assert "invalid choice: 'mpi'" in capsys.readouterr().err


def test_nccl_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LaunchError, match=r"asked for nccl, but torch .* sees no GPU: use --backend gloo"):
        bench.run_bench([8], "nccl", World(), is_json=False)


def device_chosen(monkeypatch, backend, *, num_ranks, num_gpus):
    """The device with which a rank of this many on one host, which sees this many GPUs, would join."""

    class JoinedError(Exception):
        pass

    def process_group(world, *, device):
        raise JoinedError(device)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(bench, "process_group", process_group)
    with pytest.raises(JoinedError) as joined:
        bench.run_bench([8], backend, World(rank=0, size=num_ranks, local_size=num_ranks, port=1), is_json=False)
    return str(joined.value)


def test_more_ranks_than_gpus_are_refused_under_nccl_and_talk_through_gloo_otherwise(monkeypatch):
    with pytest.raises(
        LaunchError, match=r"asked for nccl, but torch .* sees 2 GPU\(s\) for 3 ranks: use --backend gloo"
    ):
        device_chosen(monkeypatch, "nccl", num_ranks=3, num_gpus=2)
    assert device_chosen(monkeypatch, "auto", num_ranks=3, num_gpus=2) == "cpu"
    assert device_chosen(monkeypatch, "auto", num_ranks=2, num_gpus=2) == "cuda"


def test_a_rank_that_sees_one_gpu_may_have_it_for_itself_if_nccl_is_asked_for(monkeypatch):
    # Joining with "cuda" compares the UUIDs of the ranks' GPUs, and refuses two ranks on one (ranks/test_devices.py).
    assert device_chosen(monkeypatch, "nccl", num_ranks=2, num_gpus=1) == "cuda"
    assert device_chosen(monkeypatch, "auto", num_ranks=2, num_gpus=1) == "cpu"


def test_under_megaclass_run_on_two_hosts_rank_0_prints_the_table(bed):
    sizes = ("-b", "8", "-e", "64K", "-f", "8192")
    done = bed("-H", "h1:1,h2:1", sys.executable, "-m", "megaclass", "bench", "allreduce", *sizes)
    assert done.code == 0, done.story()
    lines = [line.removeprefix("[0]<stdout>:") for line in done.out.splitlines()]
    assert "# all_reduce of float32, gloo, 2 ranks on 2 hosts" in lines
    assert "#       size       time    algbw    busbw  #wrong" in lines
    first = next(line for line in lines if line.startswith("      "))
    assert first.split()[0] == "8" and first.split()[-1] == "0"
    assert "# Wrong values: 0 OK" in lines


def test_json_is_one_list_of_rows(capfd):
    assert bench.run_bench([8], "gloo", World(), is_json=True) == 0
    [row] = json.loads(capfd.readouterr().out)
    assert row.keys() == set(bench.Row.__dataclass_fields__)
