"""Cuts a function into a forward that returns residuals and a backward that reads them.

Residuals are arrays that depend on the function's inputs. They are the fewest bytes from which
cheap equations compute everything else that the backward reads. Values that only depend on the
parameters (the weights themselves, casts of them, causal masks) are recomputed from the parameters
in the backward, so weights are never stored per microbatch. Side effects of a layer, such as
printing, run in the forward. The backward only repeats them if it recomputes the layer.
"""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jaxpipe._util.typing import PyTree
from jaxpipe.distributed.topology import MANUAL_AXES
from jaxpipe.programs.jaxpr import (
    ATTENTION_SCOPE,
    Literal,
    Program,
    Slice,
    Turns,
    effects_of,
    evaluate,
    flatten,
    needed_for,
    output_specs,
    propagated_specs,
    reached_from,
    turns_of,
    value_of,
    variables,
)

from ._min_cut import smallest_cut
from ._regions import arrange, find_regions

_MANY_KINDS = 6
"""With more kinds of regions than this, either all of them recompute or none does.

Each attempt costs a trace.
"""


def differentiable(tree: PyTree) -> list[jax.Array]:
    """Return the leaves that have a gradient: floating-point and complex ones."""
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]


def replace_differentiable(tree: PyTree, values: Sequence[jax.Array]) -> PyTree:
    """Replace the differentiable leaves of a tree, in order."""
    leaves, treedef = jax.tree.flatten(tree)
    new = iter(values)
    return jax.tree.unflatten(
        treedef, [next(new) if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in leaves]
    )


