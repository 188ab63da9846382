"""A host that was taken over: whatever it sends to the driver, nothing happens but that this host counts as failed.

The hosts here are two names of this machine whose agents are a script: the first plays its part, the second sends what a
test gives it. The driver is the real one.
"""

import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megaclass_launch.wire.agent_messages import (
    MAX_OUTPUT_BYTES,
    MAX_REMARKS,
    AgentMessageChecker,
)
from megaclass_launch.wire.checks import for_terminal, plain_lines, plain_text
from megaclass_launch.wire.protocol import MessageReader, ProtocolError, encode

AGENT = f"""#!{sys.executable} -S
import json, os, sys, time
job = json.loads(sys.stdin.readline())
rank = int(job["host"] == "127.0.0.1")
def say(data):
    try:
        while data:
            data = data[os.write(1, data):]
    except OSError:
        sys.exit()
def put(**message):
    say(json.dumps(message).encode() + b"\\n")
say(b"megaclass-agent " + job["token"].encode() + b"\\n")
moment, wire = os.environ["HOSTILE_MOMENT"], open(os.environ["HOSTILE_WIRE"], "rb").read()
if rank and moment == "start":
    say(wire)
put(say="hello", pid=7, port=1234, ssh="", versions={{}})
for line in sys.stdin:
    order = json.loads(line)
    if order["do"] == "start":
        put(say="started", pids={{str(rank): 8}})
        if rank:
            say(wire)
        if rank or moment == "success":
            put(say="exit", rank=rank, pid=8, code=0)
            put(say="done")
    elif order["do"] == "end":
        put(say="exit", rank=rank, pid=8, code=-15)
        put(say="done")
        break
"""


@pytest.fixture
def hostile(run, tmp_path):
    """hostile(bytes): the ended run in which the second of two hosts sends these bytes to the driver."""
    agent = tmp_path / "agent"
    agent.write_text(AGENT)
    agent.chmod(0o755)
    (tmp_path / "logs").mkdir()
    (tmp_path / "victim").write_text("as it was")

    def start(wire: bytes, moment: str = "run", *options: str):
        (tmp_path / "wire").write_bytes(wire)
        env = {"HOSTILE_WIRE": str(tmp_path / "wire"), "HOSTILE_MOMENT": moment, "HOME": str(tmp_path)}
        hosts = ("-H", "localhost:1,127.0.0.1:1", "--python", str(agent), "--grace", "0.2")
        ended = run(*hosts, "--output-filename", str(tmp_path / "logs"), *options, "true", env=env, cwd=tmp_path)
        assert "Traceback" not in ended.err, ended.story()
        return ended

    return start


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def output(stream: object, rank: object = 1, data: bytes = b"owned\n") -> bytes:
    return encode({"say": "output", "rank": rank, "stream": stream}, data)


ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b2J\u202e"


@pytest.mark.parametrize(
    ("wire", "says"),
    [
        (output("/tmp/owned"), "not one of stdout, stderr"),
        (output("stdout/x"), "not one of stdout, stderr"),
        (output(["stdout"]), "not one of stdout, stderr"),
        (output("stdout", "1"), "not a rank of this host"),
        (output("stdout", True), "not a rank of this host"),
        (output("stdout", "../../victim"), "not a rank of this host"),
        (encode({"say": "exit", "rank": 0, "pid": 8, "code": 0}), "'exit' with rank = 0, not a rank of this host"),
        (encode({"say": "exit", "rank": 1, "pid": 8, "code": "0"}), "not a whole number from -64 to 255"),
        (encode({"say": "exit", "rank": 1, "pid": -1, "code": 0}), "not a whole number from 1 to"),
        (encode({"say": "hello", "pid": 8, "port": 70000}), "not a whole number from 1 to 65535"),
        (encode({"say": "note", "text": {"a": 1}}), "not a text"),
        (encode({"say": "note"}), "'note' without 'text'"),
        (encode({"say": "stacks", "rank": 0, "pid": 8}), "'stacks' with rank = 0, not a rank of this host"),
        (encode({"say": "status", "idle_s": "never"}), "'status' with idle_s = 'never', not a number"),
        (encode({"say": ["output"]}), "an unknown message"),
        (encode({"do": "end"}), "an unknown message"),
    ],
)
def test_a_message_that_no_agent_sends_is_refused(wire, says):
    """The next test shows with others of them what a refused message does to the job."""
    checker = AgentMessageChecker([1])
    [(message, payload)] = MessageReader(max_line_bytes=1 << 20, max_payload_bytes=MAX_OUTPUT_BYTES).feed(wire)
    with pytest.raises(ProtocolError, match=re.escape(says)):
        checker.checked(message, payload, is_running=True)


