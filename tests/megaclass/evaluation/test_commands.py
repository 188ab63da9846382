"""evaluate, report, export and embed as a user types them."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from tests.forked import megaclass_command, run_forked

from megaclass.cli.main import main
from megaclass.data.pair_file import read_pairs
from megaclass.export.safetensors_file import save_model
from megaclass.inference import ImageTreatment, load


@pytest.fixture
def run(make_run):
    return make_run()


def test_evaluate_prints_keeps_and_fails_by_number(run, pairs_bin, tmp_path, capsys):
    (tmp_path / "broken.bin").write_bytes(b"junk")
    code = main(["evaluate", str(run), "--on", str(pairs_bin()), str(tmp_path / "broken.bin"), "--device", "cpu"])
    printed = capsys.readouterr().out
    assert code == 2, "a set was not evaluated"
    assert "lfw" in printed
    assert re.search(r"TAR at FAR 1e-1: \d+\.\d\d % \[\d+\.\d, \d+\.\d\]", printed)
    assert "TAR at FAR 1e-5, TAR at FAR 1e-6: not measurable" in printed
    assert "broken           not evaluated" in printed
    kept = json.loads((run / "evaluation.json").read_text())["sets"]
    assert 0 <= kept["lfw"]["accuracy"] <= 1
    assert "not a whole pickle" in kept["broken"]["error"]


def test_a_set_that_fails_later_keeps_the_numbers_of_before(run, pairs_bin):
    path = pairs_bin()
    arguments = ["evaluate", str(run), "--on", str(path), "--device", "cpu"]
    assert main(arguments) == 0
    before = json.loads((run / "evaluation.json").read_text())
    path.write_bytes(b"junk")
    assert main(arguments) == 2
    assert json.loads((run / "evaluation.json").read_text()) == before


def test_numbers_that_cannot_be_kept_are_printed_all_the_same(run, pairs_bin, capsys):
    to = ["--device", "cpu", "--json", "--out", "/proc/nowhere"]
    assert main(["evaluate", str(run), "--on", str(pairs_bin()), *to]) == 2
    printed = capsys.readouterr()
    assert 0 <= json.loads(printed.out)["lfw"]["accuracy"] <= 1
    assert "Cannot write /proc/nowhere" in printed.err


@pytest.mark.ranks
def test_several_processes_print_once_and_give_the_numbers_of_one(run, pairs_bin, tmp_path):
    command = ["evaluate", str(run), "--on", str(pairs_bin()), "--json", "--device", "cpu"]
    numbers = []
    for nproc in ("1", "2"):
        done = run_forked(megaclass_command, *command, "--nproc", nproc)
        assert done.returncode == 0, done.stderr
        assert len(re.findall(r"^evaluating lfw (\d+)/\1, 0 s left$", done.stderr, re.MULTILINE)) == 1, "one bar"
        numbers.append(json.loads(done.stdout)["lfw"])
    one, two = numbers
    assert two["accuracy"] == one["accuracy"]
    assert two["tar_at_far_95"] == one["tar_at_far_95"]
    assert two["xnorm"] == pytest.approx(one["xnorm"], rel=1e-6)


def test_embeddings_of_folders_identify(run, tmp_path, picture, capsys):
    for folder, takes in (("gallery", [0]), ("probes", [1, 2])):
        for identity in range(4):
            place = tmp_path / folder / f"person-{identity}"
            place.mkdir(parents=True)
            for take in takes:
                (place / f"{take}.png").write_bytes(picture(identity, take))
    for folder in ("gallery", "probes"):
        out = str(tmp_path / f"{folder}.npy")
        assert main(["embed", str(run), str(tmp_path / folder), "--out", out, "--device", "cpu"]) == 0
    assert np.load(tmp_path / "probes.npy").shape == (8, 16)
    assert "8 × 16" in capsys.readouterr().out
    options = ["--probes", str(tmp_path / "probes.npy"), "--gallery", str(tmp_path / "gallery.npy"), "--device", "cpu"]
    assert main(["evaluate", str(run), *options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["probes in gallery"]["rank_k"]["1"] == 1.0


def test_probes_and_gallery_are_counted_by_a_bar_each(run, tmp_path, picture, capsys):
    for folder, num_people in (("gallery", 4), ("probes", 3)):
        for person in range(num_people):
            (tmp_path / folder / f"person-{person}").mkdir(parents=True)
            (tmp_path / folder / f"person-{person}" / "0.png").write_bytes(picture(person, 0))
    paths = ["--probes", str(tmp_path / "probes"), "--gallery", str(tmp_path / "gallery")]
    assert main(["evaluate", str(run), *paths, "--device", "cpu", "--json"]) == 0
    told = capsys.readouterr().err
    assert told.index("evaluating probes in gallery 3/3") < told.index("evaluating probes in gallery 4/4")


def test_report_and_export_say_where_they_wrote(run, make_run, pairs_bin, capsys):
    other = make_run("other")
    main(["evaluate", str(run), "--on", str(pairs_bin()), "--device", "cpu"])
    capsys.readouterr()
    assert main(["report", str(run), str(other), "--out", str(run / "both.html")]) == 0
    assert capsys.readouterr().out.strip() == str(run / "both.html")
    page = (run / "both.html").read_text()
    assert "Class centres: demo" in page
    assert "ab12" in page, "the data's fingerprint"
    # Comparing runs leaves their own reports as they are.
    (run / "report.html").write_text("its own")
    assert main(["report", str(run), str(other)]) == 0
    assert capsys.readouterr().out.strip() == str(run.resolve().parent / "demo-and-other.html")
    assert (run / "report.html").read_text() == "its own"
    assert main(["export", str(run), "--to", "safetensors"]) == 0
    assert capsys.readouterr().out.strip() == str(run / "export" / "safetensors")
    assert (run / "export" / "safetensors" / "model.safetensors").is_file()


def test_pairs_whose_images_are_in_the_training_data_are_told(run, pairs_bin, tmp_path, capsys):
    bin_path = pairs_bin()
    for number, encoded in enumerate(read_pairs(bin_path).images[:10]):
        (tmp_path / "data" / f"{number % 2}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / f"{number % 2}" / f"{number}.png").write_bytes(encoded)
    command = [
        "evaluate",
        str(run),
        "--on",
        str(bin_path),
        "--device",
        "cpu",
        "--training-data",
        str(tmp_path / "data"),
    ]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "WARNING: 10 of its 80 images are in the training data (all 10 training images were compared)" in said
    assert main(["report", str(run)]) == 0
    assert "10 of its 80 images are in the training data" in (run / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "RUN"], "Nothing to evaluate on"),
        (["evaluate", "RUN", "--gallery", "g"], "need --probes"),
        (["evaluate", "RUN", "--on", "nowhere.bin.gz"], "Cannot evaluate on nowhere.bin.gz"),
        (["evaluate", "nowhere.onnx", "--on", "lfw.bin"], "There is no model at nowhere.onnx"),
        (["report", "nowhere"], "nowhere is not a run folder"),
        (["report", "RUN", "--out", "/proc/nowhere/report.html"], "Cannot write /proc/nowhere/report.html"),
        (["export", "RUN", "--to", "insightface", "--out", "/proc/nowhere"], "Cannot write /proc/nowhere"),
        (["export", "nowhere.pth", "--to", "onnx"], "There is no model at nowhere.pth"),
        (["export", "RUN/config.toml", "--to", "onnx"], "name the folder to write with --out"),
        (["embed", "RUN", "nowhere", "--out", "e.npy"], "the folder does not exist"),
    ],
)
def test_what_a_user_can_mend_is_one_line_and_exit_code_2(run, capsys, arguments, message):
    assert main([one.replace("RUN", str(run)) for one in arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_mirroring_follows_training_unless_it_is_asked_for(make_run, pairs_bin, picture, tmp_path, capsys):
    path = pairs_bin()
    plain = make_run("plain")

    def evaluate(model, *options):
        assert main(["evaluate", str(model), "--on", str(path), "--device", "cpu", "--json", *options]) == 0
        return json.loads(capsys.readouterr().out)["lfw"]

    mirrored, alone = evaluate(plain), evaluate(plain, "--no-mirror")
    assert "mirror" not in mirrored and alone["mirror"] is False
    assert alone["xnorm"] != mirrored["xnorm"]
    exported = tmp_path / "exported"
    model = load(plain)
    treated = replace(model, treatment=ImageTreatment(fit="crop", mirror=False))
    save_model(
        tmp_path / "model.safetensors",
        treated.network,
        metadata={"backbone": "slim", "embedding_dim": "16", "image_size": "32", "fit": "crop", "mirror": "false"},
    )
    assert load(tmp_path / "model.safetensors").treatment == treated.treatment
    assert evaluate(tmp_path / "model.safetensors")["xnorm"] == pytest.approx(alone["xnorm"])
    assert evaluate(tmp_path / "model.safetensors", "--mirror")["xnorm"] == pytest.approx(mirrored["xnorm"])

    main(["export", str(tmp_path / "model.safetensors"), "--to", "safetensors", "--out", str(exported)])
    assert load(exported / "model.safetensors").treatment == treated.treatment
    assert json.loads((exported / "config.json").read_text())["fit"] == "crop"
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    (pictures / "a.png").write_bytes(picture(1))
    for options in ([], ["--mirror"]):
        out = tmp_path / f"e{len(options)}.npy"
        assert main(["embed", str(exported / "model.safetensors"), str(pictures), "--out", str(out), *options]) == 0
    assert not np.allclose(np.load(tmp_path / "e0.npy"), np.load(tmp_path / "e1.npy"))


def test_images_of_another_size_are_fitted_where_the_model_says_how_or_the_user_does(make_run, pairs_bin, capsys):
    run, path = make_run(), pairs_bin("large", size=48)
    on = ["evaluate", str(run), "--on", str(path), "--device", "cpu"]
    assert main(on) == 2
    assert "--fit pad, crop or squash" in capsys.readouterr().out
    for options in (["--resize"], ["--fit", "pad"]):
        assert main([*on, *options]) == 0
        assert "80 of 80 images" in capsys.readouterr().err
