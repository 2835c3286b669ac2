"""Kernels of a traced program.

What XLA's fusion makes of it, each with operations and bytes, for one device.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe._typing import PyTree

from ._equation import (
    ClosedJaxpr,
    Jaxpr,
    dot_contracted,
    is_call,
    is_causal,
    kernel_out_dim,
    name_of,
    programs_inside,
    scan_form,
    scope_of,
    unsharded,
)
from ._equation import Literal as Constant
from ._primitives import (
    ARITHMETIC,
    COMPARISONS,
    COND,
    CONSTRAINT,
    CONVOLUTION,
    CUDNN_ATTENTION,
    CUDNN_ATTENTION_BACKWARD,
    DOT,
    DRAWN,
    FORMS,
    LOOKUPS,
    NAMED,
    PLAIN_PRODUCTS,
    RAGGED_DOT,
    RANDOM_KEYS,
    REDUCTIONS,
    ROUNDING,
    SCAN,
    SCATTERS,
    SHARD_MAP,
    SUM_OF_COTANGENTS,
    UPDATE,
    WHILE,
)
from ._program import flatten, operands
from ._sharding import followed_specs, spec_axes
from ._slice import evaluate, needed_for

ATTENTION_SCOPE = "attention_kernel"
"""Named scope of attention in plain JAX that counts as the one kernel that it stands for."""

_BLOCKS = re.compile(r"\b(\d+)_of_(\d+)_blocks\b")


def blocks_scope(num_seen: int, num_blocks: int) -> str:
    """Name of a scope in it: of how many blocks a mask leaves so many."""
    return f"{num_seen}_of_{num_blocks}_blocks"


_FUSED = (
    ARITHMETIC | COMPARISONS | FORMS | RANDOM_KEYS | {SUM_OF_COTANGENTS, NAMED, DRAWN, ROUNDING}
)
"""What XLA computes inside of the kernel that reads or writes it."""

_SUMS = ("add", SUM_OF_COTANGENTS)


_SMALL = 2**16
"""Bytes below which an operand of attention says nothing of how its work is divided."""


class Kernel(NamedTuple):
    """One kernel, or a collective.

    Attributes:
        kind: A matrix product or convolution; attention as a whole; what else moves bytes; a
            collective over `axis`.
        flops: Operations of products.
        num_bytes: Bytes that it reads and writes, or that a collective leaves on a device.
        is_narrow: Whether a product's operands have at most 16 bits.
        axis: Of a collective.
        times: How often it runs.
        result_bytes: Bytes of a product's or attention's results.
        masked_flops: Operations more that attention without its mask would have.
    """

    kind: Literal["product", "attention", "other", "reduce", "gather"]
    flops: int
    num_bytes: int
    is_narrow: bool = True
    axis: str = ""
    times: int = 1
    result_bytes: int = 0
    masked_flops: int = 0


def count_kernels(
    function: Callable[..., Any],
    args: Sequence[PyTree],
    specs: Sequence[P] = (),
    mesh: AbstractMesh | None = None,
    manual: Sequence[str] = (),
) -> list[Kernel]:
    """Count the kernels that the outputs of a function of arguments of these shapes need.

    Element-wise arithmetic is part of the kernel that reads its results, but that what a product
    reads is written first, by a kernel that reads what it is made of. A product over a dim that is
    sharded is followed by a reduction.

    Args:
        function: The function.
        args: Shapes and dtypes of its arguments.
        specs: How the leaves of the arguments are sharded over automatic axes; empty: over none.
        mesh: The mesh; None: one device.
        manual: Its manual axes.
    """
    closed = live_program(function, *args)
    # Following shardings traces the whole program once more: not where nothing is sharded.
    found: Mapping[Any, P] = {}
    if mesh is not None and any(spec != P() for spec in specs):
        found = followed_specs(unsharded(closed), specs, mesh, manual, ATTENTION_SCOPE)
    return list(_Counter(found, mesh).kernels(closed.jaxpr))


def program_kernels(program: ClosedJaxpr) -> list[Kernel]:
    """Kernels of a program that is traced already, all of it, on one device."""
    return list(_Counter({}, None).kernels(program.jaxpr))


def num_flops(kernels: Iterable[Kernel]) -> int:
    """Operations of all products."""
    return sum(each.times * each.flops for each in kernels)


def live_program(function: Callable[..., Any], *args: PyTree) -> ClosedJaxpr:
    """The program of a function of arguments of these shapes.

    Calls, and what no output needs, are not in it.
    """
    program = flatten(jax.make_jaxpr(function)(*args))
    part = needed_for(program, program.outputs)

    # Traced again from the needed equations alone, which also drops from loops and branches what no
    # output needs.
    def run(*inputs: jax.Array) -> list[Any]:
        values, _ = evaluate(program, dict(zip(program.inputs, inputs, strict=True)), part, {}, [])
        return [values[x] for x in program.outputs if not isinstance(x, Constant)]

    shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in program.inputs]
    return jax.make_jaxpr(run)(*shapes)


def result_specs(
    function: Callable[..., Any],
    args: Sequence[PyTree],
    specs: Sequence[P],
    mesh: AbstractMesh,
    manual: Sequence[str],
) -> list[P]:
    """Shardings of the leaves of a function's results over automatic axes.

    Arguments as for `count_kernels`.
    """
    closed = live_program(function, *args)
    found = followed_specs(unsharded(closed), specs, mesh, manual, ATTENTION_SCOPE)
    return [P() if isinstance(x, Constant) else found[x] for x in closed.jaxpr.outvars]


class _Fusion:
    """Arithmetic and reductions between two products, which are one kernel.

    Attributes:
        partial: Products that are yet to be reduced over an axis: of several that are added up the
            sum is, once.
    """

    def __init__(self, num_bytes: Callable[[Sequence[Any]], int]) -> None:
        self._num_bytes = num_bytes
        self.partial: dict[Any, Kernel] = {}
        self._sources: dict[Any, frozenset[Any]] = {}
        """What arithmetic that is not yet written is made of."""
        self._roots: dict[Any, Any] = {}
        """Values that are others in another form: what is written and read are those."""
        self._written: set[Any] = set()
        self._read: set[Any] = set()

    def add(self, eqn: Any) -> None:
        """Take in an equation of arithmetic, a change of form or a reduction."""
        if eqn.primitive.name in REDUCTIONS:
            # A reduction ends in memory: what follows it waits for its last element.
            self._written.update(eqn.outvars)
            self._read.update(*map(self._of, eqn.invars))
            return
        for results, taken in operands(eqn):
            for out in results:
                if eqn.primitive.name in FORMS and len(taken) == 1:
                    self._roots[out] = self._root(taken[0])
                else:
                    self._sources[out] = frozenset[Any]().union(*map(self._of, taken))

    def reduced(self, eqn: Any) -> Iterator[Kernel]:
        """Reductions that an equation needs before it."""
        name, taken = (
            eqn.primitive.name,
            {self._root(x) for x in eqn.invars if not isinstance(x, Constant)},
        )
        # A change of form can wait for the reduction, which is then that of what it was made of.
        if name in FORMS and len(eqn.invars) == 1:
            return
        # A reduction is linear: of partial products that are added up it is done once, of the sum.
        if name in _SUMS and len(taken) == len(eqn.invars) and taken <= self.partial.keys():
            self.partial[eqn.outvars[0]] = [self.partial.pop(x) for x in taken][0]
            return
        for x in taken & self.partial.keys():
            yield self.partial.pop(x)

    def ended(self, values: Sequence[Any]) -> Iterator[Kernel]:
        """The kernel so far, which also writes these values.

        Those that are partial are reduced first.
        """
        for x in dict.fromkeys(self._root(x) for x in values if not isinstance(x, Constant)):
            if x in self.partial:
                yield self.partial.pop(x)
            if x in self._sources:
                self._written.add(x)
                self._read |= self._sources.pop(x)
        if self._written:
            # What the kernel writes itself it need not read.
            yield Kernel(
                "other", 0, self._num_bytes([*self._written, *(self._read - self._written)])
            )
        self._written, self._read = set(), set()

    def _root(self, x: Any) -> Any:
        return self._roots.get(x, x)

    def _of(self, x: Any) -> frozenset[Any]:
        if isinstance(x, Constant):
            return frozenset()
        return self._sources.get(self._root(x), frozenset({self._root(x)}))


class _Counter:
    """Kernels of programs whose values are sharded so."""

    def __init__(self, specs: Mapping[Any, P], mesh: AbstractMesh | None) -> None:
        self._specs, self._mesh = specs, mesh

    def kernels(self, jaxpr: Jaxpr) -> Iterator[Kernel]:
        """Kernels in order; what is written at the end are the program's results."""
        fusion = _Fusion(self._bytes)
        for is_attention, group in groupby(jaxpr.eqns, key=_in_attention):
            eqns = list(group)
            if is_attention:
                yield from fusion.ended([x for eqn in eqns for x in eqn.invars])
                yield from self._attention(eqns, jaxpr)
                continue
            for eqn in eqns:
                yield from fusion.reduced(eqn)
                if name_of(eqn) in _FUSED | REDUCTIONS:
                    fusion.add(eqn)
                    continue
                yield from fusion.ended(eqn.invars)
                for each in self._kernel(eqn):
                    # Only when something reads the product, see `reduced`.
                    if each.kind == "reduce":
                        fusion.partial[eqn.outvars[0]] = each
                    else:
                        yield each
        yield from fusion.partial.values()
        yield from fusion.ended(jaxpr.outvars)

    def _kernel(self, eqn: Any) -> Iterator[Kernel]:
        name, inner = eqn.primitive.name, programs_inside(eqn)
        if name.startswith((CUDNN_ATTENTION, CUDNN_ATTENTION_BACKWARD)):
            num_bytes = self._bytes([*eqn.invars, *eqn.outvars])
            made, flops = self._bytes(eqn.outvars), _product_flops(eqn)
            masked = flops if is_causal(eqn) else 0
            yield Kernel("attention", flops, num_bytes, result_bytes=made, masked_flops=masked)
        elif name == COND:
            # The branch that does most: which one runs is not known.
            branches = [list(self.kernels(program.jaxpr)) for program in inner]
            yield from max(
                branches, key=lambda kernels: sum(each.flops + each.num_bytes for each in kernels)
            )
        elif is_call(eqn) or name in (SCAN, WHILE, SHARD_MAP):
            # Rounds of a `while` are not known before it runs: it counts once.
            scan = scan_form(eqn)
            times = 1 if scan is None else scan.length
            for program in inner:
                for each in self.kernels(program.jaxpr):
                    yield each._replace(times=times * each.times)
        elif name == CONSTRAINT:
            yield from self._gathers(eqn)
        else:
            shares = _moved_bytes(eqn) / max(1, _whole_bytes([*eqn.invars, *eqn.outvars]))
            num_bytes = round(shares * self._bytes([*eqn.invars, *eqn.outvars]))
            if name not in PLAIN_PRODUCTS:
                yield Kernel("other", 0, num_bytes)
                return
            summed, axes = self._contracted(eqn)
            # A device makes its share of the outputs, and where the dim that is summed is sharded,
            # of each sum.
            outputs = math.prod(self._shape(eqn.outvars[0])) / max(
                1, math.prod(eqn.outvars[0].aval.shape)
            )
            is_narrow = all(x.aval.dtype.itemsize <= 2 for x in eqn.invars[:2])
            made = self._bytes(eqn.outvars)
            yield Kernel(
                "product",
                round(_product_flops(eqn) * outputs * summed),
                num_bytes,
                is_narrow,
                result_bytes=made,
            )
            for axis in axes:
                yield Kernel("reduce", 0, self._bytes(eqn.outvars), axis=axis)

    def _contracted(self, eqn: Any) -> tuple[float, list[str]]:
        """The share of a product's sums that a device makes, and the axes to reduce them over."""
        left = eqn.invars[0]
        if eqn.primitive.name != DOT or isinstance(left, Constant):
            return 1.0, []
        dims = dot_contracted(eqn)
        shape, spec = self._shape(left), self._specs.get(left, P())
        share = math.prod(shape[dim] / left.aval.shape[dim] for dim in dims)
        return share, [axis for dim in dims if dim < len(spec) for axis in spec_axes(spec[dim])]

    def _gathers(self, eqn: Any) -> Iterator[Kernel]:
        """The collective of a constraint that asks for whole what is divided."""
        before, after = (_axes(self._specs.get(x, P())) for x in (eqn.invars[0], eqn.outvars[0]))
        for axis in before - after:
            yield Kernel("gather", 0, self._bytes(eqn.outvars), axis=axis)

    def _attention(self, eqns: Sequence[Any], jaxpr: Jaxpr) -> Iterator[Kernel]:
        """Equations of the scope as one kernel: what goes in and comes out moves, scores do not."""
        made = {out for eqn in eqns for out in eqn.outvars}
        read = {
            x for eqn in eqns for x in eqn.invars if not isinstance(x, Constant) and x not in made
        }
        inside = set(map(id, eqns))
        used = {
            x
            for eqn in jaxpr.eqns
            if id(eqn) not in inside
            for x in eqn.invars
            if not isinstance(x, Constant)
        }.union(x for x in jaxpr.outvars if not isinstance(x, Constant))
        inner = [
            (each.flops * each.times, _blocks_for_each(eqn))
            for eqn in eqns
            for each in self._kernel_inside(eqn)
        ]
        flops, whole = sum(x for x, _ in inner), sum(x * blocks for x, blocks in inner)
        if not flops:
            return  # arrays laid out for the kernel
        # Divided as the operand that is divided most, by samples and heads. Small ones, such as
        # lengths, say nothing.
        heads = min(
            (self._share(x) for x in (*read, *made) if self._bytes([x]) >= _SMALL), default=1.0
        )
        num_bytes, given = self._bytes([*read, *(made & used)]), self._bytes([*(made & used)])
        flops, masked = round(flops * heads), round((whole - flops) * heads)
        yield Kernel("attention", flops, num_bytes, result_bytes=given, masked_flops=masked)

    def _kernel_inside(self, eqn: Any) -> list[Kernel]:
        return [] if name_of(eqn) in _FUSED | REDUCTIONS else list(_Counter({}, None)._kernel(eqn))

    def _share(self, x: Any) -> float:
        return math.prod(self._shape(x)) / max(1, math.prod(x.aval.shape))

    def _shape(self, x: Any) -> tuple[int, ...]:
        shape: tuple[int, ...] = x.aval.shape
        if self._mesh is None or isinstance(x, Constant):
            return shape
        return NamedSharding(self._mesh, self._specs.get(x, P())).shard_shape(shape)

    def _bytes(self, values: Sequence[Any]) -> int:
        return sum(
            math.prod(self._shape(x)) * _itemsize(x) for x in values if not isinstance(x, Constant)
        )


