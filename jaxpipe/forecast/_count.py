"""One candidate's memory and step, from the figures of its layers."""

import dataclasses
import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax

from jaxpipe.config import TrainConfig
from jaxpipe.executor import Plan
from jaxpipe.layers import num_bytes
from jaxpipe.partition import cut_stages
from jaxpipe.pipeline import Traced
from jaxpipe.planner import plan_cut
from jaxpipe.schedules import PipeSchedule, ShortSteps, TickProgram
from jaxpipe.state import ModelParams, find_vocab_layers
from jaxpipe.topology import FSDP, stages_cross_hosts

from ._hardware import Hardware
from ._layers import Figures
from ._memory import DeviceMemory, layout_bytes, optimizer_share, ring_bytes, working_bytes
from ._result import Forecast, StageForecast
from ._roofline import Time, bytes_s, collective_s
from ._step import PartTime, Span, Wire, span_of


@dataclass(frozen=True)
class Job:
    """A model on a mesh of some hardware.

    Attributes:
        traced: The model, its shapes and its mesh.
        hardware: The devices.
        config: Settings.
        optimizer: The optimiser.
        num_microbatches: Microbatches of a step.
        samples: Samples of a step.
        tokens: Tokens of a step; None where inputs are no tokens.
    """

    traced: Traced
    hardware: Hardware
    config: TrainConfig
    optimizer: optax.GradientTransformation
    num_microbatches: int
    samples: int
    tokens: int | None


