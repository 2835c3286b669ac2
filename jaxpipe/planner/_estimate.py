"""How long each layer should take, from the operations and bytes of its trace."""

from jaxpipe._typing import PyTree
from jaxpipe.autodiff import SplitBackward
from jaxpipe.layers import ModelTrace, PipelineModule
from jaxpipe.partition import Profile

from ._layer_work import LayerWork, costs_of_all
from ._work import Work, count_work


def estimate_layers(
    module: PipelineModule,
    trace: ModelTrace,
    *,
    labels: PyTree = None,
    flops_per_s: float = 1e14,
    bytes_per_s: float = 1e12,
    halves: bool = False,
) -> Profile:
    """Estimate forward and backward of each distinct layer, for one microbatch, without running anything.

    The time is `flops / flops_per_s + moved_bytes / bytes_per_s`, the same on every machine. Operations are counted
    in the trace, not by XLA: its cost analysis counts the body of a scan once, however often it runs, and gives
    nothing for a program that is compiled for absent GPUs.

    Args:
        module: The model; what it recomputes counts with the backward.
        trace: Its shapes, for one microbatch of one replica.
        labels: A microbatch's labels, or their shapes; the loss then counts with the last layer. None leaves it out.
        flops_per_s: Operations per second that are assumed.
        bytes_per_s: Bytes per second that are assumed. For where layers are cut only the ratio of the two rates
            counts.
        halves: As for `measure_layers`.

    Returns:
        The costs.

    Raises:
        LayerError: A layer cannot be differentiated.
    """

    def seconds(work: Work) -> float:
        return work.flops / flops_per_s + work.moved_bytes / bytes_per_s

    def cost(work: LayerWork) -> tuple[float, float, float | None, int]:
        residuals, params, cotangents = work.residuals, work.params, work.cotangents
        found = [count_work(residuals.forward, params, work.inputs, work.context)]
        found.append(count_work(residuals.backward, params, residuals.kept, cotangents))
        pending_bytes = 0
        if halves:
            split = SplitBackward(residuals, params)
            pending_bytes = work.bytes_of(split.pending)
            half = (split.weight_half, params, residuals.kept, split.pending)
            found.append(Work(0, 0) if split.is_whole else count_work(*half))
        forward_s, backward_s, *rest = (seconds(part) / work.num_places for part in found)
        return forward_s, backward_s, rest[0] if rest else None, pending_bytes

    costs = costs_of_all(module, trace, labels, cost)
    source = f"estimated, {flops_per_s:.3g} FLOP/s and {bytes_per_s:.3g} B/s"
    return Profile(costs, source, module.activation_checkpoint_interval)