@pytest.mark.parametrize(
    ("wire", "says"),
    [
        (output("../../victim"), "'output' with stream = '../../victim', not one of stdout, stderr"),
        (output("stdout", 0), "'output' with rank = 0, not a rank of this host"),
        (output("stdout", data=b"x" * (MAX_OUTPUT_BYTES + 1)), "is not a message"),
        (encode({"say": "exit", "rank": 1, "pid": 8, "code": 256}), "not a whole number from -64 to 255"),
        (encode({"say": "exit", "rank": 1, "pid": 8, "code": 0}) * 2, "a second 'exit' of rank 1"),
        (encode({"say": "started", "pids": {"0": 1, "1": 1}}), "not a pid for each rank of this host"),
        (encode({"say": "stopped", "rank": 1, "pid": ESCAPE}), "not a whole number"),
        (encode({"say": "hello", "pid": 8, "address": "$(touch owned)"}), "not a numeric IP address"),
        (encode({"say": "hello", "pid": 8}), "a second 'hello'"),
        (encode({"say": "note", "text": "x"}) * (MAX_REMARKS + 1), f"more than {MAX_REMARKS} remarks"),
        (encode({"say": ESCAPE}), "an unknown message"),
        (b"[" * 5000 + b"\n", "is not a message"),
        (b"{" * (1 << 21), "a line of more than 1048576 bytes"),
        (encode({"say": "done"}), "says that it is done, but not how rank 1 ended"),
    ],
)
def test_a_message_that_no_agent_sends_fails_its_host_and_has_no_other_effect(hostile, tmp_path, wire, says):
    (tmp_path / "wire").write_bytes(wire)
    before = files(tmp_path)
    ended = hostile(wire)
    assert ended.code == 255, ended.story()
    assert "127.0.0.1 (rank 1)" in ended.err and says in ended.err, ended.story()
    assert plain_lines(ended.err) == ended.err
    changed = {name for name, content in files(tmp_path).items() if before.get(name) != content}
    # Every rank has its files from the start. Those of the other host's rank stay empty, and nothing else appears.
    others = {"logs/rank.0/stdout", "logs/rank.0/stderr"}
    assert changed <= {"logs/rank.1/stdout", "logs/rank.1/stderr", *others}, ended.story()
    assert not any(files(tmp_path)[name] for name in others)


def test_at_the_start_it_is_a_host_that_cannot_take_part(hostile):
    ended = hostile(output("stdout"), "start")
    assert ended.code == 2 and "127.0.0.1 sent something" in ended.err, ended.story()
    assert "'output' before its ranks were started" in ended.err


def test_texts_of_an_agent_are_shown_under_its_name_and_without_what_a_terminal_obeys(hostile):
    ended = hostile(encode({"say": "note", "text": f"{ESCAPE}\nmegaclass: all is well"}), "success")
    assert ended.code == 0, ended.story()
    assert plain_lines(ended.err) == ended.err and "\nmegaclass: all is well" not in ended.err
    assert "megaclass: 127.0.0.1: " in ended.err


def test_a_worker_cannot_control_the_drivers_terminal_but_may_colour_its_lines():
    line = b"\x1b[31mred\x1b[0m\t\x1b[K" + "größe".encode()
    assert for_terminal(line) == line
    shown = for_terminal(ESCAPE.encode() + b"\x1b]52;c;b3duZWQ=\x07\x1b[6n\x08\x1bPx\x1b\\\x00")
    assert not re.search(rb"[\x00-\x08\x0b-\x1f\x7f]|\xc2[\x80-\x9f]", shown)


