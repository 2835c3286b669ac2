"""DeepSpeed and PyTorch themselves, where they are installed."""

import logging
import warnings
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpipe.optim import LossScaler, OneCycle, make_optimizer, make_schedule

pytestmark = pytest.mark.filterwarnings("ignore")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    lr_schedules = pytest.importorskip("deepspeed.runtime.lr_schedules")
    loss_scaler = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")

NUM_UPDATES = 40


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def _torch_optimizer(name: str = "AdamW", **options: Any) -> Any:
    return getattr(torch.optim, name)([torch.nn.Parameter(torch.zeros(2))], **options)


CYCLE = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.2}
SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    *(
        ("LRRangeTest", {"lr_range_test_step_size": n, "lr_range_test_staircase": s})
        for n, s in product([1, 7], [0, 1])
    ),
    ("WarmupLR", {}),
    *(
        ("WarmupLR", {"warmup_num_steps": n, "warmup_type": rise})
        for n, rise in product([1, 4, 17], ["log", "linear"])
    ),
    ("WarmupLR", {"warmup_min_lr": 0.01, "warmup_max_lr": 0.3, "warmup_num_steps": 9}),
    *(
        (
            "WarmupDecayLR",
            {"total_num_steps": total, "warmup_num_steps": n, "warmup_min_lr": 0.0001},
        )
        for total, n in product([2, 20, 100], [1, 9])
    ),
    *(
        (
            "WarmupCosineLR",
            {"total_num_steps": total, "warmup_num_steps": n, "warmup_min_ratio": 0.1},
        )
        for total, n in product([2, 20, 100], [1, 9])
    ),
    *(
        (
            "OneCycle",
            {
                **CYCLE,
                "cycle_first_step_size": first,
                "cycle_second_step_size": second,
                "cycle_first_stair_count": stairs,
                "decay_step_size": decay,
                "decay_lr_rate": 0.5,
                "decay_mom_rate": 0.01,
            },
        )
        for first, second, stairs, decay in product([3, 10], [None, 5], [0, 2, 7], [0, 3])
    ),
]


@pytest.mark.parametrize(("name", "params"), SCHEDULES)
def test_schedules_update_by_update(name: str, params: dict[str, Any]) -> None:
    params = {
        key: bool(value) if key.endswith("staircase") else value for key, value in params.items()
    }
    optimizer = _torch_optimizer(lr=0.05)
    theirs, ours = (
        getattr(lr_schedules, name)(optimizer, **params),
        make_schedule(name, params, 0.05),
    )
    for count in range(NUM_UPDATES):
        group = optimizer.param_groups[0]
        assert float(ours(count)) == pytest.approx(group["lr"], rel=1e-5, abs=1e-9)
        if isinstance(ours, OneCycle):
            assert (float(ours.momentum(count)), ours.cycled_b2) == pytest.approx(
                group["betas"], rel=1e-5
            )
        theirs.step()


@pytest.mark.parametrize(("window", "hysteresis"), list(product([1, 2, 3], [1, 2, 3])))
@pytest.mark.parametrize("consecutive", [False, True])
def test_loss_scales_update_by_update(window: int, hysteresis: int, consecutive: bool) -> None:
    section = SimpleNamespace(
        enabled=True, loss_scale=0, initial_scale_power=3, loss_scale_window=window
    )
    section.hysteresis, section.consecutive_hysteresis, section.min_loss_scale = (
        hysteresis,
        consecutive,
        1.0,
    )
    scaler = LossScaler.from_section(section)
    patterns = np.array(list(product([False, True], repeat=8)))
    scan = jax.vmap(
        lambda p: jax.lax.scan(lambda s, o: (scaler.update(s, o),) * 2, scaler.init(), p)[1]
    )
    states = jax.device_get(jax.jit(scan)(patterns))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_scaler.dist, "get_rank", lambda: 1)
        for row, pattern in enumerate(patterns):
            theirs = loss_scaler.DynamicLossScaler(8.0, window, 1.0, hysteresis, consecutive)
            for update, overflow in enumerate(pattern):
                if states.exhausted[row, update]:
                    with pytest.raises(Exception, match="already at minimum"):
                        theirs.update_scale(overflow)
                    break
                theirs.update_scale(overflow)
                assert states.scale[row, update] == theirs.cur_scale
                assert states.hysteresis[row, update] == theirs.cur_hysteresis
                assert states.last_overflow[row, update] == theirs.last_overflow_iter


