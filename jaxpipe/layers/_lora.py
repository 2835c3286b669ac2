"""Low-rank adapters beside the kernels of existing layers, and the plain weights they amount to."""

import copy
import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpipe._numbers import as_integer, as_number
from jaxpipe._typing import Path, PyTree
from jaxpipe.errors import LayerError

from ._adapters import LINEN_PROJECTIONS, LORA_A, LORA_B, NNX_PROJECTIONS, Adapters, LoraMark
from ._build import NamedLayer
from ._spec import LayerSpec, TiedLayerSpec
from ._tree import flatten_dict, unflatten_dict

LORA_PARAMETERS = r"(^|/)lora_[ab]$"
"""Pattern of the adapters, for `PipelineModule(trainable=LORA_PARAMETERS)`."""

_T = TypeVar("_T")


def lora(
    layers: Iterable[_T] | nn.Sequential, rank: int, alpha: float, targets: str | Sequence[str]
) -> list[_T | Any]:
    """Layers whose kernels have adapters: `y + alpha / rank * (x A) B` in place of `y = x W + b`.

    `A` is drawn with variance 1 / inputs, `B` is zero, so that the model begins as it was. They are
    parameters `lora_a` `[*inputs, rank]` and `lora_b` `[rank, *outputs]` beside `kernel`, in its
    dtype; where it is sharded over inputs or outputs `A` or `B` is, too. To train them alone:
    `PipelineModule(layers, trainable=LORA_PARAMETERS)`.

    Args:
        layers: Layers as `PipelineModule` takes them. Those of Linen and NNX may hold `Dense`,
            `DenseGeneral` and `Einsum`, or `Linear`, `LinearGeneral` and `Einsum`; others stay as
            they are.
        rank: Inner size of the adapters.
        alpha: Their scale times the rank.
        targets: Pattern, or several, found by `re.search` in paths of kernels such as
            `layers/3_Block/attention/query/kernel`, of a tied layer `tied/<key>/kernel`.

    Returns:
        The new list.

    Raises:
        LayerError: The rank is no positive integer, alpha no number, `targets` are no patterns, or
            no layer can have one; or, when the model is traced, a pattern finds no kernel, or a
            target has an adapter already, or batch dims, or an equation whose kernel does not begin
            with what it contracts.

    Reference:
        LoRA: Low-Rank Adaptation of Large Language Models (Hu et al., 2021), section 4.1.
    """
    size = as_integer(rank, 1)
    if size is None:
        raise LayerError(
            f"lora's rank must be an integer >= 1, but got rank={rank!r}. Common ranks are 8 to 64."
        )
    scale = _checked_alpha(alpha) / size
    patterns = [targets] if isinstance(targets, str) else targets
    if (
        not isinstance(patterns, (list, tuple))
        or not patterns
        or not all(isinstance(p, str) for p in patterns)
    ):
        raise LayerError(
            f"lora's targets must be a pattern or a list of patterns, but got targets={targets!r}. "
            "Write for instance targets=['query', 'value']."
        )
    adapters = Adapters(size, scale, [re.compile(pattern) for pattern in patterns])
    items = list(layers.layers if isinstance(layers, nn.Sequential) else layers)
    adapted = [_adapted(index, item, adapters) for index, item in enumerate(items)]
    if all(new is old for new, old in zip(adapted, items, strict=True)):
        raise LayerError(
            f"lora's targets must find kernels of the layers, but got targets={targets!r}, which "
            f"find none in {len(items)} layers. Paths of kernels are written "
            "layers/3_Block/attention/query/kernel."
        )
    return adapted


def check_targets(layers: Iterable[NamedLayer], paths: Iterable[Path]) -> None:
    """Refuse a pattern given to `lora` that finds no kernel; `paths` are the model's parameters."""
    found = dict.fromkeys(
        each for named in layers if named.lora is not None for each in named.lora.adapters
    )
    if not found:
        return
    paths = list(paths)
    adapted = ["/".join((*path[:-1], "kernel")) for path in paths if path[-1] == LORA_A]
    kernels = ["/".join(path) for path in paths if path[-1] == "kernel"]
    for adapters in found:
        for pattern in adapters.unmatched(adapted):
            nearest = difflib.get_close_matches(pattern, kernels, n=3, cutoff=0.0)
            raise LayerError(
                "lora's targets must each find a kernel that can have an adapter, but got "
                f"{pattern!r}, which finds none of {len(kernels)}. The nearest are: "
                f"{', '.join(nearest) or 'none'}."
            )


