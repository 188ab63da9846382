"""A thousand hosts: no thread and few files a host. The ssh here is a shell script that speaks the agent's part."""

import re
import resource
import time
from pathlib import Path

import pytest

FAKE_SSH = r"""#!/bin/sh
read -r job
token=${job#*\"token\":\"}; token=${token%%\"*}
rank=${job#*\"host\":\"host-}; rank=${rank%%\"*}
say() { printf '%s\n' "$1"; }
say "megaclass-agent $token"
say '{"say":"hello","pid":1,"port":1234,"ssh":"10.0.0.1 1 10.0.0.2 22","versions":{"Python":"3.11"}}'
while read -r line; do
  case $line in
    *'"start"'*)
      say "{\"say\":\"started\",\"pids\":{\"$rank\":7}}"
      printf '{"say":"output","rank":%s,"stream":"stdout","size":3}\nhi\n' "$rank"
      sleep ${FAKE_S}
      say "{\"say\":\"exit\",\"rank\":$rank,\"pid\":7,\"code\":0}"
      say '{"say":"done"}'
      exit 0;;
  esac
done
"""


def start(run, tmp_path, num_hosts, **more):
    ssh = tmp_path / "ssh"
    ssh.write_text(FAKE_SSH)
    ssh.chmod(0o755)
    hosts = ",".join(f"host-{i}:1" for i in range(num_hosts))
    env = {"PATH": f"{tmp_path}:{run.env['PATH']}", "FAKE_S": str(2 + num_hosts // 100)}
    return run.start("-H", hosts, "--start-timeout", "120", "true", env=env, **more)


@pytest.mark.parametrize("num_hosts", [50, pytest.param(1000, marks=pytest.mark.soak)])
def test_hosts_cost_neither_threads_nor_more_than_three_files_each(run, tmp_path, num_hosts):
    started = start(run, tmp_path, num_hosts)
    started.says("]<stdout>:hi", times=num_hosts, timeout_s=120)
    status = Path(f"/proc/{started.pid}/status").read_text()
    num_files = len(list(Path(f"/proc/{started.pid}/fd").iterdir()))
    assert int(re.search(r"Threads:\s+(\d+)", status)[1]) == 2
    assert num_files <= 3 * num_hosts + 20
    assert started.wait(120) == 0, started.story()


def test_more_hosts_than_files_are_refused(run, tmp_path):
    started = start(run, tmp_path, 50, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400)))
    begun = time.monotonic()
    assert started.wait() == 2 and time.monotonic() - begun < 20
    assert "open files; the limit is 400" in started.err


def test_an_elastic_job_starts_with_few_files_although_many_hosts_may_be_added(run):
    done = run("-np", "1", "--min-np", "1", "-H", "localhost:1", "true",
               preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (2048, 2048)))  # fmt: skip
    assert done.code == 0, done.err


def test_many_hosts_that_fail_for_the_same_reason_are_named_in_two_lines(run, tmp_path):
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nfor host; do case $host in host-*) break;; esac; done\n'
                   'echo "ssh: connect to host $host port 22: Connection refused" >&2\nexit 255\n')  # fmt: skip
    ssh.chmod(0o755)
    hosts = ",".join(f"host-{i}:1" for i in range(60))
    done = run("-H", hosts, "true", env={"PATH": f"{tmp_path}:{run.env['PATH']}"})
    assert done.code == 2
    first, quoted, others, end = done.err.splitlines()
    assert re.fullmatch(r"megaclass: host-\d+: it runs no ssh server at that port: start it there .*", first)
    assert "Connection refused" in quoted
    assert re.fullmatch(r"megaclass: 59 other hosts likewise: (host-\d+, ){7}host-\d+ and 51 more\.", others)
    assert end == "megaclass: nothing was started: 60 of 60 host(s) cannot take part."
