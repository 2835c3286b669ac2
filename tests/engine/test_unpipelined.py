"""Forward, backward and step of a plain model, against one device and against whole batches."""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import sweep
from _models import bend
from _refusals import assert_refused
from _tolerances import BFLOAT16, FLOAT16, GRADIENT, assert_close, assert_loss, tree_error
from flax import nnx

import jaxpipe
from jaxpipe import LayerSpec, PipeDataParallelTopology, PipelineEngine
from jaxpipe.config import load_config
from jaxpipe.core.pipeline import choose_optimizer, configure_model
from jaxpipe.engine._unpipelined import UnpipelinedEngine, as_one_stage
from jaxpipe.errors import DataError, LayerError, PipelineError
from jaxpipe.topology import make_pipeline_mesh

SIZE, FEATURES, STEPS = 2, 3, 3
Loss = Callable[[Any, Any], Any]


class Net(nn.Module):
    rate: float = 0.0
    has_norm: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        x = jnp.tanh(nn.Dense(8)(x))
        if self.has_norm:
            x = nn.BatchNorm(use_running_average=not train, momentum=0.7, epsilon=0.1)(x)
        x = nn.Dropout(self.rate, deterministic=not train)(x)
        return nn.Dense(2)(x)


class NNXNet(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.out = nnx.Linear(FEATURES, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(x)


class Balanced(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(2)(x)
        self.sow("losses", "balance", jnp.mean(x**2))
        return x


class OwnLoss(nn.Module):
    @nn.compact
    def __call__(self, batch: dict[str, jax.Array]) -> jax.Array:
        return mean_square(nn.Dense(2)(batch["x"]), batch["y"])


def mean_square(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.mean((outputs - labels) ** 2)


def masked_square(outputs: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    keep = labels > 0
    return jnp.sum(jnp.where(keep, (outputs - labels) ** 2, 0.0)), jnp.sum(keep.astype(jnp.float32))


def build(
    model: Any,
    loss_fn: Loss | None = mean_square,
    *,
    data: int = 1,
    count: int = 1,
    optimizer: Any = optax.adam(1e-2),  # noqa: B008  # never changed
    cls: Any = UnpipelinedEngine,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    sizes = {"train_micro_batch_size_per_gpu": SIZE, "gradient_accumulation_steps": count}
    mesh = make_pipeline_mesh(PipeDataParallelTopology(1, data))
    settings = load_config({**sizes, **(config or {})})
    module = configure_model(as_one_stage(model, loss_fn), settings)
    return cls(module, choose_optimizer(settings, optimizer), settings, mesh, **options)


def entries(count: int, data: int = 1, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    samples = SIZE * data
    return [
        (
            rng.normal(size=(samples, FEATURES)).astype(np.float32),
            rng.normal(size=(samples, 2)).astype(np.float32),
        )
        for _ in range(count)
    ]


def call(engine: UnpipelinedEngine, batch: list[Any]) -> list[float]:
    losses = []
    for i, (inputs, labels) in enumerate(batch):
        assert engine.is_gradient_accumulation_boundary() == (i == len(batch) - 1)
        loss = engine(inputs, labels)
        assert engine.backward(loss) is loss
        engine.step()
        losses.append(float(loss))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("data", sweep(2, [8, 1, 2]))
@pytest.mark.parametrize("count", sweep(1, [3, 1]))
def test_a_plain_loop_on_one_device(count: int, data: int) -> None:
    optimizer = optax.adam(1e-2)
    model = Net()
    params = model.init(jax.random.key(0), jnp.ones((1, FEATURES)), train=False)["params"]
    engine = build(model, data=data, count=count, optimizer=optimizer, model_parameters=params)

    def objective(params: Any, inputs: Any, labels: Any) -> jax.Array:
        return mean_square(model.apply({"params": params}, inputs, train=False), labels)

    @jax.jit
    def update(params: Any, state: Any, inputs: Any, labels: Any) -> Any:
        loss, grads = jax.value_and_grad(objective)(params, inputs, labels)
        updates, state = optimizer.update(grads, state, params)
        return loss, optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for step in range(STEPS):
        batch = entries(count, data, seed=step)
        losses = call(engine, batch)
        loss, params, state = update(
            params, state, *(np.concatenate(part) for part in zip(*batch, strict=True))
        )
        assert_loss(np.mean(losses), loss)
        assert_close(engine.module_state_dict(), jax.device_get(params))
    assert (engine.micro_steps, engine.global_steps) == (STEPS * count, STEPS)
    assert engine.global_samples == STEPS * count * data * SIZE
    assert int(engine.state.step) == STEPS


@pytest.mark.slow
def test_a_smaller_microbatch() -> None:
    """The mean of the microbatches' means, as there.

    Of 3 configured samples per replica the last has one.
    """
    optimizer, data, size = optax.sgd(0.1), 2, 1
    model = Net()
    params = model.init(jax.random.key(0), jnp.ones((1, FEATURES)), train=False)["params"]
    config = {"train_micro_batch_size_per_gpu": 3}
    engine = build(
        model, data=data, count=2, optimizer=optimizer, model_parameters=params, config=config
    )
    batch = [
        tuple(np.concatenate(part) for part in zip(*entries(2, data, seed), strict=True))
        for seed in range(2)
    ]
    batch = [tuple(x[: 3 * data] for x in batch[0]), tuple(x[: size * data] for x in batch[1])]

    def objective(params: Any) -> jax.Array:
        losses = [mean_square(model.apply({"params": params}, x, train=False), y) for x, y in batch]
        return sum(losses, jnp.zeros(())) / 2

    loss, grads = jax.jit(jax.value_and_grad(objective))(params)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    assert_loss(np.mean(call(engine, batch)), loss)
    assert_close(engine.module_state_dict(), jax.device_get(optax.apply_updates(params, updates)))
    assert (engine.global_steps, engine.global_samples) == (1, (3 + size) * data)
    engine.eval()
    assert_loss(engine(*batch[1]), mean_square(engine(batch[1][0]), batch[1][1]))
    engine.train()
    words = "got 3 samples for 2 replicas. Leave out the last 1, or use a data set with"
    assert_refused(DataError, words, engine, *(x[:3] for x in batch[0]))
    words = "3 * 2 = 6 samples as its first dim, but got inputs = float32[7, 3]"
    assert_refused(DataError, words, engine, *(np.concatenate([x, x[:1]]) for x in batch[0]))


FP16 = {
    "enabled": True,
    "auto_cast": True,
    "initial_scale_power": 18,
    "hysteresis": 1,
    "loss_scale_window": 2,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "loss_fn", "config"),
    sweep(
        1,
        [
            (
                Net(rate=0.5),
                mean_square,
                {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.05},
            ),
            (Net(has_norm=True), mean_square, {"fp16": FP16}),
            (Net(rate=0.5), masked_square, {"gradient_clipping": 0.05}),
            (Balanced(), mean_square, {"bf16": {"enabled": True}}),
        ],
        unpack=True,
    ),
    ids=["dropout-zero-clipping", "statistics-overflow", "weights", "losses-of-layers"],
)
def test_whole_batches(model: nn.Module, loss_fn: Loss, config: dict[str, Any]) -> None:
    count, data = 3, 2
    engine = build(model, loss_fn, data=data, count=count, config=config)
    whole = build(model, loss_fn, data=data, count=count, config=config, cls=PipelineEngine)
    for step in range(STEPS + 1):
        batch = entries(count, data, seed=step)
        batch[1] = (batch[1][0], -np.abs(batch[1][1]))  # of no weight to masked_square
        wanted = float(whole.train_batch(iter(batch)))
        if step < STEPS:
            losses = call(engine, batch)
            assert loss_fn is masked_square or np.mean(losses) == pytest.approx(wanted, rel=1e-5)
        else:
            assert_loss(engine.train_batch(iter(batch)), wanted, 1e-5)
        for part in ("params", "opt_state", "collections"):
            assert_close(*(jax.device_get(getattr(e.state, part)) for e in (engine, whole)))
        small = [
            jax.device_get((e.state.step, e.state.skipped_steps, e.state.loss_scale))
            for e in (engine, whole)
        ]
        jax.tree.map(np.testing.assert_array_equal, *small)
        assert set(engine.metrics) == set(whole.metrics)
        if whole.was_step_applied():
            assert_loss(engine.metrics["loss"], whole.metrics["loss"], 1e-5)
            assert_loss(engine.metrics["grad_norm"], whole.metrics["grad_norm"], 1e-5)
            assert_close(engine.get_additional_losses(), whole.get_additional_losses())
    assert_close(engine.module_collections(), whole.module_collections().get("0_Net", {}))
    assert set(engine.module_collections()) == ({"batch_stats"} if "fp16" in config else set())
    assert int(engine.state.skipped_steps) == (2 if "fp16" in config else 0)
    assert (engine.micro_steps, engine.global_steps) == (count * (STEPS + 1), STEPS + 1)


class Limited(nn.Module):
    """Its backward is not linear in the cotangent."""

    size: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(2)(bend(self.size)(jnp.tanh(nn.Dense(8)(x))))


@pytest.mark.parametrize(
    ("config", "scale", "tolerance"),
    sweep(
        1,
        [
            ({"fp16": {"enabled": True}}, 2.0**12, FLOAT16),
            ({}, 1.0, GRADIENT),
            ({"bf16": {"enabled": True}}, 1.0, BFLOAT16),
        ],
        unpack=True,
    ),
    ids=["float16", "float32", "bfloat16"],
)
def test_each_layer_sees_the_cotangent_of_the_steps_loss(
    config: Any, scale: float, tolerance: float
) -> None:
    if scale != 1:
        config = {"fp16": {"enabled": True, "loss_scale": scale}}
    engine = build(
        Limited(0.02 * scale),
        data=2,
        count=3,
        optimizer=optax.sgd(1.0),
        config=config,
        example_batch=entries(1, 2)[0],
    )
    batch, before = entries(3, 2), engine.module_state_dict()
    call(engine, batch)
    inputs, labels = (np.concatenate(part) for part in zip(*batch, strict=True))
    module = engine.module

    @jax.jit
    def gradient(params: Any) -> Any:
        return jax.grad(lambda p: scale * module.loss(module.apply(p, inputs, train=True), labels))(
            params
        )

    tree = engine._trainer.tree
    wanted = tree.unwrap(jax.tree.map(lambda g: g / scale, gradient(tree.wrap(before))))
    found = jax.tree.map(np.subtract, before, engine.module_state_dict())
    error, name = tree_error(found, jax.device_get(wanted))
    assert error <= tolerance, f"{name} is wrong by {error:.2e} of its largest value"


@pytest.mark.slow
def test_a_step_in_which_nothing_weighs() -> None:
    def nothing(outputs: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        return 0 * masked_square(outputs, labels)[0], jnp.zeros(())

    engines = [build(Balanced(), nothing, cls=cls) for cls in (UnpipelinedEngine, PipelineEngine)]
    call(engines[0], entries(1))
    engines[1].train_batch(iter(entries(1)))
    assert_close(*(jax.device_get(engine.state.params) for engine in engines))
    assert_loss(engines[0].metrics["loss"], engines[1].metrics["loss"])
    assert float(engines[0].metrics["grad_norm"]) > 0


@pytest.fixture(scope="module")
def shared() -> UnpipelinedEngine:
    engine = build(Net(rate=0.5), count=2, data=2)
    call(engine, entries(2, 2))
    return engine


def test_evaluating(shared: UnpipelinedEngine) -> None:
    before = jax.device_get((shared.state.step, shared.state.params))
    ((inputs, labels),) = entries(1, 2, seed=1)
    shared.eval()
    outputs, loss = shared(inputs), shared(inputs, labels)
    shared.train()
    wanted = Net().apply({"params": shared.module_state_dict()}, inputs, train=False)
    assert_close(outputs, wanted)
    assert_loss(loss, mean_square(wanted, labels), 1e-5)
    assert float(shared(inputs, labels)) != pytest.approx(float(loss), rel=1e-3)
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.device_get((shared.state.step, shared.state.params)),
        before,
    )
    assert_loss(
        shared.eval_batch(iter(entries(2, 2, seed=1))),
        np.mean([_loss(shared, e) for e in entries(2, 2, 1)]),
        1e-5,
    )


def _loss(engine: UnpipelinedEngine, entry: Any) -> float:
    return float(
        mean_square(
            Net().apply({"params": engine.module_state_dict()}, entry[0], train=False), entry[1]
        )
    )


def test_backward_takes_only_the_last_loss(shared: UnpipelinedEngine) -> None:
    refused = partial(assert_refused, PipelineError)
    other = (
        "the very array that the last forward ... got loss= ... pass it unchanged. Scale or "
        "combine losses inside loss_fn"
    )
    refused(other, shared.backward, jnp.float32(1.0))
    ((inputs, labels),) = entries(1, 2)
    old, loss = shared(inputs, labels), shared(inputs, labels)
    for wrong in (old, loss * 2.0, float(loss)):
        refused(other, shared.backward, wrong)
    shared.backward(loss)
    refused(other, shared.backward, loss)
    words = "backward without step at micro_steps=2. Call engine.step() after each"
    refused(words, shared, inputs, labels)
    shared.step()
    words = "step must follow a backward, but got none since micro_steps=3. Call"
    refused(words, shared.step)
    words = "within a batch, but got 1 of gradient_accumulation_steps=2 microb ... Continue"
    refused(words, shared.train_batch, iter(entries(2, 2)))
    shared.backward(shared(inputs, labels))
    shared.step()
    assert (shared.micro_steps, shared.global_steps) == (4, 2)


def test_training_needs_labels_and_an_optimizer(shared: UnpipelinedEngine) -> None:
    words = "given labels, but got labels=None. Call engine(inputs, labels), or"
    assert_refused(PipelineError, words, shared, entries(1, 2)[0][0])
    engine = build(Net(), optimizer=None)
    words = "got optimizer=None. Give initialize(optimizer=...) ... engine.eval"
    assert_refused(PipelineError, words, engine, *entries(1)[0])
    engine.eval()
    assert engine(entries(1)[0][0][:1]).shape == (1, 2)
    assert np.isfinite(float(engine(*entries(1)[0])))


def test_weights_beside_losses_of_layers() -> None:
    words = "(sum, weight) must be alone ... steps=2 and the layers' loss '0_Balanced/balance' ... "
    call = build(Balanced(), masked_square, count=2)
    assert_refused(PipelineError, words + "Call train_batch", call, *entries(1)[0])


@pytest.mark.slow
def test_a_model_whose_output_is_the_loss() -> None:
    engine = build(OwnLoss(), None)
    x, y = entries(1)[0]
    engine.backward(engine({"x": x, "y": y}))
    engine.step()
    engine.eval()
    wanted = OwnLoss().apply({"params": engine.module_state_dict()}, {"x": x, "y": y})
    assert_loss(engine({"x": x, "y": y}), wanted, 1e-5)


def test_an_nnx_class_and_side_inputs() -> None:
    engine = build(LayerSpec(NNXNet))
    first, second = (call(engine, entries(1))[0] for _ in range(2))
    assert second < first
    assert set(engine.module_state_dict()) == {"out"}
    engine = build(lambda x, shift: x[:, :2] + shift)
    engine.eval()
    x, y = entries(1)[0]
    assert_loss(engine(x, y, shift=y), mean_square(x[:, :2] + y, y), 1e-5)


def test_parameters_are_the_models_own_tree(shared: UnpipelinedEngine) -> None:
    params = shared.module_state_dict()
    assert set(params) == {"Dense_0", "Dense_1"}
    shared.load_module_state_dict(
        jax.tree.map(lambda x: x * 2, params), collections=shared.module_collections()
    )
    assert_close(shared.module_state_dict(), jax.tree.map(lambda x: x * 2, params))
    with pytest.warns(UserWarning, match=r"left out 2 parameters.*Dense_1/bias"):
        shared.load_module_state_dict({"Dense_0": params["Dense_0"]}, strict=False)
    with pytest.raises(LayerError, match="Dense_1"):
        shared.load_module_state_dict({"Dense_0": params["Dense_0"]})


class TwoInputs(nn.Module):
    @nn.compact
    def __call__(self, a: jax.Array, b: jax.Array, weight: jax.Array | None = None) -> jax.Array:
        error = (nn.Dense(2)(a) - b) ** 2
        return jnp.mean(error if weight is None else error * weight)


@pytest.mark.slow
@pytest.mark.parametrize("by_name", [False, True])
def test_a_model_of_several_inputs_that_returns_its_loss(by_name: bool) -> None:
    model, (a, b) = TwoInputs(), entries(1, 2)[0]
    weight = np.full_like(b, 0.5)
    config = {"train_batch_size": 2 * SIZE, "train_micro_batch_size_per_gpu": SIZE}
    mesh = make_pipeline_mesh(PipeDataParallelTopology(1, 2))
    engine: Any = jaxpipe.initialize(
        model=model, optimizer=optax.sgd(0.1), config=config, mesh=mesh
    )[0]
    engine.eval()
    loss = engine(a, b=b, weight=weight) if by_name else engine(a, b, weight)
    params = engine.module_state_dict()
    assert_loss(loss, model.apply({"params": params}, a, b, weight), 1e-5)
    engine.train()
    engine.backward(engine(a, b, weight))
    engine.step()
    grads = jax.grad(lambda p: model.apply({"params": p}, a, b, weight))(params)
    assert_close(
        engine.module_state_dict(),
        jax.tree.map(lambda p, g: p - np.float32(0.1) * g, params, grads),
    )
    for args, named, got in (((a, b, weight, b), {}, "4 of them"), ((a, b), {"b": b}, "b twice")):
        words = f"engine(inputs, b, weight) ... but got {got}. Pass what the model's call tak"
        assert_refused(PipelineError, words, engine, *args, **named)


def test_more_inputs_than_labels(shared: UnpipelinedEngine) -> None:
    x, y = entries(1, 2)[0]
    words = "engine(inputs, labels) ... got 3 of them. Pass the model's other inputs"
    assert_refused(PipelineError, words, shared, x, y, x)


def test_parameters_that_are_not_the_models_are_refused_at_once() -> None:
    params = {"Dense_0": {"kernel": np.ones((4, 4), np.float32)}}
    words = (
        "missing Dense_0/bias; missing Dense_1/ ... Pass variables['params'] of the model's own "
    )
    given = {"model_parameters": params, "example_batch": entries(1)[0]}
    assert_refused(LayerError, words + "init", build, Net(), **given)
    late = build(Net(), model_parameters=params)
    assert_refused(LayerError, words + "init", late.train_batch, iter(entries(1)))
    words = "unexpected params/ ... Pass variables['params']"
    given["model_parameters"] = {"params": params}
    assert_refused(LayerError, words, build, Net(), **given)


@pytest.mark.slow
@pytest.mark.parametrize("stage", sweep(1, [3, 2]))
def test_zero_2_and_3_divide_weights_over_the_replicas(stage: int) -> None:
    engine, whole = (
        build(Net(), data=2, count=2, config={"zero_optimization": {"stage": s}})
        for s in (stage, 0)
    )
    for step in range(2):
        batch = entries(2, 2, seed=step)
        np.testing.assert_allclose(call(engine, batch), call(whole, batch), rtol=1e-5)
    assert_close(engine.module_state_dict(), whole.module_state_dict())
    leaves = jax.tree.leaves((engine.state.params, engine.state.opt_state))
    assert any(leaf.addressable_shards[0].data.size < leaf.size // leaf.shape[0] for leaf in leaves)


def test_the_optimisers_state_has_the_models_own_tree() -> None:
    engine = build(Net(), example_batch=entries(1)[0])
    wanted = optax.adam(1e-2).init(engine.module_state_dict())
    assert jax.tree.structure(engine.opt_state_tree()) == jax.tree.structure(wanted)


def test_labels_of_an_optimiser_may_be_called_like_the_models_tree() -> None:
    parts = {"layers": optax.adam(1e-2), "rest": optax.sgd(1e-2)}

    def labels(params: Any) -> Any:
        return jax.tree.map(lambda x: "layers" if x.ndim > 1 else "rest", params)

    optimizer = optax.multi_transform(parts, labels)
    engine = build(Net(), example_batch=entries(1)[0], optimizer=optimizer)
    wanted = optimizer.init(engine.module_state_dict())
    assert jax.tree.structure(engine.opt_state_tree()) == jax.tree.structure(wanted)
