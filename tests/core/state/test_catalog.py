"""Leaves of a model in the rows of global arrays.

How one is read and written, and that none lies on another.
"""

import itertools
from collections.abc import Callable

import jax
import numpy as np
import optax
import pytest
from _oracle import Case
from _parallel import make_pipeline

from jaxpipe import Pipeline
from jaxpipe.core.state import Leaf, Span, read_leaf, state_arrays, write_leaf

# A whole leaf of five elements, from the third on in two rows of a buffer, padded by one; and a
# copy of it elsewhere.
CUT = Leaf((5,), "float32", (1,), ((Span("a", (0, 2), 2, 5),), (Span("b", (1,), 0, 5),)))
# Two slices along dim 1, such as two stages hold.
SLICED = Leaf((2, 4), "float32", (1, 2), ((Span("c", (0,), 0, 4), Span("c", (1,), 0, 4)),))


def test_shapes_of_slices() -> None:
    assert (CUT.slice_shape(), SLICED.slice_shape()) == ((5,), (2, 2))


def test_pieces_in_several_rows_are_written_into_every_copy_and_read_from_the_first() -> None:
    value = np.arange(1.0, 6.0)
    rows = {("a", 0): np.full(7, -1.0), ("a", 2): np.full(7, -1.0), ("b", 1): np.full(6, -1.0)}
    write_leaf(CUT, value, rows)
    assert rows["a", 0].tolist() == [-1, -1, 1, 2, 3, -1, -1]
    assert rows["a", 2].tolist() == [-1, -1, 4, 5, -1, -1, -1]
    assert rows["b", 1].tolist() == [1, 2, 3, 4, 5, -1]
    del rows["b", 1]
    np.testing.assert_array_equal(read_leaf(CUT, lambda array, row: rows[array, row]), value)


def test_rows_of_other_processes_are_left_out() -> None:
    rows = {("a", 2): np.zeros(7)}
    write_leaf(CUT, np.arange(1.0, 6.0), rows)
    assert rows["a", 2].tolist() == [0, 0, 4, 5, 0, 0, 0]


def test_slices_are_put_together_along_their_dim() -> None:
    value, rows = np.arange(8.0).reshape(2, 4), {("c", 0): np.zeros(4), ("c", 1): np.zeros(4)}
    write_leaf(SLICED, value, rows)
    assert [rows["c", row].tolist() for row in range(2)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    np.testing.assert_array_equal(read_leaf(SLICED, lambda array, row: rows[array, row]), value)


@pytest.mark.parametrize(
    "value", [np.zeros(4), np.zeros(6), np.zeros((2, 3))], ids=["short", "long", "matrix"]
)
def test_values_of_another_size_are_refused(value: np.ndarray) -> None:
    with pytest.raises(ValueError, match="reshape"):
        write_leaf(CUT, value, {("a", 0): np.zeros(7), ("a", 2): np.zeros(7)})


ZERO, ADAM = {"zero_stage": 1}, optax.adam(0.1)
CASES = [
    Case(model="tied", stages=2, data=2, optimizer=ADAM, settings=ZERO),
    Case(
        model="tied_many", stages=4, data=2, cut="uniform", optimizer=optax.lamb(0.1), settings=ZERO
    ),
    Case(model="split_last", stages=2, optimizer=ADAM),
]


def pipeline_of_blocks() -> Pipeline:
    """Each leaf is split over `model`, and each of its parts over replicas."""
    return make_pipeline("tied", 2, 2, 2, ADAM, **ZERO)


@pytest.mark.parametrize(
    "make", [*(pytest.param(case.pipeline, id=str(case)) for case in CASES), pipeline_of_blocks]
)
def test_leaves_share_no_element_and_their_copies_are_whole(make: Callable[[], Pipeline]) -> None:
    pipeline = make()
    arrays = state_arrays(pipeline.states.struct)
    seen = {
        name: np.zeros((like.shape[0], int(np.prod(like.shape[1:]))), bool)
        for name, like in arrays.items()
    }
    for key, leaf in pipeline.states.catalog.items():
        for copy in leaf.copies:
            counts = [len(span.rows) * (span.stop - span.start) for span in copy]
            assert all(count >= np.prod(leaf.slice_shape()) for count in counts), key
            for span in copy:
                assert 0 <= span.start <= span.stop <= seen[span.array].shape[1], key
                for row in span.rows:
                    assert not seen[span.array][row, span.start : span.stop].any(), key
                    seen[span.array][row, span.start : span.stop] = True


def test_a_moment_is_cut_as_its_parameter_is_and_a_count_lies_whole_in_every_row() -> None:
    catalog = CASES[0].pipeline().states.catalog
    moment, param = (
        catalog[f"{part}/layers/1_Block/Dense_0/kernel"] for part in ("opt_state/0/mu", "params")
    )
    assert [span.rows for copy in moment.copies for span in copy] == [
        span.rows for copy in param.copies for span in copy
    ]
    rows = [span.rows for copy in catalog["opt_state/0/count"].copies for span in copy]
    assert set(rows) == {(0,), (1,), (2,), (3,)}


def test_catalogs_have_the_same_leaves_however_a_model_is_cut() -> None:
    cases = [
        Case(model="tied", stages=s, data=2, optimizer=ADAM, settings=z)
        for s, z in itertools.product((1, 2), (ZERO, {}))
    ]
    found = [
        {key: (leaf.shape, leaf.dtype) for key, leaf in case.pipeline().states.catalog.items()}
        for case in cases
    ]
    assert all(one == found[0] for one in found)
    whole = cases[0].module().init(jax.random.key(0), cases[0].batch()[0][0])
    shapes = {
        f"params/{jax.tree_util.keystr(p, simple=True, separator='/')}": x.shape
        for p, x in jax.tree.leaves_with_path(whole)
    }
    assert {
        key: shape for key, (shape, _) in found[0].items() if key.startswith("params/")
    } == shapes
