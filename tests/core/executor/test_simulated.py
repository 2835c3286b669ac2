"""Programs of simulated devices.

Apart from JAX's cache on disk, and refused where they would wait for ever.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _refusals import assert_refused
from _settings import make_settings
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe import LayerSpec, PipeDataParallelTopology, Pipeline, PipelineModule
from jaxpipe.core.executor import (
    compile_checked,
    compile_program,
    is_checked,
    loops_idle,
    waits_in_branches,
    without_cache,
)
from jaxpipe.core.planner import AbsentDevice
from jaxpipe.errors import LayerError
from jaxpipe.topology import make_pipeline_mesh

Computing = Callable[[jax.Array], jax.Array]


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """JAX's cache in a folder of its own."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def written(folder: Path) -> set[str]:
    return {path.name.partition("-")[0] for path in folder.iterdir()} - {".lockfile"}


def test_a_program_for_one_device_comes_from_it(cache: Path) -> None:
    def alone(x: jax.Array) -> jax.Array:
        return x * 3.0

    compile_program(jax.jit(alone), jnp.ones(5))
    assert "jit_alone" in written(cache)


def test_a_program_for_several_does_not_and_others_do_again(cache: Path) -> None:
    def several(x: jax.Array) -> jax.Array:
        return x.sum()

    def after(x: jax.Array) -> jax.Array:
        return x - 3.0

    mesh = jax.make_mesh((4,), ("data",))
    jitted, x = jax.jit(several), jax.device_put(jnp.ones(8), NamedSharding(mesh, P("data")))
    compile_program(jitted, x)
    assert float(jitted(x)) == 8.0
    assert "jit_several" not in written(cache)
    jax.jit(after)(jnp.ones(5))
    assert "jit_after" in written(cache)


def test_no_thread_switches_it_on_for_another(cache: Path) -> None:
    def is_on_inside(number: int) -> bool:
        with without_cache():
            time.sleep(0.01 * number)
            return jax.config.jax_enable_compilation_cache

    with ThreadPoolExecutor(4) as pool:
        assert not any(pool.map(is_on_inside, range(4)))
    assert jax.config.jax_enable_compilation_cache


def test_a_cache_that_is_off_stays_off() -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        mesh = jax.make_mesh((2,), ("data",))
        compile_program(
            jax.jit(jnp.sum), jax.device_put(jnp.ones(8), NamedSharding(mesh, P("data")))
        )
        assert not jax.config.jax_enable_compilation_cache
    finally:
        jax.config.update("jax_enable_compilation_cache", True)


def query_key_value(x: jax.Array) -> jax.Array:
    """Cuts in three what `model` divides in two: parts of it must move to the other device."""
    query, key, value = jnp.split(x, 3, -1)
    return (query * key + value).sum(-1)


def row_sums(x: jax.Array) -> jax.Array:
    """Summed over `model` by an all-reduce, which goes by groups of devices."""
    return x.sum(-1)


def nothing(x: jax.Array) -> jax.Array:
    return jnp.zeros(x.shape[0])


def in_a_branch(compute: Computing, x: jax.Array) -> jax.Array:
    return jax.lax.cond(jax.lax.axis_index("stage") == 0, compute, nothing, x)


def in_one_of_three(compute: Computing, x: jax.Array) -> jax.Array:
    return jax.lax.switch(jax.lax.axis_index("stage"), [nothing, compute, nothing], x)


def in_a_loop_in_a_branch(compute: Computing, x: jax.Array) -> jax.Array:
    def repeated(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 3, lambda i, y: y + compute(x + i), nothing(x))

    return in_a_branch(repeated, x)


def beside_a_branch(compute: Computing, x: jax.Array) -> jax.Array:
    return compute(x) + in_a_branch(row_sums, x)


def compile_for_two_stages(
    place: Callable[[Computing, jax.Array], jax.Array], compute: Computing
) -> None:
    mesh = jax.make_mesh((2, 2), ("stage", "model"))
    x = jax.device_put(jnp.ones((2, 12)), NamedSharding(mesh, P(None, "model")))
    function = jax.shard_map(
        lambda x: place(compute, x),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(),
        axis_names={"stage"},
        check_vma=False,
    )
    compile_checked(jax.jit(function), mesh, x)


@pytest.mark.parametrize("place", [in_a_branch, in_one_of_three, in_a_loop_in_a_branch])
def test_slices_that_move_in_a_branch_are_refused(place: Any) -> None:
    words = "must not cut ... but got 2 slices ... the first for ... split ... constrain"
    assert_refused(LayerError, words, compile_for_two_stages, place, query_key_value)


@pytest.mark.parametrize(
    ("place", "compute"),
    [
        (beside_a_branch, query_key_value),
        (in_a_branch, row_sums),
        (in_a_loop_in_a_branch, row_sums),
    ],
)
def test_slices_outside_of_branches_and_sums_inside_are_not(place: Any, compute: Computing) -> None:
    compile_for_two_stages(place, compute)


def test_only_automatic_axes_have_collectives_that_may_wait() -> None:
    """Idle actions are skipped by loops where there are none."""
    plain = jax.make_mesh((2, 2), ("stage", "data"))
    automatic = jax.make_mesh((2, 1, 2), ("stage", "data", "model"))
    assert [waits_in_branches(mesh) for mesh in (plain, automatic)] == [False, True]
    assert [loops_idle(mesh) for mesh in (plain, automatic)] == [True, False]


def test_gpus_are_checked_where_stages_share_a_process() -> None:
    def mesh(devices_per_process: int, shape: tuple[int, ...], platform: str = "gpu") -> Mesh:
        devices = [AbsentDevice(i, i // devices_per_process, "any", platform) for i in range(8)]
        return Mesh(
            np.array(devices).reshape(shape),
            ("stage", "data", "model"),
            axis_types=(AxisType.Auto,) * 3,
        )

    alone, shared, stage_each = (mesh(size, (2, 1, 4)) for size in (1, 8, 4))
    assert [is_checked(each) for each in (alone, shared, stage_each)] == [False, True, False]
    assert not is_checked(mesh(8, (2, 1, 4), "tpu"))
    # Idle actions are skipped all the same: such a program is the exception.
    assert not waits_in_branches(shared)


class Rolled(nn.Module):
    """Gives each sample what the one before it computes, which may lie on another device."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.roll(nn.Dense(4)(x), 1, axis=0)


def test_the_axis_that_zero_makes_is_an_automatic_one() -> None:
    topology = PipeDataParallelTopology(2, 2)
    layers = [LayerSpec(Rolled) for _ in range(2)]
    module = PipelineModule(layers, topology=topology, loss_fn=lambda y, t: jnp.mean((y - t) ** 2))
    x = np.ones((2, 4, 4), np.float32)
    settings = make_settings(zero_stage=2, skip_idle=True)
    mesh = make_pipeline_mesh(topology)
    pipeline = Pipeline(module, optax.sgd(0.1), mesh, (x[0], x[0]), len(x), settings)
    # Run, such a program ends the process.
    assert not pipeline.plan.idle.loops
    with pytest.raises(LayerError, match="slices that are moved from device to device"):
        pipeline.step(pipeline.init(), (x, x))
