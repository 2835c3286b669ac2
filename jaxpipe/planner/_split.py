"""Whether to split a model's embedding, head and loss over the stages."""

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
        pays: True if it is, clearly.
        step_share: Length of the split step by that of the whole one.
    """

    pays: bool
    step_share: float


def choose_split(
    whole: Traced, split: Traced, num_microbatches: int, optimizer: optax.GradientTransformation
) -> SplitChoice:
    """Compare a model with itself split, by the candidates that `"auto"` and `plan` choose from.

    Layers are counted for the mesh's devices by name, or an accelerator, so that a model is split
    alike on every machine. Raises JaxpipeError where one of the two cannot be had as asked.
    """
    section = whole.config.pipeline
    found = []
    for traced in (whole, split):
        mesh, config = traced.mesh, whole.config
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
