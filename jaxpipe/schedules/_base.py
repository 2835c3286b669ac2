"""The base of every schedule: a generator of instruction lists for one stage."""

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, SupportsIndex

from jaxpipe.errors import ScheduleError

from ._instructions import PipeInstruction


class PipeSchedule(ABC):
    """Instructions of one stage for one batch, step by step.

    A schedule is pure data: it holds no devices and may be printed, checked and simulated. All
    stages take the same number of steps, and a barrier may stand between any two steps. In a step
    the exchanges come first and move only values of earlier steps, then the stage computes in the
    listed order; a send and its receive stand in the same step. Subclasses give `steps` and should
    give `num_pipe_buffers`. Schedules that put several model chunks on a stage set `num_chunks`
    and, if the chunks do not lie on a ring, override `virtual_stage`. A schedule that promises a
    step time gives the formula in `promised_s`. One that is to have a name is entered in
    `schedule_names`.

    Args:
        micro_batches: Number of microbatches in a batch.
        stages: Number of pipeline stages.
        stage_id: The stage whose instructions these are, from 0 at the input.

    Raises:
        ScheduleError: A size is not a whole number or out of range.

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
    """Model chunks on every stage."""

    min_chunks: ClassVar[int | None] = None
    """The fewest chunks, where their number may be chosen; None: it is always `num_chunks`."""

    max_pending: ClassVar[int | None] = None
    """The most pending weight gradients, counted on each chunk, that a stage keeps.

    None: the schedule's own number.
    """

    min_pending: ClassVar[int | None] = None
    """The least that `max_pending` may be set to, where it may be chosen; None: it may not."""

    is_auto_candidate: ClassVar[bool] = True
    """True if `"auto"` looks at it, once it has a name."""

    is_steady: ClassVar[bool] = True
    """True if each further group of S microbatches adds the same ticks, and none holds more.

    This is said of the groups beyond the first.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        self.micro_batches = _size("micro_batches", micro_batches, "microbatches in a batch")
        self.stages = _size("stages", stages, "pipeline stages")
        self.stage_id = _whole("stage_id", stage_id)
        if not 0 <= self.stage_id < self.stages:
            raise ScheduleError(
                f"stage_id must be in [0, stages={stages}), but got stage_id={stage_id}. Stages "
                "are counted from 0."
            )

    @abstractmethod
    def steps(self) -> Iterator[Sequence[PipeInstruction]]:
        """Yield the instructions of each step; every call starts anew.

        Returns:
            An iterator of instruction lists, one a step; an empty list is an idle step.
        """

    def num_pipe_buffers(self) -> int:
        """Give the number of buffers this stage uses.

        Returns:
            `micro_batches`: one buffer for each, unless a subclass knows better.
        """
        return self.micro_batches

    def virtual_stage(self, stage: int, chunk: int) -> int:
        """Place the chunks: which part of the model, counted from the input, a chunk of a stage is.

        Args:
            stage: A stage, in `[0, num_stages)`; not only this schedule's own.
            chunk: A chunk of that stage, in `[0, num_chunks)`.

        Returns:
            The virtual stage, in `[0, num_stages * num_chunks)`: by default the ring `chunk *
            stages + stage`.
        """
        return chunk * self.stages + stage

    @classmethod
    def can_have(cls, num_chunks: int) -> bool:
        """True if the schedule can be had with a number of chunks a stage.

        Args:
            num_chunks: Chunks a stage, at least 1.

        Returns:
            True for `num_chunks` itself, and from `min_chunks` on where the number may be chosen.
        """
        return (
            num_chunks == cls.num_chunks if cls.min_chunks is None else num_chunks >= cls.min_chunks
        )

    def promised_s(self, forward_s: float, backward_s: float, weight_s: float) -> float | None:
        """Give the closed form of the step time.

        Args:
            forward_s: Seconds of the forward of one microbatch through a whole stage, all its
                chunks.
            backward_s: Seconds of its whole backward.
            weight_s: Seconds of the weight gradient of that.

        Returns:
            Seconds; None, the default, where there is no formula.
        """
        return None

    @property
    def stage(self) -> int:
        """The stage whose instructions these are."""
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


def _whole(name: str, value: SupportsIndex) -> int:
    try:
        return operator.index(value)  # integers of numpy too
    except TypeError:
        raise ScheduleError(
            f"{name} must be a whole number, but got {name}={value!r}. Pass an int."
        ) from None


def _size(name: str, value: SupportsIndex, what: str) -> int:
    size = _whole(name, value)
    if size < 1:
        raise ScheduleError(
            f"{name} must be at least 1, but got {name}={size}. Pass the number of {what}."
        )
    return size
