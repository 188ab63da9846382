"""`megaclass check`: would training start here, on these hosts? Standard library only; torch is asked in a process apart.

names -> ssh -> what each host says -> what must be the same -> who reaches whom -> an all-reduce over all ranks
"""

import json
import os
import re
import secrets
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaclass.launch.check_facts import Facts, clock_finding, difference_findings, host_findings
from megaclass.launch.check_findings import Finding, Report, bad, doubtful, good
from megaclass.launch.hosts import Host
from megaclass.launch.protocol import MessageReader, ProtocolError, encode, greeting
from megaclass.launch.ssh import SshSettings, agent_command, why_not_started

_FACTS_S = 150.0
_REACH_S = 60.0
_ALL_REDUCE_S = 180.0
_LATENCY_BYTES, _BANDWIDTH_BYTES = 8, 16 << 20
_MAX_CONNECTIONS = 64
TOGETHER = "together"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckSettings:
    hosts: tuple[Host, ...]
    ssh: SshSettings
    workdir: str
    config: str | None = None
    """A recipe that must be the same file everywhere."""
    interface: str | None = None
    master_port: int = 0
    start_timeout_s: float = 30.0
    run_options: tuple[str, ...] = ()
    """How `megaclass run` reaches the same hosts."""


def check(settings: CheckSettings) -> Report:
    """Asks all hosts at once; what one of them cannot do is not tried with it."""
    answers = [_Answers(host, settings) for host in settings.hosts]
    with ThreadPoolExecutor(min(_MAX_CONNECTIONS, len(answers))) as pool:
        try:
            list(pool.map(_Answers.introduce, answers))
            there = [host for host in answers if host.facts]
            together: list[Finding] = []
            if there:
                together += difference_findings({host.name: host.facts for host in there}, settings.config)
            if len(there) > 1:
                _try_ports(there, settings, pool)
        finally:
            for host in answers:
                host.hang_up()
    findings = {_heading(host.host): host.findings for host in answers}
    is_fit = Report(findings={**findings, TOGETHER: together}).would_start
    together.append(_all_reduce(settings) if is_fit else _all_reduce_not_tried())
    return Report(findings={**findings, TOGETHER: together})


class _Answers:
    """One host: the line to it, what it said, what follows."""

    def __init__(self, host: Host, settings: CheckSettings) -> None:
        self.host = host
        self.name = host.name
        self.findings: list[Finding] = []
        self.facts: Facts = {}
        self.connection: list[str] = []
        """SSH_CONNECTION there: client address and port, server address and port."""
        self._settings = settings
        self._line: _Line | None = None

    def introduce(self) -> None:
        if not self.host.is_local:
            self.findings.append(_name_resolution(self.host, self._settings.ssh))
        # The same way to the host as the agent's, to another module of ours.
        command = [
            part.replace("megaclass.launch.agent", "megaclass.launch.check_host")
            for part in agent_command(self.host, self._settings.ssh)
        ]
        self._line = _Line(command)
        begun = time.monotonic()
        hello = self._line.greet(self._settings.start_timeout_s)
        if hello is None:
            self.findings.append(self._not_started())
            return
        self.connection = str(hello["ssh"]).split()
        if not self.host.is_local:
            took_s = time.monotonic() - begun
            self.findings.append(good("ssh", f"without a prompt, in {took_s:.1f} s"))
            self._compare_clocks()
        question = {"ask": "facts", "workdir": self._settings.workdir, "config": self._settings.config}
        facts = self._line.ask(question, _FACTS_S)
        if facts is None:
            self.findings.append(self._not_started())
            return
        self.facts = facts
        self.findings += host_findings(facts, self.host.slots)
        if self._settings.interface is not None:
            self.findings.append(_interface(self._settings.interface, facts))

    def ask(self, question: Mapping[str, Any], timeout_s: float) -> Facts | None:
        assert self._line is not None
        return self._line.ask(question, timeout_s)

    def hang_up(self) -> None:
        if self._line is not None:
            self._line.close()

    def _compare_clocks(self) -> None:
        assert self._line is not None
        asked_at = time.time()
        reply = self._line.ask({"ask": "time"}, self._settings.start_timeout_s)
        if reply is not None:
            doubt_s = (time.time() - asked_at) / 2
            self.findings.append(clock_finding(reply["time"] - asked_at - doubt_s, doubt_s))

    def _not_started(self) -> Finding:
        assert self._line is not None
        code, said = self._line.last_words()
        why = why_not_started(self.host, self._settings.ssh.python, code, said).removeprefix(f"{self.name}: ")
        sentence, _, advice = why.partition("\n")[0].partition(": ")
        if self.host.is_local:
            return bad("Python", why.replace("\n", " "), f"Type: {self._settings.ssh.python} -m megaclass --version")
        if code == 255:
            if re.search("Permission denied", said, re.IGNORECASE):
                advice = f"Type: {_ssh_copy_id(self.host, self._settings.ssh)}"
            return bad("ssh", sentence.rstrip("."), advice or f"Type: ssh {shlex.quote(self.name)} true")
        what = "Python" if code is not None else "ssh"
        return bad(what, sentence.rstrip("."), advice or f"Type: ssh {shlex.quote(self.name)} and see what it prints.")


