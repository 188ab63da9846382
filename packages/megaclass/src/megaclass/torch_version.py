"""The version of torch that is installed, checked at the start and without importing torch."""

import re
import sys
from importlib.metadata import PackageNotFoundError, version

from megaclass_launch.errors import UserError

OLDEST = (2, 11)
_DEVELOPED_ON = "2.13.0"


def check_torch() -> None:
    """Raises a UserError if torch is missing or too old: later errors would not name the cause."""
    oldest = ".".join(map(str, OLDEST))
    try:
        found = version("torch")
    except PackageNotFoundError:
        raise UserError(
            f"torch is not installed for {sys.executable}: pip install torch=={_DEVELOPED_ON}, or any torch from {oldest} on "
            f"with the CUDA build that fits your driver."
        ) from None
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is not None and (int(numbers[1]), int(numbers[2])) < OLDEST:
        raise UserError(
            f"torch {found} is installed for {sys.executable}, but megaclass needs torch {oldest} or later: "
            f"pip install --upgrade 'torch>={oldest}', with the CUDA build that fits your driver."
        )
