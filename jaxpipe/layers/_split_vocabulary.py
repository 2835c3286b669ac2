"""Splitting an ordinary embedding, head and loss over the stages.

The split works as in `VocabEmbed` and `VocabHead`.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax import nnx
from flax.core import meta
from flax.linen import dtypes as linen_dtypes
from flax.nnx.nn import dtypes as nnx_dtypes

from jaxpipe._util.typing import PyTree
from jaxpipe.errors import LayerError, shown
from jaxpipe.layers.losses import SplitLogits

from ._build import NamedLayer
from ._linen import LinenLayer
from ._nnx import NNXLayer
from ._protocol import Applied, Layer, LayerCall
from ._sharding import unbox
from ._vocab import STAGE, SoftCapped, VocabEmbed, VocabHead
from ._wrapped import WrappedLayer


class _SplitLayer(WrappedLayer):
    """A user's layer whose parameters are split over the stages.

    The user's layer defines names, initial values and arguments; `split` computes, from whole
    parameters or slices. `specs` are the axis names of each parameter.
    """

    def __init__(
        self, layer: Layer, split: Layer, specs: Mapping[str, tuple[str | None, ...]]
    ) -> None:
        super().__init__(layer, "split")
        self._split = split
        self._specs = specs

    def init(self, key: jax.Array, call: LayerCall) -> tuple[PyTree, dict[str, Any]]:
        """See `Layer.init`; the parameters are marked as split."""
        params, collections = super().init(key, call)
        params = {
            name: meta.Partitioned(unbox(value), self._specs[name])
            for name, value in params.items()
        }
        return params, collections

    def apply(self, call: LayerCall) -> Applied:
        """See `Layer.apply`."""
        return self._split.apply(call)


def split_layers(layers: Sequence[NamedLayer]) -> tuple[tuple[NamedLayer, ...], int]:
    """The layers with the first and the last one split over the stages, and the vocabulary size."""
    first = layers[0]
    last = layers[-1]
    # A layer in the trunk would receive one stage's slice where it needs the whole table.
    for named in layers[1:-1]:
        if named.tied_key is not None and named.tied_key in (first.tied_key, last.tied_key):
            wanted = "the only users of their parameters"
            raise _refused(named, "the first and the last layer", wanted, "another use")
    embed, size = _split_embed(first, is_head=False)
    if last.tied_key is not None and last.tied_key == first.tied_key:
        head, num_logits = _split_embed(last, is_head=True)
    else:
        head, num_logits = _split_head(last)
    if size != num_logits:
        raise LayerError(
            f"pipeline.split_vocabulary must find one vocabulary, but got {size} rows in layer "
            f"{first.name} and {num_logits} logits of layer {last.name}. Make them equal, and pad "
            "the smaller one."
        )
    middle = layers[1:-1]
    return (
        dataclasses.replace(first, layer=embed),
        *middle,
        dataclasses.replace(last, layer=head),
    ), size


def _split_embed(named: NamedLayer, *, is_head: bool) -> tuple[Layer, int]:
    module, call = _module_of(
        named, (nn.Embed, nnx.Embed), "the first layer", "nn.Embed or nnx.Embed"
    )
    # The user's layer still makes the initial values, so its initialiser need not be copied.
    args = module.num_embeddings, module.features, module.dtype, module.param_dtype
    split = LinenLayer(VocabEmbed(*args), _on_table(named, call, is_head=is_head))
    return _SplitLayer(named.layer, split, {"embedding": (STAGE, None)}), args[0]


class _Table:
    """The interface of a split embedding for a `forward_fn`: look up rows, and make logits."""

    def __init__(self, module: VocabEmbed) -> None:
        self._module = module
        self.num_embeddings = module.num_embeddings
        self.features = module.features

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self._module(tokens)

    def attend(self, x: jax.Array) -> jax.Array:
        return self._module.attend(x)


class _Recorder:
    """A stand-in for an embedding that records whether `attend`'s logits are returned unchanged."""

    def __init__(self) -> None:
        self.x = object()
        self.logits = object()

    def attend(self, x: object) -> object:
        return self.logits if x is self.x else None


