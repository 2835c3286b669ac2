"""The `model` axis (tensor parallelism): a model as one of its ranks runs it, and as a whole.

Layers are traced as one rank runs them. With `check_vma=False` the transpose of a `psum` is a `psum`, so a backward
gives each rank the gradient of the sum of all ranks' losses: the loss is seeded with 1 / num_model, and the gradients
of what all ranks hold alike are then summed over them.
"""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpipe._typing import PyTree
from jaxpipe.errors import LayerError, TopologyError
from jaxpipe.layers import ModelTrace, PipelineModule, flatten_dict, format_struct, with_axes
from jaxpipe.topology import ProcessTopology, mesh_shape, mesh_topology


def model_topology(module: PipelineModule, mesh: Mesh) -> ProcessTopology:
    """The topology that numbers the devices of a mesh, as the module was given it.

    Args:
        module: The model.
        mesh: A pipeline's mesh.

    Returns:
        The module's own; where it was given a number of stages alone, the axes of the mesh.

    Raises:
        TopologyError: The mesh has other lengths than the module.
    """
    num_stages = mesh_shape(mesh)["stage"]
    if num_stages != module.num_stages:
        raise TopologyError(
            f"the mesh's stage axis must be num_stages={module.num_stages} long, but got stage={num_stages}. "
            "Make the mesh from the module's topology, or change num_stages."
        )
    return mesh_topology(mesh, module.given_topology)


def trace_model_ranks(
    module: PipelineModule, inputs: PyTree, side: Mapping[str, PyTree], num_model: int, num_data: int = 1
) -> tuple[ModelTrace, ModelTrace]:
    """Trace a whole model, and one rank of its `model` axis.

    Args:
        module: The model.
        inputs: Shapes and dtypes of a microbatch.
        side: The same of side inputs, by name.
        num_model: Length of the axis; 0 where there is none.
        num_data: Length of the axis `data`.

    Returns:
        `(whole, of one rank)`.

    Raises:
        LayerError: Layers do not fit, or a variable's shapes on a rank and as a whole do not agree with its partition
            metadata.
    """
    whole = with_axes({"model": min(num_model, 1), "data": num_data}, lambda: module.trace(inputs, side))
    if num_model <= 1:
        return whole, whole
    _compare(module, whole, None, num_model)
    rank = with_axes({"model": num_model, "data": num_data}, lambda: module.trace(inputs, side))
    _compare(module, whole, rank, num_model)
    return whole, rank


def check_whole_outputs(whole: ModelTrace, rank: ModelTrace) -> None:
    """Refuse to return outputs that are sharded over the `model` axis.

    Raises:
        LayerError: The model's output is of another shape on a rank.
    """
    shapes = [[x.shape for x in jax.tree.leaves(trace.boundaries[-1])] for trace in (whole, rank)]
    if shapes[0] != shapes[1]:
        raise LayerError(
            "the model's output must be whole on every place of the model axis to be predicted, but got "
            f"{format_struct(rank.boundaries[-1])} of {format_struct(whole.boundaries[-1])}. End the model with "
            "jax.lax.all_gather(..., 'model', tiled=True), or evaluate the loss alone."
        )


def _compare(module: PipelineModule, whole: ModelTrace, rank: ModelTrace | None, num_model: int) -> None:
    """Check every variable; without `rank` only that `num_model` divides what is sharded."""
    for named in module.layers:
        i = named.index
        for kind, trees, dims in (
            ("parameter", "params", whole.param_dims[i]),
            ("variable", "collections", whole.collection_dims[i]),
        ):
            sharded = {} if rank is None else flatten_dict(getattr(rank, trees)[i] or {})
            for path, leaf in flatten_dict(getattr(whole, trees)[i] or {}).items():
                label = f"{kind} {'.'.join(path)!r} of layer {named.name}"
                if rank is None:
                    _check_divides(label, leaf, dims.get(path), num_model)
                else:
                    _check_shard(label, leaf, sharded.get(path), dims.get(path), num_model)


def _check_divides(label: str, leaf: Any, dim: int | None, num_model: int) -> None:
    size = None if dim is None else leaf.shape[dim] if dim < len(leaf.shape) else 0
    if size is None or (size and size % num_model == 0):
        return
    fewer, more = size // num_model * num_model, -(-size // num_model) * num_model
    fitting = " or ".join(str(n) for n in (fewer, more) if n)
    raise LayerError(
        f"{label} must be sharded along a dim that num_model={num_model} divides, but got {format_struct(leaf)} with "
        f"dim {dim} over 'model'. Make that dim {fitting or 'longer'}, or the model axis another length."
    )


def _check_shard(label: str, leaf: Any, shard: Any, dim: int | None, num_model: int) -> None:
    shape = [n // num_model if d == dim else n for d, n in enumerate(leaf.shape)]
    if shard is not None and list(shard.shape) == shape:
        return
    wanted = format_struct(jax.ShapeDtypeStruct(shape, leaf.dtype))
    got = "nothing" if shard is None else format_struct(shard)
    if dim is None:
        repair = "Mark its sharded dim, as in flax.linen.with_partitioning(init, (None, 'model'))."
    else:
        repair = "Let the layer divide that dim by jax.lax.axis_size('model')."
    raise LayerError(
        f"{label} is {format_struct(leaf)} as a whole and must be {wanted} on each of num_model={num_model} places, as "
        f"its partition metadata says, but got {got}. {repair}"
    )


def mean_over_model_axis(values: PyTree, num_model: int) -> PyTree:
    """The mean over the `model` axis; where there is none the values themselves."""
    if not num_model:
        return values
    return jax.tree.map(lambda x: jax.lax.pmean(x, "model"), values)
