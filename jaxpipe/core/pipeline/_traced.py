"""Traces a model with its mesh and an example, before its plan is made."""

from collections.abc import Callable, Sequence

import jax
import optax
from jax.sharding import Mesh

from jaxpipe._util.typing import PyTree
from jaxpipe.config import TrainConfig
from jaxpipe.core.planner import Counted, Job, choose_split, reference_hardware
from jaxpipe.core.state import check_collections
from jaxpipe.distributed.topology import FSDP, num_batch_shards, with_fsdp_axis
from jaxpipe.errors import ConfigError, JaxpipeError, LayerError
from jaxpipe.layers import PipelineModule, check_split_loss, split_vocabulary, struct_of

from ._optimizer import optimizer_for
from ._validate import check_mesh, check_sharded, entry_struct


def running_mesh(mesh: Mesh, config: TrainConfig) -> Mesh:
    """Return the mesh that a pipeline runs on: with ZeRO 2 and 3, `data` becomes `fsdp`."""
    return with_fsdp_axis(mesh) if config.zero_optimization.stage >= 2 else mesh


def trace_model(
    module: PipelineModule,
    mesh: Mesh,
    example: Sequence[PyTree],
    config: TrainConfig,
    num_microbatches: int,
    optimizer: optax.GradientTransformation,
) -> Job:
    """Check a model against its mesh, trace it, and decide whether to split the vocabulary.

    `mesh` is the user's mesh. `example` is one microbatch of all replicas, as arrays or shapes.
    """
    # The mesh as given: the axes that ZeRO 2 and 3 change next are in no topology of the user's.
    check_mesh(module, mesh)
    mesh = running_mesh(mesh, config)
    num_replicas = num_batch_shards(mesh)
    shapes = [leaf.shape for leaf in jax.tree.leaves(struct_of(tuple(example)))]
    # 0 if there is no leading size; `entry_struct` then raises an error that names the leaf.
    entry = entry_struct(
        example, shapes[0][0] // num_replicas if shapes and shapes[0] else 0, num_replicas
    )
    # Replicas along an automatic axis compute one microbatch together.
    size = jax.tree.leaves(entry)[0].shape[0] // mesh.shape["data"]
    microbatch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), entry)

    def traced(module: PipelineModule) -> Job:
        trace = module.trace(microbatch.inputs, microbatch.side, mesh.abstract_mesh)
        check_collections(module.layers, trace)
        made = optimizer_for(optimizer, trace, config)
        check_sharded(made, trace, module.num_stages)
        counted = Counted(module, trace, microbatch.labels)
        # By name, so that the decision about the vocabulary is the same on every machine.
        hardware = reference_hardware(mesh)
        return Job(
            module,
            mesh,
            trace,
            entry,
            microbatch,
            counted,
            config,
            num_microbatches,
            made,
            hardware,
        )

    wanted = config.pipeline.split_vocabulary
    if wanted is True:
        return traced(split_vocabulary(module))
    whole = traced(module)
    is_open = (
        module.num_stages > 1 and module.loss_fn is not None and not any(whole.trace.stage_dims)
    )
    if wanted != "auto" or not is_open:
        return whole.with_split(False)
    return _split_if_shorter(whole, traced)


def _split_if_shorter(whole: Job, traced: Callable[[PipelineModule], Job]) -> Job:
    """Split the vocabulary over the stages if layers and loss allow it and it pays clearly."""
    labels = whole.microbatch.labels
    # A split layer's weights can be divided only over the stages.
    specs = [*whole.trace.param_specs[0].values(), *whole.trace.param_specs[-1].values()]
    if any(axis not in (None, FSDP, (FSDP,)) for spec in specs for axis in spec):
        return whole.with_split(False)
    try:
        split = traced(split_vocabulary(whole.module))
        logits = whole.trace.boundaries[-1]
        if not isinstance(logits, jax.ShapeDtypeStruct):
            raise LayerError("the last layer must return only logits, but returns more.")
        local = jax.ShapeDtypeStruct(
            (*logits.shape[:-1], logits.shape[-1] // whole.module.num_stages), logits.dtype
        )
        split.trace.on_mesh(lambda: check_split_loss(split.module, local, logits, labels))
    except (LayerError, ConfigError) as error:
        return whole.with_split(False, f"The vocabulary is not split over the stages: {error}")
    if whole.config.pipeline.overlap_vocabulary is True:  # only possible with a split vocabulary
        return split.with_split(True)
    try:
        choice = choose_split(whole, split)
    except JaxpipeError as error:
        return whole.with_split(False, f"The vocabulary is not split over the stages: {error}")
    verb = "are split" if choice.pays else "are not split"
    note = (
        f"the first and last layers and the loss {verb} over the stages "
        f"(pipeline.split_vocabulary): {choice.reason}"
    )
    return split.with_split(True, note) if choice.pays else whole.with_split(False, note)
