"""Model families as lists of layers for `PipelineModule`."""

from ._bert import BertConfig, bert, bert_names
from ._experts import Experts
from ._experts_config import ExpertsConfig
from ._gpt2 import GPT2Config, gpt2, gpt2_names
from ._latent_config import LatentConfig
from ._llama import LlamaBlock, llama, llama_names
from ._llama_config import LlamaConfig
from ._parts import BlockKind, Heads, LayerPattern, Norms
from ._rotary import Rotary, RotaryScaling

__all__ = [
    "BertConfig",
    "BlockKind",
    "Experts",
    "ExpertsConfig",
    "GPT2Config",
    "Heads",
    "LatentConfig",
    "LayerPattern",
    "LlamaBlock",
    "LlamaConfig",
    "Norms",
    "Rotary",
    "RotaryScaling",
    "bert",
    "bert_names",
    "gpt2",
    "gpt2_names",
    "llama",
    "llama_names",
]
