"""From a checkpoint to the state of a pipeline, whatever stages, replicas and places either has."""

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpipe._stores import StorePath
from jaxpipe._typing import PyTree
from jaxpipe.distributed import run_on_all
from jaxpipe.errors import CheckpointError, shown
from jaxpipe.layers import join_path, split_path, unflatten_dict
from jaxpipe.pipeline import Pipeline
from jaxpipe.state import HostRows, Leaf, Source, TrainState, read_leaf, state_arrays, with_arrays

from ._compare import Comparison, compare
from ._describe import load_scalars
from ._open import Checkpoint, open_checkpoint, reread
from ._store import read_arrays

_OPTIMIZER = "opt_state/"
_AVERAGE, _AVERAGED = "opt_state/params_ema/", "opt_state/ema_updates"
_PARAMS = "params/"


def load_state(
    checkpoint: Checkpoint,
    pipeline: Pipeline,
    state: TrainState | None,
    *,
    strict: bool = True,
    optimizer: bool = True,
    lr_scheduler: bool = True,
    counters: bool = True,
    when_read: Callable[[], None] = lambda: None,
) -> TrainState:
    """Read a state.

    Args:
        checkpoint: Where from.
        pipeline: What the state belongs to; of the same layers, cut in any way.
        state: The present one, which gives what is not read. Once everything has been read, what is
            replaced is deleted, so that devices never hold both. None: everything is read.
        strict: Refuse parameters and collections that are not exactly the model's. Otherwise what
            fits is read and a warning names the rest.
        optimizer: Read the optimiser's state and the loss scale.
        lr_scheduler: Read the hyperparameters that the optimiser keeps, such as the rate, and their
            schedule's count.
        counters: Read the step, which keys dropout, and the run's key.
        when_read: Called when everything has been read and nothing changed yet; what it raises ends
            the call.

    Returns:
        The new state.

    Raises:
        CheckpointError: Layers or the optimiser's state do not fit, each difference named; or it is
            damaged.
    """
    stored, wanted = checkpoint.index.leaves, pipeline.catalog
    frozen = {join_path(("params", *path)) for path in pipeline.trace.frozen}
    # Frozen here too, they have the values that they began with, and a checkpoint of what was
    # trained goes on top.
    absent = frozen & set(checkpoint.index.excluded)
    model = compare(
        stored, wanted, lambda key: not key.startswith(_OPTIMIZER) and key not in absent
    )
    if not model.is_exact:
        text = (
            f"{checkpoint.path} must hold the layers of the model, but got "
            f"{model.describe(stored, wanted)}. "
        )
        if strict:
            raise CheckpointError(
                f"{text}Build the model from the same layers, or load what fits with "
                "load_module_strict=False."
            )
        others = (
            "What is missing or of another shape keeps its values. "
            if model.missing or model.misshapen
            else ""
        )
        warnings.warn(f"{text}{others}The rest is loaded.", stacklevel=7)
    # An average that is not all there begins with the parameters.
    begins = pipeline.config.ema is not None and (
        not optimizer
        or any(_is_of_average(key) and not _fits(stored.get(key), wanted[key]) for key in wanted)
    )
    rest = _compare_optimizer(
        checkpoint,
        {key: leaf for key, leaf in wanted.items() if not (begins and _is_of_average(key))},
        optimizer,
        lr_scheduler,
        strict=strict if model.is_exact else None,
    )
    keys = (*model.fitting, *rest)
    # What nobody trains, layers would get in that dtype anyway.
    untrained = frozen if pipeline.trains else {key for key in keys if key.startswith(_PARAMS)}
    _warn_of_casts(stored, wanted, [key for key in keys if key not in untrained])
    if state is None and (len(keys) < len(wanted) or not counters):
        state = pipeline.init()
    scalars = _load_scalars(checkpoint, pipeline, loss_scale=optimizer) if counters else {}
    read = read_into(
        pipeline, state, keys, lambda mine: _cast_leaves(checkpoint, wanted, mine), when_read
    )
    new = dataclasses.replace(read, **scalars)
    return pipeline.restart_average(new) if begins else new


