"""A small copy of a job: the same layers, ties and masks, of a size that two cores can run.

Of each run of equal layers as many are kept as there are virtual stages, two for each if equal
layers of a stage run as one scan, and so many that a checkpoint opens with two other numbers of
stages. Families of `jaxpipe.models` also get small sizes. Other layers keep theirs.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxpipe._util.typing import PyTree
from jaxpipe.config import PipelineConfig
from jaxpipe.data import Batch, split_entry
from jaxpipe.errors import ConfigError
from jaxpipe.layers import PipelineModule
from jaxpipe.schedules import resolve_schedule

from ._family import small_family
from ._wide import first_line

_FEW_PARAMETERS = 300_000
_MOST_PARAMETERS = 20_000_000
"""In float64, with an optimiser's state, on a dozen simulated devices, they take some GB."""


class Narrow(NamedTuple):
    """A small copy: its model, and one entry."""

    model: PipelineModule
    example: Sequence[PyTree]
    num_parameters: int = 0
    # Whether its sizes are others than those of the job.
    has_small_sizes: bool = False
    # Why it is not smaller. Empty if it is as small as it can be.
    why: str = ""

    @property
    def is_small(self) -> bool:
        """Whether its programs take longer to compile than to run."""
        return 0 < self.num_parameters <= _FEW_PARAMETERS


def narrowed(model: PipelineModule, example: Sequence[PyTree], pipeline: PipelineConfig) -> Narrow:
    """Shorten a job's runs of equal layers, and make the sizes of a family small.

    Raises ConfigError if the copy still has too many parameters.
    """
    # Boundaries that the user lists, in the model or in the configuration, count all layers.
    is_listed = not all(isinstance(x, str) for x in (model.partition_method, pipeline.partition))
    depth = math.inf if is_listed else _depth(model.num_stages, pipeline)
    entry = split_entry(example, "the example batch")
    try:
        found = _shortest(model, entry, depth)
    except Exception as error:  # noqa: BLE001  # the user's layers may raise anything
        # It cannot be traced at its own sizes. Whoever builds its pipeline says what is wrong.
        return Narrow(model, example, why=first_line(error))
    if found.num_parameters > _FEW_PARAMETERS:
        try:
            small = small_family(model, entry)
            if small is not None:
                found = _shortest(*small, depth)._replace(has_small_sizes=True)
        except Exception as error:  # noqa: BLE001  # so may their loss at other sizes
            found = found._replace(why=first_line(error))
    if found.num_parameters > _MOST_PARAMETERS:
        why = f" ({found.why})" if found.why else ""
        raise ConfigError(
            f"a proof must run a model of at most {_MOST_PARAMETERS:,} parameters, but got "
            f"{found.num_parameters:,} in {len(found.model.layers)} of {len(model.layers)} "
            f"layers{why}. Name a job of the same layers at small sizes, or pass as_is=True "
            "(--as-is)."
        )
    return found


def _shortest(model: PipelineModule, entry: Batch, depth: float) -> Narrow:
    """Shorten runs of equal layers, unless the layers cannot be traced without some of them."""
    try:
        return _counted(_shallow(model, depth), entry)
    # For example because `trainable` names a layer that is gone.
    except Exception as error:  # noqa: BLE001
        return _counted(model, entry)._replace(why=first_line(error))


def _counted(model: PipelineModule, entry: Batch) -> Narrow:
    """Trace a model and count its parameters."""
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape[1:]), x.dtype), entry)
    trace = model.trace(one.inputs, one.side)
    jax.eval_shape(model.loss_terms, trace.boundaries[-1], one.labels)
    return Narrow(model, entry, sum(x.size for x in jax.tree.leaves(trace.tree())))


def _depth(num_stages: int, pipeline: PipelineConfig) -> int:
    """Return how many equal layers in a row a proof needs."""
    chunks = 2
    if isinstance(pipeline.num_chunks, int):
        chunks = pipeline.num_chunks
    elif pipeline.schedule != "auto":
        kind = resolve_schedule(pipeline.schedule)
        chunks = kind.num_chunks if kind.min_chunks is None else 2
    parts = num_stages * chunks
    # A scan runs equal layers of a stage, so that one for each would leave nothing to scan.
    if pipeline.scan_trunk:
        return 2 * parts
    # A checkpoint must open with two other numbers of stages: smaller ones, or twice as many.
    needs_twice = not fewer_stages(num_stages)[1:]
    return max(parts, 2 * num_stages if needs_twice else num_stages + 1)


def fewer_stages(num_stages: int) -> list[int]:
    """Return the smaller numbers of stages that a checkpoint is opened with: one, and half."""
    halves = [num_stages // 2] if num_stages > 2 and num_stages % 2 == 0 else []
    return [1, *halves] if num_stages > 1 else []


def _shallow(model: PipelineModule, num_parts: float) -> PipelineModule:
    """Shorten runs of equal layers."""
    kept: list[Any] = []
    run = 0
    for i, named in enumerate(model.layers):
        is_same = i > 0 and _is_same(named, model.layers[i - 1])
        run = run + 1 if is_same else 1
        if run <= num_parts:
            kept.append(named.item)
    if len(kept) == len(model.layers):
        return model
    return model.with_layers(kept)


def _is_same(named: Any, other: Any) -> bool:
    return named.tied_key is None and named.layer.identity == other.layer.identity
