"""Transformer layers in a pipeline against the same layers on one device.

Dropout, masks, lengths, recompute.
"""

import functools
import warnings
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import covering, sweep
from _settings import make_settings
from _tolerances import assert_close, assert_loss

from jaxpipe import (
    DeepSpeedTransformerConfig,
    DeepSpeedTransformerLayer,
    LayerSpec,
    PipeDataParallelTopology,
    Pipeline,
    PipelineModule,
    PipeModelDataParallelTopology,
    microbatch_key,
)
from jaxpipe.topology import make_pipeline_mesh

LAYERS, SAMPLES, T, H, N, MICROBATCHES = 4, 2, 5, 16, 4, 3

SWITCHES: dict[str, dict[str, Any]] = {
    "none": {},
    "switches": {"normalize_invertible": True, "gelu_checkpoint": True},
    "kernels": {"recompute": "kernels"},
    "all": {"recompute": "all"},
    "xla": {"attention": "xla", "attn_dropout_checkpoint": True},
}
DROPOUT = {"attn_dropout_ratio": 0.2, "hidden_dropout_ratio": 0.3}


@dataclass(frozen=True)
class Case:
    pre: bool = True
    hidden: str = "causal"
    switches: str = "none"
    dropout: bool = False
    stages: int = 2
    data: int = 1
    model: int = 1
    schedule: str = "1f1b"

    def config(self) -> DeepSpeedTransformerConfig:
        given = {**SWITCHES[self.switches], **(DROPOUT if self.dropout else {})}
        return DeepSpeedTransformerConfig(
            hidden_size=H,
            heads=N,
            num_hidden_layers=LAYERS,
            initializer_range=0.2,
            pre_layer_norm=self.pre,
            causal=self.hidden == "causal",
            **given,
        )

    def module(self, stages: int = 1, data: int = 1, model: int = 1) -> PipelineModule:
        topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=model, num_dp=data)
        layers = [LayerSpec(DeepSpeedTransformerLayer, self.config()) for _ in range(LAYERS)]
        return PipelineModule(
            layers, topology=topology, loss_fn=lambda y, t: jnp.mean((y - t) ** 2)
        )

    def batch(self) -> tuple[Any, Any, dict[str, Any]]:
        rng = np.random.default_rng(0)
        shape = MICROBATCHES, SAMPLES * self.data
        inputs, labels = rng.normal(size=(2, *shape, T, H)).astype(np.float32)
        lengths = rng.integers(1, T + 1, shape, np.int32)
        mask = np.arange(T) < lengths[..., None]
        return (
            inputs,
            labels,
            {"lengths": {"lengths": lengths}, "mask": {"attention_mask": mask}}.get(
                self.hidden, {}
            ),
        )


@functools.cache
def wanted(pre: bool, hidden: str, switches: str, dropout: bool, data: int) -> tuple[float, Any]:
    """Loss and gradients of one device; what is recomputed changes neither."""
    case = Case(pre, hidden, "xla" if switches == "xla" else "none", dropout, data=data)
    module, (inputs, labels, side) = case.module(), case.batch()
    params = module.init(
        jax.random.key(module.base_seed), inputs[0, :SAMPLES], side=part(side, 0, 0)
    )

    @jax.jit
    @jax.value_and_grad
    def gradient(params: Any, inputs: Any, labels: Any, side: Any, key: Any) -> Any:
        return module.loss(module.apply(params, inputs, train=True, key=key, side=side), labels)

    found = []
    for m in range(MICROBATCHES):
        for r in range(data):
            key = microbatch_key(jax.random.key(1234), 0, m, r)
            found.append(
                gradient(params, part(inputs, m, r), part(labels, m, r), part(side, m, r), key)
            )
    return jax.tree.map(
        lambda *xs: np.mean(np.asarray(xs, np.float64), 0).astype(np.float32),
        *jax.device_get(found),
    )


def part(tree: Any, microbatch: int, replica: int) -> Any:
    own = slice(replica * SAMPLES, (replica + 1) * SAMPLES)
    return jax.tree.map(lambda x: x[microbatch, own], tree)


