"""Low-rank adapters for the kernels of existing layers, and merging them into plain weights."""

import copy
import difflib
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeVar

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpipe._util.numbers import as_integer
from jaxpipe._util.typing import Path, PyTree
from jaxpipe.errors import LayerError

from ._adapters import Adapters
from ._build import NamedLayer
from ._param_paths import ParamPaths
from ._spec import LayerSpec
from ._tree import LORA_A, LORA_B, flatten_dict, unflatten_dict

LORA_PARAMETERS = r"(^|/)lora_[ab]$"
"""Pattern that matches adapters, for `PipelineModule(trainable=LORA_PARAMETERS)`."""

_T = TypeVar("_T")


def lora(
    layers: Iterable[_T] | nn.Sequential, rank: int, alpha: float, targets: str | Sequence[str]
) -> list[_T | Any]:
    """Add adapters to kernels: `y + alpha / rank * (x A) B` instead of `y = x W + b`.

    `A` is drawn with variance 1 / inputs and `B` is zero, so the adapted model initially computes
    the same outputs. The adapters are parameters `lora_a` `[*inputs, rank]` and `lora_b`
    `[rank, *outputs]` next to `kernel`, in its dtype. If the kernel is sharded over inputs or
    outputs, so is `A` or `B`. To train only the adapters, use
    `PipelineModule(layers, trainable=LORA_PARAMETERS)`.

    Args:
        layers: Layers as `PipelineModule` accepts them. Adapters are supported in the Linen modules
            `Dense`, `DenseGeneral` and `Einsum`, and in the NNX modules `Linear`, `LinearGeneral`
            and `Einsum`. All other layers are unchanged.
        rank: Inner size of the adapters.
        alpha: Scale of the adapters times the rank.
        targets: One or more patterns, found by `re.search` in paths of kernels such as
            `layers/3_Block/attention/query/kernel`, or `tied/<key>/kernel` if it is shared. The
            adapter of a shared kernel is shared too.

    Returns:
        The new list.

    Raises:
        LayerError: The rank is not a positive integer, there are no `targets`, or no layer can
            have an adapter. When the model is traced: a pattern matches no kernel, or a target
            already has an adapter or parameters of its names, is shared with a layer without it,
            has batch dims, or has an equation whose contracted dims are not the first dims of the
            kernel.

    Reference:
        LoRA: Low-Rank Adaptation of Large Language Models (Hu et al., 2021), section 4.1.
    """
    size = as_integer(rank, 1)
    if size is None:
        raise LayerError(
            f"lora's rank must be an integer >= 1, but got rank={rank!r}. Common ranks are 8 to 64."
        )
    patterns = [targets] if isinstance(targets, str) else targets
    if not patterns:
        raise LayerError(
            f"lora's targets must be a pattern or a list of patterns, but got targets={targets!r}. "
            "Write for instance targets=['query', 'value']."
        )
    adapters = Adapters(size, alpha / size, [re.compile(pattern) for pattern in patterns])
    items = list(layers.layers if isinstance(layers, nn.Sequential) else layers)
    adapted = [_adapted(item, adapters) for item in items]
    if all(new is old for new, old in zip(adapted, items, strict=True)):
        raise LayerError(
            "lora must be given layers with kernels that can have adapters, but got "
            f"{len(items)} layers without any. Give Linen modules, or NNX modules in a LayerSpec."
        )
    return adapted


def check_targets(
    layers: Sequence[NamedLayer], paths: Sequence[ParamPaths], parameters: Collection[Path]
) -> None:
    """Refuse patterns of `lora` that match no kernel, and kernels adapted in some layers only."""
    found = dict.fromkeys(each for named in layers for each in named.adapters)
    if not found:
        return
    of_layers = [set(each.paths.values()) for each in paths]
    every = sorted(set().union(*of_layers))
    modules = sorted({path[:-1] for path in parameters})
    adapted = ["/".join((*module, "kernel")) for module in modules]
    kernels = ["/".join(path) for path in every if path[-1] == "kernel"]
    for module, name in zip(modules, adapted, strict=True):
        for named, own in zip(layers, of_layers, strict=True):
            if (*module, "kernel") in own and (*module, LORA_A) not in own:
                raise LayerError(
                    "a tied kernel must have its adapter in every layer that uses it, because "
                    f"merging changes the one kernel, but got {name!r} without it in layer "
                    f"{named.name}. Give lora all of these layers, or leave the kernel out of "
                    "targets."
                )
    for adapters in found:
        for pattern in adapters.unmatched(adapted):
            nearest = difflib.get_close_matches(pattern, kernels, n=3, cutoff=0.0)
            raise LayerError(
                "lora's targets must each find a kernel that can have an adapter, but got "
                f"{pattern!r}, which finds none of {len(kernels)}. The nearest are: "
                f"{', '.join(nearest) or 'none'}."
            )


