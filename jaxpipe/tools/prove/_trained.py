"""The job in an engine, as a user trains it."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpipe._util.typing import PyTree
from jaxpipe.data import Batch
from jaxpipe.distributed.topology import make_pipeline_mesh
from jaxpipe.engine import PipelineEngine, initialize

from ._job import OWN, Job, Precision, axes_of, made_topology, named


class FirstStep(NamedTuple):
    """An engine that has trained on the first batch."""

    # One claim may train it on.
    engine: PipelineEngine
    # The loss, and the parameters after the step, by name.
    results: dict[str, Any]


def first_step(job: Job) -> FirstStep:
    """Train an engine with the job's stages on the first batch."""
    engine = made_engine(job, job.module.num_stages, OWN)
    loss = np.asarray(jax.device_get(engine.train_batch(entries(job.batch_in(OWN, 0)))))
    params = named("params", engine.module_state_dict())
    return FirstStep(engine, {"loss": loss, **params})


def made_engine(
    job: Job, stages: int, precision: Precision, params: PyTree | None = None
) -> PipelineEngine:
    """Make an engine of the job with this number of stages, and these parameters if given."""
    axes = axes_of(job.topology)
    topology = made_topology(stages, axes["data"], axes)
    module = job.module_in(precision)
    config = dataclasses.replace(
        job.config_in(precision),
        train_batch_size=None,
        train_micro_batch_size_per_gpu=job.microbatch_size,
        gradient_accumulation_steps=job.num_microbatches,
    )
    if stages == module.num_stages:
        config = dataclasses.replace(config, pipeline=job.pipeline(precision).plan.config.pipeline)
    else:
        module = module.replace(topology=topology, partition_method="parameters")
        # Boundaries and a number of stages in the configuration are those of the job.
        pipeline = dataclasses.replace(config.pipeline, stages="auto", partition="best")
        config = dataclasses.replace(config, pipeline=pipeline)
    number = job.mesh.size // job.module.num_stages * stages
    engine, *_ = initialize(
        model=module,
        optimizer=job.given_optimizer,
        model_parameters=params,
        config=config,
        mesh=make_pipeline_mesh(topology, jax.devices()[:number]),
        reporter=None,
    )
    return engine


def entries(batch: Batch) -> Iterator[tuple[Any, ...]]:
    """Return the entries of a batch, one for each microbatch."""
    number = jax.tree.leaves(batch)[0].shape[0]
    for m in range(number):
        yield tuple(jax.tree.map(lambda x, m=m: x[m], part) for part in batch)
