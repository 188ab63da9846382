"""N items over W parts, as evenly as possible: the one rule by which the package splits classes, images and rows.

Parts are contiguous and in order; the first N % W parts hold one item more. InsightFace's checkpoints and Horovod's
reducescatter use the same rule.
"""


def even_part(num_items: int, part: int, num_parts: int) -> range:
    """Returns the items of one part."""
    assert 0 <= part < num_parts
    share, rest = divmod(num_items, num_parts)
    start = share * part + min(part, rest)
    return range(start, start + share + (part < rest))


def even_sizes(num_items: int, num_parts: int) -> list[int]:
    """Returns the number of items of every part."""
    return [len(even_part(num_items, part, num_parts)) for part in range(num_parts)]
