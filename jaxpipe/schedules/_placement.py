"""The placement of a schedule's chunks in the model."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxpipe.errors import ScheduleError

from ._base import PipeSchedule

ChunkLocation = tuple[int, int]
"""Location of a virtual stage: `(stage, chunk)`."""


@dataclass(frozen=True)
class Placement:
    """Assignment of virtual stages to the chunks of the stages.

    Attributes:
        num_stages: Number of pipeline stages.
        num_chunks: Chunks per stage.
        virtual: `virtual[stage][chunk]` is the chunk's virtual stage, counted from the input.
        locations: `locations[virtual]` is the stage and chunk of a virtual stage.
    """

    num_stages: int
    num_chunks: int
    virtual: tuple[tuple[int, ...], ...]
    locations: tuple[ChunkLocation, ...]

    @property
    def stages(self) -> tuple[int, ...]:
        """The stage of each virtual stage."""
        return tuple(stage for stage, _ in self.locations)

    def before(self, stage: int, chunk: int) -> ChunkLocation | None:
        """Return the stage and chunk whose output a chunk takes; None at the model's input."""
        virtual = self.virtual[stage][chunk]
        return self.locations[virtual - 1] if virtual > 0 else None

    def after(self, stage: int, chunk: int) -> ChunkLocation | None:
        """Return the stage and chunk that take a chunk's output; None at the model's output."""
        virtual = self.virtual[stage][chunk]
        return self.locations[virtual + 1] if virtual + 1 < len(self.locations) else None


def placement_of(schedules: Sequence[PipeSchedule]) -> Placement:
    """Return the placement of a schedule's chunks, from the schedule object of every stage."""
    one = schedules[0]
    stages = one.stages
    chunks = one.num_chunks
    virtual = tuple(
        tuple(one.virtual_stage(stage, chunk) for chunk in range(chunks)) for stage in range(stages)
    )
    locations: dict[int, ChunkLocation] = {}
    for stage, row in enumerate(virtual):
        for chunk, index in enumerate(row):
            if index not in range(stages * chunks) or index in locations:
                raise ScheduleError(
                    "virtual_stage must return a different number for every chunk in [0, "
                    f"{stages * chunks}), but got virtual_stage(stage={stage}, "
                    f"chunk={chunk})={index}. Return each number exactly once."
                )
            locations[index] = (stage, chunk)
    # The executor's exchanges move values by one stage, up or down the ring.
    for index in range(1, stages * chunks):
        source = locations[index - 1][0]
        target = locations[index][0]
        if (target - source) % stages not in (0, 1, stages - 1):
            raise ScheduleError(
                "Parts of the model that follow each other must lie on one stage or on neighbours, "
                f"but got virtual stage {index - 1} on stage={source} and {index} on "
                f"stage={target}. Change virtual_stage so that each hop is at most one stage."
            )
    return Placement(
        stages, chunks, virtual, tuple(locations[index] for index in range(stages * chunks))
    )