def read_into(
    pipeline: Pipeline,
    state: TrainState | None,
    keys: Sequence[str],
    source: Source,
    when_read: Callable[[], None],
) -> TrainState:
    """Replace leaves of a state by what is read; what is replaced is deleted after that.

    Without a state all leaves must be read. `when_read` is called when everything has been read and
    nothing changed yet; what it raises ends the call. All processes call.
    """
    wanted, struct = pipeline.catalog, pipeline.state_struct
    arrays = state_arrays(struct if state is None else state)
    touched = {span.array for key in keys for copy in wanted[key].copies for span in copy}
    partial = {
        span.array
        for key in wanted.keys() - set(keys)
        for copy in wanted[key].copies
        for span in copy
    }
    like = state_arrays(struct)
    rows = HostRows(
        {
            name: arrays[name] if name in partial else like[name]
            for name in arrays
            if name in touched
        }
    )
    run_on_all(lambda: rows.fill(wanted, keys, source))
    # All is in host memory on every process, and nothing has changed yet.
    run_on_all(when_read)
    if state is None:
        state = dataclasses.replace(struct, **pipeline.init_scalars())
    else:
        for name in touched:
            # Before the new ones come: a device may not have room for both.
            arrays.pop(name).delete()
    return with_arrays(state, rows.place())


def _load_scalars(
    checkpoint: Checkpoint, pipeline: Pipeline, *, loss_scale: bool
) -> dict[str, Any]:
    try:
        return load_scalars(checkpoint.index.scalars, pipeline, loss_scale=loss_scale)
    except (OverflowError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{checkpoint.path} must hold the step, the key and the loss scale of a run, but got "
            f"some that fail with {type(error).__name__}: {str(error)[:300]}. Load another tag."
        ) from error


def _cast_leaves(
    checkpoint: Checkpoint, wanted: Mapping[str, Leaf], keys: Sequence[str]
) -> Iterator[tuple[str, np.ndarray]]:
    for key, value in read_leaves(checkpoint, keys):
        yield key, value.astype(jnp.dtype(wanted[key].dtype), copy=False)


def load_params(
    path: str | PathLike[str] | StorePath, tag: str | None = None, *, params: str | None = None
) -> PyTree:
    """Read the parameters of a checkpoint.

    The plain Flax parameters of each layer, on the host, without an engine.

    Args:
        path: What was given to `save_checkpoint`, or a checkpoint's own folder.
        tag: Name of the checkpoint; None: the latest.
        params: `"ema"` reads the average that the section `ema` kept; None: the parameters that
            were trained.

    Returns:
        The tree that `PipelineModule.init` returns, for `PipelineModule.apply`: numpy arrays at
        `layers/<index>_<name>` and `tied/<key>`.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, or holds no average.
    """
    return _load_part(path, tag, "params/", params)


def load_collections(
    path: str | PathLike[str] | StorePath, tag: str | None = None
) -> dict[str, PyTree]:
    """Read what layers keep beside parameters, as `PipelineModule.init_collections` returns it.

    Args:
        path: As for `load_params`.
        tag: As for `load_params`.

    Returns:
        Collections by the layer's name, as numpy arrays.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged.
    """
    return _load_part(path, tag, "collections/")


