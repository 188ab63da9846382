"""Rank and size, from whichever starter is in charge."""

import pytest

from megaclass_launch.errors import LaunchError
from megaclass_launch.world import World, environment_of, slurm_hosts, world_from_environment

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "gpu-1",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-gpu-1-4711@1",
}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[07-09]",
}


def refusal(env):
    with pytest.raises(LaunchError) as caught:
        world_from_environment(env)
    return str(caught.value)


def without(env, name):
    return {key: value for key, value in env.items() if key != name}


def test_horovods_names_with_our_own_for_the_place_of_rank_0_come_before_names_that_a_script_has_set():
    world = World(rank=1, size=2, local_rank=1, local_size=2, starter="megaclass-run", port=2345)
    env = environment_of(world, is_horovod=True)
    assert not set(env) & set(TORCHRUN)
    assert world_from_environment(env) == world
    assert world_from_environment({**env, **TORCHRUN}) == world
    # torchrun, started within such a job, is in charge.
    assert world_from_environment({**env, **TORCHRUN, "TORCHELASTIC_RUN_ID": "x"}).size == 8
    # Without our own names they are a real horovodrun's, of which `megaclass train` knows nothing.
    assert world_from_environment(without(env, "MEGACLASS_PORT")).size == 1


def test_without_a_starter_the_world_is_one():
    assert world_from_environment({"PATH": "/bin"}) == World(rank=0, size=1, starter="none", port=0)


def test_torchrun_says_everything():
    assert world_from_environment(TORCHRUN) == World(
        rank=5,
        size=8,
        local_rank=1,
        local_size=4,
        cross_rank=1,
        cross_size=2,
        starter="torchrun",
        address="gpu-1",
        port=29500,
    )


def test_a_rank_and_a_size_are_enough_on_one_host():
    world = world_from_environment({"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1234"})
    assert (world.local_rank, world.local_size, world.cross_rank, world.cross_size) == (1, 2, 0, 1)
    assert world.address == "127.0.0.1"


@pytest.mark.parametrize(
    "world",
    [
        World(starter="megaclass"),
        World(rank=1, size=2, local_rank=1, local_size=2, starter="megaclass", port=23456),
        World(
            rank=7,
            size=8,
            local_rank=3,
            local_size=4,
            cross_rank=1,
            cross_size=2,
            starter="megaclass",
            address="fe80::1",
            port=1,
        ),
    ],
    ids=["one", "one host", "two hosts"],
)
def test_the_variables_a_starter_writes_bring_back_its_world(world):
    assert world_from_environment(environment_of(world)) == world


def test_open_mpi_on_one_host_needs_nothing_more():
    world = world_from_environment(OPEN_MPI)
    assert (world.rank, world.size, world.local_rank, world.local_size) == (2, 4, 2, 4)
    assert (world.starter, world.address) == ("Open MPI", "127.0.0.1")


