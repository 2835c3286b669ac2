"""Checkpoints: written by the devices that hold the rows, opened at any number of stages, replicas and processes."""

from ._describe import load_struct as load_struct
from ._directory import committed_tags as committed_tags
from ._json import decode_state as decode_state
from ._load import load_collections as load_collections
from ._load import load_params as load_params
from ._load import load_state as load_state
from ._open import Checkpoint as Checkpoint
from ._open import find_checkpoint as find_checkpoint
from ._open import open_checkpoint as open_checkpoint
from ._writer import CheckpointWriter as CheckpointWriter
from ._writer import RunState as RunState

__all__ = [
    "Checkpoint",
    "CheckpointWriter",
    "RunState",
    "committed_tags",
    "decode_state",
    "find_checkpoint",
    "load_collections",
    "load_params",
    "load_state",
    "load_struct",
    "open_checkpoint",
]
