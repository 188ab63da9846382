"""What travels between driver and agents arrives whole, however it is cut, and cannot fill a memory."""

import os

import pytest

from megaclass_launch.wire.protocol import (
    MAX_LINE_BYTES,
    MAX_PAYLOAD_BYTES,
    MessageReader,
    ProtocolError,
    encode,
    greeting,
)

SENT = [
    ({"say": "beat"}, b""),
    ({"say": "output", "rank": 1}, b"\xff\n{}\n\0"),
    ({"say": "exit", "text": "ü\n\udcff"}, b""),
]
WIRE = b"".join(encode(message, payload) for message, payload in SENT)


def received(reader, *chunks):
    return [
        ({name: value for name, value in message.items() if name != "size"}, payload)
        for chunk in chunks
        for message, payload in reader.feed(chunk)
    ]


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
def test_messages_do_not_depend_on_how_the_bytes_arrive(step):
    wire = b"Welcome!\r\nmegaclass-agent x\n" + greeting("token") + WIRE
    reader = MessageReader(after=greeting("token"))
    assert received(reader, *[wire[i : i + step] for i in range(0, len(wire), step)]) == SENT


def test_without_the_greeting_nothing_is_a_message():
    reader = MessageReader(after=greeting("token"))
    assert received(reader, *[os.urandom(100_000) for _ in range(20)], WIRE, greeting("another"), WIRE) == []


@pytest.mark.parametrize(
    "line",
    [b"{", b"[]", b"3", b'{"size":-1}', b'{"size":"a"}', b'{"size":%d}' % (MAX_PAYLOAD_BYTES + 1), b"\xff\xfe"],
)
def test_what_is_no_message_is_an_error(line):
    with pytest.raises(ProtocolError):
        received(MessageReader(), line + b"\n")


def test_a_line_without_an_end_is_an_error_before_it_fills_the_memory():
    reader = MessageReader()
    with pytest.raises(ProtocolError, match="a line of more than"):
        for _ in range(MAX_LINE_BYTES // (1 << 20) + 2):
            received(reader, b"x" * (1 << 20))
