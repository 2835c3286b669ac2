"""Training with frozen parameters, beside one device whose optimiser sees what is trained alone."""

from typing import Any

import jax
import numpy as np
import optax
from _models import ALL_MODELS
from _oracle import SCHEDULES, Case, make_batch, sequential_model, whole_reference
from _settings import make_settings
from _tolerances import assert_close, assert_loss

from jaxpipe import PipeDataParallelTopology, Pipeline
from jaxpipe.layers import flatten_dict, unflatten_dict
from jaxpipe.topology import make_pipeline_mesh

STEPS = 3


def make(case: Case, trainable: Any) -> Pipeline:
    module = case.module().replace(trainable=trainable)
    topology = module.given_topology or PipeDataParallelTopology(case.stages, case.data)
    settings = make_settings(
        schedule=SCHEDULES[case.schedule],
        skip_idle=case.skip_idle,
        scan_trunk=case.scan_trunk,
        **case.settings,
    )
    example = jax.tree.map(lambda x: x[0], case.batch())
    return Pipeline(
        module, case.optimizer, make_pipeline_mesh(topology), example, case.microbatches, settings
    )


def only(tree: Any, paths: Any) -> Any:
    return unflatten_dict(
        {path: leaf for path, leaf in flatten_dict(tree).items() if path in paths}
    )


def one_device(case: Case, trained: Any) -> dict[str, Any]:
    """The sequential model with an optimiser that sees the trained parameters alone."""
    model = sequential_model(case.model)
    params, held, limit = (
        model.params,
        model.collections,
        case.settings.get("gradient_clipping", 0.0),
    )
    state, losses, norms = case.optimizer.init(only(params, trained)), [], []
    for step in range(STEPS):
        batch = make_batch(ALL_MODELS[case.model], case.microbatches, case.data, seed=step)
        found = whole_reference(
            case.model,
            batch,
            case.microbatches,
            case.data,
            params=params,
            collections=held,
            step=step,
        )
        grads, held = only(found.grads, trained), found.collections
        norms.append(
            np.sqrt(
                sum(np.sum(np.square(np.asarray(g, np.float64))) for g in jax.tree.leaves(grads))
            )
        )
        if limit:
            grads = jax.tree.map(
                lambda g, n=norms[-1]: np.float32(g * min(1.0, limit / (n + 1e-6))), grads
            )
        mine = only(params, trained)
        updates, state = jax.jit(case.optimizer.update)(grads, state, mine)
        new = flatten_dict(jax.device_get(optax.apply_updates(mine, updates)))
        params = unflatten_dict({**flatten_dict(params), **new})
        losses.append(found.loss)
    return {"params": params, "losses": losses, "norms": norms}


def check(case: Case, trainable: Any) -> None:
    pipeline = make(case, trainable)
    trained = {
        path for path in flatten_dict(pipeline.trace.tree()) if path not in pipeline.trace.frozen
    }
    assert pipeline.trace.frozen
    wanted = one_device(case, trained)
    state, losses, norms = pipeline.init(), [], []
    first = flatten_dict(pipeline.params_tree(state.params))
    for step in range(STEPS):
        state, metrics = pipeline.step(state, case.batch(seed=step))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    found = pipeline.params_tree(state.params)
    assert_loss(losses, wanted["losses"], tolerance=STEPS * 1e-6)
    assert_loss(norms, wanted["norms"], tolerance=1e-5)
    assert_close(found, wanted["params"])
    for path in pipeline.trace.frozen:
        np.testing.assert_array_equal(flatten_dict(found)[path], first[path])
    moments = {key for key in pipeline.states.catalog if key.startswith("opt_state/")}
    assert not any("/".join(path) in key for key in moments for path in pipeline.trace.frozen)
