"""Training in one process, evaluation and search need nothing that macOS or Windows lack: modules, functions and signals.

The process removes them after torch is imported, whose build for Linux uses them itself.
"""

import pytest
from tests.forked import run_forked

from megaclass.cli import train
from megaclass.cli.main import main

pytestmark = pytest.mark.ranks

ELSEWHERE = """
import asyncio, concurrent.futures.process, enum, multiprocessing.pool, os, shutil, signal, subprocess, sys, tempfile
import filelock, multiprocessing.context, numpy, PIL.Image, torch, torch.distributed
for name in [name for name in sys.modules if name.partition(".")[0] == "megaclass"]:
    del sys.modules[name]  # imported again without what is removed
# What multiprocessing has on Unix alone; torch has its own reference.
for name in ("ForkServerContext", "ForkServerProcess", "ForkContext", "ForkProcess"):
    delattr(multiprocessing.context, name)
for name in ("fcntl", "resource", "termios", "pwd", "grp", "pty", "tty", "curses", "syslog"):
    sys.modules[name] = None
for name in ("memfd_create sched_getaffinity sched_setaffinity geteuid getuid getloadavg killpg setsid posix_fadvise fork "
             "O_DIRECTORY O_NOFOLLOW O_CLOEXEC pidfd_open posix_fallocate getpgid preadv pread "
             "sendfile eventfd").split():
    if hasattr(os, name):
        delattr(os, name)
kept = {one.name: one.value for one in signal.Signals if one.name in "SIGINT SIGTERM SIGABRT SIGSEGV SIGFPE SIGILL".split()}
for name in [*signal.Signals.__members__, "pthread_sigmask", "sigtimedwait", "SIGRTMIN", "SIGRTMAX"]:
    if hasattr(signal, name):
        delattr(signal, name)
signal.Signals = enum.IntEnum("Signals", kept)
for name in kept:
    setattr(signal, name, signal.Signals[name])
from megaclass.cli.main import main
small = ("synth.identities=10 synth.images_per_identity=4 synth.size=32 synth.pairs=20 backbone.embedding_dim=16 "
         "train.epochs=0.5 train.global_batch=8 export.onnx=false").split()
assert main(["train", "demo", "train.nproc=1", *small]) == 0
assert main(["evaluate", "runs/demo", "--on", "datasets/demo/verification.bin"]) == 0
assert main(["data", "unpack", "datasets/demo", "--out", "photos"]) == 0
import glob
assert main(["search", "runs/demo", "photos", glob.glob("photos/*/*.jpg")[0]]) == 0
sys.platform = "win32"
assert main(["train", "demo", "train.nproc=2", "train.run_dir=runs/two", *small]) == 2
assert main(["run", "-np", "2", "python", "train.py"]) == 2
"""


def train_evaluate_and_search() -> None:
    exec(compile(ELSEWHERE, "elsewhere.py", "exec"), {"__name__": "__main__"})


def test_train_evaluate_and_search_without_what_only_linux_has(tmp_path):
    done = run_forked(train_evaluate_and_search, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "started and watched on Linux only: set train.nproc=1 on win32" in done.stderr
    assert (
        "megaclass run: jobs are started and watched on Linux only. On win32, start your command itself" in done.stderr
    )


@pytest.mark.parametrize("platform, num_processes", [("linux", 2), ("darwin", 1), ("win32", 1)])
def test_the_demo_starts_as_many_processes_as_the_system_can_watch(monkeypatch, capsys, platform, num_processes):
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr(train, "_train", lambda options, given: print(options.settings) or 0)
    assert main(["demo", "train.epochs=1"]) == 0
    assert ("train.nproc=1" in capsys.readouterr().out) == (num_processes == 1)
