"""megaclass.load and what a loaded model does: similarity, verify, index, search, and the Hugging Face Hub."""

import importlib.util
import io
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.forked import run_forked

import megaclass
from megaclass.cli.main import main
from megaclass.data.pair_file import read_pairs
from megaclass.errors import CheckpointError, DataError
from megaclass.inference.search_page import _place
from megaclass.inference.thresholds import choose_threshold


def load_sibling(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(make_run, pairs_bin):
    """A run that was evaluated on lfw.bin."""
    run = make_run()
    assert main(["evaluate", str(run), "--on", str(pairs_bin()), "--device", "cpu"]) == 0
    return run


@pytest.fixture
def gallery(tmp_path, picture):
    folder = tmp_path / "gallery"
    for identity in range(6):
        (folder / f"person-{identity}").mkdir(parents=True)
        for take in range(3):
            (folder / f"person-{identity}" / f"{take}.png").write_bytes(picture(identity, take))
    return folder


def test_similarity_is_the_cosine_of_images_folders_and_embeddings(run, gallery):
    model = megaclass.load(run)
    rows_ND = model.embed(gallery)
    assert rows_ND.shape == (18, model.embedding_dim)
    np.testing.assert_allclose(rows_ND, model.embed(sorted(gallery.rglob("*.png"))), atol=1e-6)
    np.testing.assert_allclose(model.similarity(gallery), rows_ND @ rows_ND.T, atol=1e-6)
    image = gallery / "person-1" / "0.png"
    np.testing.assert_allclose(model.similarity(image, 3 * rows_ND[:2]), model.embed(image) @ rows_ND[:2].T, atol=1e-6)
    with pytest.raises(DataError, match=r"embeddings of shape \(2, 3\)"):
        model.similarity(np.ones((2, 3)))


def test_verify_uses_the_thresholds_of_the_evaluation_and_their_false_accept_rates(run, pairs_bin, capsys):
    model, pairs = megaclass.load(run), read_pairs(pairs_bin())
    images = [np.asarray(Image.open(io.BytesIO(one)).convert("RGB")) for one in pairs.images]
    rows_ND = model.embed(images)
    cosines = (rows_ND[0::2] * rows_ND[1::2]).sum(1)
    different = cosines[~pairs.is_same]
    for far in (None, 0.1):
        verdicts = [model.verify(images[2 * n], images[2 * n + 1], far=far) for n in range(len(cosines))]
        threshold = verdicts[0].threshold
        assert [verdict.is_same for verdict in verdicts] == (cosines > threshold.similarity).tolist()
        accepted = np.mean(different > threshold.similarity)
        assert accepted == pytest.approx(threshold.far) if far is None else accepted <= far
        assert (threshold.evaluated_on, threshold.num_different) == ("lfw", 20)
        assert bool(verdicts[0]) is verdicts[0].is_same
        assert re.search(r"(same|different): cosine .*, threshold .* \(false accept rate .* on lfw\)", str(verdicts[0]))
    with pytest.raises(
        DataError, match=r"false accept rate of 0.001 from lfw \(20 different pairs\): measured are 1e-1"
    ):
        model.verify(images[0], images[1], far=1e-3)
    with pytest.raises(DataError, match="no threshold from 'cfp': it was evaluated on lfw"):
        model.verify(images[0], images[1], evaluation_set="cfp")


def test_too_few_pairs_for_any_rate_are_told_with_how_to_get_more():
    point = {"threshold": 1.0, "num_pairs": 10, "num_same": 5, "threshold_at_far": {"1e-1": None}}
    with pytest.raises(DataError, match=r"\(5 different pairs\): they are too few for any; evaluate on more pairs"):
        choose_threshold({"lfw": point}, far=0.1, evaluation_set=None, model="x")


def test_a_model_whose_evaluation_is_of_other_weights_says_that_it_has_no_threshold(gallery, run):
    first, second = sorted(gallery.rglob("*.png"))[:2]
    (run / "evaluation.json").write_text(
        json.dumps(json.loads((run / "evaluation.json").read_text()) | {"model": {"name": "x", "weights": "0"}})
    )
    model = megaclass.load(run)
    with pytest.raises(DataError, match=r"No threshold is known for .*megaclass evaluate RUN --on SET"):
        model.verify(first, second)
    verdict = model.verify(first, second, threshold=-1)
    assert verdict and verdict.threshold.far is None


def test_an_exported_folder_and_its_file_have_the_thresholds_of_the_run(run, tmp_path, capsys):
    """For ONNX, whose export takes long, test_models.py shows it."""
    assert main(["export", str(run), "--to", "safetensors", "--out", str(tmp_path / "exported")]) == 0
    expected = megaclass.load(run).threshold()
    assert megaclass.load(tmp_path / "exported").threshold() == expected
    assert megaclass.load(tmp_path / "exported" / "model.safetensors").threshold() == expected


def test_an_index_finds_what_brute_force_finds_from_many_threads_and_reopens(run, gallery, tmp_path):
    model = megaclass.load(run)
    (gallery / "broken.png").write_bytes(b"junk")
    index = model.index(gallery)
    assert len(index) == 18, "the bad image is left out"
    queries = sorted(gallery.rglob("person*/*.png"))
    rows_ND = model.embed(queries)
    order = np.argsort(-(rows_ND @ rows_ND.T), axis=1, kind="stable")[:, :4]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda query: index.search(query, k=4), queries))
    for row, neighbours in enumerate(found):
        assert [one.path for one in neighbours] == [str(queries[place]) for place in order[row]]
        assert neighbours[0].similarity == pytest.approx(1, abs=1e-5)
    index.save(tmp_path / "gallery.npy")
    again = model.index(tmp_path / "gallery.npy")
    assert [one.path for one in again.search(queries[7], k=4)] == [one.path for one in found[7]]
    with pytest.raises(DataError, match="search\\(\\) takes one image, but was given 18"):
        index.search(queries)


