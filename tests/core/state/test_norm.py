"""The global norm counts every element of the model once, however many devices hold it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _stages import filled, make_mesh, on_devices, struct

from jaxpipe.core.state import Layout, Storage, ZeroSharding, clip_to, global_norm
from jaxpipe.core.state._zero import ByElements, ByLeaves, Replicated, ShardLayout

TIED = {"tied": (0, 1), "late": (1, 2)}
LAYOUT = Layout(
    [
        {"trunk": struct(2), "tied": struct(1)},
        {"trunk": struct(2), "tied": struct(1), "late": struct(1)},
        {"trunk": struct(2), "late": struct(1)},
    ]
)
GRADS = [
    {"trunk": 1.0, "tied": 3.0},
    {"trunk": 2.0, "tied": 3.0, "late": 4.0},
    {"trunk": 3.0, "late": 4.0},
]
SQUARES = 2 * (1 + 4 + 9) + 9 + 16
SHARDINGS = {
    "replicated": Replicated(LAYOUT),
    "elements": ByElements(LAYOUT, 2, {}),
    "leaves": ByLeaves(LAYOUT, 2, tuple(TIED)),
}


@pytest.mark.parametrize("layout", SHARDINGS.values(), ids=SHARDINGS)
def test_replicas_and_holders_of_tied_parameters_count_once(layout: ShardLayout) -> None:
    sharding = ZeroSharding(layout, layout, layout, layout)

    def device(storage: Storage) -> jax.Array:
        stage, replica = jax.lax.axis_index("stage"), jax.lax.axis_index("data")
        # Replica 1 gives zeros, so this is what replica 0 has.
        shard = layout.reduce(stage, storage)
        return global_norm(TIED, sharding, layout.shard_kind(stage, replica), shard)

    given = [
        filled(LAYOUT, s, {n: x * (1 - r) for n, x in grads.items()})
        for s, grads in enumerate(GRADS)
        for r in (0, 1)
    ]
    found = on_devices(make_mesh(3, 2), device, given)
    np.testing.assert_allclose(found, [np.sqrt(SQUARES)] * 6, rtol=1e-6)


def test_half_precision_and_complex_gradients() -> None:
    layout = Layout(
        [{"half": struct(4, dtype=jnp.float16), "complex": struct(1, dtype=jnp.complex64)}]
    )
    replicated = Replicated(layout)
    sharding = ZeroSharding(*[replicated] * 4)
    given = [
        layout.pack(
            0,
            {
                "half": jnp.full(4, 300.0, jnp.float16),
                "complex": jnp.full(1, 3 + 4j, jnp.complex64),
            },
        )
    ]
    (found,) = on_devices(
        make_mesh(1, 1), lambda shard: global_norm({}, sharding, jnp.int32(0), shard), given
    )
    # 300 squared overflows float16.
    np.testing.assert_allclose(found, np.sqrt(4 * 300.0**2 + 25), rtol=1e-6)


def test_clipping_scales_down_to_the_limit_and_never_up() -> None:
    grads = {"x": jnp.array([3.0, 4.0]), "h": jnp.array([2.0], jnp.bfloat16)}
    half = clip_to(2.5, jnp.float32(5.0), grads)
    np.testing.assert_allclose(half["x"], [1.5, 2.0], rtol=1e-6)
    assert half["h"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(clip_to(10.0, jnp.float32(5.0), grads)["x"], grads["x"])
    assert clip_to(0.0, jnp.float32(5.0), grads) is grads


@pytest.mark.parametrize("norm", [0.0, 1e-8])
def test_gradients_smaller_than_what_guards_the_division_stay(norm: float) -> None:
    grads = {"x": jnp.asarray([-norm])}
    np.testing.assert_array_equal(clip_to(1.0, jnp.float32(norm), grads)["x"], grads["x"])
