import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from _refusals import check_refused

from jaxpipe.errors import PartitionError
from jaxpipe.schedules.partition import needs_shapes, partition_layers, profile_source

NAMES = ["Embed", "Block", "Block", "Block", "Block", "Head"]
PARAMS = [1024, 100, 100, 100, 100, 1024]
LISTING = r"(?s:.*0: Embed \(1,024 parameters\)\n *1: Block \(100 parameters\).*5: Head)"


def _cut(
    method: str | Sequence[int],
    num_stages: int,
    names: Sequence[str] = NAMES,
    num_params: Sequence[int] | None = PARAMS,
    signatures: Sequence[int] | None = (0, 1, 1, 1, 1, 2),
) -> tuple[int, ...]:
    return partition_layers(
        method,
        num_stages=num_stages,
        names=names,
        class_names=names,
        num_params=num_params,
        signatures=signatures,
    )


def test_methods_that_need_shapes() -> None:
    assert all(needs_shapes(method) for method in ("best", "parameters", "Parameters", "trunk"))
    assert not any(
        needs_shapes(method) for method in ("uniform", "type:parameters", "profile", "zzz", [0, 1])
    )


@pytest.mark.parametrize("method", ["uniform", "UNIFORM"])
def test_uniform(method: str) -> None:
    assert _cut(method, 4, num_params=None, signatures=None) == (0, 2, 4, 5, 6)


@pytest.mark.parametrize("method", ["parameters", "Parameters"])
def test_parameters(method: str) -> None:
    assert _cut(method, 3) == (0, 1, 5, 6)


@pytest.mark.parametrize("method", ["type:block", "TYPE:^B", "Type:(?:a|lo)c", "type:zzz|BLOCK"])
def test_type_balances_the_layers_that_match(method: str) -> None:
    assert _cut(method, 2) == (0, 3, 6)


def test_the_regex_keeps_its_case_and_its_colons() -> None:
    names = ["B", "A b", "A b", "B"]
    assert _cut(r"type:a\sb", 2, names, None, None) == (0, 2, 4)
    assert _cut(r"type:^\S$", 2, names, None, None) == (0, 2, 4)
    with pytest.raises(PartitionError, match=r"at least one layer, but got '\^\\\\S\{9\}\$'"):
        _cut(r"type:^\S{9}$", 2, names, None, None)
    assert _cut("type:N::B", 2, ["N::A", "N::B", "N::B"], None, None) == (0, 2, 3)


def test_more_stages_than_matching_layers_leaves_no_stage_empty() -> None:
    assert _cut("type:embed", 3) == (0, 2, 4, 6)


@pytest.mark.parametrize("boundaries", [[0, 1, 5, 6], (0, 1, 5, 6), np.array([0, 1, 5, 6])])
def test_explicit_boundaries(boundaries: Sequence[int]) -> None:
    assert _cut(boundaries, 3) == (0, 1, 5, 6)


@pytest.mark.parametrize(
    ("num_stages", "expected"), [(1, (0, 6)), (2, (0, 3, 6)), (4, (0, 2, 3, 4, 6))]
)
def test_trunk(num_stages: int, expected: tuple[int, ...]) -> None:
    assert _cut("trunk", num_stages) == expected


def test_trunk_without_layers_around_it() -> None:
    assert _cut("trunk", 3, ["A"] * 6, None, [7] * 6) == (0, 2, 4, 6)


def test_trunk_takes_the_most_numerous_layer() -> None:
    names = ["A", "A", "B", "B", "B", "C"]
    assert _cut("Trunk", 3, names, None, [1, 1, 2, 2, 2, None]) == (0, 3, 4, 6)


def test_where_costs_come_from() -> None:
    assert [
        profile_source(m) for m in ("Profile", "profile:Flops", "uniform", "profiles", [0, 1])
    ] == [
        "times",
        "counts",
        None,
        None,
        None,
    ]


def _chunks(method: str | Sequence[int], num_stages: int, num_parts: int | None) -> tuple[int, ...]:
    return partition_layers(
        method,
        num_stages=num_stages,
        num_parts=num_parts,
        names=NAMES,
        class_names=NAMES,
        num_params=PARAMS,
        signatures=(0, 1, 1, 1, 1, 2),
    )


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("uniform", (0, 2, 4, 5, 6)),
        ("parameters", (0, 1, 3, 5, 6)),
        ("type:block", (0, 2, 3, 4, 6)),
        ("trunk", (0, 2, 3, 4, 6)),
        ([0, 1, 2, 3, 6], (0, 1, 2, 3, 6)),
    ],
)
def test_stages_of_two_chunks(method: str | Sequence[int], expected: tuple[int, ...]) -> None:
    assert _chunks(method, 2, 4) == expected


def test_boundaries_alone_may_say_how_many_chunks_there_are() -> None:
    assert _chunks([0, 1, 2, 3, 6], 2, None) == (0, 1, 2, 3, 6)
    with pytest.raises(
        PartitionError, match=r"must be num_stages \+ 1 = 3 boundaries, but got .*\[0, 1, 2, 6\]"
    ):
        _chunks([0, 1, 2, 6], 2, None)
    with pytest.raises(
        PartitionError, match=r"must be num_stages \* num_chunks \+ 1 = 5 boundaries.*\[0, 3, 6\]"
    ):
        _chunks([0, 3, 6], 2, 4)
    with pytest.raises(
        PartitionError, match=r"must be num_stages \+ 1 = 3 boundaries.*\[0, 1, 2, 3, 6\]"
    ):
        _chunks([0, 1, 2, 3, 6], 2, 2)


