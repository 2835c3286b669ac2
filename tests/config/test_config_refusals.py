"""What a configuration is refused for: keys and values, and what the error says."""

import re
from decimal import Decimal
from typing import Any

import pytest
from _full import put

from jaxpipe.config import PipelineConfig, load_config
from jaxpipe.errors import ConfigError, shown

VALUES: list[tuple[str, Any, str, str]] = [
    ("pipeline.stages", 0, r"an integer of at least 1", r""),
    ("pipeline.stages", True, r"an integer of at least 1", r""),
    ("pipeline.stages", 2.0, r"an integer of at least 1", r""),
    ("pipeline.stages", "two", r"'auto' or a value without quotes", r"Use 'auto'"),
    ("pipeline.stages", None, r"an integer of at least 1", r""),
    ("pipeline.partition", 3, r"a partition method or a list of boundaries", r"Use 'best', or"),
    ("pipeline.partition", "", r"a partition method or a list of boundaries", r""),
    ("pipeline.partition", [], r"a partition method or a list of boundaries", r""),
    ("pipeline.partition", {"a": 1}, r"a partition method or a list of boundaries", r""),
    ("pipeline.schedule", "", r"a schedule or a PipeSchedule class", r"Use for instance '1f1b'"),
    ("pipeline.schedule", 1, r"a schedule or a PipeSchedule class", r""),
    ("pipeline.skip_idle", "no", r"'auto' or a value without quotes", r"Use 'auto'"),
    ("pipeline.skip_idle", 1, r"true or false", r"Use true or false without quotes"),
    ("pipeline.seed_layers", "no", r"true or false", r"Use true or false"),
    ("pipeline.num_chunks", 0, r"an integer of at least 1", r"Use for instance 1"),
    ("pipeline.num_chunks", "two", r"'auto' or a value without quotes", r"Use 'auto'"),
    ("pipeline.max_pending_weights", 0, r"an integer of at least 1", r"Use for inst"),
    ("pipeline.max_pending_weights", 1.5, r"an integer of at least 1", r""),
    ("pipeline.memory_limit_gb", 0, r"a finite number above 0", r"Use for instance 1.0"),
    ("pipeline.memory_limit_gb", "80", r"'auto' or a value without quotes", r""),
    ("pipeline.scan_trunk", "yes", r"true or false", r"Use true or false"),
    ("pipeline.activation_checkpoint_interval", -1, r"an integer of at least 0", r""),
    ("pipeline.activation_checkpoint_interval", False, r"an integer of at least 0", r""),
    ("gradient_clipping", -1.0, r"a finite number of at least 0", r"Use for instance 1"),
    ("gradient_clipping", True, r"a finite number of at least 0", r""),
    ("gradient_clipping", "1.0", r"a finite number of at least 0", r""),
    ("gradient_clipping", None, r"a finite number of at least 0", r""),
    ("gradient_clipping", float("nan"), r"a finite number of at least 0", r""),
    ("gradient_clipping", 10**400, r"a finite number of at least 0", r""),
    (
        "fp16.enabled",
        "auto",
        r"true or false",
        r"Use true or false without quotes; .* Hugging Face's Trainer",
    ),
    ("fp16.loss_scale", True, r"a finite number of at least 0", r"Use"),
    ("fp16.loss_scale", float("inf"), r"a finite number of at least 0", r"Use"),
    ("fp16.loss_scale", float("nan"), r"a finite number of at least 0", r"Use"),
    ("fp16.loss_scale", -2, r"a finite number of at least 0", r"Use"),
    ("fp16.initial_scale_power", -1, r"an integer between 0 and 127", r"Use for instance 0"),
    ("fp16.initial_scale_power", 128, r"an integer between 0 and 127", r""),
    ("fp16.initial_scale_power", 16.0, r"an integer between 0 and 127", r""),
    ("fp16.loss_scale_window", 0, r"an integer of at least 1", r"Use for instance 1"),
    ("fp16.hysteresis", 0, r"an integer of at least 1", r""),
    ("fp16.consecutive_hysteresis", 1, r"true or false", r""),
    ("fp16.min_loss_scale", 0, r"a finite number above 0", r"Use for instance 1.0"),
    ("fp16.min_loss_scale", -1, r"a finite number above 0", r""),
    ("nonfinite", False, r"one of 'auto', 'skip', 'stop', 'ignore'", r"Use"),
    ("bfloat16.enabled", 1, r"true or false", r""),
    ("data_types.grad_accum_dtype", "int8", r"'fp32', 'bf16' or 'fp16'", r"Use 'fp32', or remove"),
    ("data_types.grad_accum_dtype", 32, r"'fp32', 'bf16' or 'fp16'", r""),
    ("zero_optimization", True, r"a JSON object \(.*deprecated form\)", r"Use \{\"stage\": 1\}"),
    ("zero_optimization", False, r"a JSON object \(.*deprecated form\)", r"Use \{\"stage\": 0\}"),
    ("zero_optimization", 1, r"a JSON object", r"Use an object with any of the keys st"),
    ("zero_optimization.stage", 4, r"0, 1, 2 or 3", r"Use one of these"),
    ("zero_optimization.stage", True, r"0, 1, 2 or 3", r"Use one of these"),
    ("pipeline.gather_weights", "once", r"one of 'auto', 'step', 'tick'", r"Use"),
    ("pipeline.gather_weights", None, r"one of 'auto', 'step', 'tick'", r""),
    ("optimizer", "Adam", r"a JSON object", r"Use an object with any of the keys type, par"),
    ("scheduler.type", "", r"a non-empty string", r"Write a name in quotes"),
    ("optimizer.type", 3, r"a non-empty string", r""),
    ("activation_checkpointing.profile", "yes", r"true or false", r""),
    ("activation_checkpointing.number_checkpoints", 0, r"an integer of at least 1", r""),
    ("checkpoint", 3, r"a JSON object", r"Use an object with any of the keys async_save, keep_"),
    ("checkpoint.async_save", "yes", r"true or false", r"Use true or false without quotes"),
    ("checkpoint.async_save", None, r"true or false", r""),
    ("checkpoint.keep_last", 0, r"an integer of at least 1", r"Use for instance 1"),
    ("checkpoint.keep_last", 2.0, r"an integer of at least 1", r""),
    ("checkpoint.keep_every", -5, r"an integer of at least 1", r"Use for instance 1"),
    ("checkpoint.keep_every", True, r"an integer of at least 1", r""),
    ("checkpoint.tag_validation", "Error", r"one of 'Ignore', 'Warn', 'Fail'", r"Use 'Fail'"),
]
"""A path, a value, the rule that it breaks, and the repair."""

