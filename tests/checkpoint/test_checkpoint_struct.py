"""Shapes and dtypes of a microbatch, written as JSON and read again."""

import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.checkpoint import load_struct
from jaxpipe.checkpoint._struct import dump_struct

ARRAY = np.zeros((2, 3), jnp.bfloat16)


class Point(NamedTuple):
    x: Any


def test_trees_of_plain_nodes_come_back() -> None:
    tree = ({"a": ARRAY, "b": [np.zeros((), np.int8), None]}, ())

    found = load_struct(json.loads(json.dumps(dump_struct(tree))))

    struct = jax.ShapeDtypeStruct
    expected = ({"a": struct((2, 3), jnp.bfloat16), "b": [struct((), jnp.int8), None]}, ())
    assert found == expected


@pytest.mark.parametrize("node", [{1: ARRAY}, {"a": ARRAY, 2: ARRAY}, {"a": Point(ARRAY)}, "text"])
def test_other_nodes_are_not_written(node: object) -> None:
    assert dump_struct(node) is None
    assert dump_struct((ARRAY, node)) is None
    assert dump_struct({"inner": node, "a": ARRAY}) is None


def test_as_many_dims_come_back_as_an_array_may_have() -> None:
    tree = np.zeros((1,) * 64, np.float32)
    dumped = dump_struct(tree)
    assert load_struct(dumped) == jax.ShapeDtypeStruct(tree.shape, tree.dtype)
    with pytest.raises(ValueError, match="maximum supported dimension"):
        tree.reshape((1,) * 65)
    with pytest.raises(ValueError, match="is not a shape"):
        load_struct({**dumped, "shape": [*dumped["shape"], 1]})
