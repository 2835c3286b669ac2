"""Counts the kernels of a traced program after XLA's fusion, with FLOPs and bytes per device."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe._util.typing import PyTree

from ._equation import (
    ClosedJaxpr,
    Jaxpr,
    axis_of,
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

ATTENTION_SCOPE = "jaxpipe_attention_kernel"
"""Named scope of attention in plain JAX that is counted as one kernel.

Modules of users have other names.
"""

_BLOCKS = re.compile(r"\b(\d+)_of_(\d+)_blocks\b")


def blocks_scope(num_seen: int, num_blocks: int) -> str:
    """Return the name of an inner scope: how many of the blocks of attention a mask leaves."""
    return f"{num_seen}_of_{num_blocks}_blocks"


_FUSED = (
    ARITHMETIC | COMPARISONS | FORMS | RANDOM_KEYS | {SUM_OF_COTANGENTS, NAMED, DRAWN, ROUNDING}
)
"""Equations that XLA fuses with the kernel that reads or writes their values."""

_SUMS = ("add", SUM_OF_COTANGENTS)


_EXPLICIT: Mapping[str, Literal["exchange", "shift"]] = {
    "all_to_all": "exchange",
    "ppermute": "shift",
}
"""The kinds of collectives that programs name themselves."""

_SMALL = 2**16
"""Operands of attention below this many bytes do not show how its work is divided."""


class Kernel(NamedTuple):
    """One kernel, or a collective.

    Attributes:
        kind: `product` is a matrix product or convolution, `attention` attention as a whole,
            `other` any other kernel that moves bytes, and `reduce`, `gather`, `exchange` (among
            all) and `shift` (to the next device) are collectives over `axis`.
        num_bytes: Bytes that the kernel reads and writes, or that a collective leaves on a device.
        is_narrow: Whether a product's operands have at most 16 bits.
        times: How often the kernel runs.
        result_bytes: Bytes of the results of a product or of attention.
        masked_flops: FLOPs that attention would have in addition without its mask.
    """

    kind: Literal["product", "attention", "other", "reduce", "gather", "exchange", "shift"]
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
    """Count the kernels that a function's outputs need; `specs` shard the arguments' leaves."""
    closed = live_program(function, *args)
    # Following shardings traces the whole program again, so it is skipped if nothing is sharded.
    found: Mapping[Any, P] = {}
    if mesh is not None and any(spec != P() for spec in specs):
        found = followed_specs(unsharded(closed), specs, mesh, manual, ATTENTION_SCOPE)
    return list(_Counter(found, mesh).kernels(closed.jaxpr))


def program_kernels(program: ClosedJaxpr) -> list[Kernel]:
    """Count all kernels of a traced program on one device."""
    return list(_Counter({}, None).kernels(program.jaxpr))


def num_flops(kernels: Iterable[Kernel]) -> int:
    """Sum the FLOPs of all products."""
    return sum(each.times * each.flops for each in kernels)


def live_program(function: Callable[..., Any], *args: PyTree) -> ClosedJaxpr:
    """Trace a function without its calls and without equations that no output needs."""
    program = flatten(jax.make_jaxpr(function)(*args))
    part = needed_for(program, program.outputs)

    # Traced again from the needed equations only, which also removes unneeded equations from loops
    # and branches.
    def run(*inputs: jax.Array) -> list[Any]:
        values, _ = evaluate(program, dict(zip(program.inputs, inputs, strict=True)), part, {}, [])
        return [x.val if isinstance(x, Constant) else values[x] for x in program.outputs]

    shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in program.inputs]
    return jax.make_jaxpr(run)(*shapes)


def result_specs(
    function: Callable[..., Any],
    args: Sequence[PyTree],
    specs: Sequence[P],
    mesh: AbstractMesh,
    manual: Sequence[str],
) -> list[P]:
    """Return the shardings of a function's results; the arguments are those of `count_kernels`."""
    closed = live_program(function, *args)
    found = followed_specs(unsharded(closed), specs, mesh, manual, ATTENTION_SCOPE)
    return [P() if isinstance(x, Constant) else found[x] for x in closed.jaxpr.outvars]


