"""`megaclass data …` as it is typed."""

import json
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from megaclass.checkpoint.class_names import class_list
from megaclass.cli.main import main
from megaclass.data.decode import decode_image
from megaclass.data.pair_file import read_pairs
from megaclass.data.sources.open_source import open_source


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("cli") / "set"
    arguments = ["--identities", "4", "--images-per-identity", "5", "--size", "16", "--pairs", "20"]
    assert main(["data", "synth", *arguments, "--out", str(out)]) == 0
    return out


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["data", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def run_json(capsys, *arguments: object) -> dict:
    code, out, _ = run(capsys, *arguments, "--json")
    assert code == 0
    return json.loads(out)


def test_pack_says_which_source_it_chose_and_what_it_wrote(capsys, folder, tmp_path):
    code, out, err = run(capsys, "pack", folder, "--out", tmp_path / "tar", "--format", "tar")
    assert code == 0 and out == f"{tmp_path / 'tar'}: 20 images of 4 classes\n"
    assert f"InsightFace RecordIO at {folder}: 20 images of 4 classes, 16 × 16" in err
    assert "packing images 20/20" in err
    assert run_json(capsys, "pack", tmp_path / "tar", "--out", tmp_path / "rec", "--labels", "id2")["labels_in_id2"]
    _, out, _ = run(capsys, "pack", tmp_path / "tar", "--out", tmp_path / "rec2", "--labels", "id2")
    assert "64-bit numbers in id2" in out


@pytest.fixture
def people(tmp_path):
    """Four identities; the second and the last have no image."""
    for number, name in enumerate(["Ada", "Bob", "Zoë W", "zz"]):
        (tmp_path / "people" / name).mkdir(parents=True)
        for image in range(0 if number % 2 else 3):
            Image.new("RGB", (16, 16), (60 * number, 70 * image, 0)).save(tmp_path / "people" / name / f"{image}.png")
    return tmp_path / "people"


ALL_NAMES = "Ada\nBob\nZoë W\nzz\n"


def test_every_copy_of_data_carries_the_names_of_its_classes(capsys, people, tmp_path):
    def names(path):
        return class_list(str(path), open_source(path)).text.decode()

    steps = [
        ("pack", people, "rec"),
        ("pack", tmp_path / "rec", "again"),
    ]
    for command, path, out in steps:
        assert run(capsys, command, path, "--out", tmp_path / out)[0] == 0
        assert (tmp_path / out / "classes.txt").read_text() == names(tmp_path / out) == ALL_NAMES
    assert run(capsys, "verify", tmp_path / "again", "--repair", tmp_path / "repaired")[0] == 0
    assert names(tmp_path / "repaired") == ALL_NAMES
    (tmp_path / "again" / "train.idx").unlink()
    assert run(capsys, "verify", tmp_path / "again", "--repair", tmp_path / "without-index")[0] == 0
    assert names(tmp_path / "without-index") == ALL_NAMES
    # Shards end with their largest label.
    assert run(capsys, "pack", people, "--format", "tar", "--out", tmp_path / "tar")[0] == 0
    assert names(tmp_path / "tar") == "Ada\nBob\nZoë W\n"


def test_where_classes_have_numbers_only_no_names_are_written(capsys, folder, people, tmp_path):
    assert run(capsys, "pack", folder, "--out", tmp_path / "rec")[0] == 0
    # Two sources joined: a name may be in both, so classes are called by number, packed or not.
    assert run(capsys, "pack", f"{people},{people}", "--out", tmp_path / "joined")[0] == 0
    for path in (tmp_path / "rec", tmp_path / "joined"):
        assert not (path / "classes.txt").exists() and not class_list(str(path), open_source(path)).text


def test_a_list_of_names_that_does_not_fit_is_refused_by_pack_and_left_out_by_repair(capsys, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "set")
    (tmp_path / "set" / "classes.txt").write_text("one\ntwo\n")
    code, _, err = run(capsys, "pack", tmp_path / "set", "--out", tmp_path / "rec")
    assert code == 2 and "names 2 classes, but has labels for 4" in err and not (tmp_path / "rec").exists()
    code, out, _ = run(capsys, "verify", tmp_path / "set", "--repair", tmp_path / "repaired")
    assert code == 0 and "class names are not copied" in out and "of 4" in out
    assert not (tmp_path / "repaired" / "classes.txt").exists()


def test_inspect_shows_counts(capsys, folder):
    code, out, _ = run(capsys, "inspect", folder)
    assert code == 0
    for line in ("images            20", "classes           4, 0 of them without images", "labels            0 to 3"):
        assert line in out
    assert "16 × 16: 20 (of 20 examined)" in out and "4–7          4  █" in out
    assert run_json(capsys, "inspect", folder)["histogram"] == {"1": 0, "2–3": 0, "4–7": 4}


def test_verify_lists_the_bad_keys_and_repairs(capsys, folder, tmp_path):
    assert run_json(capsys, "verify", folder)["is_sound"]
    run_json(capsys, "pack", folder, "--out", tmp_path / "set", "--no-shuffle")
    content = bytearray((tmp_path / "set" / "train.rec").read_bytes())
    offset = int((tmp_path / "set" / "train.idx").read_text().splitlines()[7].split("\t")[1])
    content[offset + 32 : offset + 40] = bytes(8)
    (tmp_path / "set" / "train.rec").write_bytes(content)
    code, out, err = run(capsys, "verify", tmp_path / "set")
    assert code == 1 and "20 images, 1 bad, 0 faults" in out and "key 7, byte" in out
    assert "checking records 25/25" in err
    code, out, _ = run(capsys, "verify", tmp_path / "set", "--repair", tmp_path / "clean")
    assert code == 0 and "19 readable images of 4 classes" in out
    assert run_json(capsys, "verify", tmp_path / "clean")["num_images"] == 19


def test_the_seed_of_pack_changes_the_order_of_the_bytes_and_nothing_else(capsys, folder, tmp_path):
    for seed in (1, 2):
        run_json(capsys, "pack", folder, "--out", tmp_path / f"{seed}", "--seed", seed)
    first, second, original = (open_source(path) for path in (tmp_path / "1", tmp_path / "2", folder))
    assert not np.array_equal(first.offsets, second.offsets)
    assert [first.read(index) for index in range(20)] == [original.read(index) for index in range(20)]
    assert np.array_equal(first.labels, original.labels)


def test_pairs_are_half_of_one_class_and_none_comes_twice(capsys, folder, tmp_path):
    assert run_json(capsys, "pairs", folder, "--out", tmp_path / "a.bin", "--pairs", 40)["num_pairs"] == 40
    pair_set, source = read_pairs(tmp_path / "a.bin"), open_source(folder)
    label_of = {source.read(index): int(source.labels[index]) for index in range(20)}
    pairs = [tuple(pair_set.images[2 * number : 2 * number + 2]) for number in range(40)]
    assert [label_of[a] == label_of[b] for a, b in pairs] == pair_set.is_same.tolist() == [True, False] * 20
    assert len({frozenset(pair) for pair in pairs}) == 40 and all(a != b for a, b in pairs)
    assert decode_image(pairs[0][0], "pair").shape == (16, 16, 3)
    code, _, err = run(capsys, "pairs", folder, "--out", tmp_path / "b.bin", "--pairs", 100)
    assert code == 2 and "there are 40 pairs of one class (50 are needed)" in err
    [most] = re.findall(r"Ask for at most (\d+): --pairs \1\.", err)
    code, _, err = run(capsys, "pairs", folder, "--out", tmp_path / "b.bin", "--pairs", most)
    assert code == 0 and most == "40" and len(read_pairs(tmp_path / "b.bin").is_same) == 40


def test_pairs_hold_no_image_that_is_broken(capsys, tmp_path):
    for number in range(24):
        path = tmp_path / "faces" / f"{number // 6}" / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), (number, number, number)).save(path)
        if number % 6 == 1:
            path.write_bytes(path.read_bytes()[:50])
    code, _, err = run(capsys, "pairs", tmp_path / "faces", "--out", tmp_path / "a.bin", "--pairs", 30)
    assert code == 0 and "skipped a bad image: Cannot decode" in err
    pair_set = read_pairs(tmp_path / "a.bin")
    assert len(pair_set.images) == 60
    for image in pair_set.images:
        assert decode_image(image, "pair").shape == (16, 16, 3)
    code, _, err = run(capsys, "pairs", tmp_path / "faces", "--out", tmp_path / "b.bin", "--pairs", 90)
    assert code == 2 and "different pairs of images that decode" in err and not (tmp_path / "b.bin").exists()


