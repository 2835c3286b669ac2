"""Cuts into parts of equal length."""

from ._checks import checked_parts


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Cut a number of items into parts whose lengths differ by at most one.

    Every part gets `num_items // num_parts` items, and the first `num_items % num_parts` parts get
    one more. DeepSpeed's function of the same name does the same, except that it returns empty
    parts at the end if there are fewer items than parts. A pipeline stage without a layer has no
    meaning, so this function raises an error instead.

    Args:
        num_items: Number of items, at least `num_parts`.
        num_parts: Number of parts, at least 1.

    Returns:
        The boundaries: `num_parts + 1` indices, first 0, last `num_items`, strictly increasing.

    Raises:
        PartitionError: `num_parts` is not a positive integer, or is larger than `num_items`.

    Example:
        >>> partition_uniform(38, 8)
        [0, 5, 10, 15, 20, 25, 30, 34, 38]
    """
    num_parts = checked_parts(num_items, num_parts, "items")
    size, remainder = divmod(num_items, num_parts)
    return [part * size + min(part, remainder) for part in range(num_parts + 1)]
