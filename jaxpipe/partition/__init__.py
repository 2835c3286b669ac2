"""Cutting a list of layers into pipeline stages."""

from ._balanced import partition_balanced as partition_balanced
from ._costs import LayerCost as LayerCost
from ._costs import Profile as Profile
from ._costs import StageMemory as StageMemory
from ._methods import needs_params as needs_params
from ._methods import partition_layers as partition_layers
from ._profile import partition_profile as partition_profile
from ._profile import profile_source as profile_source
from ._profile import stage_bytes as stage_bytes
from ._table import Tie as Tie
from ._table import format_partition as format_partition
from ._uniform import partition_uniform as partition_uniform

__all__ = [
    "LayerCost",
    "Profile",
    "StageMemory",
    "Tie",
    "format_partition",
    "needs_params",
    "partition_balanced",
    "partition_layers",
    "partition_profile",
    "partition_uniform",
    "profile_source",
    "stage_bytes",
]
