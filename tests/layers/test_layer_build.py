import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _refusals import check_refused
from flax import nnx

from jaxpipe.errors import LayerError
from jaxpipe.layers import LayerSpec, PipelineModule, TiedLayerSpec, lora


def _names(layers: Any) -> list[str]:
    return [named.name for named in PipelineModule(layers, num_stages=1).layers]


class _Callable:
    def __call__(self, x: jax.Array) -> jax.Array:
        return x


def _double(x: jax.Array) -> jax.Array:
    return 2 * x


def test_layers_are_named_by_place_and_class() -> None:
    layers = [
        nn.Dense(3),
        LayerSpec(nn.LayerNorm),
        LayerSpec(nnx.Linear, 3, 3),
        TiedLayerSpec("k", nn.Embed, 5, 3),
        jnp.tanh,
        lambda x: x,
        _double,
        functools.partial(_double),
        _Callable(),
        LayerSpec(lambda: _double),
    ]
    kinds = [
        "Dense",
        "LayerNorm",
        "Linear",
        "Embed",
        "tanh",
        "lambda",
        "_double",
        "_double",
        "_Callable",
        "_double",
    ]
    assert _names(layers) == [f"{i}_{kind}" for i, kind in enumerate(kinds)]


def test_any_iterable_and_a_linen_sequential_are_lists_of_layers() -> None:
    assert _names(nn.Dense(3) for _ in range(2)) == ["0_Dense", "1_Dense"]
    assert _names((nn.Dense(3), jnp.tanh)) == ["0_Dense", "1_tanh"]
    assert _names(nn.Sequential([nn.Dense(3), jnp.tanh])) == ["0_Dense", "1_tanh"]
    assert _names([nn.Sequential([nn.Dense(3), jnp.tanh])]) == ["0_Sequential"]


class _Holding(nn.Module):
    inner: nn.Module
    others: tuple[nn.Module, ...] = ()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for module in (self.inner, *self.others):
            x = module(x)
        return x


class _HoldingByDefault(nn.Module):
    inner: nn.Module = nn.Dense(3)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.inner(x)


DENSE, NORM = nn.Dense(3), nn.BatchNorm(use_running_average=True, use_bias=False, use_scale=False)
INPUTS = np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    "layers",
    [
        [TiedLayerSpec("k", DENSE), TiedLayerSpec("k", DENSE)],
        [LayerSpec(nn.Dense, 3)] * 4,
        [nn.Sequential([DENSE, jnp.tanh, DENSE])],
        [_Holding(nn.Dense(3)), _Holding(nn.Dense(3))],
        [jnp.tanh] * 3,
        [*[nn.Dropout(0.5, deterministic=True)] * 2, nn.Dense(3)],
    ],
)
def test_what_has_no_weights_or_shares_them_anyway_may_stand_at_two_places(layers: Any) -> None:
    PipelineModule(layers, num_stages=1).trace(INPUTS)


TWICE = [
    (
        rf"layer {place}.*the {kind} instance of layer {first}.* Write LayerSpec\({kind}, \.\.\.\) "
        r".* or TiedLayerSpec\(",
        functools.partial(PipelineModule(layers, num_stages=1).trace, INPUTS),
    )
    for layers, place, kind, first in (
        ([DENSE, jnp.tanh, DENSE], "2_Dense", "Dense", "0_Dense"),
        (nn.Sequential([DENSE, DENSE]), "1_Dense", "Dense", "0_Dense"),
        ([nn.Dense(3)] * 4, "1_Dense", "Dense", "0_Dense"),
        ([LayerSpec(DENSE).remat(), LayerSpec(DENSE)], "1_Dense", "Dense", "0_Dense"),
        ([LayerSpec(lambda: DENSE), LayerSpec(lambda: DENSE)], "1_Dense", "Dense", "0_Dense"),
        ([TiedLayerSpec("k", DENSE), DENSE], "1_Dense", "Dense", "0_Dense"),
        ([NORM, NORM], "1_BatchNorm", "BatchNorm", "0_BatchNorm"),
        ([_Holding(DENSE), DENSE], "1_Dense", "Dense", "0__Holding"),
        (
            [DENSE, _Holding(nn.LayerNorm(), (nn.Dense(3), DENSE))],
            *("1__Holding", "Dense", "0_Dense"),
        ),
        ([_HoldingByDefault(), _HoldingByDefault()], "1__HoldingByDefault", "Dense", "0__Holding"),
        (lora([DENSE, DENSE], 2, 4.0, "kernel"), "1_Dense", "Dense", "0_Dense"),
    )
]


def test_one_instance_at_two_places_is_refused() -> None:
    check_refused(LayerError, TWICE)
