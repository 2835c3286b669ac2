"""Settings of a `PipelineModule`: all its arguments other than its layers and stages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ._arguments import checked_callable, checked_dtype, checked_flag, checked_interval
from ._sharding import checked_rules
from ._trainable import Trainable, checked_trainable


@dataclass(frozen=True, eq=False)
class ModuleSettings:
    """Checked settings, with the names that the constructor of `PipelineModule` documents."""

    loss_fn: Callable[..., Any] | None = None
    seed_layers: bool = False
    seed_fn: Callable[[int], jax.Array] | None = None
    base_seed: int = 1234
    partition_method: str | Sequence[int] = "best"
    activation_checkpoint_interval: int = 0
    activation_checkpoint_func: Callable[..., Any] | None = None
    # The module itself checks these names, because it knows its layers.
    checkpointable_layers: Sequence[str] | None = None
    compute_dtype: Any = None
    auto_cast: bool = False
    sharding_rules: Sequence[tuple[str, str | tuple[str, ...] | None]] | None = None
    trainable: Trainable | None = None

    def __post_init__(self) -> None:
        found = {
            "loss_fn": checked_callable("loss_fn", self.loss_fn),
            "seed_layers": checked_flag("seed_layers", self.seed_layers),
            "seed_fn": checked_callable("seed_fn", self.seed_fn) or jax.random.key,
            "compute_dtype": checked_dtype(self.compute_dtype),
            "auto_cast": checked_flag("auto_cast", self.auto_cast),
            "sharding_rules": checked_rules(self.sharding_rules),
            "trainable": checked_trainable(self.trainable),
            "activation_checkpoint_func": checked_callable(
                "activation_checkpoint_func", self.activation_checkpoint_func
            ),
            "activation_checkpoint_interval": checked_interval(self.activation_checkpoint_interval),
        }
        for name, value in found.items():
            # The only way to set a field of a frozen dataclass, here to its checked and converted
            # value.
            object.__setattr__(self, name, value)