@pytest.mark.parametrize(
    ("name", "params", "theirs"),
    [
        ("AdamW", {"torch_adam": True, "lr": 0.1}, "AdamW"),
        (
            "AdamW",
            {
                "torch_adam": True,
                "lr": 0.1,
                "amsgrad": True,
                "weight_decay": 0.3,
                "betas": [0.7, 0.8],
            },
            "AdamW",
        ),
        (
            "Adam",
            {"torch_adam": True, "lr": 0.1, "adam_w_mode": False, "weight_decay": 0.3},
            "Adam",
        ),
        (
            "Adam",
            {
                "torch_adam": True,
                "lr": 0.1,
                "adam_w_mode": False,
                "amsgrad": True,
                "maximize": True,
            },
            "Adam",
        ),
        ("SGD", {}, "SGD"),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.2}, "SGD"),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}, "SGD"),
        ("Adagrad", {}, "Adagrad"),
        (
            "Adagrad",
            {"lr": 0.1, "lr_decay": 0.2, "weight_decay": 0.1, "initial_accumulator_value": 0.5},
            "Adagrad",
        ),
    ],
)
def test_pytorchs_optimizers_update_by_update(
    name: str, params: dict[str, Any], theirs: str
) -> None:
    rng = np.random.default_rng(0)
    start = rng.normal(size=(4, 3)).astype(np.float32)
    weight = torch.nn.Parameter(torch.tensor(start))
    options = {
        key: value for key, value in params.items() if key not in ("torch_adam", "adam_w_mode")
    }
    reference = getattr(torch.optim, theirs)([weight], **options)
    optimizer, values = make_optimizer(name, params), jnp.asarray(start)
    state = optimizer.init(values)
    for _ in range(10):
        gradient = rng.normal(size=(4, 3)).astype(np.float32)
        weight.grad = torch.tensor(gradient)
        reference.step()
        updates, state = jax.jit(optimizer.update)(jnp.asarray(gradient), state, values)
        values = optax.apply_updates(values, updates)
        np.testing.assert_allclose(values, weight.detach().numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_muon_updates_by_update() -> None:
    muon = pytest.importorskip("deepspeed.runtime.zero.muon.original_muon")
    rng = np.random.default_rng(0)
    start = rng.normal(size=(4, 6)).astype(np.float32)
    weight, memory = torch.tensor(start.T.copy()), torch.zeros(6, 4)
    optimizer, values = make_optimizer("Muon", {"lr": 0.1}), {"w": jnp.asarray(start)}
    state = optimizer.init(values)
    for _ in range(4):
        gradient = rng.normal(size=(4, 6)).astype(np.float32)
        given = torch.tensor(gradient.T.copy())
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(muon, "zeropower_via_gram_newtonschulz", _in_float32(muon))
            update = getattr(muon.muon_update, "__wrapped__", muon.muon_update)(given, memory)
        weight = weight - 0.1 * update
        updates, state = optimizer.update({"w": jnp.asarray(gradient)}, state, values)
        values = optax.apply_updates(values, updates)
        np.testing.assert_allclose(values["w"], weight.numpy().T, rtol=2e-2, atol=2e-2)


def _in_float32(muon: Any) -> Any:
    plain = muon.zeropower_via_newtonschulz5
    return getattr(plain, "__wrapped__", plain)
