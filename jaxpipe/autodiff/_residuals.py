"""A function cut into a forward that returns what its backward needs, and the backward.

What is kept are arrays that depend on the function's inputs: the fewest bytes from which all else that the backward
reads follows by cheap equations. Everything that follows from the parameters alone (the weights themselves, casts of
them, causal masks) is taken again from the parameters when the backward runs, so weights are never kept per microbatch.
What a layer does beside computing, such as printing, it does in the forward; the backward repeats it only where it
recomputes.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpipe._typing import PyTree
from jaxpipe.jaxpr import Program, Slice, effects_of, evaluate, flatten, needed_for, reached_from, value_of, variables

from ._min_cut import smallest_cut
from ._regions import arrange, find_regions

_MANY_KINDS = 6
"""With more kinds of layers that recompute inside, either all of them do or none does: each try costs a trace."""


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

    A layer that recomputes inside has said what of its own is kept, and its backward computes the rest again as JAX
    has it. Of what JAX keeps, here and of all other layers, only that waits which does not follow from the rest. A
    layer that would keep less without recompute than with it, as one whose inputs are wider than what it computes with,
    does not recompute: to ask for recompute never adds to what waits.

    Args:
        function: Any traceable function.
        params: Shapes and dtypes of the parameters.
        inputs: Shapes and dtypes of the inputs.
        context: Shapes and dtypes of the context.

    Attributes:
        kept: Shapes and dtypes of what `forward` returns beside the outputs.
        is_hosted: For each of them whether recompute asked for it to wait in host memory.
    """

    def __init__(self, function: Callable[..., PyTree], params: PyTree, inputs: PyTree, context: PyTree) -> None:
        self._params = params
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(params, inputs, context)
        self._cotangents = differentiable(shapes[0])
        self._results = jax.tree.structure(shapes)
        structs = params, inputs, context
        self._cut = _fewest_bytes(
            find_regions(closed), lambda kinds: _Cut(arrange(closed, set().union(*kinds)), self._results, *structs)
        )
        self.is_hosted = self._cut.is_hosted
        self._forms: list[_Form] = []
        self.kept: list[jax.ShapeDtypeStruct] = jax.eval_shape(self.forward, *structs)[2]

    def forward(self, params: PyTree, inputs: PyTree, context: PyTree) -> tuple[PyTree, PyTree, list[jax.Array]]:
        """Compute the outputs.

        Returns:
            `(outputs, others, kept)`.
        """
        program, held = self._cut.program, self._cut.held
        args = dict(zip(program.inputs, jax.tree.leaves((params, inputs, context)), strict=True))
        part = needed_for(program, [*self._cut.outputs, *held], forced=effects_of(program))
        values, given = evaluate(program, args, part, {}, held)
        outputs, others = jax.tree.unflatten(self._results, [value_of(values, x) for x in self._cut.outputs])
        self._forms = [_Form.of(given[x]) for x in held]
        return outputs, others, [form.encode(given[x]) for form, x in zip(self._forms, held, strict=True)]

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
        """The backward of parameters, `kept` and cotangents; what it computes again of the forward is in it."""

        def pull(params: PyTree, kept: Sequence[jax.Array], cotangents: Sequence[jax.Array]) -> Any:
            values = [form.decode(value) for form, value in zip(self._forms, kept, strict=True)]
            return self._cut.pullback(jax.tree.leaves(params), values)(list(cotangents))

        return flatten(jax.make_jaxpr(pull)(self._params, self.kept, self._cotangents))

    @functools.cached_property
    def effects(self) -> set[int]:
        """Ids of the program's equations that do something."""
        return effects_of(self.program)

    @functools.cached_property
    def moving(self) -> set[Any]:
        """The program's variables that do not follow from the parameters alone."""
        return reached_from(self.program, set(self.program.inputs[len(jax.tree.leaves(self._params)) :]))

    @functools.cached_property
    def _part(self) -> Slice:
        return needed_for(self.program, self.program.outputs, forced=self.effects)


def _fewest_bytes(kinds: list[set[int]], cut: Callable[[Sequence[set[int]]], "_Cut"]) -> "_Cut":
    """The cut that keeps the fewest bytes, of those with all kinds of regions, without one after another, and none."""
    best = cut(kinds)
    while len(kinds) > 1:
        without = [kinds[:i] + kinds[i + 1 :] for i in range(len(kinds))] if len(kinds) <= _MANY_KINDS else []
        tried = [(cut(fewer), fewer) for fewer in without]
        better, kinds = min(tried, key=lambda pair: pair[0].num_bytes, default=(best, kinds))
        if better.num_bytes >= best.num_bytes:
            break
        best = better
    return min(best, cut([]), key=lambda one: one.num_bytes) if kinds else best


