"""The microbatches in the buffers of a stage."""

from jaxpipe.errors import ScheduleError

from ._base import PipeSchedule
from ._events import FORWARD, IDLE, Location, first_lacking
from ._instructions import BufferOpInstruction


class BufferTracker:
    """Track the units that enter and leave the buffers of one stage.

    `flags` are the events of each unit, which the walk updates; `done` those that free a buffer.
    """

    def __init__(self, schedule: PipeSchedule, flags: list[int], done: list[int]) -> None:
        count = schedule.num_pipe_buffers()
        # With `isinstance`, True would count as one buffer.
        if type(count) is not int or count < 1:
            raise ScheduleError(
                "num_pipe_buffers() must be a whole number of at least 1, but got "
                f"num_pipe_buffers()={count!r} on stage={schedule.stage_id}. Return the maximum "
                "number of microbatches that the stage keeps at the same time."
            )
        self._living = dict.fromkeys(range(count), IDLE)
        self._flags = flags
        self._done = done
        self._entered = bytearray(len(flags))
        self._following = [0] * schedule.num_chunks
        self._microbatches = schedule.micro_batches
        self._stage = schedule.stage_id

    def living(self, op: BufferOpInstruction, step: int) -> int:
        """Return the unit that an instruction on a filled buffer works on."""
        unit = self._living.get(op.buffer_id)
        if unit is None or unit < 0:
            self._require_buffer(op, step)
            raise Location(op, self._stage, step).refuse(
                "work on a buffer that holds a microbatch",
                f"an empty buffer_id={op.buffer_id}",
                f"Put ForwardPass({op.buffer_id}) before it, or name another buffer.",
            )
        if op.micro_batch_id is not None or op.chunk_id is not None:
            self._require_agreement(op, step, unit)
        return unit

    def entering(self, op: BufferOpInstruction, step: int, event: int) -> int:
        """Return the unit that a load, receive or forward works on; it enters if it is not in yet.

        `event` is the instruction's effect.
        """
        current = self._living.get(op.buffer_id)
        if current is None:
            self._require_buffer(op, step)
        elif current >= 0:
            flags = self._flags[current]
            # The instruction works on the unit in the buffer until that unit has run its forward or
            # has had this event. Then a new unit enters.
            if not flags & (event | FORWARD):
                if op.micro_batch_id is not None or op.chunk_id is not None:
                    self._require_agreement(op, step, current)
                return current
            chunk, microbatch = divmod(current, self._microbatches)
            lacking = self._done[chunk] & ~flags
            if lacking:
                raise Location(op, self._stage, step).refuse(
                    "not overwrite a live buffer",
                    f"micro_batch_id={microbatch} in it, which still needs "
                    f"{first_lacking(lacking, local=False)},",
                    "Use another buffer and count it in num_pipe_buffers(), or finish the old "
                    "microbatch first.",
                )
        unit = self._new_unit(op, step)
        self._living[op.buffer_id] = unit
        return unit

    def _new_unit(self, op: BufferOpInstruction, step: int) -> int:
        chunk = op.chunk_id
        microbatch = op.micro_batch_id
        if chunk is None and len(self._following) == 1:
            chunk = 0
        if chunk is None or chunk not in range(len(self._following)):
            raise Location(op, self._stage, step).refuse(
                f"name a chunk in [0, num_chunks={len(self._following)})",
                f"chunk_id={chunk}",
                "Pass chunk_id=, counted from 0.",
            )
        if microbatch is None:
            microbatch = self._following[chunk]
        if microbatch not in range(self._microbatches):
            raise Location(op, self._stage, step).refuse(
                f"work on a microbatch in [0, micro_batches={self._microbatches})",
                f"micro_batch_id={microbatch}",
                "Run each microbatch once; remove the surplus instruction.",
            )
        unit = chunk * self._microbatches + microbatch
        if self._entered[unit]:
            raise Location(op, self._stage, step).refuse(
                "run each microbatch once",
                f"micro_batch_id={microbatch} a second time",
                "Remove one of the two.",
            )
        self._entered[unit] = 1
        # First in, first out: without a microbatch, an instruction works on the one after the last
        # that entered.
        self._following[chunk] = microbatch + 1
        return unit

    def _require_buffer(self, op: BufferOpInstruction, step: int) -> None:
        if self._living.get(op.buffer_id) is None:
            raise Location(op, self._stage, step).refuse(
                f"name a buffer in [0, num_pipe_buffers()={len(self._living)})",
                f"buffer_id={op.buffer_id!r}",
                "Name another buffer, or count this one in num_pipe_buffers().",
            )

    def _require_agreement(self, op: BufferOpInstruction, step: int, unit: int) -> None:
        chunk, microbatch = divmod(unit, self._microbatches)
        if op.micro_batch_id not in (None, microbatch) or op.chunk_id not in (None, chunk):
            raise Location(op, self._stage, step).refuse(
                "name the microbatch that is in its buffer",
                f"micro_batch_id={microbatch}, chunk_id={chunk} there",
                "Name the buffer of the intended microbatch, or leave out micro_batch_id and "
                "chunk_id.",
            )
