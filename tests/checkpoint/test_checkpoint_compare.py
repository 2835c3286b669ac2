"""The differences between a checkpoint and a model, by layer."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.checkpoint._compare import compare
from jaxpipe.core.state import Leaf, Span


def leaves(**structs: Any) -> dict[str, Leaf]:
    """Leaves by key, `__` for the slash; each a shape, or a dtype and a shape."""
    found = {}
    for name, given_struct in structs.items():
        dtype, *shape = (
            given_struct if isinstance(given_struct[0], str) else ("float32", *given_struct)
        )
        whole = (1,) * len(shape)
        found[name.replace("__", "/")] = Leaf(
            tuple(shape), dtype, whole, ((Span("params/x", (0,), 0, 1),),)
        )
    return found


def everything(key: str) -> bool:
    return bool(key)


MODEL = leaves(
    params__layers__0_Dense__kernel=(4, 3),
    params__layers__0_Dense__bias=(3,),
    params__layers__1_Dense__kernel=(3, 1),
    params__layers__2_Norm__scale=(3,),
    params__tied__table__embedding=(11, 8),
    opt_state__inner_state__0__count=("int32", ()),
    opt_state__inner_state__0__mu__layers__0_Dense__kernel=(4, 3),
    opt_state__inner_state__0__mu__layers__0_Dense__bias=(3,),
    opt_state__inner_state__0__mu__tied__table__embedding=(11, 8),
    collections__2_Norm__batch_stats__mean=(3,),
    collections__2_Norm__batch_stats__var=(3,),
)


def without(*starts: str) -> dict[str, Leaf]:
    return {key: leaf for key, leaf in MODEL.items() if not key.startswith(starts)}


def test_a_model_fits_itself() -> None:
    found = compare(MODEL, MODEL, everything)
    assert found.is_exact
    assert found.fitting == tuple(MODEL)
    assert found.describe(MODEL, MODEL) == ""


@given(
    st.lists(st.sampled_from(sorted(MODEL)), unique=True),
    st.lists(st.sampled_from(sorted(MODEL)), unique=True),
)
def test_every_key_is_named_once(held_keys: list[str], wanted_keys: list[str]) -> None:
    held, wanted = ({key: MODEL[key] for key in keys} for keys in (held_keys, wanted_keys))
    found = compare(held, wanted, everything)
    assert sorted((*found.fitting, *found.missing)) == sorted(wanted)
    assert sorted((*found.fitting, *found.unexpected)) == sorted(held)
    assert found.is_exact == (set(held) == set(wanted))
    assert bool(found.describe(held, wanted)) != found.is_exact


@pytest.mark.parametrize(
    ("lost", "text"),
    [
        (("params/layers/1_Dense",), "missing: layers/1_Dense"),
        (("params/layers/0_Dense/bias",), "missing: layers/0_Dense/bias"),
        (
            ("opt_state/inner_state/0/mu/layers/0_Dense",),
            "missing: inner_state/0/mu/layers/0_Dense",
        ),
        (("params/tied",), "missing: tied/table"),
        (("params/tied", "params/layers/1"), "missing: layers/1_Dense, tied/table"),
        (("collections/2_Norm/batch_stats/mean",), "missing: 2_Norm/batch_stats/mean"),
        (("collections",), "missing: layers/2_Norm"),
        (("params/layers/2_Norm",), "missing: layers/2_Norm"),
        (("params/layers/2_Norm", "collections"), "missing: layers/2_Norm"),
        (("opt_state/inner_state/0/count",), "missing: inner_state/0/count"),
        (
            ("opt_state/inner_state/0/mu/layers/0_Dense/bias",),
            "missing: inner_state/0/mu/layers/0_Dense/bias",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_missing_and_unexpected_layers_by_name(lost: tuple[str, ...], text: str) -> None:
    rest = without(*lost)
    found = compare(rest, MODEL, everything)
    assert found.missing == tuple(key for key in MODEL if key.startswith(lost))
    assert (found.unexpected, dict(found.misshapen)) == ((), {})
    assert found.describe(rest, MODEL) == text
    other = compare(MODEL, rest, everything)
    assert other.unexpected == found.missing
    assert other.describe(MODEL, rest) == text.replace("missing", "unexpected")


def test_other_shapes_with_both() -> None:
    held = MODEL | leaves(
        params__layers__0_Dense__kernel=(5, 3), params__layers__0_Dense__bias=("int8", 3)
    )
    found = compare(held, MODEL, everything)
    assert found.describe(held, MODEL) == (
        "of another shape: layers/0_Dense/kernel (float32[5, 3], not float32[4, 3]), "
        "layers/0_Dense/bias (int8[3], not float32[3])"
    )
    assert found.fitting == tuple(MODEL)[2:]


def test_all_kinds_of_difference_in_one_line() -> None:
    held = without("params/layers/1") | leaves(
        params__layers__0_Dense__bias=(2,), params__layers__3_New__kernel=(1,)
    )
    found = compare(held, MODEL, everything)
    assert found.describe(held, MODEL) == (
        "missing: layers/1_Dense; unexpected: layers/3_New; "
        "of another shape: layers/0_Dense/bias (float32[2], not float32[3])"
    )


@pytest.mark.parametrize(
    ("held", "wanted", "fits"),
    [
        ("float32", "bfloat16", True),
        ("float16", "float32", True),
        ("float32", "int32", False),
        ("int32", "int64", False),
        ("uint32", "uint32", True),
        ("bool", "float32", False),
        ("complex64", "float32", False),
        ("float8_e4m3fn", "float32", True),
    ],
)
def test_only_floats_are_converted(held: str, wanted: str, fits: bool) -> None:
    found = compare(leaves(params__a=(held, 2)), leaves(params__a=(wanted, 2)), everything)
    assert found.is_exact == fits
    assert ("params/a" in found.misshapen) != fits


def test_only_what_is_chosen_counts() -> None:
    held = without("opt_state", "collections")
    found = compare(held, MODEL, lambda key: key.startswith("params/"))
    assert found.is_exact
    assert found.fitting == tuple(held)


def test_long_lists_are_cut() -> None:
    many = {
        f"params/layers/{i}_Dense/kernel": MODEL["params/layers/0_Dense/bias"] for i in range(15)
    }
    found = compare({}, many, everything)
    text = found.describe({}, many)
    assert text.startswith("missing: layers/0_Dense, layers/1_Dense, ")
    assert text.endswith("layers/11_Dense, and 3 more")
    assert found.missing == tuple(many)
