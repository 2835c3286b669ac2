"""Loss, gradients, updates, evaluation and outputs of the pipeline against the plain program."""

import math
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpipe.jaxpr import Arithmetic, arithmetic_of
from jaxpipe.layers import PipelineModule
from jaxpipe.pipeline import Pipeline

from ._bound import Difference, bounds, differences_of
from ._job import DOUBLE, OWN, Job, Precision, named
from ._plain import Optimizer, Plain, Shake, Start

_SEEDS = (1, 2)
"""Those of the runs with additional roundings."""

_STEPS = 3


class Results(NamedTuple):
    """Results of one program, and the sums of absolute values of those that are sums."""

    values: dict[str, Any]
    sizes: dict[str, Any]


class Wanted(NamedTuple):
    """Results of the plain program, and the bounds of their differences."""

    values: dict[str, Any]
    limits: dict[str, float]


def wanted_of(job: Job, precision: Precision) -> Wanted:
    """Return what the plain program gives. It runs once for each job and precision."""
    if precision.name not in job.wanted:
        with jax.enable_x64(precision.is_double):
            pipeline = job.pipeline(precision)
            start = job.start(precision)
            optimizer = job.optimizer(frozenset(pipeline.trace.frozen))
            plain = run_plain(job, precision, optimizer, start)
            moved = [
                run_plain(job, precision, optimizer, start, shake).values
                for shake in _shakes(job, pipeline)
            ]
            limits = bounds(plain.values, moved, plain.sizes, _arithmetic(pipeline), job.num_terms)
        job.wanted[precision.name] = Wanted(plain.values, limits)
    return job.wanted[precision.name]


def compare(job: Job, precision: Precision) -> list[Difference]:
    """Compare all results of the two programs."""
    wanted = wanted_of(job, precision)
    with jax.enable_x64(precision.is_double):
        found = run_pipeline(job, precision)
    return differences_of(wanted.values, found, wanted.limits)


def layers_below_double(job: Job) -> list[str]:
    """Return the names of layers that round to a narrower dtype in the float64 pipeline."""
    with jax.enable_x64(True):
        programs = job.pipeline(DOUBLE).trace.programs
    return [
        named.name
        for named, program in zip(job.module.layers, programs, strict=True)
        if arithmetic_of([program]).dtype != np.float64
    ]


def compare_ragged(job: Job, precision: Precision) -> list[Difference]:
    """Compare gradients where microbatches have different weights, one of them 0."""
    with jax.enable_x64(precision.is_double):
        module = weighted(job.module_in(precision))
        batch = job.batch_in(precision, 0)
        weights = np.ones((job.num_microbatches, job.num_samples), np.float32)
        weights *= np.resize([1.0, 0.0, 2.0, 0.5], job.num_microbatches)[:, None]
        batch = batch._replace(labels=(batch.labels, weights))
        start = job.start(precision)
        pipeline = job.pipeline(
            precision, module=module, example=jax.tree.map(lambda x: x[0], batch)
        )
        trained = job.optimizer(frozenset(pipeline.trace.frozen)).trained
        program = Plain(module, job.num_replicas)
        wanted, *moved = (
            program.gradients(start, batch, 0, shake) for shake in (None, *_shakes(job, pipeline))
        )
        values, *others = (
            named("ragged", trained(each.grads)) | {"loss of ragged weights": each.loss}
            for each in (wanted, *moved)
        )
        limits = bounds(
            values,
            others,
            named("ragged", trained(wanted.sizes)),
            _arithmetic(pipeline),
            job.num_terms,
        )
        state = pipeline.init_from(start.params, start.collections)
        metrics, grads, _ = pipeline.gradients(state, batch)
        found = named("ragged", pipeline.params_tree(grads))
        found["loss of ragged weights"] = jax.device_get(metrics["loss"])
    return differences_of(values, found, limits)


def nan_stays(job: Job) -> list[str]:
    """Put a NaN into one sample, and return where it shows although it should not, or does not."""
    batch = job.batch_in(OWN, 0)
    leaves = jax.tree.leaves(batch.inputs)
    if not any(np.issubdtype(leaf.dtype, np.floating) for leaf in leaves):
        return []
    microbatch = job.num_microbatches // 2
    sample = job.num_samples - 1

    def spoiled(leaf: Any) -> Any:
        if not np.issubdtype(leaf.dtype, np.floating):
            return leaf
        leaf = leaf.copy()
        leaf[microbatch, sample] = np.nan
        return leaf

    batch = batch._replace(inputs=jax.tree.map(spoiled, batch.inputs))
    pipeline = job.pipeline(OWN)
    start = job.start(OWN)
    state = pipeline.init_from(start.params, start.collections)
    metrics, outputs = jax.device_get(pipeline.evaluate_and_predict(state, batch))
    _, wanted = job.plain(OWN).evaluate(start, batch)
    found = []
    for m in range(job.num_microbatches):
        at = f"microbatch {m}"
        if np.isnan(metrics["microbatch_losses"][m]) != (m == microbatch):
            found.append(f"the loss of {at}")
        pairs = zip(
            jax.tree.leaves(jax.tree.map(lambda x, m=m: x[m], outputs)),
            jax.tree.leaves(wanted[m]),
            strict=True,
        )
        if any(not np.array_equal(np.isnan(a), np.isnan(b)) for a, b in pairs):
            found.append(f"the outputs of {at}")
    return found


