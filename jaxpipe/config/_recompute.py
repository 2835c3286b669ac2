"""The section that sets how recomputed groups of layers store their inputs."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from jaxpipe.errors import ConfigError

from ._section import Section, join, setting
from ._values import integer_of_at_least, optional, read_flag


@dataclass(frozen=True)
class ActivationCheckpointingSection(Section):
    """The section `activation_checkpointing`: how inputs of recomputed groups of layers are stored.

    Attributes:
        partition_activations: Whether to shard the stored inputs over the model axis.
        cpu_checkpointing: Whether to keep the stored inputs in host memory.
        contiguous_memory_optimization: Whether to keep the stored inputs in one buffer. Requires
            `partition_activations` and `number_checkpoints`.
        number_checkpoints: Number of recomputed groups.
        synchronize_checkpoint_boundary: Whether devices wait for each other at each group.
        profile: Whether to log the time of each group.

    Raises:
        ConfigError: A value is of the wrong type or out of range, or
            `contiguous_memory_optimization` is set without the keys that it requires.
    """

    path: ClassVar[str] = "activation_checkpointing"

    partition_activations: bool = setting(False, read_flag)
    cpu_checkpointing: bool = setting(False, read_flag)
    contiguous_memory_optimization: bool = setting(False, read_flag)
    number_checkpoints: int | None = setting(None, optional(integer_of_at_least(1)))
    synchronize_checkpoint_boundary: bool = setting(False, read_flag)
    profile: bool = setting(False, read_flag)

    def check(self) -> Iterable[ConfigError]:
        """Check that the keys that one buffer requires are set."""
        if not self.contiguous_memory_optimization:
            return
        path = join(self.path, "contiguous_memory_optimization")
        needed = {
            "partition_activations": (self.partition_activations, "=true", "Set both, or neither"),
            "number_checkpoints": (
                self.number_checkpoints,
                " is given",
                "Give the number of recomputed groups too, or set neither",
            ),
        }
        for key, (value, rule, repair) in needed.items():
            if not value:
                other = join(self.path, key)
                message = (
                    f"{path} must be false unless {other}{rule}, but got {path}=True. {repair}."
                )
                yield ConfigError(message, paths=[path, other])
