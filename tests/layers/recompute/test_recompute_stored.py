import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _covering import sweep
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpipe.layers.recompute import RecomputeSettings, checkpoint, use_settings
from jaxpipe.layers.recompute._stored import model_axis_size

PARTITION = RecomputeSettings(partition_activations=True)
BOTH = RecomputeSettings(partition_activations=True, checkpoint_in_cpu=True)
NONE = RecomputeSettings()
WIDTH, HIDDEN = 6, 8


def _mesh(num_model: int, num_data: int = 1) -> Mesh:
    return jax.make_mesh((num_data, num_model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def _weights() -> dict[str, jax.Array]:
    up, down = jax.random.split(jax.random.key(0))
    return {
        "up": jax.random.normal(up, (WIDTH, HIDDEN)) / WIDTH**0.5,
        "down": jax.random.normal(down, (HIDDEN, WIDTH)) / HIDDEN**0.5,
    }


def _block(weights: dict[str, jax.Array], x: jax.Array, key: jax.Array) -> jax.Array:
    """Column- then row-parallel, with dropout on the hidden values."""
    hidden = jnp.tanh(x @ weights["up"])
    hidden = lax.with_sharding_constraint(hidden, PartitionSpec(*(None,) * (x.ndim - 1), "model"))
    hidden = hidden * jax.random.bernoulli(key, 0.5, hidden.shape)
    return x + lax.with_sharding_constraint(hidden @ weights["down"], PartitionSpec())


def _on(mesh: Mesh, step: Callable[..., Any]) -> Callable[..., Any]:
    """A program with manual replicas and an automatic axis `model`."""
    whole = PartitionSpec()
    return jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=whole, out_specs=whole, axis_names={"data"}, check_vma=False
        )
    )


def _kept(pullback: Any, names: Sequence[str] = ()) -> list[tuple[int, ...]]:
    """Shapes of what one device keeps of activations for a backward pass."""
    leaves = [
        leaf
        for leaf in jax.tree.leaves(pullback)
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and leaf.ndim
    ]
    return [leaf.sharding.shard_shape(leaf.shape) for leaf in leaves if leaf.shape not in names]


