"""The hosts of a job, the command that starts an agent there, and the meaning of ssh's errors. Standard library only."""

import os
import re
import shlex
from collections.abc import Collection, Sequence

from megaclass_launch.driver.agent_pipe import Process, started_process
from megaclass_launch.driver.output import DriverMessages
from megaclass_launch.exit_codes import how_it_ended
from megaclass_launch.hosts import Host
from megaclass_launch.options import RunOptions
from megaclass_launch.placement import place_ranks
from megaclass_launch.signals import SignalQueue
from megaclass_launch.wire.checks import ip_address

_CONNECT_S = 10

# Patterns in ssh's error output when it ends with 255, their cause, and what to do.
_CAUSES = (
    (
        r"Could not resolve hostname",
        "its name cannot be resolved",
        "check the spelling, or add it to ~/.ssh/config or /etc/hosts",
    ),
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key is not the one in known_hosts",
        "if that is expected, remove the old one with `ssh-keygen -R {host}`",
    ),
    (
        r"Host key verification failed|No .* host key is known",
        "its host key is not known",
        "log in once with `{login}` and compare the key",
    ),
    (
        r"Permission denied|Too many authentication failures",
        "it refuses our key, and a password cannot be asked for",
        "give the key with -i, or copy it with `{copy}`",
    ),
    (
        r"Connection timed out|Operation timed out|timed out during",
        "it does not answer",
        "see whether it is up and a firewall lets ssh through: `ping -c 3 {host}`, then `{login}`",
    ),
    (
        r"No route to host|Network is unreachable",
        "there is no route to it",
        "see whether it is up, and in this network: `ping -c 3 {host}`",
    ),
    (
        r"Connection refused",
        "it runs no ssh server at that port",
        "start it there with `sudo systemctl start ssh`, or give the port with -p",
    ),
    (
        r"Connection (closed|reset)|closed by remote host|Broken pipe",
        "the connection was cut",
        "`{login} -v` shows which side closed it",
    ),
)


_LOST = r"not responding|timed out|Connection (closed|reset)|closed by remote host|Broken pipe|No route|unreachable"
"""Messages of ssh about an established connection that is lost."""


def agent_command(host: Host, options: RunOptions, module: str = "megaclass_launch.agent.agent") -> list[str]:
    """Returns the argument list that starts an agent; no shell on this side reads it.

    On the other host ssh always uses a shell. Only the quoted path of the interpreter and the user's prefix reach it.
    """
    # -P: files in the login folder must not be imported in place of ours; -X utf8: the same encoding on all hosts.
    agent = [options.python, "-X", "utf8", "-P", "-m", module]
    if host.is_local:
        return agent
    remote = shlex.join(agent)
    return [
        "ssh",
        *options.ssh_args,
        # No questions: stdin is the connection to the agent, and many hosts are connected to at once.
        *("-o", "BatchMode=yes"),
        *("-o", f"ConnectTimeout={_CONNECT_S}"),
        *("-o", f"ServerAliveInterval={max(1, round(options.heartbeat_s / 3))}"),
        *("-o", "ServerAliveCountMax=3"),
        # ssh must not start a background master, which would outlive the run; it may use an existing one. Port forwards
        # of the user's configuration are cleared, because only the first connection would get the port.
        *("-o", "ControlMaster=no"),
        *("-o", "ClearAllForwardings=yes"),
        # No terminal on the other side: it would echo, and turn Ctrl-C in the job's bytes into a signal.
        "-T",
        *port_and_key(options),
        "--",
        # -H needs brackets around an IPv6 address, because of the colon before the slots; ssh does not take them.
        host.name.replace("[", "").replace("]", ""),
        f"{options.remote_prefix} {remote}".lstrip(),
    ]


def login_command(host: Host, options: RunOptions, program: str = "ssh") -> str:
    """Returns the command a user types to reach the host in the same way; ssh-copy-id takes the same options."""
    return shlex.join([program, *options.ssh_args, *port_and_key(options), host.name])


def port_and_key(options: RunOptions) -> tuple[str, ...]:
    """Returns -p and -i for ssh, if the user has given them."""
    port = ("-p", str(options.ssh_port)) if options.ssh_port is not None else ()
    return *port, *(("-i", str(options.ssh_identity_file)) if options.ssh_identity_file is not None else ())