REFUSED = [
    *(
        (rf"layers \(6\).*num_stages=7.*at most 6 stages{LISTING}", partial(_cut, method, 7))
        for method in ("uniform", "parameters", "type:block", "trunk", list(range(8)))
    ),
    (
        r"0: A\n(?s:.*) 29: A\n  \.\.\. 40 more layers \.\.\.\n  70: A\n",
        partial(_cut, "zzz", 2, ["A"] * 100, None, None),
    ),
    *(
        (
            rf"one layer, but got '{pattern}'. The classes are Embed, Block, Head{LISTING}",
            partial(_cut, f"type:{pattern}", 2),
        )
        for pattern in ("zzz", "")
    ),
    *(
        (
            rf"valid regular expression, but got '{re.escape(pattern[:9])}.*Correct the expression",
            partial(_cut, f"type:{pattern}", 2),
        )
        for pattern in ("(?:a", "(" * 5000, "a{99999999999}")
    ),
    (r"3 boundaries, but got.*=\[0, 1, .*\.\.\.\. Use", partial(_cut, range(100_000), 2)),
    *(
        (
            rf"'trunk', or boundaries such as \[0, 3, 6\], but got partition_method={method!r}\. "
            rf"{hint}{LISTING}",
            partial(_cut, method, 2),
        )
        for method, hint in {
            "paramters": "Did you mean 'parameters'",
            "uniformly": "Did you mean 'uniform'",
            "type": "Did you mean 'type:REGEX'",
            "types:block": "Did you mean 'type:REGEX'",
            "profil": "Did you mean 'profile'",
            "bset": "Did you mean 'best'",
            "": "Use one of these",
        }.items()
    ),
    *(
        (rf"{method!r} must be given the costs .* got profile=None", partial(_cut, method, 2))
        for method in ("profile", "PROFILE", "profile:flops")
    ),
    *(
        (rf"'profile' or 'profile:flops', .*partition_method={method!r}", partial(_cut, method, 2))
        for method in ("profile:", "profile:time", "Profile:flops:")
    ),
    *(
        (rf"{rule}.*, but got partition_method={re.escape(str(cut))}\. Use", partial(_cut, cut, 3))
        for cut, rule in (
            ([0, 6], r"num_stages \+ 1 = 4 boundaries"),
            ([1, 2, 3, 6], r"begin with 0 and end with the number of layers \(6\)"),
            ([0, 2, 3, 7], r"begin with 0 and end with the number of layers \(6\)"),
            ([0, 2, 2, 6], "increase from boundary to boundary"),
            ([0, 4, 2, 6], "increase from boundary to boundary"),
            ([False, 1, 2, 6], "sequence of integers"),
            ([0, 1.0, 2, 6], "sequence of integers"),
            ([], "sequence of integers"),
            (None, "sequence of integers"),
            (3, "sequence of integers"),
        )
    ),
    *(
        (
            rf"4 repeated layers \(Block\).*num_stages={stages}. {repair}",
            partial(_cut, "trunk", stages),
        )
        for stages, repair in (
            (3, "Use 2 or 4 stages, or repeat the layer 3 or 6 times"),
            (5, "Use 4 stages, or repeat the layer 5 times"),
        )
    ),
    *(
        (words, partial(_cut, "trunk", 2, signatures=signatures))
        for signatures, words in (
            (list(range(6)), "no two layers that are alike. Use partition_method='parameters'"),
            (range(6), "no two layers that are alike. Use partition_method='parameters'"),
            ([0, 0, 1, 1, 2, 3], "one most repeated layer, but got 2 x Embed and 2 x Block"),
            ([1, 0, 0, 2, 0, 0], "one contiguous run, but got 4 x Block with other layers between"),
        )
    ),
    *(
        (
            rf"{method!r} must be given {name}, but got {name}=None",
            partial(_cut, method, 2, **{"num_params": None, "signatures": None}),
        )
        for method, name in (("parameters", "num_params"), ("trunk", "signatures"))
    ),
    (r"layer \(6\), but got len\(num_params\)=2", partial(_cut, "uniform", 2, num_params=[1, 2])),
    (r"layer \(6\), but got len\(signatures\)=1", partial(_cut, "uniform", 2, signatures=[1])),
    (
        r"one entry per layer \(1\), but got len\(class_names\)=2",
        lambda: partition_layers("uniform", num_stages=1, names=["A"], class_names=["A", "B"]),
    ),
    *(
        (rf"positive integer, but got num_stages={count!r}", partial(_cut, "uniform", count))
        for count in (0, -1, True, 2.0)
    ),
    *(
        (rf"weights\[0\]={count}", partial(_cut, "parameters", 2, num_params=[count] * 6))
        for count in (-3, True)
    ),
    *(
        (
            r"num_stages \* num_chunks must be at most the number of layers \(6\).*num_stages=4 "
            r"and num_chunks=2. Use fewer",
            partial(_chunks, method, 4, 8),
        )
        for method in ("uniform", "parameters", "trunk", [0, 6])
    ),
    (
        r"a multiple of num_stages.*num_parts=3 and num_stages=2. Pass num_stages",
        partial(_chunks, "uniform", 2, 3),
    ),
    ("num_parts must be a positive integer, .* num_parts=0", partial(_chunks, "uniform", 2, 0)),
    (
        r"on every chunk, but got num_stages=3 and num_chunks=2. Use 4 chunks in all, or repeat "
        r"the layer 6 times",
        partial(_chunks, "trunk", 3, 6),
    ),
]


def test_refused() -> None:
    check_refused(PartitionError, REFUSED)


@pytest.mark.parametrize("method", ["type:" + "(" * 5000, range(100_000)], ids=["type", "range"])
def test_long_values_are_cut_short(method: Any) -> None:
    with pytest.raises(PartitionError) as caught:
        _cut(method, 2)
    assert len(str(caught.value)) < 1000
