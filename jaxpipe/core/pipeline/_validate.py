"""Checks of a pipeline's arguments: batches, parameter trees, meshes and optimisers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxpipe._util.typing import Path, PyTree
from jaxpipe.config import TrainConfig
from jaxpipe.core.state import slice_struct, words_of
from jaxpipe.data import Batch, array_fault, split_entry
from jaxpipe.distributed.topology import mesh_shape, mesh_topology
from jaxpipe.errors import ConfigError, DataError, LayerError, PipelineError, TopologyError
from jaxpipe.layers import (
    ModelTrace,
    PipelineModule,
    flatten_dict,
    format_struct,
    join_path,
    struct_of,
    unbox,
    unflatten_dict,
)
from jaxpipe.optim import leaf_paths, params_needed_whole

_LISTS = " A list of numbers is a tree of scalars: convert it to an array with numpy.asarray."
_MOST_LISTED = 8

_DISABLE_JIT = "jax_disable_jit"


def entry_struct(
    entry: Sequence[PyTree], microbatch_size: int, num_replicas: int, replicas: str = "replicas"
) -> Batch:
    """Return the shapes of one entry of a data iterator, with leaves `[samples, ...]`.

    The entry is for `num_replicas` replicas, which errors call `replicas`.
    """
    named = zip(Batch._fields, split_entry(entry, "the entry"), strict=True)
    struct = Batch(*(struct_of(tree, name) for name, tree in named))
    if not jax.tree.leaves(struct.inputs):
        raise DataError(
            "the inputs of a microbatch must contain at least one array, but got "
            f"inputs={struct.inputs!r}. Yield (inputs, labels) with the arrays that the first "
            "layer takes."
        )
    wanted = microbatch_size * num_replicas
    for name, tree in zip(Batch._fields, struct, strict=True):
        for path, leaf in jax.tree.leaves_with_path(tree):
            if leaf.shape[:1] != (wanted,):
                raise DataError(
                    "every leaf of a microbatch must have train_micro_batch_size_per_gpu * "
                    f"{replicas} = {microbatch_size} * {num_replicas} = {wanted} samples as its "
                    f"first dim, but got {name}{jax.tree_util.keystr(path)} = "
                    f"{format_struct(leaf)}. Yield {wanted} samples per entry, or change the batch "
                    f"sizes in the config.{'' if leaf.shape else _LISTS}"
                )
    return struct


def check_params_name(name: Any, config: TrainConfig) -> None:
    """Raise ConfigError if `name` names parameters that a state does not have."""
    if name is not None and name not in ("ema", "base"):
        raise ConfigError(
            f"params must be 'ema' or 'base', but got params={name!r}. Omit it to use the trained "
            "parameters."
        )
    if name == "ema" and config.ema is None:
        raise ConfigError(
            "params='ema' must have an average to read, but got a configuration without the "
            'section ema. Train with for example "ema": {"decay": 0.999}.'
        )


def check_base(adapters: frozenset[Path], trained: Iterable[Path]) -> None:
    """Raise ConfigError unless a model trains all of its adapters and nothing else."""
    # Otherwise the model without adapters would not be the model before training.
    differing = sorted(map(join_path, adapters.symmetric_difference(trained)))
    if not adapters or differing:
        found = f"one in which {differing[0]} is the first to differ" if adapters else "no adapters"
        raise ConfigError(
            "params='base' must find a model that trains its adapters, those of "
            f"jaxpipe.layers.lora, and nothing else, but got {found}. Train "
            "PipelineModule(trainable=LORA_PARAMETERS), or create an engine for the reference."
        )


def check_batch(batch: Batch, wanted: Batch, microbatch_size: int, num_replicas: int) -> None:
    """Raise DataError if a batch differs from the example in structure, shapes or dtypes."""
    for name, given, like in zip(Batch._fields, batch, wanted, strict=True):
        if jax.tree.structure(given) != jax.tree.structure(like):
            raise DataError(
                f"the batch's {name} must have the structure {format_struct(like)}, but got "
                f"{format_struct(given)}. Give every batch the structure of the example batch."
            )
        for (path, x), leaf in zip(
            jax.tree.leaves_with_path(given), jax.tree.leaves(like), strict=True
        ):
            if (x.shape, x.dtype) != (leaf.shape, leaf.dtype):
                raise DataError(
                    f"the batch's {name}{jax.tree_util.keystr(path)} must be {format_struct(leaf)} "
                    f"([num_microbatches={leaf.shape[0]}, microbatch_size * "
                    f"replicas={microbatch_size} * {num_replicas}, ...]), but got "
                    f"{format_struct(x)}. Give every batch the shapes and dtypes of the example "
                    "batch."
                )


def read_params(tree: PyTree) -> PyTree:
    """Check a user's tree of numpy, JAX or torch arrays, and remove Flax's partition metadata."""
    if not isinstance(tree, Mapping):
        raise LayerError(
            f"the parameters must be a tree of dictionaries, but got a {type(tree).__name__}. Pass "
            "a tree as PipelineModule.init returns it, or Flax's variables['params'] for a plain "
            "model. Without one, parameters are initialised from base_seed."
        )
    tree = unbox(tree)
    faults = {_name(path): _fault(leaf) for path, leaf in flatten_dict(tree).items()}
    wrong = [f"{name} = {fault}" for name, fault in faults.items() if fault]
    if wrong:
        raise LayerError(
            "every parameter must be an array of floating-point numbers, but got "
            f"{_listed(wrong)}. Convert them, as in numpy.asarray(value, numpy.float32)."
        )
    return tree


def check_params(
    tree: PyTree,
    struct: Mapping[Path, jax.ShapeDtypeStruct],
    repair: str = "Pass a tree as PipelineModule.init returns it for the same layers",
) -> PyTree:
    """Check that a parameter tree is the model's; returns it as `read_params` does."""
    tree = read_params(tree)
    _check_leaves("the parameters must be those of the model", flatten_dict(tree), struct, repair)
    return tree


