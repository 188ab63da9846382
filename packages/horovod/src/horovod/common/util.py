"""`horovod.common.util`: small functions that scripts and tests call."""

import functools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from horovod.common.basics import _basics
from megaclass_launch.even_parts import even_part
from megaclass_launch.versions import OLDEST_TENSORFLOW, is_at_least, tensorflow_version

T = TypeVar("T")


def _cache(f: Callable[..., T]) -> Callable[..., T]:
    """Returns the function with a cache of its results."""
    return functools.cache(f)


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Returns whether the framework can be used: torch always, tensorflow if it is installed."""
    return ext_base_name == "torch" or (
        ext_base_name == "tensorflow" and is_at_least(tensorflow_version(), OLDEST_TENSORFLOW)
    )


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raises ImportError, with the reason, for a framework that cannot be used."""
    if "mxnet" in ext_name:
        raise ImportError(
            f"Extension {ext_name} has not been built: Apache MXNet is retired since 2023, and horovod.torch does not support "
            f"it. It supports PyTorch, TensorFlow and Keras."
        )
    if ext_name != "horovod.torch" and not extension_available("tensorflow"):
        raise ImportError(
            f"Extension {ext_name} has not been built: it needs TensorFlow 2.16 or later, and found "
            f"{tensorflow_version() or 'none'}: pip install 'megaclass-horovod[tensorflow]'."
        )


def check_installed_version(name: str, version: str, exception: Exception | None = None) -> None:
    """Raises the given exception; otherwise nothing, as nothing is compiled against a framework's version."""
    if exception is not None:
        raise exception


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    if ext_base_name == "tensorflow" and extension_available("tensorflow"):
        import tensorflow as tf

        return bool(tf.config.list_physical_devices("GPU"))
    return ext_base_name == "torch" and torch.cuda.is_available()


def _answer(name: str) -> Callable[..., int]:
    def built(verbose: bool = False) -> int:
        answer: int = getattr(_basics, name)()
        return answer

    return built


mpi_built, gloo_built, nccl_built, ddl_built, ccl_built = map(
    _answer, ("mpi_built", "gloo_built", "nccl_built", "ddl_built", "ccl_built")
)


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Sets environment variables within the block; variables given as None are left unchanged."""
    values = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[int | None, bool | None], int]:
    from horovod.collectives.handles import handle_average_backwards_compatibility

    return handle_average_backwards_compatibility


def num_rank_is_power_2(num_rank: int) -> bool:
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(values: Sequence[T], n: int) -> list[Sequence[T]]:
    """Splits the values into n parts whose lengths differ by at most one."""
    parts = [even_part(len(values), part, n) for part in range(n)]
    return [values[part.start : part.stop] for part in parts]


def is_iterable(x: object) -> bool:
    return hasattr(x, "__iter__")


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    if not isinstance(ver, str) or not isinstance(target, str):
        raise ValueError(f"This function only accepts string arguments, not {ver!r} and {target!r}.")
    if target.count(".") != 2:
        raise ValueError(f"We only accepts target version values in the form of: major.minor.patch. Received: {target}")
    return _numbers(ver) >= _numbers(target)


def _numbers(version: str) -> list[int]:
    # 2.11 is 2.11.0, and what follows the numbers, as in 2.11.0rc1, does not count.
    found = re.match(r"(\d+)(?:\.(\d+))?(?:\.(\d+))?", version)
    return [int(number or 0) for number in found.groups()] if found else []
