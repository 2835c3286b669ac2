"""`prove`: check a job's pipeline against its plain program, on simulated devices."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import optax

from jaxpipe._typing import PyTree
from jaxpipe.config import load_config
from jaxpipe.errors import JaxpipeError
from jaxpipe.layers import PipelineModule
from jaxpipe.pipeline import ConfigLike

from ._determinism import determinism_findings
from ._job import DOUBLE, OWN, Job, Precision
from ._layers import layer_faults
from ._locate import Located, locate
from ._narrow import narrowed
from ._numbers import Difference, compare, compare_ragged, nan_stays
from ._proof import Claim, Finding, Proof
from ._schedule import SymbolicRun, require_in_flight
from ._state import state_findings

_MOST_FINDINGS = 5


def prove(
    model: PipelineModule,
    config: ConfigLike,
    example_batch: Sequence[PyTree],
    *,
    optimizer: optax.GradientTransformation | None = None,
    places: Mapping[str, int] | None = None,
    quick: bool = False,
    as_is: bool = False,
) -> Proof:
    """Prove that a job's pipeline computes what its layers compute one after another."""
    if not as_is:
        chunks = load_config(config).pipeline.num_chunks
        narrow = narrowed(model, example_batch, chunks if isinstance(chunks, int) else 2)
        model, example_batch = narrow.model, narrow.example
    job = Job(model, config, example_batch, optimizer, places or {})
    claims = [
        _claim("layers", "Layers and loss are what a pipeline needs.", lambda: _layers(job)),
        _claim(
            "schedule",
            "Each value is written once, read after it is written, and received where it is sent.",
            lambda: _schedule(job),
        ),
    ]
    claims.append(
        _claim(
            "ragged",
            "Gradients are weighted means where microbatches have different weights.",
            lambda: _ragged(job),
        )
    )
    claims.append(
        _claim(
            "not a number",
            "A NaN in one sample shows only where the plain program has it.",
            lambda: _not_a_number(job),
        )
    )
    for precision in (DOUBLE,) if quick else (DOUBLE, OWN):
        claims.append(
            _claim(
                f"numbers, {precision.name}",
                "Loss, gradients, updates, outputs and collections are those of the plain program.",
                lambda precision=precision: _numbers(job, precision),
            )
        )
    claims.append(
        _claim(
            "determinism",
            "Two runs give the same bits, and another seed gives others.",
            lambda: determinism_findings(job),
        )
    )
    if not quick:
        claims.append(
            _claim(
                "state",
                "A checkpoint opens with other numbers of stages, and training goes on.",
                lambda: state_findings(job),
            )
        )
    return Proof(tuple(claims), {"model": repr(job.module), "axes": dict(job.mesh.shape)})


def _claim(name: str, statement: str, check: Callable[[], Iterator[Any]]) -> Claim:
    begun, findings, figures, not_covered = time.monotonic(), [], {}, None
    try:
        for found in check():
            if isinstance(found, Finding):
                findings.append(found)
            else:
                figures |= found
    except JaxpipeError as error:
        findings.append(Finding(name, str(error)))
    return Claim(
        name,
        statement,
        tuple(findings[:_MOST_FINDINGS]),
        figures,
        not_covered,
        time.monotonic() - begun,
    )


def _layers(job: Job) -> Iterator[Any]:
    for fault in layer_faults(job, DOUBLE):
        yield Finding(fault.where, f"{fault.what}. {fault.repair}.")


def _schedule(job: Job) -> Iterator[Any]:
    with jax.enable_x64(True):
        program = job.pipeline(DOUBLE).program
    SymbolicRun(program).run()
    require_in_flight(program)
    yield {"ticks": program.num_ticks, "in flight": program.peak_in_flight}


def _numbers(job: Job, precision: Precision) -> Iterator[Any]:
    differences = compare(job, precision)
    wrong = [each for each in differences if not each.holds]
    worst = max(differences, key=lambda each: each.difference / max(each.bound, 1e-300))
    yield {"results": len(differences), "worst": worst.name, "bound": worst.bound}
    if not wrong:
        return
    located = locate(job, precision, wrong)
    for each in wrong[:_MOST_FINDINGS]:
        yield Finding(located.where(each.name), _sentence(each, located))


def _ragged(job: Job) -> Iterator[Any]:
    differences = compare_ragged(job, DOUBLE)
    yield {"results": len(differences)}
    for each in differences:
        if not each.holds:
            yield Finding(each.name, _figures(each))


def _not_a_number(job: Job) -> Iterator[Any]:
    for where in nan_stays(job):
        yield Finding(where, "a NaN of another sample shows here, or its own does not.")


def _figures(each: Difference) -> str:
    return (
        f"{each.name} differs by {each.difference:.3g}, and rounding explains {each.bound:.3g} "
        f"of its {each.size:.3g}"
    )


def _sentence(each: Difference, located: Located) -> str:
    at = "" if located.microbatch is None else f", first for microbatch {located.microbatch}"
    return f"{_figures(each)}{at}{located.tick_text}"
