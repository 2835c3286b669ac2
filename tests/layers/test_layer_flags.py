"""What tells a layer whether this is training, by whatever name.

And what must not happen outside training.
"""

import functools
import linecache
import warnings
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpipe.errors import LayerError
from jaxpipe.layers import LayerSpec, PipelineModule, TiedLayerSpec

KEY = jax.random.key(0)
X = np.ones((8, 8), np.float32)
ON_IN_TRAINING = ["train", "training", "is_training", "is_train", "train_mode"]
OFF_IN_TRAINING = ["deterministic", "inference", "use_running_average"]
FLAGS = [(name, True) for name in ON_IN_TRAINING] + [(name, False) for name in OFF_IN_TRAINING]


def _define(source: str, **names: Any) -> Any:
    """A function whose argument has a name that is only known here."""
    found: dict[str, Any] = {"nn": nn, "nnx": nnx, **names}
    exec(source, found)  # noqa: S102
    return found["call"]


def _linen(flag: str, default: str, *, on: str) -> type[nn.Module]:
    call = _define(
        f"def call(self, x, {flag}{default}): return nn.Dropout(0.5)(x, deterministic=not ({on}))"
    )
    return type("Noisy", (nn.Module,), {"__call__": nn.compact(call)})


def _function(flag: str, default: str, *, on: str) -> Callable[..., Any]:
    return _define(f"def call(x, {flag}{default}): return x * 2 if {on} else x")


def _nnx(flag: str, default: str, *, on: str) -> type[nnx.Module]:
    def build(self: Any, rngs: nnx.Rngs) -> None:
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    call = _define(
        f"def call(self, x, {flag}{default}): return self.drop(x, deterministic=not ({on}))"
    )
    return type("Noisy", (nnx.Module,), {"__init__": build, "__call__": call})


def _follows(layer: Any) -> None:
    """In training the layer changes its input, and outside not."""
    model = PipelineModule([layer], num_stages=1)
    params = model.init(KEY, X)
    np.testing.assert_array_equal(model.apply(params, X), X)
    assert not np.array_equal(model.apply(params, X, train=True, key=KEY), X)


@pytest.mark.parametrize("make", [_linen, _nnx, _function])
@pytest.mark.parametrize("has_default", [True, False])
def test_every_flag_of_the_ecosystem_is_known(make: Any, has_default: bool) -> None:
    for flag, in_training in FLAGS:
        default = f"={not in_training}" if has_default else ""
        made = make(flag, default, on=flag if in_training else f"not {flag}")
        _follows(made if make is _function else LayerSpec(made))


@pytest.mark.parametrize(("flag", "in_training"), FLAGS)
def test_a_flag_that_is_a_field_follows_unless_it_is_given(flag: str, in_training: bool) -> None:
    on = f"self.{flag}" if in_training else f"not self.{flag}"
    call = _define(f"def call(self, x): return nn.Dropout(0.5)(x, deterministic=not ({on}))")
    body = {"__annotations__": {flag: bool}, flag: not in_training, "__call__": nn.compact(call)}
    block = type("Noisy", (nn.Module,), body)
    _follows(LayerSpec(block))
    _follows(block())
    off = PipelineModule([LayerSpec(block, **{flag: not in_training})], num_stages=1)
    np.testing.assert_array_equal(off.apply({}, X, train=True, key=KEY), X)


class _Attribute(nnx.Module):
    def __init__(self, name: str, value: bool, rngs: nnx.Rngs) -> None:
        self.name, self.on = name, value
        setattr(self, name, not value)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(x, deterministic=getattr(self, self.name) != self.on)


@pytest.mark.parametrize(("flag", "in_training"), [*FLAGS, ("noisy", True), ("calm", False)])
def test_a_flag_that_is_an_nnx_attribute_follows(flag: str, in_training: bool) -> None:
    spec = LayerSpec(_Attribute, flag, in_training)
    _follows(
        spec if (flag, in_training) in FLAGS else spec.train_flag(flag, in_training=in_training)
    )


