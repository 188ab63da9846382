"""Which operations become one."""

import pytest

from horovod.common.settings import Settings
from horovod.engine.coordinator import FUSED_TENSOR_BYTES, fuse
from horovod.engine.kinds import REDUCTIONS
from horovod.engine.messages import Request, Response


def _ready(name: str, dtype: str = "float32", op: int = 1, count: int = 100, **more) -> Response:
    return Response((Request.of("allreduce", name, 0, (dtype,), ((count,),), op, **more),))


def _names(responses: list[Response]) -> list[list[str]]:
    return [[request.name for request in response.requests] for response in responses]


def test_small_allreduces_of_one_kind_travel_together_up_to_the_threshold():
    responses = [
        _ready("a"),
        _ready("b"),
        _ready("c", dtype="int64"),
        _ready("d"),
        _ready("e", op=0),
        _ready("f", count=10**6),
    ]
    assert _names(fuse(responses, Settings())) == [["a", "b", "d"], ["c"], ["e"], ["f"]]
    assert _names(fuse(responses, Settings(fusion_threshold=800))) == [["a", "b"], ["c"], ["d"], ["e"], ["f"]]
    assert len(fuse(responses, Settings(fusion_threshold=0))) == 6


@pytest.mark.parametrize(
    "more",
    [
        {"op": REDUCTIONS.index("Adasum")},
        {"is_grouped": True},
        {"count": FUSED_TENSOR_BYTES // 4 + 1},
    ],
    ids=["adasum", "grouped", "large"],
)
def test_adasum_groups_and_large_tensors_run_alone(more):
    # A group is already one operation; fuse_groups decides whether it may become part of another one.
    assert _names(fuse([_ready("a", **more), _ready("b", **more)], Settings(fuse_groups=False))) == [["a"], ["b"]]


def test_large_tensors_that_are_compressed_travel_together():
    large = {"count": FUSED_TENSOR_BYTES // 4 + 1, "wire": "int8"}
    assert _names(fuse([_ready("a", **large), _ready("b", **large)], Settings())) == [["a", "b"]]


def test_errors_and_other_kinds_stay_alone_in_their_place():
    error = Response(_ready("b").requests, error="Mismatched")
    gather = Response((Request.of("allgather", "c", 0, ("float32",), ((4,),)),), sizes=((4, 4),))
    joined = Response((), last_joined=1)
    fused = fuse([_ready("a"), error, gather, joined, _ready("d")], Settings())
    assert _names(fused) == [["a", "d"], ["b"], ["c"], []]
    assert fused[1:] == [error, gather, joined]
