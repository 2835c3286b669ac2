"""Decide whether to split a model's embedding, head and loss over the stages."""

from dataclasses import dataclass

import optax

from ._calibrate import limit_of, reference_hardware
from ._candidate import Job
from ._choose import Asked, candidates, ranked
from ._traced import Traced


@dataclass(frozen=True)
class SplitChoice:
    """Whether a step is shorter with the vocabulary split over the stages.

    Attributes:
        pays: Whether the step is clearly shorter.
        step_share: Time of the step with the split, divided by the time without it.
    """

    pays: bool
    step_share: float


def choose_split(
    whole: Traced, split: Traced, num_microbatches: int, optimizer: optax.GradientTransformation
) -> SplitChoice:
    """Compare a model with and without the split, by the candidates of `"auto"` and `plan`.

    Layers are counted for the mesh's devices by name, or for a default accelerator, so that the
    decision is the same on every machine. Raises JaxpipeError if one of the two is not possible
    with the requested settings.
    """
    section = whole.config.pipeline
    found = []
    for traced in (whole, split):
        mesh = traced.mesh
        config = whole.config
        job = Job(
            traced.module,
            traced.trace,
            mesh,
            traced.counted,
            num_microbatches,
            config,
            optimizer,
            reference_hardware(mesh),
            limit_of(section, mesh),
        )
        found.append(ranked(candidates(job, Asked.of(section)))[0])
    return SplitChoice(ranked(found)[0] is found[1], found[1].step_s / found[0].step_s)
