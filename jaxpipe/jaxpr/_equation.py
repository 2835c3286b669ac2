"""What this library reads of a traced program beside its variables.

Every field that JAX does not promise to keep.

`jax.extend` and the parameters of equations "offer no compatibility guarantee". They are read here
and nowhere else, by functions that say what they give, so that a release of JAX is followed in this
file and in `_primitives.py`.
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
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

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
"""Type of an effect that only says which mesh axis an equation needs.

Collectives and `axis_index` have it.
"""


class ScanForm(NamedTuple):
    """An equation of `jax.lax.scan`.

    Its operands are `[*constants, *carry, *sliced]`, its results `[*carry, *stacked]`.

    Attributes:
        body: The program of a step.
        num_consts: Operands that are the same in every step.
        num_carry: Operands that are handed from step to step.
        length: Number of steps.
        settings: The keywords of `jax.lax.scan` that say how it runs.
    """

    body: ClosedJaxpr
    num_consts: int
    num_carry: int
    length: int
    settings: dict[str, Any]


def name_of(eqn: Any) -> str:
    """The name by which the sets of `primitives` know an equation.

    That of its primitive. A primitive that none of them knows, as a new release of JAX may bring,
    and that works element by element counts as `mul` does, which is in the same sets as the rest of
    the arithmetic.
    """
    name = eqn.primitive.name
    return "mul" if not is_known(name) and _is_elementwise(eqn) else name


def unknown_primitives(jaxpr: Jaxpr) -> set[str]:
    """Names of a program's primitives of which this library does not know what they do."""
    return {name for eqn in all_equations(jaxpr.eqns) if not is_known(name := name_of(eqn))}


def _is_elementwise(eqn: Any) -> bool:
    """True if operands and result have one shape, and the primitive takes scalars as well."""
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
        # What sums, sorts or factorises along a dim has none here, and raises.
        result = jax.eval_shape(lambda *values: bind_here(eqn, values)[0], *scalars)
    except Exception:  # noqa: BLE001  # whatever the primitive's own rules raise
        return False
    return result.shape == ()


def scan_form(eqn: Any) -> ScanForm | None:
    """What an equation of `jax.lax.scan` says; None for other equations."""
    if eqn.primitive.name != SCAN:
        return None
    body = eqn.params["jaxpr"]
    # By dims, as JAX's parameters for it change: what is sliced or stacked has one more than it has
    # inside.
    num_whole = sum(
        x.aval.ndim == aval.ndim for x, aval in zip(eqn.invars, body.in_avals, strict=True)
    )
    num_carry = sum(
        x.aval.ndim == aval.ndim for x, aval in zip(eqn.outvars, body.out_avals, strict=True)
    )
    settings = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    return ScanForm(body, num_whole - num_carry, num_carry, settings["length"], settings)


def branches_of(eqn: Any) -> tuple[ClosedJaxpr, ...]:
    """The programs that a `cond` or `switch` chooses from, whose inputs follow its index.

    Empty for other equations.
    """
    return tuple(eqn.params["branches"]) if eqn.primitive.name == COND else ()


def is_barrier(eqn: Any) -> bool:
    """True if an equation hands on each of its operands by itself.

    It only forbids the compiler to look through.
    """
    return eqn.primitive.name == BARRIER


def is_call(eqn: Any) -> bool:
    """True if an equation only runs its program, whatever that says of the derivative."""
    return eqn.primitive.name in CALLS | REGIONS | CUSTOM_RULES


def programs_inside(eqn: Any) -> list[ClosedJaxpr]:
    """The programs that an equation calls, repeats or chooses from, in its parameters' order.

    Of a kernel of unknown content none: its own program is not one of arrays.
    """
    if eqn.primitive.name in KERNELS:
        return []
    # By type, not by name: each primitive has its own name for the parameter that holds its
    # program.
    return [program for value in eqn.params.values() for program in _programs(value)]


def all_equations(
    eqns: Iterable[Any], follow: Callable[[Any], bool] = lambda eqn: True
) -> Iterator[Any]:
    """Equations, each before those of the programs inside it.

    Args:
        eqns: The equations.
        follow: Tells whether to look inside an equation.
    """
    for eqn in eqns:
        yield eqn
        if follow(eqn):
            for program in programs_inside(eqn):
                yield from all_equations(program.jaxpr.eqns, follow)


def called_program(eqn: Any) -> ClosedJaxpr | None:
    """The program that a call runs, its inputs and outputs those of the equation.

    None for other equations.
    """
    return programs_inside(eqn)[0] if is_call(eqn) else None


def region_policy(eqn: Any) -> Any:
    """The policy that a call of `jax.checkpoint` was given."""
    return eqn.params["policy"]


def recomputes_behind_barrier(eqn: Any) -> tuple[bool, ...]:
    """For each operand of a call in a derivative whether `jax.checkpoint` put a barrier before it.

    Else empty.
    """
    mark = eqn.params.get("prevent_cse", False)
    # One mark for all operands, or one for each.
    marks = mark if isinstance(mark, tuple) else (mark,) * len(eqn.invars)
    return marks if eqn.params.get("differentiated") and any(marks) else ()


