"""`megaclass data glyphs`, with fonts made here: a glyph is a pattern of squares that depends on character and design."""

import json
from pathlib import Path

import numpy as np
import pytest

from megaclass.cli.main import main
from megaclass.data.decode import decode_image
from megaclass.data.pair_file import read_pairs
from megaclass.data.sources.open_source import format_of, open_source
from megaclass.data.tools.glyph_fonts import SIDE, Design, FontCollection, read_designs
from megaclass.data.tools.glyphs import (
    TESTS,
    GlyphSplit,
    correlations,
    describe_relations,
    split_glyphs,
    write_glyphs,
)
from megaclass.data.tools.split import is_unseen
from megaclass.errors import DataError

pytest.importorskip("fontTools")

_CELLS = 8
_FIRST = 0x4E00
_NUM = 100


def _pattern(code: int, design: int, changed: int) -> np.ndarray:
    """Returns which squares of a glyph are black: those of the character, `changed` of them different in this design."""
    cells = np.random.default_rng(code).integers(0, 2, _CELLS**2)
    cells[[0, -1]] = 1
    flipped = np.random.default_rng([code, design]).choice(np.arange(1, _CELLS**2 - 1), changed, replace=False)
    cells[flipped] ^= 1
    return cells.reshape(_CELLS, _CELLS)


