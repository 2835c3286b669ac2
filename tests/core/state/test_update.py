"""Shards updated each by itself become what the optimiser makes of the whole tree."""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import sweep
from _optimizers import refusing_empty_trees
from _stages import make_mesh, on_devices, struct

from jaxpipe import LayerSpec, PipelineModule
from jaxpipe.core.state import ModelParams, Updater, opt_state_keys, zero_sharding
from jaxpipe.core.state._zero import ByElements, ByLeaves, Replicated, ShardLayout
from jaxpipe.layers import flatten_dict, layer_signatures, unflatten_dict
from jaxpipe.schedules import OneFOneBSchedule, lower_schedule
from jaxpipe.schedules.partition import cut_stages

ADAMW = optax.adamw(
    0.1, weight_decay=0.3, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)
)


class Model(NamedTuple):
    params: ModelParams
    tree: Any


@functools.cache
def model() -> Model:
    """On each of two stages two equal layers.

    Before them is a wide one and after them a narrow one.
    """
    layers = [nn.Dense(4), *[LayerSpec(nn.Dense, 4)] * 4, nn.Dense(2)]
    module = PipelineModule(layers, num_stages=2, loss_fn=lambda y, t: jnp.mean((y - t) ** 2))
    trace = module.trace(struct(1, 3))
    cuts = cut_stages(layer_signatures(module.layers, trace), [0, 3, 6])
    placement = lower_schedule(OneFOneBSchedule, 2, 2).placement
    return Model(
        ModelParams(trace, cuts, placement), module.init(jax.random.key(0), jnp.ones((1, 3)))
    )


def storage_of(tree: Any, stage: int) -> Any:
    flat, params = flatten_dict(tree), model().params
    return params.master_layout.pack(
        stage, {name: flat[path] for name, path in params.stages[stage].paths.items()}
    )


def tree_of(storages: Any) -> Any:
    params = model().params
    leaves = [params.master_layout.unpack(stage, storage) for stage, storage in enumerate(storages)]
    return unflatten_dict(
        {
            path: leaves[s][name]
            for s, stage in enumerate(params.stages)
            for name, path in stage.paths.items()
        }
    )


def shardings() -> dict[str, ShardLayout]:
    layout = model().params.master_layout
    return {
        "replicated": Replicated(layout),
        "elements": ByElements(layout, 2, {}),
        "leaves": ByLeaves(layout, 2, ()),
    }


def test_names_in_trunk_and_off_it() -> None:
    params = model().params
    assert tuple(params.stages[0].trunk) == (
        "trunk/0/0/bias",
        "trunk/0/0/kernel",
        "trunk/0/1/bias",
        "trunk/0/1/kernel",
    )
    assert [sorted(stage.off_trunk) for stage in params.stages] == [
        ["layers/0_Dense/bias", "layers/0_Dense/kernel"],
        ["layers/5_Dense/bias", "layers/5_Dense/kernel"],
    ]
    assert params.stages[1].trunk["trunk/0/0/kernel"] == ("layers", "3_Dense", "kernel")
    assert (params.tied, params.stacked_off_trunk, params.vocab_names) == ({}, [], [])


def lower_triangle(path: Any, x: jax.Array) -> jax.Array:
    """Of one kernel of the second stage, which is 4 x 4 where it is whole."""
    is_kernel = jax.tree_util.keystr(path, simple=True, separator="/") == "layers/3_Dense/kernel"
    return x * np.tri(4, dtype=np.float32) if is_kernel else x


@pytest.mark.parametrize(
    ("optimizer", "form"),
    [
        pytest.param(ADAMW, ByElements, id="by element"),
        pytest.param(optax.lamb(0.1), ByLeaves, id="by leaf"),
        pytest.param(
            optax.stateless(lambda updates, _: jax.tree.map_with_path(lower_triangle, updates)),
            ByLeaves,
            id="fails with pieces",
        ),
    ],
)
def test_leaves_stay_whole_where_the_optimizer_needs_them_whole(
    optimizer: optax.GradientTransformation, form: type[ShardLayout]
) -> None:
    assert isinstance(zero_sharding(model().params, optimizer, 2, {}).trained, form)


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    sweep(
        3,
        [
            pytest.param("elements", ADAMW, id="elements"),
            pytest.param("leaves", ADAMW, id="leaves"),
            pytest.param("elements", optax.conditionally_mask(ADAMW, lambda n: n > 0), id="masked"),
            pytest.param("replicated", ADAMW, id="replicated"),
            pytest.param("leaves", refusing_empty_trees(optax.lamb(0.1)), id="no empty trees"),
        ],
        unpack=True,
    ),
)
def test_two_updates_are_those_of_the_whole_tree(
    kind: str,
    optimizer: optax.GradientTransformation,
) -> None:
    sharding, tree = shardings()[kind], model().tree
    updater = Updater(model().params, sharding, optimizer)
    grads = jax.tree.map(
        lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), tree
    )

    def device(params: Any, grads: Any) -> Any:
        stage, replica = jax.lax.axis_index("stage"), jax.lax.axis_index("data")
        form = sharding.shard_kind(stage, replica)
        # Replica 1 gives zeros, so the sums are what replica 0 gives.
        shard, grads = (
            sharding.reduce(stage, jax.tree.map(lambda x: x * (replica == 0), x))
            for x in (params, grads)
        )
        state = updater.init(form, shard)
        for _ in range(2):
            shard, state = updater.update(form, shard, grads, state)
        return sharding.gather(stage, shard)

    given = [[storage_of(each, stage) for stage in (0, 0, 1, 1)] for each in (tree, grads)]
    found = on_devices(make_mesh(2, 2), device, *given)

    @jax.jit
    def whole(params: Any) -> Any:
        state = optimizer.init(params)
        for _ in range(2):
            updates, state = optimizer.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params

    for replica in range(2):
        close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7)
        jax.tree.map(close, tree_of(found[replica::2]), whole(tree))


def count_conditionals(optimizer: optax.GradientTransformation) -> int:
    sharding = shardings()["replicated"]
    updater, shard = Updater(model().params, sharding, optimizer), sharding.shards.struct()
    traced = jax.make_jaxpr(updater.update)(jnp.int32(0), shard, shard, updater.struct())
    return str(traced).count("cond[")


def test_trunks_that_are_treated_alike_are_updated_without_a_conditional() -> None:
    def groups(tree: Any) -> Any:
        return unflatten_dict(
            {path: "fast" if path[1] == "1_Dense" else "slow" for path in flatten_dict(tree)}
        )

    # That of what the first and the last stage have alone.
    assert count_conditionals(optax.adam(0.1)) == 1
    apart = optax.multi_transform({"fast": optax.sgd(1.0), "slow": optax.sgd(0.1)}, groups)
    assert count_conditionals(apart) == 2


def test_leaves_of_the_state_are_labelled_as_in_the_whole_models() -> None:
    updater = Updater(model().params, shardings()["replicated"], optax.adam(0.1))
    found = {label for form in range(2) for *_, label, _ in updater.leaves(form)}
    assert {f"opt_state/{label}" for label in found} == set(opt_state_keys(updater.whole_struct()))
    assert {"0/count", "0/mu/layers/4_Dense/kernel", "0/nu/layers/5_Dense/bias"} <= found