def kept_bits(eqn: Any) -> tuple[int, int]:
    """Bits of exponent and mantissa to which an equation of `reduce_precision` rounds."""
    return eqn.params["exponent_bits"], eqn.params["mantissa_bits"]


def target_memories(eqn: Any) -> list[Any]:
    """Where an equation of `device_put` puts its operands: devices, shardings or memory spaces."""
    return list(eqn.params.get("devices", ()))


def constraint_spec(eqn: Any) -> P | None:
    """The spec of a sharding constraint; None for other equations."""
    return eqn.params["sharding"].spec if eqn.primitive.name == CONSTRAINT else None


def mapped_out_specs(eqn: Any) -> Sequence[P]:
    """The specs of the results of a `shard_map`."""
    return eqn.params["out_specs"]


def dot_contracted(eqn: Any) -> Sequence[int]:
    """The dims of a product's first operand that are summed over."""
    return eqn.params["dimension_numbers"][0][0]


def kernel_out_dim(eqn: Any) -> int:
    """The dim of a convolution's kernel that counts its output channels."""
    return eqn.params["dimension_numbers"].rhs_spec[0]


def permutation_of(eqn: Any) -> tuple[int, ...] | None:
    """The order in which a transpose takes its operand's dims; None for other equations."""
    return tuple(eqn.params["permutation"]) if eqn.primitive.name == TRANSPOSE else None


def is_causal(eqn: Any) -> bool:
    """True if an attention kernel of cuDNN leaves out what comes after a position."""
    return "CAUSAL" in str(eqn.params.get("mask_type"))


def is_named(primitive: Any, params: Any, names: Iterable[str]) -> bool:
    """True if a policy of `jax.checkpoint` is asked about a value with one of these names.

    `checkpoint_name` gives them.
    """
    return primitive.name == NAMED and params["name"] in names


def constraint_is_whole(primitive: Any, params: Any) -> bool:
    """True if a policy is asked about a constraint that shards its value over no axis."""
    spec = getattr(params["sharding"], "spec", None) if primitive.name == CONSTRAINT else None
    return spec is not None and all(names in (None, ()) for names in spec)


def exponent_of(eqn: Any) -> Any:
    """The exponent of an integer power, the one factor of arithmetic that stands in a parameter.

    Else None.
    """
    return eqn.params.get("y")


def scope_of(eqn: Any) -> str:
    """The named scopes that an equation was traced in."""
    return str(eqn.source_info.name_stack)


def effect_axes(traced: Any) -> set[str]:
    """The mesh axes that a program's or an equation's collectives name."""
    return {effect.name for effect in traced.effects if type(effect).__name__ == _AXIS_EFFECT}


def has_side_effects(eqn: Any) -> bool:
    """True if an equation does something beside giving results, such as a callback that prints."""
    return any(type(effect).__name__ != _AXIS_EFFECT for effect in eqn.effects)


def bind(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """The results of an equation, in the scope and the context that it was traced in."""
    # The context: the mesh, and what `compute_on` said.
    with jax.named_scope(scope_of(eqn)), eqn.ctx.manager:
        return bind_here(eqn, values)


def bind_here(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """The results of an equation in the context that holds now."""
    out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def refuses_sharding(error: Exception) -> bool:
    """True if JAX's rules for explicit axes have none for an equation with operands sharded so."""
    # The first two by name, as JAX does not export them. A ValueError says that a value of the
    # program lies on the mesh of automatic axes. What else is raised, such as for a parameter that
    # has another name, is no refusal.
    names = {"ShardingTypeError", "ReshapeExplicitError"}
    return type(error).__name__ in names or isinstance(error, (NotImplementedError, ValueError))


def on_no_mesh() -> Any:
    """The context of equations that were traced on no mesh."""
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return jax.make_jaxpr(jax.numpy.negative)(1.0).eqns[0].ctx


def replaced(eqn: Any, *, context: Any, operands: Sequence[Any]) -> Any:
    """An equation with another context and other operands; a sharding constraint becomes a copy."""
    eqn = eqn.replace(ctx=context, invars=list(operands))
    return eqn.replace(primitive=copy_p, params={}) if eqn.primitive.name == CONSTRAINT else eqn


def unsharded(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A program whose equations say nothing of shardings.

    Derivatives carry those of the mesh they were traced on.
    """
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
    """A traced program as a function, with other values for what it closes over."""
    return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, list(consts)))


def used_operands(jaxpr: Jaxpr) -> list[bool]:
    """Whether a program's outputs need each input, seen inside calls, loops and branches too."""
    return list(dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1])


def _programs(value: Any) -> list[ClosedJaxpr]:
    if isinstance(value, ClosedJaxpr):
        return [value]
    if isinstance(value, Jaxpr):
        return [ClosedJaxpr(value, ())]
    if isinstance(value, (tuple, list)):  # branches of a cond; the solvers of a linear solve
        return [program for item in value for program in _programs(item)]
    return []
