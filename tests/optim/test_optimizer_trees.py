"""Optimisers that look at paths, hold keys, or want a whole tree.

And what else meets a pipeline while it is built.
"""

import re
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import sweep
from _optimizers import refusing_empty_trees
from _refusals import check_refused
from _settings import make_settings
from _tolerances import assert_close

from jaxpipe import LayerSpec, PipeDataParallelTopology, Pipeline, PipelineModule
from jaxpipe.errors import ConfigError
from jaxpipe.optim._optax import optax_optimizers
from jaxpipe.topology import make_pipeline_mesh

X, Y = np.ones((2, 2, 4), np.float32), np.ones((2, 2, 4), np.float32)
PARTS = {"a": optax.sgd(0.1), "b": optax.adam(0.1)}


def build(
    optimizer: optax.GradientTransformation, layers: Any = None, stages: int = 2, **kwargs: Any
) -> Pipeline:
    loss_fn = kwargs.pop("loss_fn", lambda y, t: jnp.mean((y - t) ** 2))
    module = PipelineModule(
        layers or [LayerSpec(nn.Dense, 4)] * 4, num_stages=stages, loss_fn=loss_fn
    )
    mesh = make_pipeline_mesh(PipeDataParallelTopology(stages, kwargs.pop("replicas", 1)))
    return Pipeline(module, optimizer, mesh, (X[0], Y[0]), 2, make_settings(**kwargs))


def step(pipeline: Pipeline, labels: Any = Y) -> dict[str, Any]:
    return jax.device_get(pipeline.step(pipeline.init(), (X, labels, {}))[1])


@pytest.mark.slow
def test_labels_that_know_the_real_names_alone() -> None:
    known = {"0_Dense": "a", "1_Dense": "b", "2_Dense": "a", "3_Dense": "b"}

    def labels(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: known[path[1].key], tree)

    assert np.isfinite(step(build(optax.multi_transform(PARTS, labels)))["loss"])


@pytest.mark.slow
def test_an_optimizer_that_holds_a_key() -> None:
    noisy = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1))
    assert np.isfinite(step(build(noisy, stages=1))["loss"])


def by_rank(tree: Any) -> Any:
    """All layers but the last of the tree alike."""
    names = sorted(tree.get("layers", {}))
    labels = {name: "b" if name == names[-1] else "a" for name in names}
    return jax.tree.map_with_path(lambda path, _: labels[path[1].key], tree)


def by_layer(tree: Any) -> Any:
    """The last layer by its name."""
    return jax.tree.map_with_path(lambda path, _: "b" if path[1].key == "3_Dense" else "a", tree)


def rates(make: Any, labels: Any) -> optax.GradientTransformation:
    return optax.multi_transform({"a": make(0.1), "b": make(0.2)}, labels)


MIXED = [LayerSpec(nn.Dense, 4), LayerSpec(nn.Dense, 4, param_dtype=jnp.bfloat16)]
ENDS = [
    LayerSpec(nn.Dense, 4),
    LayerSpec(nn.LayerNorm),
    LayerSpec(nn.Dense, 4, use_bias=False),
    LayerSpec(nn.LayerNorm),
]
# The one is deprecated, the other wants a gradient for each sample.
NEEDED: dict[str, dict[str, Any]] = {
    "galore": {"rank": 2},
    "noisy_sgd": {"key": 0},
    "schedule_free": {"base_optimizer": optax.sgd(0.1)},
}
OPTAX = sorted({*optax_optimizers()} - {"optimistic_adam", "dpsgd"})


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_labels_by_layer_do_what_they_do_unpipelined(stages: int) -> None:
    optimizer = rates(optax.adam, by_layer)
    pipeline = build(optimizer, stages=stages)
    params = pipeline.module.init(jax.random.key(0), X[0])
    state = pipeline.states.init_from(params)
    grads = jax.tree.map(jnp.ones_like, params)
    state, _ = pipeline.update(state, pipeline.states.init_from(grads).params)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    assert_close(
        pipeline.params_tree(state.params), jax.device_get(optax.apply_updates(params, updates))
    )


