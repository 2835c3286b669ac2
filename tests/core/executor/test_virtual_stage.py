"""Virtual stages: where a chunk of a stage lies in the model."""

import jax
import jax.numpy as jnp
import pytest

from jaxpipe.core.executor._virtual_stage import VirtualStage
from jaxpipe.schedules import Placement, lower_schedule


def placement_of(schedule: str) -> Placement:
    return lower_schedule(schedule, 3, 4).placement


@pytest.mark.parametrize("is_traced", [True, False])
@pytest.mark.parametrize(
    ("schedule", "second"), [("interleaved", [1, 5]), ("1f1b-v", [1, 6])], ids=str
)
def test_the_index_counts_from_the_models_input(
    schedule: str, second: list[int], is_traced: bool
) -> None:
    """On the second of four stages, whose second chunk is the sixth, or the seventh going back."""
    placement = placement_of(schedule)
    chunks = [jnp.int32(chunk) if is_traced else chunk for chunk in range(2)]
    stages = [VirtualStage(jnp.int32(1), chunk, placement) for chunk in chunks]
    assert [int(at.index) for at in stages] == second
    assert [[bool(at.is_at(v)) for v in second] for at in stages] == [[True, False], [False, True]]


@pytest.mark.parametrize(("schedule", "last"), [("interleaved", (3, 1)), ("1f1b-v", (0, 1))])
def test_the_last_one_is_also_called_minus_one(schedule: str, last: tuple[int, int]) -> None:
    placement = placement_of(schedule)
    found = [
        (stage, chunk)
        for stage in range(4)
        for chunk in range(2)
        if jax.device_get(VirtualStage(jnp.int32(stage), chunk, placement).is_at(-1))
    ]
    assert found == [last]


def test_candidates_are_those_of_the_chunk_on_any_stage() -> None:
    placement = placement_of("1f1b-v")
    assert VirtualStage(jnp.int32(2), 1, placement).candidates == [7, 6, 5, 4]
    traced = VirtualStage(jnp.int32(2), jnp.int32(1), placement)
    assert sorted(traced.candidates) == list(range(8))
