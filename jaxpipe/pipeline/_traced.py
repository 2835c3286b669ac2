"""A model traced on a mesh: what is known of a pipeline before anything about it is decided."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from jaxpipe._typing import PyTree
from jaxpipe.config import TrainConfig
from jaxpipe.data import Batch
from jaxpipe.layers import ModelTrace, PipelineModule, split_vocabulary, struct_of
from jaxpipe.state import check_collections
from jaxpipe.topology import num_batch_shards, with_fsdp_axis

from ._validate import check_mesh, entry_struct


@dataclass(frozen=True)
class Traced:
    """A model, its mesh and its shapes.

    Attributes:
        module: The model, its ends split over the stages where the settings ask for it.
        mesh: The devices, with the axis `fsdp` that ZeRO 2 and 3 make of `data`.
        trace: Shapes and programs of the layers, for one microbatch.
        entry: Shapes of one microbatch of all replicas.
        microbatch: Shapes of one microbatch as layers see it, that of one place along `data`.
    """

    module: PipelineModule
    mesh: Mesh
    trace: ModelTrace
    entry: Batch
    microbatch: Batch

    @property
    def num_replicas(self) -> int:
        """Places along `data` and `fsdp`."""
        return num_batch_shards(self.mesh)

    @property
    def microbatch_size(self) -> int:
        """Samples of a microbatch of one replica."""
        return jax.tree.leaves(self.entry)[0].shape[0] // self.num_replicas


def trace_model(module: PipelineModule, mesh: Mesh, example: Sequence[PyTree], config: TrainConfig) -> Traced:
    """Check a model against its mesh, and trace it with one microbatch.

    `mesh` is as the user has it, `example` a microbatch of all replicas, arrays or shapes.

    Raises:
        TopologyError: The mesh is not as the model's topology says.
        DataError: A leaf of the example is of another length than the replicas divide.
        LayerError: Layers do not fit together, cannot be traced or split, or keep what gradients replace.
    """
    # As it was given: what ZeRO 2 and 3 make of the axes next is in no topology of the user's.
    check_mesh(module, mesh)
    mesh = with_fsdp_axis(mesh) if config.zero_optimization.stage >= 2 else mesh
    num_replicas = num_batch_shards(mesh)
    shapes = [leaf.shape for leaf in jax.tree.leaves(struct_of(tuple(example)))]
    # 0 where there is nothing to read it from: `entry_struct` says what is wrong with which leaf.
    entry = entry_struct(example, shapes[0][0] // num_replicas if shapes and shapes[0] else 0, num_replicas)
    # Replicas that are places of an automatic axis compute on one microbatch together.
    size = jax.tree.leaves(entry)[0].shape[0] // mesh.shape["data"]
    microbatch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), entry)
    inputs, labels, side = microbatch
    module = split_vocabulary(module, labels) if config.pipeline.split_vocabulary else module
    trace = module.trace(inputs, side, mesh.abstract_mesh)
    check_collections(module.layers, trace)
    return Traced(module, mesh, trace, entry, microbatch)
