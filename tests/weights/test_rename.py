"""Tables of names, in both directions and slice by slice."""

import itertools
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
from _refusals import check_refused

from jaxpipe.errors import CheckpointError
from jaxpipe.layers import flatten_dict, unflatten_dict
from jaxpipe.weights import (
    Rename,
    conv1d,
    interleave,
    linear,
    merge,
    rename,
    rename_back,
    split,
    stack,
    transpose,
)

RENAMES = (
    Rename(("wte.weight", "lm_head.weight"), "tied/io/embedding"),
    Rename("h.{i}.attn.bias", None),
    Rename(
        "h.{i}.attn.c_attn.weight",
        ("{i+1}/query/kernel", "{i+1}/key/kernel", "{i+1}/value/kernel"),
        split(-1, conv1d(num_out=2)),
    ),
    Rename("h.{i}.attn.o.weight", "{i+1}/out/kernel", linear(num_in=2)),
    Rename("h.{i}.attn.o.bias", "{i+1}/out/bias"),
    Rename("h.{i}.experts.{e}.up.weight", "{i+1}/experts/kernel", stack(transpose)),
    Rename(
        "h.{i}.experts.{e}.both.weight",
        ("{i+1}/experts/a", "{i+1}/experts/b"),
        stack(split(0, transpose)),
    ),
    Rename("ln_f.bias", "3/bias", merge((0, 1))),
)


def make_params() -> Any:
    rng = np.random.default_rng(0)
    block = {
        **{
            f"{name}/kernel": (6, heads, 4)
            for name, heads in (("query", 3), ("key", 2), ("value", 2))
        },
        **{"out/kernel": (3, 4, 6), "out/bias": (6,)},
        **{"experts/kernel": (2, 6, 5), "experts/a": (2, 6, 3), "experts/b": (2, 6, 2)},
    }
    shapes = {f"layers/{i}_Block/{name}": shape for i in (1, 2) for name, shape in block.items()}
    shapes |= {"tied/io/embedding": (11, 6), "layers/3_Norm/bias": (2, 3)}
    return unflatten_dict(
        {tuple(k.split("/")): rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}
    )


def test_there_and_back() -> None:
    params = make_params()
    theirs = rename_back(params, RENAMES)
    assert {name: value.shape for name, value in theirs.items() if not name.startswith("h.1")} == {
        "wte.weight": (11, 6),
        "h.0.attn.c_attn.weight": (6, 28),
        "h.0.attn.o.weight": (6, 12),
        "h.0.attn.o.bias": (6,),
        **{f"h.0.experts.{e}.up.weight": (5, 6) for e in (0, 1)},
        **{f"h.0.experts.{e}.both.weight": (5, 6) for e in (0, 1)},
        "ln_f.bias": (6,),
    }
    block = params["layers"]["2_Block"]
    joined = np.concatenate(
        [block[name]["kernel"].reshape(6, -1) for name in ("query", "key", "value")], 1
    )
    assert (theirs["h.1.attn.c_attn.weight"] == joined).all()
    assert (theirs["h.1.attn.o.weight"] == block["out"]["kernel"].reshape(12, 6).T).all()
    assert (theirs["h.1.experts.1.up.weight"] == block["experts"]["kernel"][1].T).all()
    # The other name of a tied weight, and a buffer that is no parameter.
    theirs = {**theirs, "lm_head.weight": theirs.pop("wte.weight"), "h.0.attn.bias": np.zeros(3)}
    back = flatten_dict(rename(theirs, RENAMES, params))
    assert all((back[path] == leaf).all() for path, leaf in flatten_dict(params).items())


@pytest.mark.parametrize(
    ("transform", "shapes"),
    [
        (merge((2, 0), (1,)), [(3, 4, 2)]),
        (linear(2, 2), [(2, 3, 2, 4)]),
        (split(1, linear(1, 2)), [(4, 2, 3), (2, 2, 3)]),
        (split(-1, conv1d(1, 2)), [(2, 2, 3), (2, 4, 3)]),
        (interleave(), [(2, 3), (2, 3)]),
        (stack(split(0, transpose)), [(3, 2, 2), (3, 2, 4)]),
    ],
)
def test_every_slice_is_that_of_the_whole(transform: Any, shapes: list[tuple[int, ...]]) -> None:
    leaves = [np.random.default_rng(i).normal(size=shape) for i, shape in enumerate(shapes)]
    theirs = [transform.write(number, leaves) for number in range(transform.count(shapes))]
    assert {each.shape for each in theirs} == {transform.their_shape(shapes)}
    for which, leaf in enumerate(leaves):
        ranges = [
            [slice(a, b) for a in range(size) for b in range(a + 1, size + 1)]
            for size in leaf.shape
        ]
        for at in itertools.product(*ranges):
            assert (transform.read(theirs, shapes, which, at) == leaf[at]).all(), at


