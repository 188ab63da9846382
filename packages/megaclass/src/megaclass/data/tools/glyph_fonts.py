"""The fonts of `megaclass data glyphs`: which designs there are, where their files lie, and drawing their characters.

The table `glyph_designs.toml` lists the designs, the Debian packages and files that have them, and the part of the set
that each belongs to. A design has one image per character.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megaclass.data.ordered_map import process_map
from megaclass.errors import DataError
from megaclass.keyed_random import combine64
from megaclass.progress import OnProgress, no_progress

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont

SIDE = 48
"""Side of an image in pixels."""
# Debian has one of these fonts in a folder of its own.
FONT_FOLDERS = (
    *("/usr/share/fonts", "/usr/share/fonts-droid-fallback", "/usr/local/share/fonts"),
    *("~/.local/share/fonts", "~/.fonts"),
)

# Unified ideographs with their extensions, and Hangul syllables. Compatibility ideographs (F900, 2F800) are other code
# points of the same characters, so they are left out.
_HAN = ((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0x20000, 0x2F7FF), (0x30000, 0x3FFFF))
_HANGUL = ((0xAC00, 0xD7A3),)
_SCRIPTS = {"": _HAN + _HANGUL, "han": _HAN, "hangul": _HANGUL}
# Glyphs are drawn at twice the size and reduced: Pillow cannot turn off hinting, which distorts small glyphs.
_DRAWN_SIDE = 2 * SIDE
# Longer side of a font's median glyph, relative to the image: fonts fill their squares differently.
_FILL = 0.875
_MEASURED_GLYPHS = 256
_BLOCK_GLYPHS = 1000
# An image that more characters of a design share is a placeholder.
_MAX_CHARACTERS_PER_IMAGE = 2
_NO_CODES: NDArray[np.int64] = np.empty(0, dtype=np.int64)
_SALT = 0x676C797068


@dataclass(frozen=True, kw_only=True)
class Design:
    """One drawing of the characters, in one or several font files."""

    name: str
    packages: Sequence[str]
    """Debian packages with the files."""
    faces: Sequence[str]
    """Names of files, with `:NUMBER` for a later face of a file. The first that has a character draws it."""
    licence: str
    part: str = "train"
    lineage: str = ""
    """Shared by designs that were derived from one another; empty: the design has no relatives."""
    script: str = ""
    """han or hangul: the only script that is used."""


@dataclass(frozen=True, eq=False)
class Face:
    path: Path
    index: int
    codes: NDArray[np.int64]
    """Code points of the characters in it, in ascending order."""
    size: int
    """Font size at which the median glyph has the wanted size."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Glyphs:
    """Images of characters."""

    codes: NDArray[np.int64]
    designs: NDArray[np.int64]
    bits: NDArray[np.uint8]
    """One-bit pixels, packed (N, SIDE * SIDE / 8); 1 is ink."""

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: NDArray[Any]) -> Glyphs:
        return Glyphs(codes=self.codes[rows], designs=self.designs[rows], bits=self.bits[rows])


def read_designs() -> list[Design]:
    text = resources.files("megaclass.data.tools").joinpath("glyph_designs.toml").read_text(encoding="utf-8")
    return [Design(**found) for found in tomllib.loads(text)["design"]]


