"""Requests and responses as messages: what arrives is what was sent, and repetition is cheap."""

import pytest

from horovod.engine.messages import (
    HASH_BYTES,
    JOIN,
    Receiver,
    Request,
    Response,
    Sender,
    is_for_some,
    packed,
    packed_responses,
    short_hash,
    unpacked,
    unpacked_responses,
)


def _allreduce(name: str, count: int = 4, **more) -> Request:
    return Request.of("allreduce", name, 0, ("float32",), ((count,),), 1, **more)


def _sent(sender: Sender, requests: list[Request], *, repeats: bool = True) -> bytes:
    content = packed(requests)
    return sender.message(content, short_hash(content), repeats=repeats)


@pytest.mark.parametrize("capacity", [0, 1, 1024])
def test_lists_of_requests_arrive_as_they_were_sent(capacity):
    sender, receiver = Sender(capacity), Receiver()
    one = Request.of("allreduce", "a,b;", 0, ("float32",), ((4,),), 1)
    two = Request.of("allgather", "ü", 3, ("int64", "bool"), ((2, 3), ()), is_grouped=True)
    for requests in ([one, two], [two, one], [one], [one, two]):
        for repeats in (True, False, True):
            digest, content = receiver.read(_sent(sender, requests, repeats=repeats))
            assert (digest, unpacked(content)) == (short_hash(packed(requests)), requests)


def test_responses_arrive_as_they_were_sent_with_their_requests_or_about_a_known_list():
    one, two = _allreduce("a\0b"), Request.of("allgather", "ü", 3, ("int64",), ((2, 3),))
    responses = [Response((two, one)), Response((), last_joined=1), Response((two,), "no", ((1, 2),))]
    message = packed_responses(responses, [two, one, two])
    assert unpacked_responses(message, lambda digest: []) == responses
    message = packed_responses(responses, [one, two], b"12345678")
    assert unpacked_responses(message, {b"12345678": [one, two]}.__getitem__) == responses


def test_lists_whose_names_run_together_alike_have_different_hashes():
    lists = [
        [Request.of("allreduce", name) for name in names] for names in (["ab", "c"], ["a", "bc"], ["abc"], ["1;a"])
    ]
    assert len({short_hash(packed(requests)) for requests in lists}) == len(lists)


def test_a_list_tells_whether_all_ranks_announce_it():
    assert not is_for_some(packed([_allreduce("a")]))
    assert is_for_some(packed([_allreduce("a"), JOIN]))
    assert is_for_some(packed([_allreduce("a"), Request.of("allreduce", "b", 2)]))


def test_a_list_that_repeats_travels_as_its_hash():
    sender, receiver = Sender(1024), Receiver()
    requests = [_allreduce(f"layer.{i}") for i in range(100)]
    first, again = _sent(sender, requests), _sent(sender, requests)
    assert len(first) > 1000 and len(again) == 1 + HASH_BYTES
    assert receiver.read(first) == receiver.read(again) == (short_hash(packed(requests)), packed(requests))


def test_a_list_that_does_not_repeat_costs_little_more_than_its_names():
    sender = Sender(1024)
    requests = [_allreduce(f"noname.{i}", repeats=False) for i in range(100)]
    assert len(_sent(sender, requests, repeats=False)) < sum(len(request.name) + 6 for request in requests) + 150


def test_a_sender_whose_memory_is_full_forgets_and_tells_the_receiver():
    sender, receiver = Sender(2), Receiver()
    lists = [[_allreduce(name, count)] for count, name in enumerate("abcdef", start=1)]
    for requests in (*lists, *lists):
        assert unpacked(receiver.read(_sent(sender, requests))[1]) == requests
    assert len(receiver._known) <= 2


def test_equal_terms_are_one_object_and_unequal_ones_differ():
    one, same, other = _allreduce("a"), _allreduce("b"), _allreduce("a", 5)
    assert one.terms is same.terms and one != same and one == _allreduce("a")
    assert one != other and one.terms.json != other.terms.json
    assert (one.terms.num_bytes, other.terms.num_bytes) == (16, 20)
