from collections.abc import Sequence

import numpy as np
import pytest

from jaxpipe.errors import PartitionError
from jaxpipe.partition import needs_shapes, partition_layers, profile_source

NAMES = ["Embed", "Block", "Block", "Block", "Block", "Head"]
PARAMS = [1024, 100, 100, 100, 100, 1024]
LISTING = r"(?s)0: Embed \(1,024 parameters\).*1: Block \(100 parameters\).*5: Head"


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


@pytest.mark.parametrize(
    "method", ["uniform", "parameters", "type:block", "trunk", [0, 1, 2, 3, 4, 5, 6, 7]]
)
def test_more_stages_than_layers_shows_the_layers(method: str | list[int]) -> None:
    with pytest.raises(
        PartitionError, match=r"layers \(6\).*num_stages=7.*at most 6 stages"
    ) as error:
        _cut(method, 7)
    assert "\n  0: Embed (1,024 parameters)\n  1: Block (100 parameters)" in str(error.value)


def test_layer_lists_without_parameters_and_of_many_layers() -> None:
    with pytest.raises(
        PartitionError, match=r"0: A\n(?s:.*) 29: A\n  \.\.\. 40 more layers \.\.\.\n  70: A\n"
    ):
        _cut("zzz", 2, ["A"] * 100, None, None)


@pytest.mark.parametrize("method", ["type:zzz", "type:"])
def test_a_regex_that_matches_nothing(method: str) -> None:
    with pytest.raises(
        PartitionError,
        match=r"at least one layer, but got '(zzz)?'. The classes are Embed, Block, Head",
    ):
        _cut(method, 2)
    with pytest.raises(PartitionError, match=LISTING):
        _cut(method, 2)


@pytest.mark.parametrize("pattern", ["(?:a", "(" * 5000, "a{99999999999}"])
def test_an_invalid_regex(pattern: str) -> None:
    match = r"valid regular expression, but got '(\(\?:a|\(\(|a\{).*Correct the expression"
    with pytest.raises(PartitionError, match=match) as caught:
        _cut(f"type:{pattern}", 2)
    assert len(str(caught.value)) < 1000


def test_many_boundaries_are_cut_short() -> None:
    with pytest.raises(
        PartitionError, match=r"3 boundaries, but got.*=\[0, 1, .*\.\.\.\. Use"
    ) as caught:
        _cut(range(100_000), 2)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("method", "hint"),
    [
        ("paramters", "Did you mean 'parameters'"),
        ("uniformly", "Did you mean 'uniform'"),
        ("type", "Did you mean 'type:REGEX'"),
        ("types:block", "Did you mean 'type:REGEX'"),
        ("profil", "Did you mean 'profile'"),
        ("bset", "Did you mean 'best'"),
        ("", "Use one of these"),
    ],
)
def test_an_unknown_method_names_the_nearest(method: str, hint: str) -> None:
    match = (
        rf"'trunk', or boundaries such as \[0, 3, 6\], but got partition_method={method!r}. {hint}"
    )
    with pytest.raises(PartitionError, match=match):
        _cut(method, 2)
    with pytest.raises(PartitionError, match=LISTING):
        _cut(method, 2)


@pytest.mark.parametrize("method", ["profile", "PROFILE", "profile:flops"])
def test_profile_needs_costs(method: str) -> None:
    with pytest.raises(
        PartitionError,
        match=rf"{method!r} must be given the costs of the layers, but got profile=None",
    ):
        _cut(method, 2)


@pytest.mark.parametrize("method", ["profile:", "profile:time", "Profile:flops:"])
def test_profile_takes_times_or_counts(method: str) -> None:
    with pytest.raises(
        PartitionError,
        match=rf"must be 'profile' or 'profile:flops', but got partition_method={method!r}",
    ):
        _cut(method, 2)


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


@pytest.mark.parametrize(
    ("boundaries", "match"),
    [
        (
            [0, 6],
            r"num_stages \+ 1 = 4 boundaries, but got partition_method=\[0, 6\]. Use for instance "
            r"\[0, 2, 4, 6\]",
        ),
        (
            [1, 2, 3, 6],
            r"begin with 0 and end with the number of layers \(6\), but got partition_method=\[1, "
            r"2, 3, 6\]",
        ),
        (
            [0, 2, 3, 7],
            r"end with the number of layers \(6\), but got partition_method=\[0, 2, 3, 7\]",
        ),
        ([0, 2, 2, 6], r"increase from boundary to boundary.*partition_method=\[0, 2, 2, 6\]"),
        ([0, 4, 2, 6], r"increase from boundary to boundary.*partition_method=\[0, 4, 2, 6\]"),
        (
            [False, 1, 2, 6],
            r"sequence of integers, but got partition_method=\[False, 1, 2, 6\]. Use for instance",
        ),
        ([0, 1.0, 2, 6], r"sequence of integers, but got partition_method=\[0, 1.0, 2, 6\]"),
        ([], r"sequence of integers, but got partition_method=\[\]"),
        (None, r"sequence of integers, but got partition_method=None"),
        (3, r"sequence of integers, but got partition_method=3"),
    ],
)
def test_boundaries_that_do_not_fit(boundaries: list[int], match: str) -> None:
    with pytest.raises(PartitionError, match=match):
        _cut(boundaries, 3)


