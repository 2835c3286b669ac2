import json
import random
import time
from collections import UserDict
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import hjson
import numpy as np
import pytest
from _covering import sweep

from jaxpipe.config import PipelineConfig, TrainConfig, load_config
from jaxpipe.errors import ConfigError

FULL: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "steps_per_print": 10,
    "pipeline": {
        "stages": 4,
        "partition": [0, 3, 6],
        "schedule": "gpipe",
        "activation_checkpoint_interval": 2,
    },
}
FULL_CONFIG = TrainConfig(64, 4, 8, 10, PipelineConfig(4, (0, 3, 6), "gpipe", 2))
SIZES = list(FULL)[:4]


def _write(folder: Path, text: str) -> Path:
    file = folder / "config.json"
    file.write_text(text, encoding="utf-8")
    return file


def test_defaults() -> None:
    config = load_config(None)
    assert config == load_config({}) == load_config({"pipeline": {}}) == TrainConfig()
    assert config.train_batch_size is None
    assert config.steps_per_print is None
    assert config.pipeline == PipelineConfig("auto", "best", "1f1b", 0)
    assert config.pipeline.seed_layers is None
    pipeline = config.pipeline
    assert pipeline.num_chunks == pipeline.max_pending_weights == pipeline.memory_limit_gb == "auto"
    assert load_config({"pipeline": {"schedule": "auto"}}).pipeline.schedule == "auto"


def test_every_key_from_a_dictionary() -> None:
    assert load_config(FULL) == FULL_CONFIG
    assert load_config(MappingProxyType(FULL)) == FULL_CONFIG
    assert load_config(FULL_CONFIG) is FULL_CONFIG


def test_every_key_from_a_file(tmp_path: Path) -> None:
    file = _write(tmp_path, json.dumps(FULL))
    assert load_config(file) == FULL_CONFIG
    assert load_config(str(file)) == FULL_CONFIG


def test_null_is_the_default_where_there_is_no_value() -> None:
    assert load_config(dict.fromkeys(SIZES)) == TrainConfig()


def test_integers_of_numpy_are_integers() -> None:
    config = load_config({"train_batch_size": np.int64(8)})
    assert type(config.train_batch_size) is int


def test_a_configuration_is_hashable_and_never_changes() -> None:
    assert hash(FULL_CONFIG) == hash(load_config(FULL))
    with pytest.raises(AttributeError):
        FULL_CONFIG.train_batch_size = 3


def test_long_values_are_cut() -> None:
    with pytest.raises(ConfigError) as error:
        load_config({"train_batch_size": list(range(10_000))})
    assert len(str(error.value)) < 250


