"""The whole catalogue of faults, at random moments of a training run, for as many rounds as asked for.

    python tests/soak/faults.py [--rounds 8] [--kinds kill-a-rank …] [--seed 0] [--out benchmarks/soak.md]

A round meets every kind of fault once. A trial starts a training run of two ranks under `megaclass run --restarts 3`, on this
machine or on two hosts (network namespaces), lets the fault happen at a random moment, and waits for the end. It passes when

- nothing is left of it: no process on any host;
- the newest checkpoint is whole, if there ever was one;
- the run ended with 0, by itself, after a restart or after `--resume`, and its curve is that of an undisturbed run, bit by bit;
- and, where the fault must be reported, the report says what happened.

Needs root, for small disks and for hosts. Kinds that cannot be tried here are left out, which is said.
"""

import argparse
import contextlib
import json
import os
import platform
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from outages import launch_fixtures

LAUNCH = launch_fixtures()
RECIPE = Path(__file__).parents[2] / "recipes" / "demo.toml"
# 12 identities x 8 images in batches of 16: 6 steps per epoch, each of which is saved.
SETTINGS = (
    *("synth.identities=12", "synth.images_per_identity=8", "synth.size=32", "synth.pairs=40"),
    *("backbone.embedding_dim=16", "train.global_batch=16", "train.report_steps=2", "train.checkpoint_epochs=1"),
    *("export.onnx=false", "train.keep_checkpoints=2", "train.epochs=10"),
)
LONGEST_S = 240.0


@dataclass
class Job:
    """One training run under a fault: where it lives, how it is started, what is left of it."""

    place: Any
    """`Here`, this machine, or `Bed`, hosts."""
    hosts: tuple[str, ...]
    disk: Path
    data: Path
    rng: random.Random
    run: Any = None
    earlier_err: str = ""
    fault_at: float = 0.0

    def command(self, *more: str) -> list[str]:
        places = (f"data.path={self.data}", f"train.run_dir={self.disk / 'run'}")
        return [*self.hosts, "--restarts", "3", "megaclass", "train", str(RECIPE), *SETTINGS, *places, *more]

    def start(self, *more: str) -> None:
        self.run = self.place.start(*self.command(*more))

    @property
    def is_running(self) -> bool:
        return self.run.process.poll() is None

    @property
    def err(self) -> str:
        return f"{self.earlier_err}{self.run.err}"

    def checkpoints(self) -> list[Path]:
        return sorted((self.disk / "run" / "checkpoints").glob("step-*"))

    def processes(self) -> dict[int, str]:
        """Command lines by pid."""
        found = self.place.processes()
        return found if isinstance(found, dict) else {pid: _command_line(pid) for pid in found}

    def ranks(self) -> list[int]:
        """Pids of the training processes, rank 0 first."""
        found = {}
        for pid, line in self.processes().items():
            variables = _environment(pid)
            if "megaclass train" in line.replace("\0", " ") and " run " not in line and "RANK" in variables:
                found[int(variables["RANK"])] = pid
        return [found[rank] for rank in sorted(found)]

    def pids_with(self, text: str) -> list[int]:
        return [pid for pid, line in self.processes().items() if text in line and "ssh" not in line]

    def wait_for_ranks(self) -> list[int]:
        LAUNCH.wait_until(lambda: len(self.ranks()) == 2 or not self.is_running, 60, "the start of the ranks")
        return self.ranks()

    def wait_for_checkpoint(self) -> None:
        LAUNCH.wait_until(lambda: self.checkpoints() or not self.is_running, 120, "the first checkpoint")

    def wait_a_moment(self) -> None:
        time.sleep(self.rng.uniform(0, 2))


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def _environment(pid: int) -> dict[str, str]:
    with contextlib.suppress(OSError):
        parts = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        return dict(part.split("=", 1) for part in parts if "=" in part)
    return {}


# ---- faults ----


