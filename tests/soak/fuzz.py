"""Every reader of files, lists and messages under 100,000 mutations of each kind of input.

    python tests/soak/fuzz.py [--count 100000] [--processes N] [--kinds train.rec …] [--minutes M] [--results R] [--out FILE]

A mutation must be accepted or refused by an error of one line. Anything else fails: another exception (a traceback for the
user), a crash of native code, more than 60 s, or more than 512 MiB of memory. Mutations are read by processes of their own,
some hundreds to thousands in each; a process that dies is replaced, and its mutation is counted as a crash.

With --results (JSON lines, appended) the script can be stopped and started again: parts that are in that file are not repeated.
A mutation depends on --seed, the kind and its number only. Needs torch, numpy, Pillow, simplejpeg, safetensors, onnx,
onnxruntime and pytest.
"""

import os

# Before numpy and torch are imported: each process computes on one core.
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")

import argparse
import json
import math
import multiprocessing
import platform
import resource
import signal
import struct
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

MODULES = ("tests.megaclass.data.test_fuzz", "tests.megaclass.evaluation.test_fuzz", "tests.test_fuzz_lists")
PART = 1_000
ADDRESS_SPACE = 4 * 2**30
"""Beyond what a process has at its start. More gives a MemoryError, which is a traceback."""


@dataclass(frozen=True)
class Part:
    """Consecutive mutations of one kind, read by one process unless it dies."""

    kind: str
    seed: int
    first: int
    last: int

    @property
    def key(self) -> tuple[str, int, int, int]:
        return self.kind, self.seed, self.first, self.last


@dataclass
class Result:
    """Outcome of a part, one line of --results."""

    kind: str
    seed: int
    first: int
    last: int
    refused: int = 0
    accepted: int = 0
    tracebacks: list[str] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)
    grown_bytes: int = 0
    cpu_s: float = 0.0

    @property
    def key(self) -> tuple[str, int, int, int]:
        return self.kind, self.seed, self.first, self.last


# ---- in the process that reads ----


def all_kinds() -> dict[str, str]:
    """Module by kind."""
    import importlib

    return {name: module for module in MODULES for name in importlib.import_module(module).NAMES}


def read_part(part: Part, module: str, progress: str, answer: Connection) -> None:
    import importlib

    from tests.fuzzing import fuzz

    # Decoders print warnings, and crashes must leave no core file.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESS_SPACE, used + ADDRESS_SPACE))
    file = os.open(progress, os.O_WRONLY)
    counts = fuzz(
        importlib.import_module(module).make_target,
        part.kind,
        range(part.first, part.last),
        part.seed,
        before_each=lambda number: os.pwrite(file, struct.pack("<q", number), 0),
    )
    answer.send({**asdict(counts), "cpu_s": time.process_time()})


# ---- in the process that counts ----


class Reader:
    """A process that reads a part, and again what is left of it after a crash."""

    def __init__(
        self, part: Part, module: str, folder: Path, context: multiprocessing.context.ForkServerContext
    ) -> None:
        self.part, self._module, self._context = part, module, context
        self.result = Result(part.kind, part.seed, part.first, part.last)
        self._progress = folder / f"{os.urandom(8).hex()}.progress"
        self._start(part.first)

    def _start(self, first: int) -> None:
        self._first = first
        self._progress.write_bytes(struct.pack("<q", first))
        ours, theirs = self._context.Pipe(duplex=False)
        rest = Part(self.part.kind, self.part.seed, first, self.part.last)
        self.process: BaseProcess = self._context.Process(
            target=read_part, args=(rest, self._module, str(self._progress), theirs), daemon=True
        )
        self.process.start()
        theirs.close()
        self.answer = ours

    def is_done(self) -> bool:
        """Called when the process has answered or died; starts another one for the mutations after a crash."""
        try:
            counts = self.answer.recv()
        except EOFError:
            counts = None
        self.process.join()
        self.answer.close()
        result = self.result
        if counts is not None:
            result.refused += counts["refused"]
            result.accepted += counts["accepted"]
            result.tracebacks += counts["tracebacks"]
            result.grown_bytes = max(result.grown_bytes, counts["grown_bytes"])
            result.cpu_s += counts["cpu_s"]
        else:
            # The outcomes of the mutations before the crash died with the process. They ended well enough to go on, so they
            # are read again without the one that crashed.
            (number,) = struct.unpack("<q", self._progress.read_bytes())
            code = self.process.exitcode or 0
            what = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            result.crashes.append(f"mutation {number} of {self.part.kind}, seed {self.part.seed}: {what}")
            self._count_again(self._first, number)
            if number + 1 < self.part.last:
                self._start(number + 1)
                return False
        self._progress.unlink()
        return True

    def _count_again(self, first: int, last: int) -> None:
        if first == last:
            return
        again = Reader.__new__(Reader)
        again.__dict__.update(self.__dict__)
        again.part = Part(self.part.kind, self.part.seed, first, last)
        again.result = self.result
        again._progress = self._progress.with_suffix(".again")
        again._start(first)
        while not again.is_done():
            pass


