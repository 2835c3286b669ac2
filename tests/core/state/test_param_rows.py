"""Rows of parameters, and the layouts that are made from them."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpipe.core.state import Layout, layout_of
from jaxpipe.core.state._params import StageParam

FSDP_ROWS = P("fsdp", "model")


def row(name: str, *shape: int, frozen: bool = False, spec: P | None = None) -> StageParam:
    def like(dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    return StageParam(
        name=name,
        path=("layers", name),
        stage_dim=None,
        spec=spec,
        holders=(),
        is_trained=not frozen,
        is_frozen=frozen,
        is_load_bias=False,
        master=like(jnp.bfloat16 if frozen else jnp.float32),
        computed=like(jnp.bfloat16),
        summed=like(jnp.float32),
    )


STAGES = [
    [row("first", 4), row("base", 3, frozen=True), row("gate", 2), row("every", 4, 4)],
    [row("every", 4, 4), row("cut", 4, 6, spec=FSDP_ROWS)],
]
TABLE = [{one.name: one for one in stage} for stage in STAGES]


def sizes(layout: Layout) -> dict[str, tuple[int, ...]]:
    return {name: like.shape for name, like in layout.buffers.items()}


def test_layouts_differ_in_dtypes_alone() -> None:
    master = layout_of(TABLE, lambda one: one.master)
    computed = layout_of(TABLE, lambda one: one.computed)
    cut = ".4x6.fsdp-model.0"
    assert sizes(master) == {"float32": (6,), "frozen.bfloat16": (3,), f"float32{cut}": (4, 6)}
    assert sizes(computed) == {"bfloat16": (6,), "frozen.bfloat16": (3,), f"bfloat16{cut}": (4, 6)}
    for layout in (master, computed):
        assert list(layout.stacked) == ["every"]
        assert [layout.names(stage) for stage in range(2)] == [tuple(one) for one in TABLE]
        assert layout.span(0, "gate")[1:] == (4, 6)


def test_trained_leaves_have_the_same_offsets_without_frozen_ones() -> None:
    trained = layout_of(TABLE, lambda one: one.summed, trained=True)
    assert trained.names(0) == ("first", "gate", "every")
    assert trained.span(0, "gate")[1:] == (4, 6)
    assert not trained.frozen


def test_leaves_whole_along_an_axis_keep_a_spec_of_all_dims() -> None:
    whole = layout_of(TABLE, lambda one: one.computed, whole_along="fsdp")
    assert whole.specs == {"cut": P(None, "model")}
    cut_twice = {"cut": row("cut", 4, 6, spec=P("fsdp", None))}
    assert layout_of([cut_twice], lambda one: one.computed, whole_along="fsdp").specs == {
        "cut": P(None, None)
    }
