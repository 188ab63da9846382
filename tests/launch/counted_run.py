"""Starts a training whose backbone writes down its steps and holds before some of them: see counting_backbone.py."""

import json
import os
from pathlib import Path

from tests.launch.conftest import Run, wait_until


class CountedRun:
    """A `megaclass train` with that backbone: images made in memory, 6 steps per epoch."""

    def __init__(self, folder: Path, *, run_dir: Path) -> None:
        folder.mkdir()
        self._folder, self._run_dir = folder, run_dir
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        self.env = {"COUNT_DIR": str(folder), "PYTHONPATH": path}

    def train(self, *settings: str) -> tuple[str, ...]:
        recipe = self._folder / "recipe.toml"
        recipe.write_text(
            f"""
            [data]
            path = "synthetic:12x96@32"
            [backbone]
            name = "counting_backbone:CountingNet"
            embedding_dim = 16
            [train]
            run_dir = "{self._run_dir}"
            global_batch = 16
            device = "cpu"
            [export]
            onnx = false
            """
        )
        return ("megaclass", "train", str(recipe), *settings)

    def hold(self, step: int) -> None:
        (self._folder / f"hold-{step}").touch()

    def release(self, step: int) -> None:
        (self._folder / f"hold-{step}").unlink()

    def rows(self) -> list[list]:
        """Generation, step, rank, number of ranks and images of each step that a process began."""
        lines = [line for file in self._folder.glob("seen-*") for line in file.read_text().splitlines()]
        return [json.loads(line) for line in lines]

    def wait_for(self, step: int, job: Run, *, num_ranks: int) -> dict[int, int]:
        """Waits until so many processes have begun the step, those of earlier starts included; returns the last by rank."""

        def processes() -> list[tuple[int, int]]:
            files = sorted(self._folder.glob("seen-*"), key=lambda file: file.stat().st_mtime_ns)
            rows = [(json.loads(line), file) for file in files for line in file.read_text().splitlines()]
            return [(row[2], int(file.name.removeprefix("seen-"))) for row, file in rows if row[1] == step]

        wait_until(lambda: len(processes()) >= num_ranks or job.process.poll() is not None, 120, job.story)
        assert job.process.poll() is None, job.story()
        return dict(processes())
