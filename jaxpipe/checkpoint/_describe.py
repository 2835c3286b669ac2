"""Descriptions of a pipeline and a run for the index."""

import platform
from collections.abc import Collection, Mapping
from importlib import metadata
from typing import Any

import jax
import numpy as np

from jaxpipe.core.pipeline import Pipeline
from jaxpipe.core.state import TrainState, place_everywhere
from jaxpipe.layers import format_struct, join_path
from jaxpipe.optim import LossScaler

from ._index import StoredLayer

_LIBRARIES = ("jaxpipe", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def describe_layers(pipeline: Pipeline, keys: Collection[str]) -> tuple[StoredLayer, ...]:
    """Describe the layers of a model, in order; only parameters with these keys are listed."""
    boundaries = pipeline.trace.boundaries
    parts = pipeline.plan.parts
    return tuple(
        StoredLayer(
            name=named.name,
            kind=named.name.partition("_")[2],
            stage=sum(part <= named.index for part in parts[1:]),
            signature=f"{format_struct(boundaries[named.index])} -> "
            f"{format_struct(boundaries[named.index + 1])}",
            parameters=tuple(
                key
                for path in pipeline.trace.paths[named.index].paths.values()
                if (key := join_path(("params", *path))) in keys
            ),
        )
        for named in pipeline.module.layers
    )


def adapter_keys(pipeline: Pipeline) -> list[str]:
    """Return the keys of the parameters of adapters."""
    return sorted(join_path(("params", *path)) for path in pipeline.trace.adapters)


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that write a checkpoint."""
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def scalar_arrays(pipeline: Pipeline, state: TrainState) -> dict[str, jax.Array]:
    """Return the small arrays of a state, by name; each is on every device."""
    # Only a dynamic loss scale changes in training.
    loss_scale = {
        f"loss_scale/{jax.tree_util.keystr(path, simple=True)}": leaf
        for path, leaf in jax.tree.leaves_with_path(
            state.loss_scale if _has_moving_scale(pipeline) else ()
        )
    }
    rng = {f"rng/{jax.random.key_impl(state.rng)}": jax.random.key_data(state.rng)}
    return {"step": state.step, "skipped_steps": state.skipped_steps, **rng, **loss_scale}


def dump_scalars(arrays: Mapping[str, jax.Array]) -> dict[str, Any]:
    """Convert the arrays of `scalar_arrays` to JSON values; blocks until they are ready."""
    found: dict[str, Any] = {"loss_scale": {}}
    for name, array in arrays.items():
        value = np.asarray(array.addressable_shards[0].data).tolist()
        part, _, inner = name.partition("/")
        if part == "rng":
            found["rng"] = {"impl": inner, "words": value}
        elif inner:
            found[part][inner] = value
        else:
            found[part] = value
    return found


def _has_moving_scale(pipeline: Pipeline) -> bool:
    scaler = LossScaler.from_config(pipeline.plan.config)
    return scaler is not None and scaler.dynamic


def load_scalars(
    scalars: Mapping[str, Any], pipeline: Pipeline, *, loss_scale: bool
) -> dict[str, Any]:
    """Make fields of a state, by name and on every device, from the result of `dump_scalars`."""
    # `device_put` because `jax.transfer_guard` refuses implicit transfers to a device.
    words = jax.device_put(np.asarray(scalars["rng"]["words"], np.uint32))
    rng = jax.random.wrap_key_data(words, impl=scalars["rng"]["impl"])
    fields: dict[str, Any] = {
        "step": np.int32(scalars["step"]),
        "skipped_steps": np.int32(scalars["skipped_steps"]),
        "rng": rng,
    }
    stored = scalars["loss_scale"]
    paths, treedef = jax.tree.flatten_with_path(pipeline.states.struct.loss_scale)
    names = [jax.tree_util.keystr(path, simple=True) for path, _ in paths]
    # Restored only if the loss scale is dynamic in both.
    if loss_scale and _has_moving_scale(pipeline) and set(names) == set(stored):
        leaves = [
            np.asarray(stored[name], leaf.dtype)
            for name, (_, leaf) in zip(names, paths, strict=True)
        ]
        fields["loss_scale"] = jax.tree.unflatten(treedef, leaves)
    return place_everywhere(fields, pipeline.mesh)
