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
        stages: Number of stages. `'auto'` uses the module's number.
        partition: Name of the partition method, or a list of layer boundaries. `'best'` uses the
            module's method.
        schedule: Name of the training schedule, or a `PipeSchedule` class if the configuration is a
            dictionary. `'auto'` chooses one.
        activation_checkpoint_interval: Number of layers in each recomputed group. 0 uses the
            module's interval.
        skip_idle: Whether to branch around idle actions instead of computing them and discarding
            the result. `'auto'` decides by backend, schedule and mesh.
        scan_trunk: Whether to run equal layers of a stage as one scan, so that compile time does
            not grow with depth. It costs one copy of the trunk's parameters per step.
        seed_layers: Whether each layer's random keys depend only on its position in the model. By
            default the module decides. DeepSpeed reads this key but ignores it.
        num_chunks: Number of model chunks on each stage, for schedules that interleave them.
            `'auto'` uses the schedule's default, or lets the schedule `'auto'` choose.
        max_pending_weights: Maximum number of weight gradients per chunk that the schedules
            `'zero-bubble'`, `'zero-bubble-h1'`, `'zero-bubble-v'` and `'dual-pipe-v'` may keep
            pending on a stage. `'auto'` uses the schedule's default, or as many as fit if
            `memory_limit_gb` is set. With recompute they take the most memory: about 26 GB for a
            model with 7B parameters on 8 stages (1.85 GB each).
        memory_limit_gb: Memory of a device that planning may use, in GB of 10^9 bytes, including
            everything that training keeps there. It limits the schedule `'auto'`, the pending
            weight gradients of schedules with split backward passes, and the partition
            `'profile'`. Setting it when none of them is used is an error. `'auto'` uses the
            device's memory, but does not change the pending weight gradients of a named schedule.
        offload_activations: Whether to keep residuals in host memory between the forward and the
            backward pass.
        gather_weights: When to gather weights that are divided over the axis `fsdp`. `'step'`
            gathers them once and keeps them until the end of the step. `'tick'` gathers a layer's
            weights in every action and frees them afterwards. `'auto'` means `'step'` with
            `zero_optimization.stage` 2, and `'tick'` otherwise.
        split_vocabulary: Whether to split the embedding, the layer that computes the logits, and
            the loss over the stages, so that the loss takes an equal share of a tick on every
            stage. The first layer must be an `nn.Embed` or `nnx.Embed`. The last layer must be an
            `nn.Dense`, an `nnx.Linear`, or the tied embedding used through `attend`. Its logits may
            be `jaxpipe.layers.SoftCapped`. The loss must pass the logits to
            `jaxpipe.losses.cross_entropy`. Results, parameter names and checkpoints do not change.
            `'auto'` splits if all of this holds and the step becomes at least 1 % shorter,
            estimated from operations and bytes, and logs its decision. `true` raises an error for
            layers of another form. For a loss of another form it gathers the logits on every stage,
            and warns about it.
        overlap_vocabulary: Whether last layers that are split over the stages run with the loss one
            tick after the forward pass that feeds them, and the backward pass with them. The next
            forward pass then overlaps their exchanges between stages. Each stage keeps the
            residuals of one more microbatch. Most schedules do not become longer, but
            `'zero-bubble-v'` does. `'auto'` enables it on accelerators if the stages are on several
            hosts and the schedule becomes at most 2 % longer. Within one host it gains nothing.
        router_bias_update_rate: How far each step moves the parameters that a layer marks with
            `jaxpipe.layers.load_bias`: down where the load of the whole batch is positive, up where
            it is negative. The router biases of `ExpertsConfig(correction_bias=True)` are marked,
            and their load is the number of tokens above the mean of all experts. This balances
            experts without a loss, as in DeepSeek-V3 (there 0.001).

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
    router_bias_update_rate: float = setting(0.0, number_of_at_least(0.0))


