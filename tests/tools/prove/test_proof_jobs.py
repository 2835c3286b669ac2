"""The job that is proved: its axes, sizes and replicas follow from the user's."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _faults import after, scaled
from _models import ALL_MODELS, DIM, MICROBATCH, Model

import jaxpipe
from jaxpipe import PipelineModule, ProcessTopology
from jaxpipe.core.executor._sums import GradientSums
from jaxpipe.core.state import ZeroSharding
from jaxpipe.errors import LayerError
from jaxpipe.layers import LayerSpec
from jaxpipe.losses import cross_entropy as token_losses
from jaxpipe.tools.prove import prove
from jaxpipe.tools.prove._job import OWN, Job
from jaxpipe.tools.prove._prove import made_job

SIZES = {"train_micro_batch_size_per_gpu": MICROBATCH, "gradient_accumulation_steps": 4}
ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}


def arguments(name: str, config: dict[str, Any], **axes: int) -> tuple[PipelineModule, Any, Any]:
    """A job whose topology has 2 stages and these further axes."""
    known: Model = ALL_MODELS[name]
    example = jax.tree.map(lambda x: x[0], known.batch(np.random.default_rng(0), 1, 8))
    topology = ProcessTopology(["pipe", *axes], [2, *axes.values()])
    module = PipelineModule(known.layers(), topology=topology, loss_fn=known.loss_fn)
    return module, {**SIZES, **ADAMW, **config}, example


def job_of(name: str, config: dict[str, Any], **axes: int) -> Job:
    return made_job(*arguments(name, config, **axes)).job


def test_axes_of_the_topology_are_short() -> None:
    job = job_of("linen", {}, data=4, model=8)
    assert dict(job.mesh.shape) == {"stage": 2, "data": 2, "model": 2}
    assert job.module.automatic_axes == ("model",)
    module, config, example = arguments("linen", {}, data=2, model=9)
    assert made_job(module, config, example, axes={"model": 1}).job.mesh.shape["model"] == 1
    with pytest.raises(jaxpipe.errors.TopologyError, match="'model': 3.*8 devices"):
        made_job(module, config, example)


def test_replicas_along_fsdp_compute_a_microbatch_together() -> None:
    job = job_of("linen", {"zero_optimization": {"stage": 2}}, data=4)
    assert (job.num_replicas, job.num_samples, job.num_terms) == (1, 2 * MICROBATCH, 10)
    job = job_of("linen", {"zero_optimization": {"stage": 1}}, data=4)
    assert (job.num_replicas, job.num_samples, job.num_terms) == (3, 3 * MICROBATCH, 15)


@pytest.mark.parametrize("given", [1, 2, 4, 7, 8, 64])
def test_the_number_of_microbatches_is_odd_and_no_power_of_two(given: int) -> None:
    job = job_of("linen", {"gradient_accumulation_steps": given})
    assert job.num_microbatches in (3, 5)


@pytest.mark.slow
def test_both_precisions_have_one_plan() -> None:
    job = job_of("tied", {"pipeline": {"schedule": "auto"}})
    assert job.finest.is_double
    with job.finest.enabled():
        double = job.pipeline(job.finest)
    own = job.pipeline(OWN)
    assert own.plan.config.pipeline.schedule != "auto"
    assert (double.plan.parts, double.plan.config.pipeline) == (
        own.plan.parts,
        own.plan.config.pipeline,
    )


@pytest.mark.parametrize(
    ("sizes", "size"),
    [
        ({"train_batch_size": 8 * 4 * MICROBATCH, **SIZES}, MICROBATCH),
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 8}, 8),
        ({"train_batch_size": 24, "gradient_accumulation_steps": 3}, 2),
        ({"train_batch_size": 1}, 1),
    ],
    ids=["of 8 replicas", "of 3 replicas", "without a microbatch size", "of one sample"],
)
def test_the_batch_of_other_replicas_is_no_error(sizes: dict[str, int], size: int) -> None:
    module, _, example = arguments("linen", {}, data=8)
    assert made_job(module, {**ADAMW, **sizes}, example).job.microbatch_size == size


def test_narrowing_hides_no_error_of_the_users() -> None:
    block = nn.Dense(DIM)  # one instance at two places
    module = PipelineModule(
        [block, LayerSpec(nn.Dense, DIM), block], 2, loss_fn=lambda y, t: ((y - t) ** 2).mean()
    )
    x = np.ones((4, DIM), np.float32)
    with pytest.raises(LayerError, match=r"2_Dense.*instance of its own"):
        prove(module, {**SIZES, **ADAMW}, (x, x))


@pytest.mark.parametrize(
    ("name", "stage", "only"),
    [
        pytest.param("dropout", 2, ("numbers",), marks=pytest.mark.soak),
        pytest.param("norm", 3, ("numbers", "state"), marks=pytest.mark.soak),
    ],
    ids=["dropout", "batch statistics"],
)
def test_a_job_with_zero_and_a_topology_is_proved(name: str, stage: int, only: Any) -> None:
    config = {"zero_optimization": {"stage": stage}}
    found = prove(*arguments(name, config, data=4), only=only)
    assert found.holds, str(found)


SPLIT = {"pipeline": {"split_vocabulary": True, "schedule": "1f1b"}}


def language_model(loss_fn: Any = token_losses, *between: Any) -> tuple[PipelineModule, Any, Any]:
    """A job whose vocabulary can be split."""
    layers = [nn.Embed(16, DIM), *between, *[LayerSpec(nn.Dense, DIM)] * 2, nn.Dense(16)]
    tokens = np.random.default_rng(0).integers(0, 16, (2, 8, 6)).astype(np.int32)
    module = PipelineModule(layers, 2, loss_fn=loss_fn)
    return module, {**SIZES, **ADAMW, **SPLIT}, (*tokens,)


@pytest.mark.slow
def test_a_split_vocabulary_is_proved_in_float64() -> None:
    (claim,) = prove(*language_model(), only=("numbers",)).claims
    assert claim.holds, str(claim)
    assert "narrower than float64" not in claim.figures


@pytest.mark.soak
def test_a_fault_beside_a_split_vocabulary_is_named() -> None:
    with after(GradientSums, "add_trunk", lambda found, *_: scaled(found, 2.0))():
        found = prove(*language_model(), only=("numbers",))
    assert any("layer 2_Dense" in str(finding) for finding in found.findings), str(found)


@jax.custom_vjp
def clipped(x: jax.Array) -> jax.Array:
    """The identity, whose gradient is clipped."""
    return x


clipped.defvjp(lambda x: (x, None), lambda _, grad: (jnp.clip(grad, -1e-3, 1e-3),))


def odd_tokens(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A weighted loss: microbatches have different numbers of odd labels."""
    return token_losses(logits, jnp.where(labels % 2 == 1, labels, -100))