def test_pack_fits_images_to_a_rectangle_and_says_how_many(capsys, tmp_path):
    for number, size in enumerate([(16, 16), (16, 16), (40, 20)]):
        (tmp_path / "faces" / f"{number}").mkdir(parents=True)
        Image.new("RGB", size).save(tmp_path / "faces" / f"{number}" / "a.png")
    code, out, _ = run(capsys, "pack", tmp_path / "faces", "--out", tmp_path / "a")
    assert code == 0 and "; 1 have another size than 16 × 16 and are kept; --size fits them" in out
    fitting = ["--size", "32x16", "--fit", "pad"]
    code, out, _ = run(capsys, "pack", tmp_path / "faces", "--out", tmp_path / "b", *fitting)
    assert code == 0 and "; 3 have another size than 16 × 32 (width × height) and were fitted to it (pad)" in out
    assert open_source(tmp_path / "b").image_size == (32, 16)
    with pytest.raises(SystemExit):
        run(capsys, "pack", tmp_path / "faces", "--out", tmp_path / "c", "--size", "32x16x3")


def test_stage_copies_and_removes(capsys, folder, tmp_path):
    staged = run_json(capsys, "stage", folder, "--to", tmp_path / "ram")["path"]
    assert open_source(staged).num_images == 20
    assert run_json(capsys, "stage", "--remove", "--to", tmp_path / "ram")["removed"] >= 3


