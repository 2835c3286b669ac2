"""Sums and broadcasts of tied parameters, value by value: a wrong factor or owner is seen here."""

from collections.abc import Callable, Sequence

import jax
import pytest
from _stages import filled, make_mesh, on_devices, struct, values_of

from jaxpipe.core.state import Layout, Storage, broadcast_tied, sum_tied
from jaxpipe.core.state._tied import drop_copies
from jaxpipe.core.state._zero import ByElements, ByLeaves, Replicated, ShardLayout

# `all` is stacked, since every stage has it; `some` lies in the packed buffers of the first and the
# last stage, at another place in each; `late` is owned by stage 1; `alone` is not tied.
LAYOUT = Layout(
    [
        {"all": struct(2, 2), "some": struct(3)},
        {"all": struct(2, 2), "late": struct(2), "alone": struct(5)},
        {"late": struct(2), "all": struct(2, 2), "some": struct(3)},
    ]
)
TIED = {"all": (0, 1, 2), "some": (0, 2), "late": (1, 2)}
GIVEN = [
    {"all": 1.0, "some": 2.0},
    {"all": 10.0, "late": 30.0, "alone": 40.0},
    {"all": 100.0, "late": 300.0, "some": 200.0},
]
SHARDINGS: list[Callable[[], ShardLayout]] = [
    lambda: Replicated(LAYOUT),
    lambda: ByElements(LAYOUT, 2, {}),
    lambda: ByLeaves(LAYOUT, 2, tuple(TIED)),
]


def storages(replicas: int = 1, factors: Sequence[float] = (1.0, 0.0)) -> list[Storage]:
    """The storage of every stage and replica; those of replica r times `factors[r]`."""
    return [
        filled(LAYOUT, stage, {name: value * factors[replica] for name, value in values.items()})
        for stage, values in enumerate(GIVEN)
        for replica in range(replicas)
    ]


def test_what_is_tied_and_how_it_lies() -> None:
    assert set(LAYOUT.stacked) == {"all"}
    packed = [[n for n in LAYOUT.names(s) if n not in LAYOUT.stacked] for s in range(3)]
    assert packed == [
        ["some"],
        ["late", "alone"],
        ["late", "some"],
    ]


def test_every_holder_gets_the_sum_of_all_holders() -> None:
    found = on_devices(
        make_mesh(3, 1),
        lambda grads: sum_tied(TIED, LAYOUT, jax.lax.axis_index("stage"), grads),
        storages(),
    )
    assert [values_of(LAYOUT, s, one) for s, one in enumerate(found)] == [
        {"all": 111.0, "some": 202.0},
        {"all": 111.0, "late": 330.0, "alone": 40.0},
        {"all": 111.0, "late": 330.0, "some": 202.0},
    ]


@pytest.mark.parametrize("make", SHARDINGS, ids=["replicated", "by elements", "by leaves"])
@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        pytest.param(
            broadcast_tied,
            [
                {"all": 1.0, "some": 2.0},
                {"all": 1.0, "late": 30.0, "alone": 40.0},
                {"all": 1.0, "late": 30.0, "some": 2.0},
            ],
            id="every holder gets the value of the first one",
        ),
        pytest.param(
            drop_copies,
            [
                {"all": 1.0, "some": 2.0},
                {"all": 0.0, "late": 30.0, "alone": 40.0},
                {"all": 0.0, "late": 0.0, "some": 0.0},
            ],
            id="only the first holder counts",
        ),
    ],
)
def test_copies_in_shards(
    function: Callable[..., Storage],
    wanted: list[dict[str, float]],
    make: Callable[[], ShardLayout],
) -> None:
    sharding = make()

    def device(storage: Storage) -> Storage:
        stage, replica = jax.lax.axis_index("stage"), jax.lax.axis_index("data")
        shard = sharding.reduce(stage, storage)
        return sharding.gather(
            stage, function(TIED, sharding, sharding.shard_kind(stage, replica), shard)
        )

    found = on_devices(make_mesh(3, 2), device, storages(2))
    assert [values_of(LAYOUT, i // 2, one) for i, one in enumerate(found)] == [
        one for one in wanted for _ in range(2)
    ]