@dataclass(frozen=True, eq=False)
class FontCollection:
    """The designs, each with the faces that were found."""

    designs: Sequence[Design]
    faces: Sequence[Sequence[Face]]

    @classmethod
    def find(cls, folders: Iterable[Path], designs: Sequence[Design], num_processes: int = 1) -> FontCollection:
        """Looks for the fonts of the designs below the folders. Of two files with one name, the first path counts."""
        files: dict[str, Path] = {}
        for folder in folders:
            for path in sorted(folder.expanduser().rglob("*.[tToO][tT][fFcC]")):
                if path.is_file():
                    files.setdefault(path.name, path)
        found = [
            [face.partition(":") for face in design.faces if face.partition(":")[0] in files] for design in designs
        ]
        jobs = [
            (files[name], int(index or 0), design.script)
            for design, faces in zip(designs, found, strict=True)
            for name, _, index in faces
        ]
        opened = iter(list(process_map(_open_face, jobs, num_processes)))
        return cls(designs, [[next(opened) for _ in faces] for faces in found])

    @cached_property
    def lineages(self) -> NDArray[np.int64]:
        """A number per design, equal for relatives."""
        return np.unique([design.lineage or design.name for design in self.designs], return_inverse=True)[1]

    @cached_property
    def codes(self) -> list[NDArray[np.int64]]:
        """Code points of the characters of each design, with those whose glyphs are blank."""
        return [np.unique(np.concatenate([_NO_CODES, *(face.codes for face in faces)])) for faces in self.faces]

    def to_json(self) -> dict[str, Any]:
        from PIL import __version__

        rows = zip(self.designs, self.codes, self.faces, strict=True)
        designs = [
            {
                "name": design.name,
                "part": design.part,
                "characters": len(codes),
                "fonts": [face.path.name for face in faces],
            }
            for design, codes, faces in rows
        ]
        return {"pillow": __version__, "designs": designs, "missing_packages": self.missing_packages()}

    def missing_packages(self) -> list[str]:
        """Returns the packages of the designs of which a font was not found."""
        pairs = zip(self.designs, self.faces, strict=True)
        return sorted({name for design, faces in pairs if len(faces) < len(design.faces) for name in design.packages})

    @cached_property
    def _lineages_of_characters(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return count_lineages(np.concatenate(self.codes), np.repeat(self.lineages, list(map(len, self.codes))))

    def describe(self) -> str:
        """Returns a table of the designs with their numbers of characters, and how to get the missing fonts."""
        all_codes, counts = self._lineages_of_characters
        only_one = all_codes[counts == 1]
        lines = [f"{'design':20}{'part':11}{'characters':>11}{'only here':>11}  Debian packages (licence)"]
        for design, codes in zip(self.designs, self.codes, strict=True):
            num_only = int(np.isin(codes, only_one).sum())
            packages = f"{' '.join(design.packages)} ({design.licence})"
            lines.append(f"{design.name:20}{design.part:11}{len(codes):>11,}{num_only:>11,}  {packages}")
        lines.append(f"{len(all_codes):,} characters, {int((counts >= 3).sum()):,} in at least three lineages")
        if missing := " ".join(self.missing_packages()):
            lines.append(
                f"Fonts are missing. On Debian and Ubuntu: apt-get install {missing}; or, without installing: "
                f"apt-get download {missing}; for i in *.deb; do dpkg-deb -x $i FOLDER; done, and then --fonts FOLDER"
            )
        return "\n".join(lines)

    def most_common(self, num_characters: int) -> NDArray[np.int64]:
        """Returns the characters that most tests have; among equals, those with the most lineages."""
        codes, counts = self._lineages_of_characters
        tests = [found for found, design in zip(self.codes, self.designs, strict=True) if design.part != "train"]
        in_tests = [np.isin(codes, found) for found in tests]
        num_tests = np.sum(in_tests, axis=0) if tests else np.zeros(len(codes), dtype=np.int64)
        order = np.lexsort((hash_codes(codes), -counts, -num_tests))
        return np.sort(codes[order[:num_characters]])

    def draw(
        self, wanted: NDArray[np.int64] | None = None, num_processes: int = 1, on_progress: OnProgress = no_progress
    ) -> Glyphs:
        """Draws the wanted characters (None: all) in every design, without blank glyphs and placeholders."""
        jobs: list[tuple[Face, NDArray[np.int64]]] = []
        designs: list[int] = []
        for design, faces in enumerate(self.faces):
            taken = _NO_CODES
            for face in faces:
                codes = np.setdiff1d(face.codes if wanted is None else np.intersect1d(face.codes, wanted), taken)
                taken = np.union1d(taken, codes)
                blocks = [codes[start : start + _BLOCK_GLYPHS] for start in range(0, len(codes), _BLOCK_GLYPHS)]
                jobs += [(face, block) for block in blocks]
                designs += [design] * len(blocks)
        num_total, num_done, bits = sum(len(codes) for _, codes in jobs), 0, []
        if not num_total:
            raise DataError(
                "None of the fonts has one of the wanted characters. megaclass data glyphs lists the fonts."
            )
        for drawn in process_map(_draw_block, jobs, num_processes):
            bits.append(drawn)
            num_done += len(drawn)
            on_progress(num_done, num_total)
        glyphs = Glyphs(
            codes=np.concatenate([codes for _, codes in jobs]),
            designs=np.repeat(designs, [len(codes) for _, codes in jobs]),
            bits=np.concatenate(bits),
        )
        glyphs = glyphs[np.lexsort((glyphs.codes, glyphs.designs))]
        return glyphs[~_is_placeholder(glyphs)]


def _open_face(job: tuple[Path, int, str]) -> Face:
    """Reads which characters a font has, and measures its glyphs."""
    path, index, script = job
    try:
        from fontTools.ttLib import TTFont
    except ImportError as error:
        raise DataError("megaclass data glyphs reads fonts with fontTools: pip install 'megaclass[glyphs]'.") from error
    # Damaged names of glyphs, of which it warns, do not matter here.
    logging.getLogger("fontTools").setLevel(logging.ERROR)
    try:
        with TTFont(path, fontNumber=index, lazy=True) as font:
            mapped = np.array(sorted(font.getBestCmap() or {}), dtype=np.int64)
        # All faces of a family are measured alike, whichever script of them is used.
        known, codes = (mapped[_is_in(mapped, _SCRIPTS[of])] for of in ("", script))
        drawing = _open_font(path, index, _DRAWN_SIDE)
        drawn = (_draw(drawing, code) for code in known[:: max(1, len(known) // _MEASURED_GLYPHS)].tolist())
        sides = [max(image.size) for image in drawn if image is not None]
    except Exception as error:
        raise DataError(
            f"Cannot read the font {path}, face {index}: {error}. Install it again, or remove it."
        ) from error
    size = round(_DRAWN_SIDE * _FILL * _DRAWN_SIDE / float(np.median(sides))) if sides else 0
    return Face(path, index, codes if sides else _NO_CODES, size)


def _is_in(codes: NDArray[np.int64], ranges: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    return np.asarray(np.any([(codes >= first) & (codes <= last) for first, last in ranges], axis=0))


def _open_font(path: Path, index: int, size: int) -> FreeTypeFont:
    from PIL import ImageFont

    return ImageFont.truetype(str(path), size, index, layout_engine=ImageFont.Layout.BASIC)


def _draw(font: FreeTypeFont, code: int) -> Image | None:
    """Returns the ink of a glyph in white, without margins; None if it is blank."""
    from PIL import Image, ImageDraw

    text = chr(code)
    left, top, right, bottom = font.getbbox(text)
    image = Image.new("L", (max(1, round(right - left)), max(1, round(bottom - top))))
    ImageDraw.Draw(image).text((-left, -top), text, fill=255, font=font)
    box = image.getbbox()
    return None if box is None else image.crop(box)


def _draw_block(job: tuple[Face, NDArray[np.int64]]) -> NDArray[np.uint8]:
    """Draws each glyph in the middle of an image; returns packed bits (N, SIDE * SIDE / 8), zeros for blank glyphs."""
    from PIL.Image import Resampling

    face, codes = job
    drawn = np.zeros((len(codes), _DRAWN_SIDE, _DRAWN_SIDE), dtype=np.uint8)
    font = _open_font(face.path, face.index, face.size)
    for row, code in enumerate(codes.tolist()):
        image = _draw(font, code)
        if image is None:
            continue
        if max(image.size) > _DRAWN_SIDE:
            scale = _DRAWN_SIDE / max(image.size)
            width, height = (max(1, round(side * scale)) for side in image.size)
            image = image.resize((width, height), Resampling.BOX)
        left, top = (_DRAWN_SIDE - image.width) // 2, (_DRAWN_SIDE - image.height) // 2
        drawn[row, top : top + image.height, left : left + image.width] = np.asarray(image)
    wide = drawn.astype(np.uint16)
    fours = wide[:, ::2, ::2] + wide[:, ::2, 1::2] + wide[:, 1::2, ::2] + wide[:, 1::2, 1::2]
    grey = (fours >> 2).reshape(len(codes), -1)
    # The darkest pixels are ink, as many as the glyph covers: both thin strokes and narrow gaps stay.
    counts = np.bincount((np.arange(len(codes))[:, None] * 256 + grey).ravel(), minlength=len(codes) * 256)
    num_at_least = counts.reshape(-1, 256)[:, ::-1].cumsum(axis=1)
    num_wanted = np.maximum(np.rint(grey.sum(axis=1) / 255), 1)
    threshold = np.maximum(255 - (num_at_least < num_wanted[:, None]).sum(axis=1), 1)
    return np.packbits(grey >= threshold[:, None], axis=1)


def _is_placeholder(glyphs: Glyphs) -> NDArray[np.bool_]:
    """Tells which images are blank, or the same for several characters of a design, such as an empty box."""
    keys = np.concatenate([glyphs.designs.astype(np.uint8)[:, None], glyphs.bits], axis=1)
    rows = np.ascontiguousarray(keys).view([("", f"V{keys.shape[1]}")]).ravel()
    _, which, counts = np.unique(rows, return_inverse=True, return_counts=True)
    return ~glyphs.bits.any(axis=1) | (counts[which] > _MAX_CHARACTERS_PER_IMAGE)


def count_lineages(
    codes: NDArray[np.int64], lineages: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the different code points in ascending order, and in how many lineages each occurs."""
    return np.unique(np.unique(codes * 256 + lineages) // 256, return_counts=True)


def hash_codes(codes: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Returns a hash per code point, for choices that no font and no order influences."""
    return combine64(_SALT, codes.astype(np.uint64))