MANY = 100_000
LONG = {
    "quotes in a text": '{"a": "' + r"\"" * MANY + '"}',
    "quotes in a text that nobody ends": '{"a": "' + r"\"" * MANY,
    "quotes": r"\"" * MANY,
    "comments that nobody ends": "{" + "/*" * MANY,
    "backslashes": '"' + "\\" * MANY,
    "commas": "{" + ", " * MANY,
    "brackets": "[" * MANY,
    "objects": '{"a":' * MANY,
    "values": '{"pipeline": {"partition": [' + "-1," * (MANY // 10) + "]}}",
}


@pytest.mark.parametrize(
    "kind", sweep(len(LONG) - 1, sorted(LONG, key=lambda kind: kind == "values"))
)
def test_long_files_are_read_in_one_go(kind: str, tmp_path: Path) -> None:
    """Each took minutes where a file was read again from every place in it."""
    file = _write(tmp_path, LONG[kind])
    began = time.process_time()
    with pytest.raises(ConfigError):
        load_config(file)
    assert time.process_time() - began < 20


def test_numbers_that_python_will_not_read(tmp_path: Path) -> None:
    long, longer = "2" * 4301, "1" * 5000
    text = f'{{"train_batch_size": {longer}, "gradient_clipping": -{long}, "steps_per_print": 0}}'
    with pytest.raises(ConfigError) as error:
        load_config(_write(tmp_path, text))
    assert error.value.paths == ("train_batch_size", "gradient_clipping", "steps_per_print")
    assert "train_batch_size=1111111111... (5000 digits). Use for instance 1" in str(error.value)
    assert "gradient_clipping=-222222222... (4301 digits). Use for instance 1" in str(error.value)


@pytest.mark.parametrize(
    ("text", "paths", "match"),
    [
        (
            '{"train_batch_size": 4, "train_batch_size": 8}',
            ["train_batch_size"],
            r"train_batch_size=4 and 8\.",
        ),
        (
            '{"pipeline": {"stages": 1, "stages": 1}}',
            ["pipeline.stages"],
            r"pipeline.stages=1 and 1\.",
        ),
        (
            '{"steps_per_print": 1, "steps_per_print": 1, '
            '"pipeline": {"partition": [{"a": 1, "a": 2}]}}',
            ["steps_per_print", "pipeline.partition[0].a", "pipeline.partition[0]"],
            r"pipeline.partition\[0\].a=1 and 2\.",
        ),
    ],
)
def test_keys_given_twice(tmp_path: Path, text: str, paths: list[str], match: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"must be given once, but got .*{match} Remove all but one.*"
    ) as error:
        load_config(_write(tmp_path, text))
    assert list(error.value.paths) == paths


def _decorated(value: object, rng: random.Random) -> str:
    """JSON with comments and trailing commas wherever they may stand."""

    def gap() -> str:
        return rng.choice(
            ["", " ", "\n", '# x: {1}, "\n', "// y ]\n", '/* z, \n } " */', "\n// é\n\t"]
        )

    def comma(is_last: bool) -> str:
        return gap() + ("," if not is_last or rng.random() < 0.5 else "") + gap()

    if isinstance(value, dict):
        items = [
            f"{gap()}{json.dumps(key)}{gap()}:{gap()}{_decorated(item, rng)}"
            for key, item in value.items()
        ]
    elif isinstance(value, list):
        items = [gap() + _decorated(item, rng) for item in value]
    else:
        return json.dumps(value)
    inner = "".join(item + comma(place == len(items) - 1) for place, item in enumerate(items))
    return f"{{{inner}}}" if isinstance(value, dict) else f"[{inner}]"


def test_comments_and_trailing_commas_mean_what_they_mean_in_hjson(tmp_path: Path) -> None:
    rng = random.Random(3)
    params = {
        "lr": 1e-3,
        "note": "# no, // comment /* at */ all,}",
        "a": [],
        "b": {},
        "c": [None, True, "\\", '\\"'],
    }
    value = {**FULL, "optimizer": {"type": "Adam", "params": params}}
    expected = load_config(value)
    for _ in range(200):
        text = _decorated(value, rng)
        assert json.loads(json.dumps(hjson.loads(text))) == value, text
        assert load_config(_write(tmp_path, text)) == expected


class _Container:
    """A mapping and a sequence of a library that registers neither as `Mapping`."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def keys(self) -> list[str]:
        return list(self._values)

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if value == "???":
            raise LookupError(f"missing {key}")
        return _Container(value) if isinstance(value, dict) else value


NESTED = {**FULL, "optimizer": {"type": "Adam", "params": {"lr": 0.1, "betas": [0.8, 0.9]}}}


@pytest.mark.parametrize(
    "convert",
    [
        _Container,
        MappingProxyType,
        lambda values: UserDict({key: _inner(value) for key, value in values.items()}),
        lambda values: pytest.importorskip("ml_collections").ConfigDict(values),
        lambda values: pytest.importorskip("ml_collections").FrozenConfigDict(values),
        lambda values: pytest.importorskip("omegaconf").OmegaConf.create(values),
    ],
)
def test_containers_of_other_libraries(convert: Any) -> None:
    assert load_config(convert(NESTED)) == load_config(NESTED)
    inner = {**NESTED, "optimizer": convert(NESTED["optimizer"])}
    assert load_config(inner) == load_config(NESTED)
    with pytest.raises(ConfigError, match=r"pipeline\.schedul is .*Did you mean"):
        load_config(convert({"pipeline": {"schedul": "gpipe"}}))


def _inner(value: Any) -> Any:
    return UserDict(value) if isinstance(value, dict) else value


def test_a_container_that_cannot_give_a_value() -> None:
    match = r"must give all its values.*LookupError: missing type.*to_container\(cfg, resolve=True"
    with pytest.raises(ConfigError, match=match):
        load_config(cast("Any", _Container({"optimizer": {"type": "???"}})))
