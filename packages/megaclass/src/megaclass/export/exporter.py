"""The interface of an exporter: what it is given, and what `megaclass export` must know about it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megaclass.inference import LoadedModel


@dataclass(frozen=True, kw_only=True)
class ExportJob:
    """One model on its way into a folder."""

    model: LoadedModel
    run: Path | None
    """Run folder of the model; None for a model file without a run."""
    folder: Path
    """Folder to write into. It becomes `out` when everything is written and checked."""
    out: Path
    """Folder as the user knows it, for error messages."""
    metadata: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Exporter:
    """One form of a model. Each module of this form defines one as EXPORTER."""

    file: str
    """Name of the model file."""
    write: Callable[[ExportJob], None]
    """Writes the file, and checks that it gives the embeddings of the model."""
    usage: str
    """Code for the model card; {insightface_name} and {embedding_dim} are filled in."""
    extra_files: tuple[str, ...] = ()
    """Names of further files that `write` may add."""
