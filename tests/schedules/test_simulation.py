"""Runs tick programs on symbolic values: every cell must read exactly the value it should."""

from typing import Any

import pytest

from jaxpipe.schedules import (
    DataParallelSchedule,
    GPipeSchedule,
    InferenceSchedule,
    OneFOneBSchedule,
    PipeSchedule,
    TickProgram,
    TrainSchedule,
    check_schedule,
    forward_schedule,
    lower_schedule,
    resolve_schedule,
)


class Machine:
    """Executes a program as its documentation says, with rings of exactly the stated depth."""

    def __init__(self, program: TickProgram) -> None:
        self.program = program
        self.last = program.num_stages * program.num_chunks - 1
        depth = dict(program.depth) | {"residual": program.residual_slots}
        self.rings: list[dict[str, list[Any]]] = [
            {name: [None] * size for name, size in depth.items()} for _ in range(program.num_stages)
        ]
        self.done: dict[tuple[str, int, int], int] = {}
        self.tick = 0
        self.stage = 0

    def cell(self, name: str) -> int:
        return self.program.tables[name][self.stage][self.tick]

    def read(self, ring: str, name: str) -> Any:
        slot = self.cell(name)
        assert slot >= 0, name
        return self.rings[self.stage][ring][slot]

    def write(self, ring: str, name: str, value: Any) -> None:
        slot = self.cell(name)
        if slot >= 0:
            self.rings[self.stage][ring][slot] = value

    def once(self, kind: str, part: int, microbatch: int) -> None:
        key = (kind, part, microbatch)
        assert key not in self.done, key
        self.done[key] = self.tick

    def run(self) -> None:
        program = self.program
        assert [run.start for run in program.runs[1:]] == [run.stop for run in program.runs[:-1]]
        assert (program.runs[0].start, program.runs[-1].stop) == (0, program.num_ticks)
        for run in program.runs:
            for self.tick in range(run.start, run.stop):
                self.exchange("act", run.act_hops)
                self.exchange("grad", run.grad_hops)
                for self.stage in range(program.num_stages):
                    self.forward(allowed=run.has_forward)
                    self.backward(allowed=run.has_backward)
                    self.weight(allowed=run.has_weight)
        kinds = ("F", "B", "W") if program.training else ("F",)
        parts = range(self.last + 1)
        microbatches = range(program.num_microbatches)
        assert set(self.done) == {(kind, part, m) for kind in kinds for part in parts for m in microbatches}

    def exchange(self, value: str, hops: tuple[int, ...]) -> None:
        landing: dict[int, Any] = {}
        stages = self.program.num_stages
        for self.stage in range(stages):
            target = self.cell(f"{value}_send_to")
            assert (target >= 0) == (self.cell(f"{value}_send") >= 0)
            if target >= 0:
                assert any((self.stage + hop) % stages == target for hop in hops)
                assert target not in landing
                landing[target] = (self.stage, self.read(f"{value}_out", f"{value}_send"))
        for self.stage in range(stages):
            source = self.cell(f"{value}_recv_from")
            assert (source >= 0) == (self.stage in landing) == (self.cell(f"{value}_recv") >= 0)
            if source >= 0:
                sender, sent = landing[self.stage]
                assert sender == source
                self.write(f"{value}_in", f"{value}_recv", (*sent, self.tick))

    def take(self, value: str, kind: str) -> Any:
        """The value that a computing reads, or None; received ones carry the tick of their arrival."""
        received, local = self.cell(f"{kind}_read"), self.cell(f"{kind}_local_read")
        assert received < 0 or local < 0
        if received >= 0:
            *named, arrived = self.read(f"{value}_in", f"{kind}_read")
            assert f"{value}_in" not in self.program.direct or arrived == self.tick
            return tuple(named)
        return self.read(f"{value}_local", f"{kind}_local_read") if local >= 0 else None

    def forward(self, *, allowed: bool) -> None:
        microbatch = self.cell("forward_microbatch")
        if microbatch < 0:
            if allowed and self.program.training:
                assert self.cell("residual_write") >= 0
                self.write("residual", "residual_write", "garbage")
            else:
                assert self.cell("residual_write") < 0
            assert self.cell("forward_write") == self.cell("forward_local_write") == -1
            return
        assert allowed
        part = self.program.placement[self.stage][self.cell("forward_chunk")]
        assert self.take("act", "forward") == (None if part == 0 else ("act", part - 1, microbatch))
        writes = [self.cell("forward_write") >= 0, self.cell("forward_local_write") >= 0]
        assert sum(writes) == (part < self.last)
        self.write("act_out", "forward_write", ("act", part, microbatch))
        self.write("act_local", "forward_local_write", ("act", part, microbatch))
        self.write("residual", "residual_write", ("residual", part, microbatch))
        self.once("F", part, microbatch)

    def backward(self, *, allowed: bool) -> None:
        microbatch = self.cell("backward_microbatch")
        if microbatch < 0:
            assert self.cell("backward_write") == self.cell("backward_local_write") == self.cell("pending_write") == -1
            return
        assert allowed
        part = self.program.placement[self.stage][self.cell("backward_chunk")]
        assert self.take("grad", "backward") == (None if part == self.last else ("grad", part + 1, microbatch))
        assert self.read("residual", "residual_read") == ("residual", part, microbatch)
        writes = [self.cell("backward_write") >= 0, self.cell("backward_local_write") >= 0]
        assert sum(writes) == (part > 0)
        self.write("grad_out", "backward_write", ("grad", part, microbatch))
        self.write("grad_local", "backward_local_write", ("grad", part, microbatch))
        self.write("pending", "pending_write", ("pending", part, microbatch, self.tick))
        self.once("B", part, microbatch)
        if self.cell("pending_write") < 0:
            self.once("W", part, microbatch)

    def weight(self, *, allowed: bool) -> None:
        microbatch = self.cell("weight_microbatch")
        if microbatch < 0:
            return
        assert allowed
        part = self.program.placement[self.stage][self.cell("weight_chunk")]
        *pending, since = self.read("pending", "pending_read")
        assert tuple(pending) == ("pending", part, microbatch)
        assert "pending" not in self.program.direct or since == self.tick
        assert self.read("residual", "weight_residual_read") == ("residual", part, microbatch)
        self.once("W", part, microbatch)


