"""The report's section on memory: what `megaclass plan` counts for a rank on a GPU, as stacked bars, and what was measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megaclass.capacity.memory import Memory
from megaclass.progress import size_text

# Parts of the plan that one colour of the bar stands for, in its order.
_GROUPS: dict[str, tuple[str, ...]] = {
    "backbone": ("backbone", "gradients", "moving average"),
    "centres": ("centres",),
    "optimizer": ("optimizer state", "state of the centres"),
    "logits": ("logits", "batch in the head"),
    "activations": ("activations",),
    "buffers": ("communication buffers", "libraries", "training images"),
}
_GIB = 2.0**30


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedMemory:
    """The plan of a run, made from its settings."""

    memory: Memory
    gpu_name: str
    gpu_bytes: int
    is_gpu_known: bool
    """False if the run trained on a CPU, or on a GPU that the table does not have: the plan is then for another one."""


def memory_section(name: str, planned: PlannedMemory, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the template's values. rows: of metrics, whose gpu_memory_gib is the largest allocation of rank 0."""
    parts = planned.memory.parts
    grouped = {group: sum(parts.get(part, 0) for part in names) for group, names in _GROUPS.items()}
    grouped["buffers"] += planned.memory.peak - sum(grouped.values())
    measured = max((float(row["gpu_memory_gib"]) * _GIB for row in rows if row.get("gpu_memory_gib")), default=None)
    host = planned.memory.host_loader
    longest = max(planned.memory.peak, measured or 0.0, host, 1.0)
    bars = [_bar("planned, GPU", grouped, longest)]
    if measured is not None:
        bars.append(
            {"name": "measured, GPU", "total": size_text(measured), "parts": [_part(7, measured, longest, "measured")]}
        )
    bars.append(_bar("planned, host", {"loader": host}, longest, first=6))
    where = (
        f"a rank of {name}" if planned.is_gpu_known else f"a rank of {name} if it trained on a GPU ({planned.gpu_name})"
    )
    text = (
        f"What megaclass plan counts for {where} at the peak of a step ({planned.memory.peak_moment}): "
        f"{size_text(planned.memory.peak)} of {size_text(planned.gpu_bytes)}."
    )
    if measured is not None:
        text += (
            f" The largest allocation of rank 0 was {size_text(measured)}, {measured / planned.memory.peak - 1:+.0%}."
        )
    keys = [*grouped, "loader (host memory)"] + ["measured"] * (measured is not None)
    return {
        "name": name,
        "text": text,
        "legend": keys,
        "bars": bars,
        "sizes": [(one, size_text(grouped[one])) for one in grouped],
    }


def _bar(name: str, sizes: Mapping[str, int], longest: float, first: int = 0) -> dict[str, Any]:
    parts = [_part(first + place, size, longest, group) for place, (group, size) in enumerate(sizes.items())]
    return {"name": name, "total": size_text(sum(sizes.values())), "parts": parts}


def _part(colour: int, size: float, longest: float, name: str) -> dict[str, str]:
    return {"css": f"part-{colour}", "share": f"{100 * size / longest:.2f}", "text": f"{name} {size_text(size)}"}
