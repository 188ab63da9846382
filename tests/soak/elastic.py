"""Elastic jobs under random events: workers and hosts die, stop, come and go, and the discovery script fails.

    python tests/soak/elastic.py [--jobs 10] [--events 20] [--seed 0] [--train] [--out benchmarks/elastic.md]

Every job trains on this machine, where `localhost`, `127.0.0.1` … `127.0.0.4` are hosts with an agent each, until its events
have happened. A job passes when it ends with 0, when every sample was trained on exactly once per epoch (steps that are undone
after a failure take their counts with them), and when no process is left. With --train the jobs are `megaclass train`.
"""

import argparse
import os
import platform
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from outages import launch_fixtures

LAUNCH = launch_fixtures()
TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS / "launch"))
JOB = TESTS / "launch" / "elastic_job.py"
NUM_IMAGES, STEPS_PER_EPOCH = 96, 6
STEPS_PER_EVENT = 60
NAMES = ("localhost", "127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4")
LONGEST_S = 90.0
MAX_RANKS = 4


@dataclass
class Result:
    code: int | None
    num_events: Counter[str]
    unanswered: list[str]
    lost: int
    repeated: int
    num_orphans: int
    seconds: dict[str, list[float]]
    """From a kill to the first commit of the next generation, by kind of event."""
    num_generations: int = 0


@dataclass
class Soak:
    """One job and the means to disturb it."""

    run: Any
    here: Any
    folder: Path
    rng: random.Random
    hosts: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def write_hosts(self) -> None:
        new = self.folder / "hosts.new"
        new.write_text("".join(f"{name}:{slots}\n" for name, slots in self.hosts.items()))
        new.rename(self.folder / "hosts")

    def write_script(self, body: str) -> None:
        new = self.folder / "script.new"
        new.write_text(f"#!/bin/sh\n{body}\n")
        new.chmod(0o755)
        new.rename(self.folder / "hosts.sh")

    # ---- the state of the job, from its output ----

    def generation(self) -> int:
        found = re.findall(r"generation (\d+): \d+ ranks?", self.run.err)
        return int(found[-1]) if found else 0

    def is_steady(self) -> bool:
        """All ranks of the last generation train."""
        found = re.findall(r"generation (\d+): (\d+) ranks?", self.run.err)
        # The lines of all generations before the last one add up to the sum of their sizes.
        return bool(found) and self.run.out.count(" from epoch ") >= sum(int(size) for _, size in found)

    def workers(self) -> dict[int, str]:
        """Hosts of the members of the last generation that run, by pid. The job is steady."""
        sizes = re.findall(r"generation \d+: (\d+) ranks?", self.run.err)
        members = re.findall(r"pid (\d+) rank \d+ of", self.run.out)[-int(sizes[-1]) :]
        found = {}
        for pid in map(int, members):
            try:
                env = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            name = b"HOROVOD_HOSTNAME="
            found[pid] = next(part.removeprefix(name).decode() for part in env if part.startswith(name))
        return found

    def wait(self, condition: Callable[[], bool], limit_s: float = LONGEST_S) -> bool:
        ends_at = time.monotonic() + limit_s
        while time.monotonic() < ends_at and self.run.process.poll() is None:
            if condition():
                return True
            time.sleep(0.02)
        return condition()

    def kill_and_measure(self, kind: str, act: Callable[[], None]) -> bool:
        num_before = self.run.err.count("s after the failure.")
        begun = time.monotonic()
        act()
        is_answered = self.wait(lambda: self.run.err.count("s after the failure.") > num_before)
        if is_answered:
            self.seconds.setdefault(kind, []).append(time.monotonic() - begun)
        return is_answered

    # ---- events; each returns whether it was answered, or None if it is not possible now ----

    def kill_worker(self) -> bool | None:
        workers = self.workers()
        if len(workers) < 2:
            return None
        pid = self.rng.choice(sorted(workers))
        return self.kill_and_measure("killed worker", lambda: os.kill(pid, signal.SIGKILL))

    def kill_host(self) -> bool | None:
        workers = self.workers()
        if len(set(workers.values())) < 2:
            return None
        host = self.rng.choice(sorted(set(workers.values())))
        pid = next(pid for pid, name in workers.items() if name == host)
        agent = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
        return self.kill_and_measure("killed agent of a host", lambda: os.kill(agent, signal.SIGKILL))

    def stop_worker(self) -> bool | None:
        workers = self.workers()
        if len(workers) < 2:
            return None
        pid = self.rng.choice(sorted(workers))
        # The time until a stopped rank is killed is the heartbeat's, so it is not counted.
        num_before = self.run.err.count("s after the failure.")
        os.kill(pid, signal.SIGSTOP)
        return self.wait(lambda: self.run.err.count("s after the failure.") > num_before)

    def add_host(self) -> bool | None:
        free = [name for name in NAMES if name not in self.hosts]
        if not free:
            return None
        generation, num_full = self.generation(), len(self.workers())
        self.hosts[self.rng.choice(free)] = self.rng.choice([1, 2])
        self.write_hosts()
        # With the maximum of ranks nothing changes.
        return self.wait(lambda: self.generation() > generation) if num_full < MAX_RANKS else True

    def remove_host(self) -> bool | None:
        used = set(self.workers().values())
        left = {name for name in used if name in self.hosts}
        if len(left) < 2:
            return None
        name = self.rng.choice(sorted(left))
        generation = self.generation()
        del self.hosts[name]
        self.write_hosts()
        return self.wait(lambda: self.generation() > generation)

    def fail_script(self) -> bool:
        return self._bad_script("echo no >&2; exit 3", "exit code 3: no; its last good answer stands")

    def print_nonsense(self) -> bool:
        return self._bad_script("echo '<html>'", "its last good answer stands")

    def _bad_script(self, body: str, says: str) -> bool:
        num_before = self.run.err.count(says)
        self.write_script(body)
        is_answered = self.wait(lambda: self.run.err.count(says) > num_before)
        self.write_script(f"cat {self.folder / 'hosts'}")
        time.sleep(1.5)
        return is_answered


