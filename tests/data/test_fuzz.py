"""Readers under fire: any bytes give records or a DataError, soon and in little memory; never a crash or a hang."""

import io
import multiprocessing
import resource
import signal
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from megaclass.data.decode import decode_image, decode_into, image_dimensions
from megaclass.data.pair_file import read_pairs
from megaclass.data.sources.open_source import open_source
from megaclass.data.synthetic.faces import draw_faces
from megaclass.data.synthetic.synthesize import synthesize
from megaclass.data.tools.verify import verify
from megaclass.errors import DataError

SOAK_MUTATIONS = 6_000
SAMPLE_MUTATIONS = 30
MAX_SECONDS = 10
MAX_BYTES = 2**29
INTERESTING = [
    b"\0\0\0\0",
    b"\xff\xff\xff\xff",
    b"\xff\xff\xff\x7f",
    b"\0\0\0\x80",
    b"\x0a\x23\xd7\xce",
    b"\xff\xd8\xff\xe0",
    b"99999999",
]


@dataclass(frozen=True)
class Target:
    """A file that is mutated, and what reads it."""

    name: str
    whole: bytes
    attempt: Callable[[bytes], None]
    """Gets the mutated bytes."""


def mutate(whole: bytes, rng: np.random.Generator) -> bytes:
    """One to four changes: bits, bytes, telling numbers, cuts, repetitions, swaps."""
    content = bytearray(whole)
    for _ in range(int(rng.integers(1, 5))):
        if not content:
            break
        # Headers are where the danger is: half of the changes go to the first bytes.
        reach = len(content) if rng.random() < 0.5 else min(len(content), 128)
        at, length = int(rng.integers(reach)), int(rng.integers(1, 32))
        kind = int(rng.integers(7))
        if kind == 0:
            content[at] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            content[at] = int(rng.integers(256))
        elif kind == 2:
            chosen = INTERESTING[int(rng.integers(len(INTERESTING)))]
            content[at : at + len(chosen)] = chosen
        elif kind == 3:
            del content[at : at + length]
        elif kind == 4:
            content[at:at] = content[at : at + length]
        elif kind == 5:
            content[at : at + length] = rng.integers(0, 256, length, dtype=np.uint8).tobytes()
        else:
            del content[at:]
    return bytes(content)


def make_targets(folder: Path) -> list[Target]:
    """Real files of every format that is read."""
    return [*_record_targets(folder / "rec"), *_other_targets(folder), *_image_targets()]


def try_once(target: Target, content: bytes) -> bool:
    """Whether the reader took it; a DataError is the other good end."""
    with _alarm():
        try:
            target.attempt(content)
        except DataError:
            return False
    return True


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _record_targets(folder: Path) -> list[Target]:
    synthesize(folder, num_identities=3, images_per_identity=2, image_size=16, num_pairs=2, num_processes=1)
    read_all(folder)
    names = ["train.rec", "train.idx", "property", "train.idx.cache", "train.rec.labels"]
    wholes = {name: (folder / name).read_bytes() for name in names}

    def attempt_with(name: str, read: Callable[[Path], None]) -> Callable[[bytes], None]:
        def attempt(content: bytes) -> None:
            try:
                (folder / name).write_bytes(content)
                read(folder)
            finally:
                for other in names:
                    (folder / other).unlink(missing_ok=True)
                    if not other.startswith("train.rec.l") and not other.endswith(".cache"):
                        (folder / other).write_bytes(wholes[other])

        return attempt

    def attempt_cache(name: str, *, is_header: bool) -> Callable[[bytes], None]:
        def attempt(content: bytes) -> None:
            read_all(folder)
            fresh = (folder / name).read_bytes()
            (folder / name).write_bytes(
                content.ljust(4096)[:4096] + fresh[4096:] if is_header else fresh[:4096] + content
            )
            read_all(folder)

        return attempt

    targets = [Target(name, wholes[name], attempt_with(name, read_all)) for name in names[:3]]
    for name in names[3:]:
        targets.append(Target(name, wholes[name][4096:], attempt_cache(name, is_header=False)))
        targets.append(Target(f"{name}, header", wholes[name][:512], attempt_cache(name, is_header=True)))
    targets.append(Target("train.rec, verified", wholes["train.rec"], attempt_with("train.rec", lambda f: _verify(f))))
    targets.append(Target("train.idx, verified", wholes["train.idx"], attempt_with("train.idx", lambda f: _verify(f))))
    return targets


