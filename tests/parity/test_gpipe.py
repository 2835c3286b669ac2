"""The pipeline against a plain GPipe, which shares no code with it.

The sequential model of the other tests runs the library's own layers. Here flax alone runs them.
"""

import functools
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _covering import sweep
from _gpipe import Layer, gpipe
from _models import ALL_MODELS, BLOCKS
from _oracle import SCHEDULES, Case
from _tolerances import assert_close, assert_loss
from jax.sharding import Mesh

MODELS = ("shapes", "tied", "linen", "tuple", "side", "weighted", "attention", "no_loss")


def plain(layers: Sequence[Any]) -> list[Layer]:
    """The layers as functions of the model's parameters, by flax alone."""
    return [_plain(i, layer) for i, layer in enumerate(layers)]


def _plain(index: int, layer: Any) -> Layer:
    made = layer
    if hasattr(layer, "typename"):
        made = layer.typename(*layer.module_args, **layer.module_kwargs)
    if not isinstance(made, nn.Module):
        return lambda params, x, side: made(x)
    taken = inspect.signature(type(made).__call__).parameters
    key = getattr(layer, "key", None)

    def run(params: Any, x: Any, side: Any) -> Any:
        of_layers = params.get("layers", {})
        own = [value for name, value in of_layers.items() if name.split("_")[0] == str(index)]
        (weights,) = own if key is None else [params["tied"][key]]
        given = {name: value for name, value in side.items() if name in taken}
        return made.apply(
            {"params": weights}, x, **given, method=getattr(layer, "forward_fn", None)
        )

    return run


def terms(loss_fn: Any, outputs: Any, labels: Any) -> tuple[jax.Array, jax.Array]:
    found = outputs if loss_fn is None else loss_fn(outputs, labels)
    return found if isinstance(found, tuple) else (found, jnp.float32(1))


def mesh_of(case: Case) -> Mesh:
    devices = np.array(jax.devices()[: case.stages * case.data])
    return Mesh(devices.reshape(case.stages, case.data), ("stage", "data"))


def check(case: Case) -> None:
    model = ALL_MODELS[case.model]
    pipeline = case.pipeline()
    state = pipeline.init()
    layers = plain(model.layers())
    cut = [len(layers) * stage // case.stages for stage in range(case.stages + 1)]
    run = gpipe(layers, cut, functools.partial(terms, model.loss_fn), mesh_of(case))
    loss, wanted = jax.device_get(run(pipeline.params_tree(state.params), case.batch()))
    metrics, gradients, _ = pipeline.gradients(state, case.batch())
    assert_loss(metrics["loss"], loss)
    assert_close(pipeline.params_tree(gradients), wanted)


@pytest.mark.parametrize(
    "case",
    sweep(1, [Case(model, stages=2, data=2, microbatches=5) for model in MODELS]),
    ids=str,
)
def test_every_kind_of_model(case: Case) -> None:
    check(case)


def of_schedule(name: str) -> Case:
    """On four stages where the model has a layer for each part."""
    case = Case(stages=4, microbatches=6, schedule=name)
    return case if case.parts <= BLOCKS else replace(case, stages=2)


@pytest.mark.parametrize(
    "case",
    sweep(1, [of_schedule(name) for name in dict.fromkeys(["zero-bubble-v", *SCHEDULES])]),
    ids=str,
)
def test_every_schedule(case: Case) -> None:
    check(case)