def _kill(pids: list[int], number: int = signal.SIGKILL) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_rank(number: int, which: Callable[[list[int]], list[int]]) -> Callable[[Job], None]:
    """At any moment from the start of the ranks on: while they import, join, train or save."""

    def fault(job: Job) -> None:
        job.wait_for_ranks()
        time.sleep(job.rng.uniform(0, 8))
        _kill(which(job.ranks()), number)

    return fault


def kill_while_saving(job: Job) -> None:
    folder = job.disk / "run" / "checkpoints"
    LAUNCH.wait_until(lambda: list(folder.glob(".*.partial")) or not job.is_running, 120, "a save")
    time.sleep(job.rng.uniform(0, 0.02))
    _kill(job.ranks()[-1:])


def pause_a_rank(job: Job) -> None:
    job.wait_for_checkpoint()
    pids = job.ranks()[-1:]
    _kill(pids, signal.SIGSTOP)
    time.sleep(job.rng.uniform(1, 6))
    _kill(pids, signal.SIGCONT)


def slow_rank(job: Job) -> None:
    job.wait_for_ranks()
    for _ in range(15):
        pids = job.ranks()[-1:]
        _kill(pids, signal.SIGSTOP)
        time.sleep(0.1)
        _kill(pids, signal.SIGCONT)
        time.sleep(0.1)


def kill_agent(job: Job) -> None:
    job.wait_for_ranks()
    job.wait_a_moment()
    _kill(job.pids_with("megaclass.launch.agent.agent")[:1])


def kill_orphan_killer(job: Job) -> None:
    """The watcher of the agent, whose command line does not name megaclass; the run must not need it."""
    job.wait_for_ranks()
    agents = set(job.pids_with("megaclass.launch.agent.agent"))
    children = [pid for pid in job.processes() if _parent(pid) in agents and pid not in job.ranks()]
    _kill(children[:1])


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    return 0


def signal_driver(number: int) -> Callable[[Job], None]:
    def fault(job: Job) -> None:
        job.wait_for_ranks()
        time.sleep(job.rng.uniform(0, 6))
        if job.is_running:
            job.run.send(number)

    return fault


def fill_disk(job: Job) -> None:
    job.wait_for_checkpoint()
    job.wait_a_moment()
    ballast = job.disk / "ballast"
    with ballast.open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
    time.sleep(job.rng.uniform(0.5, 4))
    ballast.unlink()


def read_only_disk(job: Job) -> None:
    job.wait_for_checkpoint()
    job.wait_a_moment()
    # Refused while a file is open for writing: a disk that goes read-only by itself has no such manners.
    for _ in range(200):
        if (
            subprocess.run(["mount", "-o", "remount,ro", str(job.disk)], capture_output=True, check=False).returncode
            == 0
        ):
            break
        time.sleep(0.01)
    time.sleep(job.rng.uniform(0.5, 3))
    subprocess.run(["mount", "-o", "remount,rw", str(job.disk)], capture_output=True, check=False)


def no_more_files(job: Job) -> None:
    job.wait_for_checkpoint()
    for pid in job.ranks()[-1:]:
        subprocess.run(["prlimit", f"--pid={pid}", "--nofile=3:3"], check=False, capture_output=True)


def damage(how: Callable[[Path, random.Random], None]) -> Callable[[Job], None]:
    """A file of the newest checkpoint is damaged, then a rank killed: an older checkpoint must be used, and that said."""

    def fault(job: Job) -> None:
        job.wait_for_checkpoint()
        LAUNCH.wait_until(lambda: len(job.checkpoints()) > 1 or not job.is_running, 60, "the second checkpoint")
        ranks = job.ranks()
        _kill(ranks, signal.SIGSTOP)
        if job.checkpoints():
            how(job.checkpoints()[-1], job.rng)
        _kill(ranks)

    return fault


