"""Which hosts, with how many slots; what cannot be meant is refused, and the refusal says which part of which string."""

import errno
import socket

import pytest

from megaclass_launch.driver.ssh import why_not_started
from megaclass_launch.errors import LaunchError
from megaclass_launch.hosts import (
    Host,
    hosts_from_batch_system,
    hosts_from_file,
    hosts_from_option,
    is_this_machine,
)
from megaclass_launch.options import parse_options
from megaclass_launch.rendezvous import addresses
from megaclass_launch.world import slurm_hosts

TEN_KB = "x" * 10_000


def refusal(function, *arguments):
    with pytest.raises(LaunchError) as caught:
        function(*arguments)
    return str(caught.value)


def test_hosts_and_slots_are_read_as_horovodrun_reads_them():
    assert hosts_from_option("gpu-1:8,10.0.0.7:4,node_3.lan:1") == [
        Host(name="gpu-1", slots=8),
        Host(name="10.0.0.7", slots=4),
        Host(name="node_3.lan", slots=1),
    ]


def test_a_login_and_an_ipv6_address_may_be_given():
    assert hosts_from_option("me@gpu-1:8,[fd00::1]:2") == [
        Host(name="me@gpu-1", slots=8),
        Host(name="[fd00::1]", slots=2),
    ]


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "[::1]", socket.gethostname()])
def test_this_machine_is_known_by_its_names(name):
    assert is_this_machine(name)
    assert not is_this_machine(f"somebody@{name}")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "''"),
        (":2", "':2'"),
        ("a", "'a'"),
        ("a:2,,b:1", "''"),
        ("a:2;b:1", "'a:2;b:1'"),
        ("a;rm:2", "'a;rm:2'"),
        ("a b:2", "'a b:2'"),
        ("a\n:2", r"'a\n:2'"),
        ("hôte:2", "'hôte:2'"),
        ("fd00::1:2", "'fd00::1:2'"),
        ("-oProxyCommand=touch /tmp/owned:2", "'-oProxyCommand=touch /tmp/owned:2'"),
        ("--:1", "'--:1'"),
        ("a@-oProxyCommand=x:2", "'a@-oProxyCommand=x:2'"),
        ("$(id):2", "'$(id):2'"),
        (f"{TEN_KB}:2", "… (10002 characters)"),
    ],
)
def test_what_is_no_host_name_is_refused_and_never_reaches_ssh(text, part):
    message = refusal(hosts_from_option, text)
    assert message.startswith("Cannot read host ") and part in message and "in --hosts" in message
    assert "expected <name>:<slots>" in message and len(message) < 400


@pytest.mark.parametrize("slots", ["", "0", "-1", "1e3", "2.5", "two", "99999", "²", "١", " 2"])
def test_what_is_no_number_of_slots_is_refused(slots):
    message = refusal(hosts_from_option, f"b:1,a:{slots}")
    assert f"Cannot read the slots {slots!r} of 'a:{slots}' in --hosts 'b:1,a:{slots}'" in message


@pytest.mark.parametrize("text", ["a:1,b:1,a:2", "a:1,A:2", "localhost:1,localhost:2"])
def test_a_host_that_stands_twice_is_refused(text):
    assert "is listed twice" in refusal(hosts_from_option, text) and "write it once" in refusal(hosts_from_option, text)


def test_two_names_of_this_machine_are_two_hosts():
    assert hosts_from_option("localhost:2,127.0.0.1:1") == [
        Host(name="localhost", slots=2, is_local=True),
        Host(name="127.0.0.1", slots=1, is_local=True),
    ]


