"""Folders that all workers of a test session share: an expensive fixture is computed once, not once per worker.

    @pytest.fixture(scope="module")
    def run_folder(tmp_path_factory):
        return made_once(tmp_path_factory, "train-run", train_into)

The name is unique in the test suite. Tests that change the folder work on a copy.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that `make(folder)` has filled, in the first worker that asks for this name.

    `make` gets an empty folder, whose path is the same in all workers; other workers wait until it returns. What tests
    need besides files, such as the output of a command, `make` writes to a file in the folder. If it raises, the folder
    is removed and the next worker that asks tries again.
    """
    session = tmp_path_factory.getbasetemp()
    # A worker has a folder of its own in that of the session. Without workers, the parent belongs to many sessions.
    if "PYTEST_XDIST_WORKER" in os.environ:
        session = session.parent
    folder, finished = session / name, session / f"{name}.finished"
    with FileLock(session / f"{name}.lock"):
        if not finished.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a worker that was killed
            folder.mkdir()
            try:
                make(folder)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            finished.touch()
    return folder
