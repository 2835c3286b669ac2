"""The timetable of combined ticks on the ring, for any number of chunks per stage."""

from ._timetable import NOTHING, Action, TimetableSchedule


class RingTimetable(TimetableSchedule):
    """Forwards and backwards on combined ticks, with chunk c of stage s as virtual stage `cS + s`.

    There are `V = vS` virtual stages. The microbatches are processed in `max(1, M // S)` groups of
    nearly equal size: S microbatches if S divides M, otherwise more, up to g. A stage has a turn
    for each chunk and microbatch. It runs a group through its first chunk, then through its second,
    and so on, and then starts the next group. Stage s runs turn n of its forwards at step `n + s`.
    It runs turn n of its backwards, which start with the last chunk, at step `n + (v - 1)g + 2(S -
    1) - s`. A value that has passed around the ring is kept on its stage until the group ends. With
    one chunk this is 1F1B.
    """

    def num_steps(self) -> int:
        """`vM + (v - 1)g + 2(S - 1)`, for M of at least S."""
        return self.num_slots() + self._backward_lag() + self.stages - 1

    def num_slots(self) -> int:
        """Return the number of steps from the first to the last forward of a stage.

        It is `vM`, or `(v - 1)S + M` for fewer than S microbatches, as there are then gaps between
        the turns.
        """
        gap = max(0, self.stages - self.micro_batches)
        return self.num_chunks * self.micro_batches + (self.num_chunks - 1) * gap

    def forward_at(self, step: int) -> Action:
        """Turn `step - s`."""
        return self._turn(step - self.stage_id)

    def backward_at(self, step: int) -> Action:
        """Turn `step - (v - 1)g - 2(S - 1) + s`, the last chunk first."""
        chunk, microbatch = self._turn(
            step - (self._backward_lag() + self.stages - 1 - self.stage_id)
        )
        return self.num_chunks - 1 - chunk, microbatch

    def activation_at(self, step: int) -> Action:
        """The forward that the previous stage ran; on the first stage it is for the next chunk."""
        before = (self.stage_id - 1) % self.stages
        chunk, microbatch = self._turn(step - 1 - before)
        return self._on_this_stage(chunk + (self.stage_id == 0), microbatch)

    def gradient_at(self, step: int) -> Action:
        """The backward that the next stage ran; on the last stage it is for the previous chunk."""
        after = (self.stage_id + 1) % self.stages
        chunk, microbatch = self._turn(step - 1 - (self._backward_lag() + self.stages - 1 - after))
        return self._on_this_stage(self.num_chunks - 1 - chunk - (after == 0), microbatch)

    def promised_s(self, forward_s: float, backward_s: float, weight_s: float) -> float:
        """`(num_slots() + S - 1)(F + B)/v`."""
        return (self.num_slots() + self.stages - 1) * (forward_s + backward_s) / self.num_chunks

    def _on_this_stage(self, chunk: int, microbatch: int) -> Action:
        return (chunk, microbatch) if 0 <= chunk < self.num_chunks else NOTHING

    def _backward_lag(self) -> int:
        # On the last stage this is the first turn of the last chunk, in which a group's first
        # backward follows its forward. All groups have the lag of the largest group, so that the
        # turns stay in order.
        size, num_larger = self._groups()
        return (self.num_chunks - 1) * (size + (num_larger > 0)) + self.stages - 1

    def _groups(self) -> tuple[int, int]:
        """Microbatches of a group, and the number of groups, from the first, with one more."""
        if self.micro_batches < self.stages:
            # The group includes turns for microbatches that do not exist, because a value needs S
            # steps to pass around the ring.
            return self.stages, 0
        return divmod(self.micro_batches, self.micro_batches // self.stages)

    def _turn(self, number: int) -> Action:
        """Chunk, counted from the first, and microbatch of a turn."""
        size, num_larger = self._groups()
        begin = num_larger * self.num_chunks * (size + 1)
        first = num_larger * (size + 1)
        if number < begin:
            size = size + 1
            begin = 0
            first = 0
        group, turn = divmod(number - begin, self.num_chunks * size)
        chunk, position = divmod(turn, size)
        return chunk, first + group * size + position
