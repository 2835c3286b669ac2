"""Small copies of the families of `jaxpipe.models`: the same parts, at sizes of some dozens."""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxpipe.config import Section
from jaxpipe.data import Batch
from jaxpipe.errors import ConfigError
from jaxpipe.layers import PipelineModule
from jaxpipe.models import BertConfig, GPT2Config, LlamaConfig, bert, gpt2, llama

from ._job import least_divisor

_LENGTH = 16
_WIDTH = 32
# Numbers of stages and devices up to 6 divide it, so that a vocabulary is split as in the job.
_VOCABULARY = 240
_MOST = {
    "vocab_size": _VOCABULARY,
    "intermediate_size": 48,
    "n_inner": 48,
    "shared_size": 48,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "n_positions": _LENGTH,
    "max_position_embeddings": _LENGTH,
    # Below the length, so that windows and chunks hide positions.
    "sliding_window": 5,
    "attention_chunk_size": 4,
    "floor_scale": 4,
}
"""The largest sizes of a small copy, by the names of fields in configurations and their parts."""

_WIDTHS = ("hidden_size", "n_embd")
_HEADS = ("num_attention_heads", "num_key_value_heads", "n_head")

_FAMILIES: tuple[tuple[type[Section], Callable[[Any], list[Any]]], ...] = (
    (LlamaConfig, llama),
    (LlamaConfig, functools.partial(llama, multi_token=True)),
    (GPT2Config, gpt2),
    (BertConfig, bert),
    (BertConfig, functools.partial(bert, head=None)),
)


def small_family(model: PipelineModule, entry: Batch) -> tuple[PipelineModule, Batch] | None:
    """Return a family's model at small sizes, with an entry for it. None: it is of no family."""
    items = [named.item for named in model.layers]
    kinds = [getattr(item, "typename", None) for item in items]
    given = [x for item in items for x in getattr(item, "module_args", ())]
    for kind, layers_of in _FAMILIES:
        config = next((x for x in given if isinstance(x, kind)), None)
        if config is None:
            continue
        try:
            layers = layers_of(config)
        except ConfigError:  # without layers that predict several tokens
            continue
        # More layers may follow, such as a user's own head.
        if kinds[: len(layers)] == [layer.typename for layer in layers]:
            small = small_config(config)
            resized = map(_resized, items, layers_of(small))
            other = model.with_layers([*resized, *items[len(layers) :]])
            return other, _small_entry(entry)
    return None


def small_config(config: Any) -> Any:
    """Return a configuration with the same parts and ratios of heads, and small sizes."""
    given = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
    sizes = {name: min(x, _MOST[name]) for name, x in given.items() if name in _MOST and x}
    sizes |= {name: small_config(x) for name, x in given.items() if isinstance(x, Section)}
    if heads := {name: given[name] for name in _HEADS if name in given}:
        shared = math.gcd(*heads.values())
        heads = {name: x // shared * least_divisor(shared) for name, x in heads.items()}
        # Heads divide the width.
        width = math.ceil(_WIDTH / max(heads.values())) * max(heads.values())
        widths = {name: min(given[name], width) for name in _WIDTHS if name in given}
        sizes |= {**heads, **widths}
    return dataclasses.replace(config, **sizes)


def _resized(item: Any, layer: Any) -> Any:
    """Give a layer the arguments of another. Its marks and adapters stay."""
    other = copy.copy(item)
    other.module_args = layer.module_args
    other.module_kwargs = layer.module_kwargs
    return other


def _small_entry(entry: Batch) -> Batch:
    """Cut the texts of an entry, and move the tokens in inputs and labels into the vocabulary."""

    def cut(leaf: Any, *, holds_tokens: bool) -> Any:
        shape = (leaf.shape[0], *(min(size, _LENGTH) for size in leaf.shape[1:]))
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, leaf.dtype)
        values = np.asarray(leaf)[tuple(map(slice, shape))]
        if not holds_tokens or not np.issubdtype(values.dtype, np.integer):
            return values
        # Negative labels do not count.
        return np.where(values < 0, values, values % _VOCABULARY)

    tokens = functools.partial(cut, holds_tokens=True)
    return Batch(
        jax.tree.map(tokens, entry.inputs),
        jax.tree.map(tokens, entry.labels),
        jax.tree.map(functools.partial(cut, holds_tokens=False), entry.side),
    )
