"""Accessors for the fields of traced programs that JAX does not promise to keep.

`jax.extend` and the parameters of equations "offer no compatibility guarantee". Only this file
reads them, through functions that document what they return, so that a new release of JAX only
needs changes in this file and in `_primitives.py`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr as ClosedJaxpr
from jax.extend.core import Jaxpr as Jaxpr
from jax.extend.core import Literal as Literal
from jax.extend.core import jaxpr_as_fun
from jax.extend.core.primitives import copy_p
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import PartitionSpec as P

from jaxpipe._util.mesh import NO_MESH

from ._primitives import (
    BARRIER,
    CALLS,
    COND,
    CONSTRAINT,
    CUSTOM_RULES,
    KERNELS,
    NAMED,
    REGIONS,
    SCAN,
    TRANSPOSE,
    is_known,
)

_AXIS_EFFECT = "NamedAxisEffect"
"""Type of the effect that names the mesh axis of a collective or an `axis_index`."""


class ScanForm(NamedTuple):
    """An equation of `jax.lax.scan`, whose `settings` are the keywords that determine how it runs.

    Its operands are `[*constants, *carry, *sliced]`, its results `[*carry, *stacked]`.
    """

    body: ClosedJaxpr
    num_consts: int
    num_carry: int
    length: int
    settings: dict[str, Any]


def name_of(eqn: Any) -> str:
    """Return the name of an equation's primitive, as the sets of `primitives` list it."""
    name = eqn.primitive.name
    # An element-wise primitive in no set, such as one of a new JAX release, counts as other
    # arithmetic.
    return "mul" if not is_known(name) and _is_elementwise(eqn) else name


def unknown_primitives(jaxpr: Jaxpr) -> set[str]:
    """Return the names of a program's primitives that this library does not know."""
    return {name for eqn in all_equations(jaxpr.eqns) if not is_known(name := name_of(eqn))}


def _is_elementwise(eqn: Any) -> bool:
    """True if operands and result have the same shape, and the primitive accepts scalars too."""
    atoms = [*eqn.invars, *eqn.outvars]
    shapes = {getattr(x.aval, "shape", None) for x in atoms}
    if (
        eqn.primitive.multiple_results
        or len(shapes) != 1
        or None in shapes
        or eqn.effects
        or programs_inside(eqn)
    ):
        return False
    scalars = [jax.ShapeDtypeStruct((), x.aval.dtype) for x in eqn.invars]
    try:
        # Primitives that sum, sort or factorise along a dim have no dim here, and raise.
        result = jax.eval_shape(lambda *values: bind_here(eqn, values)[0], *scalars)
    except Exception:  # noqa: BLE001  # the primitive's own rules may raise anything
        return False
    return result.shape == ()


def scan_form(eqn: Any) -> ScanForm | None:
    """Return the form of a `jax.lax.scan` equation; None for other equations."""
    if eqn.primitive.name != SCAN:
        return None
    body = eqn.params["jaxpr"]
    # Derived from dims, because JAX's parameters for this change: sliced and stacked values have
    # one more dim outside than inside.
    num_whole = sum(
        x.aval.ndim == aval.ndim for x, aval in zip(eqn.invars, body.in_avals, strict=True)
    )
    num_carry = sum(
        x.aval.ndim == aval.ndim for x, aval in zip(eqn.outvars, body.out_avals, strict=True)
    )
    settings = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    return ScanForm(body, num_whole - num_carry, num_carry, settings["length"], settings)


def branches_of(eqn: Any) -> tuple[ClosedJaxpr, ...]:
    """Return the programs of a `cond` or `switch`, which take the operands after the index."""
    return tuple(eqn.params["branches"]) if eqn.primitive.name == COND else ()


def is_barrier(eqn: Any) -> bool:
    """True if an equation returns each of its operands unchanged, as an optimisation barrier."""
    return eqn.primitive.name == BARRIER


def is_call(eqn: Any) -> bool:
    """True if an equation only runs its program, with or without a special derivative."""
    return eqn.primitive.name in CALLS | REGIONS | CUSTOM_RULES


def programs_inside(eqn: Any) -> list[ClosedJaxpr]:
    """Return the programs that an equation calls, repeats or chooses from, in parameter order."""
    # Programs of kernels of unknown content do not work on arrays.
    if eqn.primitive.name in KERNELS:
        return []
    # Found by type, not by name: each primitive uses another name for the parameter with its
    # program.
    return [program for value in eqn.params.values() for program in _programs(value)]


def all_equations(
    eqns: Iterable[Any], follow: Callable[[Any], bool] = lambda eqn: True
) -> Iterator[Any]:
    """Yield equations, each followed by those inside it if `follow` is true of it."""
    for eqn in eqns:
        yield eqn
        if follow(eqn):
            for program in programs_inside(eqn):
                yield from all_equations(program.jaxpr.eqns, follow)


def called_program(eqn: Any) -> ClosedJaxpr | None:
    """Return the program of a call, with the equation's inputs and outputs; None for others."""
    return programs_inside(eqn)[0] if is_call(eqn) else None


def region_policy(eqn: Any) -> Any:
    """Return the policy of a call of `jax.checkpoint`."""
    return eqn.params["policy"]


def recomputes_behind_barrier(eqn: Any) -> tuple[bool, ...]:
    """Return for each operand of a differentiated `jax.checkpoint` whether it has a barrier."""
    mark = eqn.params.get("prevent_cse", False)
    # JAX stores one mark for all operands, or one for each.
    marks = mark if isinstance(mark, tuple) else (mark,) * len(eqn.invars)
    return marks if eqn.params.get("differentiated") and any(marks) else ()


