"""Equal numbers of the repeated layer on every stage."""

from collections import Counter
from collections.abc import Sequence

from jaxpipe.errors import PartitionError


def partition_trunk(repeated: Sequence[int | None], num_stages: int, names: Sequence[str], listing: str) -> list[int]:
    """Cut so that every stage holds equally many of the layer that the model repeats.

    The repeated layer is the most numerous signature class; its layers must stand in one contiguous run. Layers
    before the run go to the first stage, layers after it to the last. One stage takes everything.

    Args:
        repeated: Per layer, the id of its signature class, or None where the layer has no equal.
        num_stages: Number of stages, from 1 to the number of layers.
        names: One name per layer.
        listing: The layer list as text, for the messages.

    Returns:
        The boundaries: `num_stages + 1` layer indices.

    Raises:
        PartitionError: No layer is repeated, two are repeated equally often, the repeated layer does not stand in
            one run, or `num_stages` does not divide the length of that run.
    """
    if num_stages == 1:
        return [0, len(repeated)]
    counts = Counter(signature for signature in repeated if signature is not None).most_common(2)
    if not counts or counts[0][1] == 1:
        raise PartitionError(
            "partition_method='trunk' must find a layer that the model repeats, but got no two layers that are alike. "
            f"Use partition_method='parameters' or explicit boundaries. The layers:{listing}"
        )
    signature, count = counts[0]
    first = repeated.index(signature)
    name = names[first]
    if len(counts) > 1 and counts[1][1] == count:
        other = names[repeated.index(counts[1][0])]
        raise PartitionError(
            f"partition_method='trunk' must find one most repeated layer, but got {count} x {name} and {count} x "
            f"{other}. Use partition_method='parameters' or explicit boundaries. The layers:{listing}"
        )
    end = first + count
    if any(other != signature for other in repeated[first:end]):
        raise PartitionError(
            f"partition_method='trunk' must find the repeated layer in one contiguous run, but got {count} x {name} "
            "with other layers between them. Move those before or after the run, or use partition_method='parameters' "
            f"or explicit boundaries. The layers:{listing}"
        )
    if count % num_stages:
        raise PartitionError(
            f"partition_method='trunk' must put equally many of the {count} repeated layers ({name}) on every stage, "
            f"but got num_stages={num_stages}. {_repair(count, num_stages)} The layers:{listing}"
        )
    return [0, *range(first + count // num_stages, end, count // num_stages), len(repeated)]


def _repair(count: int, num_stages: int) -> str:
    fewer = max(stages for stages in range(1, num_stages) if count % stages == 0)
    more = next((stages for stages in range(num_stages + 1, count + 1) if count % stages == 0), None)
    stages = f"{fewer}" if more is None else f"{fewer} or {more}"
    layers = [multiple for multiple in (count // num_stages * num_stages,) if multiple]
    layers.append((count // num_stages + 1) * num_stages)
    return f"Use {stages} stages, or repeat the layer {' or '.join(map(str, layers))} times."
