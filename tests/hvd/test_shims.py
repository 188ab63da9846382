"""Modules named `horovod` that need no job: hosts, time-outs, options, caches and pipes, at their edges."""

import importlib
import json
import sys
import threading
from types import SimpleNamespace

import pytest

import megaclass.hvd as hvd


@pytest.fixture
def horovod(monkeypatch):
    """Imports a module named horovod.…; none of them is left for other tests."""
    monkeypatch.syspath_prepend(hvd.shims_folder())
    yield lambda name: importlib.import_module(f"horovod.{name}")
    for name in [name for name in sys.modules if name == "horovod" or name.startswith("horovod.")]:
        del sys.modules[name]


def test_hosts_are_parsed_in_horovods_form(horovod, tmp_path):
    hosts = horovod("runner.common.util.hosts")
    assert hosts.parse_hosts_and_slots("a:2, b-1.x:10") == (["a", "b-1.x"], {"a": 2, "b-1.x": 10})
    for wrong in ("a", "a:", "a:x", "a:2,,b:1", "a:2;b:1", "a b:2", ""):
        with pytest.raises(ValueError, match="Invalid host input"):
            hosts.parse_hosts_and_slots(wrong)
    file = tmp_path / "hosts"
    file.write_text("a slots=2\n\n# not this one\nb slots=3\n")
    assert hosts.parse_host_files(str(file)) == "a:2,b:3"
    assert hosts.HostInfo.from_string(" a:4 ") == hosts.HostInfo("a", 4)


@pytest.mark.parametrize(
    ("text", "least", "most", "places"),
    [
        ("a:1", 1, None, [("a", 0, 0, 0, 1, 1)]),
        ("a:2,b:1", 3, None, [("a", 0, 0, 0, 2, 2), ("a", 1, 1, 0, 2, 1), ("b", 2, 0, 1, 1, 2)]),
        ("a:2,b:2", 1, 3, [("a", 0, 0, 0, 2, 2), ("a", 1, 1, 0, 2, 1), ("b", 2, 0, 1, 1, 2)]),
        # A host that is not needed has no rank.
        ("a:2,b:2", 2, 2, [("a", 0, 0, 0, 2, 1), ("a", 1, 1, 0, 2, 1)]),
    ],
)
def test_ranks_are_assigned_host_by_host(horovod, text, least, most, places):
    hosts = horovod("runner.common.util.hosts")
    slots = hosts.get_host_assignments(hosts.parse_hosts(text), least, most)
    assert [(s.hostname, s.rank, s.local_rank, s.cross_rank, s.local_size, s.cross_size) for s in slots] == places
    assert {slot.size for slot in slots} == {len(places)}


def test_too_few_slots_are_an_error_with_both_numbers(horovod):
    hosts = horovod("runner.common.util.hosts")
    with pytest.raises(ValueError, match=r"Requested more processes \(5\) than there are available slots \(3\)"):
        hosts.get_host_assignments(hosts.parse_hosts("a:2,b:1"), 5)
    with pytest.raises(ValueError, match=r"Requested more processes \(3\) than there are available slots \(2\)"):
        hosts.get_host_assignments(hosts.parse_hosts("a:2,b:1"), 3, 2)


def test_a_deadline_says_what_it_was_for_and_how_long(horovod, monkeypatch):
    timeout = horovod("runner.common.util.timeout")
    now = [100.0]
    monkeypatch.setattr(timeout, "time", SimpleNamespace(time=lambda: now[0]))
    for message in ("Timed out waiting for {activity}. ", "Timed out waiting for {activity}"):
        deadline = timeout.Timeout(30, message)
        now[0] += 30
        assert deadline.remaining() == 0 and not deadline.timed_out()
        deadline.check_time_out_for("ssh")
        now[0] += 0.5
        assert deadline.remaining() == 0
        with pytest.raises(timeout.TimeoutException) as caught:
            deadline.check_time_out_for("ssh")
        assert "waiting for ssh." in caught.value.message and ".." not in caught.value.message
        assert caught.value.message.endswith("Timeout after 30 seconds.")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 1)),
        ({"HOROVOD_RANK": "2", "HOROVOD_SIZE": "4"}, (2, 4)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2)),
        ({"PMI_RANK": "3", "PMI_SIZE": "5"}, (3, 5)),
        # Horovod's own launcher comes first.
        ({"HOROVOD_RANK": "2", "HOROVOD_SIZE": "4", "PMI_RANK": "0", "PMI_SIZE": "1"}, (2, 4)),
        ({"PMI_RANK": "3"}, "only one of PMI_RANK and PMI_SIZE found"),
        ({"HOROVOD_SIZE": "3", "PMI_RANK": "0", "PMI_SIZE": "1"}, "only one of HOROVOD_RANK and HOROVOD_SIZE found"),
    ],
)
def test_rank_and_size_come_from_the_first_starter_that_set_them(horovod, monkeypatch, variables, expected):
    for prefix in ("HOROVOD_", "OMPI_COMM_WORLD_", "PMI_"):
        monkeypatch.delenv(f"{prefix}RANK", raising=False)
        monkeypatch.delenv(f"{prefix}SIZE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ask = horovod("runner.common.util.env").get_env_rank_and_size
    if isinstance(expected, tuple):
        assert ask() == expected
    else:
        with pytest.raises(RuntimeError, match=expected):
            ask()


def test_a_host_has_one_hash_per_container_and_salt(horovod, monkeypatch):
    host_hash = horovod("runner.common.util.host_hash").host_hash
    monkeypatch.delenv("CONTAINER_ID", raising=False)
    plain, salted = host_hash(), host_hash("1")
    monkeypatch.setenv("CONTAINER_ID", "container_7.cluster")
    inside = host_hash()
    assert len({plain, salted, inside, host_hash("1")}) == 4 and inside.startswith("container_7-")


def test_options_from_a_file_give_way_to_those_of_the_command_line(horovod):
    parser = horovod("runner.common.util.config_parser")
    config = {
        "params": {"fusion_threshold_mb": 32, "cycle_time_ms": 10},
        "stall_check": {"enabled": False},
        "timeline": {"filename": "t.json", "mark_cycles": True},
        "logging": None,
    }
    args = SimpleNamespace(use_gloo=False, use_mpi=False, cycle_time_ms=20.0)
    parser.set_args_from_config(args, config, {"cycle_time_ms"})
    assert (args.fusion_threshold_mb, args.cycle_time_ms, args.no_stall_check, args.use_gloo) == (32, 20.0, True, False)
    parser.validate_config_args(args)
    assert parser.set_env_from_args({"KEPT": "1"}, args) == {
        "KEPT": "1",
        "HOROVOD_FUSION_THRESHOLD": str(32 << 20),
        "HOROVOD_CYCLE_TIME": "20.0",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_TIMELINE": "t.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
    }
    with pytest.raises(ValueError, match="No such controller supported: slurm"):
        parser.set_args_from_config(args, {"controller": "slurm"}, ())
    parser.set_args_from_config(args, {"controller": "MPI"}, ())
    assert args.use_mpi
    # A controller of the command line counts.
    parser.set_args_from_config(args, {"controller": "gloo"}, ())
    assert not args.use_gloo


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("cycle_time_ms", -1, "cycle_time_ms=-1 must be >= 0"),
        ("cache_capacity", 1.5, "cache_capacity=1.5 must be a whole number"),
        ("cycle_time_ms", "fast", "cycle_time_ms='fast' must be a number"),
        ("autotune_gaussian_process_noise", 1.1, r"autotune_gaussian_process_noise=1.1 must be in \[0, 1\]"),
    ],
)
def test_numbers_out_of_their_range_are_refused(horovod, name, value, text):
    with pytest.raises(ValueError, match=text):
        horovod("runner.common.util.config_parser").validate_config_args(SimpleNamespace(**{name: value}))


