"""Training in bfloat16 and float16 against float32, and the loss scale."""

from itertools import product
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import sweep
from _models import DIM, LENGTH, MODELS
from _oracle import Case, sequential_model, whole_reference
from _settings import make_settings
from _tolerances import BFLOAT16, FLOAT16, assert_loss, tree_error

from jaxpipe import LayerSpec, PipeDataParallelTopology, Pipeline, PipelineModule
from jaxpipe.optim import LossScaler
from jaxpipe.topology import make_pipeline_mesh

SGD = optax.sgd(0.1, momentum=0.9)
STATIC = LossScaler(initial_scale=128.0)


class Mixed(Case):
    """A case whose layers compute in another dtype."""

    dtype = "bfloat16"

    def module(self) -> Any:
        return super().module().replace(compute_dtype=self.dtype)


class Half(Mixed):
    dtype = "float16"


def gradients(case: Case) -> tuple[Any, Any]:
    pipeline = case.pipeline()
    metrics, grads, _ = pipeline.gradients(pipeline.init(), case.batch())
    return float(metrics["loss"]), pipeline.params_tree(grads)


CASES = {
    "linen": {"stages": 4, "data": 2, "cut": "trunk"},
    "nnx": {"stages": 2, "data": 2, "cut": "front", "schedule": "gpipe"},
    "tied": {"stages": 4, "cut": "uniform", "interval": 1},
    "side": {"stages": 2, "scan_trunk": True},
    "tuple": {"stages": 4, "data": 2, "schedule": "train"},
    "reports": {"stages": 2, "data": 2},
    "dropout": {"stages": 4, "data": 2, "interval": 2},
    "weighted": {"stages": 2, "schedule": "split_by_turns"},
}


FIRST = [("linen", Mixed), ("reports", Half)]
REST = [pair for pair in product(CASES, (Mixed, Half)) if pair not in FIRST]


@pytest.mark.parametrize(("model", "kind"), sweep(len(FIRST), FIRST + REST, unpack=True))
def test_gradients_are_those_of_float32_to_the_dtypes_rounding(
    model: str, kind: type[Mixed]
) -> None:
    settings = {"loss_scaler": STATIC} if kind is Half else {}
    case = kind(model=model, settings=settings, **CASES[model])
    wanted = whole_reference(model, case.batch(), case.microbatches, case.data)
    loss, found = gradients(case)
    tolerance = FLOAT16 if kind is Half else BFLOAT16
    error, name = tree_error(found, wanted.grads)
    assert error <= tolerance, f"{name} is wrong by {error:.2e}"
    assert_loss(loss, wanted.loss, tolerance=tolerance)


@pytest.mark.parametrize("dtype", sweep(1, ["float16", "bfloat16"]))
def test_the_sequential_model_casts_alike(dtype: str) -> None:
    batch = Case(microbatches=2, data=1).batch()
    wanted = whole_reference("linen", batch, 2, 1)
    found = whole_reference("linen", batch, 2, 1, compute_dtype=dtype)
    assert 1e-5 < tree_error(found.grads, wanted.grads)[0] <= BFLOAT16


def test_masters_and_accumulators_are_float32_and_what_travels_is_not() -> None:
    pipeline = Mixed(stages=4, data=2, cut="trunk", optimizer=SGD).pipeline()
    for leaf in jax.tree.leaves((pipeline.states.struct.params, pipeline.states.struct.opt_state)):
        assert leaf.dtype == jnp.float32
    text = jax.make_jaxpr(pipeline.step)(
        pipeline.states.struct, pipeline.batches.struct
    ).pretty_print(use_color=False)
    sent = [line for line in text.splitlines() if "= ppermute" in line]
    assert sent
    assert all(":bf16[" in line.split("=")[0] for line in sent)


class TimedAttention(nn.Module):
    """Needs a time step to its last digit and takes float32's lowest number.

    Its stream is float32.
    """

    @nn.compact
    def __call__(self, carried: tuple[jax.Array, jax.Array], bias: jax.Array) -> Any:
        x, time = carried
        value = nn.Dense(DIM, dtype=jnp.bfloat16)(x)
        mixed = nn.softmax(0.1 * x @ x.swapaxes(1, 2) + bias) @ value.astype(jnp.float32)
        return x + 0.3 * jnp.sin(time)[:, None, None] * mixed, time


