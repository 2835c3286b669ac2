"""Costs of layers in time and memory, measured or estimated.

They are plain numbers, used for cuts and for tables.
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
        forward_s: Seconds of its forward pass.
        backward_s: Seconds of its whole backward pass, including recompute.
        weight_s: The part of `backward_s` that computes the gradients of its parameters; the rest
            computes the gradients of its inputs. Known only if the split backward was examined.
        num_params: Parameters that an optimiser updates. Shared parameters count in each layer that
            holds them.
        residual_bytes: Bytes of its residuals, which are kept from forward to backward, if it is
            alone in a part. If the model recomputes: bytes of its inputs, if it begins a recomputed
            group.
        shared_bytes: The part of `residual_bytes` that is not added if the previous layer is in the
            same part, because that layer keeps it anyway or both layers need it.
        recomputed_bytes: Bytes that a backward pass must recompute before it begins; 0 if nothing
            is recomputed.
        is_marked: Whether it is marked to be recomputed by itself, outside the groups.
        pending_bytes: Bytes kept in addition to the residuals between its input gradient and its
            weight gradient, if its backward is split. Known only if that was examined.
        is_stage_sharded: Whether its parameters are sharded over the stages, all of which then run
            the layer. `num_params` is then one stage's share, which every stage holds, whichever
            part the layer is in.
        output_bytes: Bytes of its outputs.
        flops: Operations of the products in its forward pass.
        whole_flops: As `flops`, but counting the full attention matrix even if a mask hides half of
            it.
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
        """Seconds of its forward pass and its whole backward pass."""
        return self.forward_s + self.backward_s

    @property
    def input_s(self) -> float:
        """Seconds of its backward pass without the gradients of its parameters."""
        return self.backward_s - self.weight_s


NO_COST = LayerCost(0.0, 0.0)


@dataclass(frozen=True)
class StageMemory:
    """Memory of a stage, as far as it is known before the cut.

    A part is assumed to need `bytes_per_param` for each parameter of its layers, the values that
    these layers keep for each microbatch in flight, and the values that are recomputed at the same
    time. Temporary memory inside a layer is not known.

    Attributes:
        in_flight: For each part, the number of microbatches in flight that it has room for. For
            example, it is `min(M, 2 * S - 1)` on all of S stages for M microbatches and `"1f1b"`,
            because all devices hold rings of equal size.
        stages: The stage of each part. If None, part p is on stage p.
        bytes_per_param: Bytes of a parameter, its gradient and its optimiser state. 16 is the value
            for Adam with its two moments, if everything is float32.
        limit_bytes: Bytes that a stage may need; None means no limit.

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


@dataclass(frozen=True)
class Profile:
    """The costs of all layers of a model, for one microbatch on one device.

    Attributes:
        layers: One cost per layer.
        source: Where the numbers come from, as readable text.
        interval: Layers per recomputed group, counted from a part's first layer; 0 for none.
        signatures: One value per layer, equal for equivalent layers; empty if they are not known.
        memory: The known memory of the stages; None if nothing is known and no limit applies.
        bytes_per_s: Bytes that a device moves in a second.
        loss: Cost of the loss, which counts with the last layer.
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
        """Number of parameters that every stage holds in addition to those of its parts."""
        return sum(layer.num_params for layer in self.layers if layer.is_stage_sharded)

    def times(self) -> list[tuple[float, float]]:
        """Seconds of forward and backward that each layer takes on its stage.

        The loss counts with the last layer. Layers that all stages share take no time.
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
            part: The part, which determines how many microbatches are in flight.
            first: Its first layer.

        Yields:
            Bytes, which never decrease.
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

    def stage_bytes(self, boundaries: Sequence[int]) -> list[int]:
        """Bytes that each stage needs: for its parts, and for parameters that every stage holds."""
        memory = self.memory or StageMemory((1,) * (len(boundaries) - 1))
        sizes = self.part_bytes(boundaries)
        stages = range(len(sizes)) if memory.stages is None else memory.stages
        totals = [round(memory.bytes_per_param * self.stage_sharded_params)] * (max(stages) + 1)
        for stage, size in zip(stages, sizes, strict=True):
            totals[stage] += size
        return totals

    def part_sizes(self, boundaries: Sequence[int]) -> list[tuple[int, int, int]]:
        """For each part of a cut, its parameters, residual bytes and recomputed bytes.

        Residual bytes are per microbatch in flight. Parameters that every stage holds are left out.
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
        """True if a layer's inputs are kept for the backward, in a part that begins at `first`."""
        if self.interval == 0 or (index - first) % self.interval == 0:
            return True
        return self.layers[index].is_marked or self.layers[index - 1].is_marked


def _nth(values: Iterator[_T], count: int) -> _T:
    return [value for value, _ in zip(values, range(count), strict=False)][-1]
