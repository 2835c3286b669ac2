"""Loss, gradients, updates, evaluation and outputs of the pipeline against the plain program."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe._util.typing import PyTree
from jaxpipe.core.pipeline import Pipeline
from jaxpipe.core.state import TrainState
from jaxpipe.data import Batch
from jaxpipe.layers import PipelineModule
from jaxpipe.programs.jaxpr import Arithmetic, arithmetic_of

from ._bound import FLOAT32, Difference, bounds, differences_of, norm, wide
from ._claims import NotCovered
from ._job import DOUBLE, OWN, Job, Precision, named
from ._plain import LossScale, Plain, Shake, Start
from ._proof import Finding

_SEEDS = (1, 2)
"""Those of the runs with additional roundings."""

_EXACT = "scale"
"""The kind of results that no rounding moves."""


class Results(NamedTuple):
    """Results of the plain program, by name."""

    values: dict[str, Any]
    # The sums of absolute values of those that are sums.
    sizes: dict[str, Any]
    # How far storing in their dtype moves those that are differences of stored numbers.
    stored: dict[str, float]


class Wanted(NamedTuple):
    """Results of the plain program, and the bounds of their differences."""

    values: dict[str, Any]
    limits: dict[str, float]


def wanted_of(job: Job, precision: Precision) -> Wanted:
    """Run the plain program, once as it is and with additional roundings."""
    with precision.enabled():
        start = job.start(precision)
        plain = run_plain(job, precision, start)
        moved = [
            run_plain(job, precision, start, shake).values
            for shake in shakes_of(job, job.pipeline(precision))
        ]
        limits = bounds(
            plain.values,
            moved,
            arithmetic_in(job.pipeline(precision)),
            job.num_terms,
            sizes=plain.sizes,
            stored=plain.stored,
        )
        limits |= {name: 0.0 for name in limits if name.startswith(f"{_EXACT}/")}
    return Wanted(plain.values, limits)


def compare(job: Job, precision: Precision, wanted: Wanted) -> list[Difference]:
    """Compare all results of the two programs."""
    with precision.enabled():
        found = run_pipeline(job, precision)
    return differences_of(wanted.values, found, wanted.limits)


def layers_below_double(job: Job) -> list[str]:
    """Return the names of layers that round to a narrower dtype in the float64 pipeline."""
    with DOUBLE.enabled():
        programs = job.pipeline(DOUBLE).trace.programs
    return [
        named.name
        for named, program in zip(job.module.layers, programs, strict=True)
        if arithmetic_of([program]).dtype != np.float64
    ]


def compare_ragged(job: Job, precision: Precision) -> list[Difference]:
    """Compare gradients where microbatches have different weights, one of them 0."""
    weights = np.resize([1.0, 0.0, 2.0, 0.5], job.num_microbatches)
    with precision.enabled():
        return next(
            compare_gradients(job, precision, weighted(job.module_in(precision)), [weights])
        )


def compare_gradients(
    job: Job, precision: Precision, module: PipelineModule, shares: Iterable[np.ndarray]
) -> Iterator[list[Difference]]:
    """Compare loss and gradients once for each of `shares`; labels are `(labels, shares)`."""
    batch = job.batch_in(precision, 0)

    def with_shares(each: np.ndarray) -> Batch:
        # Labels are cut by samples, so each sample carries the share of its microbatch.
        rows = np.ones((job.num_microbatches, job.num_samples)) * each[:, None]
        return batch._replace(labels=(batch.labels, rows.astype(np.float32)))

    example = jax.tree.map(lambda x: x[0], with_shares(np.ones(job.num_microbatches)))
    start = job.start(precision)
    pipeline = job.pipeline_of(module, example, precision)
    state = pipeline.states.init_from(start.params, start.collections)
    trained = job.optimizer.trained
    program = Plain(module, job.num_replicas)
    scale = job.loss_scale(precision)
    for each in shares:
        given = with_shares(each)
        wanted, *moved = (
            program.gradients(start, given, 0, shake, scale)
            for shake in (None, *shakes_of(job, pipeline))
        )
        values, *others = (
            named("ragged", trained(found.grads)) | {"loss of ragged weights": found.loss}
            for found in (wanted, *moved)
        )
        limits = bounds(
            values,
            others,
            arithmetic_in(pipeline),
            job.num_terms,
            sizes=named("ragged", trained(wanted.sizes)),
        )
        metrics, grads, _ = pipeline.gradients(state, given)
        found = named("ragged", pipeline.params_tree(grads))
        found["loss of ragged weights"] = jax.device_get(metrics["loss"])
        yield differences_of(values, found, limits)


def nan_stays(job: Job) -> Iterator[Any]:
    """Put a NaN into one sample, and find where it shows in one program only."""
    batch = job.batch_in(OWN, 0)

    def is_float(leaf: Any) -> bool:
        return jnp.issubdtype(leaf.dtype, jnp.floating)

    if not any(map(is_float, jax.tree.leaves(batch.inputs))):
        yield NotCovered("no input is a floating-point number")
        return
    # In the middle of the schedule, where other microbatches run before and after it.
    microbatch = job.num_microbatches // 2
    sample = job.num_samples - 1

    def spoiled(leaf: Any) -> Any:
        if not is_float(leaf):
            return leaf
        leaf = leaf.copy()
        leaf[microbatch, sample] = np.nan
        return leaf

    batch = batch._replace(inputs=jax.tree.map(spoiled, batch.inputs))
    pipeline = job.pipeline(OWN)
    start = job.start(OWN)
    state = pipeline.states.init_from(start.params, start.collections)
    metrics, outputs = jax.device_get(pipeline.programs.evaluate_and_predict(state, batch))
    wanted = job.plain(OWN).evaluate(start, batch)
    for m in range(job.num_microbatches):
        found = jax.tree.map(lambda x, m=m: x[m], outputs)
        for what, mine, others in (
            ("loss", metrics["microbatch_losses"][m], np.float64(wanted.sums[m])),
            ("outputs", found, wanted.outputs[m]),
        ):
            pairs = zip(jax.tree.leaves(mine), jax.tree.leaves(others), strict=True)
            if any(not np.array_equal(np.isnan(a), np.isnan(b)) for a, b in pairs):
                text = "a NaN of another sample shows here, or its own does not."
                yield Finding(f"the {what} of microbatch {m}", text)


def weighted(module: PipelineModule) -> PipelineModule:
    """Return a module whose labels are `(labels, weights)`, with a weight for each sample."""
    plain = module.loss_fn

    def loss_fn(outputs: Any, labels: Any) -> Any:
        own, weights = labels
        result = outputs if plain is None else plain(outputs, own)
        # All samples of a microbatch have the same. It multiplies the weight that the loss has.
        share = weights.reshape(-1)[0]
        if not isinstance(result, tuple):
            return result * share.astype(result.dtype), share
        total, weight, *metrics = result
        return total * share.astype(total.dtype), weight * share, *metrics

    return module.replace(loss_fn=loss_fn)


def run_plain(job: Job, precision: Precision, start: Start, shake: Shake | None = None) -> Results:
    """Run the plain program: one batch, its evaluation, and several steps."""
    program = job.plain(precision)
    optimizer = job.optimizer
    scaling = LossScale(job.config_in(precision).fp16, job.loss_scale(precision) or 1.0)
    values: dict[str, Any] = {}
    sizes: dict[str, Any] = {}
    evaluated = program.evaluate(start, job.batch_in(precision, 0), shake)
    values["evaluation/loss"] = evaluated.loss
    values |= {f"outputs/{i}": x for i, x in enumerate(_leaves(evaluated.outputs))}
    opt_state = optimizer.init(start.params)
    at = start
    history = [start.params]
    for step, scale in enumerate(job.scales(precision)):
        scaling.scale = scale or scaling.scale
        batch = job.batch_in(precision, step)
        found = program.gradients(at, batch, step, shake, scaling.scale)
        if step == 0:
            values["loss"] = found.loss
            values |= named("gradient", optimizer.trained(found.grads))
            values |= _reports(precision, found.reports)
            sizes |= named("gradient", optimizer.trained(found.sizes))
        if job.loss_scale(precision):
            scaling.count(overflow=not found.is_finite)
            values[f"{_EXACT}/after step {step}"] = np.float64(scaling.scale)
            # Parameters, optimiser, collections and the average stand still at an overflow.
            if not found.is_finite:
                continue
        params, opt_state = optimizer.update(at.params, opt_state, found.grads)
        at = Start(params, found.collections)
        history.append(params)
    values |= _updates("update", at.params, start.params) | named("collection", at.collections)
    stored = _stored("update", at.params)
    if job.config.ema is not None:
        average = _updates("average", optimizer.average(history), start.params)
        values |= average
        # The share of an update is a float32.
        for name, x in _stored("average", optimizer.trained(at.params)).items():
            stored[name] = x + FLOAT32 * norm(average[name])
    return Results(values, sizes, stored)


def _stored(kind: str, params: PyTree) -> dict[str, float]:
    """Return how far storing moves each parameter that has been trained."""
    return {
        name: norm(x) * float(jnp.finfo(x.dtype).eps)
        for name, x in named(kind, params).items()
        if jnp.issubdtype(x.dtype, jnp.inexact)
    }


def _updates(kind: str, params: PyTree, before: PyTree) -> dict[str, Any]:
    """Return how far steps have moved each parameter, or its average."""
    old = named(kind, before)
    return {name: wide(x) - wide(old[name]) for name, x in named(kind, params).items()}


def _reports(precision: Precision, reports: Mapping[str, Any]) -> dict[str, Any]:
    """Name what layers and the loss report. Reports are compared in float64 alone."""
    # Rounding to 16 bits makes ties, between which counts such as an accuracy decide at random.
    if not precision.is_double:
        return {}
    return {f"report/{name}": np.float64(x) for name, x in reports.items()}


def run_pipeline(job: Job, precision: Precision) -> dict[str, Any]:
    """Run the pipeline on the same batches."""
    pipeline = job.pipeline(precision)
    start = job.start(precision)
    values: dict[str, Any] = {}
    state = pipeline.states.init_from(start.params, start.collections)
    metrics, outputs = jax.device_get(
        pipeline.programs.evaluate_and_predict(state, job.batch_in(precision, 0))
    )
    values["evaluation/loss"] = metrics["loss"]
    each = [jax.tree.map(lambda x, m=m: x[m], outputs) for m in range(job.num_microbatches)]
    values |= {f"outputs/{i}": x for i, x in enumerate(_leaves(each))}
    metrics, grads, _ = pipeline.gradients(state, job.batch_in(precision, 0))
    values |= named("gradient", pipeline.params_tree(grads))
    values |= _reports(precision, _named_reports(pipeline, jax.device_get(metrics)))
    return values | run_steps(job, precision)


def _named_reports(pipeline: Pipeline, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reports of a pipeline by the names of the plain program's."""
    of_loss = set(pipeline.programs.objective.metric_names)
    found = {f"losses/{name}": x for name, x in metrics.get("losses", {}).items()}
    for name, x in metrics.get("metrics", {}).items():
        found[f"{'loss_fn' if name in of_loss else 'metrics'}/{name}"] = x
    return found


