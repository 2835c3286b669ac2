import functools

import flax.linen as nn
import jax.numpy as jnp
import pytest

import jaxpipe
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


def test_a_built_linen_module() -> None:
    dense = nn.Dense(3)
    assert LayerSpec(dense).build() is dense
    assert (
        repr(LayerSpec(dense, forward_fn=nn.Dense.__call__))
        == "LayerSpec(Dense instance, forward_fn=__call__)"
    )


def test_one_tied_attribute_is_the_same_as_a_list_of_one() -> None:
    one = TiedLayerSpec("k", nn.Dense, 3, tied_weight_attr="a.b")
    assert one.tied_weight_attr == ("a.b",)
    assert TiedLayerSpec("k", nn.Dense, 3, tied_weight_attr=["a.b"]).tied_weight_attr == ("a.b",)
    assert TiedLayerSpec("k", nn.Dense, 3).tied_weight_attr is None
    assert TiedLayerSpec("k", nn.Dense, 3, forward_fn=jnp.add).forward_fn is jnp.add
