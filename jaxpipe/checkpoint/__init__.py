"""Checkpoints: written by the devices that hold the rows, opened at any number of stages, replicas and processes."""

from ._describe import library_versions as library_versions
from ._directory import committed_tags as committed_tags
from ._huggingface import Source as Source
from ._huggingface import load_huggingface as load_huggingface
from ._huggingface import read_config_json as read_config_json
from ._huggingface import save_huggingface as save_huggingface
from ._inspect import inspect_checkpoint as inspect_checkpoint
from ._json import check_json as check_json
from ._json import decode_state as decode_state
from ._json import encode_state as encode_state
from ._load import load_collections as load_collections
from ._load import load_params as load_params
from ._load import load_state as load_state
from ._open import Checkpoint as Checkpoint
from ._open import find_checkpoint as find_checkpoint
from ._open import open_checkpoint as open_checkpoint
from ._open import reread as reread
from ._rename import Rename as Rename
from ._rename import Tensor as Tensor
from ._rename import Transform as Transform
from ._rename import conv1d as conv1d
from ._rename import linear as linear
from ._rename import merge as merge
from ._rename import rename as rename
from ._rename import rename_back as rename_back
from ._rename import split as split
from ._rename import stack as stack
from ._rename import transpose as transpose
from ._safetensors import export_safetensors as export_safetensors
from ._safetensors import load_safetensors as load_safetensors
from ._struct import load_struct as load_struct
from ._verify import Verification as Verification
from ._verify import verify_checkpoint as verify_checkpoint
from ._writer import CheckpointWriter as CheckpointWriter
from ._writer import RunState as RunState

__all__ = [
    # For users.
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
    # For other rooms.
    "check_json",
    "decode_state",
    "encode_state",
    "library_versions",
    "load_struct",
    "reread",
]
