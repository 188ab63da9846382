"""events.jsonl: what is appended is read back in order of time, and damage or a refusing disk stops neither side."""

import json
import stat

from megaclass_launch.events_file import EVENTS_NAME, append_event, read_events


def test_events_are_read_in_order_of_time_past_damaged_and_unfinished_lines(tmp_path):
    assert read_events(tmp_path) == ([], 0)
    assert append_event(tmp_path, "start", step=0, world_size=2)
    path = tmp_path / EVENTS_NAME
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    earlier = {"time": 5.0, "event": "of a later version", "step": None, "more": [1]}
    with path.open("a") as file:
        file.write("\0\0\0\n[1]\n" + json.dumps({"event": "end", "step": 1}) + "\n" + json.dumps(earlier) + "\n")
        file.write('{"time": true, "event": "end"}\n')
        file.writelines(f'{{"time": {time}, "event": "end"}}\n' for time in ("NaN", "1e300", "-1", "9" * 400))
    assert append_event(tmp_path, "end", step=9, text="x" * 9000)
    with path.open("a") as file:
        file.write('{"time": 1, "event": "sa')
    events, num_damaged = read_events(tmp_path)
    assert num_damaged == 8
    assert events[0] == earlier
    assert [(event["event"], event["step"]) for event in events[1:]] == [("start", 0), ("end", 9)]
    assert events[1]["world_size"] == 2
    assert len(events[2]["text"]) == 4000


def test_an_event_that_cannot_be_written_is_reported_and_raises_nothing(tmp_path):
    (tmp_path / EVENTS_NAME).symlink_to(tmp_path / "elsewhere")
    assert not append_event(tmp_path, "start")
    assert not (tmp_path / "elsewhere").exists()
    assert not append_event(tmp_path / "no folder", "start")
