"""What a pipeline needs of the user's functions: pure layers, and a loss that is a mean."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe._util.typing import PyTree
from jaxpipe.data import Batch
from jaxpipe.errors import JaxpipeError
from jaxpipe.layers import NamedLayer, PipelineModule, call_on_one, layer_view
from jaxpipe.programs.jaxpr import all_equations, arithmetic_of, primitives, programs_inside

from ._bound import bounds, distance
from ._job import Job, Precision, is_key
from ._plain import Start, cut_samples, microbatch_of
from ._shake import Shaking, shaken

_UNITS = 8.0
"""Units roundoff by which a number may move if other samples change.

The program and its shapes stay the same, so that only sums over rows in another order move it.
"""


class Fault(NamedTuple):
    """What a function of the user does that a pipeline does not allow, and what to do instead."""

    # The layer, or `loss_fn`.
    where: str
    what: str
    repair: str


def layer_findings(job: Job, precision: Precision) -> Iterator[Fault | dict[str, str]]:
    """Check every kind of layer and the loss; figures say what was not checked."""
    with jax.enable_x64(precision.is_double):
        module = job.module_in(precision)
        start = job.start(precision)
        batch = job.batch_in(precision, 0)
        one = microbatch_of(batch, 0, 0, job.num_replicas)
        other = microbatch_of(batch, 1, 0, job.num_replicas)
        key = jax.random.key(7)
        num_samples = len(jax.tree.leaves(one.inputs)[0])
        groups = _groups(num_samples)
        # The model also runs with each group of samples replaced: others must not change.
        given = [one, *(_replaced(one, other, group) for group in groups)]
        inputs = [jax.tree.map(jnp.asarray, each.inputs) for each in given]
        streams = [jax.device_get(module.cast_inputs(each)) for each in inputs]
        if groups and not any(map(_changes, zip(*map(jax.tree.leaves, streams), strict=True))):
            yield {"mixing of samples not checked": "all samples of the example are equal"}
        units: dict[Any, float] = {}
        for named in module.layers:
            call = _Call(module, named, start, key)
            # Equal layers on equal shapes are the same function: one trace and one fault suffice.
            kind = (named.layer.identity, str(jax.tree.map(jnp.shape, streams[0])))
            is_new = kind not in units
            if is_new:
                traced = call.trace(streams[0], one.side)
                units[kind] = arithmetic_of([traced]).unit
                yield from _trace_faults(named, traced, call.trace(streams[0], one.side))
            results = [call(x, each.side) for x, each in zip(streams, given, strict=True)]
            # Undone, so that later layers are not named for what this one mixes.
            streams, mixes = _unmixed(results, groups, units[kind])
            # The proof of the numbers compares batch statistics.
            if mixes and is_new and not call.keeps_collections:
                yield Fault(
                    f"layer {named.name}",
                    "computes a sample from the other samples of its microbatch",
                    "Its results then depend on microbatches and replicas. Compute each sample "
                    "alone",
                )
        yield from _loss_findings(module, streams, one.labels, num_samples)


class _Call:
    """One layer as a function of its inputs, in training."""

    def __init__(
        self, module: PipelineModule, named: NamedLayer, start: Start, key: jax.Array
    ) -> None:
        self.keeps_collections = bool(start.collections.get(named.name))
        self._named = named
        self._module = module
        self._key = key
        self._view = layer_view(named, start.params)
        # As in a program: modules may write into the arrays of their statistics.
        self._collections = jax.tree.map(jnp.asarray, start.collections.get(named.name, {}))
        self._compiled = jax.jit(self._function)

    def _function(self, x: PyTree, side: Mapping[str, PyTree]) -> PyTree:
        def run(x: PyTree, side: Mapping[str, PyTree]) -> PyTree:
            layers = self._module.run_layers([self._named.index], [self._view], train=True)
            return layers(x, self._key, side, [self._collections])[0]

        return call_on_one(self._module.automatic_axes, run, x, side)

    def __call__(self, x: PyTree, side: Mapping[str, PyTree]) -> PyTree:
        return jax.device_get(self._compiled(x, side))

    def trace(self, x: PyTree, side: Mapping[str, PyTree]) -> Any:
        return jax.make_jaxpr(lambda x, side: self._function(x, side))(x, side)


def _trace_faults(named: NamedLayer, traced: Any, again: Any) -> Iterator[Fault]:
    where = f"layer {named.name}"
    # The text of a program does not contain the values of its constants.
    if str(traced) != str(again) or _constants(traced) != _constants(again):
        yield Fault(
            where,
            "computes something else when it is traced again",
            "A layer is traced several times: keep no state in closures, globals or attributes",
        )
    names = [eqn.primitive.name for eqn in all_equations(traced.jaxpr.eqns)]
    callbacks = sorted({name for name in names if name in primitives.CALLBACKS})
    if callbacks:
        yield Fault(
            where,
            f"calls the host ({callbacks[0]})",
            "Idle ticks and recomputation repeat such a call. Report a metric instead",
        )


def _constants(traced: Any) -> list[bytes]:
    inner = (each for eqn in all_equations(traced.jaxpr.eqns) for each in programs_inside(eqn))
    constants = (x for program in (traced, *inner) for x in program.consts)
    return [np.asarray(x).tobytes() for x in constants if not is_key(x)]


def _groups(num_samples: int) -> list[np.ndarray]:
    """Return groups of samples, each followed by the other samples, that tell any two apart."""
    indices = np.arange(num_samples)
    # Two indices differ in a bit: few groups separate all pairs.
    bits = (indices >> bit & 1 == 1 for bit in range((num_samples - 1).bit_length()))
    return [group for bit in bits for group in (bit, ~bit)]


def _replaced(one: Batch, other: Batch, group: np.ndarray) -> Batch:
    """Take the samples of a group from another microbatch, and move their numbers."""

    def replaced(leaf: Any, others: Any) -> np.ndarray:
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            others = (others * 0.5 + 0.25).astype(leaf.dtype)  # all samples may be equal
        return np.where(_along(group, leaf, 0), others, leaf)

    return jax.tree.map(replaced, one, other)


def _along(group: np.ndarray, leaf: Any, axis: int) -> np.ndarray:
    return np.expand_dims(group, [i for i in range(leaf.ndim) if i != axis])


def _unmixed(
    results: Sequence[PyTree], groups: Sequence[np.ndarray], unit: float
) -> tuple[list[PyTree], bool]:
    """Undo what samples change in others; returns the results and whether anything was undone.

    `results` are a layer's, and those with the samples of each of `groups` replaced.
    """
    leaves = [
        _unmixed_leaf(each, groups, unit)
        for each in zip(*map(jax.tree.leaves, results), strict=True)
    ]
    structure = jax.tree.structure(results[0])
    trees = [structure.unflatten(each) for each in zip(*(leaf for leaf, _ in leaves), strict=True)]
    return trees, any(mixes for _, mixes in leaves)


def _unmixed_leaf(
    leaves: Sequence[Any], groups: Sequence[np.ndarray], unit: float
) -> tuple[list[Any], bool]:
    """As `_unmixed`, for one leaf."""
    first = leaves[0]
    # A scalar, such as a loss that is handed on, belongs to all samples.
    if np.ndim(first) == 0 or is_key(first) or not groups:
        return list(leaves), False
    moved = [_differs(first, leaf, unit) for leaf in leaves[1:]]
    # Samples may be along any dim of their number. Else each entry belongs to one sample, and must
    # not move with both a group and the rest, which follow each other in `groups`.
    axes = [axis for axis, size in enumerate(first.shape) if size == len(groups[0])]
    by_axis = [
        [x & ~_along(group, first, axis) for x, group in zip(moved, groups, strict=True)]
        for axis in axes
    ]
    by_entry = [x & moved[i ^ 1] for i, x in enumerate(moved)]
    # A dim of the same length that does not hold the samples has more that is foreign.
    foreign = min(by_axis or [by_entry], key=np.sum)
    own = [
        np.where(x & ~wrong, leaf, first)
        for leaf, x, wrong in zip(leaves[1:], moved, foreign, strict=True)
    ]
    return [first, *own], bool(np.any(foreign))


def _differs(wanted: Any, found: Any, unit: float) -> np.ndarray:
    """Return which entries differ by more than some units in the last place of their row."""
    if not jnp.issubdtype(wanted.dtype, jnp.inexact):
        return wanted != found
    wide = np.complex128 if np.iscomplexobj(wanted) else np.float64
    wanted, found = (x.astype(wide) for x in (wanted, found))
    size = np.abs(wanted).max(-1, keepdims=True, initial=0, where=np.isfinite(wanted))
    with np.errstate(invalid="ignore"):  # infinities
        is_near = np.abs(wanted - found) <= _UNITS * unit * size
    return ~(is_near | (wanted == found) | (np.isnan(wanted) & np.isnan(found)))


def _changes(leaves: Sequence[Any]) -> bool:
    """Return whether a leaf changes with the samples."""
    return any(np.any(_differs(leaves[0], each, 0.0)) for each in leaves[1:])


def _loss_findings(
    module: PipelineModule, streams: Sequence[PyTree], labels: PyTree, num_samples: int
) -> Iterator[Fault | dict[str, str]]:
    """The loss of two microbatches together must be the mean, or the sum, of their losses."""
    outputs = streams[0]
    # Leaves without a dim of samples must not change with them, or a half of them is not known.
    others = [
        leaves
        for leaves in zip(*map(jax.tree.leaves, streams), strict=True)
        if np.ndim(leaves[0]) and len(leaves[0]) != num_samples
    ]
    obstacles = {
        "the last layer computes it": module.loss_fn is None,
        "a microbatch has one sample": num_samples == 1,
        "samples are not the first dim of each output": any(map(_changes, others)),
    }
    obstacle = next((text for text, is_there in obstacles.items() if is_there), None)
    if obstacle is not None:
        yield {"loss not cut": obstacle}
        return

    def terms(part: slice) -> Any:
        return module.loss_terms(*cut_samples((outputs, labels), num_samples, part))

    half = num_samples // 2
    whole = terms(slice(None))
    try:
        halves = [terms(slice(half)), terms(slice(half, None))]
    except JaxpipeError:
        yield {"loss not cut": f"loss_fn takes no other number of samples than {num_samples}"}
        return
    arithmetic = arithmetic_of(
        [jax.make_jaxpr(lambda x, t: module.loss_terms(x, t)[:2])(outputs, labels)]
    )
    moved = module.loss_terms(shaken(outputs, Shaking(jax.random.key(7), arithmetic.unit)), labels)
    wanted = _added(whole, 1.0)
    shares = [half / num_samples, 1 - half / num_samples]
    parts = [_added(each, share) for each, share in zip(halves, shares, strict=True)]
    found = {name: sum(part[name] for part in parts) for name in wanted}
    magnitudes = {name: sum(abs(each[name]) for each in (wanted, *parts)) for name in wanted}
    limits = bounds(wanted, [_added(moved, 1.0)], arithmetic, len(parts), sizes=magnitudes)
    if not all(part["loss"] for part in parts):
        # A weight such as `max(weight, 1)` counts a part in which no sample counts.
        limits["weight"] = math.inf
    for name, value in wanted.items():
        is_equal = np.array_equal(value, found[name], equal_nan=True)
        if is_equal or distance(found[name], value) <= limits[name]:
            continue
        kind = "mean" if whole.weight is None else "sum"
        values = [each.weight if name == "weight" else each.total for each in (whole, *halves)]
        yield Fault(
            "loss_fn",
            f"is no {kind} over samples: {values[0]:.6g} for all samples of a microbatch, "
            f"{values[1]:.6g} and {values[2]:.6g} for its halves",
            "The loss of a step is the mean over microbatches and replicas. Return the mean, or "
            "(sum, weight)",
        )
        return


def _added(terms: Any, share: float) -> dict[str, float]:
    """Return what adds up over samples, of a part that has this share of the samples."""
    if terms.weight is None:
        return {"loss": float(terms.total) * share}
    return {"loss": float(terms.total), "weight": float(terms.weight)}