def _in_attention(eqn: Any) -> bool:
    return ATTENTION_SCOPE in scope_of(eqn)


def _blocks_for_each(eqn: Any) -> float:
    """Blocks of the whole square for each that attention goes through."""
    found = _BLOCKS.search(scope_of(eqn))
    return int(found[2]) / int(found[1]) if found else 1.0


def _axes(spec: P) -> set[str]:
    return {axis for names in spec for axis in spec_axes(names)}


def _itemsize(x: Any) -> int:
    return getattr(getattr(x.aval, "dtype", None), "itemsize", 0)


def _whole_bytes(values: Iterable[Any]) -> int:
    return sum(math.prod(x.aval.shape) * _itemsize(x) for x in values)


def _moved_bytes(eqn: Any) -> int:
    """Bytes of an equation's operands and results that move."""
    name = name_of(eqn)
    if name in LOOKUPS:
        return 2 * _whole_bytes(eqn.outvars)  # reads the rows that it gives, not the whole table
    if name == UPDATE:
        return 2 * _whole_bytes(eqn.invars[1:2])
    if name in SCATTERS:
        return _whole_bytes([*eqn.outvars, *eqn.invars[2:]])
    return _whole_bytes([*eqn.invars, *eqn.outvars])


def _product_flops(eqn: Any) -> int:
    """Operations of a product, convolution or fused attention.

    Two for each multiplication and addition.
    """
    name = eqn.primitive.name
    out = sum(math.prod(x.aval.shape) for x in eqn.outvars)
    if name == DOT:
        return 2 * out * math.prod(eqn.invars[0].aval.shape[dim] for dim in dot_contracted(eqn))
    if name == CONVOLUTION:
        # Each output is a product with the kernel of one output channel.
        kernel = eqn.invars[1].aval
        return 2 * out * kernel.size // max(1, kernel.shape[kernel_out_dim(eqn)])
    if name.startswith((CUDNN_ATTENTION, CUDNN_ATTENTION_BACKWARD)):
        # Two products forward, five backward; a causal mask leaves half of each.
        q, k = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
        half = 0.5 if is_causal(eqn) else 1.0
        products = 2 if name.startswith(CUDNN_ATTENTION) else 5
        return round(half * products * 2 * math.prod(q) * k[1])
    if name == RAGGED_DOT:
        return 2 * out * eqn.invars[0].aval.shape[-1]
    return 0