def check_opt_state(tree: PyTree, struct: PyTree) -> PyTree:
    """Return a tree's leaves in the structure of an optimiser's state, and the words of PRNG keys.

    Raises LayerError with the name of each leaf that does not fit.
    """
    tree = unbox(tree)
    # By paths, so that a tree whose tuples a file has turned into dictionaries or lists fits too.
    given = {
        path: words_of(leaf) if hasattr(leaf, "shape") else np.asarray(leaf)
        for path, leaf in zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True)
    }
    faults = {_name(path): array_fault(leaf) for path, leaf in given.items()}
    wrong = [f"{name} = {fault[0]}" for name, fault in faults.items() if fault]
    if wrong:
        raise LayerError(
            "the optimizer's state must consist of arrays of numbers, but got "
            f"{_listed(wrong)}. Convert them, as in numpy.asarray(value)."
        )
    wanted = dict(zip(leaf_paths(struct), jax.tree.leaves(struct), strict=True))
    _check_leaves(
        "the optimizer's state must be that of the optimizer in use",
        given,
        wanted,
        "Pass a tree as optimizer.init(params) returns it for the trained parameters, or change "
        "leaves of opt_state_tree()",
    )
    return jax.tree.unflatten(jax.tree.structure(struct), [given[path] for path in wanted])


def _check_leaves(
    rule: str, given: Mapping[Path, Any], struct: Mapping[Path, Any], repair: str
) -> None:
    missing = [f"missing {_name(path)}" for path in struct if path not in given]
    unexpected = [f"unexpected {_name(path)}" for path in given if path not in struct]
    misfits = [
        f"{_name(path)} is {_form(given[path])}, not {format_struct(like)}"
        for path, like in struct.items()
        if path in given and not _fits(given[path], like)
    ]
    wrong = missing + unexpected + misfits
    if wrong:
        raise LayerError(
            f"{rule}, but got {len(wrong)} difference{'' if len(wrong) == 1 else 's'}: "
            f"{_listed(wrong)}. {repair}."
        )


