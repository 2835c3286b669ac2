import functools
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
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
    ("layers", "got"),
    [
        ([DENSE, jnp.tanh, DENSE], "2_Dense.*the Dense instance of layer 0_Dense"),
        (nn.Sequential([DENSE, DENSE]), "1_Dense.*the Dense instance of layer 0_Dense"),
        ([nn.Dense(3)] * 4, "1_Dense.*the Dense instance of layer 0_Dense"),
        (
            [LayerSpec(DENSE).remat(), LayerSpec(DENSE)],
            "1_Dense.*the Dense instance of layer 0_Dense",
        ),
        (
            [LayerSpec(lambda: DENSE), LayerSpec(lambda: DENSE)],
            "1_Dense.*the Dense instance of layer 0_Dense",
        ),
        ([TiedLayerSpec("k", DENSE), DENSE], "1_Dense.*the Dense instance of layer 0_Dense"),
        ([NORM, NORM], "1_BatchNorm.*the BatchNorm instance of layer 0_BatchNorm"),
        ([_Holding(DENSE), DENSE], "1_Dense.*the Dense instance of layer 0__Holding"),
        (
            [DENSE, _Holding(nn.LayerNorm(), (nn.Dense(3), DENSE))],
            "1__Holding.*the Dense instance of layer 0_Dense",
        ),
        (
            [_HoldingByDefault(), _HoldingByDefault()],
            "1__HoldingByDefault.*the Dense instance of layer 0__Holding",
        ),
        (lora([DENSE, DENSE], 2, 4.0, "kernel"), "1_Dense.*the Dense instance of layer 0_Dense"),
    ],
)
def test_one_instance_at_two_places_is_refused(layers: Any, got: str) -> None:
    model = PipelineModule(layers, num_stages=1)
    match = rf"layer {got}.* Write LayerSpec\((Dense|BatchNorm), ...\) .* or TiedLayerSpec\("
    with pytest.raises(LayerError, match=match):
        model.trace(INPUTS)


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


def test_layers_must_be_ordered() -> None:
    with pytest.raises(LayerError, match=r"but got layers=\{1\}. Write the model as a list"):
        PipelineModule({1}, num_stages=1)


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(
        LayerError, match=r"at least one layer, but got layers=\[\]. Give the model's layers"
    ):
        PipelineModule([], num_stages=1)


@pytest.mark.parametrize("kind", [nn.Dense, nnx.Linear])
def test_a_class_in_place_of_a_layer_is_refused(kind: type) -> None:
    with pytest.raises(
        LayerError, match=rf"layer 1 .* class {kind.__name__}. Write LayerSpec\({kind.__name__}"
    ):
        PipelineModule([jnp.tanh, kind], num_stages=1)


def test_a_built_nnx_module_is_refused() -> None:
    with pytest.raises(
        LayerError, match=r"layer 0 must be given as LayerSpec\(Linear, ...\), but got a built NNX"
    ):
        PipelineModule([nnx.Linear(3, 3, rngs=nnx.Rngs(0))], num_stages=1)


@pytest.mark.parametrize("item", [3, None, "tanh", [jnp.tanh]])
def test_what_cannot_be_called_is_refused(item: Any) -> None:
    with pytest.raises(
        LayerError, match=r"layer 0 must be a Linen module.*" + re.escape(repr(item)[:8])
    ):
        PipelineModule([item], num_stages=1)


def test_a_pipeline_inside_a_pipeline_is_refused() -> None:
    inner = PipelineModule([jnp.tanh], num_stages=1)
    with pytest.raises(
        LayerError, match="layer 1 must not be a PipelineModule.*Put its layers into the list"
    ):
        PipelineModule([jnp.tanh, inner], num_stages=1)
    with pytest.raises(LayerError, match="layer 0 must not be a PipelineModule"):
        PipelineModule([LayerSpec(PipelineModule, [jnp.tanh], num_stages=1)], num_stages=1)


def test_a_forward_fn_beside_a_function_is_refused() -> None:
    with pytest.raises(
        LayerError,
        match="forward_fn must be given with a Linen, NNX or Equinox module, but layer 0",
    ):
        PipelineModule(
            [TiedLayerSpec("k", lambda: jnp.tanh, forward_fn=lambda m, x: x)], num_stages=1
        )


@pytest.mark.parametrize("kind", [nn.Dense, nnx.Linear])
def test_wrong_arguments_of_a_spec_name_the_layer(kind: type) -> None:
    with pytest.raises(
        LayerError,
        match=rf"layer 1 must be built by {kind.__name__}\(\), but got TypeError.*Correct",
    ):
        PipelineModule([jnp.tanh, LayerSpec(kind)], num_stages=1)
