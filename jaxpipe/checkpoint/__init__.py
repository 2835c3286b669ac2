"""Checkpoints.

Each device writes the rows that it holds. A checkpoint can be opened with any number of stages,
replicas and processes.
"""

from jaxpipe.weights import (
    Rename,
    Source,
    Tensor,
    Transform,
    conv1d,
    linear,
    load_safetensors,
    merge,
    read_config_json,
    rename,
    rename_back,
    split,
    stack,
    transpose,
)

from ._describe import library_versions
from ._directory import committed_tags
from ._inspect import inspect_checkpoint
from ._json import check_json, decode_state, encode_state
from ._load import load_collections, load_params, load_state
from ._open import Checkpoint, find_checkpoint, open_checkpoint, reread
from ._struct import load_struct
from ._verify import Verification, verify_checkpoint
from ._weights import export_safetensors, load_huggingface, save_huggingface
from ._writer import CheckpointWriter, RunState

__all__ = [
    "Checkpoint",
    "CheckpointWriter",
    "Rename",
    "RunState",
    "Source",
    "Tensor",
    "Transform",
    "Verification",
    "committed_tags",
    "conv1d",
    "export_safetensors",
    "find_checkpoint",
    "inspect_checkpoint",
    "linear",
    "load_collections",
    "load_huggingface",
    "load_params",
    "load_safetensors",
    "load_state",
    "merge",
    "open_checkpoint",
    "read_config_json",
    "rename",
    "rename_back",
    "save_huggingface",
    "split",
    "stack",
    "transpose",
    "verify_checkpoint",
]
