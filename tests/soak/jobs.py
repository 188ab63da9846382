"""A training run under a fault: how it is started, what is known of its processes, and when the fault strikes."""

import contextlib
import json
import os
import random
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from outages import launch_fixtures

LAUNCH = launch_fixtures()
RECIPE = Path(__file__).parents[2] / "recipes" / "demo.toml"
NUM_STEPS = 48
# 12 identities x 8 images in batches of 16: 6 steps per epoch, each of which is saved.
SETTINGS = (
    *("synth.identities=12", "synth.images_per_identity=8", "synth.size=32", "synth.pairs=20"),
    *("backbone.embedding_dim=16", "train.global_batch=16", "train.report_steps=2", "train.checkpoint_epochs=1"),
    *("export.onnx=false", "train.keep_checkpoints=2", f"train.epochs={NUM_STEPS // 6}"),
)
# The curve of a job with Horovod's API, in the form of metrics.jsonl.
HOROVOD = """
import json, os, sys, time, torch
import horovod.torch as hvd
hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(8, 4)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
os.makedirs(sys.argv[1], exist_ok=True)
with open(f"{sys.argv[1]}/metrics.jsonl", "w", buffering=1) as file:
    for step in range(1, 121):
        loss = model(torch.randn(16, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = hvd.allreduce(loss.detach(), name="loss").item()
        if hvd.rank() == 0:
            file.write(json.dumps({"step": step, "loss": total}) + chr(10))
        time.sleep(0.05)
"""


@dataclass
class Job:
    """One run under a fault: where it lives, how it is started, what is left of it."""

    place: Any
    """`Here`, this machine, or `Bed`, hosts."""
    hosts: tuple[str, ...]
    disk: Path
    data: Path
    rng: random.Random
    is_horovod: bool = False
    is_behind_shell: bool = False
    run: Any = None
    earlier_err: str = ""
    struck_at: float = 0.0
    was_met: bool = False
    """Whether the run was under way when the fault struck."""

    def command(self, *more: str) -> list[str]:
        places = (f"data.path={self.data}", f"train.run_dir={self.run_dir}")
        program = ["megaclass", "train", str(RECIPE), *SETTINGS, *places, *more]
        if self.is_horovod:
            program = ["python", "-c", HOROVOD, str(self.run_dir)]
        if self.is_behind_shell:
            program = ["bash", "-c", f"{shlex.join(program)}; exit $?"]
        return [*self.hosts, "--restarts", "3", *program]

    def start(self, *more: str) -> None:
        self.run = self.place.start(*self.command(*more))

    def strike(self) -> None:
        """To be called at the moment of the fault; the first call counts."""
        if not self.struck_at:
            self.struck_at = time.monotonic()
            self.was_met = self.is_running

    @property
    def run_dir(self) -> Path:
        return self.disk / "run"

    @property
    def is_running(self) -> bool:
        return self.run.process.poll() is None

    @property
    def err(self) -> str:
        return f"{self.earlier_err}{self.run.err}"

    def checkpoints(self) -> list[Path]:
        return sorted((self.run_dir / "checkpoints").glob("step-*"))

    def curve(self) -> dict[int, float]:
        try:
            lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        except OSError:
            return {}
        rows = []
        for line in lines:
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
        return {row["step"]: row["loss"] for row in rows}

    def processes(self) -> dict[int, str]:
        """Command lines by pid."""
        found = self.place.processes()
        return found if isinstance(found, dict) else {pid: command_line(pid) for pid in found}

    def ranks(self) -> list[int]:
        """Pids of the training processes, rank 0 first; without the shells in front of them."""
        found = {}
        for pid, line in self.processes().items():
            variables = environment(pid)
            is_program = "megaclass train" in line or "import horovod.torch" in line
            if is_program and " run " not in line and not line.startswith("bash ") and "RANK" in variables:
                found[int(variables["RANK"])] = pid
        return [found[rank] for rank in sorted(found)]

    def pids_with(self, text: str) -> list[int]:
        return [pid for pid, line in self.processes().items() if text in line and "ssh" not in line]

    def wait(self, condition: Callable[[], object], timeout_s: float, what: str) -> None:
        """Waits for the condition, or for the end of the run."""
        LAUNCH.wait_until(lambda: condition() or not self.is_running, timeout_s, what)

    def wait_for_ranks(self) -> list[int]:
        self.wait(lambda: len(self.ranks()) == 2, 90, "the start of the ranks")
        return self.ranks()

    def wait_for_checkpoint(self) -> None:
        self.wait(self.checkpoints, 180, "the first checkpoint")

    def wait_for_moment(self) -> None:
        """Waits for a random moment: while the ranks import and join, or after a random step of the first two thirds."""
        self.wait_for_ranks()
        if self.rng.random() < 0.3:
            time.sleep(self.rng.uniform(0, 3))
        else:
            self.wait_for_random_step(0)

    def wait_for_random_step(self, first: int) -> None:
        step = self.rng.randrange(first, NUM_STEPS * 2 // 3)
        self.wait(lambda: max(self.curve(), default=0) >= step, 180, f"step {step}")


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def environment(pid: int) -> dict[str, str]:
    with contextlib.suppress(OSError):
        parts = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        return dict(part.split("=", 1) for part in parts if "=" in part)
    return {}


def parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    return 0


def kill(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