def test_the_search_command_prints_a_table_and_writes_a_page_with_pictures(run, gallery, tmp_path, capsys):
    query, page = gallery / "person-2" / "0.png", tmp_path / "page.html"
    assert main(["search", str(run), str(gallery), str(query), "-k", "3", "--out", str(page)]) == 0
    printed = capsys.readouterr().out
    assert re.search(rf"1   1\.000  {re.escape(str(query))}\n", printed)
    assert len(re.findall(r"^ +\d+ +-?\d\.\d{3}  ", printed, re.MULTILINE)) == 3
    text = page.read_text()
    assert text.count("data:image/jpeg;base64,") == 4 and "measured on lfw" in text
    assert main(["search", str(run), str(tmp_path / "none"), str(query)]) == 2
    assert "none" in capsys.readouterr().err


WITHOUT_EXTRAS = """
import sys
for name in ("rich", "onnx", "onnxruntime", "onnxscript", "tensorboard", "wandb", "huggingface_hub", "cloudpickle",
             "yaml", "ray", "tensorflow", "lightning", "shtab"):
    sys.modules[name] = None
import megaclass
model = megaclass.load(sys.argv[1])
print([one.path for one in model.index(sys.argv[2]).search(sys.argv[3], k=1)])
try:
    megaclass.load("hf://user/name")
except megaclass.UserError as error:
    print(error)
"""


@pytest.mark.ranks
def test_loading_and_searching_need_no_extras(run, gallery):
    query = str(gallery / "person-3" / "1.png")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS, str(run), str(gallery), query],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        str([query]),
        "Opening hf://user/name needs huggingface-hub: pip install 'megaclass[hub]'",
    ]


def push_and_load(run: Path) -> None:
    assert main(["push", str(run), "user/name", "--licence", "CC-BY-NC-4.0"]) == 0
    model = megaclass.load("hf://user/name")
    print(model.threshold(), model.fingerprint() == megaclass.load(run).fingerprint())
    import huggingface_hub.constants

    huggingface_hub.constants.HF_HUB_OFFLINE = True
    assert megaclass.load("hf://user/name").name == "hf://user/name"
    huggingface_hub.constants.HF_HUB_OFFLINE = False
    try:
        megaclass.load("hf://user/absent")
    except megaclass.UserError as error:
        print(str(error).splitlines()[0])


@pytest.mark.ranks
def test_a_model_goes_to_the_hub_and_comes_back(run, tmp_path):
    with load_sibling("hub_server").hub_server() as (address, files, requests):
        # In a process of its own, because huggingface_hub reads these when it is imported.
        env = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": "hf_test"}
        done = run_forked(push_and_load, run, env=env)
        assert done.returncode == 0, done.stderr + "\n".join(requests)
    assert set(files["user/name"]) >= {"README.md", "config.json", "model.safetensors"}
    assert "centres.safetensors" not in files["user/name"], "names of people are published on request only"
    card = files["user/name"]["README.md"].decode()
    assert card.startswith("---\nlicense: cc-by-nc-4.0\n") and "| lfw | 10 folds" in card
    published, threshold, absent = done.stdout.splitlines()
    assert published == 'published; to use it: megaclass.load("hf://user/name")'
    assert "evaluated_on='lfw'" in threshold and threshold.endswith("True")
    assert absent.startswith("Cannot fetch hf://user/absent from the Hugging Face Hub")


def test_an_address_that_is_no_repository_is_refused():
    with pytest.raises(CheckpointError, match=r"expected hf://user/name or hf://user/name@revision"):
        megaclass.load("hf://name")


def test_a_list_from_a_stranger_does_not_choose_which_files_the_page_of_a_search_shows(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    for place in ("secret.png", "elsewhere/beside.png", "work/here.png"):
        (tmp_path / place).touch()
    (tmp_path / "elsewhere" / "link.png").symlink_to(tmp_path / "secret.png")
    gallery = tmp_path / "elsewhere" / "gallery.npy"
    assert _place(gallery, "beside.png") == tmp_path / "elsewhere/beside.png"
    assert _place(gallery, "here.png") == Path("here.png")
    assert _place(gallery, str(tmp_path / "work/here.png")) == tmp_path / "work/here.png"
    for name in (str(tmp_path / "secret.png"), "../secret.png", "link.png", "/etc/passwd", "none.png"):
        assert _place(gallery, name) is None, name
    # The paths of a folder are those that the index has found there.
    assert _place(tmp_path, str(tmp_path / "secret.png")) == tmp_path / "secret.png"


def test_a_path_of_the_hub_keeps_its_address():
    with pytest.raises(CheckpointError, match=r"Cannot read 'hf://name': expected hf://user/name"):
        megaclass.load(Path("hf://name"))
