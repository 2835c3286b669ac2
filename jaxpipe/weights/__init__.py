"""Weights of other libraries: tables of names, safetensors files, `config.json`."""

from ._config_json import CONFIG as CONFIG
from ._config_json import Source as Source
from ._config_json import dump_config as dump_config
from ._config_json import read_config_json as read_config_json
from ._rename import Match as Match
from ._rename import Rename as Rename
from ._rename import match_renames as match_renames
from ._rename import rename as rename
from ._rename import rename_back as rename_back
from ._renamed import RenamedFiles as RenamedFiles
from ._safetensors import check_shard_size as check_shard_size
from ._safetensors import check_target as check_target
from ._safetensors import load_safetensors as load_safetensors
from ._safetensors import write_safetensors as write_safetensors
from ._transform import Tensor as Tensor
from ._transform import Transform as Transform
from ._transform import conv1d as conv1d
from ._transform import interleave as interleave
from ._transform import linear as linear
from ._transform import merge as merge
from ._transform import split as split
from ._transform import stack as stack
from ._transform import transpose as transpose

__all__ = [
    # For users.
    "Rename",
    "Source",
    "Tensor",
    "Transform",
    "conv1d",
    "interleave",
    "linear",
    "load_safetensors",
    "merge",
    "read_config_json",
    "rename",
    "rename_back",
    "split",
    "stack",
    "transpose",
    # For other rooms.
    "CONFIG",
    "Match",
    "RenamedFiles",
    "check_shard_size",
    "check_target",
    "dump_config",
    "match_renames",
    "write_safetensors",
]