@with_inner_keys
@dataclass(frozen=True)
class TrainConfig(Section):
    """The whole configuration.

    Attributes:
        train_batch_size: Samples per optimiser step, over all replicas.
        train_micro_batch_size_per_gpu: Samples per microbatch on one replica.
        gradient_accumulation_steps: Microbatches per step.
        steps_per_print: Number of steps between log lines with loss, learning rate and speed. The
            default prints none, unlike DeepSpeed's 10, because each line waits for its step.
        pipeline: The section `pipeline`.
        gradient_clipping: Maximum global norm of the gradients, over all stages. 0 disables
            clipping. Without this key nothing is clipped, whereas DeepSpeed 0.19 silently clips at
            1.0.
        nonfinite: What happens to a step whose gradient norm is not finite. `'skip'` does not apply
            its update. `'stop'` does not apply it either, and the engine then raises an error with
            the step, its loss and its norm: in the next call of `train_batch`, `forward` or
            `save_checkpoint`, or one step later, because no step waits for the previous one. The
            state has only finite updates and can be saved. `'ignore'` applies the update. `'auto'`
            skips with `fp16` and `bf16`, and stops in float32.
        gradient_norms_by_layer: Whether `engine.metrics["grad_norms"]` and the monitors report the
            norm of each layer's gradient, before clipping.
        fp16: The section `fp16`.
        bf16: The section `bf16`, which may also be written `bfloat16`.
        data_types: The section `data_types`.
        zero_optimization: The section `zero_optimization`.
        optimizer: The section `optimizer`. By default no optimiser is named.
        scheduler: The section `scheduler`. By default no learning-rate schedule is named.
        ema: The section `ema`. By default no average is kept.
        activation_checkpointing: The section `activation_checkpointing`.
        checkpoint: The section `checkpoint`.
        tensorboard: The section `tensorboard`.
        wandb: The section `wandb`.
        csv_monitor: The section `csv_monitor`.
        comet: The section `comet`.
        mlflow: The section `mlflow`.
        trackio: The section `trackio`.
        flops_profiler: The section `flops_profiler`.
        wall_clock_breakdown: Whether to log how long steps wait for data, the host, a checkpoint
            and the devices. The line is printed every `steps_per_print` steps, or every 10 if that
            is not set. The last step before a line is recorded, and the line also shows its time in
            each phase.
        memory_breakdown: Whether to log, after the first step, what the memory of a device holds.
        dump_state: Whether to log the configuration when the engine is created.

    Raises:
        ConfigError: A value is of the wrong type or out of range, `fp16` and `bf16` are both
            enabled, or overflows are ignored with a dynamic loss scale.
    """

    aliases: ClassVar[Mapping[str, str]] = MappingProxyType({"bfloat16": "bf16"})

    train_batch_size: int | None = setting(None, optional(integer_of_at_least(1)))
    train_micro_batch_size_per_gpu: int | None = setting(None, optional(integer_of_at_least(1)))
    gradient_accumulation_steps: int | None = setting(None, optional(integer_of_at_least(1)))
    steps_per_print: int | None = setting(None, optional(integer_of_at_least(1)))
    pipeline: PipelineConfig = subsection(PipelineConfig)
    gradient_clipping: float = setting(0.0, number_of_at_least(0))
    nonfinite: Literal["auto", "skip", "stop", "ignore"] = setting(
        "auto", one_of("auto", "skip", "stop", "ignore")
    )
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
        """Check that `fp16` and `bf16` are not both enabled, and that `fp16` suits `nonfinite`."""
        if self.fp16.enabled and self.bf16.enabled:
            yield ConfigError(
                "fp16.enabled and bf16.enabled must not both be true, but got fp16.enabled=True "
                "and bf16.enabled=True. Remove one of the two sections.",
                paths=["fp16.enabled", "bf16.enabled"],
            )
        if self.fp16.enabled and not self.fp16.loss_scale and self.nonfinite == "ignore":
            yield ConfigError(
                "nonfinite must be 'skip' or 'stop' with a dynamic loss scale, which overflows "
                "until it has found its value, but got nonfinite='ignore' and fp16.loss_scale=0. "
                "Remove nonfinite, or set fp16.loss_scale to a constant.",
                paths=["nonfinite", "fp16.loss_scale"],
            )

    @property
    def compute_dtype(self) -> Dtype:
        """The dtype of the parameters that layers receive."""
        if self.fp16.enabled:
            return "float16"
        return "bfloat16" if self.bf16.enabled else "float32"

    @property
    def on_nonfinite(self) -> Literal["skip", "stop", "ignore"]:
        """What happens to a step whose gradient norm is not finite; see `nonfinite`."""
        if self.nonfinite != "auto":
            return self.nonfinite
        return "stop" if self.compute_dtype == "float32" else "skip"

    def batch_sizes(self, data_parallel_size: int) -> BatchSizes:
        """Complete the sizes of a batch.

        Args:
            data_parallel_size: Number of replicas.

        Returns:
            All three sizes, as computed by `resolve_batch_sizes`.

        Raises:
            ConfigError: Neither `train_batch_size` nor `train_micro_batch_size_per_gpu` is set, or
                the sizes contradict each other.
        """
        return resolve_batch_sizes(
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
            data_parallel_size=data_parallel_size,
        )
