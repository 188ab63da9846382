"""Calls of methods, counted while they do their work."""

from typing import Any

import pytest


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: type, *names: str) -> dict[str, int]:
    """Returns the numbers of calls by name, which grow from now on."""
    counts = dict.fromkeys(names, 0)

    def counted(name: str) -> Any:
        original = getattr(owner, name)

        def call(*args: Any) -> Any:
            counts[name] += 1
            return original(*args)

        return call

    for name in names:
        monkeypatch.setattr(owner, name, counted(name))
    return counts