def read_leaves(checkpoint: Checkpoint, keys: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Read some leaves of a checkpoint, in the order in which it has them."""
    leaves = {key: checkpoint.index.leaves[key] for key in keys}
    needed: dict[str, list[int]] = {}
    keys_of: dict[str, list[str]] = {}
    for key, leaf in leaves.items():
        for span in leaf.copies[0]:
            needed.setdefault(span.array, []).extend(span.rows)
        keys_of.setdefault(leaf.copies[0][0].array, []).append(key)
    for arrays in read_arrays(checkpoint.arrays, checkpoint.index.arrays, needed):
        for key in [key for name in arrays for key in keys_of.get(name, ())]:
            yield (
                key,
                read_leaf(
                    leaves[key], lambda name, row, arrays=arrays: arrays[name][row].reshape(-1)
                ),
            )


def with_params(checkpoint: Checkpoint, params: str | None) -> Checkpoint:
    """A checkpoint whose parameters are those of this name: `"ema"`, or None for the trained ones.

    Raises CheckpointError where it holds no such parameters.
    """
    if params is None:
        return checkpoint
    leaves = checkpoint.index.leaves
    averages = {
        _PARAMS + key.removeprefix(_AVERAGE): leaf
        for key, leaf in leaves.items()
        if key.startswith(_AVERAGE)
    }
    if params != "ema" or not averages:
        held = "holds no average" if params == "ema" else "has no parameters of that name"
        raise CheckpointError(
            "params must be None, or 'ema' for a checkpoint of a run with the section ema, but got "
            f"params={shown(params)}, and {checkpoint.path} {held}. Leave it out for the "
            "parameters that were trained."
        )
    index = dataclasses.replace(checkpoint.index, leaves={**leaves, **averages})
    return dataclasses.replace(checkpoint, index=index)


def _load_part(
    path: str | PathLike[str] | StorePath,
    tag: str | None,
    part: str,
    params: str | None = None,
) -> dict[str, PyTree]:
    def read() -> dict[str, np.ndarray]:
        checkpoint = with_params(open_checkpoint(path, tag), params)
        keys = [key for key in checkpoint.index.leaves if key.startswith(part)]
        return dict(read_leaves(checkpoint, keys))

    found = reread(path, read)
    return unflatten_dict(
        {split_path(key.removeprefix(part)): value for key, value in found.items()}
    )


def _compare_optimizer(
    checkpoint: Checkpoint,
    wanted: Mapping[str, Leaf],
    optimizer: bool,
    lr_scheduler: bool,
    *,
    strict: bool | None,
) -> tuple[str, ...]:
    """The keys of the optimiser's state to read.

    With `strict=None` differences follow from those of the layers.
    """
    stored = checkpoint.index.leaves
    is_schedule = _schedule_keys({*stored, *wanted})

    def chosen(key: str) -> bool:
        return key.startswith(_OPTIMIZER) and (lr_scheduler if is_schedule(key) else optimizer)

    found: Comparison = compare(stored, wanted, chosen)
    if optimizer and strict is not None and not found.is_exact:
        differing = {*found.missing, *found.unexpected, *found.misshapen}
        argument = (
            "load_lr_scheduler_states"
            if all(map(is_schedule, differing))
            else "load_optimizer_states"
        )
        text = (
            f"{checkpoint.path} must hold the state of the optimizer in use, but got "
            f"{found.describe(stored, wanted)}."
        )
        if strict:
            fits = (
                "take what fits of it with load_module_strict=False, or " if found.fitting else ""
            )
            raise CheckpointError(
                f"{text} Use the same optimizer, or {fits}begin its state anew with "
                f"{argument}=False."
            )
        warnings.warn(
            f"{text} What fits is loaded; {argument}=False loads none of it.", stacklevel=8
        )
    return found.fitting


def _fits(stored: Leaf | None, wanted: Leaf) -> bool:
    return stored is not None and stored.shape == wanted.shape


def _is_of_average(key: str) -> bool:
    return key.startswith(_AVERAGE) or key == _AVERAGED


def _schedule_keys(keys: set[str]) -> Callable[[str], bool]:
    """A test for keys that hold hyperparameters, or count the updates of their schedules."""
    marks = ("hyperparams", "hyperparams_states")
    owners = {
        path[:i] for path in map(split_path, keys) for i, at in enumerate(path) if at in marks
    }

    def is_schedule(key: str) -> bool:
        path = split_path(key)
        return any(
            path[:i] in owners and (at in marks or path[i:] == ("count",))
            for i, at in enumerate(path)
        )

    return is_schedule


def _warn_of_casts(
    stored: Mapping[str, Leaf], wanted: Mapping[str, Leaf], keys: Sequence[str]
) -> None:
    cast = [key for key in keys if stored[key].dtype != wanted[key].dtype]
    if cast:
        first = cast[0]
        warnings.warn(
            f"{len(cast)} arrays have another dtype than the checkpoint's and are converted, such "
            f"as {first} from {stored[first].dtype} to {wanted[first].dtype}.",
            stacklevel=8,
        )