def _other_targets(folder: Path) -> list[Target]:
    image = encoded("JPEG")
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, content in (
            ("a.jpg", image),
            ("a.cls", b"3"),
            ("long" * 40 + ".jpg", image),
            ("long" * 40 + ".cls", b"4"),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    for name in ("tar", "list"):
        (folder / name).mkdir()
    (folder / "list" / "a.jpg").write_bytes(image)

    def at(path: Path, read: Callable[[Path], None]) -> Callable[[bytes], None]:
        def attempt(content: bytes) -> None:
            path.write_bytes(content)
            read(path)

        return attempt

    pairs = (folder / "rec" / "verification.bin").read_bytes()
    return [
        Target("a.tar", stream.getvalue()[:6144], at(folder / "tar" / "a.tar", read_all)),
        Target("label.txt", b"a.jpg\t0\na.jpg\t17\n", at(folder / "list" / "label.txt", read_all)),
        Target("verification.bin", pairs, at(folder / "a.bin", read_pairs)),
    ]


def _image_targets() -> list[Target]:
    out = np.empty((24, 24, 3), dtype=np.uint8)

    def attempt(content: bytes) -> None:
        for fit in ("pad", "crop", "squash"):
            with suppress(DataError):
                decode_into(out, content, "fuzzed image", fit)
        with suppress(DataError):
            image_dimensions(content, "fuzzed image")
        decode_image(content, "fuzzed image")

    # Lying on its side as EXIF says, and of 16 bits: paths of their own through the decoder.
    exif = Image.Exif()
    exif[0x0112] = 6
    kinds = {kind: encoded(kind) for kind in ("PNG", "WEBP", "BMP", "GIF", "TIFF")}
    kinds["JPEG"] = encoded("JPEG", exif=exif.tobytes())
    kinds["PPM"] = b"P5 12 12 65535\n" + np.arange(144, dtype=">u2").tobytes()
    return [Target(f"{kind} image", content, attempt) for kind, content in kinds.items()]


def encoded(kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(draw_faces(0, np.array([1]), np.array([1]), 24)[0]).save(stream, kind, **options)
    return stream.getvalue()


def read_all(place: Path) -> None:
    source = open_source(place)
    assert source.labels.min() >= 0 and source.labels.max() < source.num_classes
    assert source.describe()
    for index in range(source.num_images):
        assert isinstance(source.read(index), bytes) and source.name_of(index)


def _verify(place: Path) -> None:
    findings, sound = verify(place)
    if sound is not None:
        assert sound.num_images <= findings.num_images


@contextmanager
def _alarm() -> Iterator[None]:
    """A reader that hangs ends the process, in C code too."""
    signal.alarm(MAX_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


def fuzz(name: str, num_mutations: int, seed: int, report=None) -> tuple[int, int]:
    """(taken, refused). In memory, since each attempt writes files."""
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        targets = {target.name: target for target in make_targets(Path(folder))}
        rng = np.random.default_rng([seed, sum(name.encode())])
        before, num_taken = peak_bytes(), 0
        for number in range(num_mutations):
            content = mutate(targets[name].whole, rng)
            try:
                num_taken += try_once(targets[name], content)
            except Exception as error:
                raise AssertionError(f"mutation {number} of {name}, seed {seed}: {content[:4000]!r}") from error
        assert peak_bytes() - before < MAX_BYTES
    if report is not None:
        report.send((num_taken, num_mutations - num_taken))
    return num_taken, num_mutations - num_taken


NAMES = [
    "train.rec",
    "train.idx",
    "property",
    "train.idx.cache",
    "train.idx.cache, header",
    "train.rec.labels",
    "train.rec.labels, header",
    "train.rec, verified",
    "train.idx, verified",
    "a.tar",
    "label.txt",
    "verification.bin",
    *(f"{kind} image" for kind in ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")),
]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", NAMES)
def test_a_sample_of_damaged_files_gives_records_or_a_data_error(name):
    taken, refused = fuzz(name, SAMPLE_MUTATIONS, seed=0)
    assert taken + refused == SAMPLE_MUTATIONS
    # A damaged header of a cache is made anew, and verify reports instead of refusing.
    assert refused > 0 or name.endswith(("header", "verified"))


def in_a_process_of_its_own(name: str, report) -> None:
    # What a mutation asks for beyond this is a MemoryError, and the test fails.
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2 * 2**30, used + 2 * 2**30))
    fuzz(name, SOAK_MUTATIONS, seed=1, report=report)


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", NAMES)
def test_thousands_of_damaged_files_give_records_or_a_data_error(name):
    """Six thousand mutations of each of nineteen kinds of files: 114,000. A crash or a hang ends the process."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=in_a_process_of_its_own, args=(name, theirs))
    process.start()
    theirs.close()
    process.join()
    assert process.exitcode == 0
    taken, refused = ours.recv()
    print(f"{name}: {taken} taken, {refused} refused")
    assert taken + refused == SOAK_MUTATIONS
