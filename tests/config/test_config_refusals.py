"""What a configuration is refused for: keys and values, and what the error says."""

import re
from argparse import Namespace
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

from _full import put
from _refusals import check_refused

from jaxpipe.config import PipelineConfig, config_from_args, load_config, resolve_batch_sizes
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

TOO_LONG = "too long to be printed>"
INSIDE: dict[str, Any] = {}
INSIDE["again"] = INSIDE
BATCH = {"train_batch_size": 8, "data_parallel_size": 1}
BATCHED = {"train_batch_size": 8}
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
    ({"fp16": {"enabled": 0}}, "^fp16.enabled must be true or false, but got .*=0"),
    ({"fp16": {"loss_scale": -1}}, "^fp16.loss_scale must be .*=-1. Use"),
    (
        {"fp16": {"enabled": False, "los_scale": 0}},
        "^fp16.los_scale is not a known key. Did you mean fp16.loss_scale",
    ),
    (
        {"fp16": {"enabled": False, "clip": 1.0}},
        "^fp16.clip must not be set: .*=1.0. Use gradient_clipping",
    ),
    *(
        (config, re.escape(f'topology=ProcessTopology(["pipe", "data", "{axis}"], sizes)'))
        for config, axis in (
            ({"sequence_parallel_size": 4}, "sequence"),
            ({"expert_parallel": {"enabled": True}}, "expert"),
            ({"moe": {"enabled": True, "ep_size": 4}}, "expert"),
            ({"tensor_parallel": {"autotp_size": 4}}, "model"),
        )
    ),
    *(
        (
            {"train_batch_size": size},
            r"^train_batch_size must be an integer of at least 1 and below 2\*\*63, but got "
            r"train_batch_size=.*Use for",
        )
        for size in (10**5000, 2**63)
    ),
    ({10**5000: 1}, f"^A key of the configuration must be .*key=<int {TOO_LONG}"),
    (
        {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 10**5000}}},
        f"^optimizer.params.max_grad_norm must be .*<int {TOO_LONG}",
    ),
    (
        {"gradient_accumulation_steps": [10**5000]},
        f"^gradient_accumulation_steps must be .*<list {TOO_LONG}",
    ),
    (
        {"optimizer": {"type": "Adam", "params": INSIDE}},
        "nested no deeper than JSON .* object inside itself.* Give a dictionary of plai",
    ),
    *(
        (
            {key: value},
            rf"^{key} must be an integer of at least 1, but got {key}=.*Use for instance 1",
        )
        for key in (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "steps_per_print",
        )
        for value in (0, -1, True, 4.0, "4", "auto", [4], {})
    ),
    (3, "dictionary or the path of a JSON file, but got config=3. Pass a dict"),
    *(
        (given, r"must be a dictionary.*got config=.*vars\(config\)")
        for given in (Namespace(seed=1), dict, 3)
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


def test_a_value_breaks_a_rule() -> None:
    for path, value, rule, repair in VALUES:
        words = rf"^{path} must be .*{rule}, but got {path}={re.escape(shown(value))}\. {repair}"
        check_refused(ConfigError, [(words, load_config)], at(path, value))
        section, _, key = path.partition(".")
        if section == "pipeline":
            check_refused(ConfigError, [(words, partial(PipelineConfig, **{key: value}))])


def test_a_key_must_not_be_set() -> None:
    for path, value, reason, repair in SET:
        got = rf"{path}={re.escape(shown(value))}\. {repair}"
        words = rf"^{path} must not be set: .*{reason}.*, but got {got}"
        check_refused(ConfigError, [(words, load_config)], at(path, value))


def test_unknown_keys_name_the_nearest() -> None:
    for path, nearest in UNKNOWN.items():
        words = rf"^{path} is not a known key\. Did you mean {nearest}\?"
        check_refused(ConfigError, [(words, load_config)], at(path, 1))


def test_others() -> None:
    table = [(words, partial(load_config, config)) for config, words in OTHERS]
    check_refused(ConfigError, table)


FILES: list[tuple[Any, str]] = [
    (b'{"a": "\xff"}', r"readable JSON file in UTF-8, but got config=.*config\.json"),
    (
        '{ # a comment\n  "train_batch_size": 4, /* and\nanother */ "steps_per_print" 1,\n}',
        r"valid JSON, but got .* in .*config\.json at line 3, column 30\. Correct .* only comments",
    ),
    ('{"train_batch_size": 4} /* and', "but got Extra data in .* at line 1, column 25"),
    ("[" * 100_000, r"valid JSON, but got .* in .*config\.json\. Correct the file"),
    *(
        (text, r"a JSON object, but got .* in .*config\.json\. Write \{\.\.\.\} there")
        for text in ("[]", "3", '"train_batch_size"', "null")
    ),
    *(
        (
            text,
            r"^config must be valid JSON, but got .* at line \d, column \d+\. Correct the file "
            "there; .*trailing commas",
        )
        for text in (
            "train_batch_size: 4",
            "{train_batch_size: 4}",
            '{"train_batch_size": 4 "steps_per_print": 2}',
            '{"train_batch_size": 4\n"steps_per_print": 2}',
            "{'train_batch_size': 4}",
            '{"optimizer": {"type": Adam}}',
            '{"optimizer": {"type": """Adam"""}}',
            "{\"optimizer\": {\"type\": '''Adam'''}}",
            '{"train_batch_size": 4,,}',
            '{"train_batch_size": ,}',
            '{"pipeline": {"partition": [,]}}',
            "{,}",
            '{"train_batch_size": 4} 5',
            '{"train_batch_size": 4 /* never closed }',
            '{"train_batch_size": 0x10}',
            '{"optimizer": {"type": "Ad\nam"}}',
            '{"optimizer": {"type": "Adam # }}',
            "",
            "# only a comment",
        )
    ),
    (
        '{"pipeline": {"stages": 0}}',
        r"^pipeline\.stages must be .*stages=0\. .*\(Read from .*config\.json\.\)",
    ),
]
"""What a file holds, and what the error says."""


def test_files(tmp_path: Path) -> None:
    table = [
        (
            r"config='.*nowhere\.json', which does not exist\. Correct the path",
            partial(load_config, tmp_path / "nowhere.json"),
        ),
        (
            "readable JSON file in UTF-8, but got config=.*Name a file that can be read",
            partial(load_config, tmp_path),
        ),
    ]
    check_refused(ConfigError, table)
    file = tmp_path / "config.json"
    for content, words in FILES:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        check_refused(ConfigError, [(words, load_config)], file)


BATCHES = [
    *(
        (words, partial(resolve_batch_sizes, *sizes, data_parallel_size=world))
        for *sizes, world, words in (
            (
                7,
                1,
                2,
                1,
                r"hold, but got 7 != 1 x 2 x 1\. Use train_batch_size=2, or leave out one",
            ),
            (64, 4, None, 3, r"got 64 = 4 x \? x 3\. .* of 12: the nearest to 64 is 60 or 72"),
            (64, None, 5, 2, r"got 64 = \? x 5 x 2\. .* of 10: the nearest to 64 is 60 or 70"),
            (64, None, None, 3, r"got 64 = \? x 1 x 3\. .* of 3: the nearest to 64 is 63 or 66"),
            (2, None, 2, 4, r"got 2 = \? x 2 x 4\. .* multiple of 8: the nearest to 2 is 8"),
            (None, None, 2, 4, r"given .* got \? = \? x 2 x 4\. Add one of the two keys"),
            (None, None, None, 4, r"given .* got \? = \? x \? x 4\. Add one of the two keys"),
        )
    ),
    *(
        (
            rf"{name} must be an integer of at least 1, but got {name}={value!r}",
            partial(resolve_batch_sizes, **{**BATCH, name: value}),
        )
        for name in (*BATCH, "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        for value in (0, -4, True, 4.0, "4")
    ),
]
GIVEN: list[tuple[dict[str, Any], str]] = [
    (
        {"args": {"deepspeed_config": "x.json"}, "config": BATCHED},
        r"but got config and args\.deepspeed_config\. Pass .*keep one of "
        r"config=\{'train_batch_size': 8\} and args\.deepspeed_config='x\.json'\.",
    ),
    (
        {"args": None, "config": BATCHED, "config_params": "y.json"},
        r"but got config and config_params\. Pass .*keep one of config=\{.*\} and "
        r"config_params='y\.json'\.",
    ),
    *(
        (
            {"args": args, "config": BATCHED},
            rf"must not be given, but got {got}\. Use args\.deepspeed{name}\.",
        )
        for args, got, name in (
            ({"deepscale_config": "x.json"}, r"args\.deepscale_config='x\.json'", "_config"),
            (Namespace(deepscale=True), r"args\.deepscale=True", ""),
        )
    ),
]


def test_batches_and_arguments() -> None:
    check_refused(ConfigError, BATCHES)
    check_refused(
        ConfigError, [(words, partial(config_from_args, **given)) for given, words in GIVEN]
    )
