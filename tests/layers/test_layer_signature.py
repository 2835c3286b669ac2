import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import ClosedJaxpr

from jaxpipe.errors import LayerError
from jaxpipe.layers import LayerSpec, PipelineModule, TiedLayerSpec, layer_signatures
from jaxpipe.programs.jaxpr import program_key, value_numbers

X = np.ones((2, 3), np.float32)
A, B = np.arange(3, dtype=np.float32)[None], np.arange(1, 4, dtype=np.float32)[None]


class _Block(nn.Module):
    width: int = 5
    act: Callable[[jax.Array], jax.Array] = jax.nn.gelu

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        h = self.act(nn.Dense(self.width)(nn.LayerNorm()(x)))
        return x + nn.Dropout(0.5, deterministic=not train)(nn.Dense(x.shape[-1])(h))


class _NNXBlock(nnx.Module):
    def __init__(self, rate: float, rngs: nnx.Rngs) -> None:
        self.linear, self.drop = nnx.Linear(3, 3, rngs=rngs), nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(nnx.relu(self.linear(x)))


def _same_name(body: Callable[[jax.Array], jax.Array]) -> type[nn.Module]:
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return body(nn.Dense(3)(x))

    return Layer


def _host_identity(x: np.ndarray) -> np.ndarray:
    return x


def _host_double(x: np.ndarray) -> np.ndarray:
    return 2 * x


def _calls_back(host: Callable[[np.ndarray], np.ndarray]) -> Callable[[jax.Array], jax.Array]:
    def call(x: jax.Array) -> jax.Array:
        return jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    @jax.custom_vjp
    def layer(x: jax.Array) -> jax.Array:
        return call(x)

    layer.defvjp(lambda x: (call(x), None), lambda _, g: (call(g),))
    return lambda x: layer(x)


def _with_gradient(factor: float) -> Callable[[jax.Array], jax.Array]:
    @jax.custom_vjp
    def layer(x: jax.Array) -> jax.Array:
        return x

    layer.defvjp(lambda x: (x, None), lambda _, g: (factor * g,))
    return lambda x: layer(x)


def _scanned(table: np.ndarray) -> Callable[[jax.Array], jax.Array]:
    return lambda x: jax.lax.scan(jax.jit(lambda c, _: (c * table, None)), x, None, 3)[0]


def _alike(*layers: Any, inputs: Any = X) -> bool:
    model = PipelineModule(layers, num_stages=1)
    first, second = layer_signatures(model.layers, model.trace(inputs))
    return first == second


@pytest.mark.parametrize(
    "make",
    [
        lambda: LayerSpec(_Block),
        lambda: LayerSpec(nn.remat(_Block, static_argnums=(2,))),
        lambda: LayerSpec(_Block, act=lambda x: jnp.tanh(x)),
        lambda: LayerSpec(_NNXBlock, 0.5),
        lambda: _same_name(jax.nn.relu)(),
        lambda: jax.nn.relu,
        lambda: lambda x: jax.nn.silu(x) * 2.0,
        lambda: lambda x: x * A.copy(),
        lambda: lambda x: x * jnp.asarray(A),
        lambda: jax.jit(lambda x: x * A.copy()),
        lambda: _scanned(A.copy()),
        lambda: _calls_back(_host_identity),
        lambda: _with_gradient(2.0),
        lambda: lambda x: x * np.float32("nan"),
    ],
)
def test_the_same_program_is_alike(make: Callable[[], Any]) -> None:
    assert _alike(make(), make())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (LayerSpec(_Block, 5), LayerSpec(_Block, 6)),
        (LayerSpec(_Block), LayerSpec(_Block, act=jax.nn.relu)),
        (LayerSpec(_NNXBlock, 0.5), LayerSpec(_NNXBlock, 0.25)),
        (_same_name(jax.nn.relu)(), _same_name(jnp.tanh)()),
        (_same_name(lambda x: x * A)(), _same_name(lambda x: x * B)()),
        (lambda x: x * A, lambda x: x * B),
        (lambda x: x * jnp.asarray(A), lambda x: x * jnp.asarray(B)),
        (jax.jit(lambda x: x * A), jax.jit(lambda x: x * B)),
        (_scanned(A), _scanned(B)),
        (lambda x: x + 0.1, lambda x: x + np.nextafter(np.float32(0.1), np.float32(1))),
        (lambda x: x * 0.0, lambda x: x * -0.0),
        (
            functools.partial(jnp.sum, axis=1, keepdims=True),
            functools.partial(jnp.max, axis=1, keepdims=True),
        ),
        (_calls_back(_host_identity), _calls_back(_host_double)),
        (_with_gradient(2.0), _with_gradient(3.0)),
        (lambda x: x, lambda x, train: x * 2 if train else x),
        (lambda x: x, lambda x, train: x if train else x * 2),
        (lambda x: (x, x), lambda xs: [xs[0], xs[1]]),
    ],
)
def test_different_programs_are_not_alike(one: Any, other: Any) -> None:
    assert not _alike(one, other)


