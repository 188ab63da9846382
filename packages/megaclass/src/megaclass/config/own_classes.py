"""Classes of the user that a setting names as `package.module:Class`."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megaclass_launch.errors import ConfigError


def own_class(setting: str, name: str, example: str) -> Callable[..., Any]:
    """Imports the class or function; raises a ConfigError that shows an example, such as `mynets:Net`."""
    module_name, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        # `python -m megaclass` looks in the working folder, too; last, so that nothing there hides an installed package.
        sys.path.append(here)
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        file, _, wanted = example.partition(":")
        raise ConfigError(
            f"{setting} is {name!r}, expected package.module:Class on the Python path: {error}; looked in {here} and on "
            f"the Python path. A file {file}.py in this folder with a class {wanted} is {example}."
        ) from error
    if not callable(found):
        raise ConfigError(f"{setting} is {name!r}, which is not a class or function.")
    made: Callable[..., Any] = found
    return made
