from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _refusals import check_refused

from jaxpipe.data import MicrobatchStack, stack_microbatches
from jaxpipe.errors import DataError


def _entry(value: int, length: int = 3) -> tuple[Any, Any]:
    return {"ids": np.full((2, length), value, np.int32), "mask": np.full((2,), True)}, np.float32(
        value
    )


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
    stacked = stack_microbatches([[np.zeros(2), None, {"a": 1, "b": (1, 2)}]] * 3)
    assert isinstance(stacked, tuple)
    assert stacked[0].shape == (3, 2)
    assert stacked[1] is None
    np.testing.assert_array_equal(stacked[2]["b"][1], [2, 2, 2])
    assert stack_microbatches([(1, 2, None), (1, 2, {})])[2] == {}


def test_arrays_of_jax_keep_their_dtype() -> None:
    x, y = stack_microbatches([(jnp.ones((2,), jnp.bfloat16), jnp.ones(()))] * 2)
    assert x.dtype == jnp.bfloat16
    assert y.shape == (2,)


def _deleted() -> jax.Array:
    array = jnp.ones((2, 3))
    array.delete()
    return array


class _Unreadable:
    """As a tensor of another library that cannot be an array of numpy."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise RuntimeError("requires grad\nsecond line")


def _traced() -> jax.Array:
    found: list[jax.Array] = []
    jax.make_jaxpr(found.append)(np.zeros(2, np.float32))
    return found[0]


ENTRIES: list[tuple[Any, str]] = [
    ([], r"at least one microbatch, but got entries=\[\]\. Give one entry per microbatch"),
    *(
        ([(1, 2), entry], rf"\(inputs, labels, side\), .* entry 1 = {what}\. .*set_batch_fn")
        for entry, what in (
            (np.zeros(2), "a ndarray"),
            ({"x": 1, "y": 2}, "a dict"),
            ((1,), "a tuple of 1"),
            ([1, 2, 3, 4], "a list of 4"),
            (None, "a NoneType"),
        )
    ),
    (
        [(1, 2), (1, 2, {"a": 3})],
        r"got 2 in entry 0 and 3 in entry 1\. Yield the side inputs always or never",
    ),
    (
        [_entry(0), _entry(1), _entry(2, length=4)],
        r"inputs\['ids'\] must have the same shape .* shape=\(2, 4\) in entry 2 and "
        r"shape=\(2, 3\) in entry 0\. Pad",
    ),
    (
        [(1, np.int32(2)), (1, 2.0)],
        "labels must have the same dtype .*=float64 in entry 1 and dtype=int32 .*convert it",
    ),
    *(
        (
            [(first, 0), (second, 0)],
            rf"inputs must have the same structure .* got {problem}\. Give it the structure",
        )
        for first, second, problem in (
            ({"a": 1, "b": 2}, {"a": 1}, r"no inputs\['b'\] in entry 1"),
            ({"a": 1}, {"a": 1, "b": 2}, r"an additional inputs\['b'\] in entry 1"),
            ((1, None), (1, 2), r"an additional inputs\[1\] in entry 1"),
            (1, {"a": 1}, r"inputs\['a'\] in place of inputs in entry 1"),
            ([1, 2], (1, 2), r"PyTreeDef\(\(\*, \*\)\) in entry 1 and .*\(\[\*, \*\]\) in entry 0"),
        )
    ),
    *(
        (
            [(1, 2, {"name": 0}), (1, 2, {"name": leaf})],
            rf"array of numbers, but got side\['name'\] in entry 1 = {words}",
        )
        for leaf, words in (
            ("text", r"'text', of dtype <U4\. Encode it as numbers"),
            (b"bytes", r"b'bytes', of dtype .*\. Encode it as numbers"),
            (object(), r"<object .*of dtype object\. Encode it"),
            ({1, 2}, r"\{1, 2\}, of dtype object\. Encode it"),
            (10**30, r"10+, of dtype object\. Encode it"),
            (np.array([1, None]), r"array\(\[1, None\], dtype=object\), of dtype object\. Encode"),
            (np.array([[None] * 99] * 9), r"array\(.*\.\.\., of dtype object\. Encode it"),
            (np.array(["2020"], "M8[D]"), r".*of dtype datetime64\[D\]\. Encode it"),
            (np.zeros(2, [("a", "f4")]), r".*of dtype \[\('a', '<f4'\)\]\. Encode it"),
            (np.zeros(2, "V8"), r".*of dtype \|V8\. Encode it"),
            (np.zeros(2, np.longdouble), r"an array of float128\. Convert it to float32"),
            (
                np.ma.masked_array(np.zeros((2, 3)), True),
                r"a masked array of float64\[2, 3\]\. Fill it, and pass its mask",
            ),
            (jax.random.key(0), r"PRNG keys, key<fry>\[\]\. Pass jax\.random\.key_data\(keys\)"),
            (jax.random.split(jax.random.key(0)), r"PRNG keys, key<fry>\[2\]\. Pass jax\.random"),
            (_deleted(), r"an array .* deleted or donated, float32\[2, 3\]\. Keep a copy"),
            (jax.ShapeDtypeStruct((2,), "f4"), r"the shape float32\[2\] without values\. Give an"),
            (_traced(), r"float32\[2\] inside jax\.jit or .* use jaxpipe\.make_pipeline, whose"),
            (_Unreadable(), r"a _U.* numpy cannot read \(RuntimeError: requires grad\)\. Convert"),
        )
    ),
    *(
        (
            [(1, leaf)],
            rf"labels in entry 0 with values {values}\. Use smaller numbers, or jax\.config",
        )
        for leaf, values in (
            (np.array([1, 10**12]), "from 1 to 1000000000000"),
            (-(10**10), "from -10000000000 to -10000000000"),
            (np.array([2**32], np.uint64), "from 4294967296 to 4294967296"),
        )
    ),
    *(
        (
            [(1, 2, {}), (1, 2, side)],
            rf"must be a dictionary, .*got side = {what} in entry 1\. Yield \(inputs, l",
        )
        for side, what in (
            (np.zeros((2, 3)), "a ndarray"),
            ([np.zeros(2)], "a list"),
            ((1, 2), "a tuple"),
            (0, "a int"),
            ({0: 1}, r"the keys \[0\]"),
        )
    ),
]


def test_refused() -> None:
    table = [(words, partial(stack_microbatches, entries)) for entries, words in ENTRIES]
    check_refused(DataError, table)


def test_the_largest_integer_of_a_device_is_taken() -> None:
    assert stack_microbatches([(1, np.array([2**31 - 1]))])[1].dtype == np.int64


def test_an_array_that_is_filled_anew_for_each_microbatch() -> None:
    def entries() -> Any:
        held = np.zeros((2, 3), np.float32)
        for index in range(3):
            held[:] = index
            yield held, {"labels": held[0]}

    stack = MicrobatchStack(3)
    for entry in entries():
        stack.add(entry)
    inputs, labels, side = stack.batch()
    np.testing.assert_array_equal(inputs[:, 0, 0], [0, 1, 2])
    np.testing.assert_array_equal(labels["labels"][:, 0], [0, 1, 2])
    assert side == {}


class _Tensor:
    """As a tensor of another library on the processor."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.arange(3, dtype=np.float16)


