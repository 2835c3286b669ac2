"""A function cut into a forward that returns what its backward needs, and the backward.

What is kept are the arrays that depend on the function's inputs. Everything that follows from the parameters alone
(the weights themselves, casts of them, causal masks) is taken again from the parameters when the backward runs, so
weights are never kept per microbatch. What a layer does beside computing, such as printing, it does in the forward;
the backward repeats it only where it recomputes.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from jaxpipe._typing import PyTree

from ._dependence import output_dependence
from ._flat import Program, flatten, inline, value_of
from ._keep import asks_for_recompute, keep_products
from ._slice import Slice, effects_of, evaluate, needed_for, reached_from


def differentiable(tree: PyTree) -> list[jax.Array]:
    """The leaves that have a gradient: floating point and complex."""
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]


def replace_differentiable(tree: PyTree, values: Sequence[jax.Array]) -> PyTree:
    """The tree with its differentiable leaves replaced, in order."""
    leaves, treedef = jax.tree.flatten(tree)
    new = iter(values)
    return jax.tree.unflatten(treedef, [next(new) if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in leaves])


class Residuals:
    """Forward and backward of `function(params, inputs, context) -> (outputs, others)`.

    Gradients are taken of the outputs, for the parameters and the differentiable leaves of the inputs; `context`
    (keys, side inputs, collections) and `others` (collections, metrics) have none.

    Args:
        function: Any traceable function.
        params: Shapes and dtypes of the parameters.
        inputs: Shapes and dtypes of the inputs.
        context: Shapes and dtypes of the context.
    """

    def __init__(self, function: Callable[..., PyTree], params: PyTree, inputs: PyTree, context: PyTree) -> None:
        self._function = function
        self._params, self._inputs, self._context = params, inputs, context
        plain = jax.make_jaxpr(function)(params, inputs, context).jaxpr
        self._choose = (lambda moving: moving) if asks_for_recompute(plain) else keep_products

        hosted: list[bool] = []

        def trace(params: PyTree, inputs: PyTree, context: PyTree) -> tuple[PyTree, list[jax.Array]]:
            outputs, leaves, _ = self._vjp(params, inputs, context)
            hosted.extend(map(_is_hosted, leaves))
            return outputs, [_encode(leaf) for leaf in leaves]

        closed, results = jax.make_jaxpr(trace, return_shape=True)(params, inputs, context)
        self._compute, self._results = jaxpr_as_fun(inline(closed, moves=True)), jax.tree.structure(results)
        num_params = len(jax.tree.leaves(params))
        bits = [0 if i < num_params else 1 for i in range(len(closed.jaxpr.invars))]
        start = len(closed.jaxpr.outvars) - len(hosted)
        leaves = zip(closed.jaxpr.outvars[start:], output_dependence(closed.jaxpr, bits)[start:], strict=True)
        seen: dict[Any, int] = {}
        self._source: list[int | None] = []
        """Per leaf of the vjp its place among the kept ones, or None where the parameters alone give it."""
        self.kept: list[jax.ShapeDtypeStruct] = []
        """Shapes and dtypes of what `forward` returns beside the outputs."""
        self.is_hosted: list[bool] = []
        """For each of them whether recompute asked for it to wait in host memory."""
        for i, (var, dependent) in enumerate(leaves):
            if not dependent:
                self._source.append(None)
                continue
            if var not in seen:
                seen[var] = len(self.kept)
                self.kept.append(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype))
                self.is_hosted.append(hosted[i])
            self._source.append(seen[var])

    def forward(self, params: PyTree, inputs: PyTree, context: PyTree) -> tuple[PyTree, PyTree, list[jax.Array]]:
        """Compute the outputs.

        Returns:
            `(outputs, others, kept)`.
        """
        values = self._compute(*jax.tree.leaves((params, inputs, context)))
        (outputs, others), leaves = jax.tree.unflatten(self._results, values)
        return outputs, others, [leaves[self._source.index(place)] for place in range(len(self.kept))]

    def backward(
        self, params: PyTree, kept: Sequence[jax.Array], cotangents: Sequence[jax.Array]
    ) -> tuple[PyTree, list[jax.Array]]:
        """Compute the gradients.

        Args:
            params: The same parameters as in `forward`.
            kept: As `forward` returned it.
            cotangents: Gradients of the differentiable leaves of the outputs.

        Returns:
            `(gradients of the parameters, gradients of the differentiable leaves of the inputs)`.
        """
        args = [*jax.tree.leaves(params), *kept, *cotangents]
        values, _ = evaluate(self.program, dict(zip(self.program.inputs, args, strict=True)), self._part, {}, [])
        grads = [value_of(values, x) for x in self.program.outputs]
        treedef = jax.tree.structure(params)
        return jax.tree.unflatten(treedef, grads[: treedef.num_leaves]), grads[treedef.num_leaves :]

    @functools.cached_property
    def program(self) -> Program:
        """The backward of parameters, `kept` and cotangents; what is left of a forward on zeros is in it."""

        def pull(params: PyTree, kept: Sequence[jax.Array], cotangents: Sequence[jax.Array]) -> Any:
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (self._inputs, self._context))
            _, leaves, treedef = self._vjp(params, *zeros)
            leaves = [
                leaf if source is None else _decode(kept[source], leaf)
                for leaf, source in zip(leaves, self._source, strict=True)
            ]
            return jax.tree.unflatten(treedef, leaves)(list(cotangents))

        outputs = jax.eval_shape(self._function, self._params, self._inputs, self._context)[0]
        return flatten(jax.make_jaxpr(pull)(self._params, self.kept, differentiable(outputs)))

    @functools.cached_property
    def effects(self) -> set[int]:
        """Ids of the program's equations that do something and are not of the forward on zeros."""
        return effects_of(self.program, self.moving)

    @functools.cached_property
    def moving(self) -> set[Any]:
        """The program's variables that do not follow from the parameters alone."""
        return reached_from(self.program, set(self.program.inputs[len(jax.tree.leaves(self._params)) :]))

    @functools.cached_property
    def _part(self) -> Slice:
        return needed_for(self.program, self.program.outputs, forced=self.effects)

    def _vjp(self, params: PyTree, inputs: PyTree, context: PyTree) -> tuple[PyTree, list[jax.Array], Any]:
        def moving(params: PyTree, values: list[jax.Array]) -> tuple[list[jax.Array], PyTree]:
            outputs, others = self._function(params, replace_differentiable(inputs, values), context)
            return differentiable(outputs), (outputs, others)

        _, pullback, outputs = jax.vjp(self._choose(moving), params, differentiable(inputs), has_aux=True)
        leaves, treedef = jax.tree.flatten(pullback)
        return outputs, leaves, treedef


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _is_hosted(leaf: Any) -> bool:
    return jax.typeof(leaf).memory_space == jax.memory.Space.Host


def _encode(leaf: Any) -> jax.Array:
    """A leaf as rings and branches pass it on: bits for a key, and in the device's memory."""
    if _is_hosted(leaf):
        return jax.device_put(leaf, jax.memory.Space.Device)
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _decode(value: jax.Array, like: Any) -> jax.Array:
    if _is_hosted(like):
        return jax.device_put(value, jax.memory.Space.Host)
    return jax.random.wrap_key_data(value, impl=jax.random.key_impl(like)) if _is_key(like) else value
