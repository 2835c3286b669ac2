"""Decide whether to split a model's embedding, head and loss over the stages."""

import dataclasses
from dataclasses import dataclass

from ._calibrate import limit_of
from ._choose import SearchSpace, candidates, ranked
from ._forecast import Forecast, gigabytes
from ._job import Job


@dataclass(frozen=True)
class SplitChoice:
    """Whether to split the vocabulary over the stages, and what decided: time or memory."""

    pays: bool
    reason: str


def choose_split(whole: Job, split: Job) -> SplitChoice:
    """Compare a model with and without the split, by the candidates of `"auto"` and `plan`."""
    section = whole.config.pipeline
    found = []
    for job in (whole, split):
        limited = dataclasses.replace(
            job, config=whole.config, limit_bytes=limit_of(section, job.mesh)
        )
        found.append(ranked(candidates(limited, SearchSpace.of(section)))[0])
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
