"""One candidate's memory and step time, from the costs of its layers."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import NamedSharding

from jaxpipe.core.executor import PipelinePlan, stream_bytes
from jaxpipe.core.state import ModelParams, find_vocab_layers
from jaxpipe.distributed.topology import FSDP, stages_cross_hosts
from jaxpipe.schedules import PipeSchedule, TickProgram
from jaxpipe.schedules.partition import cut_stages

from ._costs import axes_inside
from ._forecast import GIVEN, Forecast, StageForecast
from ._job import Job
from ._memory import (
    DeviceMemory,
    layout_bytes,
    ring_bytes,
    stacked_bytes,
    temporary_bytes,
)
from ._plan import plan_cut
from ._roofline import bytes_s, collective_s
from ._step import PartTime, ShortSteps, Span, Wire, span_of


class Candidate:
    """A job cut at some boundaries; it can be evaluated for several schedules."""

    def __init__(self, job: Job, boundaries: Sequence[int]) -> None:
        self._job = job
        self._trace = job.trace
        self._boundaries = tuple(boundaries)
        cuts = cut_stages(job.counted.signatures, boundaries)
        num_stages = job.module.num_stages
        self._vocab, self._cuts = find_vocab_layers(job.module.layers, job.trace, cuts, num_stages)
        self._axes = axes_inside(job.trace, job.hardware)

    def forecast(
        self, name: str, schedule: type[PipeSchedule], max_pending: int | None
    ) -> Forecast:
        """Evaluate one schedule, with at most `max_pending` pending weight gradients, if given."""
        job = self._job
        steps = ShortSteps.of(schedule, job.num_microbatches, job.module.num_stages)
        plan = self._plan(schedule, steps.long)
        program = plan.program
        params = self._params(plan)
        memory = self._memory(plan, params)
        parts = self._part_times(program, params)
        wire = self._wire(plan, params)
        branch_s = job.hardware.branch_s
        span = span_of(program, parts, wire, branch_s)
        if steps.rounds:
            shorter = self._plan(schedule, steps.short).program
            less = span_of(shorter, parts, wire, branch_s)
            pairs = zip(dataclasses.astuple(span), dataclasses.astuple(less), strict=True)
            total, work, exposed, num_ticks = itertools.starmap(steps.extended, pairs)
            span = Span(total, work, exposed, round(num_ticks))
        outside_s = self._outside_s(params)
        step_s = span.total + outside_s
        mfu, mfu_whole = (flops / step_s for flops in self._flops_over_peak())
        method = job.module.partition_method
        return Forecast(
            schedule=name,
            num_chunks=program.num_chunks,
            max_pending=max_pending,
            partition=method if isinstance(method, str) else GIVEN,
            boundaries=self._boundaries,
            recompute=job.costs.interval,
            memory=memory,
            fits=job.limit_bytes is None or memory.total <= job.limit_bytes,
            step_s=step_s,
            ticks_s=span.total,
            outside_s=outside_s,
            bubble=1 - span.work / span.total if span.total else 0.0,
            exposed_s=span.exposed,
            num_ticks=span.num_ticks,
            pending=program.depth.pending,
            samples_per_s=job.samples / step_s,
            tokens_per_s=None if job.tokens is None else job.tokens / step_s,
            mfu=mfu,
            mfu_whole=mfu_whole,
            stages=self._stages(program, parts),
        )

    def _flops_over_peak(self) -> tuple[float, float]:
        """Return the seconds of three forwards at the peak, also with attention's full square."""
        job = self._job
        every = [*job.costs.layers, job.costs.loss]
        times = 3 * math.prod(size for size, _ in self._axes.values())
        times *= job.num_microbatches * job.mesh.shape["data"]
        seconds = times / job.mesh.devices.size / job.hardware.flops_per_s
        return seconds * sum(x.flops for x in every), seconds * sum(x.whole_flops for x in every)

    def _plan(self, schedule: type[PipeSchedule], num_microbatches: int) -> PipelinePlan:
        """Return the plan of the pipeline with this cut for a schedule and some microbatches."""
        job = self._job
        # The class already has the requested chunks and pending weight gradients.
        section = dataclasses.replace(
            job.config.pipeline, schedule=schedule, num_chunks="auto", max_pending_weights="auto"
        )
        return plan_cut(
            dataclasses.replace(job, num_microbatches=num_microbatches),
            section,
            job.counted.signatures,
            self._boundaries,
        )

    def _params(self, plan: PipelinePlan) -> ModelParams:
        job = self._job
        return ModelParams(
            self._trace,
            self._cuts,
            plan.program.placement,
            self._vocab,
            dtype=job.module.compute_dtype,
            grad_dtype=job.config.data_types.grad_accum_dtype,
            gather=plan.config.pipeline.gather_weights == "step",
        )

    @property
    def _zero(self) -> int:
        """Number of replicas over which the master parameters are divided."""
        return self._job.mesh.shape["data"] if self._job.config.zero_optimization.stage else 1

    def _memory(self, plan: PipelinePlan, params: ModelParams) -> DeviceMemory:
        job = self._job
        trace = self._trace
        program = plan.program
        mesh = trace.mesh
        moments = layout_bytes(params.trained_layout, mesh) * job.optimizer_share
        masters = (layout_bytes(params.master_layout, mesh) + moments) / self._zero
        weights = layout_bytes(params.layout, mesh)
        section = plan.config.pipeline
        is_gathered = section.gather_weights == "step"
        if self._job.module.compute_dtype is None and self._zero == 1 and not is_gathered:
            weights = 0.0  # layers compute with the master parameters themselves
        trunk = self._cuts[0].trunk
        temporaries = temporary_bytes(job.costs, trace, params, self._vocab, trunk, section)
        before = max((self._ring(cut.prologue) for cut in self._cuts), default=0.0)
        pending = sum(self._job.costs.layers[i].pending_bytes for i in trunk)
        is_hosted = job.config.pipeline.offload_activations
        return DeviceMemory(
            weights=weights,
            masters=masters,
            gradient_sums=layout_bytes(params.grad_layout, mesh),
            residuals=0.0 if is_hosted else program.residual_slots * (self._ring(trunk) + before),
            pending=program.depth.pending * pending,
            temporaries=temporaries + (pending if program.depth.pending else 0.0),
        )

    def _ring(self, layers: range) -> int:
        return ring_bytes(self._job.costs, layers)[0]

    def _part_times(self, program: TickProgram, params: ModelParams) -> list[PartTime]:
        hardware = self._job.hardware
        layers = self._job.costs.layers
        mesh = self._trace.mesh
        num_chunks = program.num_chunks
        trunk_names = params.stages[0].trunk
        struct = params.at_rest.struct().stacked
        spec = params.at_rest.spec().stacked
        sizes = {name: math.prod(_shard(mesh, spec[name], struct[name].shape)) for name in struct}
        trunk_params = sum(size for name, size in sizes.items() if name in trunk_names)
        itemsize = max((struct[name].dtype.itemsize for name in struct), default=4)
        # A gradient is read, and a float32 sum is read and written.
        sums_s = bytes_s(hardware, (itemsize + 4 + 4) * trunk_params / num_chunks)
        # Outside the trunk a sum is read and written. Zeros, and usually gradients, are never in
        # memory.
        packed = layout_bytes(params.grad_layout, mesh) - stacked_bytes(params.grad_layout, mesh)
        off_trunk_s = bytes_s(hardware, 2 * packed)
        has_first = any(cut.prologue for cut in self._cuts)
        has_last = any(cut.epilogue for cut in self._cuts)
        found: list[PartTime] = []
        loss = self._job.costs.loss
        for cut in self._cuts:
            trunk, first, last = (
                [layers[i] for i in some] for some in (cut.trunk, cut.prologue, cut.epilogue)
            )
            ring_s = bytes_s(hardware, 2 * self._ring(cut.trunk))
            pending_s = bytes_s(hardware, 2 * sum(x.pending_bytes for x in trunk))
            has_loss = cut is self._cuts[-1] and not self._vocab.last
            found.append(
                PartTime(
                    forward=sum(x.forward_s for x in trunk) + ring_s,
                    backward=sum(x.backward_s for x in trunk) + sums_s,
                    input=sum(x.input_s for x in trunk) + pending_s,
                    weight=sum(x.weight_s for x in trunk) + sums_s,
                    first=sum(x.forward_s for x in first),
                    first_backward=sum(x.backward_s for x in first),
                    last=sum(x.both_s for x in last) + has_loss * loss.both_s,
                    ring=ring_s,
                    first_sums=has_first * off_trunk_s,
                    last_sums=has_last * off_trunk_s,
                )
            )
        return found

    def _wire(self, plan: PipelinePlan, params: ModelParams) -> Wire:
        trace = self._trace
        hardware = self._job.hardware
        num_stages = self._job.module.num_stages
        if num_stages == 1:
            return Wire(0.0)
        fsdp = trace.mesh.shape.get(FSDP, 1)
        cuts = [trace.boundaries[b] for b in self._boundaries[1:-1]]
        stream = max((stream_bytes(x, trace) for x in cuts), default=0)
        inside = not stages_cross_hosts(self._job.mesh)
        layers = self._job.costs.layers
        loss = self._job.costs.loss
        ends_work_s = sum(layers[i].both_s for i in self._vocab.layers) + loss.both_s * bool(
            self._vocab.last
        )
        # The embedding's sum, the broadcast of the trunk's output, and the transpose of both. A
        # tick's products overlap the exchanges of the first layers and, if losses run a tick later,
        # of the last layers. But only one exchange runs at a time, and reductions inside layers
        # leave no time for them.
        is_free = not self._axes
        is_last_free = is_free and plan.program.delays_loss
        bare = [
            bool(self._vocab.first) and not is_free,
            bool(self._vocab.last) and not is_last_free,
        ]
        ends = (
            2
            * sum(bare)
            * collective_s(hardware, "all-reduce", stream, num_stages, inside_host=inside)
        )
        gather_s = 0.0
        if fsdp > 1 and plan.config.pipeline.gather_weights == "tick":
            more = layout_bytes(params.gathered, trace.mesh) - layout_bytes(
                params.at_rest, trace.mesh
            )
            size, inside_host = self._axes[FSDP]
            gather_s = collective_s(
                hardware, "all-gather", more * size / (size - 1), size, inside_host=inside_host
            )
        hop = collective_s(hardware, "collective-permute", stream, num_stages, inside_host=inside)
        # Products overlap gathers; only the time by which a gather is longer is exposed.
        longest = max(sum(layers[i].forward_s for i in cut.trunk) for cut in self._cuts)
        return Wire(
            hop,
            ends,
            ends_work_s / num_stages,
            max(0.0, gather_s - longest),
            meets_for_loss=bool(self._vocab.last),
        )

    def _outside_s(self, params: ModelParams) -> float:
        """Return the seconds of casts before the ticks and of reductions and update after them."""
        job = self._job
        mesh = self._trace.mesh
        hardware = self._job.hardware
        weights = layout_bytes(params.layout, mesh)
        sums = layout_bytes(params.grad_layout, mesh)
        masters = layout_bytes(params.master_layout, mesh) / self._zero
        moments = masters * job.optimizer_share
        # The cast reads the master parameters. The norm and the update read the sums, and the
        # update reads and writes the master parameters and the moments.
        seconds = bytes_s(hardware, masters + weights + 2 * sums + 2 * (masters + moments))
        replicas = self._job.mesh.shape["data"]
        if replicas > 1:
            inside = (
                replicas * math.prod(size for size, _ in self._axes.values())
                <= hardware.devices_per_host
            )
            kinds = (
                [("all-reduce", sums)]
                if self._zero == 1
                else [("reduce-scatter", sums), ("all-gather", weights)]
            )
            seconds += sum(
                collective_s(hardware, kind, size, replicas, inside_host=inside)
                for kind, size in kinds
            )
        return seconds

    def _stages(self, program: TickProgram, parts: Sequence[PartTime]) -> tuple[StageForecast, ...]:
        bounds = self._boundaries
        virtual = program.placement.virtual
        num_params = self._trace.num_params()
        found: list[StageForecast] = []
        for stage in range(program.num_stages):
            mine = [v for v in virtual[stage] if v >= 0]
            found.append(
                StageForecast(
                    parts=tuple((bounds[v], bounds[v + 1]) for v in mine),
                    num_params=sum(sum(num_params[bounds[v] : bounds[v + 1]]) for v in mine),
                    in_flight=program.in_flight(stage),
                    forward_s=sum(parts[v].forward + parts[v].first for v in mine),
                    backward_s=sum(
                        parts[v].backward + parts[v].first_backward + parts[v].last for v in mine
                    ),
                )
            )
        return tuple(found)


def _shard(mesh: Any, spec: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    return NamedSharding(mesh, spec).shard_shape(shape)