def flip_a_bit(folder: Path, rng: random.Random) -> None:
    file = rng.choice(sorted(folder.glob("*.safetensors")))
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def hostile_safetensors(folder: Path, rng: random.Random) -> None:
    """A header that announces more than there is: its own length, or tensors far beyond the end of the file."""
    header = b'{"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,18446744073709551615]}}'
    length = rng.choice([len(header), 1 << 62, (1 << 64) - 1])
    file = rng.choice(sorted(folder.glob("*.safetensors")))
    file.write_bytes(length.to_bytes(8, "little") + header)


def truncate_a_file(folder: Path, rng: random.Random) -> None:
    file = rng.choice(sorted(folder.iterdir()))
    os.truncate(file, rng.randrange(file.stat().st_size))


def remove_a_file(folder: Path, rng: random.Random) -> None:
    rng.choice(sorted(folder.iterdir())).unlink()


def scramble_manifest(folder: Path, rng: random.Random) -> None:
    (folder / "manifest.json").write_bytes(rng.randbytes(rng.randrange(1, 4000)))


def strangers(data: Callable[[random.Random], bytes]) -> Callable[[Job], None]:
    """Connects again and again to every port at which a rank listens, and sends `data` on all connections so far."""

    def fault(job: Job) -> None:
        job.wait_for_ranks()
        held: list[socket.socket] = []
        ends_at = time.monotonic() + 6
        while time.monotonic() < ends_at and job.is_running:
            for address, port in _listening(job.ranks()):
                with contextlib.suppress(OSError):
                    held.append(socket.create_connection((address, port), timeout=0.2))
            for connection in held:
                with contextlib.suppress(OSError):
                    connection.send(data(job.rng))
            time.sleep(0.2)
        for connection in held:
            connection.close()

    return fault


def stranger_in_store(job: Job) -> None:
    """Another process joins the store of the ranks as a client, and writes and deletes keys."""
    ranks = job.wait_for_ranks()
    port = _environment(ranks[0]).get("MASTER_PORT", "0") if ranks else "0"
    subprocess.run([sys.executable, "-c", _STORE_CLIENT, port], check=False, timeout=60, capture_output=True)


_STORE_CLIENT = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
for number in range(200):
    store.set(f"stranger {number}", "x" * 1000)
    store.delete_key(f"stranger {number // 2}")
    time.sleep(0.01)
"""


def hostile_agent_message(job: Job) -> None:
    """Bytes that no agent sends, in the agent's own stream to the driver: the host must count as lost, nothing more."""
    job.wait_for_checkpoint()
    for pid in job.pids_with("megaclass.launch.agent.agent")[:1]:
        with contextlib.suppress(OSError), Path(f"/proc/{pid}/fd/1").open("wb", buffering=0) as pipe:
            pipe.write(
                b'{"say": "output", "rank": 99999, "stream": "../../etc"}\n\x00\xff' + job.rng.randbytes(100) + b"\n"
            )


def _listening(pids: list[int]) -> Iterator[tuple[str, int]]:
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(str(file.readlink())[8:-1])
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *rest = line.split()
        if state == "0A" and rest[5] in inodes:
            address, _, port = local.partition(":")
            yield socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)


def second_job(job: Job) -> None:
    """Another run in the same folder is refused, and the first one does not notice.

    The ranks of the first run are stopped until the second one has ended: otherwise the first run is over before the second
    one has imported torch.
    """
    job.wait_for_checkpoint()
    ranks = job.ranks()
    _kill(ranks, signal.SIGSTOP)
    try:
        second = job.place.start(*job.command())
        assert second.wait(LONGEST_S) == 2, second.story()
        assert job.is_running, "the first run ended before the second one was refused"
    finally:
        _kill(ranks, signal.SIGCONT)


def leftover_save(job: Job) -> None:
    """What a save that never finished left, under the name that a save of this job may have."""
    job.wait_for_checkpoint()
    folder = job.disk / "run" / "checkpoints" / f".step-{job.rng.randrange(200):09d}.{'0' * 14}.partial"
    folder.mkdir()
    (folder / "rank-00000.json").write_bytes(job.rng.randbytes(100))
    _kill(job.ranks()[:1])


