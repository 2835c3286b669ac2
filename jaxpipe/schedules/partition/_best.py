"""The cut with the shortest tick.

A tick takes the time of the slowest part plus the cost, on all stages, of layers outside the trunk.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from jaxpipe.errors import PartitionError

from ._balanced import best_cut
from ._checks import checked_parts, exact_weights
from ._costs import Profile
from ._stage_cut import cut_stages

_OFF_TRUNK_BYTES = 8
"""Bytes that every stage moves in a tick for each parameter outside the trunk.

These are two float32 gradients of zeros, for as many parameters as the stage with the most has.
Only stages that produce gradients add them to the running sums.
"""

_NEAR = 1.03
"""Factor up to which ticks count as equally long.

Among such cuts, the one with the fewest parameters outside the trunk is chosen, so that more of the
program is the same on all stages.
"""

_LIGHTER = 0.9
"""Factor by which each step of the search reduces the size of the largest part."""


@dataclass(frozen=True)
class Tick:
    """The time of a tick under a cut, as far as the cut decides it.

    Attributes:
        slowest_s: Seconds of the slowest part's layers, forward and backward.
        off_trunk: Parameters outside the trunk in the part that has the most.
        trunk: Layers in each part's trunk.
        off_trunk_s: Seconds that parameters outside the trunk cost.
    """

    slowest_s: float
    off_trunk: int
    trunk: int
    off_trunk_s: float

    @property
    def seconds(self) -> float:
        """Seconds of a tick: the work, plus the cost of parameters outside the trunk."""
        return self.slowest_s + self.off_trunk_s


def tick_of(profile: Profile, boundaries: Sequence[int]) -> Tick:
    """The tick of a cut."""
    seconds = profile.seconds()
    slowest = max(sum(seconds[first:end]) for first, end in pairwise(boundaries))
    num_params = _unsharded_params(profile)
    cuts = cut_stages(profile.signatures or range(len(num_params)), boundaries)
    if len(cuts) == 1:
        return Tick(slowest, 0, len(num_params), 0.0)
    off_trunk = max(sum(num_params[i] for i in (*cut.prologue, *cut.epilogue)) for cut in cuts)
    return Tick(
        slowest, off_trunk, len(cuts[0].trunk), off_trunk * _OFF_TRUNK_BYTES / profile.bytes_per_s
    )


def partition_best(profile: Profile, num_parts: int) -> list[int]:
    """Cut so that a tick is as short as possible.

    In each tick all stages wait for the slowest one, so its time counts. Layers that are not the
    same in all parts run outside the trunk, behind a switch, and their gradients are filled and
    summed on every stage. Among cuts with about equally long ticks, the one with the fewest
    parameters outside the trunk is chosen.

    If `profile.memory` has a limit, only cuts count whose stages need no more than that. The search
    considers the cut that minimises the largest part, the fastest cut, and slower cuts whose
    largest parts are smaller and smaller. It repeats this for each kind of repeated layer, and for
    each number of them that all parts can have, among the cuts whose parts end after such a layer.

    Args:
        profile: Times and parameters of the layers. Its signatures identify equivalent layers, and
            its memory describes `num_parts` parts.
        num_parts: Number of parts.

    Returns:
        The boundaries: `num_parts + 1` indices, first 0, last the number of layers, strictly
        increasing.

    Raises:
        PartitionError: There are more parts than layers, a time is negative or not finite, or no
            cut was found within the limit.

    Example:
        >>> from jaxpipe.schedules.partition import LayerCost, Profile
        >>> first, block = LayerCost(0.0, 0.0, num_params=8), LayerCost(1.0, 2.0, num_params=4)
        >>> costs = [first, *[block] * 4, LayerCost(1.0, 2.0)]
        >>> partition_best(Profile(tuple(costs), signatures=(0, 1, 1, 1, 1, 2)), 2)
        [0, 3, 6]
    """
    weights = exact_weights(profile.seconds())
    num_parts = checked_parts(len(weights), num_parts, "layers")
    cuts = _ever_lighter(profile, weights, num_parts, [1] * len(weights), 1)
    fastest_s = cuts[0][0].slowest_s
    balanced = best_cut(_sizes(profile), num_parts) or []
    cuts.append((tick_of(profile, balanced), balanced))
    for kind in dict.fromkeys(profile.signatures):
        of_kind = [int(kind == other) for other in profile.signatures]
        for each in range(sum(of_kind) // num_parts, 0, -1):
            cuts += _ever_lighter(profile, weights, num_parts, of_kind, each)
            if _shortest_s(profile, cuts) <= fastest_s * _NEAR:
                break  # a smaller trunk could not make a tick sufficiently shorter
    limit_s = _shortest_s(profile, cuts) * _NEAR
    found = [
        (tick.off_trunk, tick.seconds, cut)
        for tick, cut in cuts
        if tick.seconds <= limit_s and _fits(profile, cut)
    ]
    if not found:
        raise _too_small(profile, [cut for _, cut in cuts])
    return min(found)[2]


def _ever_lighter(
    profile: Profile, weights: Sequence[int], num_parts: int, of_kind: Sequence[int], each: int
) -> list[tuple[Tick, list[int]]]:
    """Cuts whose parts all have `each` layers of a kind: the fastest, and slower, smaller ones."""
    sizes = _sizes(profile)
    most = sum(sizes)
    found = list[tuple[Tick, list[int]]]()
    while True:
        ends = [_ends(sizes, of_kind, start, each, most) for start in range(len(sizes))]
        cut = best_cut(weights, num_parts, [ends] * num_parts)
        tick = None if cut is None else tick_of(profile, cut)
        # Smaller parts only make the tick longer, so nothing that follows could be chosen.
        if cut is None or tick is None or tick.slowest_s >= _shortest_s(profile, found):
            return found
        found.append((tick, cut))
        largest = max(sum(sizes[first:end]) for first, end in pairwise(cut))
        most = min(largest - 1, int(largest * _LIGHTER))


def _shortest_s(profile: Profile, cuts: Sequence[tuple[Tick, list[int]]]) -> float:
    """Seconds of the shortest tick among the cuts that fit; infinite if none fits."""
    return min((tick.seconds for tick, cut in cuts if _fits(profile, cut)), default=math.inf)


def _fits(profile: Profile, cut: Sequence[int]) -> bool:
    memory = profile.memory
    if memory is None or memory.limit_bytes is None:
        return True
    return max(profile.stage_bytes(cut)) <= memory.limit_bytes


def _too_small(profile: Profile, cuts: Sequence[Sequence[int]]) -> PartitionError:
    limit = 0 if profile.memory is None else profile.memory.limit_bytes
    enough = min(max(profile.stage_bytes(cut)) for cut in cuts)
    return PartitionError(
        "limit_bytes (pipeline.memory_limit_gb if it is set, otherwise the device's memory) must "
        f"leave room for every stage of some cut into {len(cuts[0]) - 1} parts, but got "
        f"limit_bytes={limit:,}, and the smallest that a cut was found for is {enough:,}. Raise "
        "the limit, recompute (activation_checkpoint_interval), use smaller microbatches, or more "
        "stages."
    )


def _sizes(profile: Profile) -> list[int]:
    """The size of each layer that the search reduces: its bytes if memory is known."""
    memory = profile.memory
    if memory is None:
        return _unsharded_params(profile)
    # Approximate: groups that are recomputed, and residuals that neighbours share, need less. What
    # a cut really needs decides whether it fits.
    return [
        round(memory.bytes_per_param * num_params) + max(memory.in_flight) * layer.residual_bytes
        for num_params, layer in zip(_unsharded_params(profile), profile.layers, strict=True)
    ]


def _unsharded_params(profile: Profile) -> list[int]:
    """Number of parameters of each layer, without those that every stage holds."""
    return [0 if layer.is_stage_sharded else layer.num_params for layer in profile.layers]


def _ends(sizes: Sequence[int], of_kind: Sequence[int], start: int, each: int, most: int) -> int:
    """The ends, as bits, of a part from `start`: after a layer of the kind, or the last layer."""
    ends = count = size = 0
    for index in range(start, len(sizes)):
        count = count + of_kind[index]
        size = size + sizes[index]
        if size > most:
            break
        if count >= each and (of_kind[index] or index == len(sizes) - 1):
            ends |= 1 << (index + 1)
    return ends
