"""Configurations that are right but for one key, type or value."""

import copy
import json
import math
import random
import re
import types
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from _full import FULL, OFF, UNUSED, put
from _keys import KEYS, Key

from jaxpipe.config import load_config
from jaxpipe.errors import ConfigError

FLAG = [1, 0, "true", [], {}]
INTEGER = ["4", 4.5, True, [4], {}]
NUMBER = ["1.0", True, [1.0], {}]
TEXT = [3, True, None, {}, ["x"]]
SECTION = [3, "x", True, [], None]

_BY_HAND: dict[str, list[Any]] = {
    "pipeline.partition": [3, True, {}, None, [0, "3"]],
    "pipeline.schedule": [3, True, None, []],
    "data_types.grad_accum_dtype": [32, True, [], {}],
    "zero_optimization.stage": ["1", True, 1.0, [1], None],
    "optimizer": [3, "Adam", True, []],
    "optimizer.params": [3, "x", True, []],
    "scheduler": [3, "WarmupLR", True, []],
    "scheduler.params": [3, "x", True, []],
    "checkpoint.async_save": [*FLAG, None],
}


def _of_other_types(path: str, key: Key) -> list[Any]:
    if path in _BY_HAND:
        return _BY_HAND[path]
    wrong = (
        SECTION
        if key.is_section
        else {bool: FLAG, int: INTEGER, float: NUMBER, str: TEXT}[key.kind()]
    )
    return [value for value in wrong if value is not None or types.NoneType not in key.kinds]


WRONG_TYPES = {path: _of_other_types(path, key) for path, key in KEYS.items()}
WRONG_VALUES: dict[str, list[Any]] = {
    "train_batch_size": [0, -8],
    "train_micro_batch_size_per_gpu": [0, -1],
    "gradient_accumulation_steps": [0, -2],
    "steps_per_print": [0, -10],
    "gradient_clipping": [-1.0, float("nan"), float("inf")],
    "pipeline.router_bias_update_rate": [-0.001, float("nan"), float("inf")],
    "ema.decay": [-0.1, 1.0, float("nan")],
    "pipeline.stages": [0, -4, "automatic"],
    "pipeline.partition": [[], "", [0, -3]],
    "pipeline.schedule": [""],
    "pipeline.activation_checkpoint_interval": [-1],
    "pipeline.skip_idle": ["always"],
    "pipeline.num_chunks": [0, -2, "many"],
    "pipeline.max_pending_weights": [0, -1],
    "pipeline.memory_limit_gb": [0, -80.0, float("inf")],
    "pipeline.gather_weights": ["", "always"],
    "fp16.loss_scale": [-1, float("inf"), float("nan")],
    "fp16.initial_scale_power": [-1, 128],
    "fp16.loss_scale_window": [0, -5],
    "fp16.hysteresis": [0, -1],
    "fp16.min_loss_scale": [0, -1.0, float("inf")],
    "bf16.enabled": [True],
    "data_types.grad_accum_dtype": ["int8", "fp64", ""],
    "zero_optimization.stage": [4, 5, -1],
    "optimizer.type": ["", "OneBitAdam", "MuSGD"],
    "optimizer.params.max_grad_norm": [1.0],
    "scheduler.type": [""],
    "activation_checkpointing.number_checkpoints": [0, -1],
    "checkpoint.keep_last": [0, -3, None],
    "checkpoint.keep_every": [0, -1],
    "tensorboard.job_name": [""],
    "csv_monitor.job_name": [""],
    "wandb.group": [""],
    "wandb.team": [""],
    "wandb.project": [""],
    "comet.samples_log_interval": [0, -1],
    "comet.project": [""],
    "mlflow.experiment_name": [""],
    "trackio.project": [""],
    "flops_profiler.profile_step": [0, -1],
    "flops_profiler.module_depth": [-2],
    "flops_profiler.top_modules": [-1],
    "comet.mode": ["new", ""],
    # FULL has bf16 off.
    **{path: [{"enabled": True}] for path in OFF if not path.startswith("bf16.")},
    **{path: [-1, "many"] for path, values in UNUSED.items() if type(values[0]) in (int, float)},
}


class Bad(NamedTuple):
    kind: str
    path: str
    config: str


def _misspelt(config: dict[str, Any], path: str, rng: random.Random) -> str:
    """Misspell the last key of a path in place; the path it has then."""
    *outer, key = path.split(".")
    for name in outer:
        config = config[name]
    place = rng.randrange(1, len(key))
    key_of = {
        "dropped": key[:place] + key[place + 1 :],
        "doubled": key[:place] + key[place] + key[place:],
        "replaced": key[:place] + "q" + key[place + 1 :],
        "upper": key.upper(),
    }
    wrong = key_of[rng.choice(sorted(key_of))]
    config[wrong] = config.pop(key)
    return ".".join([*outer, wrong])


def _all_bad() -> list[Bad]:
    rng = random.Random(20)
    found: list[Bad] = []
    for path in [*list(WRONG_TYPES) * 3, *(path for path in UNUSED if path != "aio")]:
        config = copy.deepcopy(FULL)
        if path in UNUSED:
            put(config, path, UNUSED[path][0])
        found.append(Bad("key", _misspelt(config, path, rng), json.dumps(config)))
    wrong = {
        "type": WRONG_TYPES | {path: [3] for path, values in UNUSED.items() if values == [True]},
        "value": WRONG_VALUES,
    }
    for kind, table in wrong.items():
        for path, values in table.items():
            for value in values:
                config = copy.deepcopy(FULL)
                if path.startswith("bf16."):  # which is off in FULL: no value would be wrong
                    config["bf16"].pop("enabled")
                put(config, path, value)
                found.append(Bad(kind, path, json.dumps(config)))
    return sorted(set(found))


ALL = _all_bad()


def test_every_number_has_values_out_of_its_range() -> None:
    assert {path for path, key in KEYS.items() if key.kind() in (int, float)} <= {*WRONG_VALUES}


NUMBERS = [path for path, key in KEYS.items() if key.kind() in (int, float)]
NUMBERS += ["optimizer.params.lr", "optimizer.params.betas", "scheduler.params.warmup_min_lr"]


def test_no_number_is_infinite_or_none() -> None:
    for path, number in product(NUMBERS, (math.nan, math.inf, -math.inf, 10**400)):
        for value in (number, [number]):
            config = copy.deepcopy(FULL)
            put(config, path, value)
            with pytest.raises(ConfigError) as error:
                load_config(config)
            assert _names(error.value, path)


def _names(error: ConfigError, path: str) -> bool:
    """Whether an error gives exactly this path, and not only a part or an extension of it."""
    return re.search(rf"(?<![\w.]){re.escape(path)}(?![\w.]*\w)", str(error)) is not None


def test_one_wrong_thing_is_refused_with_its_path() -> None:
    load_config(FULL)
    assert min(Counter(case.kind for case in ALL).values()) >= 40
    for case in ALL:
        with pytest.raises(ConfigError) as error:
            load_config(json.loads(case.config))
        assert _names(error.value, case.path), case


def test_the_file_of_a_wrong_thing_is_named(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for case in ALL[:: len(ALL) // 20]:
        with pytest.raises(ConfigError) as error:
            load_config(json.loads(case.config))
        file.write_text(case.config)
        with pytest.raises(ConfigError) as from_file:
            load_config(file)
        assert str(from_file.value) == f"{error.value} (Read from {file}.)"
