import copy
import pickle

import numpy as np
import pytest

from jaxpipe.config import Params, load_config


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
