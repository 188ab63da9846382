"""`megaclass bench step`: three sources in one table, and the part that bounds the run by its name."""

import json

import pytest

from megaclass.bench.step import SourceSpeed, verdict
from megaclass.cli.main import main

PARTS = {"decode": 5.0, "host-to-device": 1.0, "backbone": 30.0, "head": 8.0, "communication": 2.0}


def speeds(waiting_share: float = 0.0, real: float = 100.0) -> list[SourceSpeed]:
    return [
        SourceSpeed("real", real, 10, waiting_share),
        SourceSpeed("synthetic", 120, 8, 0),
        SourceSpeed("debug", 110, 9, 0),
    ]


@pytest.mark.parametrize("longest", ["host-to-device", "backbone", "head", "communication"])
def test_the_longest_part_beside_decoding_bounds_the_run(longest):
    bound_by, advice = verdict(speeds(), {**PARTS, "decode": 50.0, longest: 60.0}, "")
    assert bound_by == longest and advice.startswith("60.0 of the ")
    assert "1.20 times as fast" in advice


def test_decoding_bounds_the_run_only_when_the_rest_is_done_sooner():
    assert verdict(speeds(), {**PARTS, "decode": 40.0}, "")[0] == "backbone"
    assert verdict(speeds(), {**PARTS, "decode": 42.0}, "")[0] == "decode"
    bound_by, advice = verdict(speeds(waiting_share=0.6, real=40.0), PARTS, "data.threads (now 3)")
    assert bound_by == "decode"
    assert "waits 60% of its time" in advice and "3.00 times" in advice and "data.threads (now 3)" in advice


def test_real_synthetic_and_debug_stand_in_one_table(tmp_path, capsys):
    settings = [
        f"data.path={tmp_path / 'set'}",
        f"train.run_dir={tmp_path / 'run'}",
        "synth.identities=8",
        "synth.images_per_identity=4",
        "synth.size=32",
        "synth.pairs=20",
        "train.nproc=1",
        "train.global_batch=8",
        "backbone.embedding_dim=16",
    ]
    assert main(["bench", "step", "recipes/demo.toml", *settings, "--steps", "2"]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["real", "synthetic", "debug"]
    assert [line.split()[0] for line in lines[6:11]] == list(PARTS)
    assert lines[-1].startswith("Bound by ")
    assert "InsightFace RecordIO at" in said.err
    assert main(["bench", "step", "recipes/demo.toml", *settings, "--steps", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bound_by"] in PARTS
    assert not (tmp_path / "run").exists()
