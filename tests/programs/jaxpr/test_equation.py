"""What is read of equations, on every JAX that is supported."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from jax.sharding import PartitionSpec as P

from jaxpipe.programs.autodiff import Residuals
from jaxpipe.programs.jaxpr import (
    all_equations,
    count_kernels,
    effect_axes,
    flatten,
    name_of,
    scan_form,
)

X = jnp.ones((4, 4))


def new_primitive(
    name: str, like: Callable[[jax.Array], jax.Array]
) -> Callable[[jax.Array], jax.Array]:
    """A function of a primitive that no list knows, as a new release of JAX may bring one."""
    primitive = Primitive(name)
    # The second is the result; the first refuses what the function does not take.
    primitive.def_abstract_eval(
        lambda x: (jax.eval_shape(like, jax.ShapeDtypeStruct(x.shape, x.dtype)), x)[1]
    )
    mlir.register_lowering(primitive, mlir.lower_fun(like, multiple_results=False))
    # Its derivative is itself, which is not true and does not matter here.
    ad.defjvp(primitive, lambda g, x: g * primitive.bind(x))
    return primitive.bind


gain = new_primitive("a_new_gain", jnp.tanh)
scramble = new_primitive("a_new_scramble", lambda x: jnp.cumsum(x, axis=x.ndim - 1))


def held(function: Callable[[jax.Array], jax.Array]) -> int:
    """Bytes held for the backward of a product, the function, and another product."""

    def model(params: Any, x: jax.Array, context: Any) -> Any:
        return function(x @ params[0]) @ params[1], ()

    params, x = (
        (jax.ShapeDtypeStruct((4, 16), jnp.float32), jax.ShapeDtypeStruct((16, 4), jnp.float32)),
        X,
    )
    return sum(leaf.size * leaf.dtype.itemsize for leaf in Residuals(model, params, x, ()).structs)


def test_an_unknown_primitive_that_works_element_by_element_is_arithmetic() -> None:
    (eqn,) = jax.make_jaxpr(gain)(X).jaxpr.eqns
    assert name_of(eqn) == "mul"
    assert held(gain) == held(jnp.tanh)
    assert count_kernels(gain, [X]) == count_kernels(jnp.tanh, [X])


def test_an_unknown_primitive_of_another_kind_is_named_in_a_warning() -> None:
    match = (
        r"does not know the primitive a_new_scramble of JAX \d.*results are held for the backward"
    )
    with pytest.warns(UserWarning, match=match):
        flatten(jax.make_jaxpr(scramble)(X))
    with pytest.warns(UserWarning, match=match):
        held(scramble)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("cumsum", lambda x: jnp.cumsum(x, axis=0)),
        ("sort", jnp.sort),
        ("cholesky", jnp.linalg.cholesky),
        ("rev", lambda x: jax.lax.rev(x, (0,))),
        ("fft", lambda x: jnp.fft.fft(x + 0j)),
        ("transpose", lambda x: x.T),
        ("triangular_solve", lambda x: jax.lax.linalg.triangular_solve(x, x)),
    ],
)
def test_what_mixes_elements_is_not_taken_for_arithmetic(
    name: str, function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxpipe.programs.jaxpr._equation.is_known", lambda name: False)
    found = [
        eqn
        for eqn in all_equations(jax.make_jaxpr(function)(X).jaxpr.eqns)
        if eqn.primitive.name == name
    ]
    assert found
    assert {name_of(eqn) for eqn in found} == {name}


@pytest.mark.parametrize(
    "function",
    [
        jnp.tanh,
        jnp.exp,
        jnp.sin,
        jnp.log,
        jnp.square,
        lambda x: x * x,
        lambda x: x**3,
        jnp.abs,
        jnp.arcsinh,
    ],
)
def test_known_arithmetic_would_be_found_by_its_form(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxpipe.programs.jaxpr._equation.is_known", lambda name: False)
    for eqn in jax.make_jaxpr(function)(X).jaxpr.eqns:
        assert name_of(eqn) in ("mul", "jit"), eqn


def test_a_scan_is_read() -> None:
    def function(const: jax.Array, carry: jax.Array, sliced: jax.Array) -> Any:
        return jax.lax.scan(lambda c, x: (c + x, const), carry, sliced, reverse=True)

    (eqn,) = jax.make_jaxpr(function)(X[0], X[0], X).jaxpr.eqns
    form = scan_form(eqn)
    assert form is not None
    assert (form.num_consts, form.num_carry, form.length, form.settings["reverse"]) == (
        1,
        1,
        4,
        True,
    )
    assert scan_form(form.body.jaxpr.eqns[0]) is None


def test_collectives_name_their_axes() -> None:
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    found = []

    def inside(x: jax.Array) -> jax.Array:
        found.append(effect_axes(jax.make_jaxpr(lambda x: jax.lax.psum(x, "x"))(x).jaxpr))
        return x

    jax.eval_shape(
        jax.shard_map(inside, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False), X
    )
    assert found == [{"x"}]