@pytest.mark.parametrize("name", sweep(0, [*OPTAX]))
def test_optimizers_of_optax_are_refused_or_do_what_they_do_unpipelined(name: str) -> None:
    optimizer = optax_optimizers()[name](learning_rate=0.1, **NEEDED.get(name, {}))
    try:
        pipeline = build(optimizer, replicas=2, zero_stage=1)
    except ConfigError as error:
        # Refusing is the one of two right ends.
        assert re.search("optimizer must (update|treat a par)", str(error))  # noqa: PT017
        return
    params = pipeline.module.init(jax.random.key(0), X[0])
    state, opt_state = pipeline.states.init_from(params), optimizer.init(params)
    for _ in range(3):
        grads = jax.tree.map(lambda x: jnp.cos(x + 1), params)
        state, _ = pipeline.update(state, pipeline.states.init_from(grads).params)
        updates, opt_state = jax.jit(optimizer.update)(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    assert_close(pipeline.params_tree(state.params), jax.device_get(params))


def each(function: Any) -> optax.GradientTransformation:
    return optax.stateless(lambda grads, params: jax.tree.map(function, grads))


MASK = np.tri(4, dtype=np.float32)
BY_SHAPE = {
    "array of the leaf's shape": each(lambda g: g * np.eye(*g.shape) if g.ndim == 2 else g),
    "array that is held": each(lambda g: g * MASK if g.ndim == 2 else g),
    "zeros or ones by shape": each(lambda g: g * jnp.full_like(g, float(g.shape[0] > 1))),
}


@pytest.mark.parametrize("name", sweep(1, [*BY_SHAPE]))
def test_what_looks_at_shapes_does_so_on_whole_leaves(name: str) -> None:
    optimizer = optax.chain(BY_SHAPE[name], optax.sgd(0.1))
    pipeline = build(optimizer, replicas=2, zero_stage=1)
    params = pipeline.module.init(jax.random.key(0), X[0])
    grads = jax.tree.map(lambda x: jnp.cos(x + 1), params)
    stored = pipeline.states.init_from(grads).params
    state, _ = pipeline.update(pipeline.states.init_from(params), stored)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    assert_close(
        pipeline.params_tree(state.params), jax.device_get(optax.apply_updates(params, updates))
    )


def test_one_stage_sees_the_whole_tree() -> None:
    assert build(rates(optax.sgd, by_rank), stages=1)


def test_one_call_for_all_parameters_is_no_coupling() -> None:
    adam = optax.adam(0.1)
    assert build(optax.GradientTransformation(jax.jit(adam.init), jax.jit(adam.update)))


def test_a_saved_state_is_that_of_the_parameters() -> None:
    pipeline = build(optax.apply_if_finite(optax.sgd(0.1), 3), stages=1)
    copies = pipeline.states.catalog["opt_state/total_notfinite"].copies
    assert [copy[0].array.startswith("opt_state/own/") for copy in copies] == [True]


class Scale(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.param("scale", nn.initializers.ones, ())


FIRST = {"a": refusing_empty_trees(optax.sgd(0.1)), "b": optax.adam(0.1)}
RANK = "must treat a parameter the same whatever other parameters are in the tree.* of all 8 "
RANK += "parameters and a tree "
CHUNKED = {"layers": ENDS, "stages": 1, "schedule": "interleaved", "num_chunks": 2}
SCALED = [LayerSpec(nn.Dense, 4), LayerSpec(Scale), *[LayerSpec(nn.Dense, 4)] * 2]


def in_first(tree: Any) -> Any:
    return jax.tree.map_with_path(lambda path, _: "a" if path[1].key == "0_Dense" else "b", tree)


def first_of_rank(tree: Any) -> Any:
    return jax.tree.map(lambda label: label == "a", by_rank(tree))


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (
        *(rates(optax.sgd, by_rank), {}),
        rf"{RANK}of 4 of them, layers/0_Dense/bias to layers/1_Dense/kernel\. Let labels and masks "
        "depend on a parameter's path",
    ),
    (rates(optax.adam, by_rank), {}, f"{RANK}of 4 of them.*use one stage"),
    (
        *(optax.masked(optax.scale(0.5), first_of_rank), {}),
        "whose update of the parameter layers/1_Dense/bias differs between the tree of all 8",
    ),
    (
        *(optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1)), {}),
        rf"{RANK}.*optax\.add_noise.*fold each parameter's path into the key",
    ),
    (
        *(optax.inject_hyperparams(optax.sgd)(0.1), {"layers": MIXED}),
        "value of the state hyperparams/learning_rate differs.*is float32 in .* bfloat16 in.*"
        "hyperparam_dtype=jnp",
    ),
    (optax.clip_by_global_norm(1.0), CHUNKED, "num_chunks > 1 divides.*mixes layers/0_Dense"),
    (rates(optax.sgd, by_rank), CHUNKED, "whatever other parameters.*the tree of all 7 param"),
    (
        *(optax.multi_transform(PARTS, {"layers": {"0_Dense": "a"}}), {"stages": 1}),
        r"every par.* fails with \w+: .*1_Dense.* labels and masks as functions",
    ),
    (
        *(optax.multi_transform(FIRST, in_first), {}),
        "any part.*as optax.contrib.galore does, every stage",
    ),
    *(
        (
            *(optax.sm3(0.1), {"layers": SCALED, "stages": stages, "zero_stage": zero_stage}),
            "must take every parameter of the model, .* fails with IndexError: list index out of "
            r"range\. It fails with layers/1_Scale/scale of shape \(\), .* others\. Update",
        )
        for stages, zero_stage in ((1, 0), (2, 0), (2, 1))
    ),
]


