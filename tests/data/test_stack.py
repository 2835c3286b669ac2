from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.data import stack_microbatches
from jaxpipe.errors import DataError


def _entry(value: int, length: int = 3) -> tuple[Any, Any]:
    return {"ids": np.full((2, length), value, np.int32), "mask": np.full((2,), True)}, np.float32(value)


@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 8])
def test_every_leaf_gets_a_leading_dim(num_microbatches: int) -> None:
    inputs, labels = stack_microbatches([_entry(index) for index in range(num_microbatches)])
    assert inputs["ids"].shape == (num_microbatches, 2, 3)
    assert inputs["mask"].shape == (num_microbatches, 2)
    assert inputs["ids"].dtype == np.int32
    assert inputs["mask"].dtype == np.bool_
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves((inputs, labels)))
    assert not any(leaf.flags.writeable for leaf in jax.tree.leaves((inputs, labels)))
    np.testing.assert_array_equal(labels, np.arange(num_microbatches, dtype=np.float32))


def test_side_inputs_lists_and_empty_labels() -> None:
    stacked = stack_microbatches([[np.zeros(2), None, (1, 2)]] * 3)
    assert isinstance(stacked, tuple)
    assert stacked[0].shape == (3, 2)
    assert stacked[1] is None
    np.testing.assert_array_equal(stacked[2][1], [2, 2, 2])


def test_arrays_of_jax_keep_their_dtype() -> None:
    x, y = stack_microbatches([(jnp.ones((2,), jnp.bfloat16), jnp.ones(()))] * 2)
    assert x.dtype == jnp.bfloat16
    assert y.shape == (2,)


def test_no_entries() -> None:
    with pytest.raises(
        DataError, match=r"at least one microbatch, but got entries=\[\]. Give one entry per microbatch"
    ):
        stack_microbatches([])


@pytest.mark.parametrize(
    ("entry", "what"),
    [
        (np.zeros(2), "a ndarray"),
        ({"x": 1, "y": 2}, "a dict"),
        ((1,), "a tuple of 1"),
        ([1, 2, 3, 4], "a list of 4"),
        (None, "a NoneType"),
    ],
)
def test_an_entry_that_is_no_pair(entry: Any, what: str) -> None:
    with pytest.raises(DataError, match=rf"\(inputs, labels, side\), but got entry 1 = {what}. .*set_batch_fn"):
        stack_microbatches([(1, 2), entry])


def test_side_inputs_only_sometimes() -> None:
    with pytest.raises(DataError, match=r"got 2 in entry 0 and 3 in entry 1. Yield the side inputs always or never"):
        stack_microbatches([(1, 2), (1, 2, 3)])


def test_shapes_that_differ() -> None:
    match = r"inputs\['ids'\] must have the same shape .* shape=\(2, 4\) in entry 2 and shape=\(2, 3\) in entry 0. Pad"
    with pytest.raises(DataError, match=match):
        stack_microbatches([_entry(0), _entry(1), _entry(2, length=4)])


def test_dtypes_that_differ() -> None:
    match = r"labels must have the same dtype .* dtype=float64 in entry 1 and dtype=int32 in entry 0. .*convert it"
    with pytest.raises(DataError, match=match):
        stack_microbatches([(1, np.int32(2)), (1, 2.0)])


@pytest.mark.parametrize(
    ("first", "second", "problem"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, r"no inputs\['b'\] in entry 1"),
        ({"a": 1}, {"a": 1, "b": 2}, r"an additional inputs\['b'\] in entry 1"),
        ((1, None), (1, 2), r"an additional inputs\[1\] in entry 1"),
        ([1, 2], (1, 2), r"PyTreeDef\(\(\*, \*\)\) in entry 1 and PyTreeDef\(\[\*, \*\]\) in entry 0"),
    ],
)
def test_structures_that_differ(first: Any, second: Any, problem: str) -> None:
    with pytest.raises(
        DataError, match=rf"inputs must have the same structure .* got {problem}. Give it the structure"
    ):
        stack_microbatches([(first, 0), (second, 0)])


@pytest.mark.parametrize("leaf", ["text", b"bytes", object()])
def test_leaves_that_are_no_numbers(leaf: Any) -> None:
    with pytest.raises(
        DataError, match=r"array of numbers, but got side\['name'\] of dtype .* in entry 0. Encode it as"
    ):
        stack_microbatches([(1, 2, {"name": leaf})])