def kept_bits(eqn: Any) -> tuple[int, int]:
    """Return the bits of exponent and mantissa that a `reduce_precision` rounds to."""
    return eqn.params["exponent_bits"], eqn.params["mantissa_bits"]


def target_memories(eqn: Any) -> list[Any]:
    """Return the targets of a `device_put`: devices, shardings or memory spaces."""
    return list(eqn.params.get("devices", ()))


def constraint_spec(eqn: Any) -> P | None:
    """Return the spec of a sharding constraint; None for other equations."""
    return eqn.params["sharding"].spec if eqn.primitive.name == CONSTRAINT else None


def mapped_out_specs(eqn: Any) -> Sequence[P]:
    """Return the specs of a `shard_map`'s results."""
    return eqn.params["out_specs"]


def axis_of(eqn: Any) -> str:
    """Return the mesh axis of a collective; of several the first."""
    names = eqn.params["axis_name"]
    return str(names if isinstance(names, str) else names[0])


def dot_contracted(eqn: Any) -> Sequence[int]:
    """Return the contracted dims of a product's first operand."""
    return eqn.params["dimension_numbers"][0][0]


def kernel_out_dim(eqn: Any) -> int:
    """Return the dim of output channels in a convolution's kernel."""
    return eqn.params["dimension_numbers"].rhs_spec[0]


def permutation_of(eqn: Any) -> tuple[int, ...] | None:
    """Return the permutation of a transpose; None for other equations."""
    return tuple(eqn.params["permutation"]) if eqn.primitive.name == TRANSPOSE else None


def is_causal(eqn: Any) -> bool:
    """True if an attention kernel of cuDNN has a causal mask."""
    return "CAUSAL" in str(eqn.params.get("mask_type"))


def is_named(primitive: Any, params: Any, names: Iterable[str]) -> bool:
    """True if a policy is asked about a value that `checkpoint_name` gave one of these names."""
    return primitive.name == NAMED and params["name"] in names


def constraint_is_whole(primitive: Any, params: Any) -> bool:
    """True if a policy is asked about a constraint that makes its value whole."""
    spec = getattr(params["sharding"], "spec", None) if primitive.name == CONSTRAINT else None
    return spec is not None and all(names in (None, ()) for names in spec)


def scope_of(eqn: Any) -> str:
    """Return the named scopes in which an equation was traced."""
    return str(eqn.source_info.name_stack)


def effect_axes(traced: Any) -> set[str]:
    """Return the mesh axes named by the collectives of a program or an equation."""
    return {effect.name for effect in traced.effects if type(effect).__name__ == _AXIS_EFFECT}


def has_side_effects(eqn: Any) -> bool:
    """True if an equation has side effects, such as a callback that prints."""
    return any(type(effect).__name__ != _AXIS_EFFECT for effect in eqn.effects)


def bind(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Evaluate an equation in the scope and context in which it was traced."""
    # The context is the mesh and the setting of `compute_on`.
    with jax.named_scope(scope_of(eqn)), eqn.ctx.manager:
        return bind_here(eqn, values)


def bind_here(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Evaluate an equation in the current context."""
    out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def refuses_sharding(error: Exception) -> bool:
    """True if JAX's rules for explicit axes do not support an equation with these shardings."""
    # The first two are compared by name, because JAX does not export them. A ValueError means that
    # a value of the program is on the mesh of automatic axes. Other exceptions, for example for a
    # renamed parameter, do not count.
    names = {"ShardingTypeError", "ReshapeExplicitError"}
    return type(error).__name__ in names or isinstance(error, (NotImplementedError, ValueError))


def on_no_mesh() -> Any:
    """Return the context of equations that were traced without a mesh."""
    with jax.sharding.use_abstract_mesh(NO_MESH):
        return jax.make_jaxpr(jax.numpy.negative)(1.0).eqns[0].ctx


def replaced(eqn: Any, *, context: Any, operands: Sequence[Any]) -> Any:
    """Replace an equation's context and operands; a sharding constraint becomes a copy."""
    eqn = eqn.replace(ctx=context, invars=list(operands))
    return eqn.replace(primitive=copy_p, params={}) if eqn.primitive.name == CONSTRAINT else eqn


def unsharded(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Remove shardings from a program's equations, except sharding constraints."""
    # Derivatives contain the shardings of the mesh on which they were traced.
    names = ("sharding", "out_sharding")

    def one(eqn: Any) -> Any:
        is_asked = eqn.primitive.name == CONSTRAINT
        return eqn.replace(
            params={k: None if k in names and not is_asked else x for k, x in eqn.params.items()}
        )

    return ClosedJaxpr(
        closed.jaxpr.replace(eqns=[one(eqn) for eqn in closed.jaxpr.eqns]), closed.consts
    )


def with_consts(closed: ClosedJaxpr, consts: Sequence[Any]) -> Any:
    """Convert a traced program to a function, with other values for its constants."""
    return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, list(consts)))


def used_operands(jaxpr: Jaxpr) -> list[bool]:
    """Return whether the outputs need each input, following calls, loops and branches."""
    return list(dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1])


def _programs(value: Any) -> list[ClosedJaxpr]:
    if isinstance(value, ClosedJaxpr):
        return [value]
    if isinstance(value, Jaxpr):
        return [ClosedJaxpr(value, ())]
    if isinstance(value, (tuple, list)):  # branches of a cond; the solvers of a linear solve
        return [program for item in value for program in _programs(item)]
    return []
