"""Decide whether to split a model's embedding, head and loss over the stages."""

from dataclasses import dataclass

import optax

from ._calibrate import limit_of, reference_hardware
from ._candidate import Job
from ._choose import Asked, candidates, ranked
from ._forecast import Forecast, gigabytes
from ._traced import Traced


@dataclass(frozen=True)
class SplitChoice:
    """Whether to split the vocabulary over the stages, and what decided: time or memory."""

    pays: bool
    reason: str


def choose_split(
    whole: Traced, split: Traced, num_microbatches: int, optimizer: optax.GradientTransformation
) -> SplitChoice:
    """Compare a model with and without the split, by the candidates of `"auto"` and `plan`."""
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
            reference_hardware(mesh),  # so that the decision is the same on every machine
            limit_of(section, mesh),
        )
        found.append(ranked(candidates(job, Asked.of(section)))[0])
    return SplitChoice(ranked(found)[0] is found[1], _reason(*found))


def _reason(whole: Forecast, split: Forecast) -> str:
    if whole.fits and split.fits:
        share = split.step_s / whole.step_s
        return (
            f"a step would take {share:.2f} times as long as with all of them whole, by "
            "operations and bytes"
        )
    fits = {True: "fits", False: "does not fit"}
    sizes = [f"{gigabytes(one.memory.total)} GB, which {fits[one.fits]}" for one in (split, whole)]
    return f"a device would need {sizes[0]}, and with all of them whole {sizes[1]}"
