"""Cuts with equal numbers of the repeated layer in every part."""

from collections import Counter
from collections.abc import Hashable, Sequence

from jaxpipe.errors import PartitionError


def partition_trunk(
    signatures: Sequence[Hashable], num_parts: int, names: Sequence[str], listing: str, asked: str
) -> list[int]:
    """Cut so that every part holds the same number of the layer that the model repeats.

    The repeated layer is the most frequent signature, in one contiguous run. `listing` and `asked`,
    for example `num_stages=4`, are used in messages.
    """
    if num_parts == 1:
        return [0, len(signatures)]
    counts = Counter(signatures).most_common(2)
    if counts[0][1] == 1:
        raise PartitionError(
            "partition_method='trunk' must find a layer that the model repeats, but got no two "
            "layers that are alike. Use partition_method='parameters' or explicit boundaries. The "
            f"layers:{listing}"
        )
    signature, count = counts[0]
    first = signatures.index(signature)
    name = names[first]
    if len(counts) > 1 and counts[1][1] == count:
        other = names[signatures.index(counts[1][0])]
        raise PartitionError(
            f"partition_method='trunk' must find one most repeated layer, but got {count} x {name} "
            f"and {count} x {other}. Use partition_method='parameters' or explicit boundaries. The "
            f"layers:{listing}"
        )
    end = first + count
    if any(other != signature for other in signatures[first:end]):
        raise PartitionError(
            "partition_method='trunk' must find the repeated layer in one contiguous run, but got "
            f"{count} x {name} with other layers between them. Move those before or after the run, "
            f"or use partition_method='parameters' or explicit boundaries. The layers:{listing}"
        )
    if count % num_parts:
        each = "chunk" if "num_chunks" in asked else "stage"
        raise PartitionError(
            f"partition_method='trunk' must put equally many of the {count} repeated layers "
            f"({name}) on every {each}, but got {asked}. {_repair(count, num_parts, each)} The "
            f"layers:{listing}"
        )
    return [0, *range(first + count // num_parts, end, count // num_parts), len(signatures)]


def _repair(count: int, num_parts: int, each: str) -> str:
    fewer = max(parts for parts in range(1, num_parts) if count % parts == 0)
    more = next((parts for parts in range(num_parts + 1, count + 1) if count % parts == 0), None)
    parts = f"{fewer}" if more is None else f"{fewer} or {more}"
    layers = [multiple for multiple in (count // num_parts * num_parts,) if multiple]
    layers.append((count // num_parts + 1) * num_parts)
    wanted = f"Use {parts} {each}s{' in all' * (each == 'chunk')}"
    return f"{wanted}, or repeat the layer {_or(layers)} times."


def _or(numbers: Sequence[int]) -> str:
    return " or ".join(map(str, numbers))