def outage(how: str, back: str, shortest_s: float, longest_s: float) -> Callable[[Job], None]:
    def fault(job: Job) -> None:
        job.wait_for_ranks()
        time.sleep(job.rng.uniform(0, 8))
        job.place.do(how, "h2")
        try:
            time.sleep(job.rng.uniform(shortest_s, longest_s))
        finally:
            job.place.do(back, "h2")

    return fault


def kill_ssh(job: Job) -> None:
    job.wait_for_ranks()
    job.wait_a_moment()
    _kill([pid for pid, line in job.processes().items() if line.startswith("ssh ")][:1])


def block_data(job: Job) -> None:
    """A firewall drops everything but ssh, for good in this start; it is gone when the run starts again."""
    job.wait_for_checkpoint()
    table = "add table inet f; add chain inet f in { type filter hook input priority 0; }"
    rules = ("tcp dport 22 accept", "tcp sport 22 accept", "meta l4proto tcp ip saddr 10.123.0.0/24 drop")
    added = "; ".join((table, *(f"add rule inet f in {rule}" for rule in rules)))
    subprocess.run(job.place.inside("h2", "nft", added), check=True)
    try:
        LAUNCH.wait_until(
            lambda: "has not been answered" in job.run.err or not job.is_running, 60, "word of the blocked port"
        )
    finally:
        subprocess.run(job.place.inside("h2", "nft", "delete table inet f"), check=True)


@dataclass(frozen=True)
class Kind:
    """A fault, and what must be seen of it."""

    fault: Callable[[Job], None]
    report: str = ""
    """Pattern of which a match must be on stderr, unless the run had ended before."""
    on_hosts: bool = False


KINDS = {
    "kill -9 of a rank": Kind(kill_rank(signal.SIGKILL, lambda ranks: ranks[-1:]), "ended with signal SIGKILL"),
    "kill -9 of rank 0": Kind(kill_rank(signal.SIGKILL, lambda ranks: ranks[:1]), "ended with signal SIGKILL"),
    "kill -9 of all ranks at once": Kind(kill_rank(signal.SIGKILL, list), "ended with signal SIGKILL"),
    "SIGSEGV in a rank": Kind(kill_rank(signal.SIGSEGV, lambda ranks: ranks[-1:]), "ended with signal SIGSEGV"),
    "SIGABRT in a rank": Kind(kill_rank(signal.SIGABRT, lambda ranks: ranks[-1:]), "ended with signal SIGABRT"),
    "SIGTERM to a rank": Kind(kill_rank(signal.SIGTERM, lambda ranks: ranks[-1:]), "can be resumed|signal SIGTERM"),
    "kill -9 of a rank during a save": Kind(kill_while_saving, "ended with signal SIGKILL"),
    "a rank stopped for 1 to 6 s": Kind(pause_a_rank),
    "a rank at half speed": Kind(slow_rank),
    "kill -9 of the agent": Kind(kill_agent, "was lost: its agent ended|ended with"),
    "kill -9 of the orphan killer": Kind(kill_orphan_killer),
    "kill -9 of the driver": Kind(signal_driver(signal.SIGKILL)),
    "SIGTERM to the driver": Kind(signal_driver(signal.SIGTERM), "SIGTERM: ending the ranks"),
    "SIGUSR1 to the driver": Kind(signal_driver(signal.SIGUSR1), "can be resumed|SIGUSR1"),
    "Ctrl-C": Kind(signal_driver(signal.SIGINT), "Ctrl-C: SIGINT"),
    "a disk that is full for 0.5 to 4 s": Kind(fill_disk),
    "a disk that is read-only for 0.5 to 3 s": Kind(read_only_disk),
    "a rank that may open no more files": Kind(no_more_files, "Too many open files|ended with"),
    "a bit flipped in the newest checkpoint": Kind(damage(flip_a_bit), "ended with signal SIGKILL"),
    "a truncated file in the newest checkpoint": Kind(damage(truncate_a_file), "ended with signal SIGKILL"),
    "a file missing from the newest checkpoint": Kind(damage(remove_a_file), "ended with signal SIGKILL"),
    "a manifest of random bytes": Kind(damage(scramble_manifest), "ended with signal SIGKILL"),
    "a hostile .safetensors in the newest checkpoint": Kind(damage(hostile_safetensors), "ended with signal SIGKILL"),
    "strangers that send garbage": Kind(strangers(lambda rng: rng.randbytes(rng.randrange(1, 300)))),
    "silent strangers": Kind(strangers(lambda rng: b"")),
    "slow strangers": Kind(strangers(lambda rng: rng.randbytes(1))),
    "a stranger in the store": Kind(stranger_in_store),
    "a hostile agent's message": Kind(hostile_agent_message, "lost|agent"),
    "a second run in the same folder": Kind(second_job),
    "the leftovers of another save": Kind(leftover_save, "ended with signal SIGKILL"),
    "a cable pulled for 1 to 10 s": Kind(outage("cut", "mend", 1, 10), on_hosts=True),
    "packets that vanish for 1 to 10 s": Kind(outage("blackhole", "unblackhole", 1, 10), on_hosts=True),
    "kill -9 of an ssh": Kind(kill_ssh, "was lost", on_hosts=True),
    "kill -9 of an agent on another host": Kind(kill_agent, "was lost|ended with", on_hosts=True),
    "a firewall that drops all but ssh": Kind(block_data, "has not been answered", on_hosts=True),
}


