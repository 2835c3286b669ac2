"""Cutting a list of layers into pipeline stages."""

# pyright: reportUnusedImport=false

from ._balanced import partition_balanced
from ._best import Tick, partition_best, tick_of
from ._costs import NO_COST, LayerCost, Profile, StageMemory
from ._methods import (
    METHOD_NAMES,
    is_method,
    needs_shapes,
    partition_layers,
    profile_source,
)
from ._stage_cut import StageCut, cut_stages
from ._table import Tie, format_partition
from ._uniform import partition_uniform

__all__ = [
    "LayerCost",
    "Profile",
    "StageMemory",
    "partition_balanced",
    "partition_best",
    "partition_layers",
    "partition_uniform",
]
