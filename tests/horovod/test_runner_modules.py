"""Horovod's smaller modules, which need no job, at their edges."""

import importlib

import pytest

import horovod.torch as hvd


@pytest.fixture
def horovod():
    """Imports a module named horovod.…"""
    return lambda name: importlib.import_module(f"horovod.{name}")


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


def test_both_names_of_a_thing_are_one_object(horovod):
    torch_module = horovod("torch")
    assert torch_module.allreduce is hvd.allreduce and torch_module.ProcessSet is hvd.ProcessSet
    assert horovod("common.process_sets").global_process_set is hvd.global_process_set
    assert horovod("common.exceptions").HorovodInternalError is hvd.HorovodInternalError
    assert horovod("torch.elastic").run is hvd.elastic.run
    assert horovod("torch.mpi_ops").Adasum == hvd.Adasum
    with pytest.raises(AttributeError):
        _ = torch_module.no_such_name