def parts(kinds: list[str], count: int, seed: int, done: set[tuple[str, int, int, int]]) -> Iterator[Part]:
    """Kinds in turn, so a run that is stopped early has read some of each."""
    for number in range(math.ceil(count / PART)):
        for kind in kinds:
            part = Part(kind, seed, number * PART, min(count, (number + 1) * PART))
            if part.key not in done:
                yield part


def read_results(path: Path | None) -> list[Result]:
    if path is None or not path.exists():
        return []
    return [Result(**json.loads(line)) for line in path.read_text().splitlines()]


def table(results: list[Result], processes: int) -> str:
    import numpy
    import PIL
    import torch

    by_kind: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_kind[result.kind].append(result)
    total = sum(result.refused + result.accepted + len(result.tracebacks) + len(result.crashes) for result in results)
    lines = [
        f"{time.strftime('%Y-%m-%d', time.gmtime())}, {platform.machine()}, {os.cpu_count()} CPU cores, {processes} processes, "
        f"Linux {platform.release()}, Python {platform.python_version()}, torch {torch.__version__}, numpy "
        f"{numpy.__version__}, Pillow {PIL.__version__}. {len(by_kind)} kinds, {total:,} mutations in "
        f"{sum(result.cpu_s for result in results) / 60:,.0f} minutes of CPU time.",
        "",
        "| kind | mutations | clean refusals | accepted | tracebacks | native crashes | most memory, MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, some in by_kind.items():
        refused, accepted = sum(result.refused for result in some), sum(result.accepted for result in some)
        tracebacks, crashes = (
            sum(len(result.tracebacks) for result in some),
            sum(len(result.crashes) for result in some),
        )
        grown = max(result.grown_bytes for result in some) >> 20
        num = refused + accepted + tracebacks + crashes
        lines.append(f"| {kind} | {num:,} | {refused:,} | {accepted:,} | {tracebacks} | {crashes} | {grown} |")
    return "\n".join(lines) + "\n"


HEADER = """# Fuzzing: mutated files, lists and messages

tests/soak/fuzz.py, which `make soak` runs, writes this file. Each mutation must be accepted or refused by an error of one line;
a refusal names the file and the reason. Some whole files are refused as well, because their weights fit no known backbone.

"""


def run(waiting: Iterator[Part], modules: dict[str, str], processes: int, ends_at: float) -> Iterator[Result]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(MODULES))
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=place, prefix="fuzz-") as folder:
        readers: dict[Connection, Reader] = {}
        while True:
            while len(readers) < processes and time.monotonic() < ends_at and (part := next(waiting, None)):
                reader = Reader(part, modules[part.kind], Path(folder), context)
                readers[reader.answer] = reader
            if not readers:
                return
            for answer in wait(list(readers)):
                reader = readers.pop(answer)  # type: ignore[arg-type]
                if reader.is_done():
                    yield reader.result
                else:
                    readers[reader.answer] = reader


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", help="kinds whose names contain one of these; all by default")
    parser.add_argument("--count", type=int, default=100_000, help="mutations per kind (100000)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="processes at a time (one per core)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no part after this time")
    parser.add_argument("--results", type=Path, help="JSON lines of all parts; what is in it is not repeated")
    parser.add_argument("--out", type=Path, help="file for the table")
    given = parser.parse_args()
    ends_at = time.monotonic() + 60 * given.minutes
    modules = all_kinds()
    kinds = [kind for kind in modules if not given.kinds or any(part in kind for part in given.kinds)]
    if not kinds:
        parser.error(f"no kind contains {' or '.join(given.kinds)}: there are {', '.join(modules)}")
    results = read_results(given.results)
    waiting = list(parts(kinds, given.count, given.seed, {result.key for result in results}))
    number, shown_at = 0, 0.0
    for number, result in enumerate(run(iter(waiting), modules, given.processes, ends_at), start=1):
        results.append(result)
        for text in [*result.tracebacks[:2], *result.crashes]:
            print(f"--- {text}", file=sys.stderr, flush=True)
        if given.results:
            with given.results.open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
        if time.monotonic() - shown_at > 10:
            shown_at = time.monotonic()
            print(f"{number} of {len(waiting)} parts", file=sys.stderr, flush=True)
            if given.out:
                given.out.write_text(HEADER + table(results, given.processes))
    text = table(results, given.processes)
    print(text)
    if given.out:
        given.out.write_text(HEADER + text)
    has_failed = any(result.tracebacks or result.crashes or result.grown_bytes >= 2**29 for result in results)
    if number < len(waiting):
        print(f"{len(waiting) - number} parts are left after {given.minutes:g} minutes.", file=sys.stderr)
    return 1 if has_failed else 3 if number < len(waiting) else 0


if __name__ == "__main__":
    sys.exit(main())
