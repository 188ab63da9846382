"""Sections of the report that help to choose a threshold, to compare runs and to find wrong labels."""

import io
import re

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from megaclass.data.sources.open_source import open_source
from megaclass.errors import DataError
from megaclass.evaluation.centres import CentreHealth, centres_in_memory
from megaclass.evaluation.protocols.pairs import curves_of
from megaclass.evaluation.protocols.verification import FAR_TARGETS, far_name, threshold_at_far
from megaclass.evaluation.report.from_runs import ModelReport, ReportData, report_of_runs
from megaclass.evaluation.report.page import operating_points, render_report
from megaclass.evaluation.training_images import (
    FILE,
    examine_training_images,
    read_training_images,
    write_training_images,
)

CPU = torch.device("cpu")


def test_an_operating_point_has_the_threshold_that_accepts_the_most_within_its_false_accept_rate():
    rng = np.random.default_rng(0)
    is_same = np.arange(4000) % 4 == 0
    cosines = np.where(is_same, rng.normal(0.6, 0.15, 4000), rng.normal(0.1, 0.15, 4000)).clip(-1, 1)
    distances = 2 - 2 * cosines
    at_far = {far_name(far): found for far, found in threshold_at_far(distances[~is_same], FAR_TARGETS).items()}
    rows = operating_points(curves_of(distances, is_same, threshold=1.0), at_far)
    assert [title for title, _ in rows] == ["1e-1", "1e-2", "1e-3"], "3,000 different pairs show no smaller rate"
    for title, (threshold, tar, accepted) in rows:
        # verify() prints the same three decimals and decides by the same number.
        at = 1 - at_far[title] / 2
        assert threshold.text == f"{at:.3f}"
        assert (cosines[~is_same] >= at).mean() <= float(title)
        assert tar.text == f"{(cosines[is_same] >= at).mean():.2%}"
        assert int(accepted.text.split()[0]) == pytest.approx((cosines[~is_same] >= at).sum(), abs=1)


def _metrics() -> list[dict[str, float]]:
    return [
        {
            "step": step,
            "epoch": step / 10,
            "loss": 10 / step,
            "learning_rate": 0.1,
            "images_per_second": 100.0,
            "target_cosine": step / 50,
            "head_gradient_norm": 1.0,
            "skipped_steps": step % 2,
            "elapsed_s": 2.0 * step,
        }
        for step in range(1, 41)
    ]


def test_two_runs_are_compared_by_the_settings_that_differ_and_all_that_was_measured_is_drawn():
    configs = ['[head]\nscale = 64.0\nmargin = "arcface"\n', '[head]\nscale = 32.0\nmargin = "arcface"\nm1 = 1.0\n']
    models = [
        ModelReport(name=name, metrics=_metrics(), config_text=text, facts={"Command": f"megaclass train {name}"})
        for name, text in zip(("a", "b"), configs, strict=True)
    ]
    html = render_report(ReportData(title="two", models=models))
    table = re.search(r'<section id="comparison">.*?</section>', html, re.DOTALL)[0]
    cells = re.findall(r"<(?:t[dh]|button)[^>]*>([^<]+)</(?:t[dh]|button)>", table)
    assert cells == ["head.scale", "head.m1", "a", "64.0", "–", "b", "32.0", "1.0"]
    drawn = re.findall(r'<svg [^>]*aria-label="([^"]+)"', html)
    assert {"Cosine with the own centre", "Gradient norm of the centres", "Skipped steps"} <= set(drawn)
    assert html.count(">epoch</text>") == len(drawn), "every curve over steps has a scale in epochs"
    # The scale of the skipped steps is that of their sum.
    skipped = re.search(r'<svg [^>]*aria-label="Skipped steps"[^>]*>', html)[0]
    assert 'data-y="0 20 ' in skipped
    anchors = re.findall(r'<a href="#([\w-]+)">', html)
    assert anchors == ["comparison", "run", "training", "configuration"]
    assert all(f'id="{anchor}"' in html for anchor in anchors)


def _save(folder, shade, number):
    noise = np.random.default_rng([*shade, number]).integers(-8, 8, (16, 16, 3))
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray((np.array(shade) + noise).clip(0, 255).astype(np.uint8)).save(folder / f"{number}.png")


def test_a_wrong_label_is_shown_beside_the_class_it_belongs_to(tmp_path):
    shades = {"anna": (220, 40, 40), "bert": (40, 220, 40), "carl": (40, 40, 220)}
    for name, shade in shades.items():
        for number in range(4):
            _save(tmp_path / "data" / name, shade, number)
    _save(tmp_path / "data" / "anna", shades["carl"], 99)  # the wrong label
    source = open_source(tmp_path / "data")
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 8, bias=False))
    inputs = torch.stack(
        [torch.full((3, 16, 16), 0.0) + torch.tensor(s)[:, None, None] / 127.5 - 1 for s in shades.values()]
    )
    centres = centres_in_memory(network(inputs).detach(), list(shades))
    found = examine_training_images(
        network, source, centres, image_size=16, fit="squash", device=CPU, shown_classes=[0, 1]
    )
    assert (found.num_images, found.num_classes, found.num_confused) == (13, 3, 1)
    (confused,) = found.confused
    assert (confused.own_class, confused.other_class) == ("anna", "carl")
    assert confused.name.endswith("99.png") and confused.other_cosine > 0.9 > confused.own_cosine
    assert found.worst[0].name == "anna" and found.worst[0].num_closer_to_another == 1
    colours = [np.asarray(Image.open(io.BytesIO(one))).mean((0, 1)).argmax() for one in confused.pictures]
    assert colours == [2, 2], "the image and one of carl, both blue"

    run = tmp_path / "run"
    run.mkdir()
    write_training_images(run, found)
    assert read_training_images(run) == found
    health = CentreHealth(
        num_classes=3,
        num_checked=3,
        norms=np.ones(3, np.float32),
        nearest=np.zeros(3, np.float32),
        closest_pairs={(0, 1): 0.5},
        names={0: "anna", 1: "bert"},
        num_unusable=0,
    )
    html = render_report(ReportData(title="x", models=[ModelReport(name="x", centres=health, training_images=found)]))
    assert "1 of them (7.7%) are closer to the centre of another class" in html and "Worst classes" in html
    pairs = re.search(r"Nearest centres</h3>.*?</section>", html, re.DOTALL)[0]
    assert pairs.count("<img ") == 2 and "anna · bert" in pairs

    # A damaged file costs the section, not the report.
    (run / FILE).write_bytes((run / FILE).read_bytes()[:-40])
    with pytest.raises(DataError, match=r"Cannot read .*training_images.npz"):
        read_training_images(run)
    (run / "metrics.jsonl").write_text("")
    assert report_of_runs([run], device=CPU).models[0].training_images is None


def test_a_report_states_the_largest_allocation_and_never_imports_the_backbone_of_a_run_folder(tmp_path, monkeypatch):
    imported = tmp_path / "imported"
    (tmp_path / "evil.py").write_text(f"open({str(imported)!r}, 'w')")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "config.toml").write_text(
        '[data]\npath = "x"\n[backbone]\nname = "evil:Net"\n[train]\nrun_dir = "x"\nglobal_batch = 64\n'
    )
    (tmp_path / "summary.json").write_text('{"num_classes": 1000}')
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 1.0, "gpu_memory_gib": 0.5}\n{"step": 2, "loss": 1.0, "gpu_memory_gib": 0.25}\n'
    )
    page = render_report(report_of_runs([tmp_path], device=CPU))
    assert "Largest allocation on the GPU</dt><dd>0.50 GiB on rank 0</dd>" in page and not imported.exists()
