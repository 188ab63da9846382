"""The classes of each rank: contiguous ranges of nearly equal size, without padding classes."""

from dataclasses import dataclass

from megaclass.errors import HeadError
from megaclass_launch.even_parts import even_part


@dataclass(frozen=True, slots=True)
class ClassRange:
    """Classes [start, stop) of one rank."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def class_range(num_classes: int, rank: int, world_size: int) -> ClassRange:
    """Returns the classes of a rank. InsightFace's checkpoints are split by the same rule."""
    if num_classes < world_size:
        raise HeadError(
            f"{num_classes} classes cannot be cut over {world_size} ranks: every rank needs at least one class. "
            f"Use at most {num_classes} ranks."
        )
    part = even_part(num_classes, rank, world_size)
    return ClassRange(part.start, part.stop)
