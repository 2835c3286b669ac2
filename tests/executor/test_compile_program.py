"""Programs of simulated devices are compiled apart from JAX's cache on disk."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.executor import compile_program, without_cache


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
        compile_program(jax.jit(jnp.sum), jax.device_put(jnp.ones(8), NamedSharding(mesh, P("data"))))
        assert not jax.config.jax_enable_compilation_cache
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
