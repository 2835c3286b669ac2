"""A model traced on a mesh, before the plan of its pipeline is made."""

import dataclasses
from dataclasses import dataclass

import jax
import optax
from jax.sharding import Mesh

from jaxpipe.config import TrainConfig
from jaxpipe.data import Batch
from jaxpipe.layers import ModelTrace, PipelineModule
from jaxpipe.topology import num_batch_shards

from ._costs import Counted


@dataclass(frozen=True)
class Traced:
    """A model, its mesh and its shapes.

    Attributes:
        module: The model, with its ends split over the stages if `config` requests it.
        mesh: The devices, with the axis `fsdp` into which ZeRO 2 and 3 convert `data`.
        trace: Shapes and programs of the layers, for one microbatch.
        entry: Shapes of one microbatch of all replicas.
        microbatch: Shapes of one microbatch as layers see it, at one index along `data`.
        counted: The layers, which are counted when their costs are needed.
        config: The configuration, with `pipeline.split_vocabulary` decided.
        optimizer: The optimiser, made for this model. The default changes nothing.
        split_note: The decision about the vocabulary and its reason, as a sentence. Empty if there
            was nothing to decide.
    """

    module: PipelineModule
    mesh: Mesh
    trace: ModelTrace
    entry: Batch
    microbatch: Batch
    counted: Counted
    config: TrainConfig
    optimizer: optax.GradientTransformation = optax.identity()
    split_note: str = ""

    @property
    def num_replicas(self) -> int:
        """Number of replicas: the product of the axes `data` and `fsdp`."""
        return num_batch_shards(self.mesh)

    def with_split(self, is_split: bool, note: str = "") -> "Traced":
        """Return the same model with the decision about the vocabulary."""
        section = dataclasses.replace(self.config.pipeline, split_vocabulary=is_split)
        return dataclasses.replace(
            self, config=dataclasses.replace(self.config, pipeline=section), split_note=note
        )

    @property
    def microbatch_size(self) -> int:
        """Samples per microbatch on one replica."""
        return jax.tree.leaves(self.entry)[0].shape[0] // self.num_replicas
