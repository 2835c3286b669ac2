"""Optimisers by name, against the update rules of PyTorch and DeepSpeed written out in numpy."""

from collections.abc import Callable
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import sweep

from jaxpipe.optim import OneCycle, make_optimizer

NUM_UPDATES = 6
SHAPES = {"kernel": (5, 3), "wide": (3, 7), "bias": (3,), "embed": (4, 3), "zero": (2,)}

Arrays = dict[str, np.ndarray]
Rule = Callable[[dict[str, Any], np.ndarray, np.ndarray, dict[str, Any], int], np.ndarray]


def _data() -> tuple[Arrays, list[Arrays]]:
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
    params["zero"] *= 0
    grads = [
        {name: rng.normal(size=shape) for name, shape in SHAPES.items()} for _ in range(NUM_UPDATES)
    ]
    return params, grads


def _apply(optimizer: optax.GradientTransformation) -> list[Arrays]:
    params, grads = _data()
    params = jax.tree.map(jnp.float32, params)
    state = optimizer.init(params)
    update, trace = jax.jit(optimizer.update), []
    for gradient in grads:
        with jax.numpy_dtype_promotion("strict"):
            updates, state = update(jax.tree.map(jnp.float32, gradient), state, params)
            params = optax.apply_updates(params, updates)
        trace.append(jax.device_get(params))
    return trace


def _simulate(rule: Rule, options: Callable[[str, int], dict[str, Any]]) -> list[Arrays]:
    params, grads = _data()
    memory: dict[str, dict[str, Any]] = {name: {} for name in params}
    trace = []
    for step, gradient in enumerate(grads, start=1):
        params = {
            name: rule(options(name, step), value, gradient[name], memory[name], step)
            for name, value in params.items()
        }
        trace.append(params)
    return trace


def _assert_same(name: str, params: dict[str, Any], rule: Rule, defaults: dict[str, Any]) -> None:
    _assert_traces(
        _apply(make_optimizer(name, params)), _simulate(rule, lambda *_: {**defaults, **params})
    )


def _assert_traces(actual: list[Arrays], wanted: list[Arrays]) -> None:
    for ours, theirs in zip(actual, wanted, strict=True):
        for name in SHAPES:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=2e-5, atol=2e-5, err_msg=name)


def _adam(
    o: dict[str, Any], p: np.ndarray, g: np.ndarray, memory: dict[str, Any], step: int
) -> np.ndarray:
    b1, b2 = o["betas"]
    g = -g if o.get("maximize") else g
    if not o["adam_w_mode"]:
        g = g + o["weight_decay"] * p
    memory["m"] = b1 * memory.get("m", 0) + (1 - b1) * g
    memory["v"] = b2 * memory.get("v", 0) + (1 - b2) * g**2
    memory["top"] = np.maximum(memory.get("top", 0), memory["v"])
    c1, c2 = (1 - b1**step, 1 - b2**step) if o["bias_correction"] else (1, 1)
    denominator = np.sqrt(memory["top"] if o["amsgrad"] else memory["v"]) / np.sqrt(c2) + o["eps"]
    if o["adam_w_mode"]:
        p = p * (1 - o["lr"] * o["weight_decay"])
    return p - o["lr"] / c1 * memory["m"] / denominator


ADAM = {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "adam_w_mode": True}
ADAM |= {"bias_correction": True, "amsgrad": False}


@pytest.mark.parametrize("flags", sweep(8, [*list(product([False, True], repeat=4))]))
def test_adam_in_every_mode(flags: tuple[bool, bool, bool, bool]) -> None:
    names = ("adam_w_mode", "bias_correction", "amsgrad", "maximize")
    params = {
        "lr": 0.1,
        "betas": [0.8, 0.95],
        "eps": 1e-3,
        "weight_decay": 0.3,
        **dict(zip(names, flags, strict=True)),
    }
    _assert_same("Adam", params, _adam, ADAM)


@pytest.mark.parametrize("name", ["Adam", "adam", "ADAM", "AdamW", "adamw"])
def test_adam_means_adamw_with_deepspeeds_defaults(name: str) -> None:
    _assert_same(name, {}, _adam, ADAM)
    _assert_same(name, {"lr": 0.1, "weight_decay": 0.5}, _adam, ADAM)


def test_pytorchs_adamw_has_its_own_weight_decay() -> None:
    _assert_same("AdamW", {"lr": 0.1, "torch_adam": True}, _adam, ADAM | {"weight_decay": 0.01})
    _assert_same("Adam", {"lr": 0.1, "torch_adam": True, "adam_w_mode": False}, _adam, ADAM)


