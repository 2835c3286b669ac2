"""A request for a plan, and the job that it describes."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

from jaxpipe._util.typing import PyTree
from jaxpipe.config import Collector, TrainConfig, load_config, unless_auto
from jaxpipe.core.pipeline import ConfigLike, Pipeline, entry_struct, prepare, trace_model
from jaxpipe.core.planner import (
    Forecast,
    Hardware,
    Job,
    SearchSpace,
    absent_devices,
    candidates,
    ranked,
    usable_bytes,
    with_schedule,
)
from jaxpipe.distributed.topology import (
    MANUAL_AXES,
    ProcessTopology,
    make_pipeline_mesh,
    num_batch_shards,
    topology_for,
)
from jaxpipe.errors import TopologyError
from jaxpipe.layers import PipelineModule
from jaxpipe.layers.recompute import RecomputeSettings, settings_for, use_settings
from jaxpipe.optim import check_leafwise, trace_optimizer

from ._compile import CompiledStep, compilable_devices, compile_step


class Prepared(NamedTuple):
    """A job that has been checked and traced on absent devices.

    Attributes:
        config: The configuration as it was read.
        module: The model with the settings of the configuration.
        mesh: The mesh, before ZeRO 2 and 3 turn `data` into `fsdp`.
        job: The traced model, with the decision about splitting the vocabulary.
        of_one: Shapes of an entry for one replica.
        recompute: Settings of the section `activation_checkpointing`.
    """

    config: TrainConfig
    module: PipelineModule
    mesh: Mesh
    job: Job
    of_one: PyTree
    recompute: RecomputeSettings


@dataclass(frozen=True)
class PlanRequest:
    """The arguments of `plan` that describe a job. `dataclasses.replace` changes some of them."""

    model: PipelineModule
    config: ConfigLike
    example_batch: Sequence[PyTree]
    hardware: Hardware
    num_devices: int
    optimizer: optax.GradientTransformation | None
    axes: Mapping[str, int]

    @functools.cached_property
    def prepared(self) -> Prepared:
        """The job, checked and traced."""
        errors = Collector()
        config = load_config(self.config, errors)
        mesh = self._mesh(absent_devices(self.hardware, self.num_devices))
        is_open = self.optimizer is None and config.optimizer is None
        optimizer = optax.adamw(1e-4) if is_open else self.optimizer
        module, chosen, mesh, sizes = prepare(self.model, config, optimizer, None, mesh, errors)
        size = sizes.train_micro_batch_size_per_gpu
        replicas = num_batch_shards(mesh)
        # An example of one replica is enough, whatever the number of devices.
        leaves = jax.tree.leaves(self.example_batch)
        is_of_one = all(getattr(leaf, "shape", ())[:1] == (size,) for leaf in leaves)
        entry = entry_struct(self.example_batch, size, 1 if is_of_one else replicas)
        of_one, entry = (
            jax.tree.map(lambda x, n=n: jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype), entry)
            for n in (size, size * replicas)
        )
        assert chosen.transformation is not None
        num_microbatches = sizes.gradient_accumulation_steps
        recompute = settings_for(config, mesh)
        with use_settings(recompute, mesh):
            job = trace_model(module, mesh, entry, config, num_microbatches, chosen.transformation)
            trace = job.trace
            # Evaluated only for its errors: without labels the loss is not counted.
            outputs = trace.boundaries[-1]
            labels = job.microbatch.labels
            trace.on_mesh(lambda: jax.eval_shape(job.module.loss_terms, outputs, labels))
        if self.optimizer is not None and module.num_stages > 1:
            check_leafwise(trace_optimizer(self.optimizer, trace.tree()))
        return Prepared(config, module, mesh, job, of_one, recompute)

    def _mesh(self, devices: Sequence[Any]) -> Mesh:
        topology = _topology(self.model, self.num_devices, self.axes)
        return make_pipeline_mesh(topology, devices)

    @property
    def limit_bytes(self) -> float:
        """Bytes that training may use on a device."""
        job = self.prepared.job
        limit = unless_auto(job.config.pipeline.memory_limit_gb)
        return usable_bytes(self.hardware, job.mesh) if limit is None else limit * 1e9

    def forecasts(self, space: SearchSpace) -> list[Forecast]:
        """Return the forecasts of all requested candidates, the best first."""
        made = self.prepared
        job = dataclasses.replace(made.job, hardware=self.hardware, limit_bytes=self.limit_bytes)
        with use_settings(made.recompute, made.mesh):
            return ranked(candidates(job, space))

    def compile(self, one: Forecast, target: str | None) -> CompiledStep:
        """Compile a candidate's step for absent devices."""
        made = self.prepared
        job = made.job
        mesh = self._mesh(compilable_devices(self.hardware, self.num_devices, target))
        section = with_schedule(job.config.pipeline, one)
        config = dataclasses.replace(job.config, pipeline=section)
        module = made.module.replace(activation_checkpoint_interval=one.recompute)
        return compile_step(
            one.label,
            one.memory.total,
            lambda: Pipeline(
                module,
                job.optimizer,
                mesh,
                job.entry,
                job.num_microbatches,
                config,
                made.recompute,
                one.boundaries,
            ),
        )


def _topology(model: PipelineModule, count: int, axes: Mapping[str, int]) -> ProcessTopology:
    for axis, size in axes.items():
        if not axis.isidentifier() or axis in (*MANUAL_AXES, "pipe") or size < 1:
            raise TopologyError(
                "axes must map axis names, except 'stage' and 'data', to positive lengths, but "
                f"got axes={dict(axes)}. Write for instance axes={{'model': 8}}; the "
                "remaining devices are replicas."
            )
    if model.given_topology is not None and axes:
        raise TopologyError(
            "axes must be left out if the model has a topology "
            f"({model.given_topology.describe()}), but got axes={dict(axes)}. Put the axes "
            "into the topology."
        )
    if not axes:
        return topology_for(model.num_stages, model.given_topology, count)
    product = model.num_stages * math.prod(axes.values())
    if count % product:
        raise TopologyError(
            f"stages and axes must divide the devices, but got num_stages={model.num_stages} and "
            f"axes={dict(axes)}, {product} together, for {count} devices. Use a multiple of "
            f"{product} devices, such as {max(1, round(count / product)) * product}."
        )
    return ProcessTopology(
        ["pipe", "data", *axes], [model.num_stages, count // product, *axes.values()]
    )
