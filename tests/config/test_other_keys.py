import copy
import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest
from _full import FULL, OFF, UNUSED, UNUSED_OFF, put

from jaxpipe.config import ConfigWarning, TrainConfig, load_config
from jaxpipe.config._other_keys import REFUSED
from jaxpipe.config._other_keys import UNUSED as READERS
from jaxpipe.errors import ConfigError


def _config(path: str, value: object) -> dict[str, Any]:
    config: dict[str, Any] = {"optimizer": {"type": "Adam"}} if path.startswith("optimizer") else {}
    put(config, path, value)
    return config


def _quietly(config: Mapping[str, Any]) -> TrainConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load_config(config)


def _warned(config: Mapping[str, Any]) -> dict[str, str]:
    """The keys that one warning names, each with its reason."""
    with pytest.warns(
        ConfigWarning, match="have no effect and change no number; remove them to silence"
    ) as caught:
        load_config(config)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    lines = [line[4:].split(": ", 1) for line in str(caught[0].message).splitlines()[1:]]
    return {path: reason for paths, reason in lines for path in paths.split(", ")}


def test_the_tables_are_complete() -> None:
    assert set(UNUSED) == set(READERS)
    assert set(OFF) == set(REFUSED)
    assert not set(UNUSED) & set(OFF)


def test_one_warning_names_all_keys_without_effect() -> None:
    config = copy.deepcopy(FULL)
    for path, values in UNUSED.items():
        put(config, path, values[0])
    with pytest.warns(ConfigWarning):
        assert load_config(config) == load_config(FULL)
    assert _warned(config) == {path: f"{READERS[path].reason}." for path in UNUSED}


def test_each_is_named_at_its_path() -> None:
    for path, values in UNUSED.items():
        for value in values:
            config = _config(path, value)
            section = path.partition(".")[0]
            if section in ("fp16", "flops_profiler"):
                config[section]["enabled"] = True
            assert _warned(config) == {path: f"{READERS[path].reason}."}


def test_of_those_that_ask_for_nothing_nothing_is_said() -> None:
    for path in UNUSED:
        for value in (None, *UNUSED_OFF.get(path, [])):
            assert isinstance(_quietly(_config(path, value)), TrainConfig)


def test_their_values_are_checked_all_the_same() -> None:
    for path in UNUSED:
        wrong = "yes" if path != "log_level" else 3
        with pytest.raises(
            ConfigError, match=rf"^{path} must be .*, but got {path}={wrong!r}. (Use|Write)"
        ):
            load_config(_config(path, wrong))


@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        ("comms_logger", {"enabled": True}, "use jax.profiler"),
        (
            "monitor_config",
            {"enabled": True},
            "use the sections tensorboard, wandb, csv_monitor, comet, mlflow and trackio",
        ),
        ("dataloader_drop_last", False, "incomplete last batch of training_data is always"),
        ("prescale_gradients", True, "averaged over the axis data once per step"),
        ("allgather_size", 1, "an old name; it tunes PyTorch"),
        (
            "zero_optimization.stage3_prefetch_bucket_size",
            5e8,
            "pipeline.gather_weights sets how long they are kept",
        ),
        (
            "zero_optimization.gather_16bit_weights_on_model_save",
            True,
            "saved and exported weights are whole at any",
        ),
    ],
)
def test_reasons(path: str, value: object, match: str) -> None:
    assert match in _warned(_config(path, value))[path]


def test_a_section_that_is_off_has_no_effect() -> None:
    fp16 = {
        "loss_scale": 0,
        "initial_scale_power": 16,
        "auto_cast": False,
        "fp16_master_weights_and_grads": True,
    }
    off = "without fp16.enabled=true the section is off."
    assert _warned({"fp16": {"enabled": False, **fp16}, "bf16": {"enabled": True}}) == {
        "fp16.loss_scale": off,
        "fp16.initial_scale_power": off,
        "fp16.fp16_master_weights_and_grads": off,
    }
    assert _warned({"fp16": {"hysteresis": 2}}) == {"fp16.hysteresis": off}
    assert _warned({"bfloat16": {"enabled": False, "check_grad_overflow": False}}) == {
        "bfloat16.check_grad_overflow": "without bfloat16.enabled=true the section is off."
    }
    _quietly({"fp16": {"enabled": False}, "bf16": {"enabled": True, "check_grad_overflow": True}})
    _quietly({"fp16": {"enabled": True, "loss_scale": 0, "hysteresis": 2}})


SWITCHED = [name for name, value in vars(TrainConfig()).items() if getattr(value, "switch", None)]


@pytest.mark.parametrize("section", SWITCHED)
@pytest.mark.filterwarnings("ignore:.*no effect")
def test_a_section_that_says_that_it_is_off_may_hold_any_value(section: str) -> None:
    keys = [item.name for item in fields(getattr(TrainConfig(), section))]
    keys += [path.partition(".")[2] for path in READERS if path.startswith(f"{section}.")]
    for wrong in (-1, [], {}, None):
        given = {**dict.fromkeys(keys, wrong), "enabled": False}
        assert not getattr(load_config({section: given}), section).enabled
    with pytest.raises(ConfigError, match=rf"{section}\.\w+ must be"):
        load_config({section: {**dict.fromkeys(keys, []), "enabled": True}})


def test_a_file_as_users_of_deepspeed_have_it() -> None:
    config = {
        "train_batch_size": 256,
        "train_micro_batch_size_per_gpu": 8,
        "steps_per_print": 10,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8}},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "communication_data_type": None,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 1,
            "allgather_bucket_size": 5e8,
            "contiguous_gradients": True,
            "cpu_offload": False,
            "overlap_comm": True,
            "stage3_gather_16bit_weights_on_model_save": False,
        },
        "fp16": {
            "enabled": True,
            "loss_scale": 0,
            "loss_scale_window": 1000,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
        "wall_clock_breakdown": False,
        "dump_state": False,
        "flops_profiler": {"enabled": False},
        "tensorboard": {"enabled": False},
    }
    with pytest.warns(ConfigWarning):
        assert load_config(config).compute_dtype == "float16"
    assert set(_warned(config)) == {
        "zero_allow_untested_optimizer",
        "zero_optimization.allgather_bucket_size",
        "zero_optimization.contiguous_gradients",
        "zero_optimization.overlap_comm",
    }


def test_what_is_refused_may_be_written_as_off() -> None:
    for path, values in OFF.items():
        for value in (None, *values):
            assert isinstance(_quietly(_config(path, value)), TrainConfig)


@pytest.mark.parametrize("value", ["on", [], {"enabled": True}, {"enabled": None}, 7])
def test_what_is_refused_gives_reason_and_repair(value: object) -> None:
    for path in OFF:
        refusal, config = REFUSED[path], _config(path, value)
        for section in ("fp16", "bf16"):
            if path.startswith(section):
                config[section]["enabled"] = True
        with pytest.raises(ConfigError) as error:
            load_config(config)
        assert error.value.paths == (path,)
        assert (
            str(error.value)
            == f"{path} must not be set: {refusal.reason}, but got {path}={value!r}. "
            f"{refusal.repair}."
        )
        assert refusal.repair.startswith(("Remove", "Use"))
