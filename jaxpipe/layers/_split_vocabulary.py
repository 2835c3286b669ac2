"""An ordinary embedding, head and cross entropy, split over the stages as `VocabEmbed` and `VocabHead` are."""

import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import meta

from jaxpipe._typing import PyTree
from jaxpipe.errors import LayerError
from jaxpipe.jaxpr import Program, evaluate, flatten, needed_for, value_of

from ._axes import NO_MESH
from ._build import NamedLayer
from ._linen import LinenLayer
from ._nnx import NNXLayer
from ._protocol import Applied, Layer, Rngs
from ._sharding import unbox
from ._vocab import STAGE, VocabEmbed, VocabHead, vocab_cross_entropy

_TOLERANCE = 1e-5
"""Relative, of cross entropies in float32."""

_OfLogits = Callable[[jax.Array], jax.Array]


class _SplitLayer(Layer):
    """A layer whose variables are another's, split over the stages, and which computes as a layer of this room does.

    Args:
        layer: The user's layer: names, initial values and arguments are its own.
        split: What computes from whole parameters or slices.
        specs: Names of the axes of its parameters.
    """

    def __init__(self, layer: Layer, split: Layer, specs: Mapping[str, tuple[str | None, ...]]) -> None:
        self._layer, self._split, self._specs = layer, split, specs
        self.class_name, self.arguments = layer.class_name, layer.arguments
        self.identity = "split", layer.identity

    def init(
        self, key: jax.Array, inputs: PyTree, *, side: Mapping[str, PyTree], given: PyTree | None = None
    ) -> tuple[PyTree, dict[str, Any], dict[str, Any]]:
        """See `Layer.init`; the parameters are marked as split."""
        outputs, params, collections = self._layer.init(key, inputs, side=side, given=given)
        params = {name: meta.Partitioned(unbox(value), self._specs[name]) for name, value in params.items()}
        return outputs, params, collections

    def apply(
        self,
        params: PyTree,
        collections: Mapping[str, PyTree],
        inputs: PyTree,
        *,
        rngs: Rngs | None,
        train: bool,
        side: Mapping[str, PyTree],
    ) -> Applied:
        """See `Layer.apply`."""
        return self._split.apply(params, collections, inputs, rngs=rngs, train=train, side=side)


def split_layers(layers: Sequence[NamedLayer]) -> tuple[tuple[NamedLayer, ...], int]:
    """The layers with the first and the last one split over the stages; names and initial values stay.

    Args:
        layers: A model's: the first is an `nn.Embed` or `nnx.Embed`, the last an `nn.Dense` or `nnx.Linear`, or it uses
            the embedding's table through a `forward_fn` that calls `attend`.

    Returns:
        `(layers, size of the vocabulary)`.

    Raises:
        LayerError: One of the two is of another form.
    """
    first, last = layers[0], layers[-1]
    embed, size = _split_embed(first)
    if last.tied_key is not None and last.tied_key == first.tied_key:
        head, num_logits = _split_embed(last)
    else:
        head, num_logits = _split_head(last)
    if size != num_logits:
        raise LayerError(
            f"pipeline.split_vocabulary must find one vocabulary, but got {size} rows in layer {first.name} and "
            f"{num_logits} logits of layer {last.name}. Make both as large, padded where one is smaller."
        )
    middle = layers[1:-1]
    return (dataclasses.replace(first, layer=embed), *middle, dataclasses.replace(last, layer=head)), size


def _split_embed(named: NamedLayer) -> tuple[Layer, int]:
    module, call = _module_of(named, (nn.Embed, nnx.Embed), "the first layer", "nn.Embed or nnx.Embed")
    args = module.num_embeddings, module.features, module.dtype, module.param_dtype
    split = LinenLayer(VocabEmbed(*args), _on_table(named, call))
    return _SplitLayer(named.layer, split, {"embedding": (STAGE, None)}), args[0]


