"""`prove`: check a job's pipeline against its plain program, on simulated devices."""

import contextlib
import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jaxpipe._util.mesh import off_mesh
from jaxpipe._util.typing import PyTree
from jaxpipe.config import load_config
from jaxpipe.core.pipeline import ConfigLike
from jaxpipe.core.planner import Hardware, read_hardware
from jaxpipe.errors import ConfigError
from jaxpipe.layers import PipelineModule
from jaxpipe.tools.plan import plan, read_job

from ._bound import Difference
from ._claims import NotCovered, judged, run_claims
from ._dataset import dataset_findings
from ._determinism import determinism_findings
from ._job import OWN, Job, Precision, check_example, on_simulated
from ._layers import Fault, layer_findings
from ._locate import Located, locate
from ._narrow import narrowed
from ._numbers import (
    Wanted,
    compare,
    compare_ragged,
    layers_below_double,
    nan_stays,
    wanted_of,
)
from ._optimizing import optimizing
from ._processes import process_findings
from ._program import program_findings
from ._proof import Claim, Finding, Proof, versions
from ._schedule import SymbolicRun, require_in_flight
from ._state import state_findings
from ._trained import first_step


def prove(  # noqa: PLR0913  # one argument for each choice
    model: PipelineModule,
    config: ConfigLike,
    example_batch: Sequence[PyTree],
    *,
    optimizer: optax.GradientTransformation | None = None,
    axes: Mapping[str, int] | None = None,
    hardware: str | tuple[Hardware, int] | None = None,
    quick: bool = False,
    as_is: bool = False,
    only: Sequence[str] | None = None,
) -> Proof:
    """Prove that a job's pipeline computes what its layers compute one after another.

    The proof runs on simulated devices: the job's stages, two replicas, and the axes of `axes`.
    A plain program runs the same microbatches one after another on one device, without any code of
    the pipeline. Results may differ by what rounding explains: the bound of each result is derived
    from the number of rounded operations, the dtype and the result's measured sensitivity to
    roundings. In float64, that is about 1e-13 of a gradient.

    Args:
        model: The layers and their number of stages.
        config: DeepSpeed's configuration, as for `initialize`. The number of microbatches becomes
            odd, at most one above twice the number of stages.
        example_batch: One entry of the data iterator, `(inputs, labels)` or `(inputs, labels,
            side)`, as arrays or shapes with leaves `[samples, ...]`. The proof draws its samples
            from the values.
        optimizer: An optax transformation. None: the optimiser of the configuration.
        axes: Lengths of additional axes of the mesh, such as `{"model": 2}`. By default, each
            further axis of the model's topology has the smallest length that divides its own.
        hardware: Name and number of devices, such as `"h200:8"`, as for `plan`. The step of the
            whole job is compiled for them, without a device. None: it is not compiled.
        quick: Whether to leave out the job's own dtypes, checkpoints, determinism and processes.
        as_is: Whether to prove the model at its own sizes. By default runs of equal layers are
            shortened, and a family of `jaxpipe.models` gets small sizes.
        only: Names of the claims to check. None: all of them.

    Returns:
        The claims, with findings that name the layer or leaf, the microbatch and the tick where the
        two programs first differ.

    Raises:
        ConfigError: The configuration is wrong, there is no optimiser, the model has too many
            parameters even if it is shortened, or a name in `only` is not that of a claim.
        TopologyError: There are too few simulated devices.
        JaxpipeError: Whatever building the pipeline raises.
    """
    return prove_named(
        model,
        config,
        example_batch,
        optimizer=optimizer,
        axes=axes,
        hardware=hardware,
        quick=quick,
        as_is=as_is,
        only=only,
    )


