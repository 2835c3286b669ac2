"""Any dictionary is read as it stands or refused with a path."""

import json
import string
import types
from typing import Any

import pytest
from _full import FULL, OFF, UNUSED, put
from _keys import KEYS, Key
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.config import load_config
from jaxpipe.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore::jaxpipe.config.ConfigWarning")
OTHERS = {*UNUSED, *OFF, "bfloat16"}
positive = st.integers(1, 2**40)
numbers = st.floats(0, 1e30) | st.integers(0, 2**30)
flags = st.booleans()
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
params = st.dictionaries(st.text(string.ascii_lowercase, max_size=5), json_values, max_size=3)


def _section(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keys)


def _named(*names: str) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"type": st.sampled_from(names)}, optional={"params": params})


_PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    bool: flags,
    int: positive,
    float: st.floats(1e-3, 1e6),
    str: st.text(min_size=1),
}
_BY_HAND: dict[str, st.SearchStrategy[Any]] = {
    "gradient_clipping": numbers,
    "pipeline.partition": st.sampled_from(["best", "uniform", "type:x"])
    | st.lists(st.integers(0, 99), min_size=1),
    "pipeline.schedule": st.sampled_from(["1f1b", "gpipe", "auto"]),
    "pipeline.activation_checkpoint_interval": st.integers(0, 9),
    "fp16.enabled": st.just(False),  # not with that of bf16
    "fp16.loss_scale": numbers,
    "fp16.initial_scale_power": st.integers(0, 127),
    "ema.decay": st.floats(0, 1, exclude_max=True),
    "fp16.min_loss_scale": st.floats(1e-30, 1e30),
    "data_types.grad_accum_dtype": st.sampled_from([None, "float32", "bfloat16", "float16"]),
    "zero_optimization.stage": st.integers(0, 3),
    "activation_checkpointing.contiguous_memory_optimization": st.just(False),  # needs two others
    "optimizer": _named("Adam", "muon", "sgd"),
    "scheduler": _named("WarmupLR", "OneCycle"),
    # Read as paths: "a/" is "a".
    **{
        path: st.text("ab_", min_size=1)
        for path in KEYS
        if path.endswith((".output_path", ".output_file"))
    },
    "checkpoint": _section(async_save=flags, keep_last=positive | st.none(), keep_every=st.none())
    | st.fixed_dictionaries(
        {"keep_last": positive, "keep_every": positive}, optional={"async_save": flags}
    ),
}


def _strategy(path: str, key: Key) -> st.SearchStrategy[Any]:
    if path in _BY_HAND:
        return _BY_HAND[path]
    if key.is_section:
        return _keys_of(f"{path}.")
    others = {types.NoneType: st.none(), "auto": st.just("auto")}
    plain = st.sampled_from(key.names()) if key.names() else _PLAIN[key.kind()]
    return st.one_of(plain, *(strategy for kind, strategy in others.items() if kind in key.kinds))


def _keys_of(outer: str) -> st.SearchStrategy[dict[str, Any]]:
    inner = {path.removeprefix(outer): path for path in KEYS if path.startswith(outer)}
    return _section(
        **{name: _strategy(path, KEYS[path]) for name, path in inner.items() if "." not in name}
    )


configs = _keys_of("")


def _as_json(value: object) -> object:
    return json.loads(json.dumps(value, default=dict))


@given(configs)
def test_every_valid_dictionary_is_read_as_it_stands(mapping: dict[str, Any]) -> None:
    config = load_config(json.loads(json.dumps(mapping)))
    for key, value in mapping.items():
        if not isinstance(value, dict):
            assert getattr(config, key) == value
            continue
        for inner, inner_value in value.items():
            assert _as_json(getattr(getattr(config, key), inner)) == _as_json(inner_value)
    assert hash(config) == hash(load_config(mapping))


@given(
    configs,
    st.sampled_from(["", *(key for key, value in FULL.items() if isinstance(value, dict))]),
    st.text(string.ascii_lowercase + "_", min_size=1, max_size=12),
    json_values,
)
def test_one_unknown_key_anywhere_is_an_error_with_its_path(
    mapping: dict[str, Any], section: str, key: str, value: object
) -> None:
    path = f"{section}.{key}" if section else key
    if key in (FULL[section] if section else FULL) or path in OTHERS:
        return
    put(mapping, path, value)
    with pytest.raises(ConfigError) as error:
        load_config(mapping)
    assert path in error.value.paths
    assert set(error.value.paths) <= {path, f"{section}.type", "fp16.enabled", "bf16.enabled"}
    assert f"{path} is not a known key. " in str(error.value)


@given(
    st.sampled_from(sorted({*FULL, *OFF, "bfloat16", "fp16.enabled", "optimizer.params"})),
    json_values,
)
def test_any_json_is_read_or_refused(path: str, value: Any) -> None:
    mapping: dict[str, Any] = {}
    put(mapping, path, value)
    outer = path.split(".")[0]
    paths: tuple[str, ...] = (outer,)
    try:
        load_config(mapping)
    except ConfigError as error:
        paths = error.paths
    assert {found.split(".")[0].split("[")[0] for found in paths} == {outer}
