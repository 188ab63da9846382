"""The folder of a run: who may write there, and what is kept."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaclass.errors import CheckpointError

_OWN_NAMES = (
    "config.toml",
    "metrics.jsonl",
    "summary.json",
    "report.html",
    "model.safetensors",
    "model.onnx",
    "checkpoints",
)


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def holds_a_run(self) -> bool:
        return any((self.path / name).exists() for name in _OWN_NAMES)

    def check_free(self) -> None:
        """Refuses a folder that holds another run, or files that are none of ours."""
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointError(f"The run folder {self.path} is a file: choose another train.run_dir.")
        if self.holds_a_run():
            raise CheckpointError(
                f"The run folder {self.path} already holds a run: continue it with --resume, replace it with --overwrite, "
                f"or choose another train.run_dir."
            )

    def clear(self) -> None:
        """Removes what a run writes, and nothing else."""
        for name in _OWN_NAMES:
            target = self.path / name
            if target.is_dir():
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Two jobs in one folder would mix their files: the second is refused, however the first ended."""
        self.path.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise CheckpointError(f"Another job is running in {self.path}: choose another train.run_dir.") from None
            yield
        finally:
            os.close(handle)

    def write_config(self, text: str) -> None:
        self._write("config.toml", text)

    def write_summary(self, summary: dict[str, Any]) -> None:
        self._write("summary.json", json.dumps(summary, indent=1) + "\n")

    def append_metrics(self, row: dict[str, Any]) -> None:
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """Whole rows; a last one cut off by a crash is left out."""
        path = self.path / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def forget_metrics_after(self, step: int) -> None:
        """A resumed run writes the rows after its checkpoint again."""
        rows = [row for row in self.read_metrics() if row["step"] <= step]
        self._write("metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    def _write(self, name: str, text: str) -> None:
        unfinished = self.path / f".{name}.tmp"
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(self.path / name)
