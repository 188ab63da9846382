"""Copies of the metrics for other services, with the real packages, each read back by its own means; and Prometheus."""

import importlib.util
import json
import socket
import sys
import threading
import types
import urllib.request
from contextlib import contextmanager

import pytest
from tests.launch.conftest import wait_until

from megaclass.config.read import load_config_values
from megaclass.training.run.folder import RunFolder
from megaclass.training.sinks import TRACKERS, open_sinks
from megaclass_launch.errors import ConfigError

PROMETHEUS = next(tracker for tracker in TRACKERS if tracker.setting == "train.metrics_port")
ROWS = [
    {"step": 20, "loss": 5.5, "images_per_second": 100.0, "elapsed_s": 1.0, "rank_seconds": {"data": [0.1]}},
    {"step": 40, "loss": 4.25, "images_per_second": 110.0, "elapsed_s": 2.0, "slow_rank": 1, "slow_phase": "data"},
]


def config_of(tmp_path, **train):
    train = {"run_dir": str(tmp_path / "run"), **train}
    return load_config_values({"data": {"path": "debug"}, "train": train}, where="test")


def sent(tmp_path, **train) -> None:
    """Sends the rows through the sinks of a run, as rank 0 does."""
    config = config_of(tmp_path, **train)
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    with open_sinks(config, folder, is_new=True) as send:
        for row in ROWS:
            send(row)
    # The file has every field; the services get the numbers.
    assert [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()] == ROWS


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        [extra] = [tracker.extra for tracker in TRACKERS if package in tracker.packages]
        pytest.skip(f"{package} is not installed: pip install 'megaclass[{extra}]'")


@pytest.mark.ranks
def test_tensorboard_has_every_number_at_its_step(tmp_path, monkeypatch):
    needs("tensorboard")
    # With this module, tensorboard does not load TensorFlow, which takes seconds where it is installed.
    monkeypatch.setitem(sys.modules, "tensorboard.compat.notf", types.ModuleType("tensorboard.compat.notf"))
    sent(tmp_path, tensorboard=True)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [(20, 5.5), (40, 4.25)]
    assert "rank_seconds" not in read.Tags()["scalars"]


@pytest.mark.ranks
def test_wandb_writes_a_run_without_a_network(tmp_path, monkeypatch):
    needs("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    sent(tmp_path, wandb_project="tests")
    [file] = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    # Written by a process of wandb's own, which may come to it after the end of the run.
    wait_until(lambda: all(text in file.read_bytes() for text in (b"images_per_second", b"4.25")), 60, "the row")


@pytest.mark.ranks
def test_mlflow_has_every_number_at_its_step_and_the_settings(tmp_path, monkeypatch):
    needs("mlflow")
    pytest.importorskip("sqlalchemy", reason="pip install 'megaclass[mlflow]'")
    # Without a server: its default, an SQLite file in the current folder.
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    sent(tmp_path, mlflow_experiment="tests")
    import mlflow

    client = mlflow.MlflowClient()
    [run] = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "run"
    assert run.data.params["train.global_batch"] == "512"
    assert [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "loss")] == [
        (20, 5.5),
        (40, 4.25),
    ]


@pytest.mark.ranks
def test_trackio_has_every_number_at_its_step(tmp_path, monkeypatch):
    needs("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    sent(tmp_path, trackio_project="tests")
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs("tests", "run")
    assert [(row["step"], row["loss"]) for row in rows] == [(20, 5.5), (40, 4.25)]


def test_no_service_is_used_unless_its_setting_says_so(tmp_path):
    for tracker in TRACKERS:
        off = {"false": False, "''": "", "0": 0}[tracker.off]
        assert getattr(config_of(tmp_path).train, tracker.setting.removeprefix("train.")) == off
        assert not tracker.is_wanted(config_of(tmp_path).train)


@contextmanager
def served(tmp_path, port):
    with PROMETHEUS.open_session(config_of(tmp_path, metrics_port=port), tmp_path) as send:
        yield send


def test_prometheus_reads_the_newest_row_from_this_machine_only(tmp_path):
    needs("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"Cannot listen at 127\.0\.0\.1:{port} .*Address already in use"):
            served(tmp_path, port).__enter__()
    num_threads = threading.active_count()
    with served(tmp_path, port) as send:
        send({"loss": 5.5, "accuracy_age-db": float("nan")}, 20)
        send({"loss": 4.25, "accuracy_age-db": float("nan")}, 40)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=")
            text = answer.read().decode()
    assert "megaclass_loss 4.25\n" in text and "megaclass_step 40.0\n" in text
    assert "megaclass_accuracy_age_db NaN\n" in text and "python_info" not in text
    # The server has ended: its port is free again.
    with socket.create_server(("127.0.0.1", port)):
        assert threading.active_count() <= num_threads + 1
