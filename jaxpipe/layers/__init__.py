"""The model as a list of layers.

This package holds the layer specs, the protocol that all kinds of layers implement, and the
sequential model.
"""

# For users.
from ._load_bias import LoadBias, load_bias, with_load
from ._lora import LORA_PARAMETERS, lora, merge_lora
from ._module import PipelineModule
from ._nnx import AuxLoss, Metric
from ._protocol import Layer, LayerCall
from ._spec import LayerSpec, TiedLayerSpec
from ._vocab import SoftCapped, VocabEmbed, VocabHead

# isort: split
# For other rooms.
from ._axes import call_on_one, on_mesh
from ._build import NamedLayer
from ._lora import without_adapters
from ._matrices import hidden_matrices
from ._model_trace import ModelTrace
from ._param_paths import ParamPaths, layer_view, merge_layers
from ._precision import cast_floats
from ._sharding import unbox
from ._signature import layer_signatures
from ._split_vocabulary import check_split_loss, split_vocabulary, with_split_logits
from ._structs import as_arrays, device_bytes, format_struct, num_bytes, struct_of
from ._tree import flatten_dict, join_path, split_path, unflatten_dict
from ._usage import check_held
from ._wrapped import WrappedLayer

__all__ = [
    "LORA_PARAMETERS",
    "AuxLoss",
    "Layer",
    "LayerCall",
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
]
