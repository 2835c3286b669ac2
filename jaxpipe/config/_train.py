"""The sections of the configuration."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from ._batch import BatchSizes, resolve_batch_sizes
from ._section import Section, setting, subsection
from ._values import auto_or, integer_of_at_least, optional, read_flag, read_partition, read_schedule


@dataclass(frozen=True)
class PipelineConfig(Section):
    """The section `pipeline`.

    Attributes:
        stages: Number of stages; `'auto'` takes the module's.
        partition: Name of the partition method, or the layer boundaries; `'best'` takes the module's method.
        schedule: Name of the training schedule, or (in a dictionary) a `PipeSchedule` class.
        activation_checkpoint_interval: Number of layers per recomputed group; 0 takes the module's.
        skip_idle: Whether idle cells are branched around instead of computed and dropped; `'auto'` decides by backend.
        scan_trunk: Whether equal layers of a stage run as one scan, for compile time that does not grow with depth.

    Raises:
        ConfigError: A value is of the wrong type or out of range.
    """

    path: ClassVar[str] = "pipeline"

    stages: int | Literal["auto"] = setting("auto", auto_or(integer_of_at_least(1)))
    partition: str | tuple[int, ...] = setting("best", read_partition)
    schedule: str | type = setting("1f1b", read_schedule)
    activation_checkpoint_interval: int = setting(0, integer_of_at_least(0))
    skip_idle: bool | Literal["auto"] = setting("auto", auto_or(read_flag))
    scan_trunk: bool = setting(False, read_flag)


@dataclass(frozen=True)
class TrainConfig(Section):
    """The whole configuration.

    Attributes:
        train_batch_size: Samples per optimizer step, over all replicas.
        train_micro_batch_size_per_gpu: Samples per microbatch on one replica.
        gradient_accumulation_steps: Microbatches per step.
        steps_per_print: Steps from one line of the log to the next; None prints none.
        pipeline: The section `pipeline`.

    Raises:
        ConfigError: A value is of the wrong type or out of range.
    """

    train_batch_size: int | None = setting(None, optional(integer_of_at_least(1)))
    train_micro_batch_size_per_gpu: int | None = setting(None, optional(integer_of_at_least(1)))
    gradient_accumulation_steps: int | None = setting(None, optional(integer_of_at_least(1)))
    steps_per_print: int | None = setting(None, optional(integer_of_at_least(1)))
    pipeline: PipelineConfig = subsection(PipelineConfig)

    def batch_sizes(self, data_parallel_size: int) -> BatchSizes:
        """Complete the sizes of a batch.

        Args:
            data_parallel_size: Number of replicas.

        Returns:
            All three sizes, as `resolve_batch_sizes` finds them.

        Raises:
            ConfigError: Neither `train_batch_size` nor `train_micro_batch_size_per_gpu` is set, or the sizes do not
                multiply.
        """
        return resolve_batch_sizes(
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
            data_parallel_size=data_parallel_size,
        )
