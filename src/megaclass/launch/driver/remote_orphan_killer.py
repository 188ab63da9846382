"""Kills what a lost agent and its orphan killers have left behind on a host. Standard library only."""

import contextlib
import subprocess
import time
from dataclasses import dataclass

from megaclass.launch.driver.ssh import SshSettings, agent_command
from megaclass.launch.hosts import Host

_CONNECT_AND_KILL_S = 5.0
"""Time beyond the grace for ssh to connect and for the processes to vanish. A dead host delays the end of a run by it."""


@dataclass(frozen=True, slots=True)
class RemoteOrphanKiller:
    """A running orphan killer on one host."""

    process: subprocess.Popen[bytes]
    deadline: float

    def wait(self) -> None:
        """Waits until it is done or its time is up: the host may be down, which is why its agent was lost."""
        try:
            self.process.wait(max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start_orphan_killer(
    host: Host, ssh: SshSettings, run_id: str, *, agent_pid: int, grace_s: float
) -> RemoteOrphanKiller:
    """Starts to kill all processes of the run on the host, and does not wait. agent_pid: the lost agent's pid there."""
    process = subprocess.Popen(
        agent_command(host, ssh, "megaclass.launch.agent.orphan_killer"),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,
    )
    assert process.stdin is not None
    # The line is shorter than a pipe's buffer, so this never blocks.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(f"{run_id} {agent_pid} {grace_s}\n".encode("ascii"))
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    return RemoteOrphanKiller(process, time.monotonic() + grace_s + _CONNECT_AND_KILL_S)