class _Fusion:
    """Arithmetic and reductions between two products, which form one kernel."""

    def __init__(self, num_bytes: Callable[[Sequence[Any]], int]) -> None:
        self._num_bytes = num_bytes
        # Products that must still be reduced over an axis. A sum of several is reduced once.
        self.partial: dict[Any, Kernel] = {}
        self._sources: dict[Any, frozenset[Any]] = {}
        """The values from which arithmetic computes results that are not written yet."""
        self._roots: dict[Any, Any] = {}
        """For values that are another value in a different form, the value read and written."""
        self._written: set[Any] = set()
        self._read: set[Any] = set()

    def add(self, eqn: Any) -> None:
        """Add an equation of arithmetic, a change of form or a reduction."""
        if eqn.primitive.name in REDUCTIONS:
            # A reduction writes its result to memory, because later equations need its last
            # element.
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
        """Yield the reductions over axes that must run before an equation."""
        name = eqn.primitive.name
        taken = {self._root(x) for x in eqn.invars if not isinstance(x, Constant)}
        # A change of form does not need the reduction, which then applies to the original value.
        if name in FORMS and len(eqn.invars) == 1:
            return
        # A reduction is linear, so partial products that are added up are reduced once, as a sum.
        if name in _SUMS and len(taken) == len(eqn.invars) and taken <= self.partial.keys():
            self.partial[eqn.outvars[0]] = [self.partial.pop(x) for x in taken][0]
            return
        for x in taken & self.partial.keys():
            yield self.partial.pop(x)

    def ended(self, values: Sequence[Any]) -> Iterator[Kernel]:
        """Yield the kernel so far, which also writes these values; reductions come first."""
        for x in dict.fromkeys(self._root(x) for x in values if not isinstance(x, Constant)):
            if x in self.partial:
                yield self.partial.pop(x)
            if x in self._sources:
                self._written.add(x)
                self._read |= self._sources.pop(x)
        if self._written:
            # The kernel does not read values that it writes itself.
            yield Kernel(
                "other", 0, self._num_bytes([*self._written, *(self._read - self._written)])
            )
        self._written = set()
        self._read = set()

    def _root(self, x: Any) -> Any:
        return self._roots.get(x, x)

    def _of(self, x: Any) -> frozenset[Any]:
        if isinstance(x, Constant):
            return frozenset()
        return self._sources.get(self._root(x), frozenset({self._root(x)}))


class _Counter:
    """Counts the kernels of programs with given shardings."""

    def __init__(self, specs: Mapping[Any, P], mesh: AbstractMesh | None) -> None:
        self._specs = specs
        self._mesh = mesh

    def kernels(self, jaxpr: Jaxpr) -> Iterator[Kernel]:
        """Yield kernels in order. The last one writes the program's results."""
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
                # Arithmetic is fused with the kernel that reads its results, except that the
                # operands of a product are first written by a separate kernel.
                yield from fusion.ended(eqn.invars)
                for each in self._kernel(eqn):
                    # The reduction only runs when something reads the product, see `reduced`.
                    if each.kind == "reduce":
                        fusion.partial[eqn.outvars[0]] = each
                    else:
                        yield each
        yield from fusion.ended(jaxpr.outvars)
        yield from fusion.partial.values()

    def _kernel(self, eqn: Any) -> Iterator[Kernel]:
        name = eqn.primitive.name
        inner = programs_inside(eqn)
        if name.startswith((CUDNN_ATTENTION, CUDNN_ATTENTION_BACKWARD)):
            num_bytes = self._bytes([*eqn.invars, *eqn.outvars])
            made = self._bytes(eqn.outvars)
            flops = _product_flops(eqn)
            masked = flops if is_causal(eqn) else 0
            yield Kernel("attention", flops, num_bytes, result_bytes=made, masked_flops=masked)
        elif name == COND:
            # Counts the most expensive branch, because it is not known which one runs.
            branches = [list(self.kernels(program.jaxpr)) for program in inner]
            yield from max(
                branches, key=lambda kernels: sum(each.flops + each.num_bytes for each in kernels)
            )
        elif is_call(eqn) or name in (SCAN, WHILE, SHARD_MAP):
            # The number of rounds of a `while` is not known before it runs, so it counts once.
            scan = scan_form(eqn)
            times = 1 if scan is None else scan.length
            for program in inner:
                for each in self.kernels(program.jaxpr):
                    yield each._replace(times=times * each.times)
        elif name in (CONSTRAINT, *_EXPLICIT):
            yield from self._collectives(eqn)
        else:
            shares = _moved_bytes(eqn) / max(1, _whole_bytes([*eqn.invars, *eqn.outvars]))
            num_bytes = round(shares * self._bytes([*eqn.invars, *eqn.outvars]))
            if name not in PLAIN_PRODUCTS:
                yield Kernel("other", 0, num_bytes)
                return
            summed, axes = self._contracted(eqn)
            # A device computes its share of the outputs, and its share of each sum if the
            # contracted dim is sharded.
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
            # A product over a sharded dim is followed by a reduction.
            for axis in axes:
                yield Kernel("reduce", 0, self._bytes(eqn.outvars), axis=axis)

    def _contracted(self, eqn: Any) -> tuple[float, list[str]]:
        """Return a device's share of a product's sums, and the axes to reduce them over."""
        left = eqn.invars[0]
        if eqn.primitive.name != DOT or isinstance(left, Constant):
            return 1.0, []
        dims = dot_contracted(eqn)
        shape = self._shape(left)
        spec = self._specs.get(left, P())
        share = math.prod(shape[dim] / left.aval.shape[dim] for dim in dims)
        return share, [axis for dim in dims if dim < len(spec) for axis in spec_axes(spec[dim])]

    def _collectives(self, eqn: Any) -> Iterator[Kernel]:
        """Yield the collectives that an equation names or, as a constraint, causes."""
        if eqn.primitive.name in _EXPLICIT:
            kind = _EXPLICIT[eqn.primitive.name]
            for x in eqn.outvars:
                yield Kernel(kind, 0, self._bytes([x]), axis=axis_of(eqn))
            return
        before, after = (_dims(self._specs.get(x, P())) for x in (eqn.invars[0], eqn.outvars[0]))
        # A constraint makes a divided value whole along a dim, or divides it along another dim.
        for axis, dim in before.items():
            if axis not in after:
                yield Kernel("gather", 0, self._bytes(eqn.outvars), axis=axis)
            elif after[axis] != dim:
                yield Kernel("exchange", 0, self._bytes(eqn.outvars), axis=axis)

    def _attention(self, eqns: Sequence[Any], jaxpr: Jaxpr) -> Iterator[Kernel]:
        """Count the scope's equations as one kernel, which moves its inputs and outputs only."""
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
        flops = sum(x for x, _ in inner)
        whole = sum(x * blocks for x, blocks in inner)
        if not flops:
            return  # the equations only prepare arrays for the kernel
        # The work is divided by samples and heads like the operand that is divided most. Small
        # operands, such as lengths, are ignored.
        heads = min(
            (self._share(x) for x in (*read, *made) if self._bytes([x]) >= _SMALL), default=1.0
        )
        num_bytes = self._bytes([*read, *(made & used)])
        given = self._bytes([*(made & used)])
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
    """Return the ratio of all blocks of the square to those that attention computes."""
    found = _BLOCKS.search(scope_of(eqn))
    return int(found[2]) / int(found[1]) if found else 1.0


