"""Any dictionary is read as it stands or refused with a path."""

import json
import string
from typing import Any

import pytest
from _full import FULL, OFF, UNUSED, put
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
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
params = st.dictionaries(st.text(string.ascii_lowercase, max_size=5), json_values, max_size=3)


def _section(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keys)


def _named(*names: str) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"type": st.sampled_from(names)}, optional={"params": params})


configs = _section(
    train_batch_size=positive | st.none(),
    train_micro_batch_size_per_gpu=positive | st.none(),
    gradient_accumulation_steps=positive | st.none(),
    steps_per_print=positive | st.none(),
    gradient_clipping=numbers,
    pipeline=_section(
        stages=st.just("auto") | positive,
        partition=st.sampled_from(["best", "uniform", "type:x"]) | st.lists(st.integers(0, 99), min_size=1),
        schedule=st.sampled_from(["1f1b", "gpipe", "auto"]),
        activation_checkpoint_interval=st.integers(0, 9),
        skip_idle=flags | st.just("auto"),
        seed_layers=flags | st.none(),
        num_chunks=positive | st.just("auto"),
        max_pending_weights=positive | st.just("auto"),
        memory_limit_gb=st.floats(1e-3, 1e6) | st.just("auto"),
    ),
    fp16=_section(
        auto_cast=flags,
        loss_scale=numbers,
        initial_scale_power=st.integers(0, 127),
        loss_scale_window=positive,
        hysteresis=positive,
        consecutive_hysteresis=flags,
        min_loss_scale=st.floats(1e-30, 1e30),
    ),
    bf16=_section(enabled=flags, check_grad_overflow=flags),
    data_types=_section(grad_accum_dtype=st.sampled_from([None, "float32", "bfloat16", "float16"])),
    zero_optimization=_section(stage=st.integers(0, 1)),
    optimizer=_named("Adam", "muon", "sgd"),
    scheduler=_named("WarmupLR", "OneCycle"),
    activation_checkpointing=_section(
        partition_activations=flags, cpu_checkpointing=flags, number_checkpoints=positive
    ),
    checkpoint=_section(async_save=flags, keep_last=positive | st.none(), keep_every=st.none())
    | st.fixed_dictionaries({"keep_last": positive, "keep_every": positive}, optional={"async_save": flags}),
)


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


@given(st.sampled_from(sorted({*FULL, *OFF, "bfloat16", "fp16.enabled", "optimizer.params"})), json_values)
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
