"""The cut with the shortest tick.

A tick takes the time of the slowest part plus the cost, on all stages, of layers outside the trunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

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
"""Factor by which each step of the search reduces the parameters of the largest part."""


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
    """The tick of a cut.

    Args:
        profile: Times, parameters and signatures of the layers.
        boundaries: The boundaries of the parts.
    """
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

    The search considers the cut that minimises the largest part, the fastest cut, and slower cuts
    whose largest parts have fewer and fewer parameters. It repeats this for each kind of repeated
    layer, and for each number of them that all parts can have, among the cuts whose parts end
    after such a layer.

    Args:
        profile: Times and parameters of the layers. Its signatures identify equivalent layers.
        num_parts: Number of parts.

    Returns:
        The boundaries: `num_parts + 1` indices, first 0, last the number of layers, strictly
        increasing.

    Raises:
        PartitionError: There are more parts than layers, or a time is negative or not finite.

    Example:
        >>> from jaxpipe.partition import LayerCost, Profile
        >>> first, block = LayerCost(0.0, 0.0, num_params=8), LayerCost(1.0, 2.0, num_params=4)
        >>> costs = [first, *[block] * 4, LayerCost(1.0, 2.0)]
        >>> partition_best(Profile(tuple(costs), signatures=(0, 1, 1, 1, 1, 2)), 2)
        [0, 3, 6]
    """
    weights = exact_weights(profile.seconds())
    num_parts = checked_parts(len(weights), num_parts, "layers")
    cuts = _ever_lighter(profile, weights, num_parts, [1] * len(weights), 1)
    fastest_s = cuts[0][0].slowest_s
    balanced = best_cut(_unsharded_params(profile), num_parts) or []
    cuts.append((tick_of(profile, balanced), balanced))
    for kind in dict.fromkeys(profile.signatures):
        of_kind = [int(kind == other) for other in profile.signatures]
        for each in range(sum(of_kind) // num_parts, 0, -1):
            cuts += _ever_lighter(profile, weights, num_parts, of_kind, each)
            if min(tick.seconds for tick, _ in cuts) <= fastest_s * _NEAR:
                break  # a smaller trunk could not make a tick sufficiently shorter
    shortest = min(tick.seconds for tick, _ in cuts)
    return min(
        (tick.off_trunk, tick.seconds, cut)
        for tick, cut in cuts
        if tick.seconds <= shortest * _NEAR
    )[2]


def _ever_lighter(
    profile: Profile, weights: Sequence[int], num_parts: int, of_kind: Sequence[int], each: int
) -> list[tuple[Tick, list[int]]]:
    """Cuts whose parts all have `each` layers of a kind.

    The result has the fastest cut, and slower cuts whose largest part is smaller.
    """
    num_params = _unsharded_params(profile)
    most = sum(num_params)
    found = list[tuple[Tick, list[int]]]()
    while True:
        ends = [_ends(num_params, of_kind, start, each, most) for start in range(len(num_params))]
        cut = best_cut(weights, num_parts, [ends] * num_parts)
        tick = None if cut is None else tick_of(profile, cut)
        if (
            cut is None
            or tick is None
            or (found and tick.slowest_s >= min(tick.seconds for tick, _ in found))
        ):
            return found
        found.append((tick, cut))
        largest = max(sum(num_params[first:end]) for first, end in pairwise(cut))
        most = min(largest - 1, int(largest * _LIGHTER))


def _unsharded_params(profile: Profile) -> list[int]:
    """Number of parameters of each layer, without those that every stage holds."""
    return [0 if layer.is_stage_sharded else layer.num_params for layer in profile.layers]


def _ends(
    num_params: Sequence[int], of_kind: Sequence[int], start: int, each: int, most: int
) -> int:
    """The allowed ends of a part that begins at `start`, as bits.

    A part ends after a layer of the kind, or at the end of the model.
    """
    ends = count = size = 0
    for index in range(start, len(num_params)):
        count = count + of_kind[index]
        size = size + num_params[index]
        if size > most:
            break
        if count >= each and (of_kind[index] or index == len(num_params) - 1):
            ends |= 1 << (index + 1)
    return ends
