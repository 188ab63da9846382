"""A firewall that drops packets between hosts while ssh stays alive: every rank and the driver know within the limit.

The limit is 6 s in most tests; it is 30 s by default. The rules are those of a real firewall (nftables) on one of the hosts.
"""

import re
import subprocess
import time
from contextlib import contextmanager

import pytest

TWO_HOSTS, THREE_HOSTS = ("-H", "h1:1,h3:1"), ("-H", "h1:1,h2:1,h3:1")
LIMIT_S = 6
# For the imports of torch on a busy machine, too; far below the 300 or 600 s of gloo.
PATIENCE_S = 150
FROM_ANYBODY, FROM_H2, FROM_H3 = "10.123.0.0/24", "10.123.0.2", "10.123.0.3"

TRAINING = """
import time, torch, torch.distributed as dist
from megaclass_launch.ranks.process_group import process_group
from megaclass_launch.world import world_from_environment
with process_group(world_from_environment(), device="cpu"):
    while True:
        dist.all_reduce(torch.ones(1000))
        print("step", flush=True)
        time.sleep(0.1)
"""
HOROVOD = """
import time, torch
import horovod.torch as hvd
hvd.init()
while True:
    hvd.allreduce(torch.ones(1000), name="step")
    print("step", flush=True)
    time.sleep(0.1)
"""
IDLE_HOROVOD = """
import time, torch
import horovod.torch as hvd
hvd.init()
hvd.allreduce(torch.ones(1000), name="step")
print("step", flush=True)
time.sleep(600)
"""
PROGRAMS = pytest.mark.parametrize("program", [TRAINING, HOROVOD], ids=["training", "hvd"])
# Both make the same store, and gloo connects them in the same way: each way to be blocked from the start is met by one of
# them, and by the other one in `make soak`.
MOSTLY_TRAINING, MOSTLY_HOROVOD = (
    pytest.mark.parametrize("program", [often, pytest.param(seldom, marks=pytest.mark.soak)], ids=names)
    for often, seldom, names in ((TRAINING, HOROVOD, ["training", "hvd"]), (HOROVOD, TRAINING, ["hvd", "training"]))
)


@contextmanager
def firewall(bed, host, source, verdict="drop"):
    """Blocks what arrives at the host from the source; ssh passes."""
    table = "add table inet f; add chain inet f in { type filter hook input priority 0; }"
    rules = ("tcp dport 22 accept", "tcp sport 22 accept", f"meta l4proto tcp ip saddr {source} {verdict}")
    subprocess.run(
        bed.inside(host, "nft", "; ".join((table, *(f"add rule inet f in {rule}" for rule in rules)))), check=True
    )
    try:
        yield
    finally:
        subprocess.run(bed.inside(host, "nft", "delete table inet f"), check=True)


def start(bed, tmp_path, program, *options, hosts=TWO_HOSTS, limit_s: int | None = LIMIT_S):
    file = tmp_path / "job.py"
    file.write_text(program)
    limit = ("-x", f"MEGACLASS_NETWORK_TIMEOUT={limit_s}") if limit_s else ()
    return bed.start(*hosts, *limit, *options, "python", str(file))


def assert_named(run, first, second):
    """The last words name both ends, with their ports."""
    ends = "|".join(f"{a} port [0-9]+ to {b} port [0-9]+" for a, b in ((first, second), (second, first)))
    assert re.search(rf"from ({ends}).* has not been answered for", run.err), run.story()


@PROGRAMS
def test_an_outage_shorter_than_the_limit_costs_nothing_and_a_connection_that_stays_blocked_ends_the_run(
    bed, tmp_path, program
):
    run = start(bed, tmp_path, program, hosts=THREE_HOSTS)
    run.says("step", times=12, timeout_s=100)
    with firewall(bed, "h3", FROM_ANYBODY):
        time.sleep(2)
    num_steps = run.out.count("step")
    run.says("step", times=num_steps + 30, timeout_s=60)
    assert "has not been answered" not in run.err
    with firewall(bed, "h3", FROM_ANYBODY):
        assert run.wait(PATIENCE_S) not in (0, 2, 75), run.story()
    assert_named(run, r"10\.123\.0\.[12]", r"10\.123\.0\.3")
    bed.seconds_until_nothing_is_left(timeout_s=5)