class Candidate:
    """A cut of a job and its recompute, of which several schedules can be counted.

    Its layers come with this recompute; `interval` is the layers of a recomputed group, `partition` the cut's name.
    """

    def __init__(
        self,
        job: Job,
        figures: Figures,
        signatures: Sequence[Hashable],
        interval: int,
        partition: str,
        boundaries: Sequence[int],
    ) -> None:
        self._job, self._traced, self._figures, self._interval = job, job.traced, figures, interval
        self._signatures, self._partition, self._boundaries = signatures, partition, tuple(boundaries)
        cuts = cut_stages(signatures, boundaries)
        self._vocab, self._cuts = find_vocab_layers(
            self._traced.module.layers, self._traced.trace, cuts, self._traced.module.num_stages
        )

    def forecast(self, name: str, schedule: type[PipeSchedule]) -> Forecast:
        """Count one schedule."""
        job = self._job
        steps = ShortSteps.of(schedule, job.num_microbatches, self._traced.module.num_stages)
        plan = self._plan(schedule, steps.long)
        program, params = plan.program, self._params(plan)
        memory = self._memory(plan, params)
        parts, wire = self._part_times(program, params), self._wire(plan, params)
        branch_s = job.hardware.branch_s
        span = span_of(program, parts, wire, branch_s, skips=plan.skips)
        if steps.rounds:
            shorter = self._plan(schedule, steps.short).program
            less = span_of(shorter, parts, wire, branch_s, skips=plan.skips)
            pairs = zip(dataclasses.astuple(span), dataclasses.astuple(less), strict=True)
            total, work, exposed, num_ticks = itertools.starmap(steps.extended, pairs)
            span = Span(total, work, exposed, round(num_ticks))
        outside_s = self._outside_s(params)
        step_s = span.total + outside_s
        flops = 3 * sum(each.forward.flops for each in self._figures.layers) + self._figures.loss.flops
        flops *= math.prod(size for size, _ in self._figures.axes.values())
        flops *= job.num_microbatches * self._traced.mesh.shape["data"]
        return Forecast(
            schedule=name,
            num_chunks=program.num_chunks,
            partition=self._partition,
            boundaries=self._boundaries,
            recompute=self._interval,
            memory=memory,
            fits=memory.total <= job.hardware.usable_bytes,
            step_s=step_s,
            ticks_s=span.total,
            outside_s=outside_s,
            bubble=1 - span.work / span.total if span.total else 0.0,
            exposed_s=span.exposed,
            num_ticks=span.num_ticks,
            samples_per_s=job.samples / step_s,
            tokens_per_s=None if job.tokens is None else job.tokens / step_s,
            mfu=flops / self._traced.mesh.devices.size / job.hardware.flops_per_s / step_s,
            stages=self._stages(program, parts),
        )

    def _plan(self, schedule: type[PipeSchedule], num_microbatches: int) -> Plan:
        """The plan of the pipeline with this cut and a schedule, for so many microbatches."""
        job, traced = self._job, self._traced
        # The class has chunks and pending weight gradients as asked.
        section = dataclasses.replace(
            job.config.pipeline, schedule=schedule, num_chunks="auto", max_pending_weights="auto"
        )
        return plan_cut(
            traced.module,
            traced.trace,
            traced.mesh,
            num_microbatches,
            job.config,
            section,
            self._signatures,
            self._boundaries,
        )

    def _params(self, plan: Plan) -> ModelParams:
        job = self._job
        return ModelParams(
            self._traced.trace,
            self._cuts,
            plan.program.placement,
            self._vocab,
            dtype=job.traced.module.compute_dtype,
            grad_dtype=job.config.data_types.grad_accum_dtype,
            gather=plan.config.pipeline.gather_weights == "step",
        )

    @property
    def _zero(self) -> int:
        """Replicas over which masters are divided."""
        return self._traced.mesh.shape["data"] if self._job.config.zero_optimization.stage else 1

    def _memory(self, plan: Plan, params: ModelParams) -> DeviceMemory:
        job, trace, program = self._job, self._traced.trace, plan.program
        mesh, gathers = trace.mesh, plan.config.pipeline.gather_weights
        moments = layout_bytes(params.master_layout.cast(frozen=False), mesh) * optimizer_share(job.optimizer, params)
        masters = (layout_bytes(params.master_layout, mesh) + moments) / self._zero
        weights = layout_bytes(params.layout, mesh)
        if self._traced.module.compute_dtype is None and self._zero == 1 and gathers != "step":
            weights = 0.0  # layers compute with the masters themselves
        trunk = self._cuts[0].trunk
        working = working_bytes(self._figures, trace, params, self._vocab, trunk, self._interval, gathers)
        before = max((self._ring(cut.prologue) for cut in self._cuts), default=0.0)
        pending = sum(self._figures.layers[i].pending_bytes for i in trunk)
        is_hosted = job.config.pipeline.offload_activations
        return DeviceMemory(
            weights=weights,
            masters=masters,
            gradient_sums=layout_bytes(params.grad_layout, mesh),
            residuals=0.0 if is_hosted else program.residual_slots * (self._ring(trunk) + before),
            pending=program.depth.pending * pending,
            temporaries=working.most + (pending if program.depth.pending else 0.0),
        )

    def _ring(self, layers: range) -> float:
        return ring_bytes(self._figures, layers, self._interval)

    def _part_times(self, program: TickProgram, params: ModelParams) -> list[PartTime]:
        hardware, layers, mesh = self._job.hardware, self._figures.layers, self._traced.trace.mesh
        num_chunks = program.num_chunks
        trunk_names = set(params.trunk_names)
        struct, spec = params.at_rest.struct().stacked, params.at_rest.spec().stacked
        trunk_params = sum(
            math.prod(_shard(mesh, spec[name], struct[name].shape)) for name in struct if name in trunk_names
        )
        itemsize = max((struct[name].dtype.itemsize for name in struct), default=4)
        # A gradient is read, and a sum of float32 read and written.
        sums_s = bytes_s(hardware, (itemsize + 4 + 4) * trunk_params / num_chunks)
        found: list[PartTime] = []
        for cut in self._cuts:
            forward, backward, gives, weight = (
                _sum(getattr(layers[i], which) for i in cut.trunk)
                for which in ("forward", "backward", "input", "weight")
            )
            ring_s = bytes_s(hardware, 2 * self._ring(cut.trunk))
            pending_s = bytes_s(hardware, 2 * sum(layers[i].pending_bytes for i in cut.trunk))
            first, first_backward = (
                _sum(getattr(layers[i], which) for i in cut.prologue) for which in ("forward", "backward")
            )
            last = _sum(layers[i].forward.plus(layers[i].backward) for i in cut.epilogue)
            if cut is self._cuts[-1] and not self._vocab.last:
                last = last.plus(self._figures.loss)
            own_s = [
                bytes_s(hardware, (itemsize + 4 + 4) * self._traced.trace.num_own_params()[i])
                for i in (*cut.prologue, *cut.epilogue)
            ]
            found.append(
                PartTime(
                    forward.seconds + ring_s,
                    backward.seconds + sums_s,
                    gives.seconds + pending_s,
                    weight.seconds + sums_s,
                    first.seconds,
                    first_backward.seconds + sum(own_s[: len(cut.prologue)]),
                    last.seconds + sum(own_s[len(cut.prologue) :]),
                )
            )
        return found

    def _wire(self, plan: Plan, params: ModelParams) -> Wire:
        trace, hardware = self._traced.trace, self._job.hardware
        num_stages = self._traced.module.num_stages
        if num_stages == 1:
            return Wire(0.0)
        fsdp = trace.mesh.shape.get(FSDP, 1)
        stream = max((num_bytes(trace.boundaries[b]) for b in self._boundaries[1:-1]), default=0) / fsdp
        inside = not stages_cross_hosts(self._traced.mesh)
        ends_work = Time()
        for i in self._vocab.layers:
            one = self._figures.layers[i]
            ends_work = ends_work.plus(one.forward).plus(one.backward)
        # The embedding's sum, the trunk's output told to all, and the transpose of both. Under a tick's products lie
        # those of the first and, where losses run a tick later, of the second; but one exchange travels at a time, and
        # reductions inside layers leave no time for these.
        is_free = not self._figures.axes
        is_last_free = is_free and plan.program.delays_loss
        bare = [bool(self._vocab.first) and not is_free, bool(self._vocab.last) and not is_last_free]
        ends = 2 * sum(bare) * collective_s(hardware, "all-reduce", stream, num_stages, inside_host=inside)
        if self._vocab.last:
            ends_work = ends_work.plus(self._figures.loss)
        gather_s = 0.0
        if fsdp > 1 and plan.config.pipeline.gather_weights == "tick":
            more = layout_bytes(params.gathered, trace.mesh) - layout_bytes(params.at_rest, trace.mesh)
            size, inside_host = self._figures.axes[FSDP]
            gather_s = collective_s(hardware, "all-gather", more * size / (size - 1), size, inside_host=inside_host)
        hop = collective_s(hardware, "collective-permute", stream, num_stages, inside_host=inside)
        # Gathers travel under products: what is longer than these shows.
        longest = max(_sum(self._figures.layers[i].forward for i in cut.trunk).seconds for cut in self._cuts)
        return Wire(hop, ends, ends_work.seconds / num_stages, max(0.0, gather_s - longest))

    def _outside_s(self, params: ModelParams) -> float:
        """Casts before the ticks; reductions, norm and update after them."""
        job, mesh, hardware = self._job, self._traced.trace.mesh, self._job.hardware
        weights, sums = layout_bytes(params.layout, mesh), layout_bytes(params.grad_layout, mesh)
        masters = layout_bytes(params.master_layout, mesh) / self._zero
        moments = masters * optimizer_share(job.optimizer, params)
        # Masters are read for the cast; sums for the norm and for the update, which reads and writes the others.
        seconds = bytes_s(hardware, masters + weights + 2 * sums + 2 * (masters + moments))
        replicas = self._traced.mesh.shape["data"]
        if replicas > 1:
            inside = replicas * math.prod(size for size, _ in self._figures.axes.values()) <= hardware.devices_per_host
            kinds = [("all-reduce", sums)] if self._zero == 1 else [("reduce-scatter", sums), ("all-gather", weights)]
            seconds += sum(collective_s(hardware, kind, size, replicas, inside_host=inside) for kind, size in kinds)
        return seconds

    def _stages(self, program: TickProgram, parts: Sequence[PartTime]) -> tuple[StageForecast, ...]:
        bounds, virtual, num_params = self._boundaries, program.placement.virtual, self._traced.trace.num_params()
        found: list[StageForecast] = []
        for stage in range(program.num_stages):
            mine = [v for v in virtual[stage] if v >= 0]
            found.append(
                StageForecast(
                    parts=tuple((bounds[v], bounds[v + 1]) for v in mine),
                    num_params=sum(sum(num_params[bounds[v] : bounds[v + 1]]) for v in mine),
                    in_flight=program.in_flight(stage),
                    forward_s=sum(parts[v].forward + parts[v].first for v in mine),
                    backward_s=sum(parts[v].backward + parts[v].first_backward + parts[v].last for v in mine),
                )
            )
        return tuple(found)


def _sum(times: Any) -> Time:
    total = Time()
    for each in times:
        total = total.plus(each)
    return total


def _shard(mesh: Any, spec: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    return jax.sharding.NamedSharding(mesh, spec).shard_shape(shape)
