"""Ranks onto hosts, and the plan that --dry-run prints."""

from dataclasses import replace

import pytest

from megaclass_launch.driver.ssh import agent_command
from megaclass_launch.errors import LaunchError
from megaclass_launch.hosts import Host
from megaclass_launch.options import parse_options
from megaclass_launch.placement import (
    HOROVOD_MARK,
    describe_plan,
    passed_on,
    place_ranks,
    places_on,
    rank_environment,
    worlds_of,
)
from megaclass_launch.world import world_from_environment

THREE = [Host(name="h1", slots=2, is_local=True), Host(name="h2", slots=1), Host(name="h3", slots=2)]

PLAN = """\
4 ranks on 3 hosts
command: python train.py 'a b'
working folder: /data/run
given with -x or --env-file (values not shown): API_KEY
passed on to other hosts (values not shown): NCCL_DEBUG PATH

h1 (this machine): ranks 0-1
  agent: /env/bin/python -X utf8 -P -m megaclass_launch.agent.agent
  rank 0: {0}
  rank 1: {1}

h2: rank 2
  agent: ssh -F cfg -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=10 -o ServerAliveCountMax=3 \
-o ControlMaster=no -o ClearAllForwardings=yes -T -p 2222 -i /keys/id -- h2 \
'nice -n 5 /env/bin/python -X utf8 -P -m megaclass_launch.agent.agent'
  rank 2: {2}

h3: rank 3
  agent: ssh -F cfg -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=10 -o ServerAliveCountMax=3 \
-o ControlMaster=no -o ClearAllForwardings=yes -T -p 2222 -i /keys/id -- h3 \
'nice -n 5 /env/bin/python -X utf8 -P -m megaclass_launch.agent.agent'
  rank 3: {3}"""

RANK_3 = (
    "RANK=3 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK=2 GROUP_WORLD_SIZE=3 MASTER_ADDR=<address of h1> "
    "MASTER_PORT=<free port of h1> MEGACLASS_STARTER=megaclass-run HOROVOD_RANK=3 HOROVOD_SIZE=4 HOROVOD_LOCAL_RANK=0 "
    "HOROVOD_LOCAL_SIZE=1 HOROVOD_CROSS_RANK=2 HOROVOD_CROSS_SIZE=3 HOROVOD_HOSTNAME=h3 "
    "HOROVOD_GLOO_RENDEZVOUS_ADDR=<address of h1> HOROVOD_GLOO_RENDEZVOUS_PORT=<free port of h1> HOROVOD_CONTROLLER=gloo "
    "PYTHONUNBUFFERED=1"
)


def test_hosts_are_filled_one_after_the_other_and_those_without_a_rank_are_left_alone():
    assert places_on(place_ranks(THREE, 3)) == [("h1", 0), ("h1", 1), ("h2", 0)]


def test_cross_ranks_count_the_hosts_that_have_this_local_rank():
    worlds = worlds_of(places_on(THREE))
    found = [(w.rank, w.local_rank, w.local_size, w.cross_rank, w.cross_size) for w in worlds]
    assert found == [(0, 0, 2, 0, 3), (1, 1, 2, 0, 2), (2, 0, 1, 1, 3), (3, 0, 2, 2, 3), (4, 1, 2, 1, 2)]


@pytest.mark.parametrize("given", [{}, {HOROVOD_MARK: "1"}])
def test_a_rank_reads_its_place_back(given):
    for world in worlds_of(places_on(THREE)):
        read = world_from_environment(rank_environment(world, host="h", address="10.0.0.1", port=1234, given=given))
        assert read == replace(world, address="10.0.0.1", port=1234) and (read.size, read.starter) == (
            5,
            "megaclass-run",
        )


def test_more_processes_than_slots_are_refused():
    with pytest.raises(LaunchError, match="-np 6 needs more slots than there are: 5 on h1:2, h2:1, h3:2"):
        place_ranks(THREE, 6)


def test_only_what_concerns_the_ranks_is_passed_on_and_never_the_choice_of_gpus():
    env = {
        "NCCL_DEBUG": "1",
        "CUDA_HOME": "/c",
        "CUDA_VISIBLE_DEVICES": "3",
        "AWS_KEY": "s",
        "PATH": "/b",
        "MY_TORCH": "x",
    }
    assert passed_on(env) == {"NCCL_DEBUG": "1", "CUDA_HOME": "/c", "PATH": "/b"}


def test_the_whole_plan_is_printed_without_values_that_may_be_secret():
    way = "-p 2222 -i /keys/id --ssh-arg=-F --ssh-arg=cfg --python /env/bin/python"
    options = parse_options([*way.split(), "--remote-prefix", "nice -n 5", "true"])
    text = describe_plan(
        place_ranks(THREE, 4),
        [agent_command(host, options) for host in place_ranks(THREE, 4)],
        command=["python", "train.py", "a b"],
        workdir="/data/run",
        given={"API_KEY": "secret"},
        passed={"PATH": "/secret", "NCCL_DEBUG": "secret"},
    )
    lines = [line.split(": ", 1)[1] for line in text.splitlines() if line.startswith("  rank ")]
    assert text == PLAN.format(*lines)
    assert lines[3] == RANK_3
    assert "secret" not in text