class Residuals:
    """Forward and backward of `function(params, inputs, context) -> (outputs, others)`.

    The outputs are differentiated with respect to the trained parameters and the differentiable
    leaves of the inputs. `context` (keys, side inputs, collections) and `others` (collections,
    metrics) have no gradients.

    The policy of a layer with recompute determines its residuals, and its backward recomputes the
    rest as JAX does. Of all values that JAX keeps, for these and for all other layers, only those
    are stored that cannot be computed cheaply from the others. A layer does not recompute if it
    would store less without recompute, for example if its inputs are wider than the dtype in which
    it computes. So recompute never increases the memory of residuals.

    The parameters, inputs and context are given as shapes and dtypes. `frozen` are the indices of
    parameter leaves without a gradient. Values that only their gradients would need are neither
    computed nor kept.

    Attributes:
        structs: Shapes and dtypes of the residuals.
        is_hosted: Whether the recompute policy offloads each residual to host memory.
    """

    def __init__(
        self,
        function: Callable[..., PyTree],
        params: PyTree,
        inputs: PyTree,
        context: PyTree,
        *,
        frozen: Collection[int] = (),
    ) -> None:
        self._frozen = frozenset(frozen)
        self._params = params
        self._arguments = (params, inputs, context)
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(params, inputs, context)
        self._cotangents = differentiable(shapes[0])
        self._results = jax.tree.structure(shapes)
        structs = params, inputs, context
        self._cut = _fewest_bytes(
            find_regions(closed),
            lambda kinds: _Cut(
                arrange(closed, set().union(*kinds)), self._results, self._frozen, *structs
            ),
        )
        self.is_hosted = self._cut.is_hosted
        self._encodings: list[Encoding] = []
        # Traced once here, which also determines the encodings that a backward decodes.
        self.structs: list[jax.ShapeDtypeStruct] = jax.eval_shape(self.forward, *structs)[2]

    def forward(
        self, params: PyTree, inputs: PyTree, context: PyTree
    ) -> tuple[PyTree, PyTree, list[jax.Array]]:
        """Compute `(outputs, others, residuals)`."""
        program = self._cut.program
        cut = self._cut.variables
        args = dict(zip(program.inputs, jax.tree.leaves((params, inputs, context)), strict=True))
        part = needed_for(program, [*self._cut.outputs, *cut], forced=effects_of(program))
        values, given = evaluate(program, args, part, {}, cut)
        outputs, others = jax.tree.unflatten(
            self._results, [value_of(values, x) for x in self._cut.outputs]
        )
        self._encodings = [Encoding.of(given[x]) for x in cut]
        return (
            outputs,
            others,
            [code.encode(given[x]) for code, x in zip(self._encodings, cut, strict=True)],
        )

    def backward(
        self,
        params: PyTree,
        residuals: Sequence[jax.Array],
        cotangents: Sequence[jax.Array],
        groups: Sequence[Sequence[int]] = (),
        reduce: Callable[[int, jax.Array], jax.Array] | None = None,
    ) -> tuple[PyTree, list[jax.Array]]:
        """Compute gradients of the parameters, and of the inputs' differentiable leaves.

        Frozen parameters have None. Each group has the indices of one layer's parameter leaves,
        whose gradients become `reduce(index, gradient)`.
        """
        args = [*jax.tree.leaves(params), *residuals, *cotangents]
        turns: Turns = {}
        # The backward of the preceding layer overlaps the reductions of a group.
        if reduce is not None:
            grads = self.param_gradients
            indices = {
                x: i for i, x in enumerate(grads) if x is not None and not isinstance(x, Literal)
            }
            leaving = [[grads[i] for i in group if i not in self._frozen] for group in groups]
            turns = turns_of(
                self.program, self._part, leaving, lambda x, grad: reduce(indices[x], grad)
            )
        values, _ = evaluate(
            self.program,
            dict(zip(self.program.inputs, args, strict=True)),
            self._part,
            {},
            [],
            turns,
        )
        found = [None if x is None else value_of(values, x) for x in self.param_gradients]
        dx = [value_of(values, x) for x in self.input_gradients]
        return jax.tree.unflatten(jax.tree.structure(params), found), dx

    @property
    def param_gradients(self) -> list[Any]:
        """The program's outputs that are gradients of parameter leaves; None if frozen."""
        grads = iter(self.program.outputs)
        return [
            None if i in self._frozen else next(grads)
            for i in range(len(jax.tree.leaves(self._params)))
        ]

    @property
    def input_gradients(self) -> list[Any]:
        """The program's outputs that are gradients of the inputs' differentiable leaves."""
        return list(self.program.outputs[len(jax.tree.leaves(self._params)) - len(self._frozen) :])

    def specs(self, params: Sequence[P], inputs: Sequence[P], mesh: AbstractMesh) -> list[P]:
        """Find the residuals' shardings over automatic axes. XLA may divide them further."""
        closed = jax.make_jaxpr(self.forward)(*self._arguments)
        _, given, context = map(jax.tree.leaves, self._arguments)
        outgoing = list(zip(closed.out_avals, output_specs(closed), strict=True))[: len(given)]
        # If the outputs have the shapes and dtypes of the inputs and are constrained, their specs
        # are used for the inputs.
        are_alike = [(out.shape, out.dtype) for out, _ in outgoing] == [
            (x.shape, x.dtype) for x in given
        ]
        constraints = [spec for _, spec in outgoing] if are_alike else [P()] * len(given)
        incoming = [
            spec if spec != P() else default
            for spec, default in zip(constraints, inputs, strict=True)
        ]
        specs = [*params, *incoming, *(P() for _ in context)]
        found = propagated_specs(closed, specs, mesh, MANUAL_AXES, ATTENTION_SCOPE)
        return found[len(found) - len(self.structs) :]

    @functools.cached_property
    def program(self) -> Program:
        """The backward, with recompute, as a function of parameters, residuals and cotangents."""

        def pull(
            params: PyTree, residuals: Sequence[jax.Array], cotangents: Sequence[jax.Array]
        ) -> Any:
            values = [
                code.decode(value) for code, value in zip(self._encodings, residuals, strict=True)
            ]
            return self._cut.pullback(jax.tree.leaves(params), values)(list(cotangents))

        return flatten(jax.make_jaxpr(pull)(self._params, self.structs, self._cotangents))

    @functools.cached_property
    def effects(self) -> set[int]:
        """Ids of the program's equations with side effects."""
        return effects_of(self.program)

    @functools.cached_property
    def batch_dependent(self) -> set[Any]:
        """The program's variables that depend on more than the parameters."""
        return reached_from(
            self.program, set(self.program.inputs[len(jax.tree.leaves(self._params)) :])
        )

    @functools.cached_property
    def _part(self) -> Slice:
        return needed_for(self.program, self.program.outputs, forced=self.effects)


def _fewest_bytes(kinds: list[set[int]], cut: Callable[[Sequence[set[int]]], "_Cut"]) -> "_Cut":
    """Find the cut that stores the fewest bytes."""
    # The candidates are the cut with all kinds of regions, cuts from which one kind after another
    # is removed, and the cut without regions.
    best = cut(kinds)
    while len(kinds) > 1:
        without = (
            [kinds[:i] + kinds[i + 1 :] for i in range(len(kinds))]
            if len(kinds) <= _MANY_KINDS
            else []
        )
        tried = [(cut(fewer), fewer) for fewer in without]
        better, kinds = min(tried, key=lambda pair: pair[0].num_bytes, default=(best, kinds))
        if better.num_bytes >= best.num_bytes:
            break
        best = better
    # In a tie keep the recompute that the user asked for: `min` returns the first.
    return min(best, cut([]), key=lambda one: one.num_bytes) if kinds else best


