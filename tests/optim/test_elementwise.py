from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxpipe.errors import ConfigError
from jaxpipe.optim import is_elementwise


def structs(**shapes: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


WHOLE = structs(kernel=(6, 8), bias=(8,), scale=())
PIECES = structs(kernel=(1, 12), bias=(2,), scale=(1,))


def stateless(function: Callable[[Any, Any], Any]) -> optax.GradientTransformation:
    return optax.stateless(lambda updates, params: jax.tree.map(function, updates, params))


def no_bias(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, tree)


SCHEDULE = optax.cosine_decay_schedule(0.1, 10)
YES = {
    "sgd": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": optax.adamw(SCHEDULE, mask=no_bias),
    "amsgrad": optax.amsgrad(0.1),
    "adagrad": optax.adagrad(0.1),
    "lion": optax.lion(0.1),
    "rmsprop": optax.rmsprop(0.1, centered=True),
    "clip": optax.chain(optax.clip(1.0), optax.adam(0.1)),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=SCHEDULE),
    "accumulated": optax.chain(optax.trace(0.9), optax.scale_by_sign()),
}
NO = {
    "lamb": optax.lamb(0.1),
    "lars": optax.lars(0.1),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "muon": optax.contrib.muon(0.1),
    "block_rms": optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(0.1)),
    "unit_norm": optax.adaptive_grad_clip(0.1),
    "by_size": stateless(lambda g, p: g / p.size),
    "by_fan_in": stateless(lambda g, p: g * p.shape[0] ** -0.5 if p.ndim > 1 else g),
    "by_place": stateless(lambda g, p: g * jnp.arange(g.size, dtype=g.dtype).reshape(g.shape)),
    "shifted": stateless(lambda g, p: g - jnp.roll(g, 1)),
    "noisy": optax.add_noise(0.1, 0.5, jax.random.key(0)),
    "sorted": stateless(lambda g, p: jnp.sort(g.reshape(-1)).reshape(g.shape)),
    "coupled": optax.clip_by_global_norm(1.0),
}


@pytest.mark.parametrize("name", YES)
def test_element_wise(name: str) -> None:
    assert is_elementwise(YES[name], WHOLE, PIECES)


def test_an_optimizer_that_asks_for_more() -> None:
    with pytest.raises(
        ConfigError,
        match=r"from gradients, state and parameters alone.*'value'.*\. Remove the tran",
    ):
        is_elementwise(optax.contrib.reduce_on_plateau(), WHOLE, PIECES)


@pytest.mark.parametrize("name", NO)
def test_not_element_wise(name: str) -> None:
    assert not is_elementwise(NO[name], WHOLE, PIECES)