def test_a_host_file_has_a_host_a_line(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# the new ones\ngpu-1 slots=8\n\ngpu-2   slots = 4  # half of it\n")
    assert hosts_from_file(file) == [Host(name="gpu-1", slots=8), Host(name="gpu-2", slots=4)]


@pytest.mark.parametrize(
    "line", ["gpu-2", "gpu-2 slots=0", "gpu-2 slots=x", "-oX=y slots=2", "gpu-2 8", "gpu-1 slots=8"]
)
def test_a_line_of_a_host_file_that_cannot_be_read_is_named(tmp_path, line):
    file = tmp_path / "hosts"
    file.write_text(f"gpu-1 slots=8\n{line}\n")
    assert str(file) in refusal(hosts_from_file, file)
    if line != "gpu-1 slots=8":
        assert f"line 2 of {file}" in refusal(hosts_from_file, file)


def test_a_host_file_that_is_missing_or_empty_is_named(tmp_path):
    assert "No such file" in refusal(hosts_from_file, tmp_path / "none")
    (tmp_path / "empty").write_text("# nobody\n")
    assert "names no host" in refusal(hosts_from_file, tmp_path / "empty")


def test_slurms_short_form_is_unfolded():
    assert slurm_hosts("gpu[07-09,12],login") == ["gpu07", "gpu08", "gpu09", "gpu12", "login"]
    assert slurm_hosts("rack[1-2]-[4,5]") == ["rack1-4", "rack1-5", "rack2-4", "rack2-5"]
    assert "'x' in Slurm's node list 'gpu[x]'" in refusal(slurm_hosts, "gpu[x]")


def test_inside_slurm_the_hosts_of_the_job_are_used_and_named():
    env = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "gpu[1-3]", "SLURM_TASKS_PER_NODE": "8(x2),4"}
    hosts, what = hosts_from_batch_system(env)
    assert [(host.name, host.slots) for host in hosts] == [("gpu1", 8), ("gpu2", 8), ("gpu3", 4)]
    assert what == "Slurm job 77: gpu1:8, gpu2:8, gpu3:4"
    assert "disagree" in refusal(hosts_from_batch_system, {**env, "SLURM_TASKS_PER_NODE": "8"})


@pytest.mark.parametrize(("variable", "system"), [("PBS_NODEFILE", "PBS"), ("LSB_DJOB_HOSTFILE", "LSF")])
def test_a_host_file_of_pbs_or_lsf_has_a_line_a_slot(tmp_path, variable, system):
    file = tmp_path / "nodes"
    file.write_text("gpu-1\ngpu-1\ngpu-2\n")
    hosts, what = hosts_from_batch_system({variable: str(file)})
    assert [(host.name, host.slots) for host in hosts] == [("gpu-1", 2), ("gpu-2", 1)]
    assert what.startswith(f"{system} job ? ({variable}={file})")
    file.write_text("gpu-1\n-oProxyCommand=x\n")
    assert "is not a host name" in refusal(hosts_from_batch_system, {variable: str(file)})


def test_outside_of_batch_systems_there_are_no_hosts():
    assert hosts_from_batch_system({"PATH": "/bin"}) is None


@pytest.mark.parametrize("variable", ["PBS_NODEFILE", "LSB_DJOB_HOSTFILE"])
def test_a_host_file_of_a_batch_system_that_is_no_text_is_named(tmp_path, variable):
    file = tmp_path / "nodes"
    file.write_bytes(b"gpu-1\n\xff\xfe\x00gpu-2\n")
    message = refusal(hosts_from_batch_system, {variable: str(file)})
    assert message == f"Cannot read the host file {variable}={file}: it is not UTF-8 text. Give the hosts with -H."


def test_names_of_a_batch_system_that_are_too_long_never_reach_ssh(tmp_path):
    file = tmp_path / "nodes"
    file.write_text(f"gpu-1\n{'a' * 5000}\n")
    assert "which is not a host name" in refusal(hosts_from_batch_system, {"PBS_NODEFILE": str(file)})


def test_a_damaged_range_of_nodes_is_refused_before_it_fills_the_memory():
    assert "Cannot read '1-222222222' in" in refusal(
        hosts_from_batch_system, {"SLURM_JOB_NODELIST": "gpu[01-09],rack[1-222222222]-[4,5]"}
    )


def test_a_port_that_the_kernel_cannot_give_is_not_called_port_0(monkeypatch):
    def fail(port):
        raise OSError(errno.EADDRINUSE, "Address already in use")

    monkeypatch.setattr(addresses, "bound_socket", fail)
    message = refusal(addresses.reserve_port, 0)
    assert "has no free port for rank 0 (Address already in use)" in message and "Port 0" not in message
    assert "Port 4711 is in use on" in refusal(addresses.reserve_port, 4711)


@pytest.mark.parametrize(
    ("host", "code", "stderr", "says"),
    [
        (Host(name="h2", slots=1), 255, "", "h2: its agent was ended by a signal before it could report: did an"),
        (Host(name="h2", slots=1), 255, "kex_exchange_identification: banner", "h2: ssh cannot connect: see why with"),
        (Host(name="h2", slots=1), -9, "", "h2: ssh ended with signal SIGKILL before the agent could report."),
        (Host(name="localhost", slots=1, is_local=True), -9, "", "localhost: its agent ended with signal SIGKILL before"),
    ],
)  # fmt: skip
def test_an_agent_that_was_killed_is_not_called_an_ssh_that_cannot_connect(host, code, stderr, says):
    assert why_not_started(host, parse_options(["true"]), code, stderr).startswith(says)