SET: list[tuple[str, Any, str, str]] = [
    ("zero_optimization.offload_optimizer", {"device": "cpu"}, "nothing is offloaded", "Remove"),
    ("zero_optimization.zero_quantized_weights", True, r"ZeRO\+\+", "Remove"),
    ("zero_optimization.mics_shard_size", 8, "MiCS", "Use a mesh with the axes data and fsdp"),
    ("gradient_allreduce_op", "sum", "averaged over the axis data", "Remove"),
    ("max_grad_norm", 1.0, "clipping", "Use gradient_clipping"),
    ("train_step_batch_size", 4, "another name of a key", "Use train_micro_batch_size_per_gpu"),
    ("batch", {"train_batch_size": 4}, "TrainingConfig, which exists only in", "Use its keys at"),
    ("sparse_attention", {}, "not supported", "Remove"),
]
"""A key, a value, why it must not be set, and what to do instead."""

UNKNOWN = {
    "train_batchsize": "train_batch_size",
    "grandient_accumulation_steps": "gradient_accumulation_steps",
    "pipeline.activation_checkpoint_intervall": "pipeline.activation_checkpoint_interval",
    "stages": "pipeline.stages",
    "stage": "zero_optimization.stage",
    "loss_scale": "fp16.loss_scale",
    "overlap_comm": "zero_optimization.overlap_comm",
    "offload_optimiser": "zero_optimization.offload_optimizer",
    "bfloat61": "bfloat16",
    "gradient_cliping": "gradient_clipping",
    "flop_profiler": "flops_profiler",
    "zero_optimization.overlap_com": "zero_optimization.overlap_comm",
    "fp16.histeresis": "fp16.hysteresis",
    "bfloat16.enable": "bfloat16.enabled",
    "optimizer.typ": "optimizer.type",
    "pipeline.seed_layer": "pipeline.seed_layers",
}
"""Keys that are none, and what they may be meant for."""

