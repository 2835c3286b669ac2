"""Parameters, losses and collections after one and three steps.

Against plain layers and the same optimiser.
"""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from _annotated import Sharded
from _covering import sweep
from _models import ALL_MODELS
from _oracle import block_of, make_batch, sequential_model, whole_reference
from _tolerances import GRADIENT, assert_close, assert_loss

from jaxpipe.optim import LossScaler

STEPS, LIMIT = 3, 0.1
SGD, ADAM, LAMB = (
    optax.sgd(0.1, momentum=0.9),
    optax.adam(1e-2, eps=1e-2),
    optax.lamb(1e-2, eps=1e-2),
)
"""A large eps: where a gradient is nothing but rounding, so would be Adam's update."""

ZERO, CLIP = {"zero_stage": 1}, {"gradient_clipping": LIMIT}
EXPERT = (("expert", 2),)


def check(case: Sharded) -> None:
    """One step after the other, each against one device."""
    model, clip = sequential_model(case.model), case.settings.get("gradient_clipping", 0.0)
    optimizer = (
        optax.chain(optax.clip_by_global_norm(clip), case.optimizer) if clip else case.optimizer
    )
    params, held, update = model.params, model.collections, jax.jit(optimizer.update)
    pipeline, opt_state = case.pipeline(), optimizer.init(params)
    state = pipeline.init()
    assert_close(pipeline.params_tree(state.params), params)
    for step in range(STEPS):
        batch = make_batch(ALL_MODELS[case.model], case.microbatches, case.data, seed=step)
        wanted = whole_reference(
            case.model,
            batch,
            case.microbatches,
            case.data,
            params=params,
            collections=held,
            step=step,
        )
        updates, opt_state = update(wanted.grads, opt_state, params)
        params, held = jax.device_get(optax.apply_updates(params, updates)), wanted.collections
        state, metrics = pipeline.step(state, batch)
        assert_loss(metrics["loss"], wanted.loss, tolerance=(step + 1) * 1e-6)
        np.testing.assert_allclose(
            metrics["grad_norm"], optax.tree.norm(wanted.grads), rtol=GRADIENT
        )
        assert not clip or metrics["grad_norm"] > clip
        if step in (0, STEPS - 1):
            assert_close(pipeline.params_tree(state.params), params)
        for name, values in wanted.aux["losses"].items():
            np.testing.assert_allclose(metrics["losses"][name], values, rtol=GRADIENT)
    if jax.tree.leaves(held):
        assert_close(pipeline.states.collections_tree(state.collections), held)


@pytest.mark.soak
@pytest.mark.parametrize(
    "case",
    sweep(
        0,
        [
            Sharded(annotated="tied", data=2, optimizer=ADAM, settings={**CLIP, **ZERO}),
            Sharded(annotated="stats", data=2, optimizer=SGD, skip_idle=True),
            Sharded(annotated="block", data=2, optimizer=LAMB, settings=CLIP),
            Sharded(annotated="block", stages=1, data=2, optimizer=LAMB, settings={**CLIP, **ZERO}),
            Sharded(annotated="logical", axes=(("model", 4),), optimizer=ADAM, settings=CLIP),
            Sharded(annotated="nnx", data=2, optimizer=ADAM, schedule="zero-bubble", settings=ZERO),
            Sharded(
                annotated="nnx_logical", data=2, optimizer=SGD, schedule="1f1b-v", settings=ZERO
            ),
            Sharded(
                annotated="tied",
                axes=(("model", 4),),
                optimizer=ADAM,
                schedule="interleaved",
                settings=CLIP,
            ),
            Sharded(annotated="tied_nnx", stages=1, data=2, optimizer=ADAM, interval=1),
            Sharded(annotated="tied_nnx", data=2, optimizer=SGD, settings=ZERO, cut="uniform"),
            Sharded(annotated="dropout", data=2, optimizer=SGD, interval=1),
            Sharded(annotated="dropout_nnx", axes=(("model", 4),), optimizer=SGD),
            Sharded(
                annotated="stats",
                axes=(("model", 4),),
                optimizer=SGD,
                schedule="gpipe",
                settings=ZERO,
            ),
            Sharded(annotated="stats", stages=1, data=2, optimizer=SGD, interval=1),
            Sharded(annotated="sequence", data=2, optimizer=ADAM, settings=CLIP),
            Sharded(annotated="sequence", axes=(("model", 4),), optimizer=ADAM, interval=1),
            Sharded(annotated="nested", data=2, optimizer=ADAM, settings={**CLIP, **ZERO}),
            Sharded(annotated="mixed", data=2, optimizer=ADAM, settings=ZERO, cut="front"),
            Sharded(
                annotated="experts", data=2, axes=EXPERT, optimizer=SGD, settings={**CLIP, **ZERO}
            ),
            Sharded(
                annotated="inner", axes=(("model", 2), ("expert", 2)), optimizer=SGD, settings=CLIP
            ),
            Sharded(annotated="vocab", data=2, optimizer=ADAM, settings={**CLIP, **ZERO}),
            Sharded(
                annotated="vocab",
                axes=(("model", 4),),
                optimizer=ADAM,
                schedule="zero-bubble",
                settings=CLIP,
            ),
            Sharded(
                annotated="fsdp",
                data=2,
                axes=(("fsdp", 2),),
                optimizer=LAMB,
                settings={**CLIP, **ZERO},
            ),
            Sharded(
                annotated="fsdp_model",
                axes=(("fsdp", 2), ("model", 2)),
                optimizer=ADAM,
                settings=CLIP,
            ),
            Sharded(
                annotated="block",
                data=2,
                optimizer=SGD,
                settings={"loss_scaler": LossScaler(1024.0)},
            ),
        ],
    ),
    ids=str,
)
def test_three_steps(case: Sharded) -> None:
    check(case)


