"""`--check-build`: the table of available frameworks and controllers, in the format of horovodrun."""

import importlib.util

from megaclass_launch.check.probe import torch_facts
from megaclass_launch.versions import (
    OLDEST_KERAS,
    OLDEST_TENSORFLOW,
    is_at_least,
    keras_version,
    megaclass_version,
    tensorflow_version,
)


def build_table() -> str:
    """Returns horovodrun's table, with a line for Keras: [X] available, [ ] not. MPI, DDL, CCL and MXNet are never
    available: mpirun may start the ranks, but does not carry their messages.

    TensorFlow and Keras are found by their packages, without importing them.
    """
    torch = torch_facts()
    works = not torch["fault"]
    has_tensorflow = is_at_least(tensorflow_version(), OLDEST_TENSORFLOW)
    sections = {
        "Available Frameworks": {
            "TensorFlow": works and has_tensorflow,
            "Keras": works and has_tensorflow and is_at_least(keras_version(), OLDEST_KERAS),
            "PyTorch": works,
            "MXNet": False,
        },
        "Available Controllers": {"MPI": False, "Gloo": works and torch["gloo"]},
        "Available Tensor Operations": {
            "NCCL": works and torch["nccl"] is not None and torch["is_usable"],
            "DDL": False,
            "CCL": False,
            "MPI": False,
            "Gloo": works and torch["gloo"],
        },
    }
    if importlib.util.find_spec("ray") is not None:
        sections["Available Controllers"]["Ray"] = True
    lines = [f"Megaclass v{megaclass_version()}:"]
    for title, entries in sections.items():
        lines += ["", f"{title}:", *(f"    [{'X' if is_there else ' '}] {name}" for name, is_there in entries.items())]
    return "\n".join(lines)
