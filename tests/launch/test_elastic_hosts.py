"""Elastic jobs on several hosts: a cut cable, a host whose processes are stopped and wake up, a dead host."""

import os
import re
import signal
import sys
from pathlib import Path

from tests.launch.conftest import wait_until

JOB = [sys.executable, str(Path(__file__).with_name("elastic_job.py"))]


def test_a_training_survives_a_cut_cable_a_host_that_wakes_up_late_and_a_dead_host(bed, tmp_path):
    hosts, stop = tmp_path / "hosts", tmp_path / "stop"
    hosts.write_text("h1:1\nh2:1\nh3:1\n")
    options = ("--min-np", "1", "--heartbeat", "6", "--blacklist-cooldown-range", "2", "3", "--start-timeout", "60")
    job = bed.start(*options, "--host-discovery-script", f"cat {hosts}", *JOB, "400", "100000", "0.05", str(stop))
    try:
        job.says("from epoch 0", 3, timeout_s=120)
        # A cut cable. The ranks at both ends end their connections; those of h3 are ended by their agent.
        bed.do("cut", "h3")
        job.says("h3 has not answered for", timeout_s=60)
        job.says("generation 2: 2 ranks on h1:1, h2:1; before: 3.", timeout_s=60)
        job.says("generation 2 trains", timeout_s=60)
        wait_until(lambda: not bed.pids_of("h3", "elastic"), 30, "the end of the ranks behind the cut cable")
        bed.do("mend", "h3")
        job.says("generation 3: 3 ranks on h1:1, h2:1, h3:1; before: 2.", timeout_s=120)
        job.says("rank 2 of 3 from epoch", 2, timeout_s=60)
        # A whole host stands still; when it wakes up, the job has gone on without it.
        old = bed.processes("h2")
        for pid in old:
            os.kill(pid, signal.SIGSTOP)
        job.says("h2 has not answered for", timeout_s=60)
        job.says("generation 4: 2 ranks on h1:1, h3:1; before: 3.", timeout_s=60)
        job.says("generation 4 trains", timeout_s=60)
        hosts.write_text("h1:1\nh3:1\n")
        for pid in old:
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: not bed.pids_of("h2", "elastic"), 30, "the end of the ranks of an old generation")
        # A dead host.
        bed.do("kill", "h3")
        job.says("generation 5: 1 rank on h1:1; before: 2.", timeout_s=60)
        job.says("generation 5 trains", timeout_s=60)
        stop.touch()
        assert job.wait(120) == 0, job.story()
    finally:
        bed.start_in_background("start", "h3")
        bed.do("mend", "h3")
    ends = re.findall(r"end: (\d+) samples lost, (\d+) repeated", job.out)
    assert ends == [("0", "0")], job.story()
    assert "generation 6" not in job.err
