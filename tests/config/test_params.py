import copy
import pickle
from decimal import Decimal

import numpy as np
import pytest

from jaxpipe.config import Params, load_config
from jaxpipe.errors import ConfigError


def _read(params: object) -> Params:
    optimizer = load_config({"optimizer": {"type": "adam", "params": params}}).optimizer
    assert optimizer is not None
    return optimizer.params


def test_a_frozen_copy_of_any_json() -> None:
    given = {"lr": 1e-3, "betas": [0.9, [1]], "inner": {"a": None, "b": "x"}, "on": True}
    params = _read(given)
    given["betas"] = []
    assert params == {"lr": 1e-3, "betas": (0.9, (1,)), "inner": {"a": None, "b": "x"}, "on": True}
    assert len(params) == 4
    assert repr(params["inner"]) == "{'a': None, 'b': 'x'}"
    assert hash(params) == hash(_read({**params}))
    with pytest.raises(TypeError):
        params["lr"] = 2


def test_copies_and_pickles() -> None:
    params = _read({"betas": [0.9], "inner": {"a": 1}})
    assert copy.deepcopy(params) == params
    assert pickle.loads(pickle.dumps(params)) == params


def test_numbers_of_numpy_are_numbers() -> None:
    assert _read({"lr": np.float32(0.5)})["lr"] == 0.5


@pytest.mark.parametrize(
    ("params", "match"),
    [
        (3, r"^optimizer.params must be a JSON object, but got optimizer.params=3. Use an object such as"),
        ([1], r"^optimizer.params must be a JSON object, but got optimizer.params=\[1\]"),
        ({1: 2}, r"^A key of optimizer.params must be a string, but got key=1. Write it in quotes"),
        ({"a": {2: 1}}, r"^A key of optimizer.params.a must be a string, but got key=2"),
        (
            {"lr": len},
            r"^optimizer.params.lr must be a JSON value, but got .*built-in.*pass anything else to initialize",
        ),
        ({"a": [{"b": {1, 2}}]}, r"^optimizer.params.a\[0\].b must be a JSON value, but got .*=\{1, 2\}. Use a number"),
        ({"a": b"x"}, r"^optimizer.params.a must be a JSON value, but got .*=b'x'"),
        ({"a": Decimal("1.5")}, r"^optimizer.params.a must be a JSON value, but got .*Decimal"),
    ],
)
def test_what_is_no_json(params: object, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        _read(params)
