"""What descriptions of optimizers, schedules and loss scales are refused for, by path and value."""

import math
import re
from dataclasses import fields
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _refusals import check_refused

from jaxpipe.errors import ConfigError
from jaxpipe.optim import (
    LossScaler,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    make_optimizer,
    make_schedule,
    set_hyperparams,
    with_schedule,
)

NUMBER, COUNT = "a finite number of at least 0", "an integer of at least"
FP16 = {
    "enabled": True,
    "loss_scale": 0.0,
    "initial_scale_power": 4,
    "loss_scale_window": 3,
    "hysteresis": 2,
    "consecutive_hysteresis": False,
    "min_loss_scale": 1.0,
}


def by_path(path: str, value: Any, rule: str, repair: str) -> str:
    return rf"{re.escape(path)} must be {rule}.*={re.escape(repr(value))}\. {repair}"


SCALES = [
    *(
        (
            by_path(f"fp16.{key}", value, rule, repair),
            partial(LossScaler.from_section, SimpleNamespace(**{**FP16, key: value})),
        )
        for key, value, rule, repair in (
            ("loss_scale", -1, NUMBER, "Use"),
            ("loss_scale", "dynamic", "", "Use a number"),
            ("loss_scale", True, "", "Use a number"),
            ("loss_scale", math.inf, "", "Use a number"),
            ("loss_scale", 1e39, "a scale above 0 within float32", "Use a scale such"),
            ("initial_scale_power", 128, "an integer of at most 127", "Use for"),
            ("initial_scale_power", -1, f"{COUNT} 0", "Use for"),
            ("loss_scale_window", 0, f"{COUNT} 1", "Use for instance"),
            ("hysteresis", 0, f"{COUNT} 1", "Use for instance"),
            ("consecutive_hysteresis", 1, "true or false", "Use true or false"),
            ("min_loss_scale", 0, "above 0 and at most .* of 16", "Lower it, or raise"),
            ("min_loss_scale", 32, ".* of 16", "Lower it, or"),
            ("min_loss_scale", None, "a finite number", "Use a number"),
        )
    ),
    (
        by_path("fp16.loss_scale", 0.0, "a scale above 0", "Use a scale such as 65536"),
        partial(LossScaler, 0.0),
    ),
]
CYCLES = [
    (
        by_path(f"scheduler.params.{key}", value, rule, repair),
        partial(OneCycle, **{"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, key: value}),
    )
    for key, value, rule, repair in (
        ("cycle_min_lr", -1, NUMBER, "Use a"),
        ("cycle_max_lr", "1", "a finite number", "Use a number such as 0.001"),
        ("decay_lr_rate", None, NUMBER, "Use"),
        ("decay_mom_rate", -0.1, NUMBER, "Use"),
        ("cycle_first_step_size", 0, f"{COUNT} 1", "Use for"),
        ("cycle_second_step_size", -1, f"{COUNT} 0", "Use for"),
        ("cycle_first_stair_count", 1.5, f"{COUNT} 0", "Use"),
        ("cycle_second_stair_count", "2", f"{COUNT} 0", "Use"),
        ("decay_step_size", -2, f"{COUNT} 0", "Use"),
        ("cycle_momentum", "yes", "true or false", "Use true or false"),
        ("cycle_min_mom", 1.0, f"{NUMBER} and below 1", "Use"),
        ("cycle_max_mom", 1.5, f"{NUMBER} and below 1", "Use"),
        (
            "cycle_first_stair_count",
            2**21,
            r"below 2\*\*31 / cycle_first_step_size=2000",
            "Use fewer stairs",
        ),
    )
]
NUMBERS = {"warmup_min_lr", "warmup_max_lr", "warmup_min_ratio", "cos_min_ratio"}
NUMBERS |= {"lr_range_test_min_lr", "lr_range_test_step_rate"}
COUNTS = {"total_num_steps": 1, "warmup_num_steps": 0, "lr_range_test_step_size": 1}
WARMUPS = [
    *(
        (
            by_path(f"scheduler.params.{field.name}", value, rule, ""),
            partial(cls, **{**given, field.name: value}),
        )
        for cls, given in (
            (WarmupLR, {"lr": 0.1}),
            (WarmupDecayLR, {"total_num_steps": 10}),
            (WarmupCosineLR, {"total_num_steps": 10}),
            (LRRangeTest, {}),
        )
        for field in fields(cls)
        for rule, value in (
            *(
                (f"{NUMBER},", value)
                for value in ("0.1", None, True, [0.1], math.inf, math.nan, -0.5)
                if field.name in NUMBERS
                and (cls, field.name, value) != (WarmupLR, "warmup_max_lr", None)
            ),
            *(
                (f"{COUNT} {COUNTS[field.name]} and", value)
                for value in ("4", True, 2.5, [4], -1, 2**31, COUNTS.get(field.name, 0) - 1)
                if field.name in COUNTS
            ),
            *([("", -2)] if field.name == "last_batch_iteration" else []),
        )
    ),
    (
        by_path("params.warmup_type", "lin", "one of 'log', 'linear'", "Use"),
        partial(WarmupLR, lr=0.1, warmup_type="lin"),
    ),
    (
        by_path("params.lr_range_test_staircase", 1, "true or false", "Use"),
        partial(LRRangeTest, lr_range_test_staircase=1),  # pyright: ignore[reportArgumentType]
    ),
    (by_path("warmup_max_lr", None, "a number if", "Set warmup_max_lr, or"), WarmupLR),
    (
        r"scheduler\.params\.warmup_max_lr must be a number if .* or optimizer\.param",
        partial(make_schedule, "WarmupLR", {}),
    ),
]
SCHEDULES = [
    (words, partial(make_schedule, name, params, 0.1))
    for name, params, words in (
        ("WarmupLr", {}, r"type must be one of .*OneCycle.*='WarmupLr'\. Did you mean 'WarmupLR'"),
        ("cosine_decay", {}, r"type='cosine_decay'\. Did you mean 'cosine_decay_schedule'\?"),
        ("StepLR", {}, r"scheduler\.type must be one of .*, but got scheduler\.type='StepLR'"),
        (7, {}, r"type must be one of .*, but got scheduler\.type=7\. Use one of these names"),
        (
            "WarmupLR",
            {"warmup_steps": 4},
            r"params\.warmup_steps is not .*\.params\.warmup_num",
        ),
        ("WarmupLR", {"lr": 4}, r"params\.lr is not a known key\. "),
        (
            "LRRangeTest",
            {"zzz": 4},
            r"params\.zzz is not a known key\. Remove it, or .*test_mi",
        ),
        (
            "LRRangeTest",
            {4: 4},
            r"key of scheduler\.params .*a string, .*key=4\. Write it in q",
        ),
        (
            "OneCycle",
            {"cycle_min_lr": 0.1},
            r"params\.cycle_max_lr must be given, but .*Add the key 'cycle_max_lr' there",
        ),
        (
            "WarmupDecayLR",
            {},
            r"params\.total_num_steps must be .*Add the key 'total_num_steps'",
        ),
        ("constant_schedule", {}, r"params\.value must be given, .*={}\. Add the key 'value'"),
        ("constant_schedule", {"valu": 1}, r"params\.valu is .*mean scheduler\.params\.value"),
        ("constant_schedule", {"value": [1, 2]}, r"one rate.*shape=\(2,\) from constant_sch.*Use"),
        (
            "cosine_decay_schedule",
            {"init_value": 1.0, "decay_steps": "x"},
            "arguments that optax's cosine.*'x'.*Corr",
        ),
        (
            "piecewise_constant_schedule",
            {"init_value": 1.0, "boundaries_and_scales": {"x": 1}},
            "accepts, but got .*x",
        ),
    )
]
NAMES = ["Adam", "AdamW", "Lamb", "Adagrad", "Lion", "SGD", "Muon"]
SINGLE = {"learning_rate": 0.1}
OPTIMIZERS = [
    *(
        (r"optimizer\.params(\.\w+)? must be", partial(make_optimizer, name, given))
        for name, given in (
            ("lbfgs", {}),
            *((name, SINGLE) for name in ("momo", "momo_adam", "sophia", "schedule_free", "dpsgd")),
        )
    ),
    *(
        (
            r"optimizer\.params\.betas(\[[01]\])? must be a .*, but got .*Use ",
            partial(make_optimizer, name, {"betas": value}),
        )
        for name in ("Adam", "AdamW", "Lamb", "Lion", "Muon")
        for value in (0.9, [0.9], [0.9, 1.0], [-0.1, 0.9], "0.9", ["a", 0.9], None)
    ),
    *(
        (
            by_path(f"optimizer.params.{key}", value, "a finite number", "Use a number such as"),
            partial(make_optimizer, name, {key: value}),
        )
        for name in NAMES
        for key in ("lr", "weight_decay")
        for value in ("0.1", True, -1, [0.1], math.nan)
    ),
    *(
        (
            r"optimizer\.params\.max_grad_norm must not be set: .*=1\.0\. Use gradient_clipp",
            partial(make_optimizer, name, {"max_grad_norm": 1.0}),
        )
        for name in NAMES
    ),
    *(
        (rf"optimizer\.{words}", partial(make_optimizer, name, params))
        for name, params, words in (
            ("Adam", SINGLE, r"params\.learning_rate is not a known key\. Remove it, or use one "),
            (
                "Adam",
                {"wieght_decay": 1},
                r"params\.wieght_decay is .*mean \w+\.params\.weight_d",
            ),
            ("Adam", {1: 1}, r"params must be a string, but got key=1\. Write it in quotes"),
            ("Adam", {"adam_w_mode": 0}, r"params\.adam_w_mode .*, .*=0\. Use true or false"),
            ("Adam", {"eps": None}, r"params\.eps must be a finite number .*=None\. Use a number"),
            ("Adam", {"fused": "yes"}, r"params\.fused must be true .*='yes'\. Use true or"),
            ("AdamW", {"adam_w_mode": False}, r"params\.adam_w.* true with .*=False\. Use optimiz"),
            ("SGD", {"nesterov": True}, r"params\.nest.* false with momentum=0 .*=True\. Set opt"),
            (
                "SGD",
                {"nesterov": True, "momentum": 0.9, "dampening": 0.1},
                r".* with momentum=0\.9 and dampening=0\.1, .*=True\. Set ",
            ),
            ("SGD", {"betas": [0.9, 0.9]}, r"params\.betas is not a known key"),
            ("Lamb", {"amsgrad": True}, r"params\.amsgrad must not be set: .*=True\. Remove the"),
            (
                "Lamb",
                {"min_coeff": 11},
                r"params\.min_c.* max_coeff=10\.0, .*=11\.0\. Swap",
            ),
            ("Muon", {"per_head_muon": True}, r"params\.per_head.* not be set: .*Remove the key"),
            ("Muon", {"ns_method": "gramm"}, r"params\.ns_m.* one of 'gram', 'sta.*\. Use 'gram"),
            ("Muon", {"momentum": 1}, r"params\.momentum must be .* below 1, .*=1\. Use a number"),
            ("AdanW", {}, r"type must be .*AdamW.*adan.*\.type='AdanW'\. Did you mean '[Aa]d"),
            ("RMSprop", {}, r"type must be one of .*type='RMSprop'\. Did you mean 'rmsprop'\?"),
            ("OneBitAdam", {}, r"type must be one of .*, but got optimizer\.type='OneBitAdam'"),
            (3, {}, r"type must be one of .*, but got .*type=3\. Use one of these names"),
            ("rmsprop", {**SINGLE, "lr": 1}, r"params\.lr is not a known key"),
            (
                "rmsprop",
                {**SINGLE, "deccay": 1},
                r"params\.deccay is .*mean \w+\.params\.decay",
            ),
            ("rmsprop", {}, r"params\.learning_rate .* given, .*={}\. Add the key 'learning_rate'"),
            ("rmsprop", {"learning_rate": "x"}, "params .*that optax's rmsprop accepts.*'x'.*Corr"),
            ("rmsprop", {**SINGLE, "decay": "x"}, "params must be arguments .* accepts.*'x'.*Corr"),
        )
    ),
    (
        r"but got optimizer\.type='Adam'\. Remove the argument",
        partial(make_optimizer, "Adam", {}, matrices=lambda tree: tree),
    ),
    *(
        (
            "must be made by a function of learning_rate, but got .*Pass for instance op",
            partial(with_schedule, factory, WarmupLR(lr=0.1)),
        )
        for factory in (optax.scale, optax.adam(0.1), 3)
    ),
]
CHANGES: list[tuple[str, str, dict[str, Any]]] = [
    (
        "Adam",
        "hyperparameter must be one of b1, b2, .*='learning_rat'. Did you mean 'learn",
        {"learning_rat": 0.5},
    ),
    (
        "Adam",
        r"learning_rate must not follow a schedule .* got learning_rate=0\.5 where .*Leav",
        {"learning_rate": 0.5},
    ),
    *(
        ("Adam", "b1 must be a finite number, but got b1=.*Use for instance 0.001", {"b1": value})
        for value in (
            *(None, "0.1", math.nan, math.inf, 1e39, 10**400, True, 0.1j, [0.1], np.ones(3)),
            *(np.array("0.1"), np.array(True), jnp.nan, np.float32(math.inf)),
        )
    ),
    *(
        (
            "Muon",
            rf"{name} must be {rule}, but got {name}={got}\. Use a number such as 0\.001",
            {name: value},
        )
        for name, value, rule, got in (
            ("learning_rate", -1, NUMBER, r"-1\.0"),
            ("adam_learning_rate", -1e-9, NUMBER, "-1e-09"),
            ("weight_decay", -0.1, NUMBER, r"-0\.1"),
            ("momentum", -0.5, NUMBER, r"-0\.5"),
            ("b1", 1.0, f"{NUMBER} and below 1", r"1\.0"),
            ("b2", np.float32(-0.5), f"{NUMBER} and below 1", r".*-0\.5.*"),
        )
    ),
]
TABLES = {
    "loss scales": SCALES,
    "one cycle": CYCLES,
    "warm-ups": WARMUPS,
    "schedules": SCHEDULES,
    "optimizers": OPTIMIZERS,
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_refused(table: Any) -> None:
    check_refused(ConfigError, table)


def test_changes_of_hyperparameters_are_refused() -> None:
    params = {"w": jnp.ones((2, 3)), "b": jnp.zeros(3)}
    scheduled = make_optimizer("Adam", {}, WarmupLR(0.1, 0.5, 4, "linear"))
    states = {"Adam": scheduled.init(params), "Muon": make_optimizer("Muon", {}).init(params)}
    arrays = {"b1": jnp.array(jnp.inf)}, {"b1": jnp.float32(math.nan)}
    words = "b1 must be a finite number, but got b1=.*Use for instance 0.001"
    rows = [*CHANGES, *(("Adam", words, given) for given in arrays)]
    table = [
        (words, partial(set_hyperparams, states[name], **given)) for name, words, given in rows
    ]
    check_refused(ConfigError, table)
