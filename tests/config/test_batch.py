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
