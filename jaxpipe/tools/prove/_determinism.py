"""The same bits twice, and others with another seed."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxpipe.core.pipeline import Pipeline

from ._job import OWN, Job, named
from ._proof import Finding


def determinism_findings(job: Job, second: Mapping[str, Any]) -> Iterator[Any]:
    """Run a step in a pipeline, and one with another seed.

    `second` are the results of an engine's first step, by name.
    """
    pipeline = job.pipeline(OWN)
    seed = job.module.base_seed
    first = _step(job, pipeline, seed)
    # The engine compiles its own pipeline, so that compilation is part of what is repeated.
    for name, value in first.items():
        if not np.array_equal(value, second[name], equal_nan=True):
            yield Finding(name, "two runs of the same step give different bits.")
            break
    other = _step(job, pipeline, seed + 1)
    if all(np.array_equal(value, other[name]) for name, value in first.items()):
        if _depends_on_the_seed(job):
            yield Finding("base_seed", "another seed gives the same parameters and the same step.")
        else:
            yield {"another seed": "gives the same, because no parameter depends on the seed"}


def _depends_on_the_seed(job: Job) -> bool:
    """Whether the plain model has other parameters with another seed."""
    one = jax.tree.map(lambda x: x[0], job.batch_in(OWN, 0))
    seed = job.module.base_seed
    first, other = (
        jax.tree.leaves(job.module.init(jax.random.key(n), one.inputs, side=one.side))
        for n in (seed, seed + 1)
    )
    return not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def _step(job: Job, pipeline: Pipeline, seed: int) -> dict[str, Any]:
    state = pipeline.init(jax.random.key(seed))
    state, metrics = pipeline.step(state, pipeline.batches.place(job.batch_in(OWN, 0)))
    params = named("params", pipeline.params_tree(state.params))
    return {"loss": np.asarray(jax.device_get(metrics["loss"])), **params}
