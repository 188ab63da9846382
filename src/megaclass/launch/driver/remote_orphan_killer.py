"""The driver as the last watcher: it ends what a lost agent and its sweepers have left. Standard library only."""

import contextlib
import subprocess
import time
from dataclasses import dataclass

from megaclass.launch.driver.ssh import SshSettings, agent_command
from megaclass.launch.hosts import Host

# For ssh to connect and the processes to vanish, beyond the grace. A host that is down costs the end of a run so much.
_SWEEP_S = 5.0


@dataclass(frozen=True, slots=True)
class RemoteSweep:
    """A sweep of one host that is under way."""

    process: subprocess.Popen[bytes]
    deadline: float

    def wait(self) -> None:
        """Until it is done, or hopeless: the host may be down, which is why its agent was lost."""
        try:
            self.process.wait(max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start_sweep(host: Host, ssh: SshSettings, run_id: str, agent: int, grace_s: float) -> RemoteSweep:
    """Starts to kill all processes of the run on the host; does not wait. agent: pid there of the agent that was lost."""
    process = subprocess.Popen(
        agent_command(host, ssh, "megaclass.launch.agent.orphan_killer"),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,
    )
    assert process.stdin is not None
    # A line shorter than a pipe's buffer never blocks.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(f"{run_id} {agent} {grace_s}\n".encode("ascii"))
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    return RemoteSweep(process, time.monotonic() + grace_s + _SWEEP_S)