def _lamb(
    o: dict[str, Any], p: np.ndarray, g: np.ndarray, memory: dict[str, Any], step: int
) -> np.ndarray:
    b1, b2 = o["betas"]
    memory["m"] = b1 * memory.get("m", 0) + (1 - b1) * g
    memory["v"] = b2 * memory.get("v", 0) + (1 - b2) * g * g
    c1, c2 = (1 - b1**step, 1 - b2**step) if o["bias_correction"] else (1, 1)
    v = memory["v"] / c2
    root = np.sqrt(v + o["eps"]) if o["eps_inside_sqrt"] else np.sqrt(v) + o["eps"]
    u = memory["m"] / c1 / root + o["weight_decay"] * p
    norms, coefficient = (np.linalg.norm(p), np.linalg.norm(u)), 1.0
    if norms[0] != 0 and norms[1] != 0:
        coefficient = min(max(norms[0] / norms[1], o["min_coeff"]), o["max_coeff"])
    return p - o["lr"] * coefficient * u


LAMB = {
    "lr": 0.001,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "eps_inside_sqrt": False,
    "weight_decay": 0.0,
}
LAMB |= {"bias_correction": True, "max_coeff": 10.0, "min_coeff": 0.01}


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"lr": 0.1, "betas": [0.8, 0.95], "weight_decay": 0.3, "eps": 1e-3},
        {"lr": 0.1, "eps_inside_sqrt": True, "eps": 1e-3},
        {"lr": 0.1, "bias_correction": False},
        {"lr": 0.1, "max_coeff": 0.5, "min_coeff": 0.4},
        {"lr": 0.1, "max_coeff": 50, "min_coeff": 5},
    ],
)
def test_lamb(params: dict[str, Any]) -> None:
    _assert_same("Lamb", params, _lamb, LAMB)


def _sgd(
    o: dict[str, Any], p: np.ndarray, g: np.ndarray, memory: dict[str, Any], step: int
) -> np.ndarray:
    del step
    g = (-g if o["maximize"] else g) + o["weight_decay"] * p
    if o["momentum"]:
        memory["b"] = o["momentum"] * memory["b"] + (1 - o["dampening"]) * g if "b" in memory else g
        g = g + o["momentum"] * memory["b"] if o["nesterov"] else memory["b"]
    return p - o["lr"] * g


SGD = {
    "lr": 0.001,
    "momentum": 0,
    "dampening": 0,
    "weight_decay": 0,
    "nesterov": False,
    "maximize": False,
}


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"lr": 0.1, "weight_decay": 0.3, "maximize": True},
        {"lr": 0.1, "momentum": 0.9},
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.3, "dampening": 0.5},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.3},
        {"lr": 0.1, "dampening": 0.5},
    ],
)
def test_sgd(params: dict[str, Any]) -> None:
    _assert_same("SGD", params, _sgd, SGD)


def _adagrad(
    o: dict[str, Any], p: np.ndarray, g: np.ndarray, memory: dict[str, Any], step: int
) -> np.ndarray:
    g = (-g if o["maximize"] else g) + o["weight_decay"] * p
    memory["s"] = memory.get("s", o["initial_accumulator_value"]) + g * g
    return p - o["lr"] / (1 + (step - 1) * o["lr_decay"]) * g / (np.sqrt(memory["s"]) + o["eps"])


ADAGRAD = {
    "lr": 0.01,
    "lr_decay": 0,
    "weight_decay": 0,
    "initial_accumulator_value": 0,
    "eps": 1e-10,
}
ADAGRAD |= {"maximize": False}


@pytest.mark.parametrize(
    "params",
    [
        {},
        {
            "lr": 0.1,
            "lr_decay": 0.2,
            "weight_decay": 0.3,
            "initial_accumulator_value": 0.5,
            "eps": 0.1,
        },
        {"lr": 0.1, "maximize": True},
    ],
)
def test_adagrad(params: dict[str, Any]) -> None:
    _assert_same("Adagrad", params, _adagrad, ADAGRAD)


def _lion(
    o: dict[str, Any], p: np.ndarray, g: np.ndarray, memory: dict[str, Any], step: int
) -> np.ndarray:
    del step
    b1, b2 = o["betas"]
    m = memory.get("m", 0)
    memory["m"] = b2 * m + (1 - b2) * g
    return p * (1 - o["lr"] * o["weight_decay"]) - o["lr"] * np.sign(b1 * m + (1 - b1) * g)


@pytest.mark.parametrize("params", [{}, {"lr": 0.1, "betas": [0.7, 0.8], "weight_decay": 0.3}])
def test_lion(params: dict[str, Any]) -> None:
    _assert_same("Lion", params, _lion, {"lr": 0.001, "betas": (0.9, 0.999), "weight_decay": 0.0})


def test_lion_leaves_parameters_without_gradient_alone() -> None:
    optimizer, params = make_optimizer("Lion", {"lr": 0.1}), {"w": jnp.ones(2)}
    updates, _ = optimizer.update({"w": jnp.zeros(2)}, optimizer.init(params), params)
    assert updates["w"].tolist() == [0, 0]


