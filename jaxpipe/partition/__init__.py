"""Cutting a list of layers into pipeline stages."""

from ._balanced import partition_balanced as partition_balanced
from ._methods import needs_params as needs_params
from ._methods import partition_layers as partition_layers
from ._table import format_partition as format_partition
from ._uniform import partition_uniform as partition_uniform

__all__ = ["format_partition", "needs_params", "partition_balanced", "partition_layers", "partition_uniform"]
