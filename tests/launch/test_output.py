"""Lines of many ranks: whole, in order, none lost, none glued to another's."""

import functools
import re
import resource
import shlex
import subprocess
import time
from pathlib import Path

import pytest

from megaclass_launch.driver.outcome import LastLines
from megaclass_launch.driver.output import MAX_LINE_BYTES, LineCutter


def cut(*chunks):
    cutter = LineCutter()
    return [line for chunk in chunks for line in cutter.feed(chunk)] + cutter.rest()


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (b"a\nb\n", [b"a", b"b"]),
        (b"a\n\nb", [b"a", b"", b"b"]),
        (b"a\r\nb\r\n", [b"a", b"b"]),
        (b"\r 10%\r 20%\r 30%\ndone\n", [b" 10%", b" 20%", b" 30%", b"done"]),
        (b"10%\r20%\r", [b"10%", b"20%"]),
        (b"\n", [b""]),
        (b"", []),
        (b"\xff\x00\xfe\n", [b"\xff\x00\xfe"]),
    ],
)
def test_lines_do_not_depend_on_how_the_bytes_arrive(text, lines):
    assert cut(text) == lines
    assert cut(*[text[i : i + 1] for i in range(len(text))]) == lines
    assert cut(text[: len(text) // 2], text[len(text) // 2 :]) == lines


def test_a_line_beyond_all_measure_is_cut_into_pieces():
    pieces = cut(*[b"x" * 100_000] * 30, b"\n")
    assert b"".join(pieces) == b"x" * 3_000_000
    assert max(map(len, pieces)) == MAX_LINE_BYTES


def test_the_last_traceback_is_shown_whole_or_by_its_two_ends():
    lines = LastLines()
    lines.add(
        [b"epoch 1", b"Traceback (most recent call last):", b'  File "a.py", line 1, in <module>', b"ValueError: x"]
    )
    assert lines.shown()[0] == "Traceback (most recent call last):" and lines.shown()[-1] == "ValueError: x"
    lines.add(
        [b"Traceback (most recent call last):"] + [b"  frame %d" % i for i in range(100)] + [b"RecursionError: y"]
    )
    assert len(lines.shown()) == 17
    assert lines.shown()[0] == "Traceback (most recent call last):" and lines.shown()[-1] == "RecursionError: y"


def test_last_lines_cannot_confuse_a_terminal():
    lines = LastLines()
    lines.add([b"\x1b[31mred\x1b[0m \x1b]0;title\x07 \xff" + b"x" * 10_000])
    [line] = lines.shown()
    assert line.startswith("red ") and "\x1b" not in line and "\x07" not in line and len(line) <= 321


# ---- through `megaclass run` ----


def test_lines_carry_rank_and_stream_as_horovods_do(run, script):
    done = run("-np", "2", *script("print('to out')\nprint('to err', file=sys.stderr)"))
    assert done.code == 0
    assert sorted(done.out.splitlines()) == ["[0]<stdout>:to out", "[1]<stdout>:to out"]
    assert sorted(done.err.splitlines()) == ["[0]<stderr>:to err", "[1]<stderr>:to err"]


def test_the_time_stands_before_each_line_on_request(run, script):
    done = run("-np", "1", "--prefix-output-with-timestamp", *script("print('x')"))
    assert re.fullmatch(r"\w{3} \w{3} \d\d \d\d:\d\d:\d\d \d{4}\[0\]<stdout>:x\n", done.out)


def test_16_ranks_that_print_4000_lines_each_lose_nothing(run, script, tmp_path):
    body = (
        "for i in range(4000): print(f'rank {rank} line {i} ' + 'x' * (i % 90), file=(sys.stdout, sys.stderr)[i % 2])"
    )
    done = run("-np", "16", "--output-filename", str(tmp_path / "logs"), *script(body), timeout_s=120)
    assert done.code == 0
    for text, stream, odd in ((done.out, "stdout", 0), (done.err, "stderr", 1)):
        lines = text.splitlines()
        assert len(lines) == 16 * 2000
        for rank in range(16):
            expected = [f"rank {rank} line {i} " + "x" * (i % 90) for i in range(odd, 4000, 2)]
            prefix = f"[{rank}]<{stream}>:"
            assert [line.removeprefix(prefix) for line in lines if line.startswith(prefix)] == expected
            assert (tmp_path / "logs" / f"rank.{rank:02}" / stream).read_text().splitlines() == expected


def test_partial_lines_and_progress_bars_of_different_ranks_are_never_glued_together(run, script):
    body = """
for i in range(20):
    for piece in (f"\\r{rank}{rank}", f"{rank}{rank}", f"{rank}"):
        sys.stdout.write(piece); sys.stdout.flush(); time.sleep(0.002)
sys.stdout.write(f"\\nend{rank}")
"""
    done = run("-np", "4", *script(body))
    lines = done.out.splitlines()
    for rank in range(4):
        mine = [line for line in lines if line.startswith(f"[{rank}]<stdout>:")]
        assert mine == [f"[{rank}]<stdout>:{str(rank) * 5}"] * 20 + [f"[{rank}]<stdout>:end{rank}"]
    assert len(lines) == 4 * 21


def test_bytes_that_are_no_text_pass_unchanged(run, script, tmp_path):
    body = "sys.stdout.buffer.write(b'\\xff\\xfe\\x00 \\x1b[1m\\r10%\\r20%\\n')"
    done = run("-np", "1", "--output-filename", str(tmp_path), *script(body))
    assert done.raw_out == b"[0]<stdout>:\xff\xfe\x00 \x1b[1m\n[0]<stdout>:10%\n[0]<stdout>:20%\n"
    assert (tmp_path / "rank.0" / "stdout").read_bytes() == b"\xff\xfe\x00 \x1b[1m\r10%\r20%\n"


def test_a_line_of_100_mb_fills_nobodys_memory(run, script, tmp_path):
    body = "for _ in range(1600): sys.stdout.buffer.write(b'x' * 65536)\nprint('\\nup', flush=True)\ntime.sleep(600)"
    started = run.start("-np", "1", "--output-filename", str(tmp_path), *script(body))
    started.says("]<stdout>:up", timeout_s=60)
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{started.pid}/status").read_text())[1]
    assert int(peak) < 120_000
    assert (tmp_path / "rank.0" / "stdout").stat().st_size == 1600 * 65536 + 4
    started.send(15)
    started.wait()


def test_a_log_file_that_cannot_grow_does_not_end_the_run(run, script, tmp_path):
    """As on a full disk, here by the limit of a file's size."""
    body = "print('a' * (5000 if rank == 0 else 1), flush=True)\ntime.sleep(0.2)\nprint('b')"
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (1000, 1000))
    done = run("-np", "2", "--output-filename", str(tmp_path), *script(body), preexec_fn=limit)
    assert done.code == 0, done.story()
    assert done.err.count("File too large; the run continues without this file.") == 1
    assert (tmp_path / "rank.1" / "stdout").read_text() == "a\nb\n" and done.out.count("\n") == 4


def test_a_reader_that_pauses_longer_than_the_heartbeat_stops_nobody(run, script):
    """A pager, or Ctrl-S: the ranks wait, the hearts beat, and nothing is lost."""
    body = "for i in range(200_000): print(i, 'x' * 80)"
    command = run.command("-np", "1", "--heartbeat", "1", *script(body))
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=run.env)
    time.sleep(3)
    assert process.poll() is None
    assert process.stdout.read().count(b"\n") == 200_000
    assert process.wait() == 0


def test_a_pipe_that_takes_one_line_ends_the_run(run, script):
    command = shlex.join(run.command("-np", "2", *script("while True: print(1000)")))
    pipeline = ["bash", "-c", f"{command} | head -1; echo ${{PIPESTATUS[0]}}"]
    done = subprocess.run(pipeline, capture_output=True, text=True, timeout=60, env=run.env)
    assert done.stdout.splitlines()[1:] == ["141"] and "stdout cannot be written (Broken pipe)" in done.stderr


def test_names_of_folders_have_equal_length_and_a_silent_rank_has_empty_files(run, tmp_path):
    """As Horovod writes them; with ten ranks one digit is enough."""
    done = run("-np", "11", "--output-filename", str(tmp_path), "sh", "-c", 'test $RANK != 3 || echo "here"')
    assert done.code == 0, done.story()
    files = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.glob("*/*")}
    expected = {f"rank.{rank:02}/{stream}": "" for rank in range(11) for stream in ("stdout", "stderr")}
    assert files == {**expected, "rank.03/stdout": "here\n"}
