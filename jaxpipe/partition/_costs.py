"""Costs of layers in time and memory, measured or estimated.

Plain numbers, for cuts and for tables.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from jaxpipe.errors import PartitionError

from ._checks import checked_count

_T = TypeVar("_T")


@dataclass(frozen=True)
class LayerCost:
    """Costs of one layer for one microbatch.

    Attributes:
        forward_s: Seconds of its forward.
        backward_s: Seconds of its whole backward, with what that recomputes.
        weight_s: The part of `backward_s` that makes the gradients of its parameters; the rest
            makes those of its inputs. Known only where the split backward was looked at.
        num_params: Parameters that an optimiser updates; shared ones count in each layer that holds
            them.
        residual_bytes: Bytes of its residuals, which wait from forward to backward, if it stands
            alone. Where the model recomputes: its inputs, if it begins a recomputed group.
        shared_bytes: How many of these it does not add where the layer before it stands in the same
            part: what that keeps in any case, or what both need.
        recomputed_bytes: Bytes that a backward has to make again before it begins; 0 where nothing
            is recomputed.
        is_marked: Whether it recomputes itself, outside the groups.
        pending_bytes: Bytes that wait beside the residuals, from its input gradient to its weight
            gradient, where its backward is split; known only where that was looked at.
        is_stage_sharded: Whether its parameters are sharded over the stages, which then all run it:
            `num_params` is each stage's share, which every stage holds, whichever part the layer is
            in.
        output_bytes: Bytes of its outputs.
        flops: Operations of its forward's products.
        whole_flops: The same with the whole square of attention, also where a mask leaves half.
    """

    forward_s: float
    backward_s: float
    weight_s: float = 0.0
    num_params: int = 0
    residual_bytes: int = 0
    recomputed_bytes: int = 0
    is_marked: bool = False
    pending_bytes: int = 0
    is_stage_sharded: bool = False
    shared_bytes: int = 0
    output_bytes: int = 0
    flops: float = 0.0
    whole_flops: float = 0.0

    @property
    def both_s(self) -> float:
        """Seconds of its forward and its whole backward."""
        return self.forward_s + self.backward_s

    @property
    def input_s(self) -> float:
        """Seconds of its backward without the gradients of its parameters."""
        return self.backward_s - self.weight_s


NO_COST = LayerCost(0.0, 0.0)


@dataclass(frozen=True)
class StageMemory:
    """Memory of a stage as far as it is known before the cut.

    A part that holds some layers is taken to need `bytes_per_param` for each of their parameters,
    what these layers keep for each microbatch in flight, and what is recomputed at once. Temporary
    memory inside a layer is not known.

    Attributes:
        in_flight: For each part for how many microbatches it has room to wait for their backward,
            such as `min(M, 2 * S - 1)` on all of S stages for M microbatches and `"1f1b"`, whose
            devices hold equal rings.
        stages: The stage that holds each part; None: part p is on stage `p % num_stages`.
        bytes_per_param: Bytes of a parameter, its gradient and the optimiser's numbers for it. 16:
            all of them float32, with the two moments of Adam.
        limit_bytes: Bytes that a stage may need; None: any.

    Raises:
        PartitionError: A number is not positive.
    """

    in_flight: tuple[int, ...]
    stages: tuple[int, ...] | None = None
    bytes_per_param: float = 16.0
    limit_bytes: int | None = None

    def __post_init__(self) -> None:
        """Check the numbers."""
        for part, number in enumerate(self.in_flight):
            checked_count(number, f"in_flight[{part}]")
        if self.limit_bytes is not None:
            checked_count(self.limit_bytes, "limit_bytes")
        if self.bytes_per_param < 0:
            raise PartitionError(
                "bytes_per_param must be at least 0, but got "
                f"bytes_per_param={self.bytes_per_param!r}. Use 16 for float32 parameters under "
                "Adam."
            )

    def stage_of(self, part: int, num_stages: int) -> int:
        """The stage that holds a part."""
        return part % num_stages if self.stages is None else self.stages[part]


@dataclass(frozen=True)
class Profile:
    """The costs of all layers of a model, for one microbatch on one device.

    Attributes:
        layers: One cost per layer.
        source: Where the numbers come from, for people to read.
        interval: Layers per recomputed group, counted from a part's first layer; 0 for none.
        signatures: Per layer a value that is equal for alike layers; empty where that is not known.
        memory: What is known of memory; None: nothing, and nothing is asked.
        bytes_per_s: Bytes that a device moves in a second.
        loss: The loss, which counts with the last layer.
    """

    layers: tuple[LayerCost, ...]
    source: str = "given"
    interval: int = 0
    memory: StageMemory | None = None
    signatures: tuple[Hashable, ...] = ()
    bytes_per_s: float = 1e12
    loss: LayerCost = NO_COST

    @property
    def stage_sharded_params(self) -> int:
        """Parameters that every stage holds beside those of its parts."""
        return sum(layer.num_params for layer in self.layers if layer.is_stage_sharded)

    def times(self) -> list[tuple[float, float]]:
        """Seconds of forward and backward that each layer takes where it stands.

        The loss counts with the last layer. What all stages share takes no time of one of them.
        """
        each = [
            (0.0, 0.0) if x.is_stage_sharded else (x.forward_s, x.backward_s) for x in self.layers
        ]
        if not self.layers[-1].is_stage_sharded:
            forward_s, backward_s = each[-1]
            each[-1] = forward_s + self.loss.forward_s, backward_s + self.loss.backward_s
        return each

    def seconds(self) -> list[float]:
        """Seconds of forward and backward of each layer."""
        return [forward_s + backward_s for forward_s, backward_s in self.times()]

    def needed_bytes(self, part: int, first: int) -> Iterator[int]:
        """Bytes that a part needs for the layers `[first, end)`, for each end from `first + 1` on.

        Args:
            part: The part; that of its stage decides how many microbatches are in flight.
            first: Its first layer.

        Yields:
            Bytes; they never become less.
        """
        memory = self.memory or StageMemory((1,) * (part + 1))
        for num_params, residual_bytes, largest in self._sizes(first):
            yield (
                round(memory.bytes_per_param * num_params)
                + memory.in_flight[part] * residual_bytes
                + largest
            )

    def part_bytes(self, boundaries: Sequence[int]) -> list[int]:
        """Bytes that each part of a cut needs, without parameters that every stage holds."""
        cuts = enumerate(zip(boundaries[:-1], boundaries[1:], strict=True))
        return [_nth(self.needed_bytes(part, first), end - first) for part, (first, end) in cuts]

    def part_sizes(self, boundaries: Sequence[int]) -> list[tuple[int, int, int]]:
        """For each part of a cut its parameters, residual bytes, and bytes recomputed.

        Residual bytes are those of each microbatch in flight. Parameters that every stage holds
        are left out.
        """
        cuts = zip(boundaries[:-1], boundaries[1:], strict=True)
        return [_nth(self._sizes(first), end - first) for first, end in cuts]

    def _sizes(self, first: int) -> Iterator[tuple[int, int, int]]:
        """Entries of `part_sizes` for layers `[first, end)`, with each end from `first + 1` on."""
        num_params = residual_bytes = group = largest = 0
        for index in range(first, len(self.layers)):
            layer = self.layers[index]
            if layer.is_stage_sharded:
                yield num_params, residual_bytes, largest
                continue
            num_params += layer.num_params
            if self._begins_group(first, index):
                residual_bytes += layer.residual_bytes - (
                    layer.shared_bytes if index > first else 0
                )
                group = 0
            group += layer.recomputed_bytes
            largest = max(largest, group)
            yield num_params, residual_bytes, largest

    def _begins_group(self, first: int, index: int) -> bool:
        """True if a layer's inputs wait for the backward, in a part that begins with `first`."""
        if self.interval == 0 or (index - first) % self.interval == 0:
            return True
        return self.layers[index].is_marked or self.layers[index - 1].is_marked


def _nth(values: Iterator[_T], count: int) -> _T:
    return [value for value, _ in zip(values, range(count), strict=False)][-1]
