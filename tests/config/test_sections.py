import functools
import pydoc
import re
from typing import Any

import pytest
from _full import FULL, put
from _full import at as given_at
from _keys import KEYS

from jaxpipe.config import (
    ActivationCheckpointingSection,
    BF16Section,
    DataTypesSection,
    FP16Section,
    OptimizerSection,
    Params,
    TrainConfig,
    ZeroSection,
    load_config,
)
from jaxpipe.config._checkpoint import CheckpointSection
from jaxpipe.errors import ConfigError


def at(path: str, value: object) -> dict[str, Any]:
    config: dict[str, Any] = {}
    put(config, path, value)
    return config


def test_defaults_are_deepspeeds_but_for_clipping() -> None:
    config = load_config({})
    assert config.gradient_clipping == 0.0
    assert config.fp16 == FP16Section(False, False, 0.0, 16, 1000, 2, False, 1.0)
    assert config.bf16 == BF16Section(False, False, True)
    assert config.data_types == DataTypesSection(None)
    assert config.zero_optimization == ZeroSection(0)
    assert config.optimizer is None
    assert config.scheduler is None
    assert config.activation_checkpointing == ActivationCheckpointingSection(False, False, False, None, False, False)
    assert config.checkpoint == CheckpointSection(False, None, None)


READ_AS: dict[str, Any] = {
    "pipeline.partition": (0, 3, 6),
    "data_types.grad_accum_dtype": "float32",
    "optimizer.params": Params({"lr": 3e-4, "betas": (0.9, 0.95), "adam_w_mode": True}),
    "scheduler.params": Params({"warmup_max_lr": 3e-4, "warmup_num_steps": 100}),
}
"""Values that are stored in another form than JSON's."""
GIVEN_AS_DEFAULT = {"bf16.enabled", "bf16.immediate_grad_update", "fp16.loss_scale"}
"""Others would contradict those of another section."""


def test_every_key_of_every_section() -> None:
    config = load_config(FULL)
    for path in [path for path, key in KEYS.items() if not key.is_section]:
        value = functools.reduce(getattr, path.split("."), config)
        assert value == READ_AS.get(path, given_at(FULL, path)), path
        assert value != KEYS[path].default or path in GIVEN_AS_DEFAULT, path
    assert hash(config) == hash(load_config(FULL))
    assert config == TrainConfig(**FULL)


def test_help_has_every_key_of_every_section_with_its_meaning() -> None:
    text = pydoc.render_doc(TrainConfig, renderer=pydoc.plaintext)
    for path, key in KEYS.items():
        if "." in path and not key.is_section:
            assert re.search(rf"\b{path}\s\((required|default\s.+?)\):\s\S", text), path


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_all_stages_of_zero(stage: int) -> None:
    assert load_config(at("zero_optimization.stage", stage)).zero_optimization == ZeroSection(stage)


@pytest.mark.parametrize("value", ["auto", "step", "tick", "Step"])
def test_when_weights_are_gathered(value: str) -> None:
    assert load_config(at("pipeline.gather_weights", value)).pipeline.gather_weights == value.lower()


