"""`horovod.run`, as a function and as the module that old scripts import: `from horovod.run import run`."""

import sys
from types import ModuleType
from typing import Any

from horovod.runner.run_function import run


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)


# Importing this module hides the function of the same name in the package.
sys.modules[__name__].__class__ = _Callable
