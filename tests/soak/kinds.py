"""The catalogue: every fault and attack, and what must be seen of it."""

import contextlib
import os
import pickle
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from jobs import NUM_STEPS, Job, environment, kill, parent


def kill_rank(number: int, which: Callable[[list[int]], list[int]]) -> Callable[[Job], None]:
    """At any moment from the start of the ranks on: while they import, join, train or save."""

    def fault(job: Job) -> None:
        job.wait_for_moment()
        job.strike()
        kill(which(job.ranks()), number)

    return fault


def kill_while_saving(job: Job) -> None:
    folder = job.run_dir / "checkpoints"
    job.wait(lambda: list(folder.glob(".*.partial")), 180, "a save")
    time.sleep(job.rng.uniform(0, 0.02))
    job.strike()
    kill(job.ranks()[-1:], signal.SIGKILL)


def pause_a_rank(job: Job) -> None:
    job.wait_for_random_step(1)
    pids = job.ranks()[-1:]
    job.strike()
    kill(pids, signal.SIGSTOP)
    time.sleep(job.rng.uniform(1, 6))
    kill(pids, signal.SIGCONT)


def slow_rank(job: Job) -> None:
    job.wait_for_ranks()
    job.strike()
    for _ in range(20):
        pids = job.ranks()[-1:]
        kill(pids, signal.SIGSTOP)
        time.sleep(0.1)
        kill(pids, signal.SIGCONT)
        time.sleep(0.1)


def kill_agent(job: Job) -> None:
    job.wait_for_moment()
    job.strike()
    kill(job.pids_with("megaclass_launch.agent.agent")[:1], signal.SIGKILL)


def _orphan_killers(job: Job) -> list[int]:
    """The watchers of the agent, whose command lines do not name megaclass."""
    agents = set(job.pids_with("megaclass_launch.agent.agent"))
    return [pid for pid, line in job.processes().items() if parent(pid) in agents and " -I -S - " in line]


def kill_orphan_killer(job: Job) -> None:
    """The run must not need it."""
    job.wait_for_moment()
    job.strike()
    kill(_orphan_killers(job)[:1], signal.SIGKILL)


def kill_all_watchers(job: Job) -> None:
    """Driver, agent and both orphan killers in the same instant: the kernel must end the ranks behind their shells."""
    job.wait_for_moment()
    job.strike()
    pids = [*job.pids_with("megaclass_launch.agent.agent"), *_orphan_killers(job)]
    pids += [job.run.pid] if job.is_running else []
    kill(pids, signal.SIGSTOP)
    kill(pids, signal.SIGKILL)


def signal_driver(number: int) -> Callable[[Job], None]:
    def fault(job: Job) -> None:
        job.wait_for_moment()
        job.strike()
        if job.is_running:
            job.run.send(number)

    return fault


def fill_disk(job: Job) -> None:
    job.wait_for_checkpoint()
    job.strike()
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
    job.strike()
    # Refused while a file is open for writing: a disk that goes read-only by itself has no such manners.
    remount = ["mount", "-o", "remount,ro", str(job.disk)]
    for _ in range(200):
        if subprocess.run(remount, capture_output=True, check=False).returncode == 0:
            break
        time.sleep(0.01)
    time.sleep(job.rng.uniform(0.5, 3))
    subprocess.run(["mount", "-o", "remount,rw", str(job.disk)], capture_output=True, check=False)


def no_more_files(job: Job) -> None:
    job.wait_for_checkpoint()
    job.strike()
    for pid in job.ranks()[-1:]:
        subprocess.run(["prlimit", f"--pid={pid}", "--nofile=3:3"], check=False, capture_output=True)


def damage(how: Callable[[Path, random.Random], None]) -> Callable[[Job], None]:
    """A file of the newest checkpoint is damaged, then all ranks killed: an older checkpoint must be used."""

    def fault(job: Job) -> None:
        job.wait(lambda: len(job.checkpoints()) > 1, 180, "the second checkpoint")
        ranks = job.ranks()
        kill(ranks, signal.SIGSTOP)
        job.strike()
        if job.checkpoints():
            how(job.checkpoints()[-1], job.rng)
        kill(ranks, signal.SIGKILL)

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


# ---- attacks ----


class _Touch:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self._path}",)


def owned(job: Job) -> Path:
    """The file that appears when an attack has run code."""
    return job.disk / "owned"