def run_steps(job: Job, precision: Precision) -> dict[str, Any]:
    """Train for a few steps; returns the first loss, and how parameters and others have moved."""
    pipeline = job.pipeline(precision)
    start = job.start(precision)
    state = pipeline.states.init_from(start.params, start.collections)
    values: dict[str, Any] = {}
    for step, scale in enumerate(job.scales(precision)):
        state = _with_scale(state, scale)
        state, metrics = pipeline.step(state, pipeline.batches.place(job.batch_in(precision, step)))
        values.setdefault("loss", jax.device_get(metrics["loss"]))
        if job.loss_scale(precision):
            values[f"{_EXACT}/after step {step}"] = jax.device_get(state.loss_scale.scale)
    values |= _updates("update", pipeline.params_tree(state.params), start.params)
    if job.config.ema is not None:
        average = pipeline.params_tree(pipeline.states.with_params(state, "ema").params)
        values |= _updates("average", job.optimizer.trained(average), start.params)
    return values | named("collection", pipeline.states.collections_tree(state.collections))


def _with_scale(state: TrainState, scale: float | None) -> TrainState:
    """Set the loss scale of a state, if one is given."""
    if scale is None:
        return state
    old: Any = state.loss_scale
    new = jax.device_put(np.float32(scale), old.scale.sharding)
    return dataclasses.replace(state, loss_scale=dataclasses.replace(old, scale=new))


