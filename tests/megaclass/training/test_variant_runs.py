"""Every variant of the head through a run: checkpoint, evaluation, export and plan."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open

import megaclass
from megaclass.cli.main import main
from megaclass.export.run_export import add_classes, export_model
from megaclass.inference import load
from megaclass_launch.errors import ConfigError

NUM_CLASSES, WIDTH, DIM = 12, 10, 8
VARIANTS = {
    "dynamic margins": {"margin": "dynamic"},
    "margin schedule": {"margin_schedule": [[0, 0.0], [4, 1.0]]},
    "inter-topk": {"margin": "intertopk", "margin_options": [["k", 2]]},
    "uniface": {"margin": "uniface"},
    "sphereface2": {"margin": "sphereface2"},
    "several labels": {"max_labels": 3, "loss": "decoupled"},
    "label smoothing": {"label_smoothing": 0.1},
    "in-batch": {"sample_rate": 0.5, "negatives": "in-batch"},
    "inner products": {"similarity": "inner", "bias": True, "margin": "softmax", "scale": 1.0},
    "inner products, sub-centres": {"similarity": "inner", "margin": "cosface", "scale": 2.0, "subcentres": 2},
}


def drawn(per_class, seed):
    centres_CW = np.random.default_rng(7).normal(size=(NUM_CLASSES, WIDTH))
    labels_N = np.arange(NUM_CLASSES * per_class) % NUM_CLASSES
    noise_NW = np.random.default_rng(seed).normal(size=(len(labels_N), WIDTH))
    return (centres_CW[labels_N] + 0.2 * noise_NW).astype(np.float32), labels_N


def save(path, rows, labels):
    np.save(path, rows)
    np.save(path.with_suffix(".labels.npy"), labels)
    return path


@pytest.fixture
def data(tmp_path):
    return save(tmp_path / "train.npy", *drawn(12, seed=1)), save(tmp_path / "test.npy", *drawn(4, seed=2))


def settings(path, run_dir, head):
    return {
        "data": {"path": str(path)},
        "backbone": {"name": "linear", "embedding_dim": DIM},
        "head": {"scale": 16.0, **head},
        "optimizer": {"lr": 0.2, "clip_norm": 0.0},
        "train": {"run_dir": str(run_dir), "epochs": 8.0, "global_batch": 24, "report_steps": 2},
        "export": {"onnx": False},
    }


@pytest.mark.ranks
@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_saved_evaluated_exported_and_planned(name, data, tmp_path, capsys):
    train, test = data
    given = settings(train, tmp_path / "run", VARIANTS[name])
    run = megaclass.train(given)
    # Evaluation, and the answers of the loaded model, which are those of its checkpoint.
    (numbers,) = megaclass.evaluate(run.folder, classify=test).numbers.values()
    # By chance 8 %; the centres of some variants need more than these 48 steps.
    assert numbers["top_k"]["1"] > 0.4
    rows, labels = drawn(4, seed=2)
    wanted = [(one.guesses[0].name, one.guesses[0].cosine) for one in run.model.classify(rows, top=1)]
    assert np.mean([int(guess) == label for (guess, _), label in zip(wanted, labels, strict=True)]) == pytest.approx(
        numbers["top_k"]["1"]
    )
    # The exported model answers the same.
    export_model(run.folder, "safetensors", tmp_path / "weights")
    opened = load(tmp_path / "weights").classify(rows, top=1)
    assert [one.guesses[0].name for one in opened] == [guess for guess, _ in wanted]
    np.testing.assert_allclose([one.guesses[0].cosine for one in opened], [cosine for _, cosine in wanted], rtol=1e-5)
    # A plan for a GPU.
    flags = [f"head.{key}={json.dumps(value).replace(' ', '')}" for key, value in given["head"].items()]
    capsys.readouterr()
    assert main(["plan", "features", f"data.path={train}", *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"]
    # A resumed run needs the checkpoint with the state of the margin.
    given["train"]["epochs"] = 9.0
    megaclass.train(given, resume=True)
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 9 * 6 and all(np.isfinite(row["loss"]) for row in rows)


@pytest.mark.ranks
def test_answers_by_inner_products_are_those_of_a_dense_product(data, tmp_path):
    train, _ = data
    run = megaclass.train(settings(train, tmp_path / "run", VARIANTS["inner products"]))
    rows, _ = drawn(4, seed=2)
    with torch.no_grad():
        embeddings_ND = run.model.network(torch.from_numpy(rows)).numpy()
    np.testing.assert_allclose(run.model.embed(rows, normalise=False), embeddings_ND, rtol=1e-5, atol=1e-6)
    centres_CD = run.model.centres.all_rows().numpy()
    assert centres_CD.shape == (NUM_CLASSES, DIM + 1) and centres_CD[:, -1].any()
    products_NC = embeddings_ND @ centres_CD[:, :-1].T + centres_CD[:, -1]
    found = run.model.classify(rows, top=3)
    best_N3 = np.argsort(-products_NC, axis=1)[:, :3]
    assert [[int(guess.name) for guess in one.guesses] for one in found] == best_N3.tolist()
    np.testing.assert_allclose(
        [[guess.cosine for guess in one.guesses] for one in found],
        np.take_along_axis(products_NC, best_N3, 1),
        rtol=1e-4,
    )
    # Lengths count, so turning centres to means of directions would spoil them.
    export_model(run.folder, "safetensors", tmp_path / "weights")
    with safe_open(tmp_path / "weights" / "centres.safetensors", framework="pt") as file:
        assert file.metadata()["similarity"] == "inner"
    save(tmp_path / "more.npy", rows[:2], np.arange(2))
    with pytest.raises(ConfigError, match=r"by inner products, for which the mean .* is no centre"):
        add_classes(run.folder, tmp_path / "more.npy", tmp_path / "added")
    pytest.importorskip("onnxruntime")
    export_model(run.folder, "onnx-classifier", tmp_path / "onnx")
    import onnxruntime

    session = onnxruntime.InferenceSession(str(tmp_path / "onnx" / "classifier.onnx"))
    classes, products = session.run(["class", "cosine"], {"input": rows})
    assert classes[:, 0].tolist() == best_N3[:, 0].tolist()
    np.testing.assert_allclose(products[:, :3], np.take_along_axis(products_NC, best_N3, 1), rtol=1e-4)


@pytest.mark.parametrize(
    ("head", "says"),
    [
        ({"similarity": "inner"}, "head.margin is arcface.*softmax, cosface or your own with head.similarity=inner"),
        ({"similarity": "inner", "margin": "softmax", "scale": 64.0}, "head.scale is 64.*below 64 with"),
        ({"bias": True}, "head.bias is True.*false unless head.similarity is inner"),
        ({"similarity": "inner", "margin": "softmax", "filter_above": 0.5}, "head.filter_above is 0.5.*unset with"),
    ],
)
def test_settings_of_inner_products_that_do_not_fit_are_refused(head, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        megaclass.train(settings(tmp_path / "x.npy", tmp_path / "run", head))


def test_the_plan_counts_more_for_a_variant_of_the_plain_kernel(tmp_path, capsys):
    train = save(tmp_path / "train.npy", *drawn(12, seed=1))
    seconds, memory = [], []
    for margin in ("arcface", "uniface", "intertopk"):
        words = [f"data.path={train}", f"head.margin={margin}", "--classes", "1000000", "--gpu", "h200", "--json"]
        assert main(["plan", "features", *words]) == 0
        plan = json.loads(capsys.readouterr().out)
        seconds.append(plan["step_s"]["head"])
        memory.append(plan["peak_bytes"])
    assert seconds[1] > 1.5 * seconds[0]
    assert memory[0] < memory[1] < memory[2]
