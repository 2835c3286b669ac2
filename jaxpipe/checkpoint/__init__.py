"""Checkpoints.

Each device writes the rows that it holds. A checkpoint can be opened with any number of stages,
replicas and processes.
"""

from jaxpipe.weights import Rename as Rename
from jaxpipe.weights import Source as Source
from jaxpipe.weights import Tensor as Tensor
from jaxpipe.weights import Transform as Transform
from jaxpipe.weights import conv1d as conv1d
from jaxpipe.weights import linear as linear
from jaxpipe.weights import load_safetensors as load_safetensors
from jaxpipe.weights import merge as merge
from jaxpipe.weights import read_config_json as read_config_json
from jaxpipe.weights import rename as rename
from jaxpipe.weights import rename_back as rename_back
from jaxpipe.weights import split as split
from jaxpipe.weights import stack as stack
from jaxpipe.weights import transpose as transpose

from ._describe import library_versions as library_versions
from ._directory import committed_tags as committed_tags
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
from ._struct import load_struct as load_struct
from ._verify import Verification as Verification
from ._verify import verify_checkpoint as verify_checkpoint
from ._weights import export_safetensors as export_safetensors
from ._weights import load_huggingface as load_huggingface
from ._weights import save_huggingface as save_huggingface
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
