"""The step of one device: a tick program with its computations, exchanges and gradient sums."""

from ._batch import WHOLE, batch_shard_dims, batch_spec, microbatch_key, samples_spec, stream_bytes
from ._evaluate import EvaluateLoop
from ._loss import Objective, SampleTerms, loss_divisor
from ._metrics import (
    EvaluationMetrics,
    GradientMetrics,
    Metrics,
    PartialMetrics,
    ReportedMetrics,
    UpdateMetrics,
)
from ._plan import PipelinePlan
from ._simulated import (
    compile_checked,
    compile_program,
    is_checked,
    is_simulated,
    loops_idle,
    waits_in_branches,
    without_cache,
)
from ._stage import Stage
from ._step import DevicePrograms, collections_after
from ._train import TrainLoop