def _dims(spec: P) -> dict[str, int]:
    """Return the dim that each axis divides."""
    return {axis: dim for dim, names in enumerate(spec) for axis in spec_axes(names)}


def _itemsize(x: Any) -> int:
    return getattr(getattr(x.aval, "dtype", None), "itemsize", 0)


def _whole_bytes(values: Iterable[Any]) -> int:
    return sum(math.prod(x.aval.shape) * _itemsize(x) for x in values)


def _moved_bytes(eqn: Any) -> int:
    """Return the bytes of an equation's operands and results that move."""
    name = name_of(eqn)
    if name in LOOKUPS:
        return 2 * _whole_bytes(eqn.outvars)  # reads only the rows that it returns, not the table
    if name == UPDATE:
        return 2 * _whole_bytes(eqn.invars[1:2])
    if name in SCATTERS:
        return _whole_bytes([*eqn.outvars, *eqn.invars[2:]])
    return _whole_bytes([*eqn.invars, *eqn.outvars])


def _product_flops(eqn: Any) -> int:
    """Return the FLOPs of a product, convolution or fused attention."""
    name = eqn.primitive.name
    out = sum(math.prod(x.aval.shape) for x in eqn.outvars)
    # A multiplication with its addition counts as two.
    if name == DOT:
        return 2 * out * math.prod(eqn.invars[0].aval.shape[dim] for dim in dot_contracted(eqn))
    if name == CONVOLUTION:
        # Each output element is a product with the kernel of one output channel.
        kernel = eqn.invars[1].aval
        return 2 * out * kernel.size // max(1, kernel.shape[kernel_out_dim(eqn)])
    if name.startswith((CUDNN_ATTENTION, CUDNN_ATTENTION_BACKWARD)):
        # Two products forward, five backward. A causal mask halves each of them.
        q = eqn.invars[0].aval.shape
        k = eqn.invars[1].aval.shape
        half = 0.5 if is_causal(eqn) else 1.0
        products = 2 if name.startswith(CUDNN_ATTENTION) else 5
        return round(half * products * 2 * math.prod(q) * k[1])
    if name == RAGGED_DOT:
        return 2 * out * eqn.invars[0].aval.shape[-1]
    return 0
