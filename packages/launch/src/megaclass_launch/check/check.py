"""The command `check`: finds out whether training would start on these hosts, and what to do if not.

Standard library only; torch is imported in a separate process. The steps, each with the hosts that passed the previous ones:

    log in by ssh -> collect facts about each host -> compare them -> connect between hosts -> all-reduce
"""

import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from megaclass_launch.check.probe_client import ProbeClient, rows_in
from megaclass_launch.check.rules import (
    Facts,
    Finding,
    Report,
    bad,
    default_slots,
    difference_findings,
    doubtful,
    good,
    host_findings,
)
from megaclass_launch.driver.ssh import address_in, agent_command, cause_and_advice, login_command
from megaclass_launch.errors import LaunchError
from megaclass_launch.hosts import Host
from megaclass_launch.options import RunOptions
from megaclass_launch.wire.protocol import ProtocolError

_FACTS_S = 150.0
_REACH_S = 60.0
_ALL_REDUCE_S = 180.0
_LATENCY_BYTES, _BANDWIDTH_BYTES = 8, 16 << 20
_MAX_CONNECTIONS = 64
TOGETHER = "together"


def check(hosts: Sequence[Host], options: RunOptions, arguments: Sequence[str], config: str | None) -> Report:
    """Checks all hosts in parallel and returns the report; a host that fails a step is left out of the next ones.

    Args:
        hosts: none for this machine, with one slot per GPU that torch can use, or two on CPUs.
        options: those with which `run` reaches the same hosts.
        arguments: the same, as they are typed.
        config: path of a configuration that must be the same file on every host.
    """
    hosts = hosts or (Host(name="localhost", slots=0, is_local=True),)
    if shutil.which("ssh") is None and (others := [host.name for host in hosts if not host.is_local]):
        raise LaunchError(
            f"ssh is not installed here, but is needed to reach {others[0]}: sudo apt install openssh-client"
        )
    checked = [_HostCheck(host, options, config) for host in hosts]
    with ThreadPoolExecutor(min(_MAX_CONNECTIONS, len(checked))) as pool:
        try:
            list(pool.map(_HostCheck.collect_facts, checked))
            reachable = [host for host in checked if host.facts]
            together: list[Finding] = []
            if reachable:
                facts = {host.name: host.facts for host in reachable}
                together += difference_findings(facts, config, options.workdir, options.python)
            if len(reachable) > 1:
                _try_ports(reachable, options, pool)
        finally:
            for host in checked:
                host.close()
    report = Report(
        findings={**{host.name: host.findings for host in checked}, TOGETHER: together},
        titles={host.name: _title(host.host) for host in checked},
        facts={host.name: host.facts for host in checked},
    )
    if not report.would_start:
        together.append(doubtful("all-reduce", "not tried", "Fix the problems marked [!] first."))
        return report
    finding, rows = _all_reduce([host.host for host in checked], options, arguments)
    together.append(finding)
    return replace(report, all_reduce=rows)