EVENTS: dict[str, tuple[int, Callable[[Soak], bool | None]]] = {
    "killed worker": (6, Soak.kill_worker),
    "killed agent of a host": (3, Soak.kill_host),
    "stopped worker": (1, Soak.stop_worker),
    "added host": (4, Soak.add_host),
    "removed host": (3, Soak.remove_host),
    "script that fails": (1, Soak.fail_script),
    "script that prints nonsense": (1, Soak.print_nonsense),
}
"""Kinds of events with their weights."""


def training(folder: Path, num_epochs: int) -> tuple[tuple[str, ...], dict[str, str]]:
    """Command and environment of a small `megaclass train` whose backbone writes down the images that it has seen."""
    settings = (
        *("synth.identities=12", "synth.images_per_identity=8", "synth.size=32", "synth.pairs=40", "data.mirror=false"),
        *("backbone.name=counting_backbone:CountingNet", "backbone.embedding_dim=16", "backbone.batch_norm=sync"),
        *("train.global_batch=16", f"train.epochs={num_epochs}", "train.commit_steps=5", "train.checkpoint_epochs=5"),
        *(
            "optimizer.lr=0.0003",
            "export.onnx=false",
            f"data.path={folder / 'data'}",
            f"train.run_dir={folder / 'run'}",
        ),
    )
    recipe = TESTS.parent / "recipes" / "demo.toml"
    path = os.pathsep.join([str(TESTS / "launch"), os.environ.get("PYTHONPATH", "")])
    env = {"PYTHONPATH": path, "COUNT_DIR": str(folder), "COUNT_STEP_S": "0.1"}
    return (sys.executable, "-m", "megaclass", "train", str(recipe), *settings), env


