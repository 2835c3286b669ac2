"""Sums over manual axes: values, dtypes and gradients, beside axes that are left to XLA."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxpipe.core.planner import absent_devices
from jaxpipe.distributed.topology import broadcast_sum, scatter_sum, sum_over
from jaxpipe.forecast import HARDWARE

PLACES = 2
SUMS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "sum_over": lambda x: sum_over(x, "data"),
    "broadcast_sum": lambda x: broadcast_sum(x, "data"),
    "scatter_sum": lambda x: scatter_sum(x, "data")[None],
}


def over_places(function: Callable[[jax.Array], jax.Array], mesh: Any) -> Callable[..., Any]:
    """Run a function on each place of `data`, beside an automatic axis."""
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        axis_names={"data"},
        check_vma=False,
    )


def mesh_of(devices: Any) -> Mesh:
    grid = np.asarray(devices, object)[: 2 * PLACES].reshape(PLACES, 2)
    return Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize("name", SUMS)
def test_sums_beside_an_automatic_axis(name: str) -> None:
    function = jax.jit(over_places(SUMS[name], mesh_of(jax.devices())))
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.int32, jnp.complex64):
        values = np.arange(2.0 * PLACES * PLACES).reshape(PLACES * PLACES, 2)
        values = values * (1 + 2j) if dtype == jnp.complex64 else values
        found = function(jnp.asarray(values, dtype))
        total = values.reshape(PLACES, PLACES, 2).sum(0)
        assert found.dtype == dtype
        wanted = total if name == "scatter_sum" else np.tile(total, (PLACES, 1))
        np.testing.assert_array_equal(found, wanted, err_msg=str(dtype))


@pytest.mark.parametrize("name", SUMS)
def test_gradients_of_sums_of_bfloat16(name: str) -> None:
    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(SUMS[name](x).astype(jnp.float32) ** 2)

    x = jnp.ones((PLACES * PLACES, 2), jnp.bfloat16)
    found = jax.jit(over_places(jax.grad(loss), mesh_of(jax.devices())))(x)
    assert found.dtype == jnp.bfloat16
    # Each place differentiates the sum of all places' losses.
    wanted = 2.0 * PLACES * (1 if name == "scatter_sum" else PLACES)
    np.testing.assert_array_equal(found.astype(jnp.float32), wanted)


@pytest.mark.parametrize("name", SUMS)
def test_on_other_devices_bfloat16_is_added_as_it_is(name: str) -> None:
    x = jax.ShapeDtypeStruct((PLACES * PLACES, 2), jnp.bfloat16)
    absent = mesh_of(absent_devices(HARDWARE["h200"], 2 * PLACES))
    unknown = AbstractMesh((PLACES, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    for mesh in (absent, unknown):
        assert "f32" not in str(jax.make_jaxpr(over_places(SUMS[name], mesh))(x))
    here = jax.make_jaxpr(over_places(SUMS[name], mesh_of(jax.devices())))(x)
    assert "f32" in str(here)


@pytest.mark.parametrize("name", SUMS)
def test_complex_numbers_are_added_as_their_parts(name: str) -> None:
    """XLA refuses some sums of them for TPUs."""
    x = jax.ShapeDtypeStruct((PLACES * PLACES, 2), jnp.complex64)
    absent = mesh_of(absent_devices(HARDWARE["v5e"], 2 * PLACES))
    lines = str(jax.make_jaxpr(over_places(SUMS[name], absent))(x)).splitlines()
    sums = [line for line in lines if "= psum" in line or "= reduce_scatter" in line]
    assert sums
    assert not any("c64" in line.split("=")[0] for line in sums)