def _write_font(
    path: Path,
    codes: list[int],
    design: int,
    *,
    changed: int = 6,
    blank: tuple[int, ...] = (),
    boxes: tuple[int, ...] = (),
) -> None:
    from fontTools.fontBuilder import FontBuilder
    from fontTools.pens.ttGlyphPen import TTGlyphPen

    def glyph(cells: np.ndarray):
        pen = TTGlyphPen(None)
        for y, x in np.argwhere(cells).tolist():
            left, top = 100 + 100 * x, 800 - 100 * y
            pen.moveTo((left, top))
            for point in ((left + 100, top), (left + 100, top - 100), (left, top - 100)):
                pen.lineTo(point)
            pen.closePath()
        return pen.glyph()

    drawn = {code: _pattern(code, design, changed) for code in codes}
    drawn |= {code: np.zeros((_CELLS, _CELLS)) for code in blank}
    drawn |= {code: np.eye(_CELLS) for code in boxes}
    names = {code: f"glyph{code}" for code in drawn}
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", *names.values()])
    builder.setupCharacterMap(names)
    builder.setupGlyf(
        {".notdef": glyph(np.eye(_CELLS)), **{names[code]: glyph(cells) for code, cells in drawn.items()}}
    )
    builder.setupHorizontalMetrics(dict.fromkeys([".notdef", *names.values()], (1000, 100)))
    builder.setupHorizontalHeader(ascent=900, descent=-100)
    builder.setupNameTable({"familyName": path.stem, "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(path)


def _design(name: str, part: str = "train", **more: object) -> Design:
    return Design(name=name, packages=[f"fonts-{name}"], faces=[f"{name}.ttf"], licence="free", part=part, **more)  # type: ignore[arg-type]


_DESIGNS = [
    *(_design(name) for name in ("ming", "song", "hei")),
    _design("bold", lineage="hei-family"),
    _design("check", "validation"),
    _design("kai", "test-a"),
]


@pytest.fixture(scope="module")
def fonts_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fonts")
    for number, design in enumerate(_DESIGNS):
        _write_font(folder / design.faces[0], list(range(_FIRST, _FIRST + _NUM)), number)
    return folder


@pytest.fixture(scope="module")
def fonts(fonts_folder: Path) -> FontCollection:
    return FontCollection.find([fonts_folder], _DESIGNS)


@pytest.fixture(scope="module")
def split(fonts: FontCollection) -> GlyphSplit:
    return split_glyphs(fonts.draw(), fonts)


@pytest.fixture(scope="module")
def written(split: GlyphSplit, fonts: FontCollection, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("glyphs") / "set"
    write_glyphs(split, out, fonts.to_json())
    return out


class TestDrawing:
    def test_draws_every_character_of_every_design(self, fonts: FontCollection) -> None:
        glyphs = fonts.draw()
        assert len(glyphs) == _NUM * len(_DESIGNS)

    def test_draws_the_glyph_upright_in_the_middle(self, fonts: FontCollection) -> None:
        glyphs = fonts.draw(np.array([_FIRST]))
        cell = 42 / _CELLS  # the longer side of a glyph is 0.875 of the image
        centres = (3 + cell * (np.arange(_CELLS) + 0.5)).astype(int)
        for row, design in enumerate(glyphs.designs.tolist()):
            image = np.unpackbits(glyphs.bits[row]).reshape(SIDE, SIDE)
            np.testing.assert_array_equal(image[np.ix_(centres, centres)], _pattern(_FIRST, design, 6))

    def test_draws_the_same_bits_with_several_processes(self, fonts: FontCollection) -> None:
        alone, shared = fonts.draw(), fonts.draw(num_processes=2)
        np.testing.assert_array_equal(alone.bits, shared.bits)
        np.testing.assert_array_equal(alone.codes, shared.codes)

    def test_draws_the_same_image_whichever_characters_are_wanted(self, fonts: FontCollection) -> None:
        every, some = fonts.draw(), fonts.draw(np.arange(_FIRST + 3, _FIRST + 9))
        np.testing.assert_array_equal(every[np.isin(every.codes, some.codes)].bits, some.bits)

    def test_leaves_out_blank_glyphs_placeholders_and_other_scripts(self, tmp_path: Path) -> None:
        compatibility, latin = 0xF900, 0x41
        blank, boxes = (0x5000, 0x5001), (0x6000, 0x6001, 0x6002)
        _write_font(tmp_path / "ming.ttf", [0x4E00, 0xAC00, compatibility, latin], 0, blank=blank, boxes=boxes)
        drawn = FontCollection.find([tmp_path], [_design("ming")]).draw()
        assert drawn.codes.tolist() == [0x4E00, 0xAC00]
        drawn = FontCollection.find([tmp_path], [_design("ming", script="hangul")]).draw()
        assert drawn.codes.tolist() == [0xAC00]

    def test_takes_a_character_from_the_first_font_of_the_design_that_has_it(self, tmp_path: Path) -> None:
        _write_font(tmp_path / "a.ttf", [0x4E00, 0x4E01], 0)
        _write_font(tmp_path / "b.ttf", [0x4E01, 0x4E02], 1)
        design = Design(name="ab", packages=["fonts-ab"], faces=["a.ttf", "b.ttf"], licence="free")
        both = FontCollection.find([tmp_path], [design]).draw()
        first = FontCollection.find([tmp_path], [_design("a")]).draw()
        assert both.codes.tolist() == [0x4E00, 0x4E01, 0x4E02]
        np.testing.assert_array_equal(both.bits[:2], first.bits)

    def test_reads_a_later_face_of_a_collection(self, tmp_path: Path) -> None:
        from fontTools.ttLib import TTCollection, TTFont

        for number, name in enumerate(("a.ttf", "b.ttf")):
            _write_font(tmp_path / name, [0x4E00 + number, 0x4E10], number)
        collection = TTCollection()
        collection.fonts = [TTFont(tmp_path / "a.ttf"), TTFont(tmp_path / "b.ttf")]
        collection.save(tmp_path / "both.ttc")
        design = Design(name="b", packages=["fonts-b"], faces=["both.ttc:1"], licence="free")
        assert FontCollection.find([tmp_path], [design]).draw().codes.tolist() == [0x4E01, 0x4E10]

    def test_a_damaged_font_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "ming.ttf").write_bytes(b"no font")
        with pytest.raises(DataError, match=r"ming\.ttf, face 0: .* Install it again"):
            FontCollection.find([tmp_path], [_design("ming")])

    def test_no_fonts_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="None of the fonts"):
            FontCollection.find([tmp_path], _DESIGNS).draw()


class TestSplit:
    def test_each_part_has_its_own_designs_and_the_numbering_of_train(self, split: GlyphSplit) -> None:
        assert set(split.parts) == {"train", "validation", "test-a", "open-set"}
        designs = {name: set(part.glyphs.designs.tolist()) for name, part in split.parts.items()}
        assert designs == {"train": {0, 1, 2, 3}, "validation": {4}, "test-a": {5}, "open-set": set(range(6))}
        for part in ("validation", "test-a"):
            assert split.parts[part].class_names == split.parts["train"].class_names

    def test_characters_of_the_open_set_are_nowhere_else(self, split: GlyphSplit) -> None:
        held_out = split.parts["open-set"].classes
        assert len(held_out) == _NUM // 20
        for name in ("train", "validation", "test-a"):
            assert not np.isin(split.parts[name].glyphs.codes, held_out).any()

    def test_the_open_set_has_characters_of_three_lineages(self, tmp_path: Path) -> None:
        # Characters of two designs, or of three that are relatives, are not held out.
        codes = list(range(_FIRST, _FIRST + 60))
        names = ["ming", "song", "hei", "bold"]
        for number, name in enumerate(names):
            _write_font(tmp_path / f"{name}.ttf", codes[:20] if name == "song" else codes, number)
        designs = [_design("ming", lineage="x"), _design("song"), _design("hei"), _design("bold", lineage="x")]
        fonts = FontCollection.find([tmp_path], designs)
        held_out = split_glyphs(fonts.draw(), fonts).parts["open-set"].classes
        assert len(held_out) == 3
        assert set(held_out.tolist()) <= set(codes[:20])

    def test_a_test_image_that_training_nearly_has_is_removed_and_counted(self, tmp_path: Path) -> None:
        codes = list(range(_FIRST, _FIRST + 60))
        for number, name in enumerate(("ming", "song", "hei")):
            _write_font(tmp_path / f"{name}.ttf", codes, number)
        _write_font(tmp_path / "kai.ttf", codes, 0)  # as ming draws them
        designs = [_design("ming"), _design("song"), _design("hei"), _design("kai", "test-a")]
        fonts = FontCollection.find([tmp_path], designs)
        split = split_glyphs(fonts.draw(), fonts)
        assert split.removed["test-a"] == 57  # three are in the open set
        assert "test-a" not in split.parts
        assert describe_relations(fonts.draw(), fonts) == {
            "nearest_in_train": {"kai": {"design": "ming", "correlation": 1.0}},
            "close_pairs": [["kai", "ming"]],
        }

    def test_copies_within_a_lineage_are_removed_from_training(self, tmp_path: Path) -> None:
        codes = list(range(_FIRST, _FIRST + 60))
        for number, name in enumerate(("ming", "song", "hei")):
            _write_font(tmp_path / f"{name}.ttf", codes, number)
        _write_font(tmp_path / "bold.ttf", codes, 0)  # as ming draws them
        designs = [_design("ming", lineage="x"), _design("song"), _design("hei"), _design("bold", lineage="x")]
        fonts = FontCollection.find([tmp_path], designs)
        split = split_glyphs(fonts.draw(), fonts)
        assert split.removed["train"] == 57
        assert set(split.parts["train"].glyphs.designs.tolist()) == {0, 1, 2}

    def test_the_correlation_is_that_of_the_pixels(self) -> None:
        bits = np.random.default_rng(0).integers(0, 256, (4, 288), dtype=np.uint8)
        others = bits ^ (np.random.default_rng(1).random((4, 288)) < 0.3).astype(np.uint8)
        pixels = [np.unpackbits(packed, axis=1).astype(np.float64) for packed in (bits, others)]
        expected = [np.corrcoef(one, other)[0, 1] for one, other in zip(*pixels, strict=True)]
        np.testing.assert_allclose(correlations(bits, others), expected, rtol=1e-12)

    def test_too_few_characters_for_an_open_set_is_an_error(self, tmp_path: Path) -> None:
        _write_font(tmp_path / "ming.ttf", [0x4E00, 0x4E01], 0)
        fonts = FontCollection.find([tmp_path], [_design("ming")])
        with pytest.raises(DataError, match="the fonts for training have 2, and 0 can be held out"):
            split_glyphs(fonts.draw(), fonts)


class TestWriting:
    def test_the_parts_are_sets_that_training_reads(self, written: Path, split: GlyphSplit) -> None:
        for name in ("train", "validation", "test-a"):
            source, part = open_source(written / name), split.parts[name]
            assert source.num_classes == part.num_classes
            assert sorted(source.labels) == sorted(part.labels)
            names = format_of(written / name).class_names() or []
            assert "".join(name.decode() for name in names) == "".join(map(chr, part.classes))

    def test_an_image_shows_white_ink_on_black(self, written: Path, split: GlyphSplit) -> None:
        source = open_source(written / "test-a")
        label = int(source.labels[0])
        row = split.parts["test-a"].labels.tolist().index(label)
        expected = np.unpackbits(split.parts["test-a"].glyphs.bits[row]).reshape(SIDE, SIDE)
        image = decode_image(source.read(0), source.name_of(0))
        np.testing.assert_array_equal(image, np.repeat(expected[:, :, None] * 255, 3, axis=2))

    def test_pairs_of_the_open_set_lie_next_to_train_and_count_as_unseen(self, written: Path) -> None:
        pairs = read_pairs(written / "train" / "open-set.bin")
        assert (pairs.num_pairs, int(pairs.is_same.sum())) == (5, 3)
        assert is_unseen(written / "train" / "open-set.bin", str(written / "train"))

    def test_the_gallery_has_one_image_of_each_character_and_the_probes_the_others(self, written: Path) -> None:
        gallery, probes = (open_source(written / "open-set" / name) for name in ("gallery", "probes"))
        assert sorted(gallery.labels) == list(range(5))
        assert np.bincount(probes.labels).tolist() == [len(_DESIGNS) - 1] * 5

    def test_a_second_run_writes_the_same_bytes(self, written: Path, fonts_folder: Path, tmp_path: Path) -> None:
        fonts = FontCollection.find([fonts_folder], _DESIGNS)
        write_glyphs(split_glyphs(fonts.draw(), fonts), tmp_path / "again", fonts.to_json())
        names = [path.relative_to(written) for path in written.rglob("*") if path.is_file() and path.suffix != ".cache"]
        names = [name for name in names if not name.name.endswith((".labels", ".cache"))]
        assert len(names) == 24
        for name in names:
            assert (written / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


class TestCommand:
    def test_without_out_it_says_which_packages_are_missing_and_how_to_get_them(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        _write_font(tmp_path / "ReggaeOne-Regular.ttf", [0x4E00, 0x4E01], 0)
        assert main(["data", "glyphs", "--fonts", str(tmp_path)]) == 0
        text = capsys.readouterr().out
        assert "apt-get download fonts-alee" in text
        assert "fonts-reggae" not in text.splitlines()[-1]
        row = next(line for line in text.splitlines() if line.startswith("reggae"))
        assert row.split()[:4] == ["reggae", "test-c", "2", "2"]

    def test_a_folder_without_the_fonts_is_named(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "empty").mkdir()
        for folder, said in (
            ("nowhere", "there is no such folder"),
            ("empty", "lists the fonts and says how to get them"),
        ):
            command = ["data", "glyphs", "--fonts", str(tmp_path / folder), "--out", str(tmp_path / "out")]
            assert main(command) == 2
            told = capsys.readouterr().err
            assert str(tmp_path / folder) in told and said in told
        (tmp_path / "empty" / "fonts-reggae_1.deb").touch()
        assert main(command) == 2
        assert "must be unpacked" in capsys.readouterr().err

    def test_writes_the_most_common_characters(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        wanted = list(range(_FIRST, _FIRST + 42))
        for number, name in enumerate(
            ("uming.ttc", "ukai.ttc", "reggae.ttf", "ReggaeOne-Regular.ttf", "seto.ttf", "setofont.ttf")
        ):
            _write_font(tmp_path / name, [*wanted, _FIRST + 100 + number], number)
        _write_font(tmp_path / "cwkai.ttf", [_FIRST + 200], 9)  # has none of the wanted characters
        command = ["data", "glyphs", "--fonts", str(tmp_path), "--out", str(tmp_path / "out"), "--processes", "1"]
        assert main([*command, "--classes", "40", "--json"]) == 0
        parts = json.loads(capsys.readouterr().out)["parts"]
        assert {name: part["characters"] for name, part in parts.items()} == {
            "train": 40,
            "test-c": 40,
            "open-set/gallery": 2,
            "open-set/probes": 2,
        }
        assert main(command) == 2
        assert "exists already" in capsys.readouterr().err


class TestTable:
    def test_no_lineage_and_no_font_is_in_two_parts(self) -> None:
        designs = read_designs()
        assert len({design.name for design in designs}) == len(designs)
        for key in (lambda design: [design.lineage or design.name], lambda design: [*design.faces]):
            parts: dict[str, set[str]] = {}
            for design in designs:
                for name in key(design):
                    parts.setdefault(name, set()).add(design.part)
            assert all(len(found) == 1 for found in parts.values())

    def test_every_test_is_one_design(self) -> None:
        parts = [design.part for design in read_designs()]
        assert set(parts) == {"train", *TESTS}
        assert [parts.count(part) for part in TESTS] == [1] * len(TESTS)

    def test_fonts_by_the_hand_of_a_test_are_not_in_training(self) -> None:
        for design in read_designs():
            is_by_kouzan = any("kouzan" in face.lower() or "aoyagi" in face.lower() for face in design.faces)
            assert not is_by_kouzan or design.part == "test-b"
