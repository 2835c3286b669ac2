"""The floating-point arithmetic of traced programs."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ._equation import ClosedJaxpr, Jaxpr, Literal, called_program, programs_inside, scan_form

_Counts = Counter[np.dtype[Any]]


class Arithmetic(NamedTuple):
    """What determines rounding in a program."""

    # The narrowest floating-point dtype of the outputs and of roundings that reach them; float64 if
    # there are none.
    dtype: np.dtype[Any]
    # The largest number of roundings in a row inside a layer, at least 1.
    operations: float

    @property
    def unit(self) -> float:
        """The unit roundoff of the dtype."""
        return float(jnp.finfo(self.dtype).eps) / 2


def arithmetic_of(programs: Sequence[ClosedJaxpr]) -> Arithmetic:
    """Read dtype and roundings from the traced programs of the layers and the loss."""
    counts = [_roundings_of(program.jaxpr, _results(program.jaxpr))[0] for program in programs]
    dtypes = {dtype for count in counts for dtype in count}
    outputs = [x for program in programs for x in program.jaxpr.outvars]
    dtypes |= {np.dtype(_aval(x).dtype) for x in outputs if _is_float(x) and _aval(x).ndim}
    narrowest = max(dtypes, key=_eps, default=np.dtype(np.float64))
    unit = _eps(narrowest)
    # A rounding in a wider dtype counts less, by the square of its unit, because random roundings
    # add up as squares.
    operations = [
        sum(number * (_eps(dtype) / unit) ** 2 for dtype, number in count.items())
        for count in counts
    ]
    return Arithmetic(narrowest, max([1.0, *operations]))


def _results(jaxpr: Jaxpr) -> list[bool]:
    """Return for each output whether it is an array, or all True if none is."""
    are_arrays = [len(getattr(x.aval, "shape", ())) > 0 for x in jaxpr.outvars]
    # Scalars beside arrays are the losses and metrics that a layer reports. They are rounded to
    # float32 whatever the layer computes in.
    return are_arrays if any(are_arrays) else [True] * len(are_arrays)


def _eps(dtype: Any) -> float:
    return float(jnp.finfo(dtype).eps)


def _roundings_of(jaxpr: Jaxpr, is_used: Sequence[bool]) -> tuple[_Counts, list[bool]]:
    """Count the roundings that reach the used outputs, by dtype; and which inputs are used."""
    counts: _Counts = Counter()
    used = {x for x, flag in zip(jaxpr.outvars, is_used, strict=True) if flag and _is_float(x)}
    for eqn in reversed(jaxpr.eqns):
        outputs = [x in used for x in eqn.outvars]
        if not any(outputs):
            continue
        inner, operands = _of_programs(eqn, outputs)
        counts.update(inner)
        # A rounding does not reach an output through integers and booleans, such as indices.
        floats = [x for x, flag in zip(eqn.invars, operands, strict=True) if flag and _is_float(x)]
        used.update(x for x in floats if not isinstance(x, Literal))
        dtypes: list[np.dtype[Any]] = [
            np.dtype(_aval(x).dtype) for x in (*floats, *eqn.outvars) if _is_float(x)
        ]
        counts.update(dict.fromkeys(dtypes, 0))
        counts.update(_roundings(eqn, dtypes[-1]))
    return counts, [x in used for x in jaxpr.invars]


def _of_programs(eqn: Any, is_used: list[bool]) -> tuple[_Counts, list[bool]]:
    """Count in the programs inside an equation; also whether each of its operands is used."""
    counts: _Counts = Counter()
    program = called_program(eqn)
    scan = scan_form(eqn)
    if program is not None:
        return _roundings_of(program.jaxpr, is_used)
    # The roundings of a scan's body count in each of its steps.
    for inner in programs_inside(eqn):
        found, _ = _roundings_of(inner.jaxpr, [True] * len(inner.jaxpr.outvars))
        for dtype, number in found.items():
            counts[dtype] += number * (1 if scan is None else scan.length)
    return counts, [True] * len(eqn.invars)


def _aval(x: Any) -> Any:
    return x.aval


def _is_float(x: Any) -> bool:
    dtype = getattr(x.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def _roundings(eqn: Any, dtype: np.dtype[Any]) -> dict[np.dtype[Any], int]:
    """Roundings between an input of an equation and its output."""
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        terms = math.prod(shape[dim] for dim in contracted)
        # XLA adds up products of bfloat16 in float32, and rounds the sum.
        is_short = dtype == jnp.bfloat16
        return {np.dtype(np.float32): terms, dtype: 1} if is_short else {dtype: terms}
    if eqn.primitive.name == "conv_general_dilated":
        layout = eqn.params["dimension_numbers"].rhs_spec
        kernel = eqn.invars[1].aval
        return {dtype: kernel.size // kernel.shape[layout[0]]}
    if eqn.primitive.name.startswith("reduce_"):
        return {dtype: max(eqn.invars[0].aval.size // max(eqn.outvars[0].aval.size, 1), 1)}
    return {dtype: 1}
