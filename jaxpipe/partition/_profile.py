"""Cuts into parts of nearly equal time, within the memory of each stage."""

import dataclasses
from bisect import bisect_left
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise, takewhile
from typing import Literal

from jaxpipe.errors import PartitionError

from ._balanced import best_cut
from ._checks import checked_parts, exact_weights
from ._costs import LayerCost, Profile, StageMemory

_TRIES = 200
"""Number of cuts that the search considers before it gives up.

Each one is an exact optimum itself, which takes time to find.
"""


def profile_source(method: str | Sequence[int]) -> Literal["times", "counts"] | None:
    """The source of the layer costs that a partition method uses.

    Args:
        method: As for `partition_layers`.

    Returns:
        `"times"` for `'profile'`, which measures them, `"counts"` for `'profile:flops'`, which
        estimates them from numbers of operations and bytes, and None for methods that need no
        costs.

    Raises:
        PartitionError: The name begins with `profile:` but is not `profile:flops`.
    """
    if not isinstance(method, str):
        return None
    name, colon, source = method.lower().partition(":")
    if name != "profile":
        return None
    if not colon:
        return "times"
    if source != "flops":
        raise PartitionError(
            "partition_method must be 'profile' or 'profile:flops', but got "
            f"partition_method={method!r}. Use 'profile' for measured times, or 'profile:flops' "
            "for counted operations and bytes."
        )
    return "counts"


def partition_profile(profile: Profile, num_stages: int, num_parts: int | None = None) -> list[int]:
    """Cut so that the slowest part is as fast as possible and no stage exceeds its memory.

    The result is the optimum of `partition_balanced` for the times, among all cuts within the
    limit. If stages hold several parts, the limit couples parts that are not adjacent. If the
    search then takes too long, it returns the cut whose largest part needs the least memory.

    Args:
        profile: Costs of the layers, with the known memory in `profile.memory`.
        num_stages: Number of stages.
        num_parts: Number of parts, a multiple of `num_stages`; None makes one part per stage.

    Returns:
        The boundaries: `num_parts + 1` indices, first 0, last the number of layers, strictly
        increasing.

    Raises:
        PartitionError: There are more parts than layers, a time is negative or not finite, the
            memory is not described for each part, or no cut was found within the limit. In the last
            case the message suggests what to change.

    Example:
        >>> from jaxpipe.partition import LayerCost, Profile
        >>> short, long = LayerCost(1.0, 2.0), LayerCost(3.0, 6.0)
        >>> costs = [short, short, long, short]
        >>> partition_profile(Profile(tuple(costs)), 2)
        [0, 2, 4]
    """
    weights = exact_weights(profile.seconds())
    num_parts = checked_parts(
        len(weights), num_stages if num_parts is None else num_parts, "layers"
    )
    memory = profile.memory
    if memory is not None:
        _check_parts(memory, num_stages, num_parts)
    if memory is None or memory.limit_bytes is None:
        return best_cut(weights, num_parts) or []
    found = _search(profile, weights, num_stages, num_parts, memory.limit_bytes)
    if found is None:
        least = _least_memory(profile, num_parts)
        if max(stage_bytes(profile, least, num_stages)) > memory.limit_bytes:
            raise _too_small(profile, num_stages, least, memory.limit_bytes)
        return least
    return found


def _search(
    profile: Profile, weights: Sequence[int], num_stages: int, num_parts: int, limit: int
) -> list[int] | None:
    """The fastest cut within a limit; None if there is none or it is not found soon enough.

    This is a best-first search over caps on single parts: the caps with the fastest cut so far are
    tried next. If a stage of that cut needs too much memory, one of its parts has to become
    smaller, and each of them is tried in turn.
    """
    queue: list[tuple[int, tuple[int, ...], list[int]]] = []
    seen: set[tuple[int, ...]] = set()

    def add(caps: tuple[int, ...]) -> None:
        cut = None if caps in seen else best_cut(weights, num_parts, _ends_within(profile, caps))
        seen.add(caps)
        if cut is not None:
            slowest = max(sum(weights[a:b]) for a, b in pairwise(cut))
            heappush(queue, (slowest, caps, cut))

    add((limit,) * num_parts)
    while queue and len(seen) < _TRIES:
        _, caps, cut = heappop(queue)
        totals = stage_bytes(profile, cut, num_stages)
        sizes = profile.part_bytes(cut)
        fullest = totals.index(max(totals))
        if totals[fullest] <= limit:
            return cut
        for part, size in enumerate(sizes):
            if profile.memory is not None and profile.memory.stage_of(part, num_stages) == fullest:
                # One byte less than it needs now, which excludes only cuts in which this part needs
                # at least as much.
                add((*caps[:part], size - 1, *caps[part + 1 :]))
    return None