def timed(dtype: str | None, **settings: Any) -> PipelineModule:
    layers = [LayerSpec(TimedAttention) for _ in range(4)]
    return PipelineModule(
        layers, loss_fn=lambda y, t: jnp.mean((y[0] - t) ** 2), compute_dtype=dtype, **settings
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", sweep(1, ["bfloat16", "float16"]))
@pytest.mark.parametrize("schedule", sweep(1, ["zero-bubble", "1f1b"]))
def test_what_is_no_parameter_keeps_its_dtype(dtype: str, schedule: str) -> None:
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(2, 2, 2, LENGTH, DIM)).astype(np.float32)
    bias = np.zeros((2, 2, 1, LENGTH), np.float32)
    bias[:, 1] = np.finfo(np.float32).min  # the second sample is padding alone
    batch = (x, np.full((2, 2), [257.0, 2049.0], np.float32)), labels, {"bias": bias}
    first = jax.tree.map(lambda leaf: leaf[0], batch)

    topology = PipeDataParallelTopology(2, 1)
    module, mesh = timed(dtype, topology=topology), make_pipeline_mesh(topology)
    pipeline = Pipeline(module, optax.identity(), mesh, first, 2, make_settings(schedule=schedule))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(pipeline.trace.boundaries)} == {"float32"}
    state = pipeline.init()
    params = pipeline.params_tree(state.params)
    metrics, storage, _ = pipeline.gradients(state, batch)

    def loss_of(model: PipelineModule) -> Any:
        def loss(params: Any) -> jax.Array:
            each = [jax.tree.map(lambda leaf, m=m: leaf[m], batch) for m in range(2)]
            return jnp.mean(
                jnp.stack([model.loss(model.apply(params, x, side=side), y) for x, y, side in each])
            )

        return loss

    for model in (timed(None, num_stages=1), timed(dtype, num_stages=1)):
        loss, grads = jax.jit(jax.value_and_grad(loss_of(model)))(params)
        assert_loss(metrics["loss"], loss, tolerance=BFLOAT16)
        assert_loss(pipeline.evaluate(state, batch)["loss"], loss, tolerance=BFLOAT16)
        assert tree_error(pipeline.params_tree(storage), jax.device_get(grads))[0] <= BFLOAT16


@pytest.mark.slow
def test_accumulating_in_bfloat16_when_asked() -> None:
    pipeline = Mixed(stages=2, settings={"grad_accum_dtype": "bfloat16"}).pipeline()
    _, grads, _ = pipeline.gradients(pipeline.init(), Case(stages=2).batch())
    wanted = whole_reference("linen", Case(stages=2).batch(), 3, 1).grads
    assert 1e-4 < tree_error(pipeline.params_tree(grads), wanted)[0] <= BFLOAT16


def run(case: Case, steps: int) -> tuple[Any, list[dict[str, Any]], list[Any]]:
    pipeline = case.pipeline()
    state, seen, params = pipeline.init(), [], []
    for step in range(steps):
        state, metrics = pipeline.step(state, case.batch(seed=step))
        seen.append(jax.device_get(metrics))
        params.append(pipeline.params_tree(state.params))
    return jax.device_get(state), seen, params


@pytest.mark.parametrize("zero_stage", sweep(1, [1, 0]))
@pytest.mark.parametrize(
    ("stages", "data", "model"), sweep(1, [(1, 2, "linen"), (4, 2, "tied")], unpack=True)
)
def test_an_overflow_anywhere_holds_everything(
    stages: int, data: int, model: str, zero_stage: int
) -> None:
    scaler = LossScaler(initial_scale=2.0**24, dynamic=True, window=3, hysteresis=1)
    settings = {"loss_scaler": scaler, "zero_stage": zero_stage, "gradient_clipping": 1.0}
    case = Half(model=model, stages=stages, data=data, optimizer=SGD, settings=settings)
    state, seen, params = run(case, 14)
    overflows = [bool(m["overflow"]) for m in seen]
    assert overflows[0]
    assert not all(overflows)
    assert int(state.skipped_steps) == sum(overflows)
    assert int(state.step) == 14
    replay = scaler.init()
    for step, overflow in enumerate(overflows):
        assert float(seen[step]["loss_scale"]) == float(replay.scale)
        replay = scaler.update(replay, jnp.asarray(overflow))
        before = sequential_model(model).params if step == 0 else params[step - 1]
        same = [
            np.array_equal(a, b)
            for a, b in zip(*map(jax.tree.leaves, (before, params[step])), strict=True)
        ]
        assert all(same) == overflow
    assert float(state.loss_scale.scale) == float(replay.scale)


@pytest.mark.slow
def test_a_static_scale_changes_nothing_but_rounding() -> None:
    scaled = Half(stages=2, data=2, optimizer=SGD, settings={"loss_scaler": STATIC})
    _, seen, params = run(scaled, 3)
    plain = Half(stages=2, data=2, optimizer=SGD)
    _, others, wanted = run(plain, 3)
    assert not any(bool(m["overflow"]) for m in seen)
    assert tree_error(params[-1], wanted[-1])[0] <= FLOAT16
    for one, other in zip(seen, others, strict=True):
        assert_loss(one["grad_norm"], other["grad_norm"], tolerance=FLOAT16)


@pytest.mark.soak
def test_every_layout_gives_the_same_losses() -> None:
    cases = [
        Mixed(model="dropout", stages=1, data=2, optimizer=SGD),
        Mixed(
            model="dropout",
            stages=4,
            data=2,
            cut="trunk",
            interval=1,
            optimizer=SGD,
            settings={"zero_stage": 1},
        ),
    ]
    losses = [[float(m["loss"]) for m in run(case, 3)[1]] for case in cases]
    assert_loss(losses[0], losses[1], tolerance=BFLOAT16)
    assert MODELS["dropout"].is_random
