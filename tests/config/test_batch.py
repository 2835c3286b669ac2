from itertools import product

import pytest

from jaxpipe.config import BatchSizes, TrainConfig, resolve_batch_sizes
from jaxpipe.errors import ConfigError


def _rules(
    batch: int | None, micro: int | None, steps: int | None, world: int
) -> BatchSizes | None:
    """What DeepSpeed's rules give, written down as it states them; None where it refuses."""
    if batch is not None and micro is not None and steps is None:
        steps = batch // micro // world
    elif batch is not None and micro is None and steps is not None:
        micro = batch // world // steps
    elif batch is None and micro is not None and steps is not None:
        batch = micro * steps * world
    elif batch is not None and micro is None and steps is None:
        micro, steps = batch // world, 1
    elif batch is None and micro is not None and steps is None:
        batch, steps = micro * world, 1
    if batch is None or micro is None or steps is None or min(batch, micro, steps) < 1:
        return None
    return BatchSizes(batch, micro, steps) if batch == micro * steps * world else None


@pytest.mark.parametrize("world", range(1, 5))
def test_every_small_triangle(world: int) -> None:
    for batch, micro, steps in product(
        [None, *range(1, 17)], [None, *range(1, 6)], [None, *range(1, 6)]
    ):
        expected = _rules(batch, micro, steps, world)
        if expected is None:
            with pytest.raises(
                ConfigError, match=r"train_batch_size = train_micro_batch_size_per_gpu x gradient_"
            ):
                resolve_batch_sizes(batch, micro, steps, data_parallel_size=world)
        else:
            assert resolve_batch_sizes(batch, micro, steps, data_parallel_size=world) == expected


def test_the_configuration_resolves_its_own_sizes() -> None:
    config = TrainConfig(train_batch_size=64, train_micro_batch_size_per_gpu=4)
    assert config.batch_sizes(data_parallel_size=2) == BatchSizes(64, 4, 8)


@pytest.mark.parametrize(
    ("batch", "micro", "steps", "world", "match"),
    [
        (
            7,
            1,
            2,
            1,
            r"must hold, but got 7 != 1 x 2 x 1. Use train_batch_size=2, or leave out one",
        ),
        (
            64,
            4,
            None,
            3,
            r"must hold, but got 64 = 4 x \? x 3. .* multiple of 12: the nearest to 64 is 60 or 72",
        ),
        (
            64,
            None,
            5,
            2,
            r"must hold, but got 64 = \? x 5 x 2. .* multiple of 10: the nearest to 64 is 60 or 70",
        ),
        (
            64,
            None,
            None,
            3,
            r"must hold, but got 64 = \? x 1 x 3. .* multiple of 3: the nearest to 64 is 63 or 66",
        ),
        (
            2,
            None,
            2,
            4,
            r"must hold, but got 2 = \? x 2 x 4. .* multiple of 8: the nearest to 2 is 8",
        ),
        (None, None, 2, 4, r"must be given .* but got \? = \? x 2 x 4. Add one of the two keys"),
        (
            None,
            None,
            None,
            4,
            r"must be given .* but got \? = \? x \? x 4. Add one of the two keys",
        ),
    ],
)
def test_messages_print_the_equation_and_the_repair(
    batch: int | None, micro: int | None, steps: int | None, world: int, match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        resolve_batch_sizes(batch, micro, steps, data_parallel_size=world)


@pytest.mark.parametrize(
    "name",
    [
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "data_parallel_size",
    ],
)
def test_sizes_must_be_positive_integers(name: str) -> None:
    for value in [0, -4, True, 4.0, "4"]:
        sizes = {"train_batch_size": 8, "data_parallel_size": 1, name: value}
        with pytest.raises(
            ConfigError, match=rf"{name} must be an integer of at least 1, but got {name}={value!r}"
        ):
            resolve_batch_sizes(**sizes)