class _Cut:
    """A function's forward with all values that `jax.vjp` keeps.

    The residuals are the smallest values from which the kept values can be computed. `function`
    takes the leaves of `(params, inputs, context)`, which are given as shapes and dtypes. `results`
    is the structure of its results, `(outputs, others)`.

    Attributes:
        program: The forward, including its moves between memories.
        outputs: Variables of the program that are its results.
        variables: Variables of the program and of its bodies that are residuals.
        is_hosted: Whether the recompute policy offloads each residual to host memory.
        num_bytes: Bytes of residuals on the device.
    """

    def __init__(
        self,
        function: Callable[..., list[Any]],
        results: Any,
        frozen: Collection[int],
        params: PyTree,
        inputs: PyTree,
        context: PyTree,
    ) -> None:
        pullbacks: list[tuple[Any, list[Encoding]]] = []

        def trace(
            params: PyTree, inputs: PyTree, context: PyTree
        ) -> tuple[list[jax.Array], list[jax.Array]]:
            # Only floating-point leaves: for integers and keys `jax.vjp` needs float0 cotangents.
            leaves = dict(enumerate(jax.tree.leaves(params)))
            trained = {i: leaf for i, leaf in leaves.items() if i not in frozen}

            def of_inexact(
                trained: dict[int, jax.Array], values: list[jax.Array]
            ) -> tuple[list[jax.Array], list[jax.Array]]:
                merged = leaves | trained
                args = [merged[i] for i in leaves], replace_differentiable(inputs, values), context
                found = function(*jax.tree.leaves(args))
                return differentiable(jax.tree.unflatten(results, found)[0]), found

            # The pullback is a pytree whose leaves are the values that JAX keeps of the forward.
            _, pullback, found = jax.vjp(of_inexact, trained, differentiable(inputs), has_aux=True)
            residuals, treedef = jax.tree.flatten(pullback)
            encodings = [Encoding.of(leaf) for leaf in residuals]
            # Not returned, because `jax.make_jaxpr` only returns arrays.
            pullbacks.append((treedef, encodings))
            return found, [
                code.encode(leaf) for code, leaf in zip(encodings, residuals, strict=True)
            ]

        closed = jax.make_jaxpr(trace)(params, inputs, context)
        self._treedef, self._encodings = pullbacks[-1]
        self.program = program = flatten(closed, moves=True)
        self.outputs = program.outputs[: results.num_leaves]
        self._leaves = program.outputs[results.num_leaves :]
        batch_dependent = reached_from(program, set(program.inputs[len(jax.tree.leaves(params)) :]))
        leaves = zip(self._leaves, self._encodings, strict=True)
        hosted = set(variables(x for x, code in leaves if code.is_hosted))

        def price(var: Any, size: int) -> int:
            return 0 if var in hosted else size  # host memory is not scarce

        self.variables, self.num_bytes = smallest_cut(
            program, self._leaves, batch_dependent, program.variables, price
        )
        self.is_hosted = [var in hosted for var in self.variables]

    def pullback(self, params: Sequence[jax.Array], residuals: Sequence[Any]) -> Callable[..., Any]:
        """Rebuild the pullback of `jax.vjp` from parameters and the values of `variables`."""
        given = dict(zip(self.variables, residuals, strict=True))
        part = needed_for(self.program, self._leaves, given=given)
        # The parameters are the first inputs. The others are not needed, because all values that
        # depend on them are given.
        values, _ = evaluate(
            self.program, dict(zip(self.program.inputs, params, strict=False)), part, given, []
        )
        leaves = [
            code.decode(value_of(values, x))
            for code, x in zip(self._encodings, self._leaves, strict=True)
        ]
        return jax.tree.unflatten(self._treedef, leaves)


class Encoding(NamedTuple):
    """How a value is stored as numbers in a device array, as rings and branches require."""

    key_impl: Any  # the generator of a PRNG key; otherwise None
    is_hosted: bool  # whether the value is in host memory

    @staticmethod
    def of(value: jax.Array) -> "Encoding":
        """Return the encoding of an array."""
        is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        is_hosted = jax.typeof(value).memory_space == jax.memory.Space.Host
        return Encoding(jax.random.key_impl(value) if is_key else None, is_hosted)

    def encode(self, value: Any) -> jax.Array:
        """Convert a value to numbers in device memory."""
        if self.is_hosted:
            value = jax.device_put(value, jax.memory.Space.Device)
        return value if self.key_impl is None else jax.random.key_data(value)

    def decode(self, value: jax.Array) -> Any:
        """Convert the numbers back to the value."""
        if self.is_hosted:
            return jax.device_put(value, jax.memory.Space.Host)
        return (
            value if self.key_impl is None else jax.random.wrap_key_data(value, impl=self.key_impl)
        )