def hostile_bin(job: Job) -> None:
    """The pairs on which the model is evaluated become a program, a request for memory, or noise."""
    job.wait_for_ranks()
    job.strike()
    # A bytes object of 2 GiB in a pickle of 15 bytes; a program; random bytes.
    request = b"\x80\x04\x8e" + struct.pack("<Q", 2 << 30) + b"." * 4
    program = pickle.dumps(([_Touch(owned(job))], [True]))
    content = job.rng.choice([request, program, job.rng.randbytes(job.rng.randrange(1, 5000))])
    (job.data / "verification.bin").write_bytes(content)


def strangers(data: Callable[[Job], bytes]) -> Callable[[Job], None]:
    """Connects again and again to every port at which a rank listens, and sends `data` on all connections so far."""

    def fault(job: Job) -> None:
        job.wait_for_ranks()
        held: list[socket.socket] = []
        # Counted from the first connection: ranks on a busy machine import for a minute before they listen.
        while job.is_running and len(held) < 60 and (not held or time.monotonic() < job.struck_at + 20):
            for address, port in _listening(job.ranks()):
                with contextlib.suppress(OSError):
                    held.append(socket.create_connection((address, port), timeout=0.2))
                    job.strike()
            for connection in held:
                with contextlib.suppress(OSError):
                    connection.send(data(job))
            time.sleep(0.2)
        for connection in held:
            connection.close()

    return fault


def forged(job: Job) -> bytes:
    """A proof of hvd's connections with a wrong HMAC, a pickle that runs code, or random bytes."""
    proof = job.rng.randbytes(32) + struct.pack("<I", job.rng.randrange(3)) + job.rng.randbytes(32)
    program = pickle.dumps(_Touch(owned(job)))
    return job.rng.choice([proof + program, struct.pack("<IIB", len(program), 0, 0) + program, job.rng.randbytes(100)])


def stranger_in_store(job: Job) -> None:
    """Another process joins the store of the ranks as a client, and writes and deletes keys."""
    ranks = job.wait_for_ranks()
    variables = environment(ranks[0]) if ranks else {}
    port = variables.get("MEGACLASS_STORE_PORT") or variables.get("MASTER_PORT", "0")
    client = [sys.executable, "-c", _STORE_CLIENT, port]
    with subprocess.Popen(client, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        if process.stdout.readline() == b"in\n":
            job.strike()


_STORE_CLIENT = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20))
store.set("stranger", "x")
print("in", flush=True)
for number in range(200):
    store.set(f"stranger {number}", "x" * 1000)
    store.delete_key(f"stranger {number // 2}")
    time.sleep(0.01)
"""


def hostile_agent_message(job: Job) -> None:
    """Bytes that no agent sends, in the agent's own stream to the driver: the host must count as lost, nothing more."""
    job.wait_for_random_step(1)
    job.strike()
    for pid in job.pids_with("megaclass_launch.agent.agent")[:1]:
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
    job.strike()
    kill(ranks, signal.SIGSTOP)
    try:
        second = job.place.start(*job.command())
        assert second.wait(240) == 2, second.story()
    finally:
        kill(ranks, signal.SIGCONT)


def leftover_save(job: Job) -> None:
    """What a save that never finished left, under the name that a save of this job may have."""
    job.wait_for_checkpoint()
    job.strike()
    folder = job.run_dir / "checkpoints" / f".step-{job.rng.randrange(NUM_STEPS):09d}.{'0' * 14}.partial"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rank-00000.json").write_bytes(job.rng.randbytes(100))
    kill(job.ranks()[:1], signal.SIGKILL)


# ---- on several hosts ----


def outage(how: str, back: str, shortest_s: float, longest_s: float) -> Callable[[Job], None]:
    def fault(job: Job) -> None:
        job.wait_for_moment()
        job.strike()
        job.place.do(how, "h2")
        try:
            time.sleep(job.rng.uniform(shortest_s, longest_s))
        finally:
            job.place.do(back, "h2")

    return fault


def kill_ssh(job: Job) -> None:
    job.wait_for_moment()
    job.strike()
    kill([pid for pid, line in job.processes().items() if line.startswith("ssh ")][:1], signal.SIGKILL)


def block_data(job: Job) -> None:
    """A firewall drops everything but ssh, for good in this start; it is gone when the run starts again."""
    job.wait_for_random_step(1)
    job.strike()
    table = "add table inet f; add chain inet f in { type filter hook input priority 0; }"
    rules = ("tcp dport 22 accept", "tcp sport 22 accept", "meta l4proto tcp ip saddr 10.123.0.0/24 drop")
    added = "; ".join((table, *(f"add rule inet f in {rule}" for rule in rules)))
    subprocess.run(job.place.inside("h2", "nft", added), check=True)
    try:
        job.wait(lambda: "has not been answered" in job.run.err, 60, "word of the blocked port")
    finally:
        subprocess.run(job.place.inside("h2", "nft", "delete table inet f"), check=True)


