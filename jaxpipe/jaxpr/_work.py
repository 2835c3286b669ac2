"""Operations and bytes of a traced program."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

from jaxpipe._typing import PyTree

from ._equation import (
    ClosedJaxpr,
    Jaxpr,
    Literal,
    dot_contracted,
    is_causal,
    kernel_out_dim,
    name_of,
    programs_inside,
    scan_form,
)
from ._primitives import (
    ARITHMETIC,
    COMBINING,
    COMPARISONS,
    COND,
    CONVOLUTION,
    CUDNN_ATTENTION,
    CUDNN_ATTENTION_BACKWARD,
    DOT,
    DRAWN,
    FORMS,
    LOOKUPS,
    RAGGED_DOT,
    RANDOM_KEYS,
    SCATTERS,
    SHARD_MAP,
    UPDATE,
)
from ._program import flatten
from ._slice import evaluate, needed_for

_FREE = FORMS | COMPARISONS | RANDOM_KEYS | {DRAWN, SHARD_MAP}
"""Computed inside of what reads it, for next to nothing."""

_FUSED = ARITHMETIC | _FREE


class Work(NamedTuple):
    """Operations and bytes of a program.

    Attributes:
        flops: Operations; two for each multiplication and addition of a product.
        moved_bytes: Bytes that products, reductions, look-ups and the like read and write. Element-wise arithmetic is
            taken to be part of what reads its results.
    """

    flops: int
    moved_bytes: int


def count_work(function: Callable[..., Any], *args: PyTree) -> Work:
    """Count what the outputs of a function of arguments of these shapes need.

    A `while` loop counts as one turn, a branch as the one with the most operations; what a callback or a kernel of
    unknown content computes is not known.
    """
    return program_work(live_program(function, *args).jaxpr)


def live_program(function: Callable[..., Any], *args: PyTree) -> ClosedJaxpr:
    """The program of a function of arguments of these shapes, without calls and without what no output needs."""
    program = flatten(jax.make_jaxpr(function)(*args))
    part = needed_for(program, program.outputs)

    # Traced again from the needed equations alone, which also drops from loops and branches what no output needs.
    def run(*inputs: jax.Array) -> list[Any]:
        values, _ = evaluate(program, dict(zip(program.inputs, inputs, strict=True)), part, {}, [])
        return [values[x] for x in program.outputs if not isinstance(x, Literal)]

    shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in program.inputs]
    return jax.make_jaxpr(run)(*shapes)


def program_work(jaxpr: Jaxpr) -> Work:
    """Count what all equations of a program do, and the writing of its results."""
    # What is part of its readers' fusion is written to memory only where nothing here reads it: as a result.
    fused = {var for eqn in jaxpr.eqns if name_of(eqn) in _FUSED for var in eqn.outvars}
    results = [x for x in jaxpr.outvars if not isinstance(x, Literal)]
    return _total([_work_of(jaxpr), Work(0, _num_bytes(x for x in results if x in fused))])


def _work_of(jaxpr: Jaxpr) -> Work:
    return _total(equation_work(eqn) for eqn in jaxpr.eqns)


def _total(works: Iterable[Work], times: int = 1) -> Work:
    each = list(works)
    return Work(times * sum(work.flops for work in each), times * sum(work.moved_bytes for work in each))


def equation_work(eqn: Any) -> Work:
    """Operations and bytes of one equation, and of the programs inside it."""
    name, out = name_of(eqn), _size(eqn.outvars)
    inner = [_work_of(program.jaxpr) for program in programs_inside(eqn)]
    if name == COND:
        return max(inner)  # by operations first, as `Work` compares
    if inner and name not in COMBINING:
        scan = scan_form(eqn)
        return _total(inner, 1 if scan is None else scan.length)
    if name in ARITHMETIC:
        return Work(out, 0)
    if name in _FREE:
        return Work(0, 0)
    if name in LOOKUPS:
        return Work(0, 2 * _num_bytes(eqn.outvars))  # reads the rows that it gives, not the whole table
    if name == UPDATE:
        return Work(0, 2 * _num_bytes(eqn.invars[1:2]))
    if name in SCATTERS:
        return Work(_size(eqn.invars[2:]), _num_bytes([*eqn.outvars, *eqn.invars[2:]]))
    moved = _num_bytes([*eqn.invars, *eqn.outvars])
    return Work(_product(eqn) or max(_size(eqn.invars), out), moved)


def _product(eqn: Any) -> int:
    """Operations of a product or convolution; 0 for other equations."""
    name, out = eqn.primitive.name, _size(eqn.outvars)
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


def _size(atoms: Iterable[Any]) -> int:
    return sum(math.prod(x.aval.shape) for x in atoms)


def _num_bytes(atoms: Iterable[Any]) -> int:
    return sum(math.prod(x.aval.shape) * x.aval.dtype.itemsize for x in atoms if hasattr(x.aval, "dtype"))