def make_pipeline(case: Case) -> Pipeline:
    module = case.module(case.stages, case.data, case.model)
    example = jax.tree.map(lambda x: x[0], case.batch())
    settings = make_settings(schedule=case.schedule)
    mesh = make_pipeline_mesh(module.topology())
    return Pipeline(module, optax.identity(), mesh, example, MICROBATCHES, settings)


def check(case: Case) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "No effect: (gelu|normalize)")
        pipeline = make_pipeline(case)
        metrics, gradients, _ = pipeline.gradients(pipeline.init(), case.batch())
    loss, grads = wanted(case.pre, case.hidden, case.switches, case.dropout, case.data)
    assert_loss(metrics["loss"], loss)
    assert_close(pipeline.params_tree(gradients), grads)


FACTORS: dict[str, tuple[Any, ...]] = {
    "pre": (True, False),
    "hidden": ("causal", "mask", "lengths"),
    "switches": tuple(SWITCHES),
    "dropout": (False, True),
    "layout": ((1, 1, 1), (2, 2, 1), (4, 1, 1), (2, 1, 2), (4, 1, 2), (1, 2, 2)),
    "schedule": ("1f1b", "zero-bubble", "interleaved"),
}


def is_valid(chosen: dict[str, Any]) -> bool:
    can_interleave = chosen.get("schedule") != "interleaved" or chosen.get("layout", (1,))[0] in (
        1,
        2,
    )
    return can_interleave and not (chosen.get("switches") == "xla" and chosen.get("dropout"))


def pairs() -> list[Case]:
    found = []
    for chosen in covering(FACTORS, is_valid):
        stages, data, model = chosen.pop("layout")
        found.append(Case(**chosen, stages=stages, data=data, model=model))
    return found


@pytest.mark.parametrize(
    "case",
    sweep(
        0,
        [
            Case(pre=False, hidden="mask", data=2),
            Case(switches="kernels", dropout=True, schedule="zero-bubble"),
            Case(hidden="lengths", dropout=True, model=2),
            *pairs(),
        ],
    ),
    ids=str,
)
def test_a_pipeline_is_one_device(case: Case) -> None:
    check(case)


def kept(**given: Any) -> int:
    """Bytes that a stage of one layer keeps of a microbatch."""
    config = DeepSpeedTransformerConfig(
        hidden_size=32, heads=2, num_hidden_layers=2, causal=True, **given
    )
    layers = [LayerSpec(DeepSpeedTransformerLayer, config) for _ in range(2)]
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=1, num_dp=1)
    module = PipelineModule(layers, topology=topology, loss_fn=lambda y, t: jnp.mean((y - t) ** 2))
    mesh = make_pipeline_mesh(module.topology())
    x = jax.ShapeDtypeStruct((2, 512, 32), jnp.float32)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "No effect: (gelu|normalize)")
        pipeline = Pipeline(module, optax.identity(), mesh, (x, x), 2, make_settings())
    return sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pipeline.stage.residuals)
    )


@pytest.mark.slow
def test_what_a_stage_keeps_of_a_layer() -> None:
    """In activations.

    Its input, q, k and v, the context, the sum after it, four of the feed-forward part; or less.
    """
    unit = 2 * 512 * 32 * 4
    plain = kept()
    assert plain / unit == pytest.approx(10, abs=0.2)
    assert kept(normalize_invertible=True, gelu_checkpoint=True) <= plain
    assert kept(recompute="kernels") / unit == pytest.approx(2, abs=0.1)
    assert kept(recompute="all") / unit == pytest.approx(1, abs=0.01)
    assert kept(attention="xla", attn_dropout_checkpoint=True) <= kept(attention="xla") - 10 * unit


def test_a_mesh_without_the_axis_model_divides_no_heads() -> None:
    module = PipelineModule(
        [LayerSpec(DeepSpeedTransformerLayer, Case().config()) for _ in range(2)],
        topology=PipeDataParallelTopology(1, 2),
        loss_fn=lambda y, t: jnp.mean((y - t) ** 2),
    )
    x = jax.ShapeDtypeStruct((2 * SAMPLES, T, H), jnp.float32)
    mesh = make_pipeline_mesh(module.topology())
    pipeline = Pipeline(module, optax.identity(), mesh, (x, x), 2, make_settings(zero_stage=3))
    assert "model" not in str(
        jax.tree.map(lambda leaf: leaf.sharding.spec, pipeline.states.struct.params)
    )
