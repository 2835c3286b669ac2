"""The decisions made before a pipeline is built: schedule, placement and cut."""

import functools
from collections.abc import Hashable
from dataclasses import dataclass

from jaxpipe.config import TrainConfig
from jaxpipe.partition import Profile
from jaxpipe.schedules import (
    IdlePolicy,
    PipeSchedule,
    TickProgram,
    forward_schedule,
    lower_schedule,
    with_idle,
)


@dataclass(frozen=True)
class Plan:
    """Decisions on how a model goes onto a pipeline.

    Attributes:
        config: With the schedule, and whether idle actions are skipped, decided.
        schedule: The training schedule's class.
        program: The same, lowered, with the stage and chunk of each virtual stage, and the plan of
            each run of ticks.
        idle: The policy that these plans follow.
        signatures: Per layer a value that is equal for alike layers; all None on a single virtual
            stage.
        parts: Boundaries of the virtual stages, as layer indices.
        sends_early: Whether activations leave at the end of the tick that computes them, to travel
            under its backward.
        profile: Costs of the layers, where the cut was made by them.
        choice: Where the schedule was `"auto"`, the table of what it was chosen from.
        notes: Sentences on what the cut costs.
    """

    config: TrainConfig
    schedule: type[PipeSchedule]
    program: TickProgram
    idle: IdlePolicy
    signatures: tuple[Hashable, ...]
    parts: tuple[int, ...]
    sends_early: bool
    profile: Profile | None = None
    choice: str = ""
    notes: tuple[str, ...] = ()

    @functools.cached_property
    def forward_only(self) -> TickProgram:
        """The program of evaluation."""
        sizes = self.program.num_microbatches, self.program.num_stages
        return with_idle(
            lower_schedule(forward_schedule(self.schedule), *sizes, training=False), self.idle
        )