@off_mesh
def prove_named(  # noqa: PLR0913  # those of `prove`
    model: PipelineModule,
    config: ConfigLike,
    example_batch: Sequence[PyTree],
    *,
    hardware: str | tuple[Hardware, int] | None = None,
    quick: bool = False,
    as_is: bool = False,
    only: Sequence[str] | None = None,
    command: Sequence[str] | None = None,
    when_checked: Callable[[Claim], None] = lambda claim: None,
    **how: Any,
) -> Proof:
    """Prove a job.

    With the arguments `command`, another process makes the job; then this one does nothing else.
    """
    target = None if hardware is None else read_hardware(hardware)
    made = made_job(model, config, example_batch, as_is=as_is, **how)
    job = made.job
    job.pipeline(OWN)  # what cannot be built is no claim that does not hold

    def program() -> Iterator[Any]:
        if target is None:
            return iter([NotCovered("name the hardware, such as h200:8 (--hardware)")])
        # An example may have any number of samples. The plan takes one microbatch.
        one = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((job.microbatch_size, *x.shape[1:]), x.dtype),
            tuple(example_batch),
        )
        given = job.config, one, job.given_optimizer, how.get("axes"), target
        return program_findings(model, *given)

    checks = _checks(job, program, command)
    # Without float64, only the job's dtypes compare numbers.
    more = {"program": target is not None, "dtypes": not job.finest.is_double}
    names = _names(list(checks), only, quick=quick, more=more)
    left_out = [name for name in checks if name not in names]
    chosen = {name: checks[name] for name in checks if name in names}
    # The setting holds for all programs of a process, so only the command changes it.
    is_quick = command is not None and made.is_small
    with optimizing(fully=False) if is_quick else contextlib.nullcontext():
        claims = run_claims(chosen, when_checked)
    return Proof(
        claims,
        {
            "layers": ", ".join(named.name for named in job.module.layers),
            "axes": ", ".join(f"{name}={size}" for name, size in job.mesh.shape.items()),
            "schedule": job.config.pipeline.schedule,
            "microbatches": job.num_microbatches,
            **made.sizes,
            **({"example": _ONE_SAMPLE} if _has_one_sample(job) else {}),
            **({"not checked": ", ".join(left_out)} if left_out else {}),
            "SHA-256 of parameters and batch": _checksum(job),
            **versions(),
        },
    )


def _names(
    known: Sequence[str], only: Sequence[str] | None, *, quick: bool, more: Mapping[str, bool]
) -> Sequence[str]:
    """Return the claims to check; `more` are those that a quick proof has under a condition."""
    if only is None:
        return [name for name in known if not quick or name in _QUICK or more.get(name)]
    unknown = sorted(set(only) - set(known))
    if unknown or not only:
        raise ConfigError(
            f"only must name claims, which are {', '.join(known)}, but got {unknown or 'none'}. "
            "Leave it out for all of them."
        )
    return only


class Made(NamedTuple):
    """A job at the sizes of its proof."""

    job: Job
    # What the proof says of the sizes.
    sizes: dict[str, str]
    # Whether its programs take longer to compile than to run.
    is_small: bool


def made_job(
    model: PipelineModule,
    config: ConfigLike,
    example_batch: Sequence[PyTree],
    *,
    optimizer: optax.GradientTransformation | None = None,
    axes: Mapping[str, int] | None = None,
    as_is: bool = False,
) -> Made:
    """Make the small copy of a job that is proved."""
    config = load_config(config)
    check_example(example_batch)
    model = on_simulated(model, config, axes or {})
    if as_is:
        return Made(Job.of(model, config, example_batch, optimizer, axes or {}), {}, is_small=False)
    narrow = narrowed(model, example_batch, config.pipeline)
    sizes = "small sizes, " if narrow.has_small_sizes else ""
    why = f" ({narrow.why})" if narrow.why else ""
    text = f"{sizes}{len(narrow.model.layers)} of {len(model.layers)} layers{why}"
    job = Job.of(narrow.model, config, narrow.example, optimizer, axes or {})
    return Made(job, {"narrowed": text}, is_small=narrow.is_small)


def read_options(text: str) -> dict[str, Any]:
    """Return the arguments of `made_job` from the job that a command line names."""
    # A job may also name arguments of `plan`, which a proof does not need.
    known = inspect.signature(made_job).parameters
    return {name: value for name, value in read_job(text, plan).items() if name in known}


