"""The sections of the configuration."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal

from jaxpipe.errors import ConfigError

from ._batch import BatchSizes, resolve_batch_sizes
from ._checkpoint import CheckpointSection
from ._ema import EMASection
from ._monitors import (
    CometSection,
    CSVMonitorSection,
    MLflowSection,
    TensorBoardSection,
    TrackioSection,
    WandbSection,
)
from ._optimizer import OptimizerSection, SchedulerSection
from ._precision import BF16Section, DataTypesSection, Dtype, FP16Section
from ._profiler import FlopsProfilerSection
from ._recompute import ActivationCheckpointingSection
from ._section import Section, setting, subsection, with_inner_keys
from ._values import (
    auto_or,
    integer_of_at_least,
    number_of_at_least,
    one_of,
    optional,
    read_flag,
    read_partition,
    read_positive_number,
    read_schedule,
)
from ._zero import ZeroSection, refuse_flag


@dataclass(frozen=True)
class PipelineConfig(Section):
    """The section `pipeline`.

    Attributes:
        stages: Number of stages; `'auto'` takes the module's.
        partition: Name of the partition method, or the layer boundaries; `'best'` takes the
            module's method.
        schedule: Name of the training schedule, or (in a dictionary) a `PipeSchedule` class;
            `'auto'` chooses one.
        activation_checkpoint_interval: Number of layers per recomputed group; 0 takes the module's.
        skip_idle: Whether idle actions are branched around instead of computed and dropped;
            `'auto'` decides by backend, schedule and mesh.
        scan_trunk: Whether equal layers of a stage run as one scan, for compile time that does not
            grow with depth; it costs a copy of the trunk's parameters per step.
        seed_layers: Whether each layer's random keys depend on its place alone; None takes the
            module's. DeepSpeed reads the key and does nothing with it.
        num_chunks: Model chunks on each stage, for schedules that interleave them; `'auto'` takes
            the schedule's own number, or leaves it to the schedule `'auto'`.
        max_pending_weights: The most weight gradients, counted on each chunk, that the schedules
            `'zero-bubble'`, `'zero-bubble-h1'`, `'zero-bubble-v'` and `'dual-pipe-v'` keep pending
            on a stage; `'auto'` takes the schedule's own number, or as many as fit where
            `memory_limit_gb` is set. With recompute they are what takes most memory: about 26 GB
            for a model of 7B parameters on 8 stages (1.85 GB each).
        memory_limit_gb: What the schedule `'auto'`, the pending weight gradients of the schedules
            with split backwards and the partition `'profile'` may plan for on a device, in GB of
            10^9 bytes, all that training holds included; refused where none is used. `'auto'` takes
            the device's memory, but leaves the pending weight gradients of a named schedule as they
            are.
        offload_activations: Whether what waits between forward and backward lies in host memory.
        gather_weights: When weights that are divided over an axis `fsdp` are gathered. `'step'`
            gathers them once and holds them to the end of the step. `'tick'` gathers a layer's
            weights in every action and frees them after it. `'auto'` is `'step'` with
            `zero_optimization.stage` 2, else `'tick'`.
        split_vocabulary: Whether the embedding, the layer that makes the logits, and the loss are
            split over the stages, so that the loss takes an equal share of a tick on every stage.
            The first layer must be an `nn.Embed` or `nnx.Embed`, the last an `nn.Dense` or
            `nnx.Linear`, or the embedding again, tied, by `attend`; and the loss must give the
            logits to `jaxpipe.losses.cross_entropy`. Numbers, names and checkpoints stay. `'auto'`
            splits where all of this holds and a step is then at least 1 % shorter, by operations
            and bytes, and says what it decided. `true` refuses layers of another form; for a loss
            of another form it puts the logits together on every stage, and warns of it.
        overlap_vocabulary: Whether last layers that are split over the stages run with the loss a
            tick after the forward whose output they take, and the backward with them: what they
            exchange over the stages then travels under the next forward. A stage holds the
            residuals of one microbatch more; most schedules take no longer, `'zero-bubble-v'` does.
            `'auto'` does so on accelerators where stages lie on several hosts and the schedule
            takes at most 2 % longer for it; inside a host nothing is gained.

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
    seed_layers: bool | None = setting(None, optional(read_flag))
    num_chunks: int | Literal["auto"] = setting("auto", auto_or(integer_of_at_least(1)))
    max_pending_weights: int | Literal["auto"] = setting("auto", auto_or(integer_of_at_least(1)))
    memory_limit_gb: float | Literal["auto"] = setting("auto", auto_or(read_positive_number))
    offload_activations: bool = setting(False, read_flag)
    gather_weights: Literal["auto", "step", "tick"] = setting(
        "auto", one_of("auto", "step", "tick")
    )
    split_vocabulary: bool | Literal["auto"] = setting("auto", auto_or(read_flag))
    overlap_vocabulary: bool | Literal["auto"] = setting("auto", auto_or(read_flag))


