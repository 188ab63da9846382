"""A process may have more than 1,024 open files: its new descriptors have numbers that select() refuses."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.forked import run_forked

from megaclass.cli.main import main
from megaclass_launch.agent import orphan_killer
from megaclass_launch.launchers.ray_worker import AgentActor
from megaclass_launch.operating_system import readable

pytestmark = pytest.mark.ranks
TINY = (
    *(
        "synth.identities=10",
        "synth.images_per_identity=4",
        "synth.size=32",
        "synth.pairs=20",
        "backbone.embedding_dim=16",
    ),
    *("train.epochs=0.5", "train.global_batch=8", "export.onnx=false", "train.device=cpu"),
)


def with_many_files(function: Callable[..., int], *args: Any) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    while os.open(os.devnull, os.O_RDONLY) < 1100:
        pass
    sys.exit(function(*args))


def see_what_is_readable() -> int:
    reader, writer = os.pipe()
    idle, _idle_writer = os.pipe()
    assert reader > 1023
    assert readable([reader, idle], 0.01) == []
    os.write(writer, b"x")
    assert readable([reader, idle], 60) == [reader]
    os.read(reader, 1)
    os.close(writer)
    assert readable([reader, idle], 60) == [reader], "its end counts, too"
    return 0


def follow_an_agent_of_ray() -> int:
    actor = AgentActor()
    actor.start([])
    actor.write(b"no job\n")
    actor.write(b"")
    printed, answer = b"", []
    while isinstance(answer, list):
        printed += b"".join(data for _, data in answer)
        answer = actor.read()
    assert b"ProtocolError" in printed
    return answer - 1


def say_goodbye_to_the_orphan_killer() -> int:
    reader, writer = os.pipe()
    command = [sys.executable, "-I", "-S", orphan_killer.__file__, "no-such-run", str(reader), str(os.getpid()), "0"]
    process = subprocess.Popen(command, pass_fds=[reader])
    os.write(writer, orphan_killer.GOODBYE)
    return process.wait(60)


@pytest.mark.parametrize("function", [see_what_is_readable, say_goodbye_to_the_orphan_killer, follow_an_agent_of_ray])
def test_descriptors_above_1023_are_waited_for(function):
    done = run_forked(with_many_files, function)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "options", [("train.nproc=1", "data.workers=1"), ("train.nproc=2",)], ids=["loader", "local ranks"]
)
def test_training_works(tmp_path: Path, options):
    done = run_forked(with_many_files, main, ["train", "demo", *TINY, *options], cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_pause_before_a_restart_is_waited_for(tmp_path):
    done = run_forked(with_many_files, main, ["run", "-np", "1", "--restarts", "2", "false"], cwd=tmp_path)
    assert done.returncode == 1 and "restart 2 of 2" in done.stderr, done.stderr
