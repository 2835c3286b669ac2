"""Model families as lists of layers for `PipelineModule`."""

from ._bert import BertConfig as BertConfig
from ._bert import bert as bert
from ._bert import bert_names as bert_names
from ._experts import Experts as Experts
from ._experts_config import ExpertsConfig as ExpertsConfig
from ._gpt2 import GPT2Config as GPT2Config
from ._gpt2 import gpt2 as gpt2
from ._gpt2 import gpt2_names as gpt2_names
from ._latent_config import LatentConfig as LatentConfig
from ._llama import LlamaBlock as LlamaBlock
from ._llama import llama as llama
from ._llama import llama_names as llama_names
from ._llama_config import BlockKind as BlockKind
from ._llama_config import LlamaConfig as LlamaConfig
from ._rotary import Rotary as Rotary
from ._rotary import RotaryScaling as RotaryScaling

__all__ = [
    "BertConfig",
    "BlockKind",
    "Experts",
    "ExpertsConfig",
    "GPT2Config",
    "LatentConfig",
    "LlamaBlock",
    "LlamaConfig",
    "Rotary",
    "RotaryScaling",
    "bert",
    "bert_names",
    "gpt2",
    "gpt2_names",
    "llama",
    "llama_names",
]
