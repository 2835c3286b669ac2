"""The base of every schedule: a generator of instruction lists for one stage."""

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, SupportsIndex

from jaxpipe.errors import ScheduleError

from ._instructions import PipeInstruction


class PipeSchedule(ABC):
    """Instructions of one stage for one batch, step by step.

    A schedule is pure data: it uses no devices and can be printed, checked and simulated. All
    stages take the same number of steps, and any two steps may be separated by a barrier. Within a
    step the exchanges run first and move only values of earlier steps. Then the stage computes in
    the listed order. A send and its receive are in the same step.

    Subclasses define `steps` and should define `num_pipe_buffers`. Schedules with several model
    chunks per stage set `num_chunks` and, unless the chunks form a ring, override `virtual_stage`.
    A schedule with a known step time returns its formula from `promised_s`. To give a schedule a
    name, add it to `schedule_names`.

    Args:
        micro_batches: Number of microbatches in a batch.
        stages: Number of pipeline stages.
        stage_id: The stage that runs these instructions, counted from 0 at the input.

    Raises:
        ScheduleError: A size is not a whole number or is out of range.

    Example:
        >>> class OneStage(PipeSchedule):
        ...     def steps(self):
        ...         for microbatch in range(self.micro_batches):
        ...             commands = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
        ...             if microbatch == self.micro_batches - 1:
        ...                 commands += [ReduceGrads(), OptimizerStep()]
        ...             yield commands
        ...
        ...     def num_pipe_buffers(self):
        ...         return 1

    Reference:
        DeepSpeed's `PipeSchedule`.
    """

    num_chunks: ClassVar[int] = 1
    """Number of model chunks on every stage."""

    min_chunks: ClassVar[int | None] = None
    """The minimum number of chunks if it can be chosen; None if it is always `num_chunks`."""

    max_pending: ClassVar[int | None] = None
    """The most weight gradients that a stage keeps pending, counted on each chunk.

    None means the schedule's own number.
    """

    min_pending: ClassVar[int | None] = None
    """The smallest value allowed for `max_pending`; None if `max_pending` cannot be chosen."""

    is_auto_candidate: ClassVar[bool] = True
    """Whether `"auto"` considers the schedule, once it has a name."""

    is_last_resort: ClassVar[bool] = False
    """Whether `"auto"` takes the schedule only if no other fits: compiled, it is slower than its
    formula says."""

    is_steady: ClassVar[bool] = True
    """Whether each additional group of S microbatches adds the same ticks and needs no more memory.

    This applies to the groups after the first.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        self.micro_batches = _size("micro_batches", micro_batches, "microbatches in a batch")
        self.stages = _size("stages", stages, "pipeline stages")
        self.stage_id = operator.index(stage_id)  # also accepts NumPy integers
        if not 0 <= self.stage_id < self.stages:
            raise ScheduleError(
                f"stage_id must be in [0, stages={stages}), but got stage_id={stage_id}. Stages "
                "are counted from 0."
            )

    @abstractmethod
    def steps(self) -> Iterator[Sequence[PipeInstruction]]:
        """Yield the instructions of each step; every call starts from the beginning.

        Returns:
            An iterator of instruction lists, one per step. An empty list is an idle step.
        """

    def num_pipe_buffers(self) -> int:
        """Return the number of buffers that this stage uses.

        Returns:
            By default `micro_batches`: one buffer for each microbatch.
        """
        return self.micro_batches

    def virtual_stage(self, stage: int, chunk: int) -> int:
        """Return the virtual stage that a chunk of a stage is.

        Args:
            stage: Any stage in `[0, num_stages)`, not only this schedule's own.
            chunk: A chunk of that stage, in `[0, num_chunks)`.

        Returns:
            The virtual stage, in `[0, num_stages * num_chunks)`, counted from the input. By default
            the chunks form a ring: `chunk * stages + stage`.
        """
        return chunk * self.stages + stage

    @classmethod
    def can_have(cls, num_chunks: int) -> bool:
        """Return whether the schedule supports a number of chunks per stage.

        Args:
            num_chunks: Chunks per stage, at least 1.

        Returns:
            True for any number from `min_chunks` up if the number can be chosen, otherwise only for
            the class's `num_chunks`.
        """
        return (
            num_chunks == cls.num_chunks if cls.min_chunks is None else num_chunks >= cls.min_chunks
        )

    def promised_s(self, forward_s: float, backward_s: float, weight_s: float) -> float | None:
        """Return the step time in closed form.

        Args:
            forward_s: Seconds of the forward of one microbatch through all chunks of a stage.
            backward_s: Seconds of the whole backward of that microbatch.
            weight_s: Seconds of the weight gradient, which is part of `backward_s`.

        Returns:
            Seconds, or None if there is no formula, which is the default.
        """
        return None

    @property
    def stage(self) -> int:
        """The stage that runs these instructions."""
        return self.stage_id

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        """Number of microbatches in a batch."""
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        """True on stage 0."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """True on stage `num_stages - 1`."""
        return self.stage_id == self.stages - 1

    def __iter__(self) -> Iterator[Sequence[PipeInstruction]]:
        return iter(self.steps())


def _size(name: str, value: SupportsIndex, what: str) -> int:
    size = operator.index(value)
    if size < 1:
        raise ScheduleError(
            f"{name} must be at least 1, but got {name}={size}. Pass the number of {what}."
        )
    return size