class _HostCheck:
    """One host: the connection to its probe, its facts, the findings about it. Used by one thread of the pool at a time."""

    def __init__(self, host: Host, options: RunOptions, config: str | None) -> None:
        self.host = host
        self.name = host.name
        self.findings: list[Finding] = []
        self.facts: Facts = {}
        self.connection = ""
        """SSH_CONNECTION on that host: client address and port, server address and port."""
        self._options, self._config = options, config
        self._client: ProbeClient | None = None

    def collect_facts(self) -> None:
        """Starts the probe on the host, asks for its facts and derives findings from them."""
        try:
            self._collect_facts()
        except ProtocolError as error:
            self.distrust(error)

    def distrust(self, error: ProtocolError) -> None:
        """Records that the host sent an invalid answer, and leaves it out of the following steps."""
        advice = "It runs another version of megaclass, or it is compromised: find out before you train on it."
        self.findings.append(bad("answers", str(error), advice))
        self.facts = {}

    def _collect_facts(self) -> None:
        begun = time.monotonic()
        self._client = ProbeClient(self.host, agent_command(self.host, self._options, "megaclass_launch.check.probe"))
        hello = self._client.ask({"token": self._client.token}, self._options.start_timeout_s)
        if hello is None:
            self._note_not_started()
            return
        self.connection = hello["ssh"]
        if not self.host.is_local:
            took_s = time.monotonic() - begun
            self.findings.append(good("ssh", f"logs in without a prompt, in {took_s:.1f} s"))
        question = {"ask": "facts", "workdir": self._options.workdir, "config": self._config}
        facts = self._client.ask(question, _FACTS_S)
        if facts is None:
            self._note_not_started()
            return
        self.facts = facts
        self.host = replace(self.host, slots=self.host.slots or default_slots(facts))
        self.findings += host_findings(facts, self.host.slots)
        if (interface := _chosen_interface(self._options)) is not None:
            self.findings.append(_interface(interface, facts))

    def ask(self, question: Mapping[str, Any], timeout_s: float) -> Facts | None:
        assert self._client is not None
        return self._client.ask(question, timeout_s)

    def close(self) -> None:
        if self._client is not None:
            self._client.wait(2.0)
            self._client.close(kills_local=True)

    def _note_not_started(self) -> None:
        assert self._client is not None
        code, said = self._client.exit_status()
        what, advice = cause_and_advice(self.host, self._options, code, said)
        if advice:
            advice = f"{advice[0].upper()}{advice[1:]}."
        else:
            last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")
            what += f" ({last})" if last else ""
            advice = f"Type: {self._options.python} -m megaclass_launch --version"
        is_ssh = not self.host.is_local and code in (255, None)
        if not (is_ssh or self.host.is_local or any(finding.what == "ssh" for finding in self.findings)):
            self.findings.append(good("ssh", "logs in without a prompt"))
        self.findings.append(bad("ssh" if is_ssh else "Python", what, advice))


# ---- routes and ports ----


def _chosen_interface(options: RunOptions) -> str | None:
    return next(iter(options.interfaces), None)


def _interface(name: str, facts: Facts) -> Finding:
    if name in facts["interfaces"]:
        return good("interface", f"{name}, {facts['interfaces'][name][0]}")
    present = ", ".join(sorted(facts["interfaces"]))
    return bad("interface", f"no interface {name} with an address", f"Set --network-interface to one of: {present}")


def _try_ports(hosts: Sequence[_HostCheck], options: RunOptions, pool: ThreadPoolExecutor) -> None:
    """Lets every host listen and every other host connect, as ranks do: at the port of rank 0 and at a free port."""
    listening: dict[str, list[tuple[str, str, int]]] = {}
    for index, host in enumerate(hosts):
        ports = (options.master_port, 0) if index == 0 and options.master_port else (0,)
        listening[host.name] = []
        for port in ports:
            try:
                reply = host.ask({"ask": "listen", "port": port}, _REACH_S)
            except ProtocolError as error:
                host.distrust(error)
                continue
            if reply is None or reply["fault"]:
                fault = reply["fault"] if reply else "no answer"
                advice = f"Leave out --master-port, or find the process that uses it: ss -ltnp sport = :{port}"
                host.findings.append(bad("ports", f"{port}: {fault}", advice))
                continue
            listening[host.name].append((host.name, _address(host, hosts, options), reply["port"]))

    def connect_to_others(host: _HostCheck) -> None:
        peers = [peer for other in hosts if other is not host for peer in listening[other.name]]
        named = [(f"{name} {address} {port}", address, port) for name, address, port in peers]
        if not named:
            return
        try:
            reply = host.ask({"ask": "reach", "peers": named}, _REACH_S)
        except ProtocolError as error:
            host.distrust(error)
            return
        if reply is None:
            advice = f"Type: {login_command(host.host, options)} uptime"
            host.findings.append(bad("ports", f"the host stopped answering: no reply for {_REACH_S:g} s", advice))
        else:
            host.findings += _reached(reply, _address(host, hosts, options))

    list(pool.map(connect_to_others, hosts))


