"""The tool that runs scripts in forked processes: exit codes, output, environment and late processes."""

import atexit
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.forked import Forked, ended_ranks, megaclass_command, python_script, run_forked, torchrun

pytestmark = pytest.mark.ranks


def _say(what: str) -> None:
    atexit.register(lambda: print("at the end"))
    print(what, os.environ["SAID"], Path.cwd())
    print("an error", file=sys.stderr)


def _end(code: object) -> None:
    if isinstance(code, Exception):
        raise code
    sys.exit(code)


def _sleep(started: Path) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    started.with_suffix(".partial").write_text(str(child.pid))
    started.with_suffix(".partial").rename(started)
    time.sleep(1000)


def _wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _say_and_wait() -> None:
    print("begun")
    time.sleep(1000)


def _rank() -> None:
    print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, local {os.environ['LOCAL_RANK']}")


def test_a_function_runs_in_a_folder_with_variables_and_its_output_is_returned(tmp_path):
    done = run_forked(_say, "hello", env={"SAID": "there"}, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "an error\n")
    assert done.stdout == f"hello there {tmp_path}\nat the end\n"


def test_the_exit_code_is_that_of_an_interpreter():
    codes = [(None, 0), (3, 3), ("a message", 1), (ValueError("the cause"), 1)]
    done = [run_forked(_end, code) for code, _ in codes]
    assert [one.returncode for one in done] == [code for _, code in codes]
    assert done[2].stderr == "a message\n" and "ValueError: the cause" in done[3].stderr


def test_a_script_has_its_arguments_and_its_folder(tmp_path):
    (tmp_path / "beside.py").write_text("number = 7")
    (tmp_path / "script.py").write_text("import beside, sys\nprint(__name__, sys.argv[1:], beside.number)")
    assert run_forked(python_script, tmp_path / "script.py", "-x", "y").stdout == "__main__ ['-x', 'y'] 7\n"


def test_a_process_beside_the_test_shows_its_output_and_takes_signals():
    with Forked(_say_and_wait) as process:
        _wait_until(lambda: process.stdout == "begun\n")
        assert process.is_alive() and process.wait(timeout_s=0.01) is None
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM and not process.is_alive()
    assert (process.stdout, process.stderr) == ("begun\n", "")


def test_a_command_of_megaclass_ends_with_its_exit_code():
    done = run_forked(megaclass_command, "train", "nothing.toml")
    assert done.returncode == 2 and done.stderr.startswith("megaclass: ")


def test_ranks_get_the_environment_of_the_launcher():
    text = "import os, sys; print(os.environ['LOCAL_RANK'], os.environ['HOROVOD_SIZE'], sys.argv, os.environ['MORE'])"
    for per_host, local in ((0, (0, 1)), (1, (0, 0))):
        ranks = ended_ranks(2, python_script, text, "x", ranks_per_host=per_host, env={"MORE": "m"})
        assert [rank.stdout for rank in ranks] == [f"{number} 2 ['-c', 'x'] m\n" for number in local]


def test_a_late_process_fails_the_test_and_nothing_of_it_is_left(tmp_path):
    late = Forked(_sleep, tmp_path / "started")
    _wait_until((tmp_path / "started").exists)
    child = int((tmp_path / "started").read_text())
    assert _runs(child)
    with pytest.raises(pytest.fail.Exception, match="_sleep did not end within"):
        late.end(timeout_s=0.1)
    _wait_until(lambda: not _runs(child))


def test_torchruns_agent_starts_ranks_and_tells_of_one_that_fails():
    done = torchrun(2, _rank)
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2, local 0", "rank 1 of 2, local 1"]
    failed = torchrun(2, _end, ValueError("the cause"))
    assert failed.returncode == 1 and "the cause" in failed.stderr