def test_parameters_of_other_names_are_not_alike() -> None:
    class Renamed(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(3, name="other")(x)

    assert not _alike(_same_name(lambda x: x)(), Renamed())


def test_other_shapes_are_not_alike() -> None:
    assert not _alike(lambda x: x[:1] + 0 * x.sum(), lambda x: x[:1] + 0 * x.sum())


def test_layers_that_share_are_alike_to_none() -> None:
    assert not _alike(TiedLayerSpec("k", nn.Dense, 3), TiedLayerSpec("k", nn.Dense, 3))


class _Quiet:
    """A factor that neither `==` nor `repr` shows."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Quiet)

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "Quiet"

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.factor


@dataclasses.dataclass(frozen=True)
class _QuietConfig:
    factor: float = dataclasses.field(compare=False, repr=False)


class _QuietField(nn.Module):
    factor: float = dataclasses.field(default=1.0, compare=False, repr=False)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.factor


class _Scaled(nn.Module):
    by: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.by.factor


class _NNXScaled(nnx.Module):
    def __init__(self, by: Any) -> None:
        self.by = by

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.by.factor


class _NNXCounted(nnx.Module):
    factors = itertools.count()

    def __init__(self) -> None:
        self.factor = next(self.factors)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.factor


@pytest.mark.parametrize(
    "layers",
    [
        [LayerSpec(_QuietField, factor=2.0), LayerSpec(_QuietField, factor=3.0)],
        [LayerSpec(_QuietField, factor=2.0).remat(), LayerSpec(_QuietField, factor=3.0).remat()],
        [nn.Sequential([_QuietField(2.0)]), nn.Sequential([_QuietField(3.0)])],
        [LayerSpec(_Scaled, _QuietConfig(2.0)), LayerSpec(_Scaled, _QuietConfig(3.0))],
        [LayerSpec(_Scaled, _Quiet(2.0)), LayerSpec(_Scaled, _Quiet(3.0))],
        [LayerSpec(_NNXScaled, _Quiet(2.0)), LayerSpec(_NNXScaled, _Quiet(3.0))],
        [LayerSpec(_NNXCounted), LayerSpec(_NNXCounted)],
        [_Quiet(2.0), _Quiet(3.0)],
    ],
    ids=repr,
)
def test_what_neither_eq_nor_repr_shows_tells_layers_apart(layers: list[Any]) -> None:
    assert not _alike(*layers)


def test_constants_made_of_the_same_numbers_are_alike() -> None:
    assert _alike(LayerSpec(_Scaled, _QuietConfig(2.0)), LayerSpec(_Scaled, _QuietConfig(2.0)))
    assert _alike(_Quiet(2.0), _Quiet(2.0))  # by their programs


def test_repeated_layers_share_a_number() -> None:
    layers = [nn.Dense(3), LayerSpec(_Block), jnp.tanh, LayerSpec(_Block), jnp.tanh, nn.Dense(4)]
    model = PipelineModule(layers, num_stages=1)
    assert layer_signatures(model.layers, model.trace(X)) == (0, 1, 2, 1, 2, 3)


def test_a_layer_without_derivative_is_named() -> None:
    def layer(x: jax.Array) -> jax.Array:
        return jax.pure_callback(_host_identity, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    model = PipelineModule([jnp.tanh, layer], num_stages=1)
    with pytest.raises(
        LayerError, match="(?s)layer 1_layer must be differentiable in training.*jax.custom_vjp"
    ):
        layer_signatures(model.layers, model.trace(X))


def _key(function: Callable[..., Any]) -> ClosedJaxpr:
    return jax.make_jaxpr(function)(X)


def test_programs_are_compared_by_content() -> None:
    big = np.arange(3000, dtype=np.float32).reshape(1000, 3)
    changed = big.copy()
    changed[500, 1] = -1
    key = jax.random.key(3)
    functions = [
        lambda x: x,
        lambda x: x + 1,
        lambda x: x + 2,
        jax.jit(lambda x: x + big.sum(0, keepdims=True)),
        jax.jit(lambda x: x + jnp.asarray(big).sum(0, keepdims=True)),
        jax.jit(lambda x: x + jnp.asarray(changed).sum(0, keepdims=True)),
        lambda x: x + jax.random.normal(key, x.shape),
        lambda x: x + jax.random.normal(jax.random.key(4), x.shape),
        lambda x: jax.lax.cond(x.sum() > 0, lambda y: y, lambda y: -y, x),
        lambda x: jax.lax.cond(x.sum() > 0, lambda y: y, lambda y: 2 * y, x),
    ]
    keys = [program_key(_key(f)) for f in functions]
    assert keys == [program_key(_key(f)) for f in functions]
    assert len(set(keys)) == len(keys)


def test_results_are_numbered_by_how_they_are_computed() -> None:
    def run(a: jax.Array, b: jax.Array, c: jax.Array) -> Any:
        return (
            a + 1,
            b + 1,
            b + 2,
            c + 1,
            a * b,
            b * c,
            jnp.where(a > 0, a, 0),
            jnp.where(b > 0, b, 0),
        )

    numbers = value_numbers(jax.make_jaxpr(run)(X, X, X), ["x", "x", "other"])
    same = {(i, j) for i in range(8) for j in range(i) if numbers[i] == numbers[j]}
    assert same == {(1, 0), (7, 6)}


def test_results_of_a_conditional_are_numbered_one_by_one() -> None:
    def run(a: jax.Array, b: jax.Array, c: jax.Array) -> Any:
        return jax.lax.cond(c[0, 0] > 0, lambda: (a + 1, b + 1, b, a), lambda: (a, b, b + 1, b))

    numbers = value_numbers(jax.make_jaxpr(run)(X, X, X), ["x", "x", "other"])
    assert numbers[0] == numbers[1]
    assert len({*numbers}) == 3

    def second(b: jax.Array, c: jax.Array) -> Any:
        return jax.lax.cond(c[0, 0] > 0, lambda: b + 1, lambda: b)

    table: dict[Any, int] = {}
    first = value_numbers(jax.make_jaxpr(run)(X, X, X), ["a", "b", "c"], table)
    assert value_numbers(jax.make_jaxpr(second)(X, X), ["b", "c"], table) == [first[1]]
    assert value_numbers(jax.make_jaxpr(second)(X, X), ["b", "b"], table) != [first[1]]


def test_results_of_two_programs_are_compared_through_calls() -> None:
    def both(a: jax.Array, b: jax.Array) -> Any:
        return a + 1, b * 2

    def second(b: jax.Array) -> Any:
        return b * 2, b * 3

    table: dict[Any, int] = {}
    first = value_numbers(jax.make_jaxpr(jax.jit(both))(X, X), ["a", "b"], table)
    assert value_numbers(jax.make_jaxpr(second)(X), ["b"], table)[0] == first[1]
    assert len({*first, *value_numbers(jax.make_jaxpr(jax.jit(second))(X), ["b"], table)}) == 3


def test_a_transpose_that_undoes_another_gives_back_the_number() -> None:
    def run(a: jax.Array) -> Any:
        turned = a.transpose(1, 2, 0)
        return a, turned.transpose(2, 0, 1), turned.transpose(1, 2, 0), turned

    numbers = value_numbers(jax.make_jaxpr(run)(np.ones((3, 3, 3))), ["a"])
    assert numbers[0] == numbers[1]
    assert len(set(numbers)) == 3
