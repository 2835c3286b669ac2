"""A job: a model traced on a mesh, before the plan of its pipeline is made."""

import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxpipe.config import TrainConfig
from jaxpipe.data import Batch
from jaxpipe.distributed.topology import num_batch_shards
from jaxpipe.layers import ModelTrace, PipelineModule
from jaxpipe.schedules.partition import Profile

from ._calibrate import reference_hardware
from ._costs import Counted
from ._hardware import Hardware
from ._memory import bytes_per_param, optimizer_share


@dataclass(frozen=True)
class Job:
    """A model on a mesh, and its shapes. `dataclasses.replace` makes other choices for it.

    Attributes:
        module: The model, with its ends split over the stages if `config` requests it.
        mesh: The devices, with the axis `fsdp` into which ZeRO 2 and 3 convert `data`.
        trace: Shapes and programs of the layers, for one microbatch.
        entry: Shapes of one microbatch of all replicas.
        microbatch: Shapes of one microbatch as layers see it, at one index along `data`.
        counted: The layers, which are counted when their costs are needed.
        config: The configuration, with `pipeline.split_vocabulary` decided.
        num_microbatches: Microbatches per step.
        optimizer: The optimiser, made for this model.
        hardware: The type of device that candidates are compared on.
        split_note: The decision about the vocabulary and its reason, as a sentence. Empty if there
            was nothing to decide.
        limit_bytes: Bytes that candidates may use on each device; None if there is no limit.
        measured: Costs of the layers, if they are measured.
    """

    module: PipelineModule
    mesh: Mesh
    trace: ModelTrace
    entry: Batch
    microbatch: Batch
    counted: Counted
    config: TrainConfig
    num_microbatches: int
    optimizer: optax.GradientTransformation
    hardware: Hardware
    split_note: str = ""
    limit_bytes: float | None = None
    measured: Profile | None = None

    @property
    def num_replicas(self) -> int:
        """Number of replicas: the product of the axes `data` and `fsdp`."""
        return num_batch_shards(self.mesh)

    @property
    def microbatch_size(self) -> int:
        """Samples per microbatch on one replica."""
        return jax.tree.leaves(self.entry)[0].shape[0] // self.num_replicas

    @property
    def samples(self) -> int:
        """Samples per step."""
        return self.microbatch_size * self.num_replicas * self.num_microbatches

    @property
    def tokens(self) -> int | None:
        """Tokens per step, if the inputs are integers `[samples, tokens]`."""
        first, *_ = jax.tree.leaves(self.trace.boundaries[0])
        if not jnp.issubdtype(first.dtype, jnp.integer) or first.ndim != 2:
            return None
        return self.samples * first.shape[1]

    @functools.cached_property
    def costs(self) -> Profile:
        """Costs of the layers."""
        return self.measured or self.counted.costs(self.hardware)

    @functools.cached_property
    def cut_costs(self) -> Profile:
        """Costs on which the cut is based, the same as for a named schedule."""
        return self.measured or self.counted.costs(reference_hardware(self.mesh))

    @functools.cached_property
    def optimizer_share(self) -> float:
        """Bytes of optimiser state for each byte of master parameters."""
        return optimizer_share(self.optimizer, self.trace, self.module.compute_dtype)

    @functools.cached_property
    def bytes_per_param(self) -> float:
        """Bytes of a parameter, its gradient and its optimiser state."""
        return bytes_per_param(self.module, self.trace, self.config, self.optimizer)

    def with_split(self, is_split: bool, note: str = "") -> "Job":
        """Return the same job with the decision about the vocabulary."""
        section = dataclasses.replace(self.config.pipeline, split_vocabulary=is_split)
        return dataclasses.replace(
            self, config=dataclasses.replace(self.config, pipeline=section), split_note=note
        )
