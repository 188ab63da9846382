"""The report's table of settings that differ between runs."""

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from megaclass.evaluate.protocol import Cell, Row

_ABSENT = "–"


def differing_settings(configurations: Sequence[tuple[str, str]]) -> list[Row]:
    """Returns (section.key, values) of the settings that are not the same in all runs; empty for a run alone."""
    if len(configurations) < 2:
        return []
    settings = [_flat(text) for _, text in configurations]
    names = list(dict.fromkeys(name for one in settings for name in one))
    # Every run has a folder of its own, which tells nothing about it.
    names = [name for name in names if name != "train.run_dir"]
    rows = [(name, [one.get(name, _ABSENT) for one in settings]) for name in names]
    return [(name, [Cell(value) for value in values]) for name, values in rows if len(set(values)) > 1]


def _flat(text: str) -> dict[str, str]:
    """Returns the settings of a recipe as section.key; nothing if it cannot be read."""
    try:
        sections: Mapping[str, Any] = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        return {}
    return {
        f"{section}.{key}": str(value)
        for section, values in sections.items()
        if isinstance(values, Mapping)
        for key, value in values.items()
    }