def _leaves(outputs: list[Any]) -> list[Any]:
    # The plain program joins the outputs of replicas to arrays, also where they are scalars.
    return [np.atleast_1d(x) for each in outputs for x in jax.tree.leaves(each)]


def shakes_of(job: Job, pipeline: Pipeline) -> list[Shake]:
    """Roundings that move a result by `sqrt(operations)` less than what is to be explained."""
    arithmetic = arithmetic_in(pipeline)
    # A sum of `n` terms is moved by `sqrt(n)` roundings, whatever layers compute. `bounds`
    # multiplies by `sqrt(operations)`.
    of_sums = math.sqrt(job.num_terms / arithmetic.operations)
    # A move by one unit in the last place: twice the unit roundoff.
    return [Shake(seed, of_sums, 2 * arithmetic.unit) for seed in _SEEDS]


def arithmetic_in(pipeline: Pipeline) -> Arithmetic:
    """Read the arithmetic of the layers, and of a loss that rounds to less than float32."""
    outputs = pipeline.trace.boundaries[-1]
    labels = pipeline.batches.microbatch.labels
    loss = jax.make_jaxpr(lambda y, t: pipeline.module.loss_terms(y, t).total)(outputs, labels)
    programs = [*pipeline.trace.programs]
    if arithmetic_of([loss]).unit > FLOAT32:
        programs.append(loss)
    return arithmetic_of(programs)
