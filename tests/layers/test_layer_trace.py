from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.errors import LayerError
from jaxpipe.layers import (
    LayerSpec,
    PipelineModule,
    TiedLayerSpec,
    format_struct,
    layer_signatures,
    struct_of,
)

X = np.ones((2, 3), np.float32)


class _Odd(nn.Module):
    """One parameter, of whatever name and value."""

    name_of: str
    value: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        self.param(self.name_of, lambda key: self.value)
        return x


def _trace(*layers: Any, inputs: Any = X, side: Any = None) -> Any:
    return PipelineModule(layers, num_stages=1).trace(inputs, side)


def test_boundaries_and_parameters_by_shape() -> None:
    trace = _trace(LayerSpec(nn.Dense, 4), jnp.tanh, LayerSpec(nn.Dense, 2, use_bias=False))
    assert [format_struct(b) for b in trace.boundaries] == [
        "float32[2, 3]",
        "float32[2, 4]",
        "float32[2, 4]",
        "float32[2, 2]",
    ]
    assert trace.num_params() == (16, 0, 8)
    assert jax.tree.map(lambda x: x.shape, trace.tree()) == {
        "layers": {"0_Dense": {"kernel": (3, 4), "bias": (4,)}, "2_Dense": {"kernel": (4, 2)}}
    }


def test_nothing_is_allocated() -> None:
    huge = jax.ShapeDtypeStruct((1 << 30, 1 << 20), jnp.float32)
    assert _trace(nn.Dense(1 << 30), inputs=huge).num_params() == ((1 << 50) + (1 << 30),)


def test_the_first_of_those_that_share_owns() -> None:
    trace = _trace(
        TiedLayerSpec("k", nn.Dense, 3, tied_weight_attr="kernel"),
        TiedLayerSpec("k", nn.Dense, 3),
        inputs=X,
    )
    assert trace.owners() == {
        ("tied", "k", "kernel"): (0, ("kernel",)),
        ("layers", "0_Dense", "bias"): (0, ("bias",)),
        ("tied", "k", "bias"): (1, ("bias",)),
    }
    assert trace.num_params() == (12, 12)


def test_layers_of_equal_code_and_shapes_are_traced_once() -> None:
    calls = []

    class Counting(nn.Module):
        factor: Any

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            calls.append(self.factor)
            return nn.Dense(x.shape[-1])(x) * self.factor

    specs = [LayerSpec(Counting, factor) for factor in (1, 1, 1.0, True, 2, 1)]
    trace = _trace(*specs, lambda x: x[:1], LayerSpec(Counting, 1))
    assert trace.firsts == (0, 0, 2, 3, 4, 0, 6, 7)
    # Three calls each: variables, training, evaluation.
    assert calls == [c for c in (1, 1.0, True, 2, 1) for _ in range(3)]
    assert [type(c) for c in calls[::3]] == [int, float, bool, int, int]


def test_unhashable_arguments_are_no_obstacle() -> None:
    spec, other = (LayerSpec(_Odd, "w", np.ones(3, np.float32)) for _ in range(2))
    assert _trace(spec, spec, other).firsts == (0, 0, 2)


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (np.zeros(2, np.int64), "int32[2]"),
        (np.float64(3), "float32[]"),
        (3, "int32[]"),
        (True, "bool[]"),
        (1.5, "float32[]"),
        (jnp.zeros(2, jnp.bfloat16), "bfloat16[2]"),
        (jax.random.key(0), "key<fry>[]"),
        (jax.ShapeDtypeStruct((4, 2), np.int64), "int32[4, 2]"),
        ({"x": 1, "y": (2.0, None)}, "{x: int32[], y: (float32[], None)}"),
        ({}, "{}"),
    ],
)
def test_shapes_of_anything_as_it_is_on_a_device(leaf: Any, text: str) -> None:
    struct = struct_of(leaf)
    assert format_struct(struct) == text
    assert not any(x.weak_type for x in jax.tree.leaves(struct))


def test_keys_and_masks_travel_between_layers() -> None:
    def split(inputs: Any) -> Any:
        key, x = inputs
        return {"key": key, "x": x, "mask": x > 0}

    def use(inputs: Any) -> jax.Array:
        return jnp.where(
            inputs["mask"], inputs["x"], jax.random.normal(inputs["key"], inputs["x"].shape)
        )

    model = PipelineModule([split, use, nn.Dense(2)], num_stages=1)
    inputs = (jax.random.key(0), X)
    trace = model.trace(inputs)
    assert [format_struct(b) for b in trace.boundaries[1:3]] == [
        "{key: key<fry>[], mask: bool[2, 3], x: float32[2, 3]}",
        "float32[2, 3]",
    ]
    assert len(set(layer_signatures(model.layers, trace))) == 3
    assert model.init(jax.random.key(0), inputs)["layers"].keys() == {"2_Dense"}


def test_a_parameter_may_have_a_slash_in_its_name() -> None:
    assert _trace(_Odd("a/b", jnp.zeros(2))).tree()["layers"]["0__Odd"].keys() == {"a/b"}


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_a_python_number_is_a_parameter_of_one_element(dtype: str) -> None:
    value = 2.0 if dtype == "float32" else 1 + 2j
    assert format_struct(_trace(_Odd("w", value)).tree()["layers"]["0__Odd"]["w"]) == f"{dtype}[]"


class _Box:
    """A Python object over which one layer hands another a value."""

    value: Any = 0.0

    def put(self, x: jax.Array) -> jax.Array:
        self.value = jnp.tanh(x)
        return x

    def take(self, x: jax.Array) -> jax.Array:
        return jax.checkpoint(lambda y: y + self.value)(x)

    def shape(self, x: jax.Array) -> jax.Array:
        return x + jnp.ndim(self.value)


def test_a_value_on_a_python_object_is_refused() -> None:
    box = _Box()
    match = (
        r"layer 2_take must compute from its arguments alone, but got float32\[2, 3\] that an "
        r"earlier call .* left on a Python object.*return the value beside the layer's output"
    )
    with pytest.raises(LayerError, match=match):
        _trace(box.put, nn.Dense(3), box.take)
    assert _trace(box.put, nn.Dense(3), box.shape)


def test_a_value_that_a_later_layer_leaves_is_refused() -> None:
    box = _Box()
    module = PipelineModule([box.take, box.put], num_stages=1)
    trace = module.trace(X)
    with pytest.raises(LayerError, match="layer 0_take must compute from its arguments alone"):
        layer_signatures(module.layers, trace)


def test_a_side_input_that_no_layer_names_is_told_once() -> None:
    def masked(x: Any, padding: Any = None) -> Any:
        return x if padding is None else x * padding

    model = PipelineModule([masked, nn.Dense(2)], num_stages=1)
    match = (
        r"side input 'paddng' must be named by the call of a layer.*Did you mean 'padding'\? "
        r"Otherwise leave it out"
    )
    with pytest.warns(UserWarning, match=match):
        model.trace(X, side={"paddng": X})
    model.trace(X, side={"padding": X})
    with pytest.warns(
        UserWarning, match=r"side input 'mask' must be named .*that nothing uses it\. Leave it out"
    ):
        PipelineModule([nn.LayerNorm()], num_stages=1).trace(X, side={"mask": X})
