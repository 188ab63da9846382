"""Tests that are ended from outside leave no namespaces, no ssh servers and no processes behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.launch.conftest import wait_until

ROOT = Path(__file__).parents[2]
TEST = """
import os, subprocess, time
from pathlib import Path

def test_is_killed(bed):
    subprocess.Popen(["sleep", "1000"])
    subprocess.Popen(bed.inside("h2", "sleep", "1000"))
    login = ["ssh", "-F", f"{bed.folder}/ssh_config", "h2", "sleep 1000"]
    subprocess.Popen(bed.inside("h1", *login))
    while not bed.pids_of("h2", "sshd: root@notty"):
        time.sleep(0.05)
    Path(os.environ["READY"]).write_text(str(os.getpid()))
    time.sleep(1000)
"""


def _lines_with(text: str) -> list[str]:
    listed = subprocess.run(["ps", "-eww", "-o", "pid=,args="], capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if text in line]


def test_pytest_killed_in_a_test_of_several_hosts_leaves_nothing_behind(bed, tmp_path):
    ready, file = tmp_path / "ready", ROOT / "tests" / "launch" / f"test_killed_{os.getpid()}.py"
    file.write_text(TEST)
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", str(file)]
        killed = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "READY": str(ready)}, start_new_session=True)
        wait_until(ready.exists, 60, "the start of the hosts")
    finally:
        file.unlink()
    hosts = [name.name for name in Path("/run/netns").glob(f"mc{killed.pid}-*")]
    assert len(hosts) == 4 and len(_lines_with(f"megaclass-bed-{killed.pid}/")) >= 3
    sleepers = len(_lines_with("sleep 1000"))
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()

    def is_clean() -> bool:
        is_left = any(Path("/run/netns").glob(f"mc{killed.pid}-*")) or any(Path("/etc/netns").glob(f"mc{killed.pid}-*"))
        return not is_left and not _lines_with(f"megaclass-bed-{killed.pid}/")

    wait_until(is_clean, 30, "the removal of the hosts")
    wait_until(lambda: len(_lines_with("sleep 1000")) <= sleepers - 3, 30, "the end of the processes of the test")
    wait_until(lambda: not Path(f"/tmp/megaclass-bed-{killed.pid}").exists(), 30, "the removal of the folder")