def _on_table(
    named: NamedLayer, call: Callable[..., Any] | None, *, is_head: bool
) -> Callable[..., Any] | None:
    """Convert a `forward_fn` of an embedding to one for the split embedding."""
    if call is None or call in (nn.Embed.attend, nnx.Embed.attend):
        return call and VocabEmbed.attend
    if is_head and isinstance(call, SoftCapped):
        head = _on_table(named, call.head, is_head=True)
        return head and dataclasses.replace(call, head=head)
    if is_head:
        # On a stage's slice of the logits, a maximum or a mask would give a different result, and a
        # function before `attend` would receive only shares of the cotangent.
        # Objects instead of arrays: any computation on them fails, so identity shows that `attend`
        # is all.
        recorder = _Recorder()
        try:
            is_attend = call(recorder, recorder.x) is recorder.logits
        except Exception:  # noqa: BLE001  # whatever a user's code raises for a non-array
            is_attend = False
        if not is_attend:
            raise _refused(
                named, "the last layer", "a forward_fn that returns attend(x)", shown(call)
            )

    @functools.wraps(call)
    def function(module: VocabEmbed, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(_Table(module), *args, **kwargs)
        except AttributeError as error:
            wanted = "called as it is, or by a forward_fn that calls it"
            raise _refused(named, "the first layer", wanted, f"{error}") from error

    return function


def _split_head(named: NamedLayer) -> tuple[Layer, int]:
    wanted = (
        "nn.Dense, nnx.Linear, or the first one again, tied, with a forward_fn that calls attend"
    )
    module, call = _module_of(named, (nn.Dense, nnx.Linear), "the last layer", wanted)
    if isinstance(call, SoftCapped) and call.head in (nn.Dense.__call__, nnx.Linear.__call__):
        call = dataclasses.replace(call, head=VocabHead.__call__)
    elif call is not None:
        raise _refused(named, "the last layer", "called as it is, or SoftCapped", "a forward_fn")
    size = module.features if isinstance(module, nn.Dense) else module.out_features
    split = LinenLayer(VocabHead(size, module.use_bias, module.dtype, module.param_dtype), call)
    return _SplitLayer(named.layer, split, {"kernel": (None, STAGE), "bias": (STAGE,)}), size


def _module_of(
    named: NamedLayer, kinds: tuple[type, ...], place: str, wanted: str
) -> tuple[Any, Any]:
    """A layer's module and the `forward_fn` of its spec."""
    layer = named.layer
    if isinstance(layer, (LinenLayer, NNXLayer)) and type(layer.module) in kinds:
        _check_arithmetic(named, layer.module, place)
        return layer.module, layer.forward_fn
    found = "one that recomputes itself" if named.is_marked else layer.class_name
    raise _refused(named, place, wanted, found)


def _check_arithmetic(named: NamedLayer, module: Any, place: str) -> None:
    """Refuse a layer whose products or casts are not Flax's own; a split layer has no others."""
    usual: dict[str, tuple[Any, ...]] = {
        "precision": (None,),
        "dot_general": (None, jax.lax.dot_general),
        "dot_general_cls": (None,),
        "preferred_element_type": (None,),
        "promote_dtype": (linen_dtypes.promote_dtype, nnx_dtypes.promote_dtype),
    }
    for name, values in usual.items():
        value = getattr(module, name, values[0])
        if not any(value is one for one in values):
            raise _refused(named, place, f"of default {name}", f"{name}={shown(value)}")


def _refused(named: NamedLayer, place: str, wanted: str, found: str) -> LayerError:
    return LayerError(
        f"pipeline.split_vocabulary needs {place} to be {wanted}, but got {found} for layer "
        f"{named.name}. Make it one, move everything else that it does to a separate layer, or "
        "use VocabEmbed and VocabHead."
    )


def split_vocabulary(module: Any) -> Any:
    """The module with embedding and head split over the stages, with equal results and names."""
    if module.num_stages == 1:
        return module
    if module.loss_fn is None:
        raise LayerError(
            "pipeline.split_vocabulary needs a loss_fn, but got loss_fn=None. Give PipelineModule "
            "a loss_fn, such as jaxpipe.losses.cross_entropy."
        )
    layers, size = split_layers(module.layers)
    if size % module.num_stages:
        raise LayerError(
            f"pipeline.split_vocabulary needs a vocabulary that num_stages divides, but got {size} "
            f"for num_stages={module.num_stages}. Pad it to "
            f"{-(-size // module.num_stages) * module.num_stages}."
        )
    # The rest, such as the cut and warnings already given, stays the module's.
    other = copy.copy(module)
    other.layers = layers
    return other


def with_split_logits(outputs: PyTree, whole: PyTree) -> PyTree:
    """A model's outputs as its loss receives them: slices of the last dim as `SplitLogits`."""

    def one(leaf: jax.Array, like: Any) -> Any:
        # `whole` has the shapes of outputs that are not split.
        if leaf.shape == like.shape:
            return leaf
        if leaf.shape[:-1] != like.shape[:-1]:
            raise LayerError(
                "an output of the model that is split over the stages must be split along its last "
                f"dim, but got {list(leaf.shape)} on a stage for {list(like.shape)}. Transpose it "
                "in the last layer."
            )
        return SplitLogits(leaf, like.shape[-1])

    return jax.tree.map(one, outputs, whole)


def check_split_loss(module: Any, local: PyTree, whole: PyTree, labels: PyTree) -> None:
    """Refuse a loss that slices of logits do not suffice for. Call it where `stage` is bound."""
    try:
        jax.eval_shape(
            lambda y, t: module.loss_terms(with_split_logits(y, whole), t), local, labels
        )
    except Exception as error:
        cause = error.__cause__ or error  # `loss_terms` wraps it in its own message
        text = f"{type(cause).__name__}: {cause}".rstrip(".")
        raise LayerError(
            "loss_fn must leave logits that are split over the stages to "
            "jaxpipe.losses.cross_entropy or vocab_cross_entropy, but got "
            f"{getattr(module.loss_fn, '__name__', module.loss_fn)!r}, which failed on them with "
            f"{text}. Call one of these in loss_fn, without jax.jit around it, or "
            "leave the head whole (pipeline.split_vocabulary=false, or no VocabHead)."
        ) from error
