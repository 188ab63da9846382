"""Requests and responses as messages: what arrives is what was sent, and repetition is cheap."""

import pytest

from horovod.engine.messages import (
    HASH_BYTES,
    Answer,
    Receiver,
    Request,
    Response,
    Sender,
    digest_of_all,
    short_hash,
)


def _allreduce(name: str, count: int = 4, **more) -> Request:
    return Request.of("allreduce", name, 0, ("float32",), ((count,),), 1, **more)


@pytest.mark.parametrize("capacity", [0, 1, 1024])
def test_lists_of_requests_and_responses_arrive_as_they_were_sent(capacity):
    sender, receiver = Sender(capacity), Receiver()
    one = Request.of("allreduce", "a,b;", 0, ("float32",), ((4,),), 1)
    two = Request.of("allgather", "ü", 3, ("int64", "bool"), ((2, 3), ()), is_grouped=True)
    joined = Response((), last_joined=1)
    for items in (
        [one, two],
        [two, one],
        [Response((one, two)), joined, Response((two,), sizes=((1, 2),))],
        [one, two],
    ):
        for repeats in (True, False, True):
            digest = short_hash(repr(items).encode())
            assert receiver.unpack(sender.pack(items, digest, repeats=repeats)) == (digest, items)


def test_lists_whose_names_run_together_alike_have_different_hashes():
    lists = [
        [Request.of("allreduce", name) for name in names] for names in (["ab", "c"], ["a", "bc"], ["abc"], ["1;a"])
    ]
    assert len({digest_of_all(requests) for requests in lists}) == len(lists)


def test_a_list_that_repeats_travels_as_its_hash():
    sender, receiver = Sender(1024), Receiver()
    requests = [_allreduce(f"layer.{i}") for i in range(100)]
    digest = digest_of_all(requests)
    first = sender.pack(requests, digest, repeats=True)
    again = sender.pack(requests, digest, repeats=True)
    assert len(first) > 1000 and len(again) == 1 + HASH_BYTES
    assert receiver.unpack(first) == receiver.unpack(again) == (digest, requests)


def test_a_list_that_does_not_repeat_costs_little_more_than_its_names():
    sender, receiver = Sender(1024), Receiver()
    for start in (0, 100):
        requests = [_allreduce(f"noname.{start + i}", repeats=False) for i in range(100)]
        message = sender.pack(requests, digest_of_all(requests), repeats=False)
        assert receiver.unpack(message)[1] == requests
    assert len(message) < sum(len(request.name) + 6 for request in requests) + 150


def test_a_sender_whose_memory_is_full_forgets_and_tells_the_receiver():
    sender, receiver = Sender(2), Receiver()
    lists = [[_allreduce(name, count)] for count, name in enumerate("abcdef", start=1)]
    for requests in (*lists, *lists):
        digest = digest_of_all(requests)
        assert receiver.unpack(sender.pack(requests, digest, repeats=True)) == (digest, requests)
    assert len(receiver._known) <= 2


def test_equal_terms_are_one_object_and_unequal_ones_have_different_hashes():
    one, same, other = _allreduce("a"), _allreduce("b"), _allreduce("a", 5)
    assert one.terms is same.terms and one != same and one == _allreduce("a")
    assert one.terms.digest != other.terms.digest
    assert (one.terms.num_bytes, other.terms.num_bytes) == (16, 20)


def test_an_answer_tells_what_its_sending_needs_to_know():
    plain = Answer([Response((_allreduce("a"),))])
    assert plain.repeats
    assert not Answer([Response((_allreduce("a", repeats=False),))]).repeats
    failed = Answer([Response((_allreduce("a"),), error="no")])
    assert failed.digest != plain.digest
