"""Kernels of traced programs: operations of products, bytes that move, and what is fused."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxpipe.models.transformer._blocked import BLOCK
from jaxpipe.programs.jaxpr import Kernel, count_kernels, num_flops, result_specs
from jaxpipe.transformer import attention


def _conv(x: jax.Array, k: jax.Array, groups: int) -> jax.Array:
    return jax.lax.conv_general_dilated(x, k, (1, 1), "VALID", feature_group_count=groups)


@pytest.mark.parametrize(
    ("function", "shapes", "flops", "num_bytes"),
    [
        (lambda x, w: x @ w, [(4, 8), (8, 2)], 2 * 4 * 8 * 2, 4 * (32 + 16 + 8)),
        (lambda x, w: jnp.tanh(x @ w), [(4, 8), (8, 2)], 2 * 4 * 8 * 2, 4 * (32 + 16 + 8 + 8 + 8)),
        (
            lambda x, w: jnp.tanh(x) @ w,
            [(4, 8), (8, 2)],
            2 * 4 * 8 * 2,
            4 * (32 + 32 + 32 + 16 + 8),
        ),
        (
            lambda x, k: _conv(x, k, 1),
            [(1, 4, 5, 5), (6, 4, 3, 3)],
            2 * 54 * 36,
            4 * (100 + 216 + 54),
        ),
        (
            lambda x, k: _conv(x, k, 2),
            [(1, 4, 5, 5), (6, 2, 3, 3)],
            2 * 54 * 18,
            4 * (100 + 108 + 54),
        ),
        (lambda x: x.sum(0), [(4, 8)], 0, 4 * 40),
        (lambda x: (x * 2 + 1).sum(0), [(4, 8)], 0, 4 * 40),
        (lambda x: x[jnp.array([1, 3])], [(1000, 8)], 0, 2 * 4 * 16 + 2 * 4 * 2),
        (
            lambda x, p: jax.lax.cond(p > 0, lambda: x + 1.0, lambda: x),
            [(8,), ()],
            0,
            2 * 32 + 4 + 1,
        ),
        (lambda x: (x * 2.0, x + 1.0)[0], [(8,)], 0, 2 * 32),
        (
            lambda x, w: jax.lax.scan(lambda y, e: (y @ e, None), x, w)[0],
            [(4, 8), (5, 8, 8)],
            5 * 512,
            5 * 4 * 128,
        ),
    ],
    ids=[
        *(
            "product",
            "arithmetic after",
            "arithmetic before",
            "convolution",
            "groups",
            "sum",
            "sum of arithmetic",
        ),
        *("look-up", "branch", "unused", "scan"),
    ],
)
def test_kernels(function: Any, shapes: list[tuple[int, ...]], flops: int, num_bytes: int) -> None:
    kernels = count_kernels(
        function, [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    )
    assert num_flops(kernels) == flops
    assert sum(each.times * each.num_bytes for each in kernels) == num_bytes


@pytest.mark.parametrize(
    ("time", "seen"),
    [(128, 1), (2 * BLOCK, 3 / 4), (4 * BLOCK, 10 / 16)],
    ids=["one", "two", "four"],
)
@pytest.mark.parametrize("causal", [False, True])
def test_a_mask_leaves_blocks_out_of_attentions_square(
    time: int, seen: float, *, causal: bool
) -> None:
    def attend(q: jax.Array) -> jax.Array:
        return attention(q, q, q, causal=causal, implementation="blocked")

    shape = jax.ShapeDtypeStruct((2, time, 3, 64), jnp.bfloat16)
    (kernel,) = (x for x in count_kernels(attend, [shape]) if x.kind == "attention")
    square = 2 * 2 * (2 * 3) * time**2 * 64
    assert kernel.flops + kernel.masked_flops == square
    assert kernel.flops == (seen if causal else 1) * square


def test_attention_counts_values_of_another_size_and_sinks() -> None:
    def attend(q: jax.Array, v: jax.Array, sinks: jax.Array) -> jax.Array:
        return attention(q, q, v, sinks=sinks, soft_cap=30.0)

    q, v = (jax.ShapeDtypeStruct((2, BLOCK, 3, size), jnp.bfloat16) for size in (192, 128))
    sinks = jax.ShapeDtypeStruct((3,), jnp.float32)
    (kernel,) = (x for x in count_kernels(attend, [q, v, sinks]) if x.kind == "attention")
    assert kernel.flops == 2 * (2 * 3) * BLOCK**2 * (192 + 128)
    pairs = 2 * 4  # the indices of one pair of blocks
    assert kernel.num_bytes == 2 * (2 * 3 * BLOCK) * (192 + 2 * 128) + 3 * 4 + pairs


def _struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


INDEX = _struct(dtype=jnp.int32)


@pytest.mark.parametrize(
    ("function", "args", "last"),
    [
        # A loop in a loop runs its product 3 * 5 times.
        (
            lambda x, w: jax.lax.scan(
                lambda y, _: (jax.lax.scan(lambda z, _: (z @ w, None), y, length=3)[0], None),
                x,
                length=5,
            )[0],
            [_struct(4, 8), _struct(8, 8)],
            Kernel("product", 512, 4 * 128, is_narrow=False, times=15, result_bytes=4 * 32),
        ),
        (
            lambda x, w: x @ w,
            [_struct(4, 8, dtype=jnp.bfloat16), _struct(8, 2, dtype=jnp.bfloat16)],
            Kernel("product", 128, 2 * 56, result_bytes=2 * 8),
        ),
        (
            lambda x, w: jax.lax.dot(x, w, preferred_element_type=jnp.float32),
            [_struct(4, 8, dtype=jnp.bfloat16), _struct(8, 2, dtype=jnp.bfloat16)],
            Kernel("product", 128, 2 * 48 + 4 * 8, result_bytes=4 * 8),
        ),
        # Of several branches the most expensive.
        *(
            (
                lambda x, w, p, order=order: jax.lax.cond(
                    p > 0, *[lambda: x @ w, lambda: x + x][::order]
                ),
                [_struct(4, 8), _struct(8, 8), _struct()],
                Kernel("product", 512, 4 * 128, is_narrow=False, result_bytes=4 * 32),
            )
            for order in (1, -1)
        ),
        # Rows that are written, not the table that they are written into.
        (
            lambda table, x, i: jax.lax.dynamic_update_slice(table, x, (i, i)),
            [_struct(1000, 8), _struct(2, 8), INDEX],
            Kernel("other", 0, 2 * 4 * 16),
        ),
        (
            lambda table, i, x: table.at[i].add(x),
            [_struct(1000, 8), _struct(3, dtype=jnp.int32), _struct(3, 8)],
            Kernel("other", 0, 4 * (8000 + 24)),
        ),
        (
            jax.lax.ragged_dot,
            [_struct(6, 4), _struct(2, 4, 8), _struct(2, dtype=jnp.int32)],
            Kernel(
                *("product", 2 * 48 * 4, 4 * (24 + 64 + 2 + 48)),
                is_narrow=False,
                result_bytes=4 * 48,
            ),
        ),
        # What a kernel writes it does not read.
        (lambda x: x.sum(0) + 1.0, [_struct(4, 8)], Kernel("other", 0, 4 * (32 + 8 + 8))),
    ],
    ids=["loops", "narrow", "sums", "first", "second", "update", "scatter", "ragged", "reduction"],
)
def test_the_last_kernel(function: Any, args: list[Any], last: Kernel) -> None:
    assert count_kernels(function, args)[-1] == last


MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2).abstract_mesh


def _constrained(x: jax.Array, *spec: Any) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, P(*spec))


X, W = _struct(8, 16), _struct(16, 4)
ROWS = Kernel("product", 2 * 8 * 16 * 4 // 4, 4 * (32 + 16 + 32), is_narrow=False, result_bytes=128)
REDUCE = Kernel("reduce", 0, 128, axis="model")


@pytest.mark.parametrize(
    ("function", "args", "specs", "wanted"),
    [
        (
            lambda x, w: x @ w,
            [X, W],
            [P(), P(None, "model")],
            [Kernel("product", 256, 4 * (128 + 16 + 8), is_narrow=False, result_bytes=32)],
        ),
        # A device has a share of each sum, and the shares are added up before something reads them:
        (lambda x, w: x @ w, [X, W], [P(None, "model"), P("model")], [ROWS, REDUCE]),
        # after a change of form, and after they were added to others.
        (
            lambda x, w: (x @ w).reshape(32) + 1.0,
            [X, W],
            [P(None, "model"), P("model")],
            [ROWS, REDUCE, Kernel("other", 0, 2 * 128)],
        ),
        (
            lambda x, w, v: x @ w + x @ v,
            [X, W, W],
            [P(None, "model"), P("model"), P("model")],
            [ROWS, ROWS, REDUCE, Kernel("other", 0, 3 * 128)],
        ),
        (
            lambda x, w, v: (x @ w).reshape(32) + (x @ v).reshape(32),
            [X, W, W],
            [P(None, "model"), P("model"), P("model")],
            [ROWS, ROWS, REDUCE, Kernel("other", 0, 3 * 128)],
        ),
        (
            lambda x: _constrained(x, None, "model"),
            [X],
            [P("model")],
            [Kernel("exchange", 0, 4 * 8 * 4, axis="model")],
        ),
        (_constrained, [X], [P("model")], [Kernel("gather", 0, 4 * 8 * 16, axis="model")]),
        (lambda x: _constrained(x, "model"), [X], [P("model")], []),
        (lambda x: _constrained(x, "model"), [X], [P()], []),
    ],
    ids=["columns", "rows", "form", "sum", "sum of forms", "exchange", "gather", "kept", "divided"],
)
def test_kernels_of_divided_values(
    function: Any, args: list[Any], specs: list[P], wanted: list[Kernel]
) -> None:
    with jax.sharding.use_abstract_mesh(MESH):
        assert count_kernels(function, args, specs, MESH, ["data"]) == wanted


def test_results_are_divided_like_what_they_are_made_of() -> None:
    def function(x: jax.Array, w: jax.Array) -> Any:
        return x @ w, jnp.tanh(x), 1.0, x.sum(0)

    with jax.sharding.use_abstract_mesh(MESH):
        found = result_specs(function, [X, W], [P("model"), P()], MESH, ["data"])
    assert [tuple(spec) for spec in found] == [("model", None), ("model", None), (), (None,)]


@pytest.mark.parametrize(
    ("function", "kind", "axis"),
    [
        (lambda x: jax.lax.ppermute(x, "model", [(0, 1)]), "shift", "model"),
        (lambda x: jax.lax.ppermute(x, ("data", "model"), [(0, 1)]), "shift", "data"),
        (lambda x: jax.lax.all_to_all(x, "model", 0, 1), "exchange", "model"),
    ],
)
def test_collectives_that_a_program_names(function: Any, kind: Any, axis: str) -> None:
    mapped = jax.shard_map(
        function, mesh=MESH, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    assert count_kernels(mapped, [X]) == [Kernel(kind, 0, 4 * 4 * 16, axis=axis)]
