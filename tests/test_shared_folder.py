"""Folders that the workers of a test session share."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.shared_folder import made_once


@dataclass
class Worker:
    """Stands for the `tmp_path_factory` of one worker."""

    folder: Path

    def getbasetemp(self):
        self.folder.mkdir(exist_ok=True)
        return self.folder


def test_the_second_worker_gets_the_folder_that_the_first_has_filled(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    first = made_once(Worker(tmp_path / "gw0"), "name", lambda folder: (folder / "file").write_text("of the first"))
    second = made_once(Worker(tmp_path / "gw1"), "name", lambda folder: pytest.fail("made again"))
    assert first == second and (second / "file").read_text() == "of the first"


def test_without_workers_sessions_share_nothing(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    first, second = (made_once(Worker(tmp_path / name), "name", lambda folder: None) for name in ("a", "b"))
    assert first != second


def test_a_folder_whose_making_fails_is_made_again(tmp_path):
    def fail(folder):
        (folder / "half").touch()
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        made_once(Worker(tmp_path / "gw0"), "name", fail)
    again = made_once(Worker(tmp_path / "gw0"), "name", lambda folder: (folder / "whole").touch())
    assert [path.name for path in again.iterdir()] == ["whole"]