def without_adapters(params: PyTree, _: PyTree = None) -> PyTree:
    """Parameters whose adapters add nothing."""
    leaves = flatten_dict(params)
    return unflatten_dict(
        {
            path: jnp.zeros_like(leaf) if path[-1] == LORA_B else leaf
            for path, leaf in leaves.items()
        }
    )


def merge_lora(params: PyTree, alpha: float, dtype: Any = None) -> dict[str, PyTree]:
    """The plain parameters a tree with adapters amounts to, as `jaxpipe.checkpoint` exports them.

    Args:
        params: A model's tree, as `engine.module_state_dict()` returns it.
        alpha: As `lora` was given it; the rank is that of the arrays.
        dtype: What merged kernels are rounded to; None: each to its own, in which what an adapter
            has learned may be lost where that is bfloat16.

    Returns:
        The tree of the layers without `lora`, of numpy arrays, each `kernel` as
        `W + alpha / rank * A B`, computed in float32 at least and rounded once.

    Raises:
        LayerError: Adapters stand beside no kernel, such as those of a checkpoint that holds
            nothing else.
    """
    alpha = _checked_alpha(alpha)
    leaves = {path: np.asarray(leaf) for path, leaf in flatten_dict(params).items()}
    plain = {path: leaf for path, leaf in leaves.items() if path[-1] not in (LORA_A, LORA_B)}
    for path, a in leaves.items():
        if path[-1] != LORA_A:
            continue
        at, b = (*path[:-1], "kernel"), leaves.get((*path[:-1], LORA_B))
        if at not in plain or b is None:
            raise LayerError(
                f"merge_lora must find a kernel and {LORA_B} beside {'/'.join(path)}, but got "
                "neither or one of them. Load the checkpoint of adapters into an engine that has "
                "the model's weights, and merge its module_state_dict()."
            )
        kernel, rank = plain[at], a.shape[-1]
        # Dims that all three have in front, one for each `nn.scan` around the module.
        stacked = kernel.shape[: a.ndim + b.ndim - 2 - kernel.ndim]
        # A product of bfloat16 would round before it is added.
        wide = np.promote_types(kernel.dtype, np.float32)
        delta = a.reshape(*stacked, -1, rank).astype(wide) @ b.reshape(*stacked, rank, -1).astype(
            wide
        )
        merged = kernel.astype(wide) + (alpha / rank) * delta.reshape(kernel.shape)
        plain[at] = merged.astype(kernel.dtype if dtype is None else dtype)
    return unflatten_dict(plain)


def _adapted(index: int, item: Any, adapters: Adapters) -> Any:
    """A layer marked to have adapters, or itself where it can have none."""
    kind = _kind_of(item)
    if kind is None:
        return item
    name = f"{index}_{kind.__name__}"
    prefix = ("tied", item.key) if isinstance(item, TiedLayerSpec) else ("layers", name)
    # A projection that is a layer by itself stays what it is where it is no target: the pipeline
    # may know its class.
    is_projection = issubclass(kind, (*LINEN_PROJECTIONS, *NNX_PROJECTIONS))
    if issubclass(kind, (nn.Embed, nnx.Embed)) or (is_projection and not adapters.has(prefix, ())):
        return item
    marked = copy.copy(item) if isinstance(item, LayerSpec) else LayerSpec(item)
    before = () if marked.lora_mark is None else marked.lora_mark.adapters
    marked.lora_mark = LoraMark(prefix, (*before, adapters))
    return marked


def _kind_of(item: Any) -> type | None:
    """The class of a layer's module; None unless it is Linen's, or NNX's in a spec."""
    if not isinstance(item, LayerSpec):
        return type(item) if isinstance(item, nn.Module) else None
    kind: Any = item.typename
    if isinstance(kind, type):
        return kind if issubclass(kind, (nn.Module, nnx.Module)) else None
    module = item.build()
    return type(module) if isinstance(module, nn.Module) else None


def _checked_alpha(alpha: Any) -> float:
    number = as_number(alpha)
    if number is None:
        raise LayerError(
            f"lora's alpha must be a number, but got alpha={alpha!r}. A common one is twice the "
            "rank."
        )
    return number
