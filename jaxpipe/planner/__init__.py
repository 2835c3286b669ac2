"""Costs of layers, and what is decided by them before a pipeline is built: schedule, cut and idle actions."""

from ._auto import limits_pending as limits_pending
from ._costs import LayerWork as LayerWork
from ._costs import layer_work as layer_work
from ._costs import look_once as look_once
from ._costs import loss_work as loss_work
from ._plan import make_plan as make_plan
from ._plan import plan_cut as plan_cut
from ._plan import schedule_of as schedule_of
