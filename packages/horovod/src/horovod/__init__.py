"""Horovod's API over torch.distributed, from the package megaclass-horovod.

torch/          the API for PyTorch: `import horovod.torch as hvd`; optimizers, elastic training
tensorflow/     the API for TensorFlow, and for Keras in tensorflow/keras; keras/ is its older name
runner/         `horovod.run(...)`, the command horovodrun
common/         what the frameworks share: init, rank and size, process sets, elastic states, settings
collectives/    operations of the torch API: allreduce, allgather, broadcast, alltoall, reducescatter; handles: call -> handle
engine/         how ranks agree on what to do next (read controller.py, then rank0.py, then coordinator.py)
transport/      how agreed operations are executed
data/, mxnet/, spark/, ray/, run.py     Horovod's other module paths
"""

import importlib.metadata as _metadata
import typing as _typing

if _typing.TYPE_CHECKING:
    from horovod.runner import run as run

__version__ = "0.28.1"
"""The version of Horovod whose API this is."""

__all__ = ["__version__", "run"]


def _refuse_another_horovod() -> None:
    """Raises ImportError if Horovod itself is also installed: the files of the two packages overwrite each other."""
    try:
        other = _metadata.distribution("horovod")
    except _metadata.PackageNotFoundError:
        return
    raise ImportError(
        f"The distributions horovod {other.version} and megaclass-horovod are both installed, and both have the import package "
        f"`horovod`. To keep megaclass-horovod, remove both and install it again:\n"
        f"  pip uninstall -y horovod megaclass-horovod\n"
        f"  pip install megaclass-horovod"
    )


_refuse_another_horovod()


def __getattr__(name: str) -> _typing.Any:
    if name == "run":
        # Loaded on first use: `import horovod.torch` does not need the launcher's modules.
        from horovod.runner import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
