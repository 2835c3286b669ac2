"""Cutting a list of layers into pipeline stages."""

from ._balanced import partition_balanced as partition_balanced
from ._best import Tick as Tick
from ._best import partition_best as partition_best
from ._best import tick_of as tick_of
from ._costs import NO_COST as NO_COST
from ._costs import LayerCost as LayerCost
from ._costs import Profile as Profile
from ._costs import StageMemory as StageMemory
from ._methods import METHOD_NAMES as METHOD_NAMES
from ._methods import is_method as is_method
from ._methods import needs_shapes as needs_shapes
from ._methods import partition_layers as partition_layers
from ._profile import partition_profile as partition_profile
from ._profile import profile_source as profile_source
from ._profile import stage_bytes as stage_bytes
from ._stage_cut import StageCut as StageCut
from ._stage_cut import cut_stages as cut_stages
from ._table import Tie as Tie
from ._table import format_partition as format_partition
from ._uniform import partition_uniform as partition_uniform

__all__ = [
    # For users.
    "LayerCost",
    "Profile",
    "StageMemory",
    "partition_balanced",
    "partition_best",
    "partition_layers",
    "partition_profile",
    "partition_uniform",
    # For other rooms.
    "METHOD_NAMES",
    "NO_COST",
    "StageCut",
    "Tick",
    "Tie",
    "cut_stages",
    "format_partition",
    "is_method",
    "needs_shapes",
    "profile_source",
    "stage_bytes",
    "tick_of",
]
