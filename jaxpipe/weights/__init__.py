"""Weights of other libraries: tables of names, safetensors files, `config.json`."""

from ._config_json import CONFIG, Source, dump_config, read_config_json
from ._rename import Match, Rename, match_renames, rename, rename_back
from ._renamed import RenamedFiles
from ._safetensors import check_shard_size, check_target, load_safetensors, write_safetensors
from ._transform import (
    Tensor,
    Transform,
    conv1d,
    interleave,
    linear,
    merge,
    split,
    stack,
    transpose,
)

__all__ = [
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
]