def stage_bytes(profile: Profile, boundaries: Sequence[int], num_stages: int) -> list[int]:
    """Bytes that each stage of a cut needs.

    They include all its parts, and the parameters that every stage holds.

    Args:
        profile: Costs of the layers, with the known memory.
        boundaries: The boundaries of the parts.
        num_stages: Number of stages.

    Returns:
        One number per stage.
    """
    memory = profile.memory or StageMemory((1,) * (len(boundaries) - 1))
    totals = [round(memory.bytes_per_param * profile.stage_sharded_params)] * num_stages
    for part, size in enumerate(profile.part_bytes(boundaries)):
        totals[memory.stage_of(part, num_stages)] += size
    return totals


def _ends_within(profile: Profile, caps: Sequence[int]) -> list[list[int]]:
    """For each part and first layer, the ends that keep the part within its cap, as bits."""
    firsts = range(len(profile.layers))
    return [
        [(1 << (_last_end(profile, part, first, cap) + 1)) - 1 for first in firsts]
        for part, cap in enumerate(caps)
    ]


def _last_end(profile: Profile, part: int, first: int, cap: int) -> int:
    return first + sum(
        1 for _ in takewhile(lambda size: size <= cap, profile.needed_bytes(part, first))
    )


def _least_memory(profile: Profile, num_parts: int) -> list[int]:
    """The cut whose largest part needs the fewest bytes."""

    def ends(cap: int) -> list[int]:
        boundaries = [0]
        for part in range(num_parts):  # the furthest end leaves the least to the other parts
            last = len(profile.layers) - (num_parts - 1 - part)
            boundaries.append(min(_last_end(profile, part, boundaries[-1], cap), last))
        return boundaries

    def suffices(cap: int) -> bool:
        boundaries = ends(cap)
        return boundaries[-1] == len(profile.layers) and all(a < b for a, b in pairwise(boundaries))

    most = max(max(profile.needed_bytes(part, 0)) for part in range(num_parts))
    return ends(bisect_left(range(most), True, key=suffices))


def _too_small(
    profile: Profile, num_stages: int, least: Sequence[int], limit: int
) -> PartitionError:
    num_parts = len(least) - 1
    enough = max(stage_bytes(profile, least, num_stages))
    parts = (
        f"{num_stages} stages"
        if num_parts == num_stages
        else f"{num_parts} parts on {num_stages} stages"
    )
    repair = "recompute (activation_checkpoint_interval), use smaller microbatches, or more stages."
    bare = dataclasses.replace(profile, layers=tuple(_bare(layer) for layer in profile.layers))
    fixed = max(stage_bytes(bare, _least_memory(bare, num_parts), num_stages))
    if fixed > limit:
        repair = (
            f"or use more stages. Parameters, gradients and optimiser state alone need {fixed:,}, "
            "so neither recompute nor smaller microbatches would help."
        )
    return PartitionError(
        "limit_bytes (pipeline.memory_limit_gb if it is set, otherwise the device's memory) must "
        f"leave room for every stage of some cut into {parts}, but got limit_bytes={limit:,}, and "
        f"the smallest that a cut was found for is {enough:,}. Raise the limit, {repair}"
    )


def _bare(layer: LayerCost) -> LayerCost:
    """A layer that keeps nothing but its parameters."""
    return dataclasses.replace(layer, residual_bytes=0, shared_bytes=0, recomputed_bytes=0)


def _check_parts(memory: StageMemory, num_stages: int, num_parts: int) -> None:
    for name in ("in_flight", "stages"):
        given = getattr(memory, name)
        if given is not None and len(given) != num_parts:
            raise PartitionError(
                f"{name} must have one number per part ({num_parts}), but got "
                f"len({name})={len(given)}. Give one for each chunk of each stage, in the order of "
                "the layers."
            )
    if memory.stages is not None and not all(stage in range(num_stages) for stage in memory.stages):
        raise PartitionError(
            f"stages must be numbers in [0, num_stages={num_stages}), but got "
            f"stages={memory.stages}. Stages are counted from 0."
        )
