"""Costs of layers, and what is decided by them before a pipeline is built: schedule, cut and idle actions."""

from ._auto import limits_pending as limits_pending
from ._plan import make_plan as make_plan