def why_not_started(host: Host, options: RunOptions, code: int | None, stderr: str) -> str:
    """Describes why an agent ended, or sent nothing, before it could report. stderr: what it wrote there."""
    what, advice = cause_and_advice(host, options, code, stderr)
    return f"{host.name}: {what}{f': {advice}' if advice else ''}.{_last_lines(stderr)}"


def is_connection_lost(stderr: str) -> bool:
    """Returns whether ssh says that an established connection was lost, and not that the program at its other end ended."""
    return re.search(_LOST, stderr, re.IGNORECASE) is not None


def cause_and_advice(host: Host, options: RunOptions, code: int | None, stderr: str) -> tuple[str, str]:
    """Returns why an agent did not start, and what to do."""
    login = login_command(host, options)
    if not host.is_local and code == 255:
        # The order matters: the message about a changed host key also says that its verification failed.
        for pattern, cause, advice in _CAUSES:
            if re.search(pattern, stderr, re.IGNORECASE):
                copy = login_command(host, options, "ssh-copy-id")
                return cause, advice.format(host=host.name.rpartition("@")[2], login=login, copy=copy)
        # ssh explains why it cannot connect. If a signal ended the agent there, it only returns 255, and warns as usual.
        if not re.sub(r"^(\*\*|Warning:).*$", "", stderr, flags=re.MULTILINE).strip():
            return "its agent was ended by a signal before it could report", (
                f"did an administrator or the kernel, out of memory, kill it? See `dmesg` there, and `{login} true`"
            )
        return "ssh cannot connect", f"see why with `{login}`"
    if "No module named" in stderr and "megaclass" in stderr:
        there = f"{options.python} there has no megaclass"
        return there, "install it there as here, or name the interpreter that has it with --python"
    if code in (126, 127):
        missing = f"there is no Python at {options.python}"
        return missing, "install the same environment there, or give the path with --python"
    if code is None and host.is_local:
        return "it did not report in time", ""
    if code is None:
        return "it did not report in time", f"does a login script wait for input? See with `{login}`"
    who = "its agent" if host.is_local or code >= 0 else "ssh"
    return f"{who} ended with {how_it_ended(code)} before the agent could report", ""


def _last_lines(stderr: str, num_lines: int = 3) -> str:
    lines: Sequence[str] = [line for line in stderr.splitlines() if line.strip() and not line.startswith("@@@")]
    return "".join(f"{os.linesep}    {line.strip()}" for line in lines[-num_lines:])


def address_in(ssh_connection: str, index: int) -> str | None:
    """Returns a field of SSH_CONNECTION that other hosts can reach, or None."""
    fields = ssh_connection.split()
    try:
        address = ip_address(fields[index]) if len(fields) == 4 else ""
    except ValueError:
        return None
    return address if address and not address.startswith("127.") and address != "::1" else None


class NoRestartError(Exception):
    """Raised by `exclude` with the reason why the job cannot be started again."""


class SshHosts:
    """Hosts that were given, or that an elastic job has found: they are reached by ssh, and this machine without."""

    def __init__(self, options: RunOptions, hosts: Sequence[Host], num_processes: int) -> None:
        self._options, self._hosts, self._num_processes = options, [*hosts], num_processes

    def placed(self, signals: SignalQueue) -> list[Host]:
        return place_ranks(self._hosts, self._num_processes)

    def start_agent(self, host: Host, messages: DriverMessages) -> Process:
        command = agent_command(host, self._options)
        messages.detail(f"{host.name}: {command}")
        return started_process(host, command)

    def exclude(self, failed: Collection[str]) -> bool:
        left = [host for host in self._hosts if host.name not in failed]
        if not self._options.excludes_failed_hosts or len(left) == len(self._hosts):
            return False
        num_slots = sum(host.slots for host in left)
        if num_slots < (self._options.min_processes or self._num_processes):
            raise NoRestartError(f"without {', '.join(failed)} too few slots are left for --min-np.")
        self._hosts, self._num_processes = left, min(self._num_processes, num_slots)
        return True

    def describe(self) -> str:
        listed = ", ".join(f"{host.name}:{host.slots}" for host in self._hosts)
        return f"{self._num_processes} ranks on {listed}"