def test_long_texts_are_cut():
    assert len(plain_text("x" * 100_000)) == 2001


# ---- mutations ----

VALID = [
    ({"say": "beat"}, b""),
    ({"say": "hello", "pid": 7, "ssh": "10.0.0.1 1 10.0.0.2 22", "port": 1234, "versions": {"Python": "3.11"}}, b""),
    ({"say": "refuse", "why": "no such folder"}, b""),
    ({"say": "note", "text": "left behind: sh"}, b""),
    ({"say": "started", "pids": {"1": 8, "2": 9}}, b""),
    ({"say": "output", "rank": 1, "stream": "stdout"}, b"hi\n"),
    ({"say": "exit", "rank": 2, "pid": 9, "code": -9}, b""),
    ({"say": "stopped", "rank": 1, "pid": 8}, b""),
    ({"say": "progress", "step": 100}, b""),
    ({"say": "done"}, b""),
]
ODD = [
    *(None, True, False, -1, 0, 1, 2, 3, 2**31, 2**63, -(2**63), 0.5, 1e308, float("nan"), [], {}, [1], ""),
    *("1", "../x", "/etc/passwd", "stdout\0", "stdout/../../x", "\x1b[2J", "\ud800", "%s%n{0}", "x" * 5000, {"1": "2"}),
    *({"1": {}}, {"0": 8}, ["stdout"], "$(id)", "10.0.0.1; id", "::1%eth0", "-oProxyCommand=id"),
]


def mutated(rng: random.Random) -> bytes:
    message, payload = rng.choice(VALID)
    message = dict(message)
    for _ in range(rng.randint(1, 2)):
        names = [*{*message, "say", "rank", "stream", "pid", "pids", "code", "size", "text", "address", "step"}]
        match rng.randrange(4):
            case 0:
                message[rng.choice(names)] = rng.choice(ODD)
            case 1:
                message.pop(rng.choice([*message]), None)
                message = message or {"say": "beat"}
            case 2:
                message["say"] = rng.choice([kind["say"] for kind, _ in VALID])
            case 3:
                payload = rng.choice([b"", b"\n" * 50, b"\x1b[2J", bytes(70_000)])
    wire = bytearray(encode(message, payload) if rng.random() < 0.9 else json.dumps(message).encode() + b"\n" + payload)
    for _ in range(rng.choice([0, 0, 0, 1, 3])):
        wire[rng.randrange(len(wire))] = rng.randrange(256)
    return bytes(wire)


def assert_harmless(message: dict[str, object], payload: bytes) -> None:
    """Everything the driver will act on: of the right type, about the host's own ranks, fit for a terminal."""
    pid = range(1, 2**22 + 1)
    allowed = {
        "rank": lambda value: value in (1, 2),
        "stream": lambda value: value in ("stdout", "stderr"),
        "pid": lambda value: value in pid,
        "code": lambda value: value in range(-64, 256),
        "port": lambda value: value in range(1, 65536),
        "step": lambda value: value in range(2**62 + 1),
        "pids": lambda value: value.keys() == {1, 2} and all(p in pid for p in value.values()),
        "address": lambda value: re.fullmatch(r"[0-9a-f.:]+", value),
    }
    assert len(payload) <= MAX_OUTPUT_BYTES and (not payload or message["say"] == "output")
    for name, value in message.items():
        if name in allowed:
            assert allowed[name](value) and not isinstance(value, bool | float), message
            continue
        texts = [*value.items()] if name == "versions" else [(name, value)]
        for text in [part for pair in texts for part in pair]:
            assert isinstance(text, str) and len(text) <= 2001 and plain_lines(text) == text and "\n" not in text


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"say": "ready", "rank": 1, "token": "", "why": "start"}, "not a rank of this host"),
        ({"say": "ready", "rank": 4, "token": "", "why": "because"}, "not one of"),
        ({"say": "ready", "rank": 4, "token": "x" * 65, "why": "start"}, "not a token"),
        ({"say": "ready", "rank": 4, "token": ["x"], "why": "start"}, "not a token"),
        ({"say": "committed", "rank": 4}, "'committed' without 'token'"),
        ({"say": "failed", "rank": 5, "token": "", "text": "x"}, "not a rank of this host"),
        ({"say": "failed", "rank": 4, "token": "", "text": {}}, "not a text"),
        ({"say": "spare", "port": 0, "store_port": 5}, "not a whole number from 1 to 65535"),
        ({"say": "spare", "port": 5}, "'spare' without 'store_port'"),
        ({"say": "hello", "pid": 8, "port": 5}, "'hello' without 'store_port'"),
        ({"say": "exit", "rank": 1, "pid": 8, "code": 0}, "not a rank of this host"),
        ({"say": "started", "pids": {"1": 8}}, "not a pid for each rank of this host"),
        ({"say": "publish", "generation": 2}, "an unknown message"),
    ],
)
def test_an_agent_of_an_elastic_job_speaks_about_its_own_workers_only(message, says):
    checker = AgentMessageChecker(is_elastic=True)
    checker.expect({3})
    checker.expect({4})
    pids = {"say": "started", "pids": {"4": 8}}
    assert checker.checked(pids, b"", is_running=True)["pids"] == {4: 8}
    with pytest.raises(ProtocolError, match=re.escape(says)):
        checker.checked(message, b"", is_running=True)
    # A worker whose pid was told is not told again.
    with pytest.raises(ProtocolError, match="not a pid"):
        checker.checked(pids, b"", is_running=True)