def without_adapters(params: PyTree, _: PyTree = None) -> PyTree:
    """The parameters with adapters that contribute nothing, if only adapters have their names."""
    leaves = flatten_dict(params)
    return unflatten_dict(
        {
            path: jnp.zeros_like(leaf) if path[-1] == LORA_B else leaf
            for path, leaf in leaves.items()
        }
    )


def merge_lora(params: PyTree, alpha: float, dtype: Any = None) -> dict[str, PyTree]:
    """Merge the adapters of a tree into plain parameters, as `jaxpipe.checkpoint` exports them.

    A tree shows adapters only by their names. If other parameters of the model are called `lora_a`
    or `lora_b`, use `jaxpipe.checkpoint.save_huggingface` with `lora_alpha`.

    Args:
        params: A model's tree, as `engine.module_state_dict()` returns it.
        alpha: The `alpha` that was passed to `lora`; the rank is read from the arrays.
        dtype: Dtype of the merged kernels; None keeps the dtype of each kernel. Rounding to
            bfloat16 can lose what an adapter has learned.

    Returns:
        The tree of the layers without `lora`, as NumPy arrays. Each `kernel` is
        `W + alpha / rank * A B`, computed in at least float32 and rounded once.

    Raises:
        LayerError: An adapter has no kernel, for example in a checkpoint that holds only adapters.
    """
    leaves = {path: np.asarray(leaf) for path, leaf in flatten_dict(params).items()}
    plain = {path: leaf for path, leaf in leaves.items() if path[-1] not in (LORA_A, LORA_B)}
    for path, a in leaves.items():
        if path[-1] != LORA_A:
            continue
        at = (*path[:-1], "kernel")
        b = leaves.get((*path[:-1], LORA_B))
        if at not in plain or b is None:
            raise LayerError(
                f"merge_lora must find a kernel and {LORA_B} beside {'/'.join(path)}, but got at "
                "most one of them. Load the checkpoint of adapters into an engine that has "
                "the model's weights, and merge its module_state_dict()."
            )
        kernel = plain[at]
        rank = a.shape[-1]
        # Leading dims that all three have, one for each `nn.scan` around the module.
        stacked = kernel.shape[: a.ndim + b.ndim - 2 - kernel.ndim]
        # A bfloat16 product would be rounded before it is added.
        wide = np.promote_types(kernel.dtype, np.float32)
        delta = a.reshape(*stacked, -1, rank).astype(wide) @ b.reshape(*stacked, rank, -1).astype(
            wide
        )
        merged = kernel.astype(wide) + (alpha / rank) * delta.reshape(kernel.shape)
        plain[at] = merged.astype(kernel.dtype if dtype is None else dtype)
    return unflatten_dict(plain)


def _adapted(item: Any, adapters: Adapters) -> Any:
    """The layer, marked to have adapters if it can have any."""
    kind = _kind_of(item)
    # An embedding has no kernel; the pipeline may split it over the stages, which needs it
    # unmarked.
    if kind is None or issubclass(kind, (nn.Embed, nnx.Embed)):
        return item
    marked = copy.copy(item) if isinstance(item, LayerSpec) else LayerSpec(item)
    marked.adapters = (*marked.adapters, adapters)
    return marked


def _kind_of(item: Any) -> type | None:
    """The class of a layer's module; None unless it is a Linen module, or NNX in a spec."""
    if not isinstance(item, LayerSpec):
        return type(item) if isinstance(item, nn.Module) else None
    kind: Any = item.typename
    if isinstance(kind, type):
        return kind if issubclass(kind, (nn.Module, nnx.Module)) else None
    # What a callable makes is known only once it is called. A Linen module has no arrays yet.
    module = item.build()
    return type(module) if isinstance(module, nn.Module) else None
