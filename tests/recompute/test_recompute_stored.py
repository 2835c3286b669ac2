import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxpipe.recompute import RecomputeSettings, checkpoint, use_settings
from jaxpipe.recompute._stored import model_axis_size

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
    """Column- then row-parallel, with dropout on the hidden values that this device holds."""
    hidden = jnp.tanh(x @ weights["up"])
    hidden = hidden * jax.random.bernoulli(jax.random.fold_in(key, lax.axis_index("model")), 0.5, hidden.shape)
    return x + lax.psum(hidden @ weights["down"], "model")


def _run(settings: RecomputeSettings, mesh: Mesh, x: jax.Array, *, check_vma: bool) -> tuple[Any, list[int]]:
    """Loss and gradients of two recomputed blocks, and the sizes of what one device keeps of activations."""
    kept: list[int] = []
    specs = {"up": PartitionSpec(None, "model"), "down": PartitionSpec("model", None)}

    def loss(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        key = jax.random.key(7)
        for i in range(2):
            x = checkpoint(functools.partial(_block, weights), x, jax.random.fold_in(key, i))
        return jnp.sum(x**2)

    def step(weights: dict[str, jax.Array], x: jax.Array) -> Any:
        value, pullback = jax.vjp(loss, weights, x)
        shapes = {leaf.shape for leaf in jax.tree.leaves(weights)}
        leaves = [leaf for leaf in jax.tree.leaves(pullback) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
        kept.extend(leaf.size for leaf in leaves if leaf.ndim and leaf.shape not in shapes)
        return value, pullback(jnp.ones_like(value))

    with use_settings(settings):
        mapped = jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(specs, PartitionSpec()),
            out_specs=(PartitionSpec(), (specs, PartitionSpec())),
            check_vma=check_vma,
        )
        return jax.jit(mapped)(_weights(), x), kept


EVEN, UNEVEN = (12, WIDTH), (5, 3, WIDTH)


@pytest.mark.parametrize(
    ("settings", "num_model", "shape", "check_vma"),
    [
        pytest.param(PARTITION, 1, EVEN, False, id="nobody to share with"),
        pytest.param(PARTITION, 2, EVEN, False, id="2 shares"),
        pytest.param(PARTITION, 4, UNEVEN, False, id="4 uneven shares"),
        pytest.param(PARTITION, 2, EVEN, True, id="2 shares, checked"),
        pytest.param(PARTITION, 4, UNEVEN, True, id="4 uneven shares, checked"),
        pytest.param(BOTH, 4, EVEN, False, id="4 shares on the host"),
        pytest.param(BOTH, 4, UNEVEN, True, id="4 uneven shares on the host, checked"),
    ],
)
def test_shares_change_no_number(
    settings: RecomputeSettings, num_model: int, shape: tuple[int, ...], check_vma: bool
) -> None:
    x = jnp.linspace(-1.0, 1.0, int(np.prod(shape))).reshape(shape)
    mesh = _mesh(num_model)
    ours, kept = _run(settings, mesh, x, check_vma=check_vma)
    theirs, whole = _run(NONE, mesh, x, check_vma=check_vma)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), ours, theirs)
    share = -(-x.size // num_model)
    assert sorted(whole) == [x.size] * 3  # the inputs of both blocks, and of the square
    assert sorted(kept) == [share, share, x.size]


def _vary(x: jax.Array) -> jax.Array:
    return x * (1.0 + lax.axis_index("model"))


def test_a_checked_program_keeps_whole_what_differs_along_the_axis() -> None:
    x = jnp.linspace(0.1, 1.0, 8)

    def step(x: jax.Array, call: Callable[..., Any]) -> jax.Array:
        return jax.grad(lambda x: lax.psum(call(jnp.sin, _vary(x)).sum(), "model"))(x)

    def run(call: Callable[..., Any]) -> jax.Array:
        spec = PartitionSpec()
        return jax.shard_map(functools.partial(step, call=call), mesh=_mesh(2), in_specs=spec, out_specs=spec)(x)

    with use_settings(PARTITION):
        np.testing.assert_allclose(run(checkpoint), run(lambda f, x: f(x)), rtol=1e-6)


def test_in_a_checked_program_what_passes_unused_keeps_its_type() -> None:
    x = jnp.linspace(0.1, 1.0, 8)

    def step(x: jax.Array) -> jax.Array:
        def loss(x: jax.Array) -> jax.Array:
            y, same = checkpoint(lambda a, b: (jnp.sin(a), b), x, _vary(x))
            return lax.psum((y * same).sum(), "model")

        return jax.grad(loss)(x)

    with use_settings(PARTITION):
        spec = PartitionSpec()
        ours = jax.shard_map(step, mesh=_mesh(2), in_specs=spec, out_specs=spec)(x)
    np.testing.assert_allclose(ours, jax.grad(lambda x: (jnp.sin(x) * x * 3).sum())(x), rtol=1e-5)


def test_small_and_integer_inputs_stay_whole() -> None:
    sizes: list[tuple[int, ...]] = []

    def step(x: jax.Array) -> jax.Array:
        def loss(x: jax.Array) -> jax.Array:
            def scaled(x: jax.Array, i: jax.Array, s: jax.Array) -> jax.Array:
                return jnp.sin(x * i * s)

            return checkpoint(scaled, x, jnp.arange(1, 9), x.mean()).sum()

        value, pullback = jax.vjp(loss, x)
        sizes.extend(leaf.shape for leaf in jax.tree.leaves(pullback) if leaf.size != 1 or leaf.ndim == 0)
        return pullback(jnp.ones_like(value))[0]

    x, spec = jnp.linspace(0.1, 1.0, 8), PartitionSpec()
    with use_settings(PARTITION):
        ours = jax.shard_map(step, mesh=_mesh(4), in_specs=spec, out_specs=spec, check_vma=False)(x)
    expected = jax.grad(lambda x: jnp.sin(x * jnp.arange(1, 9) * x.mean()).sum())(x)
    np.testing.assert_allclose(ours, expected, rtol=1e-5)
    assert (8,) in sizes
    assert (2,) in sizes
    assert () in sizes


def test_without_the_axis_nothing_is_shared() -> None:
    with use_settings(PARTITION):
        _, pullback = jax.vjp(lambda x: checkpoint(lambda x: jnp.sin(jnp.sin(x)), x).sum(), jnp.ones(8))
    assert (8,) in [leaf.shape for leaf in jax.tree.leaves(pullback)]
    assert model_axis_size() == 1


def test_the_program_says_that_it_recomputes() -> None:
    def has_remat(jaxpr: Any) -> bool:
        inner = [getattr(p, "jaxpr", p) for eqn in jaxpr.eqns for p in eqn.params.values()]
        names = {eqn.primitive.name for eqn in jaxpr.eqns}
        return bool(names & {"remat2", "checkpoint", "remat"}) or any(has_remat(j) for j in inner if hasattr(j, "eqns"))

    with use_settings(RecomputeSettings(checkpoint_in_cpu=True)):
        assert has_remat(jax.make_jaxpr(lambda x: checkpoint(jnp.sin, x))(1.0).jaxpr)


def test_in_a_scan_over_simulated_devices() -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        def loss(w: jax.Array, x: jax.Array) -> jax.Array:
            def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
                return checkpoint(lambda x: jnp.tanh(x * w), x), None

            return lax.scan(body, x, None, length=3)[0].sum()

        return jax.grad(loss, argnums=(0, 1))(w, x)

    w, x, spec = jnp.linspace(0.5, 1.5, 8), jnp.linspace(0.1, 1.0, 8), PartitionSpec()

    def run(settings: RecomputeSettings) -> Any:
        with use_settings(settings):
            mapped = jax.shard_map(step, mesh=_mesh(2, 2), in_specs=spec, out_specs=spec, check_vma=False)
            return jax.jit(mapped)(w, x)

    for ours, theirs in zip(run(BOTH), run(NONE), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
