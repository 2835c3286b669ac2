from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpipe.errors import ConfigError
from jaxpipe.optim import params_needed_whole


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
    "by_step": optax.conditionally_mask(optax.adam(0.1), lambda step: step != 1),
    "every_second": optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "of_one_number": stateless(lambda g, p: g * np.full(g.shape, 0.5, np.float32)),
    "of_an_array": optax.inject_hyperparams(lambda rates: optax.scale(-rates[1]))(
        rates=jnp.array([0.1, 0.2])
    ),
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
    "by_array": stateless(
        lambda g, p: g * np.tri(*g.shape, dtype=np.float32) if g.ndim == 2 else g
    ),
    "by_shape": optax.add_decayed_weights(
        0.5, mask=lambda tree: jax.tree.map(lambda x: x.ndim == 2 and x.shape[0] > 1, tree)
    ),
    "filled_by_shape": stateless(
        lambda g, p: g * jnp.full_like(g, 0.0 if g.ndim and g.shape[0] == 1 else 1.0)
    ),
    "first_of_state": optax.GradientTransformation(
        lambda p: jax.tree.map(lambda x: jnp.zeros_like(x).at[:1].set(1) if x.ndim else x, p),
        lambda updates, state, params=None: (jax.tree.map(jnp.multiply, updates, state), state),
    ),
    "by_place": stateless(lambda g, p: g * jnp.arange(g.size, dtype=g.dtype).reshape(g.shape)),
    "shifted": stateless(lambda g, p: g - jnp.roll(g, 1)),
    "noisy": optax.add_noise(0.1, 0.5, jax.random.key(0)),
    "sorted": stateless(lambda g, p: jnp.sort(g.reshape(-1)).reshape(g.shape)),
    "coupled": optax.clip_by_global_norm(1.0),
}


def test_element_wise() -> None:
    for name in YES:
        assert params_needed_whole(YES[name], WHOLE, PIECES) == [], name


def test_an_optimizer_that_asks_for_more() -> None:
    with pytest.raises(
        ConfigError,
        match=r"from gradients, state and parameters alone.*'value'.*\. Remove the tran",
    ):
        params_needed_whole(optax.contrib.reduce_on_plateau(), WHOLE, PIECES)


def test_not_element_wise() -> None:
    for name in NO:
        assert params_needed_whole(NO[name], WHOLE, PIECES), name


def tall(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim == 2 and x.shape[0] > x.shape[1], tree)


@pytest.mark.parametrize(
    ("optimizer", "wanted"),
    [
        pytest.param(optax.adam(0.1), [], id="none"),
        pytest.param(optax.chain(optax.adam(0.1), NO["by_array"]), ["high", "wide"], id="array"),
        # As many are decayed in both trees, but not the same.
        pytest.param(optax.add_decayed_weights(0.5, mask=tall), ["high", "wide"], id="whose"),
        pytest.param(optax.apply_if_finite(optax.sgd(0.1), 3), ["bias", "high", "wide"], id="all"),
    ],
)
def test_which_parameters_are_needed_whole(
    optimizer: optax.GradientTransformation, wanted: list[str]
) -> None:
    trees = (
        structs(bias=(8,), high=(8, 6), wide=(6, 8)),
        structs(bias=(4,), high=(4, 6), wide=(6, 4)),
    )
    found = params_needed_whole(optimizer, *({"layers": tree} for tree in trees))
    assert found == [("layers", name) for name in wanted]