@dataclass(slots=True)
class _Line:
    """A process that answers questions, one at a time; its output is read by a thread, because it may never come."""

    command: Sequence[str]
    said: bytearray = field(default_factory=bytearray)
    _replies: list[Any] = field(default_factory=list)
    _is_over: bool = False
    _news: threading.Condition = field(default_factory=threading.Condition)
    _process: "subprocess.Popen[bytes] | None" = None
    _threads: list[threading.Thread] = field(default_factory=list)

    def greet(self, timeout_s: float) -> Facts | None:
        token = secrets.token_hex(16)
        self._process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        self._threads = [
            threading.Thread(target=self._listen, args=(MessageReader(after=greeting(token)),), daemon=True),
            threading.Thread(target=self._listen_to_stderr, daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        return self.ask({"token": token}, timeout_s)

    def ask(self, question: Mapping[str, Any], timeout_s: float) -> Facts | None:
        """None when no answer came."""
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(encode(dict(question)))
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        with self._news:
            self._news.wait_for(lambda: self._replies or self._is_over, timeout_s)
            return self._replies.pop(0) if self._replies else None

    def last_words(self) -> tuple[int | None, str]:
        """Exit code, None while it still runs, and what it wrote to stderr."""
        assert self._process is not None
        try:
            code = self._process.wait(0.5) if self._is_over else None
        except subprocess.TimeoutExpired:
            code = None
        self._threads[1].join(0.5)
        return code, self.said.decode(errors="replace")

    def close(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(2.0)
        except BrokenPipeError:
            pass
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._process.wait()
        for thread in self._threads:
            thread.join(1.0)

    def _listen(self, reader: MessageReader) -> None:
        assert self._process is not None and self._process.stdout is not None
        while data := os.read(self._process.stdout.fileno(), 1 << 16):
            try:
                replies = [message for message, _ in reader.feed(data)]
            except ProtocolError:
                break
            with self._news:
                self._replies += replies
                self._news.notify_all()
        with self._news:
            self._is_over = True
            self._news.notify_all()

    def _listen_to_stderr(self) -> None:
        assert self._process is not None and self._process.stderr is not None
        while data := os.read(self._process.stderr.fileno(), 1 << 16):
            self.said = (self.said + data)[-8192:]


# ---- names ----


def _name_resolution(host: Host, ssh: SshSettings) -> Finding:
    """The name as ssh_config has it: what is typed in -H may be an alias there."""
    bare = host.name.rpartition("@")[2].strip("[]")
    shown = subprocess.run(
        ["ssh", *ssh.extra, "-G", "--", bare],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20, check=False,
    ).stdout  # fmt: skip
    match = re.search(r"^hostname (\S+)$", shown, re.MULTILINE)
    name = match[1] if match else bare
    via = f" (ssh_config calls it {name})" if name != bare else ""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        reason = error.strerror or str(error)
        if re.search(r"^proxy(jump|command) (?!none)", shown, re.MULTILINE):
            return doubtful("name", f"{name}: {reason}{via}", "ssh goes through a proxy, which may know it.")
        line = f"echo '<address> {bare}' | sudo tee -a /etc/hosts"
        return bad("name", f"{name}: {reason}{via}", f"Check the spelling, or type: {line}")
    return good("name", f"{found[0][4][0]}{via}")


def _ssh_copy_id(host: Host, ssh: SshSettings) -> str:
    key = ("-i", str(ssh.identity_file)) if ssh.identity_file is not None else ()
    port = ("-p", str(ssh.port)) if ssh.port is not None else ()
    # ssh-copy-id knows -o, -F and the like, but takes each with its value.
    return shlex.join(["ssh-copy-id", *key, *port, *ssh.extra, host.name])


# ---- routes and ports ----


def _interface(name: str, facts: Facts) -> Finding:
    if name in facts["interfaces"]:
        return good("interface", f"{name}, {facts['interfaces'][name][0]}")
    there = ", ".join(sorted(facts["interfaces"]))
    return bad("interface", f"there is no {name} with an address", f"Give --network-interface one of: {there}")


def _try_ports(hosts: Sequence[_Answers], settings: CheckSettings, pool: ThreadPoolExecutor) -> None:
    """Every host listens, as its ranks would, and every other one connects: the port of rank 0 and one of any free ports."""
    listening: dict[str, list[tuple[str, str, int]]] = {}
    for index, host in enumerate(hosts):
        ports = (settings.master_port, 0) if index == 0 and settings.master_port else (0,)
        listening[host.name] = []
        for port in ports:
            reply = host.ask({"ask": "listen", "port": port}, _REACH_S)
            if reply is None or reply["fault"]:
                fault = reply["fault"] if reply else "no answer"
                advice = f"Leave --master-port out, or see who has it: ss -ltnp sport = :{port}"
                host.findings.append(bad("ports", f"{port}: {fault}", advice))
                continue
            listening[host.name].append((host.name, _address(host, hosts, settings), reply["port"]))

    def try_others(host: _Answers) -> None:
        peers = [peer for other in hosts if other is not host for peer in listening[other.name]]
        named = [(f"{name} {address} {port}", address, port) for name, address, port in peers]
        reply = host.ask({"ask": "reach", "peers": named}, _REACH_S) if named else None
        if reply is not None:
            host.findings += _reached(reply, _address(host, hosts, settings))

    list(pool.map(try_others, hosts))


def _address(host: _Answers, hosts: Sequence[_Answers], settings: CheckSettings) -> str:
    """An address at which the others know the host: what ssh connected to, or from where it came."""
    if settings.interface is not None and settings.interface in host.facts["interfaces"]:
        return str(host.facts["interfaces"][settings.interface][0])
    if host.connection:
        return host.connection[2]
    others = [other.connection[0] for other in hosts if other.connection]
    return others[0] if others else "127.0.0.1"


def _reached(reply: Facts, own_address: str) -> list[Finding]:
    towards = reply["towards"]
    first = next(iter(reply["faults"])).split()
    if towards is None:
        advice = f"Type there: ip route get {first[1]}"
        return [bad("route", f"no interface leads to {first[0]} ({first[1]})", advice)]
    findings = [good("route", f"{towards} to {first[0]}")]
    faults = {peer: fault for peer, fault in reply["faults"].items() if fault is not None}
    for peer, fault in faults.items():
        name, address, port = peer.split()
        advice = (
            f"A firewall? Type on {name}: sudo ufw allow from {own_address}"
            f" (or: sudo nft insert rule inet filter input ip saddr {own_address} accept)"
        )
        findings.append(bad("ports", f"cannot connect to {name} ({address}) port {port}: {fault}", advice))
    if not faults:
        findings.append(good("ports", f"reaches all of {', '.join(peer.split()[0] for peer in reply['faults'])}"))
    return findings


# ---- all ranks ----


def _all_reduce(settings: CheckSettings) -> Finding:
    """By the very command that starts training."""
    num_ranks = sum(host.slots for host in settings.hosts)
    hosts = ",".join(f"{host.name}:{host.slots}" for host in settings.hosts)
    where = ("-np", str(num_ranks)) if len(settings.hosts) == 1 and settings.hosts[0].is_local else ("-H", hosts)
    sizes = ("-b", str(_LATENCY_BYTES), "-e", str(_BANDWIDTH_BYTES), "-f", str(_BANDWIDTH_BYTES // _LATENCY_BYTES))
    bench = ("-m", "megaclass", "bench", "allreduce", "--operations", "all_reduce", "--json", *sizes)
    run = [sys.executable, "-m", "megaclass", "run", *settings.run_options, *where]
    command = [*run, settings.ssh.python, *bench]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ALL_REDUCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        advice = f"The ranks cannot talk: see where they stop with NCCL_DEBUG=INFO {shlex.join(command)}"
        return bad("all-reduce", f"not over after {_ALL_REDUCE_S:g} s", advice)
    rows = _rows(done.stdout)
    if done.returncode != 0 or not rows:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        found = next((line for line in said if line.startswith("megaclass")), said[-1] if said else "nothing was said")
        return bad("all-reduce", f"ended with {done.returncode}: {found}", f"Type: {shlex.join(command)}")
    return good("all-reduce", "; ".join(_speed(rows, backend) for backend in dict.fromkeys(r["backend"] for r in rows)))


def _all_reduce_not_tried() -> Finding:
    return doubtful("all-reduce", "not tried", "Mend what is marked [!] first.")


def _rows(output: str) -> list[dict[str, Any]]:
    """Rank 0's JSON, whose lines `megaclass run` has marked with its number."""
    text = "".join(line.removeprefix("[0]<stdout>:") for line in output.splitlines() if line.startswith("[0]<stdout>:"))
    try:
        rows = json.loads(text)
    except ValueError:
        return []
    return rows if isinstance(rows, list) else []


def _speed(rows: Sequence[Mapping[str, Any]], backend: str) -> str:
    small, large = (row for row in rows if row["backend"] == backend)
    ranks = f"{small['ranks']} rank{'s' if small['ranks'] > 1 else ''}"
    return f"{backend}, {ranks}: latency {small['time_us']:.0f} µs, bus bandwidth {large['bus_gbps']:.2f} GB/s"


def _heading(host: Host) -> str:
    slots = f"{host.slots} slot{'s' if host.slots > 1 else ''}"
    return f"{host.name} (this machine, {slots})" if host.is_local else f"{host.name} ({slots})"


def default_host() -> Host:
    """This machine, with a slot for each GPU the driver shows, or two on CPUs: one rank has nobody to talk to."""
    driver = Path("/proc/driver/nvidia/gpus")
    num_gpus = len([*driver.iterdir()]) if driver.is_dir() else 0
    return Host(name="localhost", slots=num_gpus or 2, is_local=True)