def test_bench_gives_images_a_second_by_stage(capsys, folder):
    speeds = run_json(capsys, "bench", folder, "--seconds", "0.02", "--batch", "8", "--threads", "2")
    assert len(speeds) == 6 and all(speed["images_per_second"] > 0 for speed in speeds.values())
    code, out, _ = run(capsys, "bench", folder, "--seconds", "0.02", "--batch", "8")
    assert code == 0 and "read + decode + collate" in out


def test_places_that_cannot_be_written_are_named_in_one_line(capsys, folder, tmp_path):
    (tmp_path / "file").write_text("")
    for arguments in (
        ["pairs", folder, "--pairs", "4", "--out", tmp_path / "absent" / "x.bin"],
        ["pairs", folder, "--pairs", "4", "--out", tmp_path / "file" / "x.bin"],
    ):
        code, _, err = run(capsys, *arguments)
        last = err.splitlines()[-1]
        assert code == 2 and last.startswith("megaclass: Cannot write") and str(tmp_path) in last, err


def test_what_the_user_can_mend_is_one_line_and_exit_code_2(capsys, tmp_path):
    for arguments in (
        ["inspect", tmp_path / "absent"],
        ["pack", "synthetic:x", "--out", tmp_path / "x"],
        ["stage", "--to", "x"],
    ):
        code, _, err = run(capsys, *arguments)
        assert code == 2 and err.startswith("megaclass: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    "given",
    [
        ["data", "pack", "photos", "--out", "packed", "--threads", "0"],
        ["data", "glyphs", "--processes", "-1"],
        ["data", "align", "photos", "--out", "crops", "--points", "points.txt", "--size", "0"],
        ["data", "bench", "photos", "--batch", "0"],
        ["evaluate", "run", "--on", "lfw.bin", "--batch-size", "0"],
        ["search", "run", "photos", "query.jpg", "-k", "0"],
    ],
)
def test_a_number_below_1_is_refused_before_anything_is_read(given, capsys):
    with pytest.raises(SystemExit) as ended:
        main(given)
    assert ended.value.code == 2
    assert f"argument {given[-2]}: '{given[-1]}' is not a whole number of 1 or more" in capsys.readouterr().err


def test_a_list_of_names_that_is_too_short_is_no_traceback(tmp_path, capsys):
    for label in range(2):
        (tmp_path / "own" / f"{label}").mkdir(parents=True)
        Image.new("RGB", (16, 16)).save(tmp_path / "own" / f"{label}" / "0.png")
    (tmp_path / "own" / "classes.txt").write_text("anna\n")
    assert main(["data", "unpack", str(tmp_path / "own"), "--out", str(tmp_path / "out")]) == 2
    assert "names 1 classes, but has labels for 2" in capsys.readouterr().err
