"""Where the modules named `horovod` are kept. No torch here: a launcher asks before it starts anybody."""

from pathlib import Path


def shims_folder() -> str:
    """The folder to put first on PYTHONPATH of a job in which `import horovod.torch` shall mean this package."""
    return str(Path(__file__).parent / "shims")