def _muon(
    o: dict[str, Any], p: np.ndarray, g: np.ndarray, memory: dict[str, Any], step: int
) -> np.ndarray:
    del step
    memory["m"] = o["momentum"] * memory.get("m", 0) + (1 - o["momentum"]) * g
    x = (o["momentum"] * memory["m"] + (1 - o["momentum"]) * g).T
    rows, cols = x.shape
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    x = x * max(1, rows / cols) ** 0.5
    return p * (1 - o["lr"] * o["weight_decay"]) - o["lr"] * x.T


def _muon_or_adam(
    o: dict[str, Any], p: np.ndarray, g: np.ndarray, memory: dict[str, Any], step: int
) -> np.ndarray:
    return (_muon if o["is_matrix"] else _adam)(o, p, g, memory, step)


MUON = {
    "momentum": 0.95,
    "betas": (0.9, 0.95),
    "eps": 1e-10,
    "weight_decay": 0.0,
    "adam_w_mode": True,
}
MUON |= {"bias_correction": True, "amsgrad": False}


@pytest.mark.parametrize(
    ("params", "rates"),
    [
        ({}, (0.02, 3e-4)),
        (
            {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.3, "betas": [0.8, 0.9], "eps": 1e-3},
            (0.1, 0.1),
        ),
        ({"lr": 0.1, "muon_lr": 0.2, "ns_method": "standard"}, (0.2, 0.1)),
        ({"lr": 0.1, "adam_lr": 0.2, "adam_w_mode": False, "weight_decay": 0.3}, (0.1, 0.2)),
    ],
)
def test_muon(params: dict[str, Any], rates: tuple[float, float]) -> None:
    def options(name: str, step: int) -> dict[str, Any]:
        del step
        matrix = name in ("kernel", "wide")
        return {**MUON, **params, "lr": rates[0 if matrix else 1], "is_matrix": matrix}

    optimizer = make_optimizer(
        "Muon", params, matrices=lambda tree: {name: name in ("kernel", "wide") for name in tree}
    )
    _assert_traces(_apply(optimizer), _simulate(_muon_or_adam, options))


CYCLE = OneCycle(0.01, 0.1, cycle_first_step_size=2, cycle_min_mom=0.5, cycle_max_mom=0.7)


def _cycled(step: int) -> tuple[float, float]:
    return float(CYCLE(step - 1)), float(CYCLE.momentum(step - 1))


@pytest.mark.parametrize(
    ("name", "rule", "defaults"),
    [("Adam", _adam, ADAM), ("Lamb", _lamb, LAMB), ("Lion", _lion, {"weight_decay": 0.0})],
)
@pytest.mark.parametrize("b2", [None, 0.95])
def test_one_cycle_moves_rate_and_momentum(
    name: str, rule: Rule, defaults: dict[str, Any], b2: float | None
) -> None:
    def options(_: str, step: int) -> dict[str, Any]:
        rate, momentum = _cycled(step)
        return {**defaults, "lr": rate, "betas": (momentum, 0.99 if b2 is None else b2)}

    params = {} if b2 is None else {"betas": [0.3, b2]}
    _assert_traces(_apply(make_optimizer(name, params, CYCLE)), _simulate(rule, options))


def test_one_cycle_moves_sgds_momentum_if_it_has_one() -> None:
    def options(momentum: bool) -> Callable[[str, int], dict[str, Any]]:
        return lambda _, step: {
            **SGD,
            "lr": _cycled(step)[0],
            "momentum": _cycled(step)[1] if momentum else 0,
        }

    _assert_traces(
        _apply(make_optimizer("SGD", {"momentum": 0.9}, CYCLE)), _simulate(_sgd, options(True))
    )
    _assert_traces(_apply(make_optimizer("SGD", {}, CYCLE)), _simulate(_sgd, options(False)))


def test_one_cycle_moves_only_the_rate_of_adagrad() -> None:
    wanted = _simulate(_adagrad, lambda _, step: {**ADAGRAD, "lr": _cycled(step)[0]})
    _assert_traces(_apply(make_optimizer("Adagrad", {}, CYCLE)), wanted)


@pytest.mark.parametrize("name", ["Adam", "Adagrad", "Lamb"])
def test_a_complex_gradient_counts_by_its_absolute_value(name: str) -> None:
    optimizer, turn = make_optimizer(name, {"lr": 0.1}), np.exp(0.7j).astype(np.complex64)
    params, grads = jnp.ones(2, jnp.complex64), jnp.asarray([1 + 2j, -3j], jnp.complex64)

    def steps(factor: Any) -> np.ndarray:
        values = {"w": params * factor}
        state = optimizer.init(values)
        for scale in (1.0, 0.5):
            updates, state = optimizer.update({"w": grads * factor * scale}, state, values)
            values = optax.apply_updates(values, updates)
        return np.asarray(values["w"])

    np.testing.assert_allclose(steps(turn), turn * steps(np.complex64(1)), rtol=1e-5)