def test_numbers_are_stored_as_floats() -> None:
    fp16 = {"enabled": True, "loss_scale": 128, "min_loss_scale": 2}
    config = load_config({"gradient_clipping": 1, "fp16": fp16})
    numbers = (config.gradient_clipping, config.fp16.loss_scale, config.fp16.min_loss_scale)
    assert numbers == (1.0, 128.0, 2.0)
    assert {type(number) for number in numbers} == {float}


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({}, "float32"),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": False}}, "float32"),
        ({"fp16": {"enabled": True}}, "float16"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": False}}, "bfloat16"),
        ({"bfloat16": {"enabled": True}}, "bfloat16"),
    ],
)
def test_compute_dtype(config: dict[str, Any], dtype: str) -> None:
    assert load_config(config).compute_dtype == dtype


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (None, "float32"),
        ("fp32", "float32"),
        ("float32", "float32"),
        ("float", "float32"),
        ("torch.float32", "float32"),
        ("bf16", "bfloat16"),
        ("bfloat16", "bfloat16"),
        ("fp16", "float16"),
        ("float16", "float16"),
        ("half", "float16"),
    ],
)
def test_dtype_of_accumulation_does_not_follow_the_model(name: str | None, dtype: str) -> None:
    config = load_config({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": name}})
    assert (config.data_types.grad_accum_dtype or "float32") == dtype


def test_both_precisions_name_both_paths() -> None:
    match = r"^fp16.enabled and bf16.enabled must not both be true, but got fp16.enabled=True and bf16.ena.*Remove one"
    for name in ("bf16", "bfloat16"):
        with pytest.raises(ConfigError, match=match):
            load_config({"fp16": {"enabled": True}, name: {"enabled": True}})


@pytest.mark.parametrize("names", [("bf16", "bfloat16"), ("bfloat16", "bf16")])
def test_a_section_under_both_of_its_names(names: tuple[str, str]) -> None:
    match = r"^bf16 must be given under one name, but got {}=\{{\}} and {}=\{{'enabled': True\}}. Keep one of them"
    with pytest.raises(ConfigError, match=match.format(*names)):
        load_config({names[0]: {}, names[1]: {"enabled": True}})


@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        ("gradient_clipping", -1.0, r"a finite number of at least 0, but got .*=-1.0. Use for instance 1"),
        ("gradient_clipping", True, r"a finite number of at least 0, but got .*=True"),
        ("gradient_clipping", "1.0", r"a finite number of at least 0, but got .*='1.0'"),
        ("gradient_clipping", None, r"a finite number of at least 0, but got .*=None"),
        ("gradient_clipping", float("nan"), r"a finite number of at least 0, but got .*=nan"),
        ("gradient_clipping", 10**400, r"a finite number of at least 0, but got .*=10000"),
        (
            "fp16.enabled",
            "auto",
            r"true or false, but got .*='auto'. Use true or false without quotes; .* Hugging Face's Trainer",
        ),
        ("fp16.loss_scale", True, r"a finite number of at least 0, but got .*=True. Use"),
        ("fp16.loss_scale", float("inf"), r"a finite number of at least 0, but got .*=inf. Use"),
        ("fp16.loss_scale", float("nan"), r"a finite number of at least 0, but got .*=nan. Use"),
        ("fp16.loss_scale", -2, r"a finite number of at least 0, but got .*=-2. Use"),
        ("fp16.initial_scale_power", -1, r"an integer between 0 and 127, but got .*=-1. Use for instance 0"),
        ("fp16.initial_scale_power", 128, r"an integer between 0 and 127, but got .*=128"),
        ("fp16.initial_scale_power", 16.0, r"an integer between 0 and 127, but got .*=16.0"),
        ("fp16.loss_scale_window", 0, r"an integer of at least 1, but got .*=0. Use for instance 1"),
        ("fp16.hysteresis", 0, r"an integer of at least 1, but got .*=0"),
        ("fp16.consecutive_hysteresis", 1, r"true or false, but got .*=1"),
        ("fp16.min_loss_scale", 0, r"a finite number above 0, but got .*=0. Use for instance 1.0"),
        ("fp16.min_loss_scale", -1, r"a finite number above 0, but got .*=-1"),
        ("bf16.check_grad_overflow", None, r"true or false, but got .*=None"),
        ("bfloat16.enabled", 1, r"true or false, but got bfloat16.enabled=1"),
        ("data_types.grad_accum_dtype", "int8", r"'fp32', 'bf16' or 'fp16', but got .*='int8'. Use 'fp32', or remove"),
        ("data_types.grad_accum_dtype", 32, r"'fp32', 'bf16' or 'fp16', but got .*=32"),
        ("zero_optimization", True, r"a JSON object \(.*deprecated form\), but got .*=True. Use \{\"stage\": 1\}"),
        ("zero_optimization", False, r"a JSON object \(.*deprecated form\), but got .*=False. Use \{\"stage\": 0\}"),
        ("zero_optimization", 1, r"a JSON object, but got zero_optimization=1. Use an object with any of the keys st"),
        ("zero_optimization.stage", 4, r"0, 1, 2 or 3, but got .*=4. Use one of these"),
        ("zero_optimization.stage", True, r"0, 1, 2 or 3, but got .*=True. Use one of these"),
        ("pipeline.gather_weights", "once", r"one of 'auto', 'step', 'tick', but got .*='once'. Use"),
        ("pipeline.gather_weights", None, r"one of 'auto', 'step', 'tick', but got .*=None"),
        ("optimizer", "Adam", r"a JSON object, but got optimizer='Adam'. Use an object with any of the keys type, par"),
        ("optimizer.params", {}, r"^optimizer.type must be given, but got optimizer=\{'params': \{\}\}. Add the key"),
        ("scheduler", {}, r"^scheduler.type must be given, but got scheduler=\{\}. Add the key 'type' there"),
        ("scheduler.type", "", r"a text that is not empty, but got scheduler.type=''. Write a name in quotes"),
        ("optimizer.type", 3, r"a text that is not empty, but got optimizer.type=3"),
        ("activation_checkpointing.profile", "yes", r"true or false, but got .*='yes'"),
        ("activation_checkpointing.number_checkpoints", 0, r"an integer of at least 1, but got .*=0"),
        ("checkpoint", 3, r"a JSON object, but got checkpoint=3. Use an object with any of the keys async_save, keep_"),
        ("checkpoint.async_save", "yes", r"true or false, but got .*='yes'. Use true or false without quotes"),
        ("checkpoint.async_save", None, r"true or false, but got .*=None"),
        ("checkpoint.keep_last", 0, r"an integer of at least 1, but got .*=0. Use for instance 1"),
        ("checkpoint.keep_last", 2.0, r"an integer of at least 1, but got .*=2.0"),
        ("checkpoint.keep_every", -5, r"an integer of at least 1, but got .*=-5. Use for instance 1"),
        ("checkpoint.keep_every", True, r"an integer of at least 1, but got .*=True"),
        ("checkpoint.tag_validation", "Error", r"one of 'Ignore', 'Warn', 'Fail', but got .*='Error'. Use 'Fail'"),
        (
            "checkpoint.keep_every",
            500,
            r"^checkpoint.keep_every must come with .*keep_last.*=500 alone. Add for instance checkpoint.keep_last=3",
        ),
    ],
)
def test_wrong_values(path: str, value: object, match: str) -> None:
    start = "" if match.startswith("^") else rf"^{path} must be .*"
    with pytest.raises(ConfigError, match=start + match):
        load_config(at(path, value))


