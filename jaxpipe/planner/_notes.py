"""Costs of a cut as sentences, for the log and for the printed pipeline."""

import logging
from collections.abc import Sequence
from itertools import pairwise

from jaxpipe.distributed import log
from jaxpipe.layers import ModelTrace, PipelineModule
from jaxpipe.partition import (
    Profile,
    cut_stages,
    is_method,
    partition_balanced,
    partition_best,
    tick_of,
)

_WORTH_SAYING = 0.1
"""The layers after the trunk are mentioned if they take at least this share of a tick."""


def notes_on_cut(
    module: PipelineModule,
    trace: ModelTrace,
    profile: Profile,
    parts: Sequence[int],
    split_note: str,
) -> tuple[str, ...]:
    """Compare a cut with another one, and describe the time of the last layers and the loss.

    The sentences are logged too. `split_note` explains why the vocabulary is split or not.
    """
    if not tick_of(profile, parts).seconds:
        return ()
    notes = (
        _on_alternative(module, trace, profile, parts),
        *_on_loss(module, profile, parts, split_note),
    )
    log(logging.INFO, "%s", "; ".join(notes))
    _warn_of_small_trunk(module, trace, profile, parts)
    return notes


def _on_alternative(
    module: PipelineModule, trace: ModelTrace, profile: Profile, parts: Sequence[int]
) -> str:
    method = module.partition_method
    num_parts = len(parts) - 1
    tick = tick_of(profile, parts)
    cut = f"partition_method={method!r} cuts at {list(parts)}"
    other_method = "best"
    other = partition_best(profile, num_parts)
    if is_method(method, "best"):
        other_method = "parameters"
        other = partition_balanced(trace.num_own_params(), num_parts)
    if other == list(parts):
        return f"{cut}, as {other_method!r} would"
    ratio = tick_of(profile, other).seconds / tick.seconds
    choice = f"{cut}; {other_method!r} would at {other}"
    return f"{choice}, for a tick {ratio:.2f} times as long by operations and bytes"


def _on_loss(
    module: PipelineModule, profile: Profile, parts: Sequence[int], split_note: str
) -> list[str]:
    if profile.layers[-1].is_stage_sharded:
        return [split_note] if split_note else []
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
        else f"{', '.join(module.layers[i].name for i in epilogue)} and the loss"
    )
    found = f"{what} take {share:.2f} of a tick on the last stage, for which all others wait"
    if split_note:
        return [found, split_note]
    less = share / module.num_stages
    more = f"split over the stages (pipeline.split_vocabulary) they would take {less:.2f}"
    return [f"{found}; {more}"]


def _warn_of_small_trunk(
    module: PipelineModule, trace: ModelTrace, profile: Profile, parts: Sequence[int]
) -> None:
    if not is_method(module.partition_method, "parameters"):
        return
    num_params = trace.num_own_params()
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