def _on_table(named: NamedLayer, call: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """A `forward_fn` of an embedding for one that is split."""
    if call is None or call in (nn.Embed.attend, nnx.Embed.attend):
        return call and VocabEmbed.attend

    @functools.wraps(call)
    def attend(module: VocabEmbed, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(module, *args, **kwargs)
        except AttributeError as error:
            raise _refused(named, "the last layer", "a forward_fn that calls attend", f"{error}") from error

    return attend


def _split_head(named: NamedLayer) -> tuple[Layer, int]:
    wanted = "nn.Dense, nnx.Linear, or the first one again, tied, with a forward_fn that calls attend"
    module, call = _module_of(named, (nn.Dense, nnx.Linear), "the last layer", wanted)
    if call is not None:
        raise _refused(named, "the last layer", "called as it is", "a forward_fn")
    if module.precision is not None:
        raise _refused(named, "the last layer", "of default precision", f"precision={module.precision!r}")
    size = module.features if isinstance(module, nn.Dense) else module.out_features
    split = LinenLayer(VocabHead(size, module.use_bias, module.dtype, module.param_dtype))
    return _SplitLayer(named.layer, split, {"kernel": (None, STAGE), "bias": (STAGE,)}), size


def _module_of(named: NamedLayer, kinds: tuple[type, ...], place: str, wanted: str) -> tuple[Any, Any]:
    """A layer's module and the `forward_fn` of its spec."""
    layer = named.layer
    if isinstance(layer, (LinenLayer, NNXLayer)) and type(layer.module) in kinds:
        return layer.module, layer.forward_fn
    found = "one that recomputes itself" if named.is_marked else layer.class_name
    raise _refused(named, place, wanted, found)


def _refused(named: NamedLayer, place: str, wanted: str, found: str) -> LayerError:
    return LayerError(
        f"pipeline.split_vocabulary needs {place} to be {wanted}, but got {found} for layer {named.name}. Make it one, "
        "with what else it does in a layer of its own, or use VocabEmbed, VocabHead and vocab_cross_entropy."
    )


def _of_one_hot(logits: jax.Array, target: jax.Array, size: int) -> jax.Array:
    """Cross entropies of rows of a one-hot encoding: of zeros where no class is meant."""
    return jnp.where(_is_class(target, size), vocab_cross_entropy(logits, target, size), 0.0)


def _taken_from_logits(logits: jax.Array, target: jax.Array, size: int) -> jax.Array:
    """Cross entropies whose targets' logits are taken: NaN where there is none."""
    missing = jnp.where(_is_class(target, size), 0.0, jnp.nan)
    return vocab_cross_entropy(logits, target, size) + missing


def _taken_from_log_probs(logits: jax.Array, target: jax.Array, size: int) -> jax.Array:
    """Log probabilities that are taken: NaN without a gradient where there is none."""
    return jnp.where(_is_class(target, size), vocab_cross_entropy(logits, target, size), jnp.nan)


def _indexed_in_log_probs(logits: jax.Array, target: jax.Array, size: int) -> jax.Array:
    """Log probabilities that are indexed: the nearest without a gradient where there is none."""
    entropies = vocab_cross_entropy(logits, jnp.clip(target, 0, size - 1), size)
    return jnp.where(_is_class(target, size), entropies, jax.lax.stop_gradient(entropies))


def _is_class(target: jax.Array, size: int) -> jax.Array:
    return (target >= 0) & (target < size)


_KINDS = (_taken_from_logits, _of_one_hot, _taken_from_log_probs, _indexed_in_log_probs)
"""Cross entropies as losses compute them; they differ where a target is no class."""


class _Entropies(NamedTuple):
    """The place at which a loss has the cross entropies of all positions, or their negatives.

    Attributes:
        num_eqns: Length of the program in which this is so.
        place: Number of their variable.
        sign: 1, or -1 for negatives.
        target: Number of the variable that holds the classes: labels, or what is made of them.
        of: Computes them.
    """

    num_eqns: int
    place: int
    sign: int
    target: int
    of: Callable[[jax.Array, jax.Array, int], jax.Array]


class SplitLoss:
    """A loss of cross entropies, computed from this stage's slice of the logits.

    The loss is traced. It must read the logits through the cross entropy of each position with one
    of the labels alone, or with what it makes of that one, whatever it is written with. Which of
    its values these are is found by evaluating it, and its gradient, on random logits and on labels
    in the vocabulary and outside. The rest of it, masks, weights and means, runs as it is.

    Args:
        loss_fn: `loss_fn(logits, labels)`, on whole logits.
        labels: Shapes and dtypes of a microbatch's labels.
        num_embeddings: Number of all logits.

    Raises:
        LayerError: It is no function of cross entropies alone.
    """

    def __init__(self, loss_fn: Callable[[PyTree, PyTree], Any], labels: PyTree, num_embeddings: int) -> None:
        self._loss_fn, self._size = loss_fn, num_embeddings
        leaves, treedef = jax.tree.flatten(labels)
        # Two of each dim are enough; a loss that was written for certain lengths takes only these.
        tries = [treedef.unflatten(each) for each in ([_small(x) for x in leaves], leaves)]
        integers = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.integer)]
        targets = [i for i in integers if leaves[i].ndim and math.prod(leaves[i].shape)]
        found = next((x for i in targets for each in tries if (x := self._find(each, i)) is not None), None)
        if found is None:
            raise LayerError(
                "pipeline.split_vocabulary needs a loss_fn that reads the logits through their cross entropy with the "
                f"labels alone, one for each position, but got {getattr(loss_fn, '__name__', loss_fn)!r}, which is "
                "not seen to do so. Leave label smoothing and terms of the logits out, shift labels in the data "
                "instead of in the loss, or use VocabHead with a loss of vocab_cross_entropy."
            )
        self._entropies = found

    def __call__(self, logits: PyTree, labels: PyTree) -> Any:
        """The loss of a microbatch, from whole logits or from this stage's slice of them."""
        if not isinstance(logits, jax.Array) or logits.shape[-1] == self._size:
            return self._loss_fn(logits, labels)
        at = self._entropies
        whole = jax.ShapeDtypeStruct((*logits.shape[:-1], self._size), logits.dtype)
        program, results = self._trace(whole, labels)
        if len(program.eqns) != at.num_eqns:
            raise LayerError(
                "pipeline.split_vocabulary needs a loss_fn that does the same for labels of all shapes, but got "
                f"{len(program.eqns)} operations for logits {list(whole.shape)}, and {at.num_eqns} before. Use "
                "VocabHead with a loss of vocab_cross_entropy."
            )
        numbered = _numbered(program)
        var, target = numbered[at.place], numbered[at.target]
        args = dict(zip(program.inputs[1:], jax.tree.leaves(labels), strict=True))
        values, _ = evaluate(program, args, needed_for(program, [target]), {}, [])
        classes = value_of(values, target).reshape(logits.shape[:-1])
        entropies = at.sign * at.of(logits, classes, self._size)
        given = {var: entropies.reshape(var.aval.shape).astype(var.aval.dtype)}
        part = needed_for(program, program.outputs, given=given)
        values, _ = evaluate(program, args, part, given, [])
        return jax.tree.unflatten(results, [value_of(values, x) for x in program.outputs])

    def _trace(self, logits: jax.ShapeDtypeStruct, labels: PyTree) -> tuple[Program, Any]:
        structs = logits, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), labels)
        # On no mesh, as it was when the cross entropies were found: on one JAX adds operations.
        with jax.sharding.use_abstract_mesh(NO_MESH):
            closed, shapes = jax.make_jaxpr(self._loss_fn, return_shape=True)(*structs)
        return flatten(closed), jax.tree.structure(shapes)

    def _find(self, labels: PyTree, label: int) -> _Entropies | None:
        """The cross entropies in a loss that computes those of one leaf of the labels."""
        leaves = jax.tree.leaves(labels)
        shape = leaves[label].shape
        try:
            whole = jax.ShapeDtypeStruct((*shape, self._size), jnp.float32)
            program, _ = self._trace(whole, labels)
        except Exception:  # noqa: BLE001  # whatever a user's code raises of other shapes than its own
            return None
        rng = np.random.default_rng(0)
        usual = [rng.integers(0, min(self._size, 2**15), x.shape).astype(x.dtype) for x in leaves]
        # What is no class, too: losses wrap it, mask it, or give NaN.
        odd = np.asarray([-1, self._size, -100, -self._size, 2 * self._size, -2 * self._size - 1])
        odd = np.resize(odd, (-(-odd.size // math.prod(shape)), *shape)).astype(leaves[label].dtype)
        probes = [usual, *([*usual[:label], each, *usual[label + 1 :]] for each in odd)]
        logits = jnp.asarray(rng.normal(size=(*shape, self._size)), jnp.float32)
        numbered = _numbered(program)

        def is_like(var: Any, kind: type[np.generic]) -> bool:
            return var.aval.size == math.prod(shape) and jnp.issubdtype(var.aval.dtype, kind)

        targets = [i for i, var in enumerate(numbered) if is_like(var, np.integer)]
        for place, var in enumerate(numbered):
            # All that the loss reads of the logits must go through it.
            part = needed_for(program, program.outputs, given=[var])
            if not is_like(var, np.floating) or program.inputs[0] in part.variables:
                continue
            found = [_with_gradient(_part_of(program, var, labels), logits) for labels in probes]
            # The last ones first: what a loss makes of its labels, not the labels.
            for target in reversed(targets):
                if not _follows_from(program, var, numbered[target]):
                    continue
                classes = [_part_of(program, numbered[target], labels)(logits) for labels in probes]
                for sign, of in itertools.product((1, -1), _KINDS):
                    one = _Entropies(len(program.eqns), place, sign, target, of)
                    if all(map(functools.partial(self._agrees, one, logits), classes, found)):
                        return one
        return None

    def _agrees(
        self,
        entropies: _Entropies,
        logits: jax.Array,
        classes: jax.Array,
        found: Sequence[jax.Array],
    ) -> bool:
        """Whether values and gradients are those that a loss has."""

        def of_logits(logits: jax.Array) -> jax.Array:
            at = classes.reshape(logits.shape[:-1])
            return entropies.sign * entropies.of(logits, at, self._size)

        pairs = zip(_with_gradient(of_logits, logits), found, strict=True)
        return all(
            np.allclose(wanted.reshape(-1), x.reshape(-1), _TOLERANCE, _TOLERANCE, equal_nan=True)
            for wanted, x in pairs
        )


def _with_gradient(function: _OfLogits, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A function's value and the gradient of its sum."""
    value, pullback = jax.vjp(function, x)
    return value, pullback(jnp.ones_like(value))[0]


def _part_of(program: Program, var: Any, labels: Sequence[np.ndarray]) -> _OfLogits:
    """One of a loss's values, as a function of the logits."""
    part = needed_for(program, [var])

    def function(logits: jax.Array) -> jax.Array:
        args = dict(zip(program.inputs, [logits, *map(jnp.asarray, labels)], strict=True))
        return value_of(evaluate(program, args, part, {}, [])[0], var)

    return jax.jit(function)


def _follows_from(program: Program, var: Any, target: Any) -> bool:
    """True if a value depends on the labels through one alone that is made of them."""
    used = needed_for(program, [var], given=[target]).variables
    return target in used and used.isdisjoint({*program.inputs[1:]} - {target})


def _numbered(program: Program) -> list[Any]:
    """Variables by number."""
    # Outside of scans: a value of a scan's body is not one for all positions.
    eqns = [eqn for i, eqn in enumerate(program.eqns) if i not in program.scans]
    return [*program.inputs[1:], *(var for eqn in eqns for var in eqn.outvars)]


def _small(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(min(n, 2) for n in leaf.shape), leaf.dtype)


def split_vocabulary(module: Any, labels: PyTree) -> Any:
    """A module whose embedding, head and loss are split over the stages; the same numbers and names.

    Args:
        module: A `PipelineModule`.
        labels: Shapes and dtypes of a microbatch's labels.

    Raises:
        LayerError: The first or the last layer, or the loss, is of a form that cannot be.
    """
    if module.num_stages == 1:
        return module
    if module.loss_fn is None:
        raise LayerError(
            "pipeline.split_vocabulary needs a loss_fn, but got loss_fn=None. Give PipelineModule a loss_fn, such as "
            "the mean of optax.softmax_cross_entropy_with_integer_labels."
        )
    layers, size = split_layers(module.layers)
    if size % module.num_stages:
        raise LayerError(
            f"pipeline.split_vocabulary needs a vocabulary that num_stages divides, but got {size} for "
            f"num_stages={module.num_stages}. Pad it to {-(-size // module.num_stages) * module.num_stages}."
        )
    other = copy.copy(module.replace(loss_fn=SplitLoss(module.loss_fn, labels, size)))
    other.layers = layers
    return other