@MOSTLY_TRAINING
def test_rank_0s_port_that_is_blocked_from_the_start(bed, tmp_path, program):
    with firewall(bed, "h1", FROM_ANYBODY):
        run = start(bed, tmp_path, program, "--master-port", "29555")
        assert run.wait(PATIENCE_S) == 74, run.story()
    assert re.search(r"from 10\.123\.0\.[23] port \d+ to 10\.123\.0\.1 port 29555", run.err), run.story()
    assert "step" not in run.out


@pytest.mark.soak
@PROGRAMS
@pytest.mark.parametrize("moment", ["mid-run", "start"])
def test_with_the_default_limit_everything_has_ended_within_30_s(bed, tmp_path, program, moment):
    """The documented limit: from the firewall, or from the command if that comes later, to the end of the driver."""
    if moment == "mid-run":
        run = start(bed, tmp_path, program, hosts=THREE_HOSTS, limit_s=None)
        run.says("step", times=12, timeout_s=100)
    with firewall(bed, "h3" if moment == "mid-run" else "h1", FROM_ANYBODY):
        begun = time.monotonic()
        if moment == "start":
            run = start(bed, tmp_path, program, hosts=THREE_HOSTS, limit_s=None)
        assert run.wait(100) not in (0, 2, 75), run.story()
        taken_s = time.monotonic() - begun
    assert re.search(r"from 10\.123\.0\.\d port \d+ to 10\.123\.0\.\d port \d+.* has not been answered", run.err)
    bed.seconds_until_nothing_is_left(timeout_s=5)
    print(f"\n{moment}: {taken_s:.1f} s")
    assert taken_s < 30


@MOSTLY_HOROVOD
def test_two_hosts_that_cannot_reach_each_other_from_the_start(bed, tmp_path, program):
    with firewall(bed, "h3", FROM_H2):
        run = start(bed, tmp_path, program, hosts=THREE_HOSTS)
        assert run.wait(PATIENCE_S) == 74, run.story()
    assert_named(run, r"10\.123\.0\.2", r"10\.123\.0\.3")


def test_an_idle_rank_says_at_once_that_its_connections_are_blocked(bed, tmp_path):
    run = start(bed, tmp_path, IDLE_HOROVOD)
    run.says("step", times=2, timeout_s=100)
    with firewall(bed, "h3", FROM_ANYBODY):
        # By the end that notices first: the other end sees its connections closed then.
        run.says("has not been answered for", timeout_s=LIMIT_S + 15)


# By TCP (as from a host where no process listens), and by ICMP (as from most firewalls).
REJECTS = pytest.mark.parametrize(
    "verdict",
    ["reject with tcp reset", pytest.param("reject with icmp type admin-prohibited", marks=pytest.mark.soak)],
    ids=["reset", "icmp"],
)


@MOSTLY_HOROVOD
@REJECTS
def test_rank_0s_port_that_is_rejected_from_the_start(bed, tmp_path, program, verdict):
    with firewall(bed, "h1", FROM_ANYBODY, verdict):
        run = start(bed, tmp_path, program, "--master-port", "29555")
        assert run.wait(PATIENCE_S) not in (0, 2, 75), run.story()
    assert re.search(r"from 10\.123\.0\.[23] to 10\.123\.0\.1 port 29555", run.err), run.story()
    assert f"refused for {0.8 * LIMIT_S:g} s" in run.err, run.story()
    assert "step" not in run.out


@MOSTLY_TRAINING
@REJECTS
def test_two_hosts_that_reject_each_other_from_the_start(bed, tmp_path, program, verdict):
    # gloo connects from the higher rank to the lower one.
    with firewall(bed, "h2", FROM_H3, verdict):
        run = start(bed, tmp_path, program, hosts=THREE_HOSTS)
        assert run.wait(PATIENCE_S) not in (0, 2, 75), run.story()
    expected = r"[Rr]ank 2 .*on h3 cannot join .*from 10\.123\.0\.3 to 10\.123\.0\.2 port \d+ failed: (Conn|No route)"
    assert re.search(expected, run.err), run.story()
