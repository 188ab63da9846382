"""Marks for tests of Triton programs that run in Triton's interpreter, on the CPU.

The interpreter must be asked for before Triton is imported, so such tests run in a pytest of their own, which
test_triton_interpreter.py starts. Their files are collected twice: `interpreted` tests exist there only, `outside` tests here
only.
"""

import os
from typing import Any

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def interpreted(test: Any) -> Any:
    """Keeps a test for the interpreter's own pytest."""
    return test if IS_INTERPRETED else None


def outside(test: Any) -> Any:
    """Keeps a test out of the interpreter's pytest."""
    return None if IS_INTERPRETED else test
