"""The Chrome trace: valid JSON at any moment, one process per tensor, slices that begin and end."""

import json
import stat
import threading
from pathlib import Path

import pytest

from horovod.engine.timeline import Timeline


@pytest.fixture
def timeline():
    made = Timeline()
    yield made
    made.stop()


def _events(path: Path) -> list[dict]:
    return json.loads(path.read_text())


def _slices(path: Path) -> list[tuple[str, str]]:
    """(name of the tensor, name of the slice) in the order in which they ended; fails for one that is left open."""
    tensors = [event for event in _events(path) if event.get("name") == "process_name" and event["pid"]]
    names = {event["pid"]: event["args"]["name"] for event in tensors}
    opened: dict[int, list[str]] = {}
    ended = []
    for event in _events(path):
        if event["ph"] == "B":
            opened.setdefault(event["pid"], []).append(event["name"])
        if event["ph"] == "E":
            ended.append((names[event["pid"]], opened[event["pid"]].pop()))
    assert not any(opened.values()), opened
    return ended


def test_before_start_nothing_is_written_and_blocks_run(timeline, tmp_path):
    timeline.mark_cycle()
    timeline.rank_ready("allreduce.a", "allreduce", 0)
    timeline.negotiated(["allreduce.a"])
    with timeline.phase(["allreduce.a"], "GLOO_ALLREDUCE"):
        pass
    timeline.stop()
    assert not timeline.is_active and list(tmp_path.iterdir()) == []


def test_the_file_is_json_after_every_event_and_only_its_owner_reads_it(timeline, tmp_path):
    path = tmp_path / "trace.json"
    timeline.start(str(path), mark_cycles=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    # A job that is killed now leaves all events but the last one, which may still be in memory.
    calls = [
        lambda: timeline.mark_cycle(),
        lambda: timeline.rank_ready("allreduce.ü", "allreduce", 1),
        lambda: timeline.negotiated(["allreduce.ü"]),
        lambda: timeline.mark_cycle(),
    ]
    counts = [len(_events(path))]
    for call in calls:
        call()
        counts.append(len(_events(path)))
    timeline.stop()
    # The first announcement of a tensor names it, sorts it, opens its negotiation and marks the rank.
    assert counts == [1, 2, 6, 7, 8]
    events = _events(path)
    assert len(events) == 9 and events[0]["args"]["start_time_since_epoch_in_micros"] > 1.7e15
    times = [event["ts"] for event in events if "ts" in event]
    assert times == sorted(times) and all(isinstance(time, int) and time >= 0 for time in times)


def test_the_first_announcement_opens_a_negotiation_and_every_rank_is_marked(timeline, tmp_path):
    path = tmp_path / "trace.json"
    timeline.start(str(path), mark_cycles=False)
    for rank in (2, 0, 1):
        timeline.rank_ready("allgather.a", "allgather", rank)
    timeline.rank_ready("broadcast.b", "broadcast", 0)
    timeline.negotiated(["allgather.a", "never announced"])
    timeline.negotiated(["allgather.a"])
    timeline.negotiated(["broadcast.b"])
    # Cycles are marked only where that was asked for.
    timeline.mark_cycle()
    # The next step negotiates the same tensor again, under the number it has.
    timeline.rank_ready("allgather.a", "allgather", 1)
    timeline.negotiated(["allgather.a"])
    timeline.stop()
    assert _slices(path) == [
        ("allgather.a", "NEGOTIATE_ALLGATHER"),
        ("broadcast.b", "NEGOTIATE_BROADCAST"),
        ("allgather.a", "NEGOTIATE_ALLGATHER"),
    ]
    events = _events(path)
    assert [event["name"] for event in events if event["ph"] == "X"] == ["2", "0", "1", "0", "1"]
    assert "CYCLE_START" not in {event.get("name") for event in events}
    shown = [event["pid"] for event in events if event.get("name") == "process_sort_index"]
    assert shown == [0, 1, 2]


def test_phases_nest_and_end_also_where_the_block_raises(timeline, tmp_path):
    path = tmp_path / "trace.json"
    timeline.start(str(path), mark_cycles=False)
    with timeline.phase(["a", "b"], "OUTER"), timeline.phase(["b"], "INNER"):
        pass
    with pytest.raises(KeyError), timeline.phase(["a"], "FAILS"):
        raise KeyError("x")
    with timeline.phase([], "SHOWN NOWHERE"):
        pass
    timeline.stop()
    assert _slices(path) == [("b", "INNER"), ("a", "OUTER"), ("b", "OUTER"), ("a", "FAILS")]


def test_a_trace_may_be_followed_by_another_and_the_same_path_continues(timeline, tmp_path):
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    timeline.start(str(one), mark_cycles=False)
    timeline.rank_ready("a", "allreduce", 0)
    # The same file: only the marks change, what is written stays.
    timeline.start(str(one), mark_cycles=True)
    timeline.mark_cycle()
    timeline.start(str(two), mark_cycles=False)
    # Numbers start again, and the negotiation that the first file left open is not closed here.
    timeline.negotiated(["a"])
    with timeline.phase(["b"], "PHASE"):
        pass
    timeline.stop()
    assert [event["name"] for event in _events(one) if event["ph"] == "i"] == ["CYCLE_START"]
    assert any(event.get("name") == "NEGOTIATE_ALLREDUCE" for event in _events(one))
    assert _slices(two) == [("b", "PHASE")]
    # After a stop the same path starts an empty trace.
    timeline.start(str(two), mark_cycles=False)
    timeline.stop()
    assert _slices(two) == [] and len(_events(two)) == 2


def test_a_path_that_cannot_be_written_is_an_error_and_leaves_no_trace_active(timeline, tmp_path):
    timeline.start(str(tmp_path / "good.json"), mark_cycles=False)
    with pytest.raises(OSError, match="no such folder"):
        timeline.start(str(tmp_path / "no such folder" / "trace.json"), mark_cycles=False)
    assert not timeline.is_active
    timeline.rank_ready("a", "allreduce", 0)
    assert _slices(tmp_path / "good.json") == []


def test_threads_may_write_and_stop_at_the_same_time(timeline, tmp_path):
    path = tmp_path / "trace.json"
    timeline.start(str(path), mark_cycles=True)

    def write(name: str) -> None:
        for _ in range(200):
            timeline.mark_cycle()
            with timeline.phase([name], "PHASE"):
                pass

    threads = [threading.Thread(target=write, args=(f"tensor {number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timeline.stop()
    assert len(_slices(path)) == 800
    assert sum(event.get("name") == "CYCLE_START" for event in _events(path)) == 800
