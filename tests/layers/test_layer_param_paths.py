import flax.linen as nn
from flax.core import freeze

from jaxpipe.layers import (
    ParamPaths,
    PipelineModule,
    TiedLayerSpec,
    flatten_dict,
    join_path,
    merge_layers,
    split_path,
    unflatten_dict,
)
from jaxpipe.layers._param_paths import layer_view

OWN = {"a": {"w": 1, "b": 2}, "c": 3}


def _named(*specs: object) -> tuple:
    return PipelineModule(specs, num_stages=1).layers


def test_flattening_and_back() -> None:
    flat = {("a", "w"): 1, ("a", "b"): 2, ("c",): 3}
    assert flatten_dict(OWN) == flat
    assert flatten_dict(freeze(OWN)) == flat
    assert unflatten_dict(flat) == OWN
    assert flatten_dict({}) == {}
    assert flatten_dict({"0": {1: 2}}) == {("0", "1"): 2}


def test_a_slash_in_a_name_stays_in_one_key() -> None:
    paths = [("a/b", "c"), ("a", "b", "c"), ("a%2Fb", "c"), ("%", "%25", "/")]
    keys = [join_path(path) for path in paths]
    assert keys == ["a%2Fb/c", "a/b/c", "a%252Fb/c", "%25/%2525/%2F"]
    assert [split_path(key) for key in keys] == paths


def test_paths_of_a_layer_lie_under_its_place_and_name() -> None:
    (named,) = _named(nn.Dense(3))
    assert ParamPaths(named, {"kernel": 0}, {}).paths == {
        ("kernel",): ("layers", "0_Dense", "kernel")
    }


def test_a_tied_layer_shares_everything_unless_told_what() -> None:
    whole, part, deep = _named(
        TiedLayerSpec("k", nn.Dense, 3),
        TiedLayerSpec("k", nn.Dense, 3, tied_weight_attr="a"),
        TiedLayerSpec("k", nn.Dense, 3, tied_weight_attr=["a.w", "c"]),
    )
    assert set(ParamPaths(whole, OWN, {}).paths.values()) == {
        ("tied", "k", *path) for path in flatten_dict(OWN)
    }
    assert ParamPaths(part, OWN, {}).paths == {
        ("a", "w"): ("tied", "k", "a", "w"),
        ("a", "b"): ("tied", "k", "a", "b"),
        ("c",): ("layers", "1_Dense", "c"),
    }
    assert ParamPaths(deep, OWN, {}).paths == {
        ("a", "w"): ("tied", "k", "a", "w"),
        ("a", "b"): ("layers", "2_Dense", "a", "b"),
        ("c",): ("tied", "k", "c"),
    }


def test_a_view_gathers_what_a_layer_owns_and_shares() -> None:
    named = _named(
        TiedLayerSpec("k", nn.Dense, 3, tied_weight_attr="a.w"),
        TiedLayerSpec("k", nn.Dense, 3),
        nn.Dense(3),
        lambda x: x,
    )
    other = {"a": {"w": 1}, "d": 4}
    tree = merge_layers(
        [
            ParamPaths(named[0], OWN, {}),
            ParamPaths(named[1], other, {}),
            ParamPaths(named[2], OWN, {}),
        ],
        [OWN, {"a": {"w": -1}, "d": 4}, OWN],
    )
    assert tree == {
        "tied": {"k": {"a": {"w": 1}, "d": 4}},
        "layers": {"0_Dense": {"a": {"b": 2}, "c": 3}, "2_Dense": OWN},
    }
    assert [layer_view(n, tree) for n in named] == [OWN, other, OWN, {}]
