"""`megaclass run --check-build`: the table of available frameworks and controllers, in the format of horovodrun."""

import importlib.util
import shutil

from megaclass.launch.check.probe import torch_facts
from megaclass.launch.versions import megaclass_version


def build_table() -> str:
    """Returns horovodrun's table: [X] available, [ ] not. DDL, CCL, TensorFlow and MXNet are never available."""
    torch = torch_facts() or {"fault": "not installed"}
    works = "fault" not in torch
    has_mpi = shutil.which("mpirun") is not None
    sections = {
        "Available Frameworks": {"TensorFlow": False, "PyTorch": works, "MXNet": False},
        "Available Controllers": {"MPI": has_mpi, "Gloo": works and torch["gloo"]},
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