def _address(host: _HostCheck, hosts: Sequence[_HostCheck], options: RunOptions) -> str:
    """Returns an address at which other hosts reach this one: the address that ssh connected to or came from."""
    interface = _chosen_interface(options)
    if interface is not None and interface in host.facts.get("interfaces", ()):
        return str(host.facts["interfaces"][interface][0])
    own = address_in(host.connection, 2)
    others = (address_in(other.connection, 0) for other in hosts)
    return own or next(filter(None, others), "127.0.0.1")


def _reached(reply: Facts, own_address: str) -> list[Finding]:
    towards = reply["towards"]
    first = next(iter(reply["faults"])).split()
    if towards is None:
        advice = f"Type on that host: ip route get {first[1]}"
        return [bad("route", f"no interface leads to {first[0]} ({first[1]})", advice)]
    findings = [good("route", f"{towards} to {first[0]}")]
    faults = {peer: fault for peer, fault in reply["faults"].items() if fault is not None}
    for peer, fault in faults.items():
        name, address, port = peer.split()
        advice = (
            f"Does a firewall block it? Type on {name}: sudo ufw allow from {own_address}"
            f" (or: sudo nft insert rule inet filter input ip saddr {own_address} accept)"
        )
        findings.append(bad("ports", f"cannot connect to {name} ({address}) port {port}: {fault}", advice))
    if not faults:
        names = dict.fromkeys(peer.split()[0] for peer in reply["faults"])
        findings.append(good("ports", f"reaches {', '.join(names)}"))
    return findings


# ---- all ranks ----


def _all_reduce(
    hosts: Sequence[Host], options: RunOptions, arguments: Sequence[str]
) -> tuple[Finding, list[dict[str, Any]]]:
    """Runs `bench allreduce` by `run`, as training is started; returns the finding and the rows."""
    listed = ",".join(f"{host.name}:{host.slots}" for host in hosts)
    is_here = len(hosts) == 1 and hosts[0].is_local
    where = ("-np", str(hosts[0].slots)) if is_here else ("-H", listed)
    sizes = ("-b", str(_LATENCY_BYTES), "-e", str(_BANDWIDTH_BYTES), "-f", str(_BANDWIDTH_BYTES // _LATENCY_BYTES))
    bench = ("-P", "-m", "megaclass_launch", "bench", "allreduce", "--json", *sizes)
    run = [sys.executable, "-P", "-m", "megaclass_launch", "run", *arguments, *where]
    command = [*run, options.python, *bench]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ALL_REDUCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        advice = f"The ranks cannot communicate. See where they stop: NCCL_DEBUG=INFO {shlex.join(command)}"
        return bad("all-reduce", f"not finished after {_ALL_REDUCE_S:g} s", advice), []
    rows = _rows(done.stdout)
    if done.returncode != 0 or not rows:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        found = next((line for line in said if line.startswith("megaclass")), said[-1] if said else "no message")
        return bad("all-reduce", f"ended with {done.returncode}: {found}", f"Type: {shlex.join(command)}"), rows
    backends = dict.fromkeys(row["backend"] for row in rows)
    return good("all-reduce", "; ".join(_speed(rows, backend) for backend in backends)), rows


def _rows(output: str) -> list[dict[str, Any]]:
    """Parses rank 0's JSON; `run` has put the rank's number before each line."""
    text = "".join(line.removeprefix("[0]<stdout>:") for line in output.splitlines() if line.startswith("[0]<stdout>:"))
    try:
        return rows_in(json.loads(text))
    except (ValueError, RecursionError):
        return []


def _speed(rows: Sequence[Mapping[str, Any]], backend: str) -> str:
    small, large = (row for row in rows if row["backend"] == backend)
    latency = f"{small['time_us']:.0f} µs"
    if small["ranks"] == 1:
        return f"{backend}, a single rank: {latency}"
    return f"{backend}, {small['ranks']} ranks: latency {latency}, bus bandwidth {large['bus_gbps']:.2f} GB/s"


def _title(host: Host) -> str:
    remarks = ["this machine"] if host.is_local else []
    if host.slots:
        remarks.append(f"{host.slots} slot{'s' if host.slots > 1 else ''}")
    return f"{host.name} ({', '.join(remarks)})"
