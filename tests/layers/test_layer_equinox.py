"""Equinox modules as layers, through the one file that knows them."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _refusals import check_refused

from jaxpipe import LayerSpec, PipelineModule
from jaxpipe.errors import LayerError

eqx = pytest.importorskip("equinox")

KEY = jax.random.key(0)
X = np.linspace(-1.0, 1.0, 12, dtype=np.float32).reshape(4, 3)


class Block(eqx.Module):
    linear: Any
    dropout: Any
    offset: jax.Array
    activation: Any

    def __init__(self, size: int, *, key: jax.Array) -> None:
        self.linear, self.dropout = [eqx.nn.Linear(size, size, key=key)], eqx.nn.Dropout(0.5)
        self.offset, self.activation = jnp.arange(size), jax.nn.gelu

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        return self.dropout(self.activation(self.linear[0](x)), key=key) + self.offset


def test_a_module_is_called_for_each_sample_and_its_arrays_have_their_paths() -> None:
    model = PipelineModule([LayerSpec(Block, 3)], num_stages=1)
    params, held = model.init(KEY, X), model.init_collections(KEY, X)
    (tree,) = params["layers"].values()
    assert sorted(tree["linear"]["0"]) == ["bias", "weight"]
    assert sorted(tree) == ["linear"]
    weight, bias = tree["linear"]["0"]["weight"], tree["linear"]["0"]["bias"]
    wanted = jax.nn.gelu(X @ weight.T + bias[None]) + np.arange(3)[None]
    np.testing.assert_allclose(model.call(params, held, X)[0], wanted, rtol=1e-5, atol=1e-6)
    trained = model.call(params, held, X, train=True, key=KEY)[0]
    dropped = np.asarray(trained) == np.arange(3)
    assert dropped.any()
    assert not dropped.all(axis=0).any()  # each sample has a key of its own


def test_initial_values_are_those_of_the_module_and_of_the_layers_key() -> None:
    model = PipelineModule(
        [LayerSpec(eqx.nn.Linear, 3, 2), LayerSpec(eqx.nn.Linear, 2, 2)], num_stages=1
    )
    params = model.init(KEY, X)["layers"]
    assert not np.array_equal(params["0_Linear"]["weight"][:, :2], params["1_Linear"]["weight"])
    assert np.abs(params["0_Linear"]["weight"]).max() <= 3**-0.5


class Stateful(eqx.Module):
    norm: Any

    def __init__(self) -> None:
        self.norm = eqx.nn.BatchNorm(3, "batch", mode="batch")

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


class NoCall(eqx.Module):
    pass


REFUSED: list[tuple[str, Callable[[], Any]]] = [
    (
        r"must leave key to the pipeline.*Leave it out",
        lambda: LayerSpec(eqx.nn.Linear, 3, 2, key=KEY),
    ),
    (
        "Stateful must hold no equinox.nn.State, but got one at 'norm.*Use a module",
        lambda: LayerSpec(Stateful),
    ),
    (
        r"method __call__\(self, inputs\), but got NoCall.*give LayerSpec a forward_fn",
        lambda: LayerSpec(NoCall),
    ),
    (
        r"given as LayerSpec\(Linear, \.\.\.\), but got a built Equinox module",
        lambda: eqx.nn.Linear(3, 2, key=KEY),
    ),
    (r"but got the class Linear\. Write LayerSpec\(Linear", lambda: eqx.nn.Linear),
    (
        "must be given a class.*typename=Linear instance",
        lambda: LayerSpec(eqx.nn.Linear(3, 2, key=KEY)),
    ),
    (r"0 must be built by Linear\(3\), .* TypeError", lambda: LayerSpec(eqx.nn.Linear, 3)),
]


def test_what_cannot_be_a_layer_is_refused() -> None:
    for words, item in REFUSED:
        check_refused(LayerError, [(words, lambda item: PipelineModule([item()], 1))], item)


def test_equinox_is_not_imported_unless_it_is_used() -> None:
    program = "import jaxpipe, sys; sys.exit('equinox' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