# ---- trials ----


@dataclass
class Tally:
    """Outcomes of one kind."""

    num_trials: int = 0
    num_missed: int = 0
    """The run had ended before the fault."""
    seconds: list[float] = field(default_factory=list)
    """From the fault to the end of the run, restarts included."""
    failures: list[str] = field(default_factory=list)


def curve(run_dir: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows}


def finish(job: Job) -> None:
    """Waits for the end; a run that was ended by a signal, or lost its driver, is resumed by hand as its user would."""
    for _ in range(4):
        code = job.run.wait(LONGEST_S)
        if code == 0:
            return
        LAUNCH.assert_nothing_is_left(job.place.processes)
        job.earlier_err += job.run.err
        job.start("--resume") if job.checkpoints() else job.start("--overwrite")
    raise AssertionError(f"not finished after four starts by hand, the last with exit code {code}")


def check(job: Job, kind: Kind, expected: dict[int, float], was_met: bool) -> None:
    LAUNCH.assert_nothing_is_left(job.place.processes)
    assert "Traceback (most recent call last)" not in job.err or kind.report, "a traceback where nothing failed"
    assert not (was_met and kind.report) or re.search(kind.report, job.err), f"no {kind.report!r} on stderr"
    found = curve(job.disk / "run")
    different = sorted(step for step in expected.keys() | found.keys() if expected.get(step) != found.get(step))
    assert not different, f"the curve differs at steps {different[:5]}"
    verify = [sys.executable, "-c", _VERIFY, str(job.disk / "run" / "checkpoints")]
    assert subprocess.run(verify, check=False).returncode == 0, "the last checkpoint is not whole"


_VERIFY = """
import sys
from pathlib import Path
from megaclass.checkpoint.load import newest_whole
found, why_not = newest_whole(Path(sys.argv[1]))
sys.exit(found is None or found.name != "step-000000060" or bool(why_not))
"""


def trial(kind: Kind, job: Job, expected: dict[int, float], tally: Tally) -> None:
    tally.num_trials += 1
    job.start()
    try:
        kind.fault(job)
        was_met = job.is_running or job.run.process.returncode != 0
        tally.num_missed += not was_met
        begun = time.monotonic()
        finish(job)
        tally.seconds.append(time.monotonic() - begun)
        check(job, kind, expected, was_met)
    except (AssertionError, OSError, subprocess.SubprocessError) as error:
        tally.failures.append(f"{error}\n{job.err[-1500:]}")
        print(f"--- failed: {error}\n{job.err[-1500:]}", file=sys.stderr, flush=True)
        for run in job.place.runs:
            if run.process.poll() is None:
                run.process.kill()
        _kill(list(job.processes()))


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="disk-", dir=folder))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@contextlib.contextmanager
def own_folder(folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="disk-", dir=folder) as place:
        yield Path(place)


