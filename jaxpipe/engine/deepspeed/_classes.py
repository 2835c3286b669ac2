"""The configuration as classes to subclass, as in DeepSpeed's first reference manual."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Self, cast

from jaxpipe.config import (
    Collector,
    FP16Section,
    Section,
    TrainConfig,
    number_of_at_least,
    optional,
    read_flag,
    read_section,
    resolve_batch_sizes,
)
from jaxpipe.errors import ConfigError, shown

from ._struct import Config


class BatchConfig(Config):
    """The sizes of a batch.

    Attributes:
        train_batch_size: Samples per optimiser step, over all replicas.
        train_micro_batch_size_per_gpu: Samples per microbatch on one replica.
        gradient_accumulation_steps: Microbatches per step.
        data_parallel_size: Number of replicas that `resolve` assumes. An engine uses its own.

    Example:
        >>> config = BatchConfig(train_batch_size=64, train_micro_batch_size_per_gpu=4)
        >>> config.resolve().gradient_accumulation_steps
        16
    """

    train_batch_size: int | None = None
    train_micro_batch_size_per_gpu: int | None = None
    gradient_accumulation_steps: int | None = None
    data_parallel_size: int = 1

    def resolve(self) -> Self:
        """Complete the sizes, as `resolve_batch_sizes` does.

        Returns:
            The configuration itself, now with all sizes.

        Raises:
            ConfigError: A size is not a positive integer, a size is missing that cannot be
                computed, or the sizes contradict each other.
        """
        sizes = resolve_batch_sizes(
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
            data_parallel_size=self.data_parallel_size,
        )
        return self._complete(**vars(sizes))


class FP16Config(Config):
    """Computing in float16.

    Attributes:
        enabled: Whether to compute in float16. None means no.
        clip: Maximum global norm of the gradients, as `TrainConfig.gradient_clipping`. None means
            no clipping.
    """

    enabled: bool | None = None
    clip: float | None = None

    def resolve(self) -> Self:
        """Fill in the values that are not given.

        Returns:
            The configuration itself. `enabled` is now a truth value, and `clip` a number, with 0
            for no clipping.

        Raises:
            ConfigError: `enabled` is not a truth value, or `clip` is not a number of at least 0.
        """
        enabled = optional(read_flag)(self.enabled, "fp16.enabled") or False
        clip = optional(number_of_at_least(0))(self.clip, "fp16.clip") or 0.0
        return self._complete(enabled=enabled, clip=clip)


class TrainingConfig(Config):
    """The whole configuration in this form, for `load_config` and `initialize`.

    A subclass may add fields. A field with the name of a key of `TrainConfig` sets that key. In a
    subclass of `FP16Config`, so does a field with the name of a key of the section `fp16`. All
    other fields are for the script's own use.

    Attributes:
        batch: The sizes of a batch.
        fp16: Computing in float16, and clipping.

    Example:
        >>> config = TrainingConfig(
        ...     batch={"train_batch_size": 64}, fp16={"enabled": True, "clip": 1.0}
        ... )
        >>> config.to_train_config().gradient_clipping
        1.0
    """

    batch: BatchConfig = BatchConfig()
    fp16: FP16Config = FP16Config()

    def to_train_config(self) -> TrainConfig:
        """Convert to the configuration that engines read.

        Missing sizes stay missing. An engine completes them for its number of replicas.

        Returns:
            The configuration.

        Raises:
            ConfigError: A value is wrong, or clipping is given twice.
        """
        errors = Collector()
        clip = self.fp16.clip
        own = _keys_of(TrainConfig, {name: value for name, value in self.items() if name != "fp16"})
        with errors.catch():
            if clip is not None and own.get("gradient_clipping") is not None:
                given = (
                    f"gradient_clipping={shown(own['gradient_clipping'])} and "
                    f"fp16.clip={shown(clip)}"
                )
                raise ConfigError(
                    f"gradient_clipping must be given once, but got {given}. Keep one of them.",
                    paths=["gradient_clipping", "fp16.clip"],
                )
            if clip is not None:
                own["gradient_clipping"] = number_of_at_least(0)(clip, "fp16.clip")
        fp16 = _keys_of(FP16Section, self.fp16)
        config = read_section(
            TrainConfig, {**_keys_of(TrainConfig, self.batch), **own, "fp16": fp16}, "", errors
        )
        errors.raise_all()
        return cast("TrainConfig", config)


def _keys_of(section: type[Section], config: Mapping[str, Any]) -> dict[str, Any]:
    """The given fields that are keys of a section."""
    names = {item.name for item in fields(section)}
    return {name: value for name, value in config.items() if name in names and value is not None}
