"""The timetable of combined ticks on the ring, for any number of chunks a stage."""

from ._timetable import Action, TimetableSchedule


class RingTimetable(TimetableSchedule):
    """Forwards and backwards on combined ticks, the model cut into `V = vS` parts, part `cS + s` on stage s.

    The microbatches go round the ring in groups of S: let `R(m) = vS (m // S) + m % S`. Part p runs the forward of
    microbatch m at step `R(m) + p` and its backward at step `R(m) + 2(V - 1) - p`. No stage has two forwards or two
    backwards in one step. With one chunk `R(m) = m`, and this is 1F1B.

    The forwards of a stage fill `num_slots()` successive steps, as do its backwards, with gaps only where the last
    group is short of S microbatches.
    """

    def num_steps(self) -> int:
        """`R(M - 1) + 2V - 1`."""
        return self.num_slots() + self.num_chunks * self.stages + self.stages - 2

    def num_slots(self) -> int:
        """Give the number of steps from the first to the last forward of a stage.

        Returns:
            `R(M - 1) + V - S + 1`; it is `vM` if S divides M, or with one chunk.
        """
        # R(M - 1) is the first part's step of the last microbatch; its last chunk on this stage follows V - S later.
        group, position = divmod(self.micro_batches - 1, self.stages)
        return (group + 1) * self.stages * self.num_chunks - self.stages + position + 1

    def forward_at(self, step: int) -> Action:
        """Chunk c and microbatch m with `R(m) + cS + s = step`."""
        return self._turn(step - self.stage_id)

    def backward_at(self, step: int) -> Action:
        """Chunk c and microbatch m with `R(m) + 2(V - 1) - (cS + s) = step`."""
        # 2(V - 1) - (cS + s) = (v - 1 - c)S + (V + S - 2 - s): the turns of forwards, later, the last chunk first.
        parts = self.num_chunks * self.stages
        chunk, microbatch = self._turn(step - (parts + self.stages - 2 - self.stage_id))
        return self.num_chunks - 1 - chunk, microbatch

    def promised_s(self, forward_s: float, backward_s: float, weight_s: float) -> float:
        """`(num_slots() + S - 1)(F + B)/v`."""
        return (self.num_slots() + self.stages - 1) * (forward_s + backward_s) / self.num_chunks

    def _turn(self, slot: int) -> Action:
        # S turns for each chunk, one a microbatch of the group, before the next group begins.
        group, position = divmod(slot, self.num_chunks * self.stages)
        chunk, in_group = divmod(position, self.stages)
        return chunk, group * self.stages + in_group