def test_a_cache_forgets_what_is_old_or_damaged(horovod, tmp_path, monkeypatch):
    module = horovod("runner.util.cache")
    now = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: now[0]))
    folder = tmp_path / "new" / "folder"
    cache = module.Cache(str(folder), 10, "parameters")
    assert cache.get("host") is None
    cache.put("host", [1, 2])
    cache.put(7, "seven")
    now[0] += 599
    assert cache.get("host") == [1, 2] and module.Cache(str(folder), 10, "parameters").get(7) == "seven"
    assert module.Cache(str(folder), 10, "other parameters").get("host") is None
    now[0] += 2
    assert cache.get("host") is None
    for damaged in ("", "[]", "{", '"text"', json.dumps({"parameters_hash": "parameters"}), "\x00"):
        (folder / "cache.json").write_text(damaged)
        assert module.Cache(str(folder), 10, "parameters").get("host") is None


def test_a_pipe_hands_over_one_text_at_a_time_and_ends(horovod):
    pipe = horovod("runner.util.streams").Pipe()
    pipe.write(b"abc")
    pipe.flush()
    assert (pipe.read(2), pipe.read(100)) == (b"ab", b"c")
    written = []

    def write() -> None:
        for text in ("one", "two"):
            pipe.write(text)
            written.append(text)

    writer = threading.Thread(target=write)
    writer.start()
    assert pipe.read(0) == "one" and pipe.read(-1) == "two"
    writer.join()
    assert written == ["one", "two"]
    pipe.write("last")
    pipe.close()
    # What was written before the end can be read, and then nothing comes any more.
    assert (pipe.read(), pipe.read(), pipe.read(5)) == ("last", None, None)
    with pytest.raises(RuntimeError, match="Pipe is closed"):
        pipe.write("late")


def test_what_needs_mpi_says_what_to_use_instead(horovod):
    mpi, jsrun = horovod("runner.mpi_run"), horovod("runner.js_run")
    assert not any([mpi.mpi_available(), mpi.is_open_mpi(), mpi.is_mpich(), mpi.is_intel_mpi()])
    assert mpi._get_mpi_implementation() == "Missing"
    with pytest.raises(NotImplementedError, match="megaclass run --launcher mpi"):
        mpi.mpi_run(None, None, {}, ["true"])
    for call in (lambda: jsrun.js_run(None, None, {}, ["true"]), lambda: jsrun.generate_jsrun_rankfile(None)):
        with pytest.raises(NotImplementedError, match="within LSF `megaclass run` starts its hosts by ssh"):
            call()
    assert horovod("runner.util.network").resolve_host_address("127.0.0.1") == "127.0.0.1"


def test_both_names_of_a_thing_are_one_object(horovod):
    torch_module = horovod("torch")
    assert torch_module.allreduce is hvd.allreduce and torch_module.ProcessSet is hvd.ProcessSet
    assert horovod("common.process_sets").global_process_set is hvd.global_process_set
    assert horovod("common.exceptions").HorovodInternalError is hvd.HorovodInternalError
    assert horovod("torch.elastic").run is hvd.elastic.run
    assert horovod("torch.mpi_ops").Adasum == hvd.Adasum
    with pytest.raises(AttributeError):
        _ = torch_module.no_such_name
