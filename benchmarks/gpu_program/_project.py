"""A step's time from its HLO.

Every stage runs the loops' kernels, takes its own branches and waits for its neighbours.

All devices run one program, so a tick is one list of events alike on all stages: kernels,
conditionals, and the starts and ends of exchanges. Kernels advance a stage's clock; a conditional
by the branch that the schedule's tables say; the end of an exchange waits for its start here and on
the stage that sends or receives, and for the wire.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from jaxpipe.programs.compiled import Instruction
from jaxpipe.schedules import TickProgram, TickRun

from ._cost import Cost, Costs

Started = dict[str, tuple[list[float], float, Instruction]]
"""Collectives on their way.

The clocks of all stages at their start, seconds on the wire, and the line.
"""


@dataclass(frozen=True)
class Projection:
    """A projected step.

    Attributes:
        step_s: Seconds of the step.
        outside_s: Seconds of them that are no tick's: casts, the update, and of gathers and
            reductions over replicas what no tick hides.
        middle: Cost of a microbatch, forward and backward, in the steady run, on the median stage.
        longest: The same on the stage where it is longest.
        whole: Cost of the whole step, by stage.
    """

    step_s: float
    outside_s: float
    middle: Cost
    longest: Cost
    whole: list[Cost]


class Simulation:
    """The loops of a training step, on all stages.

    Args:
        costs: Costs of the module's kernels.
        program: The schedule's ticks.
        num_devices: Devices of the program; its stages lie side by side, with equally many devices
            each.
        block: Class name of the model's blocks, which tells branches around whole actions from
            those of the ends.
    """

    def __init__(self, costs: Costs, program: TickProgram, num_devices: int, block: str) -> None:
        self._costs, self._program, self._block = costs, program, block
        self._module = costs.module
        self._num_devices, self._stages = num_devices, range(program.num_stages)
        self._per_stage = num_devices // program.num_stages
        self._now = [0.0] * program.num_stages
        self._tick_costs = [Cost() for _ in self._stages]

    def run(self) -> Projection:
        """Go through the whole step."""
        module, entry = self._module, self._module.entry
        loops, inlined = self._loops_of_runs(), self._runs_without_loop()
        outside_s, started = 0.0, {}
        actions = {ticks: iter(self._branched_actions(run)) for ticks, run in inlined.items()}
        for line in module.lines(entry):
            if line.name in loops:
                self._loop(line, loops[line.name])
            elif (ticks := _ticks_of(line)) in inlined:
                run = inlined[ticks]
                self._event(entry, line, run, run.start, actions[ticks], started)
            else:
                outside_s += self._outside(entry, line, started)
        whole, found = self._tick_costs, self._steady(loops)
        return Projection(max(self._now), outside_s, found[len(found) // 2], found[-1], whole)

    def _loops_of_runs(self) -> dict[str, TickRun]:
        """The run of each loop over ticks."""
        runs = {(run.start, run.stop): run for run in self._program.runs}
        found = {
            line.name: runs[ticks]
            for line in self._module.loops()
            if (ticks := _ticks_of(line)) and re.search(r"ticks_\d+_\d+/while$", line.scope)
        }
        missing = [
            run for run in runs.values() if run.stop - run.start > 1 and run not in found.values()
        ]
        if missing:
            raise ValueError(
                f"a run of several ticks must have a loop, but got none for {missing[0]}."
            )
        return found

    def _runs_without_loop(self) -> dict[tuple[int, int] | None, TickRun]:
        """Runs of one tick by their ticks: XLA puts them into the entry."""
        return {
            (run.start, run.stop): run for run in self._program.runs if run.stop - run.start == 1
        }

    def _outside(self, entry: str, line: Instruction, started: Started) -> float:
        """Let all stages run a line of the entry that is no tick's.

        Gives the seconds that it takes of the step.
        """
        cost = Cost()
        if line.op == "conditional":
            branches = [self._costs.straight(name, self._num_devices) for name in line.branches]
            cost.merge(max(branches, key=lambda branch: branch.total_s))
        elif self._module.is_collective(line):
            exposed = [costs.seconds.get("exchange", 0.0) for costs in self._tick_costs]
            self._collective(line, started)
            return max(
                costs.seconds.get("exchange", 0.0) - before
                for costs, before in zip(self._tick_costs, exposed, strict=True)
            )
        elif self._module.is_kernel(line):
            cost.merge(self._costs.kernel(entry, line))
        self._advance([cost] * len(self._now))
        return cost.total_s

    def _loop(self, loop: Instruction, run: TickRun) -> None:
        for tick in range(run.start, run.stop):
            self._tick(loop.body, run, tick)

    def _steady(self, loops: dict[str, TickRun]) -> list[Cost]:
        """Costs of a microbatch in the longest run with all kinds of action.

        By stage, cheapest first.
        """
        program, saved = self._program, list(self._now)
        run = max(
            loops.values(),
            key=lambda run: (run.has_forward and run.has_backward, run.stop - run.start),
        )
        body = next(line.body for line in self._module.loops() if loops.get(line.name) is run)
        self._tick_costs = [Cost() for _ in self._stages]
        for tick in range(run.start, run.stop):
            self._tick(body, run, tick)
        self._now = saved
        lines = self._module.lines(body)
        is_branched = any(
            line.op in ("conditional", "while") and self._is_action(line) for line in lines
        )
        kinds = (program.tables.forward, program.tables.backward, program.tables.weight)[
            : 2 + run.has_weight
        ]
        found = []
        for stage, cost in enumerate(self._tick_costs):
            # A tick is a forward and a backward of a chunk, also where they are idle and dropped.
            # Where idle actions are branched around they cost nothing, and a stage has done as much
            # as its actions amount to.
            actions = sum(
                chunk >= 0 for kind in kinds for chunk in kind.chunk[stage][run.start : run.stop]
            )
            done = actions / len(kinds) if is_branched else run.stop - run.start
            found.append(Cost())
            found[-1].merge(cost, program.num_chunks / done)
        return sorted(found, key=lambda cost: cost.total_s)

    def _tick(self, body: str, run: TickRun, tick: int) -> None:
        self._events(body, run, tick, iter(self._branched_actions(run)))

    def _events(self, computation: str, run: TickRun, tick: int, actions: Iterator[str]) -> None:
        started: Started = {}
        for line in self._module.lines(computation):
            self._event(computation, line, run, tick, actions, started)

    def _event(
        self,
        computation: str,
        line: Instruction,
        run: TickRun,
        tick: int,
        actions: Iterator[str],
        started: Started,
    ) -> None:
        if line.op == "conditional" and self._is_shared(line):
            # All stages take the same branch, and wait for each other at its collectives.
            branch = Cost()
            branch.add("branch", self._costs.wait_s)
            self._advance([branch] * len(self._now))
            self._events(line.branches[self._end_index(line, 0, tick)], run, tick, actions)
        elif line.op == "conditional":
            self._branches(line, run, tick, next(actions, None) if self._is_action(line) else None)
        elif self._module.is_collective(line):
            self._collective(line, started)
        elif line.op == "while":
            if self._is_action(line):
                next(actions, None)
            self._advance([self._loop_in_tick(line, stage, tick) for stage in self._stages])
        elif self._module.is_kernel(line):
            self._advance([self._costs.kernel(computation, line)] * len(self._now))

    def _branched_actions(self, run: TickRun) -> list[str]:
        """Kinds of action that a run has, but for those without a branch.

        They come in the order in which a tick runs them.
        """
        found = []
        for name in ("forward", "backward", "weight"):
            chunks = self._chunks(run, name)
            if getattr(run, f"has_{name}") and (chunks[0] < 0 or len(chunks) > 1):
                found.append(name)
        return found

    def _chunks(self, run: TickRun, action: str) -> list[int]:
        """Chunks that actions of a run work on; -1 before them where some are idle."""
        rows = getattr(self._program.tables, action).chunk
        return sorted({chunk for row in rows for chunk in row[run.start : run.stop]})

    def _loop_in_tick(self, line: Instruction, stage: int, tick: int) -> Cost:
        """Cost of a loop in a tick.

        Where it has no known length it goes round once, or not at all.
        """
        cost, body = Cost(), Cost()
        known = self._module.trip_count(line)
        rounds = known or self._rounds(line, stage, tick)
        if rounds:
            self._computation(line.body, stage, tick, body)
            cost.merge(body, rounds)
        if not known:
            # The host waits for its condition, each time.
            cost.add("branch", self._costs.wait_s * (1 + rounds))
        return cost

    def _rounds(self, line: Instruction, stage: int, tick: int) -> float:
        """Rounds of a loop of one or none.

        What it writes is told by its scope and by its kernels.
        """
        tables, body = self._program.tables, self._costs.straight(line.body, self._num_devices)
        action = next(
            (name for name in ("loss", "weight_gradient", "backward") if f"/{name}/" in line.scope),
            "forward",
        )
        seconds = {kind: body.seconds.get(kind, 0.0) for kind in ("packed", "sums", "ring")}
        if action == "loss":
            return self._is_end(stage, tick, "forward")
        if action == "forward":  # all of it, with a slot of the residuals
            return tables.forward.chunk[stage][tick] >= 0
        name = "weight" if action == "weight_gradient" else "backward"
        is_busy = getattr(tables, name).chunk[stage][tick] >= 0
        if self._is_action(line):
            return is_busy
        if seconds["packed"] > max(seconds["sums"], seconds["ring"]):  # the first layers' gradients
            return self._is_end(stage, tick, name)
        if seconds["ring"] > seconds["sums"]:  # a slot of what a split backward leaves
            return tables.pending_write[stage][tick] >= 0
        # There is a loop for each chunk's sums, and one of them runs.
        return is_busy / self._program.num_chunks

    def _advance(self, costs: list[Cost], times: float = 1.0) -> None:
        for stage, cost in enumerate(costs):
            self._now[stage] += times * cost.total_s
            self._tick_costs[stage].merge(cost, times)

    def _collective(self, line: Instruction, started: Started) -> None:
        if line.op.endswith("-done"):
            self._end(*started.pop(line.operands[0]))
            return
        event = list(self._now), self._costs.wire_s(line, self._num_devices), line
        for stage, cost in enumerate(self._tick_costs):
            if self._others(stage, line):
                cost.sent_bytes += self._costs.sent_bytes(line, self._num_devices)
        if line.op.endswith("-start") and not line.is_sync:
            started[line.name] = event
        elif line.op.endswith("-start"):
            # Nothing runs until it has ended: what lies before its end in the text comes after it.
            started[line.name] = event[0], 0.0, line
            self._end(*event)
        else:
            self._end(*event)

    def _end(self, start: list[float], wire_s: float, line: Instruction) -> None:
        for stage, clock in enumerate(list(self._now)):
            others = self._others(stage, line)
            if not others:
                continue
            until = max(start[other] for other in (*others, stage)) + wire_s
            # What the wire takes beyond the work above it is the exchange's cost; waiting for a
            # neighbour is idle time.
            alone = start[stage] + wire_s
            self._tick_costs[stage].add("exchange", max(0.0, alone - clock))
            self._now[stage] = max(clock, until)

    def _others(self, stage: int, line: Instruction) -> set[int]:
        """Stages that a stage waits for in a collective; itself where it stays within the stage."""
        pairs = {(a // self._per_stage, b // self._per_stage) for a, b in line.pairs}
        if pairs:
            return {b for a, b in pairs if a == stage} | {a for a, b in pairs if b == stage}
        group = line.group or range(self._num_devices)
        stages = {device // self._per_stage for device in group}
        return set(self._stages) if len(stages) > 1 else {stage}

    def _branches(self, line: Instruction, run: TickRun, tick: int, action: str | None) -> None:
        found = []
        for stage in self._stages:
            cost = Cost()
            index = self._end_index(line, stage, tick)
            if action is not None:
                index = self._action_index(line, run, stage, tick, action)
            self._branch(line, index, stage, tick, cost)
            found.append(cost)
        self._advance(found)

    def _branch(self, line: Instruction, index: int, stage: int, tick: int, cost: Cost) -> None:
        cost.add("branch", self._costs.machine.branch_s)
        self._computation(line.branches[index], stage, tick, cost)

    def _computation(self, name: str, stage: int, tick: int, cost: Cost) -> None:
        for line in self._module.lines(name):
            if line.op == "conditional":
                self._branch(line, self._end_index(line, stage, tick), stage, tick, cost)
            elif self._module.is_collective(line):
                if not line.op.endswith("-done"):
                    cost.add("exchange", self._costs.wire_s(line, self._num_devices))
                    cost.sent_bytes += self._costs.sent_bytes(line, self._num_devices)
            elif line.op == "while":
                cost.merge(self._loop_in_tick(line, stage, tick))
            elif self._module.is_kernel(line):
                cost.merge(self._costs.kernel(name, line))

    def _is_shared(self, line: Instruction) -> bool:
        """Whether its branches are the work of vocabulary-parallel layers.

        All stages do this work at once.
        """
        return not self._is_action(line) and any(
            "Vocab" in self._module.scopes(name) for name in line.branches
        )

    def _is_end(self, stage: int, tick: int, action: str) -> bool:
        """Whether an action is that of an end of the model.

        The forward is that of the last part of the model; the other action is that of the first.
        """
        chunk, placement = (
            getattr(self._program.tables, action).chunk[stage][tick],
            self._program.placement,
        )
        part = len(placement.locations) - 1 if action == "forward" else 0
        return chunk >= 0 and placement.virtual[stage][chunk] == part

    def _is_action(self, line: Instruction) -> bool:
        """Whether its branches, or the one round of a loop, are whole actions: they run blocks."""
        if line.op == "while":
            return not self._module.trip_count(line) and self._block in self._module.scopes(
                line.body
            )
        return any(self._block in self._module.scopes(name) for name in line.branches)

    def _action_index(
        self, line: Instruction, run: TickRun, stage: int, tick: int, action: str
    ) -> int:
        """Branch that a stage takes around whole actions.

        Zeros, then whole and split ones of each chunk.
        """
        tables, chunks = (
            self._program.tables,
            [chunk for chunk in self._chunks(run, action) if chunk >= 0],
        )
        chunk, num_branches = getattr(tables, action).chunk[stage][tick], len(line.branches)
        if chunk < 0:
            return 0
        kinds = (num_branches - 1) // len(chunks)
        is_split = action == "backward" and kinds > 1 and tables.pending_write[stage][tick] >= 0
        return min(1 + is_split * len(chunks) + chunks.index(chunk), num_branches - 1)

    def _end_index(self, line: Instruction, stage: int, tick: int) -> int:
        """Branch that a stage takes around the model's ends: the longest where it has them."""
        times = [self._costs.straight(name, self._num_devices).total_s for name in line.branches]
        return times.index((max if self._has_end(line, stage, tick) else min)(times))

    def _has_end(self, line: Instruction, stage: int, tick: int) -> bool:
        """Whether a stage runs the model's first or last layers in a tick.

        A conditional holds them.
        """
        tables, virtual = self._program.tables, self._program.placement.virtual
        scopes = "\n".join(self._module.scopes(name) for name in line.branches)
        is_backward = "transpose(jvp(" in scopes
        if "Vocab" in scopes:  # run by all stages at once
            if "VocabHead" in scopes:
                return tables.loss_microbatch[stage][tick] >= 0
            table = (
                tables.last_input_grad_microbatch if is_backward else tables.next_input_microbatch
            )
            return table[stage][tick] >= 0
        if "Head" in scopes:
            now, part = tables.forward, len(self._program.placement.locations) - 1
        else:
            now, part = (tables.backward if is_backward else tables.forward), 0
        chunk = now.chunk[stage][tick]
        if now is tables.backward and tables.weight.microbatch[stage][tick] >= 0:
            chunk = chunk if chunk >= 0 else tables.weight.chunk[stage][tick]
        return chunk >= 0 and virtual[stage][chunk] == part