@pytest.mark.parametrize(
    ("make", "flag", "in_training"), [(_linen, "noisy", True), (_nnx, "calm", False)]
)
@pytest.mark.parametrize("remat", [False, True])
def test_a_spec_names_another_flag(make: Any, flag: str, in_training: bool, remat: bool) -> None:
    block = make(flag, f"={not in_training}", on=flag if in_training else f"not {flag}")
    spec = LayerSpec(block).train_flag(flag, in_training=in_training)
    _follows(spec.remat() if remat else spec)


def test_a_tied_forward_fn_and_a_function_take_named_flags() -> None:
    def forward(module: nn.Module, x: jax.Array, loud: bool = False) -> jax.Array:
        return x * 2 if loud else x

    _follows(TiedLayerSpec("k", nn.Dense, 8, forward_fn=forward).train_flag("loud"))
    _follows(
        LayerSpec(lambda: functools.partial(_function("loud", "=False", on="loud"))).train_flag(
            "loud"
        )
    )


def test_a_named_flag_shows_and_leaves_the_spec_as_it_is() -> None:
    spec = LayerSpec(nn.Dense, 4)
    assert repr(spec.train_flag("on")) == "Dense(4).train_flag('on')"
    assert (
        repr(spec.train_flag("off", in_training=False))
        == "Dense(4).train_flag('off', in_training=False)"
    )
    assert repr(spec) == "Dense(4)"


def _warnings(model: PipelineModule) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.replace(base_seed=3).trace(X)
            model.init(KEY, X)
    lines = [linecache.getline(each.filename, each.lineno) for each in caught]
    assert all(".trace(X)" in line for line in lines)
    return [str(each.message) for each in caught]


class _Norm(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, moving: bool = False) -> jax.Array:
        return nn.BatchNorm(use_running_average=not moving)(x)


@pytest.mark.parametrize(
    ("block", "name"),
    [
        (_linen("noisy", "=False", on="noisy"), "noisy"),
        (_linen("calm", "=True", on="not calm"), "calm"),
        (_nnx("noisy", "=False", on="noisy"), "noisy"),
        (_Norm, "moving"),
    ],
)
def test_a_switch_of_randomness_left_at_its_default_is_named_once(block: Any, name: str) -> None:
    spec = LayerSpec(block)
    kind = block.__name__
    (message,) = _warnings(PipelineModule([spec, jnp.tanh, spec.remat()], num_stages=1))
    assert f"0_{kind} ({name}), 2_{kind} ({name})" in message
    assert f".train_flag({name!r}{', in_training=False' if name == 'calm' else ''})" in message
    assert not _warnings(
        PipelineModule([spec.train_flag(name, in_training=name != "calm")], num_stages=1)
    )


def test_a_switch_of_anything_else_is_not_named() -> None:
    class Block(nn.Module):
        @nn.compact
        def __call__(
            self, x: jax.Array, doubled: bool = False, masked: bool = True, *, train: bool = False
        ) -> Any:
            x = nn.Dropout(0.5, deterministic=not (train and masked))(nn.Dense(8)(x))
            return 2 * x if doubled else x

    assert not _warnings(PipelineModule([LayerSpec(Block)], num_stages=1))


class _Scanned(nnx.Module):
    """Random streams that pass through transformations and are used in training alone."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=2)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def build(rngs: nnx.Rngs) -> nnx.Dropout:
            return nnx.Dropout(0.5, rngs=rngs)

        self.drops = build(rngs)
        self.last = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x: jax.Array, drop: nnx.Dropout) -> jax.Array:
            return drop(x)

        x = run(x, self.drops)
        x = nnx.remat(lambda drop, x: drop(x))(self.last, x)
        return nnx.cond(x.sum() > 0, lambda drop, x: drop(x), lambda drop, x: x, self.last, x)


def test_streams_that_rest_in_evaluation_are_no_fault() -> None:
    _follows(LayerSpec(_Scanned))


def test_an_evaluation_that_fails_is_said_to_be_one() -> None:
    def layer(x: jax.Array, train: bool) -> jax.Array:
        return x if train else x @ np.ones((3, 3), np.float32)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, train: bool) -> jax.Array:
            return layer(x, train or self.is_initializing())

    with pytest.raises(
        LayerError, match=r"(?s)layer 0_Block must accept the model's inputs in evaluation, but got"
    ):
        PipelineModule([Block()], num_stages=1).init(KEY, X)
