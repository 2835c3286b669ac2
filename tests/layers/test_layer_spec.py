import functools
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxpipe
from jaxpipe.errors import LayerError
from jaxpipe.layers import LayerSpec, TiedLayerSpec


def test_a_spec_builds_its_class_with_its_arguments() -> None:
    spec = LayerSpec(nn.Dense, 4, use_bias=False)
    assert spec.build() == nn.Dense(4, use_bias=False)
    assert spec.build(name="other").name == "other"


def test_building_a_spec_may_be_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "jaxpipe"):
        assert LayerSpec(nn.Dense, 4).build(log=False) == nn.Dense(4)
        assert not caplog.messages
        assert LayerSpec(nn.Dense, 4).build(log=True) == nn.Dense(4)
    assert caplog.messages == ["building Dense(4)"]


def test_the_room_is_a_name_of_the_package() -> None:
    assert "layers" in jaxpipe.__all__
    assert jaxpipe.layers.LayerSpec is LayerSpec


def test_a_spec_prints_as_the_call() -> None:
    assert repr(LayerSpec(nn.Dense, 4, use_bias=False)) == "Dense(4, use_bias=False)"
    assert repr(TiedLayerSpec("embed", nn.Embed, 7, features=2)) == "Embed(7, features=2)"


def test_a_spec_without_a_class_name_prints_the_callable() -> None:
    assert repr(LayerSpec(functools.partial(nn.Dense, 4))).startswith("functools.partial(")


@pytest.mark.parametrize(
    ("typename", "got"),
    [
        (nnx.Linear(2, 3, rngs=nnx.Rngs(0)), "typename=Linear instance"),
    ],
)
def test_a_spec_of_anything_but_a_class_is_refused(typename: Any, got: str) -> None:
    with pytest.raises(
        LayerError, match=rf"LayerSpec must be given a class.*{got}.*Write LayerSpec\(Class"
    ):
        LayerSpec(typename)


def test_a_built_linen_module_takes_no_arguments() -> None:
    dense = nn.Dense(3)
    assert LayerSpec(dense).build() is dense
    assert (
        repr(LayerSpec(dense, forward_fn=nn.Dense.__call__))
        == "LayerSpec(Dense instance, forward_fn=__call__)"
    )
    with pytest.raises(
        LayerError, match="typename=Dense instance.*only a Linen module may be a built one, without"
    ):
        LayerSpec(dense, 3)


@pytest.mark.parametrize("key", ["", "a/b"])
def test_a_tied_key_must_name_a_subtree(key: Any) -> None:
    with pytest.raises(LayerError, match=rf"non-empty string without '/'.*key={key!r}.*tied/<key>"):
        TiedLayerSpec(key, nn.Dense, 3)


@pytest.mark.parametrize("attr", ["", [], ["kernel", ""]])
def test_a_tied_attribute_must_be_a_path_or_paths(attr: Any) -> None:
    with pytest.raises(
        LayerError, match="tied_weight_attr must be a dotted path.*Leave it out to share all"
    ):
        TiedLayerSpec("k", nn.Dense, 3, tied_weight_attr=attr)


def test_one_tied_attribute_is_the_same_as_a_list_of_one() -> None:
    one = TiedLayerSpec("k", nn.Dense, 3, tied_weight_attr="a.b")
    assert one.tied_weight_attr == ("a.b",)
    assert TiedLayerSpec("k", nn.Dense, 3, tied_weight_attr=["a.b"]).tied_weight_attr == ("a.b",)
    assert TiedLayerSpec("k", nn.Dense, 3).tied_weight_attr is None
    assert TiedLayerSpec("k", nn.Dense, 3, forward_fn=jnp.add).forward_fn is jnp.add