def lockstep(costs: Costs, computation: str, num_devices: int) -> Cost:
    """Cost of a computation that all devices run alike, so that none waits for another.

    What a collective takes beyond the kernels between its start and its end is its cost.
    """
    module, cost = costs.module, Cost()
    started: dict[str, tuple[float, float]] = {}
    for line in module.lines(computation):
        if line.op == "while":
            rounds = module.trip_count(line) or 1
            cost.merge(lockstep(costs, line.body, num_devices), rounds)
        elif line.op == "conditional":
            branches = [lockstep(costs, name, num_devices) for name in line.branches]
            cost.merge(max(branches, key=lambda branch: branch.total_s))
            cost.add("branch", costs.machine.branch_s)
        elif module.is_collective(line) and line.op.endswith("-done"):
            start_s, wire_s = started.pop(line.operands[0])
            cost.add("exchange", max(0.0, start_s + wire_s - cost.total_s))
        elif module.is_collective(line):
            wire_s = costs.wire_s(line, num_devices)
            cost.sent_bytes += costs.sent_bytes(line, num_devices)
            if line.op.endswith("-start"):
                started[line.name] = cost.total_s, wire_s
            if line.is_sync or not line.op.endswith("-start"):
                cost.add("exchange", wire_s)
        elif module.is_kernel(line):
            cost.merge(costs.kernel(computation, line))
    return cost


def _ticks_of(line: Instruction) -> tuple[int, int] | None:
    """First tick of the run that a line belongs to, and the tick behind its last.

    None outside of all runs.
    """
    found = re.search(r"\bticks_(\d+)_(\d+)/", f"{line.scope}/")
    return (int(found.group(1)), int(found.group(2))) if found else None
