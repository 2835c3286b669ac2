"""The decisions made before a pipeline is built: schedule, placement and cut."""

import functools
from collections.abc import Hashable
from dataclasses import dataclass

from jaxpipe.config import TrainConfig
from jaxpipe.schedules import (
    IdlePolicy,
    PipeSchedule,
    TickProgram,
    forward_schedule,
    lower_schedule,
    with_idle,
)
from jaxpipe.schedules.partition import Profile


@dataclass(frozen=True)
class PipelinePlan:
    """Decisions on how a model is mapped to a pipeline.

    Attributes:
        config: The configuration, with the schedule and the skipping of idle actions decided.
        program: The lowered schedule, with the stage and chunk of each virtual stage and the plan
            of each run of ticks.
        idle: The idle policy of these plans.
        signatures: A value per layer, equal for alike layers. All are None if there is a single
            virtual stage.
        parts: Boundaries of the virtual stages, as layer indices.
        sends_early: Whether activations are sent at the end of the tick that computes them, so that
            its backward overlaps the exchange.
        profile: Costs of the layers, if the cut is based on them.
        choice: The table of candidates, if the schedule was `"auto"`.
        notes: Sentences about the cost of the cut.
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
        """Lower the forward-only schedule, for evaluation."""
        sizes = self.program.num_microbatches, self.program.num_stages
        return with_idle(
            lower_schedule(forward_schedule(self.schedule), *sizes, training=False), self.idle
        )
