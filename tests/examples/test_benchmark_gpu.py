import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _run_example import run_benchmark
from _tolerances import assert_close, assert_loss

from jaxpipe.forecast import HARDWARE

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # benchmarks are no part of the installed package

from benchmarks.gpu.__main__ import measure_apart  # noqa: E402
from benchmarks.gpu._one_stage import OneStage  # noqa: E402
from benchmarks.gpu._parts import PARTS, TINY  # noqa: E402
from benchmarks.gpu_program._jobs import SMOKE, Job  # noqa: E402

pytestmark = pytest.mark.usefixtures("promoting")
JOB = replace(SMOKE["1f1b"], num_microbatches=4)


@pytest.fixture
def promoting() -> Iterator[None]:
    """The jobs' layers add biases and scales as users' do."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.soak
def test_the_only_stage_of_a_pipeline_computes_what_the_pipeline_does() -> None:
    job = replace(JOB, stages=1)
    pipeline = job.pipeline(jax.devices()[:1])
    state = pipeline.init()
    tokens = np.random.default_rng(0).integers(0, job.vocab, (2, 4, 1, job.time), np.int32)
    batch = jax.tree.map(jnp.asarray, (*tokens, {}))
    one = OneStage(job, HARDWARE["h100"])
    struct = jax.tree.structure(one.structs[2])
    given = jax.tree.unflatten(struct, jax.tree.leaves(batch))
    # Copies on no mesh.
    alone = jax.tree.map(
        lambda x: jnp.array(x) if _is_key(x) else jnp.asarray(np.asarray(x)), state
    )
    found, metrics = one.step(jnp.int32(0), alone, given)
    asked, asked_metrics = pipeline.step(state, batch)
    assert_loss(metrics["loss"], asked_metrics["loss"])
    assert_close(found.params, asked.params)


def _is_key(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


@pytest.mark.soak
@pytest.mark.parametrize(
    "job", [JOB, pytest.param(replace(JOB, split_vocab=True), marks=pytest.mark.slow)]
)
def test_a_stage_has_the_products_of_the_pipeline_and_no_collectives(job: Job) -> None:
    one = OneStage(job, HARDWARE["h100"])
    alone = one.step.lower(*one.structs).as_text()
    structs = one.pipeline.states.struct, one.pipeline.batches.struct
    whole = str(jax.make_jaxpr(one.pipeline.step)(*structs))
    assert "collective" not in alone
    assert "all_reduce" not in alone
    assert alone.count("stablehlo.dot_general") == whole.count("dot_general[")


@pytest.mark.soak
def test_every_part_finds_something() -> None:
    printed = run_benchmark("gpu", "--smoke")
    head = "| what | found | expected of an H100 |\n|---|---|---|\n| "
    assert all(f"\n{part}\n\n{head}" in printed for part in PARTS if part != "beside")


@pytest.mark.soak
def test_a_middle_stage_does_not_multiply_zeros() -> None:
    job = replace(JOB, blocks=4, stages=4)
    one = OneStage(job, HARDWARE["h100"])
    _, metrics = one.step(jnp.int32(1), *one.example(job.vocab))
    assert 0 < metrics["grad_norm"] < 1e6


@pytest.mark.soak
def test_a_case_has_a_process_of_its_own() -> None:
    rows = measure_apart("env", "", TINY)
    assert [row.what for row in rows][:2] == ["devices", "JAX"]


@pytest.mark.slow
def test_without_a_gpu_it_says_so() -> None:
    printed = run_benchmark("gpu", status=2)
    assert "default backend must be a GPU, but got 'cpu'" in printed