@pytest.mark.parametrize(
    ("num_stages", "match"),
    [
        (
            3,
            r"4 repeated layers \(Block\).*num_stages=3. Use 2 or 4 stages, or repeat the layer 3 "
            r"or 6 times",
        ),
        (
            5,
            r"4 repeated layers \(Block\).*num_stages=5. Use 4 stages, or repeat the layer 5 times",
        ),
    ],
)
def test_a_trunk_that_does_not_divide(num_stages: int, match: str) -> None:
    with pytest.raises(PartitionError, match=match):
        _cut("trunk", num_stages)


def test_a_trunk_without_repeated_layers() -> None:
    for signatures in ([0, 1, 2, 3, 4, 5], range(6)):
        with pytest.raises(
            PartitionError, match=r"no two layers that are alike. Use partition_method='parameters'"
        ):
            _cut("trunk", 2, signatures=signatures)


def test_a_trunk_with_two_candidates() -> None:
    with pytest.raises(
        PartitionError, match=r"one most repeated layer, but got 2 x Embed and 2 x Block"
    ):
        _cut("trunk", 2, signatures=[0, 0, 1, 1, 2, 3])


def test_a_trunk_that_is_interrupted() -> None:
    with pytest.raises(
        PartitionError,
        match=r"one contiguous run, but got 4 x Block with other layers between them",
    ):
        _cut("trunk", 2, signatures=[1, 0, 0, 2, 0, 0])


@pytest.mark.parametrize(
    ("method", "name"), [("parameters", "num_params"), ("trunk", "signatures")]
)
def test_a_method_without_what_it_needs(method: str, name: str) -> None:
    with pytest.raises(
        PartitionError, match=rf"{method!r} must be given {name}, but got {name}=None"
    ):
        _cut(method, 2, num_params=None, signatures=None)


def test_lists_of_different_lengths() -> None:
    with pytest.raises(
        PartitionError, match=r"one entry per layer \(6\), but got len\(num_params\)=2"
    ):
        _cut("uniform", 2, num_params=[1, 2])
    with pytest.raises(
        PartitionError, match=r"one entry per layer \(6\), but got len\(signatures\)=1"
    ):
        _cut("uniform", 2, signatures=[1])
    with pytest.raises(
        PartitionError, match=r"one entry per layer \(1\), but got len\(class_names\)=2"
    ):
        partition_layers("uniform", num_stages=1, names=["A"], class_names=["A", "B"])


@pytest.mark.parametrize("num_stages", [0, -1, True, 2.0])
def test_num_stages_must_be_a_positive_integer(num_stages: int) -> None:
    with pytest.raises(
        PartitionError, match=rf"positive integer, but got num_stages={num_stages!r}"
    ):
        _cut("uniform", num_stages)


@pytest.mark.parametrize("count", [-3, True])
def test_parameter_counts_are_checked(count: int) -> None:
    with pytest.raises(PartitionError, match=rf"weights\[0\]={count}"):
        _cut("parameters", 2, num_params=[count, 1, 1, 1, 1, 1])


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


@pytest.mark.parametrize("method", ["uniform", "parameters", "trunk", [0, 6]])
def test_more_chunks_than_layers(method: str | Sequence[int]) -> None:
    match = (
        r"num_stages \* num_chunks must be at most the number of layers \(6\).*num_stages=4 and "
        r"num_chunks=2. Use fewer"
    )
    with pytest.raises(PartitionError, match=match):
        _chunks(method, 4, 8)


def test_parts_are_chunks_of_stages() -> None:
    with pytest.raises(
        PartitionError,
        match=r"a multiple of num_stages.*num_parts=3 and num_stages=2. Pass num_stages",
    ):
        _chunks("uniform", 2, 3)
    with pytest.raises(
        PartitionError, match="num_parts must be a positive integer, but got num_parts=0"
    ):
        _chunks("uniform", 2, 0)


def test_a_trunk_that_does_not_divide_into_chunks() -> None:
    match = (
        r"on every chunk, but got num_stages=3 and num_chunks=2. Use 4 chunks in all, or repeat "
        r"the layer 6 times"
    )
    with pytest.raises(PartitionError, match=match):
        _chunks("trunk", 3, 6)
