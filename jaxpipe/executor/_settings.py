"""How a pipeline runs and updates, beside the model, the optimiser and the mesh."""

from dataclasses import dataclass
from typing import Any

from jaxpipe.optim import LossScaler
from jaxpipe.schedules import PipeSchedule


@dataclass(frozen=True)
class PipelineSettings:
    """Settings of a `Pipeline`; the configuration's keys in the form the runtime takes.

    Attributes:
        schedule: Name of a training schedule, or a `PipeSchedule` class; `"auto"` chooses one, within what the other
            settings say.
        num_chunks: Model chunks on each stage; None: the schedule's own number.
        max_pending: The most pending weight halves of `"zero-bubble"`; None: the schedule's own number.
        memory_limit_bytes: What `"auto"`, and a cut by `"profile"`, may plan for on a device; None: the device's.
        skip_idle: Branch around idle cells instead of computing and dropping them. None: on CPUs yes; elsewhere the
            branch would cost a host synchronisation and all overlap with communication, so no, but for schedules that
            split the backward: there an idle half, if it were computed, would take the time that splitting saves.
        spread_inputs: Hold inputs and labels in shares, one a stage, and gather each microbatch when it is needed.
            None: only leaves of at least 32 MiB.
        offload_activations: Let what waits between forward and backward lie in host memory.
        scan_trunk: Run equal layers of a stage as one scan, so that compile time does not grow with depth; costs a
            copy of the trunk's parameters per step.
        gradient_clipping: Largest global norm of the gradient; 0 clips nothing.
        grad_accum_dtype: What gradients are summed in. None: float32, or the parameters' dtype where that is wider.
        zero_stage: 1 divides optimiser state and the parameters kept between steps over the replicas; 0 does not.
        loss_scaler: Scales the loss and skips updates whose gradients overflow; None does neither.
    """

    schedule: str | type[PipeSchedule] = "1f1b"
    num_chunks: int | None = None
    max_pending: int | None = None
    memory_limit_bytes: int | None = None
    skip_idle: bool | None = None
    spread_inputs: bool | None = None
    offload_activations: bool = False
    scan_trunk: bool = False
    gradient_clipping: float = 0.0
    grad_accum_dtype: Any = None
    zero_stage: int = 0
    loss_scaler: LossScaler | None = None
