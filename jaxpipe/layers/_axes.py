"""The mesh axes that layers see while they are traced, initialised and run.

`stage` and `data` are manual: layers see the share of one stage and one replica, and may use
collectives over `data`. All other axes are automatic: layers see whole arrays, and XLA splits the
arrays according to the partition metadata of the weights and the sharding constraints.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jaxpipe._util.mesh import NO_MESH
from jaxpipe._util.typing import PyTree
from jaxpipe.distributed.topology import MANUAL_AXES
from jaxpipe.errors import LayerError

DATA = "data"

T = TypeVar("T")


def bound_axis(name: str) -> int:
    """Length of the surrounding axis of this name that collectives can use; 0 if there is none."""
    try:
        return jax.lax.axis_size(name)
    except NameError:
        return 0


def is_unbound_axis(error: BaseException) -> bool:
    """True if an error says that an axis name is unbound."""
    # Python's own NameErrors carry the missing name; JAX's do not.
    return type(error) is NameError and error.name is None


def one_device_mesh(axes: Sequence[str]) -> AbstractMesh:
    """A mesh of one device, with these automatic axes."""
    return _auto_mesh(dict.fromkeys((*MANUAL_AXES, *axes), 1))


def on_mesh(mesh: AbstractMesh, trace: Callable[[], T]) -> T:
    """Trace layers as they run on a mesh, `stage` and `data` manual and all other axes automatic.

    `trace` must return no traced values. Programs traced on an abstract mesh can be evaluated on a
    mesh of devices whose `abstract_mesh` it is.
    """
    around = jax.sharding.get_abstract_mesh()
    # A second `shard_map` over the same axes would be an error.
    if around.shape_tuple == mesh.shape_tuple and set(MANUAL_AXES) <= set(around.manual_axes):
        return trace()
    found: list[T] = []

    def run(place: Any) -> Any:
        # Returned around the `shard_map`, whose own outputs must be arrays.
        found.append(trace())
        return place

    whole = PartitionSpec()
    mapped = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=whole,
        out_specs=whole,
        axis_names=set(MANUAL_AXES),
        check_vma=False,
    )
    with jax.sharding.use_abstract_mesh(NO_MESH):  # a user's own mesh may be around
        jax.eval_shape(mapped, jax.ShapeDtypeStruct((), jnp.float32))
    return found[0]


def call_on_one(axes: Sequence[str], function: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """Call layers on one device, all samples on one replica, without effect of constraints.

    `axes` are automatic axes of length 1 that constraints may name; without any, nothing is
    compiled. If this code already runs on a mesh, that mesh is used.
    """
    around = jax.sharding.get_abstract_mesh()

    def run(*args: PyTree) -> PyTree:
        try:
            return function(*args)
        except NameError as error:
            if not is_unbound_axis(error) or bound_axis(DATA):
                raise
        # Values that the function closes over, such as keys, are not mapped, so random bits stay
        # the same. The arguments are, because `all_to_all` needs mapped arrays.
        # Map only if needed: a layer may call things that cannot be mapped, such as a callback to
        # the host.
        mapped = jax.vmap(function, axis_name=DATA, axis_size=1)
        return jax.tree.map(
            lambda x: x[0], mapped(*jax.tree.map(lambda x: jnp.asarray(x)[None], args))
        )

    def run_on_mesh(*args: PyTree) -> PyTree:
        with jax.sharding.use_abstract_mesh(one_device_mesh(axes)):
            return run(*args)

    if not axes or around.manual_axes:
        return run(*args)
    # Compiled, since a constraint on a concrete array would look for the mesh's devices.
    try:
        return jax.jit(run_on_mesh if around.empty else run)(*args)
    except ValueError as error:
        if around.empty or set(axes) <= set(around.axis_names):
            raise
        raise LayerError(
            f"layers with the axes {tuple(axes)} must run on a mesh that has them, or on none, but "
            f"got {error} Call them outside jax.set_mesh, or give its mesh these axes."
        ) from error


def mesh_for_init(names: Sequence[str]) -> AbstractMesh:
    """The surrounding mesh with all its axes automatic, and with `names` as additional axes."""
    # Flax constrains new variables by their metadata, which may name manual axes or any of `names`.
    return _auto_mesh(dict.fromkeys(names, 1) | dict(jax.sharding.get_abstract_mesh().shape))


def mesh_fault(subject: str, error: Exception, automatic: Sequence[str]) -> LayerError | None:
    """Error for what JAX refuses in how a layer uses the mesh; None for any other error."""
    if is_unbound_axis(error):
        return axis_fault(subject, error, automatic)
    # JAX has no class for either of these errors. `tests/layers/test_layer_axes.py` pins the texts.
    text = str(error)
    if "with_sharding_constraint" in text or "Resource axis:" in text:
        return constraint_fault(subject, text.partition(". ")[0].rstrip("."), automatic)
    if "mesh passed to shard_map" in text:
        return LayerError(
            f"{subject} must open jax.shard_map on the mesh around it, whose axes 'stage' and "
            "'data' are the pipeline's, but got a mesh of its own. Leave mesh= out and name the "
            "axes to be split by hand: jax.shard_map(..., "
            f"axis_names={{{', '.join(map(repr, automatic)) or '...'}}})."
        )
    return None


def constraint_fault(subject: str, what: str, automatic: Sequence[str]) -> LayerError:
    """Error for a sharding constraint that is not over automatic axes."""
    return LayerError(
        f"{subject} must name in its sharding constraints automatic axes of the mesh, of which it "
        f"has {', '.join(map(repr, automatic)) or 'none'}, and no more of them than an array has "
        f"dims, but got: {what}. Leave out 'stage' and 'data', and give the PipelineModule a "
        "topology with every other axis, such as PipeModelDataParallelTopology(num_pp, num_mp, "
        "num_dp) for 'model'."
    )


def axis_fault(subject: str, error: BaseException, automatic: Sequence[str]) -> LayerError:
    """Error for a collective over an axis that is not manual; `subject` such as `layer 0_Block`."""
    what = str(error).partition(". ")[0]
    named = next((axis for axis in automatic if what.endswith(f" {axis}")), None)
    if named is not None:
        return LayerError(
            f"{subject} must use no collectives over the axis {named!r}, which XLA splits, but "
            f"got: {what}. Say with partition metadata and jax.lax.with_sharding_constraint what "
            f"is split over {named!r}, or open jax.shard_map(..., axis_names={{{named!r}}}) around "
            "the collective."
        )
    return LayerError(
        f"{subject} must use collectives over the axis 'data', the replicas, alone, but got: "
        f"{what}. Name 'data' to compute over the samples of all replicas, as "
        "nn.BatchNorm(axis_name='data') does, or name no axis, to compute over each replica's own; "
        "over a further axis of the topology, open jax.shard_map(..., axis_names=...)."
    )


def _auto_mesh(lengths: dict[str, int]) -> AbstractMesh:
    return AbstractMesh(
        tuple(lengths.values()), tuple(lengths), axis_types=(AxisType.Auto,) * len(lengths)
    )
