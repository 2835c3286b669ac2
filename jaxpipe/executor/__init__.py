"""The step of one device.

A tick program run over a stage's layers, with its sends, receives and gradients.
"""

from ._batch import WHOLE as WHOLE
from ._batch import batch_shard_dims as batch_shard_dims
from ._batch import batch_spec as batch_spec
from ._batch import microbatch_key as microbatch_key
from ._batch import samples_spec as samples_spec
from ._evaluate import EvaluateLoop as EvaluateLoop
from ._loss import Objective as Objective
from ._loss import SampleTerms as SampleTerms
from ._loss import loss_divisor as loss_divisor
from ._metrics import EvaluationMetrics as EvaluationMetrics
from ._metrics import GradientMetrics as GradientMetrics
from ._metrics import Metrics as Metrics
from ._metrics import PartialMetrics as PartialMetrics
from ._metrics import ReportedMetrics as ReportedMetrics
from ._metrics import UpdateMetrics as UpdateMetrics
from ._plan import Plan as Plan
from ._simulated import compile_checked as compile_checked
from ._simulated import compile_program as compile_program
from ._simulated import is_checked as is_checked
from ._simulated import is_simulated as is_simulated
from ._simulated import loops_idle as loops_idle
from ._simulated import waits_in_branches as waits_in_branches
from ._simulated import without_cache as without_cache
from ._stage import Stage as Stage
from ._step import DevicePrograms as DevicePrograms
from ._step import collections_after as collections_after
from ._train import TrainLoop as TrainLoop