def test_all_that_differs_is_named() -> None:
    params = make_params()
    theirs = rename_back(params, RENAMES)
    theirs["h.0.attn.o.biass"] = theirs.pop("h.0.attn.o.bias")
    theirs["ln_f.bias"] = np.zeros(5)
    with pytest.raises(CheckpointError) as error:
        rename(theirs, RENAMES, params)
    for text in (
        "missing: h.0.attn.o.bias (nearest: h.0.attn.o.biass) for 1/out/bias",
        "left over: h.0.attn.o.biass",
        "of another shape: ln_f.bias [5], not [6] as for 3/bias [2, 3]",
    ):
        assert text in str(error.value)


WRONG = [
    ("without an entry: 3/bias", Rename("x", "9/none")),
    (r"same counters, but got \{i\} in 'x\.\{i\}'", Rename("x.{i}", "3/bias", merge((0, 1)))),
    ("one counter for the 2 tensors", Rename("x.{e}.{f}", "3/bias", stack())),
    ("for leaves of 4 dims", Rename("x", "3/bias", linear(2, 2))),
    ("entries without a leaf: 3/scale", Rename("x", ("3/bias", "3/scale"), split())),
    ("wte.weight for several leaves", Rename("wte.weight", "3/bias")),
    ("'1/out/bias' in ", Rename("x", "1/out/bias")),
]


def test_tables_that_are_wrong() -> None:
    params = make_params()
    theirs = rename_back(params, RENAMES)
    for words, entry in WRONG:
        table = (*RENAMES[:-1], entry)
        check_refused(CheckpointError, [(words, rename)], theirs, table, params)


def test_thousands_of_other_names_are_told_at_once() -> None:
    like = {"layers": {f"{i}_Dense": {"kernel": np.zeros((1, 1))} for i in range(1500)}}
    table = [Rename("a.model.layers.{i}.weight", "{i}/kernel")]
    theirs = {f"b.model.layers.{i}.weights": np.zeros((1, 1)) for i in range(1500)}
    began = time.process_time()
    with pytest.raises(
        CheckpointError, match=r"missing: a\.model\.layers\.0\.weight \(nearest: .*and 1488 more"
    ):
        rename(theirs, table, like)
    with pytest.raises(
        CheckpointError, match=r"must name every leaf of the model, but got leaves.* and 1488 more"
    ):
        rename(theirs, [Rename("b.{i}.weight", "{i}/kernels")], like)
    assert time.process_time() - began < 20


def test_a_number_of_thousands_of_digits_is_no_counter() -> None:
    like = {"layers": {"0_Dense": {"kernel": np.zeros((1, 1))}}}
    theirs = {"0.weight": np.zeros((1, 1)), "1" * 5000 + ".mask": np.zeros(1)}
    with pytest.raises(CheckpointError, match="left over: 111"):
        rename(theirs, [Rename("{i}.weight", "{i}/kernel"), Rename("{i}.mask", None)], like)


@pytest.mark.parametrize(
    ("transform", "shape"),
    [
        (stack(), (2, 4, 3)),
        (stack(dim=1), (4, 2, 3)),
        (stack(transpose, 2), (3, 4, 2)),
        (stack(merge((0, 1))), (2, 12)),
    ],
)
def test_one_tensor_stacks_several_leaves(transform: stack, shape: tuple[int, ...]) -> None:
    leaves = [np.random.default_rng(i).normal(size=(4, 3)) for i in range(2)]
    params = {"layers": {f"{i}_Block": {"kernel": leaf} for i, leaf in enumerate(leaves)}}
    table = [Rename("blocks.kernel", ("0/kernel", "1/kernel"), transform)]
    theirs = rename_back(params, table)
    assert theirs["blocks.kernel"].shape == shape
    each = np.moveaxis(theirs["blocks.kernel"], transform.dim, 0)[1].reshape(-1)
    wanted = leaves[1].T if transform.each is transpose else leaves[1]
    np.testing.assert_array_equal(each, wanted.reshape(-1))
    again = rename(theirs, table, params)
    for i, leaf in enumerate(leaves):
        np.testing.assert_array_equal(again["layers"][f"{i}_Block"]["kernel"], leaf)
    beyond = [Rename("blocks.kernel", ("0/kernel", "1/kernel"), stack(dim=3))]
    with pytest.raises(CheckpointError, match=r"stack\(.*dim=3.*cannot stack leaves"):
        rename_back(params, beyond)


