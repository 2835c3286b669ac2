"""Clipping, ZeRO-1, collections and reports.

Against the sequential model with the same optimiser.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import Chosen, first_values_then_pairs, sweep
from _models import MODELS
from _oracle import Case, block_of, make_batch, sequential_model, whole_reference
from _settings import make_settings
from _tolerances import assert_close, assert_loss

from jaxpipe import LayerSpec, PipeDataParallelTopology, Pipeline, PipelineModule
from jaxpipe.optim import LossScaler
from jaxpipe.topology import make_pipeline_mesh

STEPS = 3
SGD = optax.sgd(0.1, momentum=0.9)
ADAM = optax.adam(1e-2)
LAMB = optax.lamb(1e-2, weight_decay=0.01)
ADAFACTOR = optax.adafactor(1e-2, min_dim_size_to_factor=4)
MASKED = optax.adamw(
    1e-2, weight_decay=0.1, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)
)
LABELLED = optax.multi_transform(
    {"slow": optax.sgd(0.01), "fast": optax.adam(1e-2)},
    lambda tree: jax.tree_util.tree_map_with_path(
        lambda path, _: "slow" if "bias" in str(path[-1]) else "fast", tree
    ),
)
ZERO = {"zero_stage": 1}


def tree_norm(tree: Any) -> float:
    return float(
        np.sqrt(sum(np.sum(np.square(np.asarray(x, np.float64))) for x in jax.tree.leaves(tree)))
    )


def sequential_run(case: Case) -> dict[str, Any]:
    model = sequential_model(case.model)
    params, held, limit = (
        model.params,
        model.collections,
        case.settings.get("gradient_clipping", 0.0),
    )
    state, losses, norms = case.optimizer.init(params), [], []
    for step in range(STEPS):
        batch = make_batch(MODELS[case.model], case.microbatches, case.data, seed=step)
        found = whole_reference(
            case.model,
            batch,
            case.microbatches,
            case.data,
            params=params,
            collections=held,
            step=step,
        )
        grads, held = found.grads, found.collections
        norms.append(tree_norm(grads))
        if limit:
            grads = jax.tree.map(
                lambda g, n=norms[-1]: np.float32(g * min(1.0, limit / (n + 1e-6))), grads
            )
        updates, state = jax.jit(case.optimizer.update)(grads, state, params)
        params = jax.device_get(optax.apply_updates(params, updates))
        losses.append(found.loss)
    return {
        "params": params,
        "collections": held,
        "losses": losses,
        "norms": norms,
        "aux": found.aux,
    }


def pipeline_run(case: Case) -> dict[str, Any]:
    pipeline = case.pipeline()
    state, losses, norms, metrics = pipeline.init(), [], [], {}
    for step in range(STEPS):
        state, metrics = pipeline.step(state, case.batch(seed=step))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    aux = {kind: jax.device_get(metrics.get(kind, {})) for kind in ("losses", "metrics")}
    params, held = (
        pipeline.params_tree(state.params),
        pipeline.states.collections_tree(state.collections),
    )
    return {"params": params, "collections": held, "losses": losses, "norms": norms, "aux": aux}


def check(case: Case) -> None:
    found, wanted = pipeline_run(case), sequential_run(case)
    assert_loss(found["losses"], wanted["losses"], tolerance=STEPS * 1e-6)
    assert_loss(found["norms"], wanted["norms"], tolerance=1e-5)
    assert_close(found["params"], wanted["params"])
    for kind, values in found["aux"].items():
        assert set(values) == set(wanted["aux"][kind])
        for name, value in values.items():
            assert_loss(value, wanted["aux"][kind][name], tolerance=1e-5)
    assert jax.tree.structure(found["collections"]) == jax.tree.structure(wanted["collections"])
    if jax.tree.leaves(found["collections"]):
        assert_close(found["collections"], wanted["collections"])


@pytest.mark.parametrize(
    "case",
    sweep(
        0,
        [
            Case(stages=2, data=4, cut="trunk", optimizer=ADAM, settings=ZERO),
            Case(stages=1, data=8, optimizer=ADAM, settings=ZERO),
            Case(stages=4, data=2, cut="front", schedule="gpipe", optimizer=SGD, settings=ZERO),
            Case(model="tied", stages=4, data=2, optimizer=ADAM, settings=ZERO),
            Case(model="tied_many", stages=4, data=2, cut="uniform", optimizer=SGD, settings=ZERO),
            Case(model="mixed", stages=2, data=2, optimizer=MASKED, settings=ZERO),
            Case(model="shapes", stages=2, data=2, optimizer=LABELLED, settings=ZERO),
            Case(stages=2, data=4, cut="trunk", optimizer=LAMB, settings=ZERO),
            Case(model="tied", stages=2, data=4, cut="front", optimizer=LAMB, settings=ZERO),
            Case(stages=2, data=2, optimizer=ADAFACTOR, settings=ZERO),
        ],
    ),
    ids=str,
)
def test_zero(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    sweep(
        1,
        [
            Case(stages=4, data=2, optimizer=SGD, settings={"gradient_clipping": 0.3}),
            Case(stages=1, data=2, optimizer=ADAM, settings={"gradient_clipping": 0.3}),
            Case(
                model="tied_many",
                stages=4,
                cut="uniform",
                optimizer=SGD,
                settings={"gradient_clipping": 0.3},
            ),
            Case(
                model="tied",
                stages=4,
                data=2,
                optimizer=ADAM,
                settings={"gradient_clipping": 0.3, **ZERO},
            ),
            Case(
                model="tied",
                stages=2,
                data=2,
                optimizer=LAMB,
                settings={"gradient_clipping": 0.3, **ZERO},
            ),
            Case(
                model="tied", stages=2, data=2, optimizer=SGD, settings={"gradient_clipping": 1e6}
            ),
        ],
    ),
    ids=str,
)
def test_clipping_by_the_norm_of_the_whole_model(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    "case",
    sweep(
        1,
        [
            Case(model="norm", stages=4, data=2, cut="trunk", optimizer=SGD),
            Case(model="norm", stages=1, data=2, optimizer=SGD),
            Case(model="norm", stages=4, cut="front", schedule="train", interval=2, optimizer=SGD),
            Case(
                model="reports",
                stages=4,
                data=2,
                optimizer=SGD,
                settings={"gradient_clipping": 0.3},
            ),
            Case(model="norm_reports", stages=2, data=2, cut="back", optimizer=SGD, settings=ZERO),
            Case(model="norm_reports", stages=4, data=2, cut="trunk", interval=1, optimizer=SGD),
            Case(model="weighted", stages=4, data=2, schedule="gpipe", optimizer=SGD),
        ],
    ),
    ids=str,
)
def test_collections_reports_and_weighted_losses(case: Case) -> None:
    check(case)


@pytest.mark.soak
@pytest.mark.parametrize(
    "case",
    sweep(
        1,
        [
            Case(model="norm_reports", stages=2, data=2, cut="front", optimizer=SGD, settings=ZERO),
            Case(model="norm", stages=4, data=2, cut="trunk", optimizer=SGD),
            Case(model="weighted", stages=1, data=2, optimizer=SGD),
            Case(model="side", stages=4, schedule="gpipe", optimizer=SGD),
        ],
    ),
    ids=str,
)
def test_evaluation_and_prediction_after_training(case: Case) -> None:
    pipeline, batch = case.pipeline(), case.batch(seed=7)
    state, _ = pipeline.step(pipeline.init(), case.batch())
    params, held = (
        pipeline.params_tree(state.params),
        pipeline.states.collections_tree(state.collections),
    )
    model = sequential_model(case.model)
    places = [(m, r) for m in range(case.microbatches) for r in range(case.data)]
    terms = np.asarray(
        [model.terms(params, held, *block_of(batch, m, r)) for m, r in places], np.float64
    )
    metrics, outputs = pipeline.programs.evaluate_and_predict(state, batch)
    assert_loss(metrics["loss"], terms[:, 0].sum() / terms[:, 1].sum())
    each = terms.reshape(case.microbatches, case.data, 2).sum(1)
    assert_loss(metrics["microbatch_losses"], each[:, 0] / each[:, 1])
    assert_loss(pipeline.evaluate(state, batch)["loss"], metrics["loss"], tolerance=0)
    np.testing.assert_array_equal(pipeline.programs.predict(state, batch), outputs)
    for m in range(case.microbatches):
        wanted = model.module.call(
            params, held, batch[0][m], side=jax.tree.map(lambda x, m=m: x[m], batch[2])
        )[0]
        np.testing.assert_allclose(outputs[m], wanted, rtol=1e-4, atol=1e-5)


FEATURES = {
    "model": (
        "linen",
        "nnx",
        "tied",
        "tied_many",
        "shapes",
        "tuple",
        "norm",
        "reports",
        "weighted",
        "dropout",
        "marked",
    ),
    "topology": tuple(
        (stages, data) for stages in (1, 2, 4, 8) for data in (1, 2, 4) if stages * data <= 8
    ),
    "microbatches": (1, 2, 3, 5, 8),
    "schedule": ("1f1b", "gpipe", "train"),
    "cut": ("parameters", "front", "uniform"),
    "interval": (0, 1),
    "optimizer": (SGD, LAMB),
    "zero_stage": (0, 1),
    "gradient_clipping": (0.0, 0.3),
    "loss_scaler": (None, LossScaler(initial_scale=1024.0)),
}


def is_valid(chosen: Chosen) -> bool:
    """LAMB makes as much of a gradient that is nothing but rounding as of any other."""
    return not (chosen.get("model") == "norm" and chosen.get("optimizer") is LAMB)


def to_case(chosen: Chosen) -> Case:
    chosen = dict(chosen)
    stages, data = chosen.pop("topology")
    settings = {
        name: chosen.pop(name) for name in ("zero_stage", "gradient_clipping", "loss_scaler")
    }
    return Case(stages=stages, data=data, settings=settings, **chosen)


@pytest.mark.soak
@pytest.mark.parametrize("case", first_values_then_pairs(FEATURES, is_valid, to_case), ids=str)
def test_every_pair_of_features(case: Case) -> None:
    check(case)


def test_a_number_among_the_outputs_has_an_entry_for_each_replica() -> None:
    module = PipelineModule(
        [LayerSpec(nn.Dense, 4), LayerSpec(nn.Dense, 4), lambda x: (x, x.mean())],
        num_stages=2,
        loss_fn=lambda y, t: jnp.mean((y[0] - t) ** 2),
    )
    mesh = make_pipeline_mesh(PipeDataParallelTopology(2, 2))
    x = np.random.default_rng(0).standard_normal((3, 4, 4)).astype(np.float32)
    pipeline = Pipeline(module, SGD, mesh, (x[0], x[0]), 3, make_settings())
    rows, means = jax.device_get(pipeline.programs.predict(pipeline.init(), (x, x, {})))
    assert (rows.shape, means.shape) == ((3, 4, 4), (3, 2))
    assert_close(means, rows.reshape(3, 2, -1).mean(-1))


@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize(
    ("stages", "data"), sweep(1, [(2, 2), (4, 1), (1, 1), (2, 1)], unpack=True)
)
def test_clipping_four_scalar_layers(stages: int, data: int, zero_stage: int) -> None:
    weights = (1.0, 2.0, 0.5, 3.0)

    def layer(weight: float) -> Any:
        return LayerSpec(nn.Dense, 1, use_bias=False, kernel_init=nn.initializers.constant(weight))

    module = PipelineModule(
        [layer(w) for w in weights], num_stages=stages, loss_fn=lambda y, t: jnp.mean((y - t) ** 2)
    )
    mesh = make_pipeline_mesh(PipeDataParallelTopology(stages, data))
    x, y = np.ones((1, data, 1), np.float32), np.zeros((1, data, 1), np.float32)
    settings = make_settings(gradient_clipping=1.0, zero_stage=zero_stage)
    pipeline = Pipeline(module, optax.sgd(1.0), mesh, (x[0], y[0]), 1, settings)
    state, metrics = pipeline.step(pipeline.init(), (x, y, {}))
    found = [float(leaf.item()) for leaf in jax.tree.leaves(pipeline.params_tree(state.params))]
    change = [w - after for w, after in zip(weights, found, strict=True)]
    np.testing.assert_allclose(float(metrics["grad_norm"]), 41.6773, rtol=1e-5)
    np.testing.assert_allclose(
        change, [18 / 41.6773, 9 / 41.6773, 36 / 41.6773, 6 / 41.6773], rtol=1e-5
    )
