"""The engine's `evaluate` of a dataset, against the plain program."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxpipe.data import Batch
from jaxpipe.errors import PipelineError

from ._bound import bounds, differences_of
from ._claims import judged
from ._job import Job
from ._numbers import arithmetic_in, shakes_of
from ._plain import cut_samples
from ._proof import Finding
from ._trained import entries, made_engine


def dataset_findings(job: Job) -> Iterator[Any]:
    """Evaluate a dataset of two groups, of which the second ends in an entry that is not full."""
    precision = job.finest
    size = job.num_samples // job.num_replicas
    whole = job.num_samples - size
    with precision.enabled():
        start = job.start(precision)
        batches = [job.batch_in(precision, seed) for seed in (0, 1)]
        batch = jax.tree.map(lambda *xs: np.concatenate([xs[0], xs[1][:2]]), *batches)
        engine = made_engine(job, job.module.num_stages, precision, start.params)
        full = [job.num_samples] * (job.num_microbatches + 1)
        # The dataset ends inside the samples of the last replica, which has some and lacks others.
        counts = [*full, whole + size // 2]
        try:
            found = engine.evaluate(_dataset(batch, counts))
        except PipelineError:
            # The loss is not one of single samples. That of a replica's samples is.
            yield {"samples": "all of a replica's"}
            # Then the last replica has none.
            counts = [*full, whole]
            found = engine.evaluate(_dataset(batch, counts))
        if found["num_samples"] != sum(counts):
            text = f"counts {found['num_samples']} samples of {sum(counts)}."
            yield Finding("evaluate", text)
        program = job.plain(precision)
        pipeline = job.pipeline(precision)
        wanted, *moved = (
            {"evaluate": program.evaluate(start, batch, shake, counts).loss}
            for shake in (None, *shakes_of(job, pipeline))
        )
        limits = bounds(wanted, moved, arithmetic_in(pipeline), len(counts))
        yield from judged(differences_of(wanted, {"evaluate": found["loss"]}, limits))


def _dataset(batch: Batch, counts: list[int]) -> list[tuple[Any, ...]]:
    """Return the first samples of each microbatch, of which `counts` has numbers, if any."""
    return [
        cut_samples(entry, len(jax.tree.leaves(entry)[0]), slice(count))
        for entry, count in zip(entries(batch), counts, strict=True)
        if count
    ]