def _checksum(job: Job) -> str:
    """Return the SHA-256 of the initial parameters and the first batch."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves((job.start(OWN).params, tuple(job.batch(0)))):
        found.update(np.ascontiguousarray(leaf).tobytes())
    return found.hexdigest()


def _has_one_sample(job: Job) -> bool:
    """Whether all microbatches are drawn from the values of a single sample."""
    leaves = jax.tree.leaves(job.example)
    return not any(isinstance(x, jax.ShapeDtypeStruct) or len(x) > 1 for x in leaves)


_ONE_SAMPLE = "one sample, so that microbatches may have equal labels"

_QUICK = ("layers", "schedule", "numbers", "weights", "nan", "evaluate")


def _checks(
    job: Job, program: Callable[[], Iterator[Any]], command: Sequence[str] | None
) -> dict[str, tuple[str, Callable[[], Iterator[Any]]]]:
    """Return the claims by name: the statement, and a function that yields findings and figures."""
    # Several claims compare with the same results, or go on from the same step.
    wanted_in = functools.cache(lambda precision: wanted_of(job, precision))
    first = functools.cache(lambda: first_step(job))
    same = "Loss, gradients, updates, outputs and collections are those of the plain program"
    return {
        "layers": ("Layers and loss are what a pipeline needs.", lambda: _layers(job)),
        "schedule": (
            "Each value is written once, read after it is written, and received where it is sent.",
            lambda: _schedule(job),
        ),
        "numbers": (f"{same}, in float64.", lambda: _finest_numbers(job, wanted_in)),
        "weights": (
            "Gradients are weighted means where microbatches have different weights.",
            lambda: _ragged(job),
        ),
        "nan": (
            "A NaN in one sample shows only where the plain program has it.",
            lambda: nan_stays(job),
        ),
        "evaluate": (
            "The loss of a dataset is the mean over its samples, whatever their number.",
            lambda: dataset_findings(job),
        ),
        "dtypes": (f"{same}, in the job's dtypes.", lambda: _numbers(job, OWN, wanted_in(OWN))),
        "determinism": (
            "Two runs give the same bits, and another seed gives others.",
            lambda: determinism_findings(job, first().results),
        ),
        "state": (
            "A checkpoint opens with other numbers of stages, and training goes on.",
            lambda: state_findings(job, first().engine),
        ),
        "processes": (
            "Steps in several processes are those of the plain program.",
            lambda: process_findings(job, wanted_in, command),
        ),
        "program": (
            "Compiled for the hardware, the step fits, and all stages reach its collectives.",
            program,
        ),
    }


def _layers(job: Job) -> Iterator[Any]:
    for found in layer_findings(job, job.finest):
        is_fault = isinstance(found, Fault)
        yield Finding(found.where, f"{found.what}. {found.repair}.") if is_fault else found


def _schedule(job: Job) -> Iterator[Any]:
    with job.finest.enabled():
        program = job.pipeline(job.finest).plan.program
    SymbolicRun(program).run()
    require_in_flight(program)
    yield {"ticks": program.num_ticks, "in flight": program.peak_in_flight}


def _finest_numbers(job: Job, wanted_in: Callable[[Precision], Wanted]) -> Iterator[Any]:
    if not job.finest.is_double:
        yield NotCovered(f"layers do not compute in float64: {job.not_double}")
        return
    if names := layers_below_double(job):
        # Bounds are those of the narrowest dtype.
        yield {"narrower than float64": ", ".join(names)}
    yield from _numbers(job, job.finest, wanted_in(job.finest))


def _numbers(job: Job, precision: Precision, wanted: Wanted) -> Iterator[Any]:
    def findings(wrong: list[Difference]) -> Iterator[Finding]:
        located = locate(job, precision, wrong)
        for each in wrong:
            where = located.where(each.name)
            what = each.text if where == each.name else str(each)
            yield Finding(where, _sentence(what, located))

    # Half precision and an optimiser that divides small numbers allow much.
    return judged(
        compare(job, precision, wanted), findings, loose=0.1 if precision.is_double else 1.0
    )


def _ragged(job: Job) -> Iterator[Any]:
    return judged(compare_ragged(job, job.finest))


def _sentence(difference: str, located: Located) -> str:
    at = "" if located.microbatch is None else f", first for microbatch {located.microbatch}"
    return f"{difference}{at}{located.tick_text}"