def weighted(module: PipelineModule) -> PipelineModule:
    """Return a module whose labels are `(labels, weights)`, with a weight for each sample.

    The weight of a microbatch is that of its first sample, times the weight that its loss has.
    """
    plain = module.loss_fn

    def loss_fn(outputs: Any, labels: Any) -> Any:
        own, weights = labels
        result = outputs if plain is None else plain(outputs, own)
        share = weights.reshape(-1)[0]
        if not isinstance(result, tuple):
            return result * share.astype(result.dtype), share
        total, weight, *metrics = result
        return total * share.astype(total.dtype), weight * share, *metrics

    return module.replace(loss_fn=loss_fn)


def run_plain(
    job: Job, precision: Precision, optimizer: Optimizer, start: Start, shake: Shake | None = None
) -> Results:
    """Run the plain program: one batch, its evaluation, and several steps."""
    program = job.plain(precision)
    scale = job.loss_scale(precision)
    values: dict[str, Any] = {}
    sizes: dict[str, Any] = {}
    loss, outputs = program.evaluate(start, job.batch_in(precision, 0), shake)
    values["evaluation/loss"] = loss
    values |= {f"outputs/{i}": x for i, x in enumerate(_leaves(outputs))}
    opt_state = optimizer.init(start.params)
    at = start
    for step in range(_STEPS):
        found = program.gradients(at, job.batch_in(precision, step), step, shake, scale)
        if step == 0:
            values["loss"] = found.loss
            values |= named("gradient", optimizer.trained(found.grads))
            sizes |= named("gradient", optimizer.trained(found.sizes))
        params, opt_state = optimizer.update(at.params, opt_state, found.grads)
        at = Start(params, found.collections)
    values |= named("parameter", at.params) | named("collection", at.collections)
    return Results(values, sizes)


def run_pipeline(job: Job, precision: Precision) -> dict[str, Any]:
    """Run the pipeline on the same batches."""
    pipeline = job.pipeline(precision)
    start = job.start(precision)
    values: dict[str, Any] = {}
    state = pipeline.init_from(start.params, start.collections)
    metrics, outputs = jax.device_get(
        pipeline.evaluate_and_predict(state, job.batch_in(precision, 0))
    )
    values["evaluation/loss"] = metrics["loss"]
    each = [jax.tree.map(lambda x, m=m: x[m], outputs) for m in range(job.num_microbatches)]
    values |= {f"outputs/{i}": x for i, x in enumerate(_leaves(each))}
    _, grads, _ = pipeline.gradients(state, job.batch_in(precision, 0))
    return values | named("gradient", pipeline.params_tree(grads)) | run_steps(job, precision)


def run_steps(job: Job, precision: Precision) -> dict[str, Any]:
    """Train for a few steps; returns the first loss, and parameters and collections at the end."""
    pipeline = job.pipeline(precision)
    start = job.start(precision)
    state = pipeline.init_from(start.params, start.collections)
    losses: list[Any] = []
    for step in range(_STEPS):
        state, metrics = pipeline.step(state, pipeline.place_batch(job.batch_in(precision, step)))
        losses.append(jax.device_get(metrics["loss"]))
    values = named("parameter", pipeline.params_tree(state.params))
    values |= named("collection", pipeline.collections_tree(state.collections))
    return values | {"loss": losses[0]}


def _leaves(outputs: list[Any]) -> list[Any]:
    return [np.atleast_1d(x) for each in outputs for x in jax.tree.leaves(each)]


def _shakes(job: Job, pipeline: Pipeline) -> list[Shake]:
    """Roundings that move a result by `sqrt(operations)` less than what is to be explained.

    A sum of `n` terms is moved by `sqrt(n)` roundings, whatever layers compute.
    """
    arithmetic = _arithmetic(pipeline)
    of_sums = math.sqrt(job.num_terms / arithmetic.operations)
    return [Shake(seed, of_sums, 2 * arithmetic.unit) for seed in _SEEDS]


def _arithmetic(pipeline: Pipeline) -> Arithmetic:
    return arithmetic_of(pipeline.trace.programs)
