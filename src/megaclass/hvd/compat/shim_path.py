"""The folder of the modules named `horovod`. Imports no torch: launchers ask for it before they start ranks."""

from pathlib import Path


def shims_folder() -> str:
    """Returns the folder that, first on PYTHONPATH, makes `import horovod.torch` import this package."""
    return str(Path(__file__).parent / "shims")