def test_refused() -> None:
    module = PipelineModule([LayerSpec(nn.Dense, 4)] * 4, num_stages=1)
    mask = jax.tree.map(lambda x: x.ndim > 1, module.init(jax.random.key(0), X[0]))
    words = "must accept any part of the param.*Give masks and labels as functions"
    for zero_stage in (0, 1):
        call = partial(build, optax.adamw(0.1, mask=mask), zero_stage=zero_stage)
        check_refused(ConfigError, [(words, call)])
    table = [(words, partial(build, optimizer, **how)) for optimizer, how, words in REFUSED]
    check_refused(ConfigError, table)


@pytest.mark.parametrize(
    ("optimizer", "missing"),
    [
        pytest.param(
            optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau()),
            r"'value'\. Remove the tran.*set_lr",
            id="plateau",
        ),
        pytest.param(optax.contrib.sophia(0.1), r"obj_fn.*\. Remove the tran", id="sophia"),
        pytest.param(optax.lbfgs(), r"'value', 'grad', and 'value_fn'.*Remove the", id="lbfgs"),
        pytest.param(optax.lookahead(optax.sgd(1.0), 2, 0.5), "'fast'.*ad, whose", id="pairs"),
    ],
)
@pytest.mark.parametrize(("stages", "zero_stage"), sweep(2, [(1, 0), (2, 1), (2, 0)], unpack=True))
def test_an_optimizer_that_asks_for_more(
    optimizer: optax.GradientTransformation, missing: str, stages: int, zero_stage: int
) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"from gradients, state and par.* fails with \w+Error: .*{missing}",
    ):
        build(optimizer, stages=stages, zero_stage=zero_stage)


class Reporter(nn.Module):
    value: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        self.sow("metrics", "m", jnp.float32(self.value))
        return x


class Both(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(4)(Reporter(2.0, name="a-b")(Reporter(1.0, name="a")(x)))


@pytest.mark.slow
def test_reports_keep_their_names() -> None:
    metrics = step(build(optax.sgd(0.1), [LayerSpec(Both), *[LayerSpec(nn.Dense, 4)] * 2]))
    assert metrics["metrics"] == {"0_Both/a/m": 1.0, "0_Both/a-b/m": 2.0}


def test_a_weight_without_labels() -> None:
    module = PipelineModule(
        [LayerSpec(nn.Dense, 4)] * 2,
        num_stages=2,
        loss_fn=lambda y, _: (jnp.sum(y**2), jnp.float32(4)),
    )
    mesh = make_pipeline_mesh(PipeDataParallelTopology(2, 1))
    pipeline = Pipeline(module, optax.sgd(0.1), mesh, (X[0], None), 2)
    metrics = step(pipeline, None)
    assert metrics["weight"] == 8.0


@pytest.mark.slow
def test_gradients_of_narrow_parameters_are_summed_in_float32() -> None:
    layers = [
        LayerSpec(nn.Dense, 4, param_dtype=jnp.bfloat16),
        LayerSpec(nn.Dense, 4),
        LayerSpec(nn.Dense, 4),
    ]
    pipeline = build(optax.sgd(0.1), layers)
    summed, kept = (
        pipeline.states._sharding.grad_accum.gathered,
        pipeline.states._sharding.master.gathered,
    )
    assert {x.dtype.name for x in jax.tree.leaves(summed.struct())} == {"float32"}
    assert {x.dtype.name for x in jax.tree.leaves(kept.struct())} == {"float32", "bfloat16"}
    assert np.isfinite(step(pipeline)["grad_norm"])