@dataclass(frozen=True)
class Kind:
    """A fault, and what must be seen of it."""

    fault: Callable[[Job], None]
    report: str = ""
    """Pattern of which a match must be in the output, unless the run had ended before."""
    on_hosts: bool = False
    is_horovod: bool = False
    """A job with Horovod's API: a curve, but no checkpoints."""
    is_behind_shell: bool = False
    has_own_data: bool = False


_LAST = slice(-1, None)
_KILLED = "ended with signal SIGKILL"
KINDS = {
    "kill -9 of a rank": Kind(kill_rank(signal.SIGKILL, lambda ranks: ranks[_LAST]), _KILLED),
    "kill -9 of rank 0": Kind(kill_rank(signal.SIGKILL, lambda ranks: ranks[:1]), _KILLED),
    "kill -9 of all ranks at once": Kind(kill_rank(signal.SIGKILL, list), _KILLED),
    "SIGSEGV in a rank": Kind(kill_rank(signal.SIGSEGV, lambda ranks: ranks[_LAST]), "ended with signal SIGSEGV"),
    "SIGABRT in a rank": Kind(kill_rank(signal.SIGABRT, lambda ranks: ranks[_LAST]), "ended with signal SIGABRT"),
    "SIGTERM to a rank": Kind(kill_rank(signal.SIGTERM, lambda ranks: ranks[_LAST]), "can be resumed|signal SIGTERM"),
    "kill -9 of a rank during a save": Kind(kill_while_saving, _KILLED),
    "a rank stopped for 1 to 6 s": Kind(pause_a_rank),
    "a rank at half speed": Kind(slow_rank),
    "kill -9 of the agent": Kind(kill_agent, "was lost: its agent ended|ended with"),
    "kill -9 of the orphan killer": Kind(kill_orphan_killer),
    "kill -9 of driver, agent and orphan killers at once": Kind(kill_all_watchers, is_behind_shell=True),
    "kill -9 of the driver": Kind(signal_driver(signal.SIGKILL)),
    "SIGTERM to the driver": Kind(signal_driver(signal.SIGTERM), "SIGTERM: ending the ranks"),
    "SIGUSR1 to the driver": Kind(signal_driver(signal.SIGUSR1), "can be resumed|SIGUSR1"),
    "Ctrl-C": Kind(signal_driver(signal.SIGINT), "Ctrl-C: SIGINT"),
    "a disk that is full for 0.5 to 4 s": Kind(fill_disk),
    "a disk that is read-only for 0.5 to 3 s": Kind(read_only_disk),
    "a rank that may open no more files": Kind(no_more_files, "Too many open files|ended with"),
    "a bit flipped in the newest checkpoint": Kind(damage(flip_a_bit), _KILLED),
    "a truncated file in the newest checkpoint": Kind(damage(truncate_a_file), _KILLED),
    "a file missing from the newest checkpoint": Kind(damage(remove_a_file), _KILLED),
    "a manifest of random bytes": Kind(damage(scramble_manifest), _KILLED),
    "a hostile .safetensors in the newest checkpoint": Kind(damage(hostile_safetensors), _KILLED),
    "a hostile .bin": Kind(hostile_bin, r"pairs .*verification\.bin", has_own_data=True),
    "strangers that send garbage": Kind(strangers(lambda job: job.rng.randbytes(job.rng.randrange(1, 300)))),
    "silent strangers": Kind(strangers(lambda job: b"")),
    "slow strangers": Kind(strangers(lambda job: job.rng.randbytes(1))),
    "forged proofs and pickles to an hvd job": Kind(strangers(forged), is_horovod=True),
    "kill -9 of a rank of an hvd job": Kind(
        kill_rank(signal.SIGKILL, lambda ranks: ranks[_LAST]), _KILLED, is_horovod=True
    ),
    "a stranger in the store": Kind(stranger_in_store),
    "a hostile agent's message": Kind(hostile_agent_message, "lost|agent"),
    "a second run in the same folder": Kind(second_job),
    "the leftovers of another save": Kind(leftover_save, _KILLED),
    "a cable pulled for 1 to 10 s": Kind(outage("cut", "mend", 1, 10), on_hosts=True),
    "packets that vanish for 1 to 10 s": Kind(outage("blackhole", "unblackhole", 1, 10), on_hosts=True),
    "kill -9 of an ssh": Kind(kill_ssh, "was lost", on_hosts=True),
    "kill -9 of an agent on another host": Kind(kill_agent, "was lost|ended with", on_hosts=True),
    "a firewall that drops all but ssh": Kind(block_data, "has not been answered", on_hosts=True),
}