class _Cut:
    """A function's forward with all that `jax.vjp` keeps of it, and the fewest values that this follows from.

    Args:
        function: A function of arrays.
        results: The structure of its results, `(outputs, others)`.
        params: Shapes and dtypes of the parameters.
        inputs: Shapes and dtypes of the inputs.
        context: Shapes and dtypes of the context.

    Attributes:
        program: The forward, with its moves between memories.
        outputs: Variables of the program: its results.
        held: Variables of the program and of its bodies: what waits for the backward.
        is_hosted: For each of them whether recompute asked for it to wait in host memory.
        num_bytes: Bytes that wait on the device.
    """

    def __init__(
        self, function: Callable[..., list[Any]], results: Any, params: PyTree, inputs: PyTree, context: PyTree
    ) -> None:
        pullbacks: list[tuple[Any, list[_Form]]] = []

        def trace(params: PyTree, inputs: PyTree, context: PyTree) -> tuple[list[jax.Array], list[jax.Array]]:
            def moving(params: PyTree, values: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
                args = params, replace_differentiable(inputs, values), context
                found = function(*jax.tree.leaves(args))
                return differentiable(jax.tree.unflatten(results, found)[0]), found

            _, pullback, found = jax.vjp(moving, params, differentiable(inputs), has_aux=True)
            leaves, treedef = jax.tree.flatten(pullback)
            forms = [_Form.of(leaf) for leaf in leaves]
            pullbacks.append((treedef, forms))
            return found, [form.encode(leaf) for form, leaf in zip(forms, leaves, strict=True)]

        closed = jax.make_jaxpr(trace)(params, inputs, context)
        self._treedef, self._forms = pullbacks[-1]
        self.program = program = flatten(closed, moves=True)
        self.outputs = program.outputs[: results.num_leaves]
        self._leaves = program.outputs[results.num_leaves :]
        moving = reached_from(program, set(program.inputs[len(jax.tree.leaves(params)) :]))
        leaves = zip(self._leaves, self._forms, strict=True)
        hosted = set(variables(x for x, form in leaves if form.is_hosted))

        def price(var: Any, size: int) -> int:
            return 0 if var in hosted else size

        self.held, self.num_bytes = smallest_cut(program, self._leaves, moving, program.variables, price)
        self.is_hosted = [var in hosted for var in self.held]

    def pullback(self, params: Sequence[jax.Array], held: Sequence[Any]) -> Callable[..., Any]:
        """What `jax.vjp` returned, made again.

        Args:
            params: The parameters' leaves.
            held: Values of `held`.
        """
        given = dict(zip(self.held, held, strict=True))
        part = needed_for(self.program, self._leaves, given=given)
        values, _ = evaluate(self.program, dict(zip(self.program.inputs, params, strict=False)), part, given, [])
        leaves = [form.decode(value_of(values, x)) for form, x in zip(self._forms, self._leaves, strict=True)]
        return jax.tree.unflatten(self._treedef, leaves)


class _Form(NamedTuple):
    """What a value is beside its numbers, which rings and branches pass on.

    Attributes:
        key_impl: The generator that it is a key of; None for other values.
        is_hosted: Whether it lies in host memory.
    """

    key_impl: Any
    is_hosted: bool

    @staticmethod
    def of(value: jax.Array) -> "_Form":
        """The form of an array."""
        is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        is_hosted = jax.typeof(value).memory_space == jax.memory.Space.Host
        return _Form(jax.random.key_impl(value) if is_key else None, is_hosted)

    def encode(self, value: Any) -> jax.Array:
        """The numbers, in the device's memory."""
        if self.is_hosted:
            return jax.device_put(value, jax.memory.Space.Device)
        return value if self.key_impl is None else jax.random.key_data(value)

    def decode(self, value: jax.Array) -> Any:
        """The value again."""
        if self.is_hosted:
            return jax.device_put(value, jax.memory.Space.Host)
        return value if self.key_impl is None else jax.random.wrap_key_data(value, impl=self.key_impl)