@pytest.mark.soak
def test_a_backward_that_clips_is_proved_where_microbatches_have_weights() -> None:
    job = language_model(odd_tokens, clipped)
    assert prove(job[0], {**job[1], "pipeline": {}}, job[2], only=("numbers", "weights")).holds


def first_leaf(found: Any, *_: Any) -> Any:
    leaves, structure = jax.tree.flatten(found)
    return jax.tree.unflatten(structure, [scaled(leaves[0], 1.01), *leaves[1:]])


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(BF16, marks=pytest.mark.slow, id="bf16"),
        pytest.param(FP16, marks=pytest.mark.soak, id="fp16"),
        pytest.param(
            {**BF16, "zero_optimization": {"stage": 3}}, marks=pytest.mark.soak, id="zero 3"
        ),
        pytest.param(
            {**BF16, "data_types": {"grad_accum_dtype": "bf16"}},
            marks=pytest.mark.soak,
            id="sums in bf16",
        ),
    ],
)
def test_one_percent_of_one_leaf_is_refused_in_all_dtypes(config: dict[str, Any]) -> None:
    with after(ZeroSharding, "reduce_gradients", first_leaf)():
        found = prove(*arguments("linen", config, data=2), only=("numbers",))
    assert not found.holds
    assert any("gradient/" in finding.text for finding in found.findings), str(found)
