"""Costs of a cut as sentences, for the log and for the printed pipeline."""

import logging
from collections.abc import Sequence
from itertools import pairwise

from jaxpipe.distributed import log
from jaxpipe.schedules.partition import (
    Profile,
    cut_stages,
    is_method,
    partition_balanced,
    partition_best,
    tick_of,
)

from ._job import Job

_WORTH_SAYING = 0.1
"""The layers after the trunk are mentioned if they take at least this share of a tick."""


def notes_on_cut(job: Job, profile: Profile, parts: Sequence[int]) -> tuple[str, ...]:
    """Compare a cut with another one, and describe the time of the last layers and the loss.

    The sentences are logged too.
    """
    if not tick_of(profile, parts).seconds:
        return ()
    notes = (_on_alternative(job, profile, parts), *_on_loss(job, profile, parts))
    log(logging.INFO, "%s", "; ".join(notes))
    _warn_of_small_trunk(job, profile, parts)
    return notes


def _on_alternative(job: Job, profile: Profile, parts: Sequence[int]) -> str:
    method = job.module.partition_method
    num_parts = len(parts) - 1
    tick = tick_of(profile, parts)
    cut = f"partition_method={method!r} cuts at {list(parts)}"
    other_method = "best"
    other = partition_best(profile, num_parts)
    if is_method(method, "best"):
        other_method = "parameters"
        other = partition_balanced(job.trace.num_own_params(), num_parts)
    if other == list(parts):
        return f"{cut}, as {other_method!r} would"
    ratio = tick_of(profile, other).seconds / tick.seconds
    choice = f"{cut}; {other_method!r} would at {other}"
    return f"{choice}, for a tick {ratio:.2f} times as long by operations and bytes"


def _on_loss(job: Job, profile: Profile, parts: Sequence[int]) -> list[str]:
    reasons = [job.split_note] if job.split_note else []
    if profile.layers[-1].is_stage_sharded:
        return reasons
    seconds = profile.seconds()
    epilogue = cut_stages(profile.signatures, parts)[-1].epilogue
    slowest = tick_of(profile, parts).slowest_s
    share = sum(seconds[i] for i in epilogue) / slowest
    is_slowest = sum(seconds[parts[-2] :]) >= slowest
    if share < _WORTH_SAYING or not is_slowest:
        return []
    what = (
        "the loss"
        if not epilogue
        else f"{', '.join(job.module.layers[i].name for i in epilogue)} and the loss"
    )
    found = f"{what} take {share:.2f} of a tick on the last stage, for which all others wait"
    if reasons:
        return [found, *reasons]
    less = share / job.module.num_stages
    more = f"split over the stages (pipeline.split_vocabulary) they would take {less:.2f}"
    return [f"{found}; {more}"]


def _warn_of_small_trunk(job: Job, profile: Profile, parts: Sequence[int]) -> None:
    if not is_method(job.module.partition_method, "parameters"):
        return
    num_params = job.trace.num_own_params()
    cuts = cut_stages(profile.signatures, parts)
    sizes = [sum(num_params[a:b]) for a, b in pairwise(parts)]
    largest = sizes.index(max(sizes))
    trunk = sum(num_params[i] for i in cuts[largest].trunk)
    best = partition_best(profile, len(sizes))
    ratio = tick_of(profile, parts).seconds / tick_of(profile, best).seconds
    if 2 * trunk < sizes[largest] and ratio > 1:
        log(
            logging.WARNING,
            "partition_method='parameters' leaves %d of the %d parameters of its largest part in "
            "the trunk; the others run behind a switch, and all stages add up their gradients: "
            "partition_method='best' cuts at %s, for a tick %.2f times as short",
            trunk,
            sizes[largest],
            best,
            ratio,
        )