def soak(
    kinds: dict[str, Kind], rounds: int, seed: int, on_trial: Callable[[dict[str, Tally]], None]
) -> dict[str, Tally]:
    """Every kind once per round, in random order."""
    rng = random.Random(seed)
    tallies: dict[str, Tally] = defaultdict(Tally)
    folder = Path(tempfile.mkdtemp(prefix="megaclass-soak-"))
    bed = LAUNCH.Bed(folder / "bed") if any(kind.on_hosts for kind in kinds.values()) else None
    if bed is not None:
        bed.folder.mkdir()
        bed.start_in_background("up", "2")
        (bed.folder / "h3").mkdir()
        (bed.folder / "h3" / "outer.pid").write_text("0")
    try:
        with small_disk(folder) as disk:
            undisturbed = Job(LAUNCH.Here(), ("-np", "2"), disk, folder / "data", rng)
            undisturbed.start()
            assert undisturbed.run.wait(LONGEST_S) == 0, undisturbed.run.story()
            expected = curve(disk / "run")
        for _ in range(rounds):
            for name in rng.sample(list(kinds), len(kinds)):
                kind = kinds[name]
                place = bed if kind.on_hosts else LAUNCH.Here()
                hosts = ("-H", "h1:1,h2:1") if kind.on_hosts else ("-np", "2")
                if bed is not None:
                    bed.runs = []
                # A folder of its own for each trial, with the data that is there already. Hosts do not see new mounts.
                with own_folder(folder) if kind.on_hosts else small_disk(folder) as disk:
                    trial(kind, Job(place, hosts, disk, folder / "data", rng), expected, tallies[name])
                on_trial(tallies)
    finally:
        if bed is not None:
            bed.start_in_background("down")
        shutil.rmtree(folder, ignore_errors=True)
    return tallies


def table(tallies: dict[str, Tally], begun: float) -> str:
    import torch

    import megaclass

    num_trials = sum(tally.num_trials for tally in tallies.values())
    num_failures = sum(len(tally.failures) for tally in tallies.values())
    lines = [
        f"{time.strftime('%Y-%m-%d', time.gmtime(begun))}, {platform.machine()}, {os.cpu_count()} CPU cores, Linux "
        f"{platform.release()}, Python {platform.python_version()}, torch {torch.__version__}, megaclass "
        f"{megaclass.__version__}. {len(tallies)} kinds of fault, {num_trials} trials in {(time.time() - begun) / 60:.0f} "
        f"minutes, {num_failures} failed.",
        "",
        "| fault | trials | passed | came too late | median s to the end | slowest |",
        "|---|---|---|---|---|---|",
    ]
    for name, tally in sorted(tallies.items()):
        times = f"{statistics.median(tally.seconds):.0f} | {max(tally.seconds):.0f}" if tally.seconds else "— | —"
        passed = tally.num_trials - len(tally.failures)
        lines.append(f"| {name} | {tally.num_trials} | {passed} | {tally.num_missed} | {times} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--kinds", nargs="+", help="faults whose names contain one of these; all by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--local", action="store_true", help="leave out the faults that need several hosts")
    parser.add_argument("--out", type=Path, help="file for the table, rewritten after every trial")
    given = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("small disks and hosts need root")
    kinds = {
        name: kind
        for name, kind in KINDS.items()
        if not (given.local and kind.on_hosts) and (not given.kinds or any(part in name for part in given.kinds))
    }
    begun = time.time()

    def on_trial(tallies: dict[str, Tally]) -> None:
        if given.out:
            given.out.write_text(table(tallies, begun))

    tallies = soak(kinds, given.rounds, given.seed, on_trial)
    print(table(tallies, begun))
    return int(any(tally.failures for tally in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
