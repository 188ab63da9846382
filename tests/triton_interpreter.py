"""Marks for tests of Triton programs that run in Triton's interpreter, on the CPU.

The interpreter must be asked for before Triton is imported, so such tests run in a pytest of their own, which
test_triton_interpreter.py starts. Their files are collected twice: `interpreted` tests exist there only, `outside` tests here
only.
"""

import inspect
import os
from typing import Any

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _remember_members() -> None:
    """Make the interpreter a third faster: at every call of a function it looks for those members of its language that it
    has to replace, among all of them. They are always the same."""
    import triton.language as tl
    from triton.runtime import interpreter

    places = (tl, tl.core, tl.core.tensor, tl.math, tl.core.tensor_descriptor_base)
    names = {
        place: [name for name, member in inspect.getmembers(place) if tl.core.is_builtin(member)] for place in places
    }

    def patch_builtin(place: Any, builder: Any, scope: Any) -> None:
        for name in names[place]:
            if tl.core.is_builtin(member := getattr(place, name)):
                interpreter._patch_attr(place, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin


if IS_INTERPRETED:
    _remember_members()


def interpreted(test: Any) -> Any:
    """Keeps a test for the interpreter's own pytest."""
    return test if IS_INTERPRETED else None


def outside(test: Any) -> Any:
    """Keeps a test out of the interpreter's pytest."""
    return None if IS_INTERPRETED else test