CHECKPOINT, PLACE = "contiguous_memory_optimization", r"pipeline.partition\[1\]"
OTHERS: list[tuple[Any, str]] = [
    (
        {"optimizer": {"params": {}}},
        r"^optimizer.type must be given, but got optimizer=\{'params': \{\}\}. Add the key",
    ),
    (
        {"scheduler": {}},
        r"^scheduler.type must be given, but got scheduler=\{\}. Add the key 'type' there",
    ),
    ({"zzz": 1}, "^zzz is not a known key. Remove it, or use one of train_batch_size, train_micro"),
    (
        {"pipeline": {"zzz": 1}},
        "^pipeline.zzz is not a known key. Remove it, or use one of pipeline.stages, ",
    ),
    (
        {"data_types": {"zzz": 1}},
        "^data_types.zzz is not a known key. Remove it, or use one of data_types.grad",
    ),
    ({3: 1}, "^A key of the configuration must be a string, but got key=3. Write it in quotes"),
    ({"pipeline": {None: 1}}, "^A key of pipeline must be a string, but got key=None"),
    (
        {"checkpoint": {"keep_every": 500}},
        "^checkpoint.keep_every must come with .*=500 alone. Add .*keep_last=3",
    ),
    *(
        (
            {"fp16": {"enabled": True}, bf16: {"enabled": True}},
            "^fp16.enabled and bf16.enabled .*True and .*Remove one",
        )
        for bf16 in ("bf16", "bfloat16")
    ),
    *(
        (
            {a: {}, b: {"enabled": True}},
            rf"^bf16 must be .* one name, but got {a}=\{{\}} and {b}=.*True.*Keep one of them",
        )
        for a, b in (("bf16", "bfloat16"), ("bfloat16", "bf16"))
    ),
    *(
        (
            {"activation_checkpointing": {CHECKPOINT: True, **given}},
            rf"^activation_checkpointing.{CHECKPOINT} must be false unless "
            rf"activation_checkpointing.{match}",
        )
        for given, match in (
            ({}, "partition_activations=true, but got .*=True. Set both, or neither"),
            (
                {"partition_activations": True},
                "number_checkpoints is given, but got .*=True. Give the number",
            ),
        )
    ),
    *(
        (
            {"optimizer": {"type": name}},
            rf"^optimizer.type must be .*={name!r}. Use {instead!r}: {name} .*{reason}",
        )
        for reason, names in {
            "momenta of one bit": {
                "OneBitAdam": "Adam",
                "onebitadam": "Adam",
                "ZeroOneAdam": "Adam",
                "OneBitLamb": "Lamb",
            },
            "optax.multi_transform": {"MuAdam": "Adam", "MuAdamW": "AdamW", "MuSGD": "SGD"},
        }.items()
        for name, instead in names.items()
    ),
    *(
        (
            {"pipeline": {"partition": [0, boundary]}},
            rf"^{PLACE} must be an integer of at .*{PLACE}={boundary!r}",
        )
        for boundary in (-1, True, 1.5, "3", None)
    ),
    *(
        (
            {"pipeline": value},
            "^pipeline must be a JSON object, but got pipeline=.*any of the keys stages, ",
        )
        for value in (None, True, 3, "x", [1])
    ),
    *(
        ({"optimizer": {"type": "adam", "params": params}}, rf"^{match}")
        for params, match in (
            (
                {"max_grad_norm": 2.0},
                r"optimizer.params.max_grad_norm must be left out, .*=2.0. Set "
                r"gradient_clipping=2.0",
            ),
            (
                3,
                "optimizer.params must be a JSON object, but got optimizer.params=3. Use an object "
                "such as",
            ),
            ([1], r"optimizer.params must be a JSON object, but got optimizer.params=\[1\]"),
            (
                {1: 2},
                "A key of optimizer.params must be a string, but got key=1. Write it in quotes",
            ),
            ({"a": {2: 1}}, "A key of optimizer.params.a must be a string, but got key=2"),
            (
                {"lr": len},
                "optimizer.params.lr must be a JSON value, .*built-in.*pass anything else to "
                "initialize",
            ),
            (
                {"a": [{"b": {1, 2}}]},
                r"optimizer.params.a\[0\].b must be a JSON value, .*=\{1, 2\}. Use a number",
            ),
            ({"a": b"x"}, "optimizer.params.a must be a JSON value, but got .*=b'x'"),
            ({"a": Decimal("1.5")}, "optimizer.params.a must be a JSON value, but got .*Decimal"),
        )
    ),
]


def at(path: str, value: object) -> dict[str, Any]:
    config: dict[str, Any] = {}
    put(config, path, value)
    return config


def _id(value: object) -> str:
    return value if isinstance(value, str) else ""


@pytest.mark.parametrize(("path", "value", "rule", "repair"), VALUES, ids=_id)
def test_a_value_breaks_a_rule(path: str, value: object, rule: str, repair: str) -> None:
    match = rf"^{path} must be .*{rule}, but got {path}={re.escape(shown(value))}\. {repair}"
    with pytest.raises(ConfigError, match=match):
        load_config(at(path, value))
    section, _, key = path.partition(".")
    if section == "pipeline":
        with pytest.raises(ConfigError, match=match):
            PipelineConfig(**{key: value})


@pytest.mark.parametrize(("path", "value", "reason", "repair"), SET, ids=_id)
def test_a_key_must_not_be_set(path: str, value: object, reason: str, repair: str) -> None:
    match = (
        rf"^{path} must not be set: .*{reason}.*, but got {path}={re.escape(shown(value))}\. "
        rf"{repair}"
    )
    with pytest.raises(ConfigError, match=match):
        load_config(at(path, value))


@pytest.mark.parametrize("path", UNKNOWN)
def test_unknown_keys_name_the_nearest(path: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^{path} is not a known key\. Did you mean {UNKNOWN[path]}\?"
    ):
        load_config(at(path, 1))


@pytest.mark.parametrize(("config", "match"), OTHERS, ids=_id)
def test_others(config: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load_config(config)
