"""Where two programs first differ: layer, microbatch and tick."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe._util.typing import PyTree
from jaxpipe.core.pipeline import Pipeline
from jaxpipe.layers import LayerCall, WrappedLayer
from jaxpipe.programs.jaxpr import arithmetic_of

from ._bound import Difference
from ._job import Job, Precision
from ._numbers import compare_gradients
from ._plain import Plain
from ._wrapped import wrapped_module


@dataclasses.dataclass(frozen=True)
class Located:
    """The place where a difference begins. None: it was not found."""

    layer: str | None
    # Whether the layer's output differs already, and not its gradient alone.
    is_forward: bool
    # The first that has the difference.
    microbatch: int | None = None
    # Those of that microbatch's action.
    tick: int | None = None
    stage: int | None = None

    def where(self, name: str) -> str:
        """Return the place of one result."""
        if self.layer is not None:
            return f"layer {self.layer}"
        return name

    @property
    def tick_text(self) -> str:
        """Where the schedule runs it, for a sentence."""
        if self.tick is None:
            return ""
        kind = "forward" if self.is_forward else "backward"
        return f", whose {kind} is in tick {self.tick} on stage {self.stage}"


def locate(job: Job, precision: Precision, wrong: Sequence[Difference]) -> Located:
    """Find where results first differ."""
    with precision.enabled():
        layer, is_forward = _layer(job, precision, wrong)
        microbatch = _microbatch(job, precision)
        found = Located(layer, is_forward, microbatch)
        if layer is None or microbatch is None:
            return found
        return _with_tick(job.pipeline(precision), found, layer)


def _layer(job: Job, precision: Precision, wrong: Sequence[Difference]) -> tuple[str | None, bool]:
    """Return the layer where the difference begins, and whether it begins in its forward."""
    tapped = _tapped_differences(job, precision)
    if tapped:
        return tapped[0], True
    names = [named.name for named in job.module.layers]
    leaves = [each.name.split("/") for each in wrong if each.name.startswith("gradient/")]
    layers = [path[2] for path in leaves if path[1] == "layers"]
    # A wrong gradient at a layer's output makes those of all earlier layers wrong.
    return (max(layers, key=names.index), False) if layers else (None, False)


def _tapped_differences(job: Job, precision: Precision) -> list[str]:
    """Return the layers whose outputs in training differ, in order."""
    module = job.module_in(precision)
    # Layers that all stages run together must not report.
    ends = job.pipeline(precision).stage.ends.layers
    taps = [named for named in module.layers if named.index not in ends]
    tapped = wrapped_module(module, lambda i, layer: layer if i in ends else _Tapped(layer, _TAP))
    batch = job.batch_in(precision, 0)
    start = job.start(precision)
    one = jax.tree.map(lambda x: x[0], batch)
    pipeline = job.pipeline_of(tapped, one, precision)
    state = pipeline.states.init_from(start.params, start.collections)
    metrics, _, _ = jax.device_get(pipeline.gradients(state, batch))
    found = metrics.get("metrics", {})
    reports = Plain(tapped, job.num_replicas).gradients(start, batch, 0).reports
    wanted = {name.removeprefix("metrics/"): x for name, x in reports.items()}
    allowed = _SLACK * arithmetic_of(list(pipeline.trace.programs)).unit
    names = []
    for named in taps:
        key = f"{named.name}/{_TAP}"
        size = max(abs(wanted[f"{key}_size"]), 1.0)
        difference = abs(_joined(found, key, job.num_terms) - _joined(wanted, key, job.num_terms))
        # Not `>`, which is false of NaN.
        if not difference <= allowed * size + _FINEST:
            names.append(named.name)
    return names


_TAP = "tapped"
_SLACK = 64.0
_UNITS = tuple(2.0**-power for power in (0, 12, 24, 36))
"""Pipelines add up metrics in float32. So a tap is reported in parts of 12 bits, whose sums over
microbatches are exact."""

_FINEST = 2 * _UNITS[-1]


def _joined(metrics: Mapping[str, Any], key: str, num_terms: int) -> float:
    # The parts are integers, and so are their sums. Only a mean is rounded.
    sums = (np.rint(float(metrics[f"{key}_{i}"]) * num_terms) for i in range(len(_UNITS)))
    return sum(unit * each for unit, each in zip(_UNITS, sums, strict=True)) / num_terms


class _Tapped(WrappedLayer):
    """A layer that reports a weighted mean of its outputs."""

    def apply(self, call: LayerCall) -> Any:
        outputs, collections, aux = super().apply(call)
        rest = jnp.float32(0)
        size = jnp.float32(0)
        for leaf in jax.tree.leaves(outputs):
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                # Weights differ from entry to entry: a plain mean is the same if entries change
                # places.
                places = jnp.arange(leaf.size, dtype=jnp.float32).reshape(leaf.shape)
                terms = jnp.cos(places).astype(leaf.dtype) * leaf
                rest = rest + terms.mean()
                size = size + jnp.abs(terms).mean()
        taps = {f"{_TAP}_size": size.astype(jnp.float32)}
        for i, unit in enumerate(_UNITS):
            part = jnp.round(rest / unit)
            rest = rest - part * unit
            taps[f"{_TAP}_{i}"] = part.astype(jnp.float32)
        return outputs, collections, {**aux, "metrics": {**aux.get("metrics", {}), **taps}}


def _microbatch(job: Job, precision: Precision) -> int | None:
    """Return the first microbatch whose gradients alone differ."""
    module = job.module_in(precision)
    if module.loss_fn is None:
        return None
    loss_fn = module.loss_fn

    def chosen(outputs: PyTree, labels: PyTree) -> Any:
        own, shares = labels
        result = loss_fn(outputs, own)
        first, *rest = result if isinstance(result, tuple) else (result,)
        # The weight stays: the gradient is then the microbatch's share of that of the batch.
        scaled = first * shares.reshape(-1)[0].astype(first.dtype)
        return scaled if not rest else (scaled, *rest)

    # Each row of `eye` leaves the loss of one microbatch alone.
    compared = compare_gradients(
        job, precision, module.replace(loss_fn=chosen), np.eye(job.num_microbatches)
    )
    return next((m for m, found in enumerate(compared) if not all(x.holds for x in found)), None)


def _with_tick(pipeline: Pipeline, found: Located, layer: str) -> Located:
    """Add the tick of the action of the located microbatch on the located layer."""
    program = pipeline.plan.program
    names = [named.name for named in pipeline.module.layers]
    index = names.index(layer)
    part = next(
        (i for i, stop in enumerate(pipeline.plan.parts[1:]) if index < stop),
        len(pipeline.plan.parts) - 2,
    )
    actions = program.tables.forward if found.is_forward else program.tables.backward
    for stage, virtual in enumerate(program.placement.virtual):
        for tick in range(program.num_ticks):
            chunk = actions.chunk[stage][tick]
            if (
                actions.microbatch[stage][tick] == found.microbatch
                and chunk >= 0
                and virtual[chunk] == part
            ):
                return dataclasses.replace(found, tick=tick, stage=stage)
    return found
