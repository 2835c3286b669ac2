from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpipe.errors import LayerError
from jaxpipe.layers import LayerSpec, PipelineModule, TiedLayerSpec

KEY = jax.random.key(0)
X = np.ones((2, 4), np.float32)


def _layers() -> list[Any]:
    return [
        LayerSpec(nn.Dense, 4),
        LayerSpec(nn.Dense, 4),
        jnp.tanh,
        LayerSpec(nnx.Linear, 4, 4),
        nn.Dense(4),
    ]


def _short() -> PipelineModule:
    return PipelineModule(_layers()[:3], num_stages=1)


def _equal(one: Any, other: Any) -> bool:
    return jax.tree.structure(one) == jax.tree.structure(other) and all(
        jax.tree.leaves(jax.tree.map(np.array_equal, one, other))
    )


def test_paths_and_values_do_not_depend_on_the_partition() -> None:
    trees = [
        PipelineModule(_layers(), num_stages=stages, partition_method=method).init(KEY, X)
        for stages, method in [(1, "parameters"), (3, [0, 1, 3, 5])]
    ]
    assert list(trees[0]["layers"]) == ["0_Dense", "1_Dense", "3_Linear", "4_Dense"]
    assert all(_equal(trees[0], tree) for tree in trees[1:])


def test_each_layer_is_keyed_by_its_place() -> None:
    tree = PipelineModule(_layers(), num_stages=1).init(KEY, X)["layers"]
    kernels = [tree[name]["kernel"] for name in tree]
    assert all(not np.array_equal(a, b) for i, a in enumerate(kernels) for b in kernels[:i])
    model = PipelineModule(_layers(), num_stages=1)
    again, _ = model.init_layer(0, model.trace(X), model.layer_key(jax.random.key(1), 0))
    assert not np.array_equal(again["kernel"], kernels[0])
    keys = jax.random.fold_in(KEY, 1)
    by_hand = nn.Dense(4).init({"params": jax.random.fold_in(keys, 0)}, X)["params"]
    assert _equal(by_hand, tree["1_Dense"])


def test_shapes_alone_suffice() -> None:
    model = PipelineModule([nn.Dense(4)], num_stages=1)
    assert _equal(model.init(KEY, jax.ShapeDtypeStruct(X.shape, X.dtype)), model.init(KEY, X))


def test_alike_layers_differ_by_their_keys_alone() -> None:
    model = _short()
    trace = model.trace(X)
    whole = model.init(KEY, X)["layers"]
    moved, _ = jax.jit(lambda key: model.init_layer(0, trace, key))(model.layer_key(KEY, 1))
    assert _equal(moved, whole["1_Dense"])


@pytest.mark.parametrize("seed_fn", [None, lambda seed: jax.random.key(int(seed) * 7)])
def test_seeded_layers_depend_on_base_seed_and_place_alone(seed_fn: Any) -> None:
    model = _short().replace(seed_layers=True, seed_fn=seed_fn, base_seed=3)
    trace, tree = model.trace(X), model.init(KEY, X)
    assert _equal(tree["layers"]["0_Dense"], model.init(jax.random.key(9), X)["layers"]["0_Dense"])
    assert not _equal(
        tree["layers"]["0_Dense"], model.replace(base_seed=4).init(KEY, X)["layers"]["0_Dense"]
    )
    keys = (seed_fn or jax.random.key)(3 + 1)
    by_hand = nn.Dense(4).init({"params": jax.random.fold_in(keys, 0)}, X)["params"]
    assert _equal(by_hand, tree["layers"]["1_Dense"])
    assert _equal(model.init_layer(0, trace, model.layer_key(KEY, 1))[0], by_hand)


class _Grows(nn.Module):
    """A second use that makes a parameter the first one has not."""

    def setup(self) -> None:
        self.table = nn.Embed(5, 4)
        self.extra = nn.Dense(5)

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.table(ids)


def _attend(module: Any, x: jax.Array) -> jax.Array:
    return module.table.attend(x) + module.extra(x)


def test_tied_parameters_are_made_by_the_first_layer_that_holds_them() -> None:
    model = PipelineModule(
        [TiedLayerSpec("k", _Grows), jnp.tanh, TiedLayerSpec("k", _Grows, forward_fn=_attend)],
        num_stages=1,
    )
    ids = np.array([[0, 1], [2, 3]])
    tree = model.init(KEY, ids)
    assert jax.tree.map(jnp.shape, tree) == {
        "tied": {"k": {"table": {"embedding": (5, 4)}, "extra": {"kernel": (4, 5), "bias": (5,)}}}
    }
    trace = model.trace(ids)
    first, second = (model.init_layer(i, trace, model.layer_key(KEY, i))[0] for i in (0, 2))
    np.testing.assert_array_equal(
        tree["tied"]["k"]["table"]["embedding"], first["table"]["embedding"]
    )
    np.testing.assert_array_equal(tree["tied"]["k"]["extra"]["kernel"], second["extra"]["kernel"])
    assert float(abs(second["extra"]["kernel"]).max()) > 0
    assert model.apply(tree, ids).shape == (2, 2, 5)


def test_a_use_that_reads_what_only_another_makes() -> None:
    def attend(module: nn.Module, x: jax.Array) -> jax.Array:
        return x @ module.variables["params"]["embedding"].T

    layers = [
        TiedLayerSpec("k", nn.Embed, 5, 4),
        TiedLayerSpec("k", nn.Embed, 5, 4, forward_fn=attend),
    ]
    model = PipelineModule(layers, num_stages=1)
    ids = np.array([[0, 1], [2, 3]])
    params = model.init(KEY, ids)
    table = params["tied"]["k"]["embedding"]
    np.testing.assert_allclose(model.apply(params, ids), table[ids] @ table.T, rtol=1e-5, atol=1e-6)
    alone = PipelineModule([LayerSpec(nn.Embed, 5, 4), layers[1]], num_stages=1)
    with pytest.raises(
        LayerError, match="(?s)layer 1_Embed must accept the output of layer 0_Embed.*KeyError"
    ):
        alone.init(KEY, ids)


def test_equal_layers_are_compiled_once() -> None:
    traces = []

    class Watched(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            traces.append(x.shape)
            return nn.Dense(4)(x)

    model = PipelineModule([LayerSpec(Watched) for _ in range(6)], num_stages=1)
    tree = model.init(KEY, X)["layers"]
    assert len(tree) == 6
    # variables and calls in training and evaluation, for the shapes; then the one program that
    # makes the weights
    assert len(traces) == 4


def test_initial_weights_in_bfloat16_and_without_weak_types() -> None:
    class Scalar(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return x * self.param("scale", lambda key: 2.0)

    model = PipelineModule([nn.Dense(4, param_dtype=jnp.bfloat16), Scalar()], num_stages=1)
    params = model.init(KEY, X)["layers"]
    assert params["0_Dense"]["kernel"].dtype == jnp.bfloat16
    assert (params["1_Scalar"]["scale"].dtype, params["1_Scalar"]["scale"].weak_type) == (
        jnp.float32,
        False,
    )