def test_counters_of_what_is_skipped() -> None:
    like = {"layers": {"0_Dense": {"kernel": np.zeros((1, 1))}}}

    def left_over(theirs: str, *names: str) -> str:
        tensors = {name: np.zeros(1) for name in names} | {"0.weight": np.zeros((1, 1))}
        try:
            rename(tensors, [Rename("{i}.weight", "{i}/kernel"), Rename(theirs, None)], like)
        except CheckpointError as error:
            return str(error).partition("left over: ")[2].partition(". Correct")[0]
        return ""

    assert left_over("{i}.mask", "0.mask", "9.mask", "12.mask") == ""
    # Without leading zeros, which would not be written back.
    assert left_over("{i}.mask", "0.mask", "00.mask", "01.mask", "x.mask") == (
        "00.mask, 01.mask, x.mask"
    )
    # One value for each counter, at least 0.
    assert left_over("{i}.{i}.mask", "1.1.mask", "1.2.mask") == "1.2.mask"
    assert left_over("{i}.{i+1}.mask", "1.2.mask", "1.1.mask") == "1.1.mask"
    assert left_over("{i+2}.mask", "2.mask", "1.mask") == "1.mask"
    assert left_over("a.*", "a.b", "a.", "ab.c", "a") == "ab.c, a"


def test_names_of_one_tensor_must_have_equal_values() -> None:
    like = {"tied": {"io": {"embedding": np.zeros((1, 2))}}}
    table = [Rename(("wte", "head"), "tied/io/embedding")]
    one, other = np.array([[np.nan, 1.0]]), np.array([[np.nan, 2.0]])
    found = rename({"wte": one, "head": one.copy()}, table, like)
    np.testing.assert_array_equal(found["tied"]["io"]["embedding"], one)
    with pytest.raises(CheckpointError, match=r"'wte' and 'head' that differ: in the model of the"):
        rename({"wte": one, "head": other}, table, like)
    whole = np.array([[1, 2]])  # NumPy cannot look for NaN in integers of every kind
    found = rename({"wte": whole, "head": whole.copy()}, table, like)
    np.testing.assert_array_equal(found["tied"]["io"]["embedding"], whole)


def test_tensors_of_a_stack_may_have_names() -> None:
    params = {"layers": {"0_Block": {"kernel": np.arange(6.0).reshape(2, 3)}}}
    table = [Rename("h.{part}.weight", "0/kernel", stack(names=("query", "key")))]
    theirs = rename_back(params, table)
    assert {name: value.tolist() for name, value in theirs.items()} == {
        "h.query.weight": [0, 1, 2],
        "h.key.weight": [3, 4, 5],
    }
    again = rename(theirs, table, params)
    np.testing.assert_array_equal(
        again["layers"]["0_Block"]["kernel"], params["layers"]["0_Block"]["kernel"]
    )
    three = [Rename("h.{part}.weight", "0/kernel", stack(names=("q", "k", "v")))]
    with pytest.raises(CheckpointError, match="names for 3 tensors, and the leaf holds 2. Correct"):
        rename_back(params, three)


def test_transforms_that_do_not_suit_their_leaves() -> None:
    params = {"layers": {"0_A": {"a": np.zeros((2, 3)), "b": np.zeros((3, 2))}}}

    def back(transform: Any) -> Any:
        return rename_back(params, [Rename("x", ("0/a", "0/b"), transform)])

    check_refused(
        CheckpointError,
        [
            (
                "several leaves must say how they are one tensor, .* transform=split",
                partial(back, None),
            ),
            (r"one shape, but got \[\(2, 3\), \(3, 2\)\]. Correct", partial(back, interleave())),
            (r"along one dim, but got \[\(2, 3\), \(3, 2\)\]", partial(back, split(0))),
            (
                "correct a counter",
                partial(rename_back, params, [Rename("x", "0/a"), Rename("x", "0/b")]),
            ),
            *(
                (r"each dim from 0 on once, but got merge\(", partial(merge, *dims))
                for dims in ([(1,)], [(0,), (0,)], [(0, 2)])
            ),
        ],
    )
    # Leaves of other shapes do suit where one is turned.
    turned = {"layers": {"0_A": {"a": np.zeros((2, 3)), "b": np.zeros((2, 5))}}}
    found = rename_back(turned, [Rename("x", ("0/a", "0/b"), split(0, transpose))])
    assert found["x"].shape == (8, 2)


def test_the_last_dim_may_be_the_one_that_leaves_are_stacked_along() -> None:
    params = {"layers": {f"{i}_A": {"a": np.full((2, 3), i)} for i in range(2)}}
    for dim, shape in ((2, (2, 3, 2)), (1, (2, 2, 3))):
        found = rename_back(params, [Rename("x", ("0/a", "1/a"), stack(dim=dim))])
        assert found["x"].shape == shape
        np.testing.assert_array_equal(found["x"].take(1, dim), np.ones((2, 3)))