def run_one(seed: int, num_events: int, *, is_training: bool = False) -> Result:
    rng = random.Random(seed)
    here = LAUNCH.Here()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        soak = Soak(None, here, folder, rng, {"localhost": 2, "127.0.0.1": 1})
        soak.write_hosts()
        soak.write_script(f"cat {folder / 'hosts'}")
        options = (
            "--min-np",
            "1",
            "--max-np",
            str(MAX_RANKS),
            "--blacklist-cooldown-range",
            "1",
            "3",
            "--heartbeat",
            "10",
        )
        command: tuple[str, ...] = (sys.executable, str(JOB), "300", "100000", "0.02", str(folder / "stop"))
        num_epochs, env = num_events * STEPS_PER_EVENT // STEPS_PER_EPOCH, {}
        if is_training:
            command, env = training(folder, num_epochs)
        soak.run = here.start(*options, "--host-discovery-script", str(folder / "hosts.sh"), *command, env=env)
        counts: Counter[str] = Counter()
        unanswered: list[str] = []
        soak.wait(soak.is_steady)
        while sum(counts.values()) < num_events and soak.run.process.poll() is None:
            kind = rng.choices(list(EVENTS), [weight for weight, _ in EVENTS.values()])[0]
            answer = EVENTS[kind][1](soak)
            if answer is None:
                continue
            counts[kind] += 1
            if not answer:
                unanswered.append(kind)
            soak.wait(soak.is_steady)
            time.sleep(rng.uniform(0.0, 1.0))
        (folder / "stop").touch()
        try:
            code = soak.run.wait(600 if is_training else 120)
        except Exception:
            soak.run.process.kill()
            code = None
        ends = re.findall(r"end: (\d+) samples lost, (\d+) repeated", soak.run.out)
        if is_training:
            from counting_backbone import lost_and_repeated

            ends = [lost_and_repeated(folder, NUM_IMAGES, STEPS_PER_EPOCH, num_epochs)]
        time.sleep(1.0)
        orphans = here.processes()
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
        if code != 0 or unanswered or not ends:
            print(f"seed {seed}: exit code {code}, unanswered {unanswered}\n{soak.run.story()}", flush=True)
        lost, repeated = (max(int(end[i]) for end in ends) if ends else -1 for i in (0, 1))
        return Result(code, counts, unanswered, lost, repeated, len(orphans), soak.seconds, soak.generation())


def table(results: list[Result], num_asked: int, what: str) -> str:
    events: Counter[str] = Counter()
    seconds: dict[str, list[float]] = {}
    for result in results:
        events += result.num_events
        for kind, values in result.seconds.items():
            seconds.setdefault(kind, []).extend(values)
    total = sum(events.values())
    lines = [
        f"# Elastic jobs of {what} under random events",
        "",
        f"`python {' '.join(sys.argv)}` on {time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores ({platform.machine()}), load "
        f"average {os.getloadavg()[1]:.0f}, up to {MAX_RANKS} ranks on up to {len(NAMES)} hosts, which are names of one "
        f"machine with an agent each.",
        "",
        "| | |",
        "|---|---:|",
        f"| jobs, each with {num_asked} events | {len(results)} |",
        f"| jobs that finished with 0 | {sum(result.code == 0 for result in results)} |",
        f"| events | {total} |",
        f"| events that were not answered within {LONGEST_S:g} s | {sum(len(result.unanswered) for result in results)} |",
        f"| generations | {sum(result.num_generations for result in results)} |",
        f"| samples lost | {sum(max(0, result.lost) for result in results)} |",
        f"| samples repeated | {sum(max(0, result.repeated) for result in results)} |",
        f"| processes left behind | {sum(result.num_orphans for result in results)} |",
        "",
        "| event | count | median s until the next commit | worst s |",
        "|---|---:|---:|---:|",
    ]
    for kind in EVENTS:
        values = seconds.get(kind, [])
        times = f"{statistics.median(values):.1f} | {max(values):.1f}" if values else "– | –"
        lines.append(f"| {kind} | {events[kind]} | {times} |")
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--events", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", action="store_true", help="jobs of megaclass train")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    results = []
    for number in range(given.jobs):
        results.append(run_one(given.seed + number, given.events, is_training=given.train))
        result = results[-1]
        print(f"job {number}: exit code {result.code}, {dict(result.num_events)}, {result.seconds}", flush=True)
        text = table(results, given.events, "`megaclass train`" if given.train else "a program with `hvd.elastic`")
        if given.out is not None:
            given.out.write_text(text)
    print(text)
    is_good = all(
        result.code == 0
        and not result.lost
        and not result.repeated
        and not result.num_orphans
        and not result.unanswered
        for result in results
    )
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
