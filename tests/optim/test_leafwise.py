"""Which optimisers may run stage by stage, and that those which may do what they do unpipelined."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import sweep
from _optimizers import refusing_empty_trees
from _oracle import Case, cached_reference, sequential
from _tolerances import assert_close

from jaxpipe import PipeDataParallelTopology, Pipeline, PipelineModule
from jaxpipe.errors import ConfigError
from jaxpipe.optim import is_uniform_over_stages, trace_optimizer
from jaxpipe.topology import make_pipeline_mesh


def by_path(params: Any) -> Any:
    """Labels that look at the layer's place in the model and at the parameter's name."""
    return jax.tree.map_with_path(
        lambda path, _: "decay" if "kernel" in str(path) else "none", params
    )


def in_late_layers(params: Any) -> Any:
    def is_late(path: Any, _: Any) -> bool:
        return int(path[1].key.split("_")[0]) > 4

    return jax.tree.map_with_path(is_late, params)


LEAFWISE = {
    "conditional": optax.conditionally_mask(optax.lamb(1e-2), lambda step: step != 1),
    "no empty trees": refusing_empty_trees(optax.lamb(1e-2)),
    "novograd": optax.novograd(1e-2, weight_decay=0.1),
    "passed through": optax.chain(
        optax.conditionally_transform(optax.adam(1e-2), lambda step: step > 0), optax.sgd(0.1)
    ),
    "every second step": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "sgd": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(1e-2),
    "adamw masked by name": optax.adamw(
        1e-2, mask=lambda p: jax.tree.map(lambda label: label == "decay", by_path(p))
    ),
    "adamw masked by layer": optax.adamw(1e-2, weight_decay=0.1, mask=in_late_layers),
    "lion": optax.lion(1e-3),
    "lamb": optax.lamb(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "schedule": optax.adam(optax.linear_schedule(1e-2, 1e-3, 3)),
    "multi_transform": optax.multi_transform(
        {"decay": optax.adam(1e-2), "none": optax.sgd(0.1)}, by_path
    ),
    "clip by value": optax.chain(optax.clip(0.01), optax.sgd(0.1)),
    "clip by block": optax.chain(optax.clip_by_block_rms(0.01), optax.sgd(0.1)),
}

COUPLING = {
    "clip_by_global_norm": optax.clip_by_global_norm(1.0),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
    "apply_if_finite": optax.apply_if_finite(optax.sgd(0.1), 3),
    "masked": optax.masked(optax.clip_by_global_norm(1.0), in_late_layers),
    "in a branch": optax.conditionally_mask(optax.clip_by_global_norm(1.0), lambda step: step > 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sweep(1, [*LEAFWISE]))
def test_leafwise_optimisers_do_what_they_do_unpipelined(name: str) -> None:
    optimizer = LEAFWISE[name]
    case = Case(stages=4, cut="trunk", optimizer=optimizer)
    pipeline, params = case.pipeline(), sequential("linen")[0]
    state, opt_state = pipeline.init(), optimizer.init(params)
    updater, update = pipeline.states._updater, jax.jit(optimizer.update)
    grads = cached_reference("linen", case.microbatches, case.data)[1]
    stored = pipeline.states.init_from(grads).params

    def one_stage(state: Any, grads: Any) -> Any:
        state, grads = jax.tree.map(lambda x: x[0], (state, grads))
        new = updater.update(jax.lax.axis_index("stage"), state[0], grads, state[1])
        return jax.tree.map(lambda x: x[None], new)

    spec = jax.sharding.PartitionSpec("stage")
    run = jax.jit(
        jax.shard_map(
            one_stage, mesh=pipeline.mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False
        )
    )
    stages = (state.params, state.opt_state)
    for _ in range(3):
        stages = run(stages, stored)
        updates, opt_state = update(grads, opt_state, params)
        params = jax.device_get(optax.apply_updates(params, updates))
    assert_close(pipeline.params_tree(stages[0]), params)


@pytest.mark.parametrize("name", COUPLING)
def test_coupling_optimisers_are_refused_on_several_stages(name: str) -> None:
    case = Case(stages=2, optimizer=COUPLING[name])
    match = (
        r"num_stages > 1 or ZeRO.* one whose result mixes .* and .*clip_by_global_norm set "
        r"gradient_clipping"
    )
    with pytest.raises(ConfigError, match=match):
        case.pipeline()


@pytest.mark.slow
@pytest.mark.parametrize("name", sweep(2, [*COUPLING]))
def test_coupling_optimisers_are_allowed_on_one_stage(name: str) -> None:
    case = Case(stages=1, microbatches=1, optimizer=COUPLING[name])
    assert case.pipeline().init().step == 0


def test_coupling_is_seen_where_each_stage_has_one_parameter() -> None:
    layers = [nn.Dense(4, use_bias=False), nn.Dense(4, use_bias=False)]
    module = PipelineModule(layers, num_stages=2, loss_fn=lambda y, t: jnp.mean((y - t) ** 2))
    x = np.ones((2, 4), np.float32)
    mesh = make_pipeline_mesh(PipeDataParallelTopology(2, 1))
    with pytest.raises(
        ConfigError, match=r"mixes layers/0_Dense/kernel and layers/1_Dense/kernel.*remove"
    ):
        Pipeline(module, optax.clip_by_global_norm(1.0), mesh, (x, x), 1)


@pytest.mark.slow
def test_clipping_on_one_stage_is_that_of_the_model() -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1))
    case = Case(stages=1, data=2, optimizer=optimizer)
    pipeline, params = case.pipeline(), sequential("linen")[0]
    state, _ = pipeline.step(pipeline.init(), case.batch())
    grads = cached_reference("linen", case.microbatches, case.data)[1]
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    assert_close(
        pipeline.params_tree(state.params), jax.device_get(optax.apply_updates(params, updates))
    )


def by_stage(params: Any, labels: Sequence[Any]) -> Any:
    """Labels of the layers of the two stages below."""
    known = {f"{i}_Dense": label for i, label in enumerate(labels)}
    return jax.tree.map_with_path(lambda path, _: known.get(path[1].key, labels[0]), params)


def late_ones(params: Any) -> Any:
    return optax.EmptyState(), jax.tree.map_with_path(
        lambda path, x: jnp.full_like(x, float(path[1].key >= "2")), params
    )


def swap_late(updates: Any, state: Any, params: Any = None) -> Any:
    def one(path: Any, g: Any, first: Any, second: Any) -> Any:
        return g + (first if path[1].key < "2" else second)

    return jax.tree.map_with_path(one, updates, *state), state


def two_zeros(params: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params)


def two_parts(labels: str) -> optax.GradientTransformation:
    return optax.multi_transform(
        {"a": optax.adam(0.1), "b": optax.adam(0.1)}, lambda tree: by_stage(tree, labels)
    )


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        pytest.param(optax.adam(0.1), True, id="adam"),
        pytest.param(LEAFWISE["adamw masked by name"], True, id="masked by name"),
        pytest.param(two_parts("abab"), True, id="layers of a stage differ"),
        pytest.param(two_parts("abbb"), False, id="equal parts with a state of their own"),
        pytest.param(
            optax.masked(optax.scale(2.0), lambda t: by_stage(t, [False, False, False, True])),
            False,
            id="masked by layer",
        ),
        pytest.param(
            optax.GradientTransformation(late_ones, optax.identity().update),
            False,
            id="first state",
        ),
        pytest.param(
            optax.GradientTransformation(two_zeros, swap_late),
            False,
            id="equal first states swapped",
        ),
    ],
)
def test_stages_are_alike_where_the_optimiser_has_one_program_for_them(
    optimizer: optax.GradientTransformation, expected: bool
) -> None:
    like = jax.ShapeDtypeStruct((3,), jnp.float32)
    tree = {
        "layers": {f"{i}_Dense": {"kernel": like, "bias": like} for i in range(4)},
        "tied": {"e": {"kernel": like}},
    }
    stages = [
        {
            ("layers", f"{2 * s + i}_Dense", key): f"{i}/{key}"
            for i in range(2)
            for key in ("kernel", "bias")
        }
        for s in range(2)
    ]
    assert is_uniform_over_stages(trace_optimizer(optimizer, tree), stages) == expected


def test_building_calls_the_optimiser_on_the_whole_and_on_each_group() -> None:
    seen = []

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        seen.extend(jax.tree.leaves(updates))
        return updates, state

    optimizer = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    pipeline = Case(stages=4, cut="trunk", optimizer=optimizer).pipeline()
    groups = pipeline.states._updater._groups
    assert len(set(groups["trunk"].parts)) == 1
    parts = {frozenset(part.paths.values()) for each in groups.values() for part in each.parts}
    assert len(seen) == len(jax.tree.leaves(sequential("linen")[0])) + sum(map(len, parts))