def require_tight(program: TickProgram) -> None:
    """Residual depth is the largest number alive at once, counted here from the cells."""
    tables = program.tables
    for stage in range(program.num_stages):
        alive: set[tuple[int, int]] = set()
        peak = 0
        for tick in range(program.num_ticks):
            if tables["forward_microbatch"][stage][tick] >= 0:
                alive.add((tables["forward_chunk"][stage][tick], tables["forward_microbatch"][stage][tick]))
            peak = max(peak, len(alive))
            if tables["backward_microbatch"][stage][tick] >= 0 and tables["pending_write"][stage][tick] < 0:
                alive.discard((tables["backward_chunk"][stage][tick], tables["backward_microbatch"][stage][tick]))
            if tables["weight_microbatch"][stage][tick] >= 0:
                alive.discard((tables["weight_chunk"][stage][tick], tables["weight_microbatch"][stage][tick]))
        assert program.in_flight(stage) == peak
    assert program.peak_in_flight == max(map(program.in_flight, range(program.num_stages)))


@pytest.mark.parametrize("schedule", [OneFOneBSchedule, GPipeSchedule, TrainSchedule])
@pytest.mark.parametrize("num_stages", range(1, 9))
def test_training_programs_read_what_they_should(schedule: type[PipeSchedule], num_stages: int) -> None:
    for num_microbatches in range(1, 11):
        program = lower_schedule(schedule, num_microbatches, num_stages)
        Machine(program).run()
        require_tight(program)
        assert program.direct == {"act_in", "grad_in", "pending"}
        assert not program.has_split_backward
        boundary = int(num_stages > 1)
        assert [program.depth[name] for name in ("act_in", "act_out", "grad_in", "grad_out")] == [boundary] * 4
        assert [program.depth[name] for name in ("act_local", "grad_local", "pending")] == [0] * 3


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_inference_programs_read_what_they_should(num_stages: int) -> None:
    for num_microbatches in range(1, 11):
        program = lower_schedule(InferenceSchedule, num_microbatches, num_stages, training=False)
        Machine(program).run()
        assert program.num_ticks == num_microbatches + num_stages - 1
        assert program.peak_in_flight == program.residual_slots == 0
        assert len(program.runs) == 1