@pytest.mark.parametrize(
    "case",
    sweep(
        1,
        [
            Sharded(annotated="stats", optimizer=SGD),
            Sharded(annotated="tied", data=2, optimizer=SGD, schedule="1f1b-v", settings=ZERO),
            Sharded(annotated="nnx_logical", stages=1, data=2, optimizer=SGD),
            Sharded(
                annotated="sequence", axes=(("model", 4),), optimizer=SGD, schedule="interleaved"
            ),
            Sharded(annotated="experts", data=2, axes=EXPERT, optimizer=SGD, skip_idle=True),
        ],
    ),
    ids=str,
)
@pytest.mark.soak
def test_evaluation_and_prediction_after_a_step(case: Sharded) -> None:
    pipeline, batch = case.pipeline(), case.batch(seed=7)
    state, _ = pipeline.step(pipeline.init(), case.batch())
    params, held = (
        pipeline.params_tree(state.params),
        pipeline.states.collections_tree(state.collections),
    )
    model = sequential_model(case.model)
    blocks = [(m, r) for m in range(case.microbatches) for r in range(case.data)]
    terms = np.asarray(
        [model.terms(params, held, *block_of(batch, m, r)) for m, r in blocks], np.float64
    )
    metrics, outputs = pipeline.programs.evaluate_and_predict(state, batch)
    assert_loss(metrics["loss"], terms[:, 0].sum() / terms[:, 1].sum())
    assert_loss(pipeline.evaluate(state, batch)["loss"], metrics["loss"], tolerance=0)
    np.testing.assert_array_equal(pipeline.programs.predict(state, batch), outputs)
    for m, r in blocks:
        wanted = model.module.call(params, held, block_of(batch, m, r)[0], side={})[0]
        found = block_of({"outputs": np.asarray(outputs)}, m, r)["outputs"]
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def all_copies(pipeline: Any, state: Any) -> list[list[np.ndarray]]:
    """What devices hold, by the slice of the global array that it is."""
    found = []
    for leaf in jax.tree.leaves((state.params, state.opt_state)):
        slices: dict[str, list[np.ndarray]] = {}
        for shard in leaf.addressable_shards:
            slices.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        found += slices.values()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", sweep(1, ["tied", "stats", "nested"]))
def test_replicas_stay_equal_to_the_bit(name: str) -> None:
    case = Sharded(annotated=name, data=2, optimizer=ADAM, settings=CLIP)
    pipeline = case.pipeline()
    state = pipeline.init()
    for step in range(STEPS):
        state, _ = pipeline.step(state, case.batch(seed=step))
    copies = all_copies(pipeline, state)
    assert any(len(values) > 1 for values in copies)
    assert all(np.array_equal(values[0], other) for values in copies for other in values[1:])
