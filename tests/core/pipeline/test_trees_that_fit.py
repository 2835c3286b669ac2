"""What a pipeline takes as parameters, as an optimiser's state, and as a name of parameters."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _refusals import assert_refused

from jaxpipe import PipeDataParallelTopology, PipelineModule
from jaxpipe.config import TrainConfig, load_config
from jaxpipe.core.pipeline._validate import (
    check_base,
    check_mesh,
    check_opt_state,
    check_params,
    check_params_name,
)
from jaxpipe.errors import ConfigError, LayerError, TopologyError
from jaxpipe.layers import flatten_dict
from jaxpipe.topology import make_pipeline_mesh

STRUCT = {("a", "w"): jax.ShapeDtypeStruct((2, 3), jnp.float32)}


def many(number: int, shape: tuple[int, ...] = (2,)) -> Any:
    return {f"p{i}": np.zeros(shape, np.float32) for i in range(number)}


def structs(tree: Any) -> Any:
    return {path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in flatten_dict(tree).items()}


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_parameters_of_every_width_fit(dtype: str) -> None:
    leaf = np.ones((2, 3), jnp.dtype(dtype))
    assert check_params({"a": {"w": leaf}}, STRUCT)["a"]["w"] is leaf


def test_parameters_that_are_none() -> None:
    for words, leaf in (
        ("a/w = int32[2, 3]. Convert", np.ones((2, 3), np.int32)),
        ("a/w = bool[2, 3]. Convert", np.ones((2, 3), bool)),
        ("a/w = a float. Convert", 3.0),
        ("a/w = a list. Convert", [[1.0] * 3] * 2),
        ("a/w = the shape float32[2, 3] without values. C", STRUCT[("a", "w")]),
    ):
        full = f"must be an array of floating-point numbers, but got {words}"
        assert_refused(LayerError, full, check_params, {"a": {"w": leaf}}, STRUCT)
    words = "must be a tree of dictionaries, but got a list. Pass a tree"
    assert_refused(LayerError, words, check_params, [np.ones(3)], STRUCT)
    real = {("a", "w"): jax.ShapeDtypeStruct((2,), jnp.float32)}
    words = "but got 1 difference: a/w is complex64[2], not float32[2]. Pass a"
    assert_refused(LayerError, words, check_params, {"a": {"w": np.ones(2, np.complex64)}}, real)


def test_differences_are_counted_and_the_first_eight_are_told() -> None:
    given, wanted = {"a": np.zeros((2,)), "b": np.zeros((3,))}, structs(many(1))
    words = "but got 3 differences: missing p0; unexpected a; unexpected b. Pass a tree as Pip"
    assert_refused(LayerError, words, check_params, given, wanted)
    words = "but got 1 difference: p0 is float32[3], not float32[2]. Pass"
    assert_refused(LayerError, words, check_params, many(1, (3,)), wanted)
    words = "got 8 differences: p0 is ... p7 is float32[3], not float32[2]. Pass"
    assert_refused(LayerError, words, check_params, many(8, (3,)), structs(many(8)))
    words = "got 9 differences: p0 is ... p7 is float32[3], not float32[2]; and 1 more. Pass"
    assert_refused(LayerError, words, check_params, many(9, (3,)), structs(many(9)))


def test_an_optimisers_state_is_matched_by_paths_and_kinds() -> None:
    state: Any = optax.adam(0.1).init({"w": jnp.zeros(2)})
    struct = jax.eval_shape(lambda: state)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64 if x.ndim else np.int64), state)
    for given in (state, wide):
        found = check_opt_state(given, struct)
        assert jax.tree.structure(found) == jax.tree.structure(struct)

    def with_count(count: Any) -> Any:
        return (state[0]._replace(count=count), state[1])

    for count in (np.int64(2**31 - 1), np.uint8(3), np.bool_(True)):
        assert check_opt_state(with_count(count), struct)[0].count == count
    words = "state must be that of the optimizer in use, but got 1 difference"
    for text, count in (
        ("int64[], not int32[]", np.int64(2**31)),
        ("float32[], not int32[]", np.float32(3)),
        ("int32[1], not int32[]", np.ones(1, np.int32)),
    ):
        full = f"{words} ... count is {text}. Pass a tree as optimizer.init"
        assert_refused(LayerError, full, check_opt_state, with_count(count), struct)
    words = "must consist of arrays of numbers, but got ... count = ... Convert"
    assert_refused(LayerError, words, check_opt_state, with_count(np.array("three")), struct)
    words = "difference: missing ... nu"
    lacking = (state[0]._asdict() | {"nu": {}}, state[1])
    assert_refused(LayerError, words, check_opt_state, lacking, struct)


def test_names_of_parameters() -> None:
    averaged = load_config({"train_batch_size": 1, "ema": {"decay": 0.5}})
    for name in (None, "base"):
        check_params_name(name, TrainConfig())
    check_params_name("ema", averaged)
    for name in ("average", "", 3):
        words = f"'ema' or 'base', but got params={name!r}. Omit"
        assert_refused(ConfigError, words, check_params_name, name, averaged)
    words = "must have an average to read, but got a configuration without ... Train with"
    assert_refused(ConfigError, words, check_params_name, "ema", TrainConfig())


def test_a_base_is_that_of_adapters_which_alone_are_trained() -> None:
    one, two, other = ("a", "lora_a"), ("a", "lora_b"), ("a", "kernel")
    check_base(frozenset({one, two}), [two, one])
    for words, adapters, trained in (
        ("got no adapters. Train", (), (other,)),
        ("got no adapters. Train", (), ()),
        ("a/kernel is the first to differ. Train", (one, two), (one, two, other)),
        ("a/lora_b is the first to differ. Train", (one, two), (one,)),
    ):
        assert_refused(ConfigError, words, check_base, frozenset(adapters), trained)


def test_a_process_without_a_device_of_the_mesh_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = PipelineModule([lambda x: x] * 2, num_stages=2)
    mesh = make_pipeline_mesh(PipeDataParallelTopology(2, 1), jax.devices()[:2])
    check_mesh(module, mesh)
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    words = "but got 2 devices without one of process 1, 2, 3. Make the topology"
    assert_refused(TopologyError, words, check_mesh, module, mesh)
    devices = np.array([SimpleNamespace(process_index=i) for i in (3, 1)])
    words = "without one of process 0, 2. Make"
    given: Any = SimpleNamespace(devices=devices)
    assert_refused(TopologyError, words, check_mesh, module, given)