@pytest.mark.parametrize("num_microbatches", range(1, 11))
def test_data_parallel_schedule_runs_on_one_stage(num_microbatches: int) -> None:
    program = lower_schedule(DataParallelSchedule, num_microbatches, 1)
    Machine(program).run()
    assert (program.num_ticks, program.peak_in_flight, len(program.runs)) == (num_microbatches, 1, 1)


@pytest.mark.parametrize(
    "name",
    [
        "FoldedSchedule",
        "FoldedSplitSchedule",
        "RingSchedule",
        "ThreeRingSchedule",
        "SplitSchedule",
        "SplitAtOnceSchedule",
    ],
)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_chunked_and_split_programs_read_what_they_should(
    timed: dict[str, type[PipeSchedule]], name: str, num_stages: int
) -> None:
    for num_microbatches in range(1, 8):
        program = lower_schedule(timed[name], num_microbatches, num_stages)
        Machine(program).run()
        require_tight(program)
        assert program.has_split_backward == ("Split" in name)
        assert (program.depth["act_local"] > 0) == (program.num_chunks > 1 and ("Folded" in name or num_stages == 1))


@pytest.mark.parametrize(
    ("name", "num_chunks"),
    [("1f1b-v", 2), ("interleaved", 2), ("interleaved", 4), ("zero-bubble", 1), ("zero-bubble", 2), ("zero-bubble", 4)],
)
@pytest.mark.parametrize("num_stages", range(1, 9))
def test_named_programs_read_what_they_should(name: str, num_chunks: int, num_stages: int) -> None:
    kind = resolve_schedule(name, num_chunks)
    for num_microbatches in (1, 2, 3, 4, 7, 8, 11):
        program = lower_schedule(kind, num_microbatches, num_stages)
        Machine(program).run()
        require_tight(program)
        assert program.direct >= {"act_in", "grad_in"}
        if num_stages > 1:
            assert all(program.depth[f"{v}_out"] == 1 and program.depth[f"{v}_local"] <= 1 for v in ("act", "grad"))


@pytest.mark.parametrize("max_pending", [1, 2, 4])
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_limited_programs_read_what_they_should(max_pending: int, num_chunks: int) -> None:
    kind = resolve_schedule("zero-bubble", num_chunks, max_pending)
    for num_stages in (1, 3, 4):
        for num_microbatches in (1, 5, 8):
            program = lower_schedule(kind, num_microbatches, num_stages)
            Machine(program).run()
            require_tight(program)


@pytest.mark.parametrize("name", ["1f1b-v", "interleaved", "zero-bubble"])
def test_one_run_reads_the_same(name: str) -> None:
    program = lower_schedule(resolve_schedule(name), 8, 4, one_run=True)
    assert len(program.runs) == 1
    Machine(program).run()


@pytest.mark.parametrize(
    ("name", "num_chunks"), [("1f1b-v", 2), ("interleaved", 2), ("interleaved", 4), ("zero-bubble", 2)]
)
@pytest.mark.parametrize("num_stages", range(1, 9))
def test_their_forwards_read_what_they_should(name: str, num_chunks: int, num_stages: int) -> None:
    kind = resolve_schedule(name, num_chunks)
    for num_microbatches in (1, 3, 4, 8):
        program = lower_schedule(forward_schedule(kind), num_microbatches, num_stages, training=False)
        Machine(program).run()
        assert len(program.runs) == 1
        assert program.placement == lower_schedule(kind, num_microbatches, num_stages).placement
        if name == "1f1b-v":
            assert program.num_ticks == 2 * num_microbatches + 2 * num_stages - 2
        elif num_microbatches % num_stages == 0:
            assert program.num_ticks == num_chunks * num_microbatches + num_stages - 1


def test_forwards_of_one_chunk_are_inference() -> None:
    assert forward_schedule(TrainSchedule) is forward_schedule(resolve_schedule("zero-bubble")) is InferenceSchedule


def test_forwards_of_written_schedules(timed: dict[str, type[PipeSchedule]]) -> None:
    for name in ("FoldedSplitSchedule", "RingSchedule"):
        kind = forward_schedule(timed[name])
        check_schedule(kind, 5, 3, training=False)
        Machine(lower_schedule(kind, 5, 3, training=False)).run()
