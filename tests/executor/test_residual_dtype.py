"""Residuals that wait in a narrower dtype than they are computed in."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _covering import slow_after
from _oracle import Case, cached_reference
from _tolerances import assert_close, assert_loss, tree_error

from jaxpipe import Pipeline
from jaxpipe.autodiff import Residuals

MICROBATCHES = 4
ROUNDING = 8 * 2.0**-9
"""A gradient passes eight layers, each of which multiplies with a value rounded to bfloat16 by at most 2**-9 of it."""


@functools.cache
def gradients(schedule: str, dtype: str | None, *, skip_idle: bool) -> tuple[Pipeline, float, Any]:
    settings = {"residual_dtype": dtype} if dtype else {}
    case = Case(schedule=schedule, microbatches=MICROBATCHES, skip_idle=skip_idle, settings=settings)
    pipeline = case.pipeline()
    metrics, storage, _ = pipeline.gradients(pipeline.init(), pipeline.place_batch(case.batch()))
    return pipeline, float(metrics["loss"]), jax.device_get(pipeline.params_tree(storage))


def ring_bytes(pipeline: Pipeline) -> int:
    leaves = jax.tree.leaves(pipeline._stages.residuals)
    return sum(x.size * x.dtype.itemsize for x in leaves if jnp.issubdtype(x.dtype, jnp.floating))


@pytest.mark.parametrize("schedule", slow_after(1, ["zero-bubble", "1f1b"]))
@pytest.mark.parametrize("skip_idle", slow_after(1, [False, True]))
def test_half_the_bytes_and_gradients_to_rounding(schedule: str, skip_idle: bool) -> None:
    wide, loss, grads = gradients(schedule, None, skip_idle=skip_idle)
    narrow, narrow_loss, narrow_grads = gradients(schedule, "bfloat16", skip_idle=skip_idle)
    assert ring_bytes(narrow) == ring_bytes(wide) / 2
    assert narrow_loss == loss  # forwards do not read what waits
    error, leaf = tree_error(narrow_grads, grads)
    assert 0 < error <= ROUNDING, (error, leaf)
    wanted_loss, wanted = cached_reference("linen", MICROBATCHES, 1)
    assert_loss(loss, wanted_loss)
    assert_close(grads, wanted)


@pytest.mark.parametrize("skip_idle", slow_after(1, [False, True]))
def test_nothing_is_rounded_that_is_not_wider(skip_idle: bool) -> None:
    _, loss, grads = gradients("1f1b", None, skip_idle=skip_idle)
    pipeline, same_loss, same = gradients("1f1b", "float32", skip_idle=skip_idle)
    assert same_loss == loss
    jax.tree.map(np.testing.assert_array_equal, same, grads)
    assert ring_bytes(pipeline) == ring_bytes(gradients("1f1b", None, skip_idle=skip_idle)[0])


def test_only_floating_values_are_rounded_and_their_size_is_what_it_is_in_the_ring() -> None:
    """Of `wide = cast(x)` and x, alike where nothing is rounded, both have the size of x in bfloat16."""

    def function(params: Any, x: Any, context: Any) -> Any:
        chosen, key = jnp.argsort(x["floats"][0]), context
        noise = jax.random.normal(key, x["floats"].shape)
        return (jnp.sin(x["floats"][:, chosen] @ params) * noise + x["complex"].real,), ()

    x = {"floats": jnp.ones((5, 5)), "complex": jnp.ones((5, 5), jnp.complex64)}
    structs = jax.eval_shape(lambda: (jnp.ones((5, 5)), x, jax.random.key(0)))
    wide, narrow = Residuals(function, *structs), Residuals(function, *structs, dtype="bfloat16")
    dtypes = {s.dtype for s in narrow.structs}
    assert jnp.dtype("float32") not in dtypes
    assert jnp.dtype("bfloat16") in dtypes
    assert [s.shape for s in narrow.structs] == [s.shape for s in wide.structs]
    others = [[s.dtype for s in r.structs if not jnp.issubdtype(s.dtype, jnp.floating)] for r in (wide, narrow)]
    assert others[0] == others[1]
    assert others[0]
