"""Makes a set of about 105,000 classes, Chinese characters and Korean syllables, of which no two parts share a design.

train            every design without relatives among the tests
validation       one more design, to choose settings with
test-a, -b, -c   one design each
open-set         characters that are in none of the parts above, in all designs

Each part but open-set numbers its classes as train does. The bytes depend on the fonts and on the version of Pillow only.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaclass.data.pair_file import write_pairs
from megaclass.data.tools.glyph_fonts import SIDE, FontCollection, Glyphs, count_lineages, hash_codes
from megaclass.data.tools.make_pairs import make_pairs
from megaclass.data.tools.pack import pack
from megaclass.data.tools.split import Split, mark_unseen
from megaclass.errors import DataError
from megaclass.progress import OnProgress, continued, no_progress
from megaclass_launch.files import published_folder

TESTS = ("validation", "test-a", "test-b", "test-c")

# Least correlation of pixels at which two images of a character count as one drawing.
_NEARLY_EQUAL = 0.9
# Least median correlation at which two designs count as relatives.
_RELATED = 0.8
_FEWEST_CORRELATED, _MOST_CORRELATED = 20, 120
# One character of this many is held out for the open set, up to the second number.
_OPEN_SET_PART, _MAX_OPEN_SET = 20, 5000
_MIN_OPEN_SET_LINEAGES = 3
_NUM_PAIRS = 6000
_BITS_SET = np.array([bin(byte).count("1") for byte in range(256)], dtype=np.uint8)


@dataclass(frozen=True, kw_only=True, eq=False)
class GlyphSource:
    """Glyphs as a source of images (see ImageSource)."""

    part: str
    glyphs: Glyphs
    classes: NDArray[np.int64]
    """Code point of each class, in ascending order."""
    image_size: tuple[int, int] = (SIDE, SIDE)

    @property
    def num_images(self) -> int:
        return len(self.glyphs)

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @cached_property
    def labels(self) -> NDArray[np.int64]:
        return np.searchsorted(self.classes, self.glyphs.codes)

    @property
    def class_names(self) -> bytes:
        """The characters themselves, one per line."""
        return "".join(f"{chr(code)}\n" for code in self.classes.tolist()).encode()

    def read(self, index: int) -> bytes:
        # Netpbm's bitmap, in which 0 is white: the ink. No compressor is involved whose version could change the bytes.
        header, paper = b"P4\n%d %d\n" % (SIDE, SIDE), np.bitwise_not(self.glyphs.bits[index])
        return header + bytes(paper)

    def name_of(self, index: int) -> str:
        return f"U+{self.glyphs.codes[index]:04X} of design {self.glyphs.designs[index]}"

    def describe(self) -> str:
        return f"glyphs, {self.part}: {self.num_images:,} images of {self.num_classes:,} characters"


@dataclass(frozen=True, eq=False)
class GlyphSplit:
    parts: dict[str, GlyphSource]
    removed: dict[str, int]
    """Images removed per part. Tests: training has nearly the same image. train: a relative has nearly the same image."""


def characters_for(fonts: FontCollection, num_classes: int) -> NDArray[np.int64]:
    """Returns the most common characters: `num_classes`, and those that the open set takes of them."""
    if num_classes < 2:
        raise DataError(f"Cannot draw {num_classes} classes: at least two are needed.")
    return fonts.most_common(num_classes + num_classes // (_OPEN_SET_PART - 1))


def split_glyphs(glyphs: Glyphs, fonts: FontCollection) -> GlyphSplit:
    """Splits by design. One character of 20, at most 5,000, is in no part but the open set."""
    part_of_image = np.array([design.part for design in fonts.designs])[glyphs.designs]
    codes, counts = count_lineages(glyphs.codes, fonts.lineages[glyphs.designs])
    eligible = codes[counts >= _MIN_OPEN_SET_LINEAGES]
    num_open = min(_MAX_OPEN_SET, len(codes) // _OPEN_SET_PART)
    open_codes = np.sort(eligible[np.argsort(hash_codes(eligible))][:num_open])
    is_open = np.isin(glyphs.codes, open_codes)
    train = glyphs[(part_of_image == "train") & ~is_open]
    is_copy = _copies_of_relatives(train, fonts.lineages)
    parts, removed = {}, {"train": int(is_copy.sum())}
    train = train[~is_copy]
    classes = np.unique(train.codes)
    if len(classes) < 2 or len(open_codes) < 2:
        raise DataError(
            f"Cannot split the characters: the fonts for training have {len(classes):,}, and {len(open_codes):,} can be held "
            f"out for the open set, at least two of each are needed. megaclass data glyphs lists the fonts."
        )
    parts["train"] = GlyphSource(part="train", glyphs=train, classes=classes)
    for part in TESTS:
        images = glyphs[(part_of_image == part) & np.isin(glyphs.codes, classes)]
        is_known = _nearly_equal(images, train)
        removed[part] = int(is_known.sum())
        if not is_known.all():
            parts[part] = GlyphSource(part=part, glyphs=images[~is_known], classes=classes)
    # One image per character and lineage, so no two are of relatives.
    held_out = glyphs[is_open]
    key = held_out.codes * 256 + fonts.lineages[held_out.designs]
    held_out = held_out[np.sort(np.unique(key, return_index=True)[1])]
    parts["open-set"] = GlyphSource(part="open-set", glyphs=held_out, classes=open_codes)
    return GlyphSplit(parts, removed)


def _nearly_equal(images: Glyphs, others: Glyphs) -> NDArray[np.bool_]:
    """Tells which images have a nearly equal one of the same character among the others."""
    found = np.zeros(len(images), dtype=bool)
    order = np.argsort(others.codes, kind="stable")
    first, last = (np.searchsorted(others.codes[order], images.codes, side=side) for side in ("left", "right"))
    for nth in range(int((last - first).max(initial=0))):
        rows = np.flatnonzero(first + nth < last)
        found[rows] |= correlations(images.bits[rows], others.bits[order[first[rows] + nth]]) >= _NEARLY_EQUAL
    return found


def _copies_of_relatives(glyphs: Glyphs, lineages: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tells which images are nearly equal to one of the same character in an earlier design of their lineage."""
    key = glyphs.codes * 256 + lineages[glyphs.designs]
    order = np.lexsort((glyphs.designs, key))
    found = np.zeros(len(glyphs), dtype=bool)
    for distance in range(1, len(glyphs)):
        later, earlier = order[distance:], order[:-distance]
        is_pair = key[later] == key[earlier]
        if not is_pair.any():
            break
        later, earlier = later[is_pair], earlier[is_pair]
        found[later] |= correlations(glyphs.bits[later], glyphs.bits[earlier]) >= _NEARLY_EQUAL
    return found