def test_leaves_that_are_taken() -> None:
    for leaf, wanted in [
        (np.float32(2), np.float32(2)),
        (True, np.bool_(True)),
        (np.arange(3, dtype=">i4"), np.arange(3, dtype=np.int32)),
        (np.arange(3, dtype=">f8"), np.arange(3, dtype=np.float64)),
        (np.asfortranarray(np.ones((2, 3))), np.ones((2, 3))),
        (np.arange(6)[::-2], np.array([5, 3, 1])),
        (np.broadcast_to(np.float32(1), (2, 3)), np.ones((2, 3), np.float32)),
        (jnp.arange(3, dtype=jnp.int8), np.arange(3, dtype=np.int8)),
        (np.ones(2, jnp.float8_e4m3fn), np.ones(2, jnp.float8_e4m3fn)),
        (np.zeros((0, 3), np.int64), np.zeros((0, 3), np.int64)),
        (_Tensor(), np.arange(3, dtype=np.float16)),
    ]:
        [stacked] = jax.tree.leaves(stack_microbatches([({"x": leaf}, None)] * 2)[0])
        np.testing.assert_array_equal(stacked, np.stack([wanted] * 2))
        assert stacked.dtype == wanted.dtype, leaf
        assert jnp.asarray(stacked).shape == (2, *wanted.shape), leaf
