"""A model traced on a mesh: what is known of a pipeline before its plan is made."""

import dataclasses
from dataclasses import dataclass

import jax
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
        module: The model, its ends split over the stages where `config` says so.
        mesh: The devices, with the axis `fsdp` that ZeRO 2 and 3 make of `data`.
        trace: Shapes and programs of the layers, for one microbatch.
        entry: Shapes of one microbatch of all replicas.
        microbatch: Shapes of one microbatch as layers see it, that of one place along `data`.
        counted: Its layers, which are looked at when their costs are asked for.
        config: The settings, with `pipeline.split_vocabulary` decided.
        split_note: What was decided about the vocabulary and why, in a sentence; empty where
            nothing was open.
    """

    module: PipelineModule
    mesh: Mesh
    trace: ModelTrace
    entry: Batch
    microbatch: Batch
    counted: Counted
    config: TrainConfig
    split_note: str = ""

    @property
    def num_replicas(self) -> int:
        """Places along `data` and `fsdp`."""
        return num_batch_shards(self.mesh)

    def with_split(self, is_split: bool, note: str = "") -> "Traced":
        """The same, with what was decided about the vocabulary."""
        section = dataclasses.replace(self.config.pipeline, split_vocabulary=is_split)
        return dataclasses.replace(
            self, config=dataclasses.replace(self.config, pipeline=section), split_note=note
        )

    @property
    def microbatch_size(self) -> int:
        """Samples of a microbatch of one replica."""
        return jax.tree.leaves(self.entry)[0].shape[0] // self.num_replicas
