"""The model as a list of layers.

This package holds the layer specs, the protocol that all kinds of layers implement, and the
sequential model.
"""

# For users.
from ._load_bias import LoadBias as LoadBias
from ._load_bias import load_bias as load_bias
from ._load_bias import with_load as with_load
from ._lora import LORA_PARAMETERS as LORA_PARAMETERS
from ._lora import lora as lora
from ._lora import merge_lora as merge_lora
from ._module import PipelineModule as PipelineModule
from ._nnx import AuxLoss as AuxLoss
from ._nnx import Metric as Metric
from ._protocol import Layer as Layer
from ._spec import LayerSpec as LayerSpec
from ._spec import TiedLayerSpec as TiedLayerSpec
from ._vocab import SoftCapped as SoftCapped
from ._vocab import VocabEmbed as VocabEmbed
from ._vocab import VocabHead as VocabHead

# isort: split
# For other rooms.
from ._axes import call_on_one as call_on_one
from ._axes import on_mesh as on_mesh
from ._build import NamedLayer as NamedLayer
from ._lora import without_adapters as without_adapters
from ._matrices import hidden_matrices as hidden_matrices
from ._model_trace import ModelTrace as ModelTrace
from ._param_paths import ParamPaths as ParamPaths
from ._param_paths import layer_view as layer_view
from ._param_paths import merge_layers as merge_layers
from ._precision import cast_floats as cast_floats
from ._sharding import unbox as unbox
from ._signature import layer_signatures as layer_signatures
from ._split_vocabulary import check_split_loss as check_split_loss
from ._split_vocabulary import split_vocabulary as split_vocabulary
from ._split_vocabulary import with_split_logits as with_split_logits
from ._structs import as_arrays as as_arrays
from ._structs import device_bytes as device_bytes
from ._structs import format_struct as format_struct
from ._structs import num_bytes as num_bytes
from ._structs import struct_of as struct_of
from ._tree import flatten_dict as flatten_dict
from ._tree import join_path as join_path
from ._tree import split_path as split_path
from ._tree import unflatten_dict as unflatten_dict
from ._usage import check_held as check_held
from ._wrapped import WrappedLayer as WrappedLayer

__all__ = [
    # For users.
    "LORA_PARAMETERS",
    "AuxLoss",
    "Layer",
    "LayerSpec",
    "LoadBias",
    "Metric",
    "PipelineModule",
    "SoftCapped",
    "TiedLayerSpec",
    "VocabEmbed",
    "VocabHead",
    "load_bias",
    "lora",
    "merge_lora",
    "with_load",
    # For other rooms.
    "ModelTrace",
    "NamedLayer",
    "ParamPaths",
    "WrappedLayer",
    "as_arrays",
    "call_on_one",
    "cast_floats",
    "check_held",
    "check_split_loss",
    "device_bytes",
    "flatten_dict",
    "format_struct",
    "hidden_matrices",
    "join_path",
    "layer_signatures",
    "layer_view",
    "merge_layers",
    "num_bytes",
    "on_mesh",
    "split_path",
    "split_vocabulary",
    "struct_of",
    "unbox",
    "unflatten_dict",
    "with_split_logits",
    "without_adapters",
]
