"""Mixtures of experts against a plain loop over tokens."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import sweep
from _settings import make_settings
from _tolerances import assert_close, assert_loss

from jaxpipe import LayerSpec, Pipeline, PipelineModule, ProcessTopology
from jaxpipe.errors import ConfigError
from jaxpipe.models import Experts, ExpertsConfig
from jaxpipe.topology import make_pipeline_mesh

BATCH, LENGTH, WIDTH, SIZE, EXPERTS = 2, 6, 6, 4, 8
ROUTERS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen": {"norm_topk_prob": False},
    "deepseek": {
        "gate": "sigmoid",
        "correction_bias": True,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
    },
    "llama4": {"gate": "sigmoid", "norm_topk_prob": False, "scale_inputs": True},
    "gpt_oss": {"router_bias": True, "expert_bias": True, "activation": "clamped"},
    "crowded": {"gate": "sigmoid", "correction_bias": True, "expert_bias": True},
    "everything": {"gate": "sigmoid", "scale_inputs": True, "expert_bias": True},
}

LATER = [router for router in ROUTERS if router not in ("crowded", "deepseek")]


def make_config(router: str, choices: int = 3, **more: Any) -> ExpertsConfig:
    return ExpertsConfig(EXPERTS, choices, SIZE, **{**ROUTERS[router], **more})


def make(config: ExpertsConfig) -> tuple[Any, jax.Array]:
    x = jax.random.normal(jax.random.key(0), (BATCH, LENGTH, WIDTH))
    shapes = jax.eval_shape(lambda: Experts(config).init(jax.random.key(1), x)["params"])
    leaves, treedef = jax.tree.flatten(nn.meta.unbox(shapes))
    keys = jax.random.split(jax.random.key(2), len(leaves))
    drawn = [
        jax.random.normal(key, leaf.shape) * (2.0 if leaf.ndim > 1 else 0.3)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    params = jax.tree.unflatten(treedef, drawn)
    if "correction_bias" in params["router"] and config.expert_bias:  # all choose the same experts
        params["router"]["correction_bias"] = jnp.arange(float(EXPERTS))
    return params, x


def ranked(values: np.ndarray, count: int) -> list[int]:
    return [int(i) for i in np.argsort(-values, kind="stable")[:count]]


def choose(config: ExpertsConfig, scores: np.ndarray, bias: np.ndarray) -> list[int]:
    ranks = scores + bias
    size = config.num_experts // config.n_group
    groups = ranks.reshape(config.n_group, size)
    if config.topk_group < config.n_group:
        best = ranked(np.sort(groups)[:, -2:].sum(-1), config.topk_group)
        ranks = np.where(np.isin(np.arange(len(ranks)) // size, best), ranks, -np.inf)
    return ranked(ranks, config.num_experts_per_tok)


def expert(config: ExpertsConfig, params: Any, e: int, x: jax.Array) -> jax.Array:
    def product(name: str, y: jax.Array) -> jax.Array:
        return y @ params[name][e] + (params[f"{name}_bias"][e] if config.expert_bias else 0.0)

    gate, up = product("gate", x), product("up", x)
    if config.activation == "silu":
        return product("down", gate * jax.nn.sigmoid(gate) * up)
    gate, up = jnp.minimum(gate, 7.0), jnp.minimum(jnp.maximum(up, -7.0), 7.0)
    return product("down", (up + 1) * gate * jax.nn.sigmoid(1.702 * gate))


def loop(config: ExpertsConfig, params: Any, x: jax.Array) -> jax.Array:
    """The mixture, token by token and expert by expert."""
    router = params["router"]
    rows = []
    for token in x.reshape(-1, WIDTH):
        logits = token @ router["kernel"] + (router["bias"] if config.router_bias else 0.0)
        scores = jax.nn.softmax(logits) if config.gate == "softmax" else jax.nn.sigmoid(logits)
        bias = router["correction_bias"] if config.correction_bias else jnp.zeros(EXPERTS)
        # Choices are integers, which `jax.grad` does not see.
        found = [np.asarray(jax.lax.stop_gradient(each)) for each in (scores, bias)]
        chosen = choose(config, *found)
        total = sum(scores[e] for e in chosen) if config.norm_topk_prob else 1.0
        y = jnp.zeros(WIDTH)
        for e in chosen:
            gate = config.routed_scaling_factor * scores[e] / total
            y += (
                expert(config, params, e, gate * token)
                if config.scale_inputs
                else gate * expert(config, params, e, token)
            )
        rows.append(y)
    return jnp.stack(rows).reshape(x.shape)


def with_gradients(function: Any, params: Any, x: jax.Array) -> Any:
    weights = jax.random.normal(jax.random.key(3), x.shape)

    def loss(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = function(params, x)
        return jnp.sum(y * weights), y

    gradients, y = jax.grad(loss, (0, 1), has_aux=True)(params, x)
    return y, gradients


def applied(config: ExpertsConfig, params: Any, x: jax.Array) -> Any:
    module = Experts(config)
    return jax.jit(
        lambda params, x: with_gradients(
            lambda params, x: module.apply({"params": params}, x), params, x
        )
    )(params, x)


@pytest.mark.slow
@pytest.mark.parametrize("router", sweep(1, ["deepseek", "crowded", *LATER]))
def test_all_gradients_are_those_of_a_loop_over_tokens(router: str) -> None:
    config = make_config(router)
    params, x = make(config)
    wanted = with_gradients(lambda params, x: loop(config, params, x), params, x)
    found = applied(config, params, x)
    found[1][0]["router"].pop("correction_bias", None)
    wanted[1][0]["router"].pop("correction_bias", None)
    assert_close(found, wanted)


MESHES = [
    {"pipe": 2, "data": 2, "expert": 2},
    {"pipe": 4, "data": 1, "expert": 2},
    {"pipe": 2, "data": 1, "fsdp": 2, "expert": 2},
    {"pipe": 2, "data": 1, "sequence": 2, "expert": 2},
    {"pipe": 1, "data": 1, "fsdp": 2, "sequence": 2, "expert": 2},
    {"pipe": 2, "data": 1, "expert": 2, "model": 2},
]


@pytest.mark.parametrize("axes", sweep(1, MESHES))
@pytest.mark.parametrize("capacity_factor", sweep(1, [None, 0.5]))
def test_a_pipeline_has_the_gradients_of_one_device(
    axes: dict[str, int], capacity_factor: float | None
) -> None:
    check_pipeline(axes, capacity_factor)


OTHERS: dict[str, tuple[dict[str, int], float | None, dict[str, Any]]] = {
    "devices have the same tokens": ({"pipe": 2, "data": 1, "expert": 2}, None, {"samples": 1}),
    "and some have one less": (
        {"pipe": 1, "data": 1, "sequence": 2, "expert": 2},
        None,
        {"samples": 1},
    ),
    "and a capacity": ({"pipe": 2, "data": 1, "expert": 4}, 0.5, {"samples": 3}),
    "four devices": ({"pipe": 2, "data": 1, "expert": 4}, None, {"samples": 4}),
    "zero-bubble": (
        {"pipe": 2, "data": 1, "fsdp": 2, "expert": 2},
        None,
        {"schedule": "zero-bubble"},
    ),
    "recompute": ({"pipe": 2, "data": 1, "expert": 2}, None, {"interval": 1}),
}


@pytest.mark.parametrize("name", sweep(0, list(OTHERS)))
def test_other_layouts_have_the_gradients_of_one_device(name: str) -> None:
    axes, capacity_factor, more = OTHERS[name]
    check_pipeline(axes, capacity_factor, **more)


def check_pipeline(
    axes: dict[str, int],
    capacity_factor: float | None,
    samples: int = BATCH,
    schedule: str = "1f1b",
    interval: int = 0,
) -> None:
    config = make_config("everything", 2, capacity_factor=capacity_factor)
    blocks = [LayerSpec(Experts, config, 0.5)] * (4 if axes["pipe"] == 4 else 2)
    layers = [LayerSpec(nn.Dense, WIDTH), *blocks, LayerSpec(nn.Dense, 3)]
    width = samples * axes["data"] * axes.get("fsdp", 1)
    x = jax.random.normal(jax.random.key(0), (2, width, LENGTH, 4)) + 1.0  # crowds experts
    labels = jax.random.normal(jax.random.key(1), (2, width, LENGTH, 3))

    def squares(y: jax.Array, labels: jax.Array) -> jax.Array:
        return jnp.mean((y - labels) ** 2)

    alone = PipelineModule(layers, num_stages=1, loss_fn=squares)
    params = alone.init(jax.random.key(2), x[0])
    loss, wanted = jax.jit(
        jax.value_and_grad(
            lambda params: sum(squares(alone.apply(params, x[m]), labels[m]) for m in (0, 1)) / 2
        )
    )(params)
    topology = ProcessTopology(list(axes), list(axes.values()))
    module = PipelineModule(
        layers,
        topology=topology,
        loss_fn=squares,
        partition_method="uniform",
        activation_checkpoint_interval=interval,
    )
    example, mesh = (x[0], labels[0]), make_pipeline_mesh(topology)
    made = Pipeline(module, optax.identity(), mesh, example, 2, make_settings(schedule))
    metrics, gradients, _ = made.gradients(made.states.init_from(params), (x, labels))
    assert_loss(metrics["loss"], loss)
    assert_close(made.params_tree(gradients), wanted)
    loads = [value for name, value in metrics["metrics"].items() if name.endswith("max_load")]
    assert len(loads) == len(blocks)
    assert all(value > 1.25 for value in loads)  # slots do not suffice


def biased_model(num_stages: int) -> PipelineModule:
    config = make_config("deepseek", 2, n_group=1, topk_group=1)
    return PipelineModule(
        [LayerSpec(nn.Dense, WIDTH), *[LayerSpec(Experts, config, 0.5)] * 2],
        num_stages=num_stages,
        loss_fn=lambda y, t: jnp.mean((y - t) ** 2),
        partition_method=[0, 2, 3],
    )


@pytest.mark.slow
def test_a_correction_bias_keeps_its_bits_and_follows_the_load_of_the_whole_batch() -> None:
    module = biased_model(2)
    x = jax.random.normal(jax.random.key(0), (2, 2 * BATCH, LENGTH, 4))
    labels = jnp.ones((2, 2 * BATCH, LENGTH, WIDTH))
    start = jnp.linspace(14.0, 14.01, EXPERTS)

    def is_bias(path: Any) -> bool:
        return path[-1].key == "correction_bias"

    params = module.init(jax.random.key(0), x[0, :BATCH])
    params = jax.tree.map_with_path(lambda path, leaf: start if is_bias(path) else leaf, params)
    cast = module.trace(x[0, :BATCH]).cast_params(1, jnp.bfloat16)
    assert jax.tree.map(lambda leaf: leaf.dtype == jnp.float32, cast) == jax.tree.map_with_path(
        lambda path, _: is_bias(path), cast
    )
    mesh = make_pipeline_mesh(ProcessTopology(["pipe", "data"], [2, 2]))
    after = {}
    for rate in (0.0, 0.125):
        settings = make_settings(router_bias_update_rate=rate)
        optimizer = optax.adamw(1e-2, weight_decay=0.5)
        made = Pipeline(module, optimizer, mesh, (x[0], labels[0]), 2, settings)
        state, _ = made.step(made.states.init_from(params), (x, labels))
        after[rate] = made.params_tree(state.params)["layers"]
    assert all(
        (after[0.0][f"{i}_Experts"]["router"]["correction_bias"] == start).all() for i in (1, 2)
    )
    dense, router = params["layers"]["0_Dense"], params["layers"]["1_Experts"]["router"]
    scores = jax.nn.sigmoid(
        (x @ dense["kernel"] + dense["bias"][None, None, None]) @ router["kernel"]
    )
    rows = np.asarray(scores).reshape(-1, EXPERTS) + np.asarray(start)
    loads = np.bincount([e for row in rows for e in ranked(row, 2)], minlength=EXPERTS)
    moved = after[0.125]["1_Experts"]["router"]["correction_bias"] - start
    np.testing.assert_allclose(moved, -0.125 * np.sign(loads - loads.mean()), atol=1e-5)


def test_a_rate_needs_a_bias() -> None:
    module = PipelineModule(
        [LayerSpec(nn.Dense, 4)], num_stages=1, loss_fn=lambda y, t: jnp.mean(y)
    )
    example = jnp.ones((2, 4)), jnp.ones((2, 4))
    mesh = make_pipeline_mesh(ProcessTopology(["pipe", "data"], [1, 1]))
    settings = make_settings(router_bias_update_rate=0.1)
    with pytest.raises(ConfigError, match=r"router_bias_update_rate=0.1. Remove it, or set"):
        Pipeline(module, optax.sgd(1.0), mesh, example, 1, settings)


@pytest.mark.slow
def test_a_capacity_for_all_is_exact() -> None:
    config = make_config("everything")
    params, x = make(config)
    roomy = make_config("everything", capacity_factor=EXPERTS)
    assert_close(applied(roomy, params, x), applied(config, params, x))
    _, sown = Experts(roomy).apply({"params": params}, x, mutable=["metrics"])
    assert sown["metrics"]["passed_by"] == (0.0,)


def test_a_correction_bias_chooses_only() -> None:
    config = make_config("deepseek", choices=1, n_group=1, topk_group=1)
    params, x = make(config)
    params["router"]["correction_bias"] = 10.0 * jnp.arange(EXPERTS)
    _, (gradients, _) = applied(config, params, x)
    # Its gradient is only the sign of its load above the mean, and too small for norms.
    signs = np.sign(gradients["router"]["correction_bias"])
    assert signs.tolist() == [-1.0] * (EXPERTS - 1) + [1.0]
    assert np.abs(gradients["router"]["correction_bias"]).max() < 1e-19
    used = np.abs(gradients["down"]).sum((1, 2)) > 0
    assert used.tolist() == [False] * (EXPERTS - 1) + [True]


@pytest.mark.slow
def test_losses_of_the_router() -> None:
    for router in ("mixtral", "deepseek"):
        config = make_config(router, balance=0.5, z_loss=0.25)
        params, x = make(config)
        _, sown = Experts(config).apply({"params": params}, x, mutable=["losses"])
        logits = np.asarray(x @ params["router"]["kernel"], np.float64).reshape(-1, EXPERTS)
        z = np.mean(np.log(np.exp(logits).sum(-1)) ** 2)
        scores = np.exp(logits) if router == "mixtral" else 1 / (1 + np.exp(-logits))
        bias = params["router"].get("correction_bias", np.zeros(EXPERTS))
        share = scores / scores.sum(-1, keepdims=True)
        ranks = share if router == "mixtral" else scores
        counts = np.bincount(
            [e for row in ranks for e in choose(config, row, bias)], minlength=EXPERTS
        )
        balance = EXPERTS * np.sum(counts / len(logits) * share.mean(0))
        found = {name: value for name, (value,) in sown["losses"].items()}
        wanted = {"balance": np.float32(0.5 * balance), "z_loss": np.float32(0.25 * z)}
        assert_close(found, wanted)