def _run(
    settings: RecomputeSettings, mesh: Mesh, x: jax.Array
) -> tuple[Any, list[tuple[int, ...]]]:
    """Loss and gradients of two recomputed blocks.

    Also the shapes of what one device keeps of activations.
    """
    specs = {"up": PartitionSpec(None, "model"), "down": PartitionSpec("model", None)}
    weights = {
        name: jax.device_put(w, NamedSharding(mesh, specs[name])) for name, w in _weights().items()
    }

    def loss(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        key = jax.random.key(7)
        for i in range(2):
            x = checkpoint(functools.partial(_block, weights), x, jax.random.fold_in(key, i))
        return jnp.sum(x**2)

    with use_settings(settings):
        value, pullback = _on(mesh, lambda weights, x: jax.vjp(loss, weights, x))(weights, x)
        grads = _on(mesh, lambda pullback: pullback(1.0))(pullback)
    return (value, grads), _kept(pullback, [w.shape for w in weights.values()])


EVEN, UNEVEN = (12, WIDTH), (5, 3, WIDTH)


@pytest.mark.parametrize(
    ("settings", "num_model", "shape", "share"),
    sweep(
        3,
        [
            pytest.param(
                PARTITION, 2, UNEVEN, (5, 3, WIDTH // 2), id="2 shares of the dim that 2 divides"
            ),
            pytest.param(PARTITION, 4, UNEVEN, UNEVEN, id="no dim that 4 divides"),
            pytest.param(BOTH, 4, EVEN, (3, WIDTH), id="4 shares on the host"),
            pytest.param(PARTITION, 1, EVEN, EVEN, id="nobody to share with"),
            pytest.param(PARTITION, 2, EVEN, (6, WIDTH), id="2 shares"),
        ],
        unpack=True,
    ),
)
def test_shares_change_no_number(
    settings: RecomputeSettings, num_model: int, shape: tuple[int, ...], share: tuple[int, ...]
) -> None:
    x = jnp.linspace(-1.0, 1.0, int(np.prod(shape))).reshape(shape)
    mesh = _mesh(num_model)
    ours, kept = _run(settings, mesh, x)
    theirs, whole = _run(NONE, mesh, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), ours, theirs)
    assert whole == [shape] * 3  # the inputs of both blocks, and of the square
    assert kept[:2] == [share, share]  # the partitioner may keep the other one so too


def test_small_and_integer_inputs_stay_whole() -> None:
    def step(x: jax.Array) -> Any:
        def loss(x: jax.Array) -> jax.Array:
            def scaled(x: jax.Array, i: jax.Array, s: jax.Array) -> jax.Array:
                return jnp.sin(x * i * s)

            return checkpoint(scaled, x, jnp.arange(1, 9), x.mean()).sum()

        return jax.vjp(loss, x)[1]

    x = jnp.linspace(0.1, 1.0, 8)
    with use_settings(PARTITION):
        pullback = _on(_mesh(4), step)(x)
        ours = _on(_mesh(4), lambda pullback: pullback(1.0)[0])(pullback)
    expected = jax.grad(lambda x: jnp.sin(x * jnp.arange(1, 9) * x.mean()).sum())(x)
    np.testing.assert_allclose(ours, expected, rtol=1e-5)
    kept = [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(pullback)]
    assert {(8,), (2,), ()} <= set(kept)


def test_in_a_shard_map_of_its_own_nothing_is_shared() -> None:
    x, spec = jnp.linspace(0.1, 1.0, 8), PartitionSpec("model")

    def step(x: jax.Array) -> jax.Array:
        return jax.shard_map(
            lambda x: checkpoint(jnp.sin, x), in_specs=spec, out_specs=spec, axis_names={"model"}
        )(x)

    with use_settings(PARTITION):
        ours = _on(_mesh(2), jax.grad(lambda x: step(x).sum()))(x)
    np.testing.assert_allclose(ours, jnp.cos(x), rtol=1e-6)


def test_without_the_axis_nothing_is_shared() -> None:
    with use_settings(PARTITION):
        _, pullback = jax.vjp(
            lambda x: checkpoint(lambda x: jnp.sin(jnp.sin(x)), x).sum(), jnp.ones(8)
        )
    assert (8,) in [leaf.shape for leaf in jax.tree.leaves(pullback)]
    assert model_axis_size() == 1


def test_the_program_says_that_it_recomputes() -> None:
    def has_remat(jaxpr: Any) -> bool:
        inner = [getattr(p, "jaxpr", p) for eqn in jaxpr.eqns for p in eqn.params.values()]
        names = {eqn.primitive.name for eqn in jaxpr.eqns}
        return bool(names & {"remat2", "checkpoint", "remat"}) or any(
            has_remat(j) for j in inner if hasattr(j, "eqns")
        )

    with use_settings(RecomputeSettings(checkpoint_in_cpu=True)):
        assert has_remat(jax.make_jaxpr(lambda x: checkpoint(jnp.sin, x))(1.0).jaxpr)


def test_in_a_scan_over_simulated_devices() -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        def loss(w: jax.Array, x: jax.Array) -> jax.Array:
            def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
                return checkpoint(lambda x: jnp.tanh(x * w), x), None

            return lax.scan(body, x, None, length=3)[0].sum()

        return jax.grad(loss, argnums=(0, 1))(w, x)

    w, x = jnp.linspace(0.5, 1.5, 8), jnp.linspace(0.1, 1.0, 8)

    def run(settings: RecomputeSettings) -> Any:
        with use_settings(settings):
            return _on(_mesh(2, 2), step)(w, x)

    for ours, theirs in zip(run(BOTH), run(NONE), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
