"""Loading of a checkpoint into a pipeline with any stages, replicas and processes."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpipe._util.stores import StorePath
from jaxpipe._util.typing import PyTree
from jaxpipe._util.warn import warn
from jaxpipe.core.pipeline import Pipeline
from jaxpipe.core.state import (
    HostRows,
    Leaf,
    Source,
    TrainState,
    read_leaf,
    state_arrays,
    with_arrays,
)
from jaxpipe.distributed import run_on_all
from jaxpipe.errors import CheckpointError, shown
from jaxpipe.layers import join_path, split_path, unflatten_dict

from ._compare import Comparison, compare
from ._describe import load_scalars
from ._open import Checkpoint, open_checkpoint, reread
from ._store import read_arrays

_OPTIMIZER = "opt_state/"
_AVERAGE = "opt_state/params_ema/"
_AVERAGED = "opt_state/ema_updates"
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
    """Read the state of a pipeline from a checkpoint.

    Args:
        checkpoint: The checkpoint to read.
        pipeline: The pipeline that the state is for. It must have the same layers, but may divide
            them over stages in any way.
        state: The current state. It provides the leaves that are not read. Once everything has been
            read, the leaves to replace are deleted, so that devices never hold old and new leaves
            together. With None, everything is read.
        strict: Whether parameters and collections must match the model exactly. If False, the
            leaves that fit are read and a warning names the others.
        optimizer: Whether to read the optimiser's state and the loss scale.
        lr_scheduler: Whether to read the hyperparameters that the optimiser stores, such as the
            learning rate, and the count of their schedule.
        counters: Whether to read the step, from which dropout keys are derived, and the run's key.
        when_read: Called when everything has been read and before anything changes. If it raises,
            the error is passed on and the state is unchanged.

    Returns:
        The new state.

    Raises:
        CheckpointError: The layers or the optimiser's state do not fit (the error names every
            difference), or the checkpoint is damaged.
    """
    stored = checkpoint.index.leaves
    wanted = pipeline.states.catalog
    frozen = {join_path(("params", *path)) for path in pipeline.trace.frozen}
    # Parameters that are also frozen here keep their current values; the checkpoint provides only
    # the trained ones.
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
            "Missing leaves and leaves of another shape keep their values. "
            if model.missing or model.misshapen
            else ""
        )
        warn(f"{text}{others}The rest is loaded.")
    # An average that is missing or incomplete starts from the parameters.
    begins = pipeline.plan.config.ema is not None and (
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
    # Layers would receive untrained parameters in that dtype anyway, so a cast needs no warning.
    untrained = (
        frozen if pipeline.states.trains else {key for key in keys if key.startswith(_PARAMS)}
    )
    _warn_of_casts(stored, wanted, [key for key in keys if key not in untrained])
    if state is None and (len(keys) < len(wanted) or not counters):
        state = pipeline.init()
    scalars = _load_scalars(checkpoint, pipeline, loss_scale=optimizer) if counters else {}
    read = read_into(
        pipeline, state, keys, lambda mine: _cast_leaves(checkpoint, wanted, mine), when_read
    )
    new = dataclasses.replace(read, **scalars)
    return pipeline.states.restart_average(new) if begins else new


def read_into(
    pipeline: Pipeline,
    state: TrainState | None,
    keys: Sequence[str],
    source: Source,
    when_read: Callable[[], None],
) -> TrainState:
    """Replace leaves of a state by the leaves of a source; all processes must call this.

    Deletes the old leaves. Without a state, all leaves must be read. `when_read` is called when
    everything has been read and before anything changes; an error that it raises is passed on.
    """
    wanted = pipeline.states.catalog
    struct = pipeline.states.struct
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
    # On every process, everything is in host memory and nothing has changed yet.
    run_on_all(when_read)
    if state is None:
        state = dataclasses.replace(struct, **pipeline.states.init_scalars())
    else:
        for name in touched:
            # Delete before the new arrays are placed: a device may not have room for both.
            arrays.pop(name).delete()
    return with_arrays(state, rows.place())


def _load_scalars(
    checkpoint: Checkpoint, pipeline: Pipeline, *, loss_scale: bool
) -> dict[str, Any]:
    try:
        return load_scalars(checkpoint.index.scalars, pipeline, loss_scale=loss_scale)
    except (OverflowError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{checkpoint.path} must hold the step, the key and the loss scale of a run, but "
            f"reading them failed with {type(error).__name__}: {str(error)[:300]}. Load another "
            "tag."
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

    Returns the plain Flax parameters of each layer, on the host; no engine is needed.

    Args:
        path: The directory that was passed to `save_checkpoint`, or a checkpoint's own folder.
        tag: Name of the checkpoint. None selects the latest.
        params: `"ema"` reads the moving average that the section `ema` configures. None reads the
            trained parameters.

    Returns:
        The tree that `PipelineModule.init` returns and `PipelineModule.apply` takes, with NumPy
        arrays at `layers/<index>_<name>` and `tied/<key>`.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, or it has no average.
    """
    return _load_part(path, tag, "params/", params)


def load_collections(
    path: str | PathLike[str] | StorePath, tag: str | None = None
) -> dict[str, PyTree]:
    """Read the collections of a checkpoint.

    Collections are the variables of layers that are not parameters. They have the form that
    `PipelineModule.init_collections` returns.

    Args:
        path: As for `load_params`.
        tag: As for `load_params`.

    Returns:
        Collections by layer name, as NumPy arrays.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged.
    """
    return _load_part(path, tag, "collections/")


def read_leaves(checkpoint: Checkpoint, keys: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Read some leaves of a checkpoint, in the order in which it stores them."""
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
    """Select a checkpoint's parameters: `"ema"` for the average, None for the trained ones."""
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
    """Return the keys of the optimiser's state to read; `strict=None` accepts differences."""
    stored = checkpoint.index.leaves
    is_schedule = _schedule_keys({*stored, *wanted})

    def chosen(key: str) -> bool:
        return key.startswith(_OPTIMIZER) and (lr_scheduler if is_schedule(key) else optimizer)

    found: Comparison = compare(stored, wanted, chosen)
    # With `strict=None` they follow from differences of the layers.
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
                f"{text} Use the same optimizer, or {fits}reset its state with {argument}=False."
            )
        warn(f"{text} What fits is loaded; {argument}=False loads none of it.")
    return found.fitting


def _fits(stored: Leaf | None, wanted: Leaf) -> bool:
    return stored is not None and stored.shape == wanted.shape


def _is_of_average(key: str) -> bool:
    return key.startswith(_AVERAGE) or key == _AVERAGED


def _schedule_keys(keys: set[str]) -> Callable[[str], bool]:
    """Make a test for the keys of hyperparameters and of their schedules' update counts."""
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
        warn(
            f"{len(cast)} arrays have another dtype than the checkpoint's and are converted, such "
            f"as {first} from {stored[first].dtype} to {wanted[first].dtype}.",
        )