def test_ranks_of_one_open_mpi_job_meet_at_one_port_and_other_jobs_elsewhere():
    ports = {world_from_environment({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": str(rank)}).port for rank in range(4)}
    other = world_from_environment({**OPEN_MPI, "PMIX_NAMESPACE": "prterun-gpu-1-4712@1"}).port
    assert len(ports) == 1 and other not in ports
    assert 20_000 <= min(ports) < 32_000


def test_open_mpi_on_several_hosts_says_how_many_there_are():
    env = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    world = world_from_environment({**env, "MASTER_ADDR": "gpu-1", "MASTER_PORT": "4000"})
    assert (world.address, world.port, world.cross_rank, world.cross_size) == ("gpu-1", 4000, 1, 2)
    uneven = world_from_environment({**env, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_MCA_orte_num_nodes": "2"})
    assert (uneven.cross_rank, uneven.cross_size) == (1, 2)


def test_open_mpi_with_hosts_of_different_sizes_is_a_world():
    env = {**OPEN_MPI, "MASTER_ADDR": "a", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    for local_size in ("1", "3"):
        assert world_from_environment({**env, "OMPI_COMM_WORLD_LOCAL_SIZE": local_size}).rank == 3


def test_slurm_says_where_rank_0_is_and_how_many_tasks_a_node_has():
    world = world_from_environment(SLURM)
    assert (world.rank, world.size, world.local_rank, world.local_size) == (4, 5, 0, 1)
    assert (world.cross_rank, world.cross_size, world.starter, world.address) == (2, 3, "Slurm", "gpu07")
    second = world_from_environment({**SLURM, "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"})
    assert (second.local_size, second.port) == (2, world.port)
    assert world_from_environment({**SLURM, "SLURM_STEP_ID": "1"}).port != world.port


def test_a_batch_script_of_slurm_without_srun_is_a_world_of_one():
    batch = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}
    assert world_from_environment(batch) == World()


def test_torchrun_inside_slurm_or_mpirun_is_in_charge():
    assert world_from_environment({**SLURM, **OPEN_MPI, **TORCHRUN}).starter == "torchrun"


@pytest.mark.parametrize(
    ("node_list", "first"),
    [
        ("gpu07", "gpu07"),
        ("gpu[07-09,12],login", "gpu07"),
        ("gpu[7,9]", "gpu7"),
        ("a,b[1-2]", "a"),
        ("rack[1-2]-[4,5],x", "rack1-4"),
        ("gpu[07-09]-ib.cluster.local", "gpu07-ib.cluster.local"),
    ],
)
def test_the_first_host_of_slurms_short_form(node_list, first):
    assert slurm_hosts(node_list)[0] == first


@pytest.mark.parametrize("node_list", ["", "[1-2", "gpu[", ",a", "gpu[]"])
def test_a_node_list_that_cannot_be_read_is_shown(node_list):
    with pytest.raises(LaunchError, match="expected for example gpu"):
        slurm_hosts(node_list)


@pytest.mark.parametrize("text", ["2(x)", "two", "2(x3", "-1", "2,,1"])
def test_tasks_per_node_that_cannot_be_read_are_shown(text):
    assert repr(text) in refusal({**SLURM, "SLURM_STEP_TASKS_PER_NODE": text})


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
def test_a_variable_that_torchrun_would_have_set_is_missed_by_name(name):
    assert refusal(without(TORCHRUN, name)).startswith(f"The environment is that of torchrun, but {name} is not set.")


def test_what_is_left_over_of_a_starter_comes_with_the_line_that_takes_it_away():
    assert "type `unset RANK LOCAL_RANK` if they are left over from another job" in refusal(
        {"RANK": "0", "LOCAL_RANK": "0"}
    )


@pytest.mark.parametrize(
    ("env", "name"),
    [(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"), (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK"), (SLURM, "SLURM_LOCALID")],
)
def test_a_variable_that_another_starter_would_have_set_is_missed_by_name(env, name):
    assert f"{name} is not set" in refusal(without(env, name))


@pytest.mark.parametrize("text", ["", "-1", "one", "1.0", "1e3", " 1", "٣", "9" * 30])
def test_what_is_no_whole_number_is_shown(text):
    assert refusal({**TORCHRUN, "RANK": text}).startswith(
        f"RANK={text!r} in the environment of torchrun: expected a whole"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "8"}, "torchrun says rank 8 of 8: it must lie in [0, 8)"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "torchrun says rank 0 of 0"),
        ({"LOCAL_RANK": "4"}, "torchrun says local rank 4 of 4"),
        ({"GROUP_RANK": "2"}, "torchrun says cross rank 2 of 2"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0 in the environment of torchrun: it must lie in [1, 65535]"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536 in the environment of torchrun: it must lie in [1, 65535]"),
    ],
)
def test_contradictions_are_refused(change, message):
    assert message in refusal({**TORCHRUN, **change})


def test_open_mpi_with_no_local_rank_at_all_is_refused():
    env = {**OPEN_MPI, "MASTER_ADDR": "a", "OMPI_COMM_WORLD_LOCAL_SIZE": "0"}
    assert "Open MPI says local rank 2 of 0" in refusal(env)


def test_a_rank_is_called_by_number_and_host():
    assert World(rank=1, size=2).name().startswith("rank 1 of 2 on ")
