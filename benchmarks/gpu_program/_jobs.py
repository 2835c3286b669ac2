"""The training jobs that are compiled, for GPUs that are not there."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh

import jaxpipe
from jaxpipe import models
from jaxpipe.config import BF16Section, PipelineConfig, TrainConfig, ZeroSection
from jaxpipe.forecast import HARDWARE
from jaxpipe.tools.plan import compilable_devices

from ._models import HEAD_DIM, GPT2Block, LlamaBlock, TensorParallelBlock, language_model


@dataclass(frozen=True)
class Job:
    """A model, a mesh and a schedule.

    Attributes:
        schedule: Name of the schedule.
        num_chunks: Chunks a stage; None: the schedule's own number.
        blocks: Blocks of the model.
        dim: Width.
        hidden: Width of the feed-forward layer; 0: a block of GPT-2.
        kv_heads: Heads of keys and values.
        time: Tokens of a sample.
        samples: Samples of a microbatch on one replica.
        vocab: Tokens there are.
        split_vocab: Whether embedding and head are divided over the stages.
        overlap_vocab: Whether the head runs a tick after the forward whose output it takes.
        stages: Stages.
        data: Replicas.
        model: Places that weights are divided over.
        across: The axis that crosses hosts, `"stage"` or `"data"`.
        zero_stage: ZeRO's stage over the replicas.
        num_microbatches: Microbatches of a step.
        interval: Blocks of a recomputed group; 0: nothing is recomputed.
        attention: Implementation of attention.
        kind: Kind of the devices.
    """

    schedule: str
    num_chunks: int | None = None
    blocks: int = 32
    dim: int = 4096
    hidden: int = 11008
    kv_heads: int = 8
    time: int = 4096
    samples: int = 1
    vocab: int = 32768
    split_vocab: bool = False
    overlap_vocab: bool | Literal["auto"] = "auto"
    stages: int = 8
    data: int = 1
    model: int = 1
    across: str = "stage"
    zero_stage: int = 0
    num_microbatches: int = 32
    interval: int = 0
    attention: Any = "cudnn"
    kind: str = "h200"

    @property
    def num_devices(self) -> int:
        """Devices."""
        return self.stages * self.data * self.model

    @property
    def hosts(self) -> tuple[int, ...]:
        """The host of each device of the program."""
        return tuple(
            HARDWARE[self.kind].host_of(int(place))
            for place in _places(self.stages, self.data, self.model, self.across)
        )

    @property
    def block(self) -> nn.Module:
        """The layer that is repeated."""
        if not self.hidden:
            return GPT2Block(self.attention)
        kind = TensorParallelBlock if self.model > 1 else LlamaBlock
        return kind(self.hidden, self.kv_heads, self.attention)

    @property
    def flops(self) -> float:
        """Operations of a step.

        6 for each weight of a product and token, and 12 L T D for attention's square.
        """
        each = 12 * self.dim**2
        if self.hidden:
            each = (
                2 * self.dim**2
                + 2 * self.dim * self.kv_heads * HEAD_DIM
                + 3 * self.dim * self.hidden
            )
        weights = self.blocks * each + self.vocab * self.dim
        tokens = self.num_microbatches * self.samples * self.data * self.time
        return tokens * (6 * weights + 12 * self.blocks * self.time * self.dim)

    @property
    def module(self) -> jaxpipe.PipelineModule:
        """The model."""
        return language_model(
            self.block,
            self.blocks,
            self.stages,
            vocab=self.vocab,
            dim=self.dim,
            split_vocab=self.split_vocab,
            interval=self.interval,
        )

    @property
    def example(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """A microbatch of all replicas."""
        tokens = jax.ShapeDtypeStruct((self.samples * self.data, self.time), jnp.int32)
        return tokens, tokens

    @property
    def config(self) -> TrainConfig:
        """Its settings."""
        chunks: Any = self.num_chunks or "auto"
        return TrainConfig(
            train_micro_batch_size_per_gpu=self.samples,
            gradient_accumulation_steps=self.num_microbatches,
            pipeline=PipelineConfig(
                schedule=self.schedule, num_chunks=chunks, overlap_vocabulary=self.overlap_vocab
            ),
            gradient_clipping=1.0,
            bf16=BF16Section(enabled=True),
            zero_optimization=ZeroSection(stage=self.zero_stage),
        )

    @property
    def mesh(self) -> Mesh:
        """Devices that are not there."""
        return self._mesh_of(_compilable(self.kind, self.num_devices))

    def _mesh_of(self, devices: Sequence[Any]) -> Mesh:
        shape = {"stage": self.stages, "data": self.data}
        shape |= {"model": self.model} if self.model > 1 else {}
        places = _places(self.stages, self.data, self.model, self.across)
        return Mesh(
            np.array(devices)[places].reshape(*shape.values()),
            tuple(shape),
            axis_types=(AxisType.Auto,) * len(shape),
        )

    def pipeline(self, devices: Sequence[Any] | None = None) -> jaxpipe.Pipeline:
        """Cut the model for these devices, or for those that it is compiled for."""
        return jaxpipe.Pipeline(
            self.module,
            optax.adamw(1e-4),
            self.mesh if devices is None else self._mesh_of(devices),
            self.example,
            self.num_microbatches,
            self.config,
        )

    def plan(self, **kwargs: Any) -> jaxpipe.forecast.StepPlan:
        """Count it, without any GPU or plugin.

        Its own schedule, cut and recompute where nothing else is asked.
        """
        own = {"schedules": [self.schedule], "partition": ["trunk"], "recompute": [self.interval]}
        if self.num_chunks:
            own["num_chunks"] = [self.num_chunks]
        return jaxpipe.plan(
            self.module,
            self.config,
            self.example,
            f"{self.kind}:{self.num_devices}",
            optimizer=optax.adamw(1e-4),
            axes={"model": self.model} if self.model > 1 else None,
            alternatives=False,
            **{**own, **kwargs},
        )


@dataclass(frozen=True)
class FamilyJob(Job):
    """A model of `jaxpipe.models.llama`, as users make it.

    Its layers choose their attention themselves.
    """

    @property
    def family(self) -> models.LlamaConfig:
        """Sizes of the model."""
        return models.LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.dim,
            intermediate_size=self.hidden,
            num_hidden_layers=self.blocks,
            num_attention_heads=self.dim // HEAD_DIM,
            num_key_value_heads=self.kv_heads,
        )

    @property
    def block(self) -> nn.Module:
        """The layer that is repeated."""
        return models.LlamaBlock(self.family, self.family.kind(0))

    @property
    def module(self) -> jaxpipe.PipelineModule:
        """The model."""
        return jaxpipe.PipelineModule(
            models.llama(self.family),
            self.stages,
            loss_fn=jaxpipe.losses.cross_entropy,
            partition_method="trunk",
            compute_dtype=jnp.bfloat16,
            activation_checkpoint_interval=self.interval,
        )

    @property
    def config(self) -> TrainConfig:
        """Its settings; the vocabulary is split by one of them."""
        config = super().config
        return replace(config, pipeline=replace(config.pipeline, split_vocabulary=self.split_vocab))


@functools.cache
def _compilable(kind: str, count: int) -> Sequence[Any]:
    return compilable_devices(HARDWARE[kind], count)


def _places(stages: int, data: int, model: int, across: str) -> np.ndarray:
    """Where in a row of hosts the device at each place of the mesh is.

    The axis that crosses hosts is the slowest.
    """
    places = np.arange(stages * data * model)
    return (
        places
        if across == "stage"
        else places.reshape(data, stages, model).swapaxes(0, 1).reshape(-1)
    )


LLAMA_2_7B: dict[str, Any] = {"kv_heads": 32, "vocab": 32000}
"""What Llama 2 of 7 billion parameters has unlike the other jobs."""

JOBS = {
    "1f1b": Job("1f1b"),
    "interleaved": Job("interleaved", 2),
    "1f1b-v": Job("1f1b-v", 2),
    "zero-bubble": Job("zero-bubble", 1),
    "zero-bubble-2": Job("zero-bubble", 2),
    "zero-bubble-v": Job("zero-bubble-v"),
    "zero-bubble-h1": Job("zero-bubble-h1"),
    "1f1b-128k": Job("1f1b", vocab=131072),
    "1f1b-128k-split": Job("1f1b", vocab=131072, split_vocab=True),
    "1f1b-split": Job("1f1b", split_vocab=True),
    "zero-bubble-split": Job("zero-bubble", 1, split_vocab=True),
    "interleaved-split": Job("interleaved", 2, split_vocab=True),
    "zero-bubble-v-split": Job("zero-bubble-v", split_vocab=True),
    "1f1b-64": Job("1f1b", data=8, zero_stage=1),
    "1f1b-64-across": Job("1f1b", data=8, zero_stage=1, across="data"),
    "1f1b-recompute": Job("1f1b", interval=1),
    # Widths of a model of 70 billion parameters, a fifth of its 80 blocks.
    "70b-64": Job("1f1b", blocks=16, dim=8192, hidden=28672, model=8, split_vocab=True, interval=1),
    "llama-7b": FamilyJob("1f1b", **LLAMA_2_7B),
    "llama-7b-split": FamilyJob("1f1b", **LLAMA_2_7B, split_vocab=True),
    "llama-7b-64": FamilyJob("1f1b", **LLAMA_2_7B, data=8, zero_stage=1),
    "llama-7b-64-split": FamilyJob("1f1b", **LLAMA_2_7B, data=8, zero_stage=1, split_vocab=True),
    # Sixteen of its 48 blocks.
    "gpt2-xl": Job(
        "1f1b", blocks=16, dim=1600, hidden=0, time=1024, samples=8, vocab=50304, stages=4
    ),
}
"""The jobs, by name."""

_TINY: dict[str, Any] = {
    "blocks": 2,
    "dim": 128,
    "hidden": 256,
    "kv_heads": 1,
    "time": 128,
    "vocab": 512,
    "stages": 2,
    "num_microbatches": 2,
    "attention": "xla",
}
SMOKE = {"1f1b": Job("1f1b", **_TINY), "llama": FamilyJob("1f1b", **_TINY, split_vocab=True)}
"""Tiny ones."""