def check_mesh(module: PipelineModule, mesh: Mesh) -> None:
    """Check a pipeline's mesh against the model's topology and the job's processes."""
    # A process without a device could run none of the mesh's programs, and the others would block
    # whenever all processes must agree.
    idle = sorted(
        set(range(jax.process_count())) - {device.process_index for device in mesh.devices.flat}
    )
    if idle:
        raise TopologyError(
            f"every process must have a device of the mesh, but got {mesh.devices.size} devices "
            f"without one of process {', '.join(map(str, idle))}. Make the topology as large as "
            f"the number of devices of all processes ({jax.device_count()}), or start fewer "
            "processes."
        )
    num_stages = mesh_shape(mesh)["stage"]
    if num_stages != module.num_stages:
        raise TopologyError(
            f"the mesh's stage axis must be num_stages={module.num_stages} long, but got "
            f"stage={num_stages}. Make the mesh from the module's topology, or change num_stages."
        )
    mesh_topology(mesh, module.given_topology)


def check_sharded(
    optimizer: optax.GradientTransformation, trace: ModelTrace, num_stages: int
) -> None:
    """Raise ConfigError unless the update of parameters that stages slice is elementwise."""
    shapes = flatten_dict(trace.tree())
    dims = trace.split_dims() if num_stages > 1 else {}
    whole = {path: shapes[path] for path in dims if path not in trace.frozen}
    slices = {path: slice_struct(leaf, dims[path], num_stages) for path, leaf in whole.items()}
    trees = (unflatten_dict(whole), unflatten_dict(slices))
    refused = params_needed_whole(optimizer, *trees) if whole else []
    if refused:
        path = refused[0]
        raise ConfigError(
            "the optimizer must update each element independently where a parameter is split over "
            "the stages, and look neither at its shape nor at an element's index, but got one that "
            f"needs all of {'/'.join(path)}, of which a stage holds {format_struct(slices[path])} "
            f"of {format_struct(whole[path])}. Use for example Adam, AdamW, Lion or SGD for it, "
            "with masks by name; optax.multi_transform can use a different optimizer for the other "
            "parameters."
        )


_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
"""Kinds of numbers. NumPy casts each to those before it too, with a loss and without an error."""


def _fits(leaf: Any, like: jax.ShapeDtypeStruct) -> bool:
    if tuple(leaf.shape) != tuple(like.shape):
        return False
    given, wanted = (
        [jnp.issubdtype(dtype, kind) for kind in _KINDS].index(True)
        for dtype in (_dtype(leaf), like.dtype)
    )
    # NumPy also wraps integers around. Those that are stored, such as a count, are few.
    return given <= wanted and (
        _KINDS[wanted] is not jnp.integer
        or np.array_equal(np.asarray(leaf).astype(like.dtype), np.asarray(leaf))
    )


def _fault(leaf: Any) -> str:
    """Describe a leaf that is not a floating-point array. Empty if it is one."""
    if not (hasattr(leaf, "dtype") and hasattr(leaf, "shape")):
        return f"a {type(leaf).__name__}"
    fault = array_fault(leaf)
    if fault is not None:
        return fault[0]
    return "" if jnp.issubdtype(_dtype(leaf), jnp.inexact) else _form(leaf)


def _dtype(leaf: Any) -> Any:
    # torch has its own dtypes; NumPy's view of the array has the corresponding one.
    return leaf.dtype if isinstance(leaf, jax.Array | np.ndarray) else np.asarray(leaf).dtype


def _form(leaf: Any) -> str:
    return format_struct(jax.ShapeDtypeStruct(tuple(leaf.shape), _dtype(leaf)))


def _listed(wrong: list[str]) -> str:
    more = f"; and {len(wrong) - _MOST_LISTED} more" if len(wrong) > _MOST_LISTED else ""
    return "; ".join(wrong[:_MOST_LISTED]) + more


def _name(path: Path) -> str:
    return "/".join(path)


def check_jit() -> None:
    """Raise PipelineError under `jax.disable_jit()`: a pipeline is one program for all devices."""
    if getattr(jax.config, _DISABLE_JIT):
        raise PipelineError(
            "a pipeline must be compiled, but got jax.disable_jit()=True. Remove it, and debug the "
            "same layers on one device: engine.module.apply(engine.module_state_dict(), inputs)."
        )
