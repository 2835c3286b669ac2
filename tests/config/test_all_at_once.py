"""Whatever is wrong with a configuration is said in one error."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from _full import OFF, UNUSED, put

from jaxpipe.config import CheckpointSection, PipelineConfig, TrainConfig, load_config
from jaxpipe.errors import ConfigError

BAD: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_batchsize": 8,
    "gradient_clipping": -1,
    "fp16": {"enabled": True, "loss_scale": "auto", "histeresis": 2},
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 4,
        "offload_optimizer": {"device": "cpu"},
        "overlap_comm": "yes",
    },
    "pipeline": {"partition": [0, -1, 3, "x"]},
    "optimizer": {"type": "OneBitAdam", "params": {"a": len, "b": {3: 4}, "max_grad_norm": 1}},
    "scheduler": {"params": {}},
    "elasticity": {"enabled": True},
    "checkpoint": {"keep_every": 5},
}
PATHS = (
    "train_batch_size",
    "train_batchsize",
    "gradient_clipping",
    "fp16.loss_scale",
    "fp16.histeresis",
    "zero_optimization.stage",
    "zero_optimization.offload_optimizer",
    "zero_optimization.overlap_comm",
    "pipeline.partition[1]",
    "pipeline.partition[3]",
    "optimizer.type",
    "optimizer.params.a",
    "optimizer.params.b.3",
    "scheduler.type",
    "elasticity",
    "checkpoint.keep_every",
    "checkpoint.keep_last",
    "fp16.enabled",
    "bf16.enabled",
)


def test_every_refusal_is_a_line_with_its_path() -> None:
    with pytest.raises(ConfigError) as error:
        load_config(BAD)
    assert error.value.paths == PATHS
    head, *lines = str(error.value).splitlines()
    assert head == "The configuration must be changed in 17 places:"
    assert lines == [f"  - {single}" for single in error.value.errors]
    assert len(lines) == 17
    assert "'auto' belongs to Hugging Face's Trainer" in lines[0]


def test_the_first_of_many_are_lines() -> None:
    numbers = {"type": "Adam", "params": {"betas": [float("nan")] * 20_000}}
    unknown = {f"gradient_clipping{i}": 1 for i in range(3000)}
    with pytest.raises(ConfigError) as error:
        load_config({"optimizer": numbers, **unknown})
    head, *lines, rest = str(error.value).splitlines()
    assert head == "The configuration must be changed in 23000 places:"
    assert len(lines) == 20
    assert rest == "  and 22,980 more."
    assert len(error.value.paths) == 23_000
    assert len(set(map(str, error.value.errors))) == 23_000


def test_long_keys_are_cut() -> None:
    wrong = {"w" * 10**6: {"x" * 10**6: float("nan")}}
    with pytest.raises(ConfigError) as error:
        load_config({"y" * 10**6: 1, "optimizer": {"type": "Adam", "params": wrong}})
    assert len(str(error.value)) < 2000
    assert f"{'y' * 40}... (1000000 characters) is not a known key." in str(error.value)


def test_the_file_is_named_once(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"train_batch_size": 0, "steps_per_print": 0, "zzz": 1, "zzz": 2}')
    with pytest.raises(ConfigError) as error:
        load_config(file)
    assert error.value.paths == ("zzz", "train_batch_size", "steps_per_print", "zzz")
    assert str(error.value).startswith(
        f"The configuration (read from {file}) must be changed in 4 places:\n  - zzz must"
    )
    assert str(error.value).count(str(file)) == 1


def test_one_mistake_is_no_list() -> None:
    with pytest.raises(
        ConfigError, match=r"^train_batch_size must be .*=0. Use for instance 1.$"
    ) as error:
        load_config({"train_batch_size": 0})
    assert error.value.paths == ("train_batch_size",)
    assert error.value.errors == ()


def test_so_is_what_is_made_by_keyword() -> None:
    with pytest.raises(ConfigError) as error:
        TrainConfig(
            train_batch_size=0,
            fp16={"enabled": True, "hysteresis": 0},
            bf16={"enabled": True},
            optimizer=3,
        )
    paths = ("train_batch_size", "fp16.hysteresis", "optimizer", "fp16.enabled", "bf16.enabled")
    assert error.value.paths == paths
    with pytest.raises(ConfigError) as error:
        PipelineConfig(stages=0, schedule="")
    assert error.value.paths == ("pipeline.stages", "pipeline.schedule")


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"checkpoint": {"keep_every": 5, "keep_last": "x"}}, "checkpoint.keep_last"),
        ({"checkpoint": {"keep_every": 5, "keep_lst": 1}}, "checkpoint.keep_lst"),
        ({"optimizer": {"typ": "Adam"}}, "optimizer.typ"),
        ({"optimizer": {"type": 3}}, "optimizer.type"),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": True}}, "fp16.enabled"),
        (
            {
                "activation_checkpointing": {
                    "contiguous_memory_optimization": True,
                    "partition_activations": 1,
                    "number_checkpoints": 2,
                }
            },
            "activation_checkpointing.partition_activations",
        ),
    ],
)
def test_nothing_is_said_of_what_follows_from_a_mistake(config: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(config)
    assert error.value.paths == (path,)


def test_an_error_can_be_sent_between_processes() -> None:
    with pytest.raises(ConfigError) as error:
        load_config({"train_batch_size": 0, "steps_per_print": 0})
    copied = pickle.loads(pickle.dumps(error.value))
    assert (str(copied), copied.paths) == (str(error.value), error.value.paths)
    assert CheckpointSection() == CheckpointSection()


def test_all_keys_that_are_refused(tmp_path: Path) -> None:
    config: dict[str, Any] = {}
    for path in OFF:
        put(config, path, {"enabled": True})
    for path in UNUSED:
        put(config, path, 3 if path == "log_level" else "yes")
    config["fp16"]["enabled"] = config["bf16"]["enabled"] = True
    config["optimizer"]["type"] = "Adam"
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigError) as error:
        load_config(file)
    assert sorted(error.value.paths) == sorted([*OFF, *UNUSED, "fp16.enabled", "bf16.enabled"])