@pytest.mark.parametrize(
    ("name", "instead", "reason"),
    [
        ("OneBitAdam", "Adam", "momenta of one bit"),
        ("onebitadam", "Adam", "momenta of one bit"),
        ("ZeroOneAdam", "Adam", "momenta of one bit"),
        ("OneBitLamb", "Lamb", "momenta of one bit"),
        ("MuAdam", "Adam", "optax.multi_transform"),
        ("MuAdamW", "AdamW", "optax.multi_transform"),
        ("MuSGD", "SGD", "optax.multi_transform"),
    ],
)
def test_optimizers_that_only_pytorch_has(name: str, instead: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"^optimizer.type must be .*=.{name}.. Use .{instead}.: {name} .*{reason}"):
        load_config({"optimizer": {"type": name}})


def test_muon_is_not_one_of_them() -> None:
    assert load_config({"optimizer": {"type": "Muon"}}).optimizer == OptimizerSection("Muon")


def test_clipping_in_the_optimizer() -> None:
    match = r"^optimizer.params.max_grad_norm must be left out, but got .*=2.0. Set gradient_clipping=2.0 beside"
    with pytest.raises(ConfigError, match=match):
        load_config({"optimizer": {"type": "Lamb", "params": {"max_grad_norm": 2.0}}})


def test_no_optimizer_may_be_written_as_null() -> None:
    config = load_config({"optimizer": None, "scheduler": None})
    assert config.optimizer is None
    assert load_config({"optimizer": {"type": "Adam", "params": None}}).optimizer == OptimizerSection("Adam")


@pytest.mark.parametrize(
    ("section", "match"),
    [
        (
            {},
            r"false unless activation_checkpointing.partition_activations=true, but got .*=True. Set both, or neither",
        ),
        (
            {"partition_activations": True},
            r"false unless activation_checkpointing.number_checkpoints is given, but got .*=True. Give the number",
        ),
    ],
)
def test_one_buffer_needs_its_size(section: dict[str, Any], match: str) -> None:
    section = {**section, "contiguous_memory_optimization": True}
    with pytest.raises(ConfigError, match=rf"^activation_checkpointing.contiguous_memory_optimization must be {match}"):
        load_config({"activation_checkpointing": section})
