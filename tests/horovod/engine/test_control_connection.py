"""Whole messages over a control connection, in one process. Authentication is tested in test_strangers.py."""

import json
import socket
from collections.abc import Iterator

import pytest

from horovod.engine import control_connection
from horovod.engine.control_connection import (
    AuthenticatedListener,
    ControlConnection,
    Endpoint,
    MessageKind,
    connect,
)
from megaclass_launch.errors import LaunchError

Pair = tuple[ControlConnection, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A connection, and the socket at its other end."""
    listener = socket.create_server(("127.0.0.1", 0))
    other = socket.create_connection(listener.getsockname())
    accepted, _ = listener.accept()
    listener.close()
    connection = ControlConnection(accepted)
    yield connection, other
    connection.close()
    other.close()


def _received(connection: ControlConnection, count: int) -> list[tuple[int, bytes, bytes]]:
    messages: list[tuple[int, bytes, bytes]] = []
    while len(messages) < count:
        messages += connection.receive()
    return messages


def test_messages_arrive_whole_and_in_order(pair):
    connection, other = pair
    sent = [
        (MessageKind.REQUESTS, b"content", b"payload"),
        (MessageKind.DRAINED, b"", b""),
        (MessageKind.STOP, b"why", b""),
    ]
    sender = ControlConnection(other)
    for message in sent:
        sender.send(*message)
    assert _received(connection, 3) == sent
    assert connection.is_open


def test_a_message_that_comes_byte_by_byte_is_delivered_when_its_last_byte_is_there(pair):
    connection, other = pair
    message = control_connection._HEADER.pack(3, 2, MessageKind.RESPONSES) + b"abcde"
    for byte in message[:-1]:
        other.send(bytes([byte]))
        assert list(connection.receive()) == []
    other.send(message[-1:])
    assert list(connection.receive()) == [(MessageKind.RESPONSES, b"abc", b"de")]


def test_the_end_of_a_connection_is_noticed_after_its_last_message(pair):
    connection, other = pair
    ControlConnection(other).send(MessageKind.DRAINED)
    other.close()
    assert _received(connection, 1) == [(MessageKind.DRAINED, b"", b"")]
    while connection.is_open:
        assert list(connection.receive()) == []


def test_a_message_of_an_absurd_length_ends_the_connection_instead_of_filling_the_memory(pair):
    connection, other = pair
    other.send(control_connection._HEADER.pack(2**32 - 1, 2**32 - 1, MessageKind.REQUESTS))
    assert list(connection.receive()) == []
    assert not connection.is_open


def test_sending_to_a_rank_that_is_gone_raises_nothing(pair):
    connection, other = pair
    other.close()
    for _ in range(3):
        connection.send(MessageKind.END, b"x" * 100_000)


def test_an_endpoint_survives_its_journey_through_the_store():
    endpoint = Endpoint("127.0.0.1", 1234, "token")
    assert Endpoint(*json.loads(json.dumps(endpoint))) == endpoint
    assert endpoint.key(b"secret") != Endpoint("127.0.0.1", 1234, "other").key(b"secret")


def test_ranks_that_do_not_connect_in_time_are_named():
    listener = AuthenticatedListener("127.0.0.1", b"secret")
    with pytest.raises(LaunchError, match=r"^Ranks \[1, 3\] did not connect to 127\.0\.0\.1 port \d+ within 0\.1 s\.$"):
        listener.accept_ranks([3, 1], 0.1)


def test_an_address_of_another_machine_cannot_be_listened_on():
    with pytest.raises(LaunchError, match=r"cannot listen at 192\.0\.2\.1: .* Set HOROVOD_GLOO_IFACE"):
        AuthenticatedListener("192.0.2.1", b"secret")


def test_a_rank_that_nobody_listens_for_is_told_where_it_tried():
    listener = AuthenticatedListener("127.0.0.1", b"secret")
    listener._listener.close()
    with pytest.raises(LaunchError, match=rf"cannot reach rank 0 at 127\.0\.0\.1 port {listener.endpoint.port}: "):
        connect(listener.endpoint, b"secret", rank=1, to="rank 0", timeout_s=1.0)
