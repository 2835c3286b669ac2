"""What a user or a data iterator may keep in a checkpoint comes back as it was."""

import datetime
import enum
import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from _refusals import check_refused
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.checkpoint import decode_state
from jaxpipe.checkpoint._json import check_json, encode_state
from jaxpipe.errors import CheckpointError

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


def trees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=10,
    )


def stored(value: Any) -> Any:
    return json.loads(json.dumps(value))


def same(a: Any, b: Any) -> bool:
    """Equal, and of the same types throughout."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.slow
@given(trees(scalars))
def test_what_is_accepted_comes_back_as_it_was(value: Any) -> None:
    check_json(value, "client_state")
    assert same(stored(value), value)


@given(trees(scalars | st.binary()))
def test_a_state_of_a_data_iterator_comes_back_as_it_was(value: Any) -> None:
    assert same(decode_state(stored(encode_state(value, "state"))), value)


def test_numbers_that_json_does_not_know_come_back_too() -> None:
    value = {"loss": [math.inf, -math.inf, math.nan, -0.0, 5e-324, 2**80]}
    check_json(value, "client_state")
    assert repr(stored(value)) == repr(value)
    assert repr(decode_state(stored(encode_state(value, "state")))) == repr(value)


@given(
    st.sampled_from([np.int8, np.uint64, np.float16, np.float32, np.float64, np.bool_]),
    st.integers(0, 100),
)
def test_numbers_of_numpy_become_pythons_in_a_state(kind: Any, number: int) -> None:
    value = decode_state(stored(encode_state({"at": [kind(number)]}, "state")))
    assert same(value, {"at": [kind(number).item()]})


def test_mappings_of_a_state_become_dictionaries() -> None:
    value = MappingProxyType({"a": [1, [b"\x00\xff", None]], "b": MappingProxyType({})})
    assert same(
        decode_state(stored(encode_state(value, "state"))), {"a": [1, [b"\x00\xff", None]], "b": {}}
    )


@pytest.mark.parametrize(
    "value",
    [random.Random(3).getstate(), {0: "a", -1: {"b": ()}, "c": 2}, [((),), {"tuple": 1}]],
    ids=["random", "keys", "x"],
)
def test_tuples_and_integer_keys_of_a_state_come_back(value: Any) -> None:
    found = decode_state(stored(encode_state(value, "state")))
    assert repr(found) == repr(value)


ARRAYS = [
    np.arange(6, dtype=np.int16).reshape(2, 3),
    np.zeros((0, 2)),
    np.array(True),
    np.array(["ab", "c"]),
    np.array(1j),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}")
def test_arrays_of_a_state_come_back(array: np.ndarray) -> None:
    found = decode_state(stored(encode_state({"at": array.T}, "state")))["at"]
    assert (found.dtype, found.shape, found.tolist()) == (
        array.dtype,
        array.T.shape,
        array.T.tolist(),
    )
    assert found.flags.writeable


def test_tensors_of_a_state_come_back() -> None:
    torch = pytest.importorskip("torch")
    value = {
        "generator": torch.Generator().get_state(),
        "none": torch.zeros(0, 2),
        "one": torch.tensor(True),
    }
    found = decode_state(stored(encode_state(value, "state")))
    assert all(
        found[key].dtype == each.dtype and torch.equal(found[key], each)
        for key, each in value.items()
    )
    torch.Generator().set_state(found["generator"])
    for other in (torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, requires_grad=True)):
        with pytest.raises(
            CheckpointError, match=r"state\[0\] must be .*but got a Tensor\. Write value"
        ):
            encode_state([other], "state")


@pytest.mark.parametrize(
    "value", [{"base64": "abcd"}, {"base64": 3}, {"a": {"base64": b"x"}}], ids=str
)
def test_a_state_may_name_its_keys_as_it_likes(value: Any) -> None:
    assert same(decode_state(stored(encode_state(value, "state"))), value)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"inner": value} if depth % 2 else [value]
    return value


@pytest.mark.parametrize("depth", [99, 100])
@pytest.mark.parametrize("most", [10**4299, -(2**14284) + 1])
def test_the_deepest_and_longest_come_back(depth: int, most: int) -> None:
    check_json(nested(depth), "x")
    assert same(stored(nested(depth)), nested(depth))
    assert same(
        decode_state(stored(encode_state([nested(depth - 1), most], "state"))),
        [nested(depth - 1), most],
    )


class Rude:
    """Its `repr` raises."""

    def __repr__(self) -> str:
        raise RuntimeError("mine")


class Colour(enum.IntEnum):
    RED = 1


INNER: dict[str, Any] = {"a": [1, 2]}
INNER["a"].append(INNER)
PLAIN = "Store plain values to"
BOTH: list[tuple[str, Any]] = [
    *(
        (
            "must be nested at most 100 deep, as it is stored as JSON, but got one that",
            nested(depth),
        )
        for depth in (101, 102, 100_000)
    ),
    *(
        (r"^x.* must be a number of at most 4300 digits, .* of \d+ bits\. Write hex", value)
        for value in (10**4300, -(10**5000), {"a": [2**100_000]})
    ),
    (rf"^x\['a'\]\[2\]\['a'\].*nested deeper, or contains itself\. {PLAIN}", INNER),
]
KINDS: list[tuple[Any, str, str]] = [
    ((1, 2), "x", r"tuple\. Write list\(\.\.\.\)"),
    ({1, 2}, "x", r"set\. Write list\(\.\.\.\)"),
    (np.datetime64("2024-01-01"), "x", rf"date\. {PLAIN} rebuild it from"),
    (jnp.float32(1.5), "x", r"ArrayImpl\. Write value\.item\(\)"),
    (
        np.zeros(3),
        "x",
        r"ndarray\. Write value\.tolist\(\), or make it a coll.* of a layer if it is",
    ),
    (jnp.zeros(3), "x", r"ArrayImpl\. Write value\.tolist\(\), or make it a collection"),
    (b"bytes", "x", rf"bytes\. {PLAIN} rebuild it from"),
    (Colour.RED, "x", rf"Colour\. {PLAIN} rebuild it from"),
    (1j, "x", rf"complex\. {PLAIN} rebuild it from"),
    (Path("a"), "x", rf"PosixPath\. {PLAIN} rebuild it from"),
    (datetime.date(2024, 1, 1), "x", rf"date\. {PLAIN} rebuild it from"),
    (MappingProxyType({}), "x", rf"mappingproxy\. {PLAIN} rebuild it from"),
    (test_numbers_that_json_does_not_know_come_back_too, "x", rf"function\. {PLAIN}"),
    ([0, (1,)], "x[1]", "tuple"),
    ({"a": {"b c": [None, {1}]}}, "x['a']['b c'][1]", "set"),
]
STATES: list[tuple[Any, str, str]] = [
    ({1}, "x", "set"),
    ({"a": [0, np.array([{}])]}, "x['a'][1]", "ndarray"),
    ([np.datetime64("2024-01-01")], "x[0]", "date"),
    ((object(),), "x[0]", "object"),
]


def keys_of(key: Any) -> str:
    got, text = re.escape(repr(key)), re.escape(repr(str(key)))
    return rf"^keys of x\['at'\] must be strings, .* but got key={got}\. Write {text}"


REFUSED: list[tuple[Callable[..., Any], Any, str]] = [
    *((check, value, words) for check in (check_json, encode_state) for words, value in BOTH),
    *(
        (
            check_json,
            value,
            rf"^{re.escape(at)} must be a number, a string, .* JSON, but got a {kind}",
        )
        for value, at, kind in KINDS
    ),
    *(
        (encode_state, value, rf"^{re.escape(at)} must be .*, but got a {kind}\. (Write|Store) ")
        for value, at, kind in STATES
    ),
    *(
        (check_json, {"at": {"fine": 0, key: 1}}, keys_of(key))
        for key in (1, None, True, 2.5, ("a", 1), b"a")
    ),
    # As other strings they would be no keys of the iterator's.
    *(
        (encode_state, {"at": {"fine": 0, key: 1}}, keys_of(key).split(r"\. Write")[0])
        for key in (None, True, ("a", 1))
    ),
    (check_json, {Rude(): 1}, r"^keys of x must be strings, .* key=<Rude>\. Write <Rude>"),
]


def test_refused() -> None:
    for check, value, words in REFUSED:
        check_refused(CheckpointError, [(words, check)], value, "x")
