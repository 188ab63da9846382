import shutil
from typing import Any, NoReturn


def is_jsrun_installed() -> bool:
    return shutil.which("jsrun") is not None


def js_run(settings: Any, nics: Any, env: Any, command: Any, stdout: Any = None, stderr: Any = None) -> NoReturn:
    raise NotImplementedError(
        "jsrun needs MPI, which megaclass does not include: within LSF `megaclass run` starts its hosts by ssh."
    )


def generate_jsrun_rankfile(settings: Any, path: str | None = None) -> NoReturn:
    raise NotImplementedError(
        "jsrun needs MPI, which megaclass does not include: within LSF `megaclass run` starts its hosts by ssh."
    )
