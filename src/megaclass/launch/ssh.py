"""The command that starts an agent on a host, and what ssh's complaints mean. Standard library only."""

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megaclass.launch.hosts import Host

_CONNECT_S = 10

# What ssh says when it ends with 255, and what to do about it.
_CAUSES = (
    (
        r"Could not resolve hostname",
        "its name cannot be resolved: check the spelling, or add it to ~/.ssh/config or /etc/hosts",
    ),
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key is not the one in known_hosts: if that is expected, remove the old one with `ssh-keygen -R {host}`",
    ),
    (
        r"Host key verification failed|No .* host key is known",
        "its host key is not known: log in once with `ssh {host}` and compare the key",
    ),
    (
        r"Permission denied|Too many authentication failures",
        "it refuses our key, and a password cannot be asked for: give the key with -i, or copy it with `ssh-copy-id {host}`",
    ),
    (
        r"Connection timed out|Operation timed out|timed out during",
        "it does not answer: is it up, and is the route open?",
    ),
    (r"No route to host|Network is unreachable", "there is no route to it: is it up, and in this network?"),
    (r"Connection refused", "it runs no ssh server at that port: start sshd, or give the port with -p"),
    (r"Connection (closed|reset)|closed by remote host|Broken pipe", "the connection was cut"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SshSettings:
    port: int | None = None
    identity_file: Path | None = None
    extra: tuple[str, ...] = ()
    """Further arguments of ssh, in front of ours: the first value of an option counts."""
    remote_prefix: str = ""
    """Shell text before the agent's command on other hosts: `nice -n 5`, `. /opt/env.sh &&`."""
    python: str = ""
    heartbeat_s: float = 30.0


def agent_command(host: Host, settings: SshSettings) -> list[str]:
    """An argument list: no shell on this side. On the other side ssh always has one; nothing of the user's passes through
    it but the interpreter's path, quoted, and the prefix."""
    # -P: a file named like one of ours in the login folder must not be imported; -X utf8: the same text on all hosts.
    agent = [settings.python, "-X", "utf8", "-P", "-m", "megaclass.launch.agent"]
    if host.is_local:
        return agent
    remote = shlex.join(agent)
    return [
        "ssh",
        *settings.extra,
        *("-o", "BatchMode=yes"),
        *("-o", f"ConnectTimeout={_CONNECT_S}"),
        *("-o", f"ServerAliveInterval={max(1, round(settings.heartbeat_s / 3))}"),
        *("-o", "ServerAliveCountMax=3"),
        # No background master, which would outlive the run; an existing one is used. No forwards of the user's config,
        # of which only the first connection would get the port.
        *("-o", "ControlMaster=no"),
        *("-o", "ClearAllForwardings=yes"),
        "-T",
        *(("-p", str(settings.port)) if settings.port is not None else ()),
        *(("-i", str(settings.identity_file)) if settings.identity_file is not None else ()),
        "--",
        host.name.replace("[", "").replace("]", ""),
        f"{settings.remote_prefix} {remote}".lstrip(),
    ]


def why_not_started(host: Host, python: str, code: int | None, said: str) -> str:
    """A sentence about an agent that ended, or said nothing, before it could report. said: its stderr."""
    last = _last_lines(said)
    if not host.is_local and code == 255:
        for pattern, cause in _CAUSES:
            if re.search(pattern, said, re.IGNORECASE):
                return f"{host.name}: {cause.format(host=host.name)}.{last}"
        return f"{host.name}: ssh cannot connect.{last}"
    if "No module named" in said and "megaclass" in said:
        return (
            f"{host.name}: {python} there has no megaclass: install it there as here, "
            f"or name the interpreter that has it with --python.{last}"
        )
    if code in (126, 127):
        return (
            f"{host.name}: there is no Python at {python}: install the same environment there, "
            f"or give the path with --python.{last}"
        )
    if code is None:
        return f"{host.name}: it did not report in time: a login script that waits for input?{last}"
    return f"{host.name}: its agent ended with {code} before it could report.{last}"


def _last_lines(said: str, num_lines: int = 3) -> str:
    lines: Sequence[str] = [line for line in said.splitlines() if line.strip() and not line.startswith("@@@")]
    return "".join(f"{os.linesep}    {line.strip()}" for line in lines[-num_lines:])
