"""Writes synthetic identities as the files InsightFace users have: train.rec, train.idx, property, verification.bin.

holdout.rec has further images of identities in training, one per identity, on which a run measures its classification.
"""

import contextlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megaclass.data.decode import encode_jpeg
from megaclass.data.ordered_map import process_map
from megaclass.data.pair_file import PairSet, write_pairs
from megaclass.data.sources.recordio import MAX_EXACT_LABEL, RecordWriter, image_record
from megaclass.data.synthetic.faces import MAX_IMAGE_SIZE, MIN_IMAGE_SIZE, draw_faces
from megaclass.data.tools.pack import framed_records
from megaclass.errors import DataError
from megaclass.progress import OnProgress, no_progress
from megaclass_launch.files import published_folder
from megaclass_launch.operating_system import num_cores

JPEG_QUALITY = 92
_ARGUMENTS_FILE = "synth.json"
HOLDOUT_RECORDS = "holdout.rec"
_FILES = ("train.rec", "train.idx", "property", "verification.bin", _ARGUMENTS_FILE)
# Raised whenever the same arguments would draw other images, so an old folder is not mistaken for the new set.
_DRAWING_VERSION = 1
_BLOCK_IMAGES = 128
# A process draws these in about the time that its start takes.
_IMAGES_WORTH_A_PROCESS = 512


@dataclass(frozen=True)
class _SynthesisArguments:
    num_identities: int
    images_per_identity: int
    image_size: int
    seed: int
    num_pairs: int
    drawing_version: int = _DRAWING_VERSION

    def __post_init__(self) -> None:
        for name, low, high in (
            ("num_identities", 1, MAX_EXACT_LABEL),
            ("images_per_identity", 1, 1_000_000),
            ("image_size", MIN_IMAGE_SIZE, MAX_IMAGE_SIZE),
            ("num_pairs", 2, 10_000_000),
            ("seed", 0, 2**63 - 1),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise DataError(
                    f"Cannot draw synthetic identities with {name} = {value}: it must lie in [{low:,}, {high:,}]."
                )


def synthesize(
    out: Path,
    *,
    num_identities: int,
    images_per_identity: int,
    image_size: int,
    seed: int = 0,
    num_pairs: int = 1000,
    num_processes: int | None = None,
    on_progress: OnProgress = no_progress,
) -> bool:
    """Draws a set into the folder `out`, which appears whole or not at all. Returns False if `out` already held it.

    Pairs show identities that do not occur in training. The bytes do not depend on `num_processes`, by default one per
    core unless there is less work.
    """
    arguments = _SynthesisArguments(num_identities, images_per_identity, image_size, seed, num_pairs)
    if num_processes is None:
        num_images = num_identities * images_per_identity + 2 * num_pairs
        num_processes = max(1, min(num_cores(), num_images // _IMAGES_WORTH_A_PROCESS))
    if num_processes < 1:
        raise DataError(
            f"Cannot draw synthetic identities with num_processes = {num_processes}: at least one is needed."
        )
    if _holds_same_set(out, arguments):
        return False
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with published_folder(out) as unfinished:
            _write_set(unfinished, arguments, num_processes, on_progress)
            if _holds_same_set(out, arguments):
                # Another process was faster. Its folder is replaced by one with the same bytes.
                return False
        return True
    except OSError as error:
        raise DataError(f"Cannot write the synthetic identities to {out}: {error.strerror or error}.") from error


def _holds_same_set(out: Path, arguments: _SynthesisArguments) -> bool:
    if not out.exists():
        return False
    if not out.is_dir():
        raise DataError(
            f"Cannot write the synthetic identities to {out}: it is a file; name a folder, which need not exist."
        )
    names = sorted(entry.name for entry in out.iterdir())
    if not names:
        return False
    try:
        found = json.loads((out / _ARGUMENTS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if found == asdict(arguments) and all(name in names for name in _FILES):
        return True
    holds = f"another synthetic set, {found}" if found else f"{', '.join(names[:5])}{' …' if len(names) > 5 else ''}"
    raise DataError(
        f"Cannot write the synthetic identities to {out}: it is not empty (it holds {holds}). If that is your own data, "
        f"train on it with synth.identities=0; otherwise choose another folder."
    )


def _write_set(folder: Path, arguments: _SynthesisArguments, num_processes: int, on_progress: OnProgress) -> None:
    pair_identity, pair_image, is_same = _choose_pairs(arguments)
    num_identities, per_identity = arguments.num_identities, arguments.images_per_identity
    # Spread over all identities; as many as there are pairs, so they take half as long to evaluate.
    held_out = np.linspace(0, num_identities - 1, min(num_identities, arguments.num_pairs)).astype(np.int64)
    identity = np.concatenate([np.repeat(np.arange(num_identities), per_identity), pair_identity, held_out])
    image = np.concatenate(
        [np.tile(np.arange(per_identity), num_identities), pair_image, np.full(len(held_out), per_identity)]
    )
    jobs = (
        (
            arguments.seed,
            identity[start : start + _BLOCK_IMAGES],
            image[start : start + _BLOCK_IMAGES],
            arguments.image_size,
        )
        for start in range(0, len(identity), _BLOCK_IMAGES)
    )
    with contextlib.closing(process_map(_draw_and_encode, jobs, num_processes)) as drawn:
        encoded = _count(itertools.chain.from_iterable(drawn), len(identity), on_progress)
        with RecordWriter(folder / "train.rec") as writer:
            images = (
                (1 + number, number // per_identity, next(encoded)) for number in range(num_identities * per_identity)
            )
            for key, record in framed_records(images, 1 + per_identity * np.arange(num_identities + 1)):
                writer.write(key, record)
        pairs = list(itertools.islice(encoded, 2 * len(is_same)))
        write_pairs(folder / "verification.bin", PairSet(pairs, is_same))
        with RecordWriter(folder / HOLDOUT_RECORDS) as writer:
            for key, (label, content) in enumerate(zip(held_out.tolist(), encoded, strict=True)):
                writer.write(key, image_record(label, content, key, is_label_in_id2=False))
    size = arguments.image_size
    (folder / "property").write_text(f"{arguments.num_identities},{size},{size}\n", encoding="ascii")
    (folder / _ARGUMENTS_FILE).write_text(json.dumps(asdict(arguments), indent=2) + "\n", encoding="ascii")


def _choose_pairs(arguments: _SynthesisArguments) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Returns identity and image number of 2N images, and N truth values, alternating so that each fold is balanced."""
    pair = np.arange(arguments.num_pairs)
    is_same = pair % 2 == 0
    num_held_out = max(2, (arguments.num_pairs + 1) // 2)
    first = pair // 2
    second = np.where(is_same, first, (first + 1) % num_held_out)
    identity = arguments.num_identities + np.stack([first, second], axis=1).reshape(-1)
    # Each held-out identity appears in one same pair and two different ones, each time with another image.
    image = np.where(is_same[:, None], [[0, 1]], [[2, 3]]).reshape(-1)
    return identity, image, is_same


def _draw_and_encode(job: tuple[int, NDArray[np.int64], NDArray[np.int64], int]) -> list[bytes]:
    return [encode_jpeg(face_HW3, JPEG_QUALITY) for face_HW3 in draw_faces(*job)]


def _count(encoded: Iterator[bytes], num_images: int, on_progress: OnProgress) -> Iterator[bytes]:
    for done, item in enumerate(encoded, start=1):
        if done % _BLOCK_IMAGES == 0 or done == num_images:
            on_progress(done, num_images)
        yield item