@with_inner_keys
@dataclass(frozen=True)
class TrainConfig(Section):
    """The whole configuration.

    Attributes:
        train_batch_size: Samples per optimizer step, over all replicas.
        train_micro_batch_size_per_gpu: Samples per microbatch on one replica.
        gradient_accumulation_steps: Microbatches per step.
        steps_per_print: Steps from one line with loss, rate and speed to the next; None, unlike
            DeepSpeed's 10, prints none, since each waits for its step.
        pipeline: The section `pipeline`.
        gradient_clipping: Largest global norm of the gradients over all stages; 0 does not clip.
            Where the key is absent nothing is clipped, whereas DeepSpeed 0.19 silently clips at
            1.0.
        gradient_norms_by_layer: Whether `engine.metrics["grad_norms"]` and the monitors have the
            norm of each layer's gradient, before clipping.
        fp16: The section `fp16`.
        bf16: The section `bf16`, which may also be written `bfloat16`.
        data_types: The section `data_types`.
        zero_optimization: The section `zero_optimization`.
        optimizer: The section `optimizer`; None: no optimizer is named.
        scheduler: The section `scheduler`; None: no learning-rate schedule is named.
        ema: The section `ema`; None: nothing is averaged.
        activation_checkpointing: The section `activation_checkpointing`.
        checkpoint: The section `checkpoint`.
        tensorboard: The section `tensorboard`.
        wandb: The section `wandb`.
        csv_monitor: The section `csv_monitor`.
        comet: The section `comet`.
        mlflow: The section `mlflow`.
        trackio: The section `trackio`.
        flops_profiler: The section `flops_profiler`.
        wall_clock_breakdown: Whether a line every `steps_per_print` steps, or every 10 where that
            is None, says what steps wait for: data, the host, a checkpoint, the devices; and what
            the last of them, which is recorded, spends in each phase.
        memory_breakdown: Whether a line after the first step says what the memory of a device
            holds.
        dump_state: Whether the configuration is shown when the engine is made.

    Raises:
        ConfigError: A value is of the wrong type or out of range, or `fp16` and `bf16` are both
            enabled.
    """

    aliases: ClassVar[Mapping[str, str]] = MappingProxyType({"bfloat16": "bf16"})

    train_batch_size: int | None = setting(None, optional(integer_of_at_least(1)))
    train_micro_batch_size_per_gpu: int | None = setting(None, optional(integer_of_at_least(1)))
    gradient_accumulation_steps: int | None = setting(None, optional(integer_of_at_least(1)))
    steps_per_print: int | None = setting(None, optional(integer_of_at_least(1)))
    pipeline: PipelineConfig = subsection(PipelineConfig)
    gradient_clipping: float = setting(0.0, number_of_at_least(0))
    gradient_norms_by_layer: bool = setting(False, read_flag)
    fp16: FP16Section = subsection(FP16Section)
    bf16: BF16Section = subsection(BF16Section)
    data_types: DataTypesSection = subsection(DataTypesSection)
    zero_optimization: ZeroSection = subsection(ZeroSection, instead=refuse_flag)
    optimizer: OptimizerSection | None = subsection(OptimizerSection, absent=True)
    scheduler: SchedulerSection | None = subsection(SchedulerSection, absent=True)
    ema: EMASection | None = subsection(EMASection, absent=True)
    activation_checkpointing: ActivationCheckpointingSection = subsection(
        ActivationCheckpointingSection
    )
    checkpoint: CheckpointSection = subsection(CheckpointSection)
    tensorboard: TensorBoardSection = subsection(TensorBoardSection)
    wandb: WandbSection = subsection(WandbSection)
    csv_monitor: CSVMonitorSection = subsection(CSVMonitorSection)
    comet: CometSection = subsection(CometSection)
    mlflow: MLflowSection = subsection(MLflowSection)
    trackio: TrackioSection = subsection(TrackioSection)
    flops_profiler: FlopsProfilerSection = subsection(FlopsProfilerSection)
    wall_clock_breakdown: bool = setting(False, read_flag)
    memory_breakdown: bool = setting(False, read_flag)
    dump_state: bool = setting(False, read_flag)

    def check(self) -> Iterable[ConfigError]:
        """Check that one dtype is computed in."""
        if self.fp16.enabled and self.bf16.enabled:
            yield ConfigError(
                "fp16.enabled and bf16.enabled must not both be true, but got fp16.enabled=True "
                "and bf16.enabled=True. Remove one of the two sections.",
                paths=["fp16.enabled", "bf16.enabled"],
            )

    @property
    def compute_dtype(self) -> Dtype:
        """The dtype in which layers get their parameters."""
        if self.fp16.enabled:
            return "float16"
        return "bfloat16" if self.bf16.enabled else "float32"

    def batch_sizes(self, data_parallel_size: int) -> BatchSizes:
        """Complete the sizes of a batch.

        Args:
            data_parallel_size: Number of replicas.

        Returns:
            All three sizes, as `resolve_batch_sizes` finds them.

        Raises:
            ConfigError: Neither `train_batch_size` nor `train_micro_batch_size_per_gpu` is set, or
                the sizes do not multiply.
        """
        return resolve_batch_sizes(
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
            data_parallel_size=data_parallel_size,
        )