def test_mutated_messages_are_errors_or_harmless():
    rng = random.Random(16)
    num_accepted, num_mutations = 0, 5_000
    for _ in range(num_mutations):
        wire = mutated(rng)
        talk = AgentMessageChecker([1, 2])
        reader = MessageReader(max_line_bytes=1 << 20, max_payload_bytes=MAX_OUTPUT_BYTES)
        try:
            for message, payload in reader.feed(wire):
                assert_harmless(talk.checked(message, payload, is_running=True), payload)
                num_accepted += 1
        except ProtocolError:
            continue
    assert num_accepted > num_mutations // 20


@pytest.mark.soak
def test_mutated_messages_have_no_effect_on_files(hostile, tmp_path):
    rng = random.Random(17)
    for _ in range(200):
        wire = b"".join(mutated(rng) for _ in range(3))
        (tmp_path / "wire").write_bytes(wire)
        before = files(tmp_path)
        ended = hostile(wire)
        changed = {name for name, content in files(tmp_path).items() if before.get(name) != content}
        # Every rank has its files from the start. Those of the other host's rank stay empty, and nothing else appears.
        others = {"logs/rank.0/stdout", "logs/rank.0/stderr"}
        assert changed <= {"logs/rank.1/stdout", "logs/rank.1/stderr", *others}, ended.story()
        assert not any(files(tmp_path)[name] for name in others)
        assert plain_lines(ended.err) == ended.err


def test_a_host_that_floods_its_error_stream_fills_no_memory(run, tmp_path):
    """With --verbose its lines are shown, and here nobody reads them."""
    agent = tmp_path / "agent"
    agent.write_text(
        f"#!{sys.executable} -S\nimport json, os, sys\ntoken = json.loads(sys.stdin.readline())['token']\n"
        'os.write(1, b\'megaclass-agent \' + token.encode() + b\'\\n{"say":"hello","pid":7,"port":1}\\n\')\n'
        "while True: os.write(2, b'flood ' * 10_000 + b'\\n')\n"
    )
    agent.chmod(0o755)
    reader, writer = os.pipe()
    command = run.command("-np", "1", "--verbose", "--python", str(agent), "true")
    driver = subprocess.Popen(command, env=run.env, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer)
    try:
        time.sleep(4)
        status = Path(f"/proc/{driver.pid}/status").read_text()
        assert int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) < 100_000
    finally:
        driver.kill()
        driver.wait()
        os.close(reader)
        os.close(writer)


def test_stacks_that_were_kept_are_no_remarks():
    """Each report about ranks that may be slow keeps some: a job that runs for months has many."""
    checker = AgentMessageChecker([0])
    for _ in range(MAX_REMARKS + 1):
        checker.checked({"say": "kept", "folder": "/runs/a/hang/20261119-230000"}, b"", is_running=True)