def correlations(bits: NDArray[np.uint8], others: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Returns the correlation of the pixels of each pair of rows of packed bits."""
    ink, other_ink, both = (_BITS_SET[packed].sum(axis=1, dtype=np.int64) for packed in (bits, others, bits & others))
    num_pixels = bits.shape[1] * 8
    spread = ink * (num_pixels - ink) * other_ink * (num_pixels - other_ink)
    return np.asarray((both * num_pixels - ink * other_ink) / np.sqrt(np.maximum(spread, 1)))


def correlations_of_designs(glyphs: Glyphs, num_designs: int) -> NDArray[np.float64]:
    """Returns the median correlation of each two designs over at most 120 common characters; 0 if they share fewer than 20."""
    found = np.zeros((num_designs, num_designs))
    rows_of = [np.flatnonzero(glyphs.designs == design) for design in range(num_designs)]
    for first, rows in enumerate(rows_of):
        for second, others in enumerate(rows_of[:first]):
            codes, here, there = np.intersect1d(glyphs.codes[rows], glyphs.codes[others], return_indices=True)
            if len(codes) >= _FEWEST_CORRELATED:
                chosen = np.argsort(hash_codes(codes))[:_MOST_CORRELATED]
                pairs = glyphs.bits[rows[here[chosen]]], glyphs.bits[others[there[chosen]]]
                found[first, second] = found[second, first] = np.median(correlations(*pairs))
    return found


def describe_relations(glyphs: Glyphs, fonts: FontCollection) -> dict[str, Any]:
    """Returns the nearest training design of each test, and the pairs of designs that are close but of different lineages."""
    matrix, designs = correlations_of_designs(glyphs, len(fonts.designs)), fonts.designs
    is_train = np.array([design.part == "train" for design in designs])
    nearest = {}
    for row, design in enumerate(designs):
        if design.part != "train":
            best = int(np.where(is_train, matrix[row], -1).argmax())
            nearest[design.name] = {"design": designs[best].name, "correlation": round(float(matrix[row, best]), 3)}
    close = np.argwhere((np.tril(matrix) >= _RELATED) & (fonts.lineages[:, None] != fonts.lineages))
    return {"nearest_in_train": nearest, "close_pairs": [[designs[i].name, designs[j].name] for i, j in close.tolist()]}


def write_glyphs(
    split: GlyphSplit, out: Path, facts: dict[str, Any], *, num_threads: int = 1, on_progress: OnProgress = no_progress
) -> dict[str, Any]:
    """Writes each part as a .rec set into a folder of its own, and glyphs.json with `facts` and the numbers; returns that.

    train/open-set.bin has verification pairs of the open set, which a run on train evaluates. For one-shot search,
    open-set/gallery has one image of each character and open-set/probes the others.
    """
    open_set, train = split.parts["open-set"], split.parts["train"]
    is_first = np.zeros(open_set.num_images, dtype=bool)
    is_first[np.unique(open_set.glyphs.codes, return_index=True)[1]] = True
    sources = {name: part for name, part in split.parts.items() if part is not open_set}
    sources["open-set/gallery"] = replace(open_set, glyphs=open_set.glyphs[is_first])
    sources["open-set/probes"] = replace(open_set, glyphs=open_set.glyphs[~is_first])
    num_images, num_done = sum(part.num_images for part in sources.values()), 0
    parts: dict[str, dict[str, Any]] = {}
    with published_folder(out) as unfinished:
        for name, part in sources.items():
            advance = continued(on_progress, num_done, num_images)
            pack(part, unfinished / name, class_names=part.class_names, num_threads=num_threads, on_progress=advance)
            num_done += part.num_images
            digest = hashlib.sha256(part.glyphs.codes.tobytes() + part.glyphs.bits.tobytes()).hexdigest()
            num_classes = len(np.unique(part.glyphs.codes))
            parts[name] = {"images": part.num_images, "characters": num_classes, "sha256": digest}
        pairs = unfinished / "train" / "open-set.bin"
        write_pairs(pairs, make_pairs(open_set, min(_NUM_PAIRS, open_set.num_classes)))
        share = open_set.num_classes / (open_set.num_classes + train.num_classes)
        mark_unseen(pairs, Split(by="identities", share=share), parts["train"]["sha256"][:16])
        facts = {**facts, "removed_as_nearly_equal": split.removed, "parts": parts}
        (unfinished / "glyphs.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return facts
