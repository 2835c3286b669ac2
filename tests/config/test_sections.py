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


def at(path: str, value: object) -> dict[str, Any]:
    config: dict[str, Any] = {}
    put(config, path, value)
    return config


def test_defaults_are_deepspeeds_but_for_clipping() -> None:
    config = load_config({})
    assert config.gradient_clipping == 0.0
    assert config.fp16 == FP16Section(False, False, 0.0, 16, 1000, 2, False, 1.0)
    assert config.bf16 == BF16Section(False, False)
    assert config.data_types == DataTypesSection(None)
    assert config.zero_optimization == ZeroSection(0)
    assert config.optimizer is None
    assert config.scheduler is None
    assert config.activation_checkpointing == ActivationCheckpointingSection(
        False, False, False, None, False, False
    )
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
    assert (
        load_config(at("pipeline.gather_weights", value)).pipeline.gather_weights == value.lower()
    )


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


def test_dtype_of_accumulation_does_not_follow_the_model() -> None:
    for name, dtype in [
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
    ]:
        config = load_config({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": name}})
        assert (config.data_types.grad_accum_dtype or "float32") == dtype, name


def test_muon_is_not_one_of_them() -> None:
    assert load_config({"optimizer": {"type": "Muon"}}).optimizer == OptimizerSection("Muon")


def test_no_optimizer_may_be_written_as_null() -> None:
    config = load_config({"optimizer": None, "scheduler": None})
    assert config.optimizer is None
    assert load_config(
        {"optimizer": {"type": "Adam", "params": None}}
    ).optimizer == OptimizerSection("Adam")
