"""Input and weight gradient by themselves, against the whole backward."""

import itertools
from collections.abc import Callable
from math import inf, prod
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _covering import sweep
from _oracle import Case
from _tolerances import assert_close
from jax.ad_checkpoint import checkpoint_name

from jaxpipe.layers import on_mesh
from jaxpipe.programs.autodiff._min_cut import min_cut
from jaxpipe.programs.autodiff._residuals import Residuals, differentiable
from jaxpipe.programs.autodiff._split import SplitBackward

SIZE, BATCH, TIME = 64, 2, 16
WORK = 1.02
"""Work of input and weight gradient over that of the whole backward."""

Function = Callable[[Any, Any, Any], Any]


class Block(nn.Module):
    """A transformer block, with dropout where there is a key."""

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        heads = nn.Dense(3 * SIZE, use_bias=False)(nn.LayerNorm()(x)).reshape(
            BATCH, TIME, 3, 4, SIZE // 4
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", heads[:, :, 0], heads[:, :, 1])
        mixed = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores), heads[:, :, 2]).reshape(
            BATCH, TIME, SIZE
        )
        x = x + nn.Dense(SIZE, use_bias=False)(mixed)
        y = nn.gelu(nn.Dense(4 * SIZE)(nn.LayerNorm()(x)))
        return x + nn.Dense(SIZE)(nn.Dropout(0.5, deterministic=not train)(y))


class Convolutions(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.relu(nn.GroupNorm(8)(nn.Conv(32, (3, 3))(x)))
        return nn.ConvTranspose(8, (3, 3))(nn.silu(nn.Conv(64, (3, 3), strides=(2, 2))(y)))


BLOCK, IMAGES = Block(), Convolutions()


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(prod(shape)).normal(size=shape) * 0.3, jnp.float32)


def activations() -> jax.Array:
    return normal(BATCH, TIME, SIZE)


def block(params: Any, x: jax.Array, context: Any) -> jax.Array:
    return BLOCK.apply(params, x)


def dropout(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    return BLOCK.apply(params, x, train=True, rngs={"dropout": key})


def images(params: Any, x: jax.Array, context: Any) -> jax.Array:
    return IMAGES.apply(params, x)


def perceptron(params: Any, x: jax.Array, context: Any) -> jax.Array:
    return jnp.sin(jnp.tanh(x @ params["a"] + params["bias"].reshape(1, 1, -1)) @ params["b"])


@jax.jit
def called(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.jit(jnp.tanh)(x @ w)


def calls(params: Any, x: jax.Array, context: Any) -> jax.Array:
    return called(params["a"], called(params["b"], called(params["a"], x)))


@jax.custom_vjp
def with_rule(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


with_rule.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda kept, g: (g @ kept[1].T, jnp.einsum("bti,btj->ij", kept[0], g)),
)


def custom_rule(params: Any, x: jax.Array, context: Any) -> jax.Array:
    return jnp.sin(with_rule(jnp.sin(x), params["a"]))


def scan(params: Any, x: jax.Array, context: Any) -> jax.Array:
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)[0]


def scan_of_blocks(params: Any, x: jax.Array, context: Any) -> jax.Array:
    body = jax.checkpoint(lambda x, p: (BLOCK.apply(p, x), None), prevent_cse=False)
    return jax.lax.scan(body, x, jax.tree.map(lambda leaf: jnp.stack([leaf, leaf * 0.5]), params))[
        0
    ]


def scan_with_keys(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    def body(carry: tuple, w: jax.Array) -> tuple[tuple, None]:
        x, key = carry
        key, mine = jax.random.split(key)
        return (
            jnp.tanh(jnp.where(jax.random.bernoulli(mine, 0.5, x.shape), x, 0.0) @ w),
            key,
        ), None

    return jax.lax.scan(body, (x, key), params)[0][0]


def scan_with_one_weight(params: Any, x: jax.Array, context: Any) -> jax.Array:
    return jax.lax.scan(
        lambda x, _: (jnp.tanh(x @ params["a"]), None), x, None, length=3, reverse=True
    )[0]


def scan_of_scans(params: Any, x: jax.Array, context: Any) -> jax.Array:
    pairs = params.reshape(2, 2, SIZE, SIZE)
    return jax.lax.scan(lambda x, w: (scan(w, x, None), None), x, pairs)[0]


def side_inputs(params: Any, inputs: Any, mask: jax.Array) -> Any:
    x, ids = inputs
    return jnp.where(mask[..., None], x @ params["a"], 0.0) + params["table"][ids], ids


def scaled_weight(params: Any, x: jax.Array, context: Any) -> jax.Array:
    return x @ (params["a"] * params["scale"].reshape(1, -1))


def block_recomputed_and_plain(params: Any, x: jax.Array, context: Any) -> jax.Array:
    return block(params, jax.checkpoint(block)(params, x, context), context)


def recomputed(function: Function, policy: str = "") -> Function:
    wrapped = jax.checkpoint(
        function, policy=getattr(jax.checkpoint_policies, policy) if policy else None
    )
    wrapped.__name__ = "_".join(filter(None, [function.__name__, "recomputed", policy]))
    return wrapped


def given(function: Function) -> tuple[Any, Any, Any]:
    """Parameters, inputs and context of a function."""
    name = function.__name__.partition("_recomputed")[0]
    x, key = activations(), jax.random.key(3)
    weights = {"a": normal(SIZE, SIZE), "b": normal(SIZE, SIZE + 1)[:, :SIZE]}
    if name in ("block", "dropout", "scan_of_blocks"):
        return BLOCK.init(jax.random.key(0), x), x, key
    if name == "images":
        pictures = normal(BATCH, 8, 8, 8)
        return IMAGES.init(jax.random.key(0), pictures), pictures, ()
    if name.startswith("scan") and name != "scan_with_one_weight":
        return normal(4, SIZE, SIZE), x, key
    if name == "side_inputs":
        ids = jnp.arange(BATCH * TIME).reshape(BATCH, TIME) % 7
        return {"a": weights["a"], "table": normal(7, SIZE)}, (x, ids), ids > 2
    if name == "scaled_weight":
        return {"a": weights["a"], "scale": normal(SIZE)}, x, ()
    return {**weights, "bias": normal(SIZE)} if name == "perceptron" else weights, x, ()


DOTS = "dots_with_no_batch_dims_saveable"
KERNELS = {"Dense_0/kernel", "Dense_1/kernel", "Dense_2/kernel", "Dense_3/kernel"}
CASES: list[tuple[Function, set[str]]] = [
    (block, KERNELS),
    (recomputed(dropout), KERNELS),
    (images, {"Conv_0/kernel", "Conv_1/kernel", "ConvTranspose_0/kernel"}),
    (perceptron, {"a", "b"}),
    (calls, {"a", "b"}),
    (custom_rule, {"a"}),
    (scan, {""}),
    (recomputed(scan), {""}),
    (scan_with_keys, {""}),
    (scan_with_one_weight, {"a"}),
    (scan_of_scans, {""}),
    (side_inputs, {"a"}),
    (scaled_weight, {"a", "scale"}),
    (scan_of_blocks, KERNELS),
    (recomputed(block, "nothing_saveable"), KERNELS),
    (recomputed(block, DOTS), KERNELS),
    (block_recomputed_and_plain, KERNELS),
    (dropout, KERNELS),
]


def struct(tree: Any) -> Any:
    return jax.eval_shape(lambda: tree)


def paired(function: Function) -> Callable[..., Any]:
    """The function in the form that `Residuals` takes."""
    return lambda *args: ((function(*args),), ())


def split_of(function: Function) -> tuple[Residuals, SplitBackward]:
    args = struct(given(function))
    residuals = Residuals(paired(function), *args)
    return residuals, SplitBackward(residuals, args[0])


def names_of(tree: Any) -> list[str]:
    paths = [path for path, _ in jax.tree.leaves_with_path(tree)]
    return [
        jax.tree_util.keystr(path, simple=True, separator="/").removeprefix("params/")
        for path in paths
    ]


def is_none(x: Any) -> bool:
    return x is None


def num_bytes(leaves: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(leaves))


def compiled(function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """Compiled, with its work in floating point operations."""
    program = jax.jit(function).lower(*args).compile()
    return program, program.cost_analysis().get("flops", 0.0)


@pytest.mark.parametrize(
    ("function", "deferred"),
    sweep(len(CASES) - 5, CASES, unpack=True),
    ids=[f.__name__ for f, _ in CASES],
)
def test_input_and_weight_gradient_are_the_whole(function: Function, deferred: set[str]) -> None:
    params, inputs, context = given(function)
    residuals, split = split_of(function)
    outputs, _, kept = jax.jit(residuals.forward)(params, inputs, context)
    args = params, kept, [jnp.cos(leaf) for leaf in differentiable(outputs)]
    whole, whole_work = compiled(residuals.backward, *args)
    first, first_work = compiled(split.backward_input, *args)
    early, dx, pending = first(*args)
    read = [leaf if i in split.weight_reads else None for i, leaf in enumerate(kept)]
    second, second_work = compiled(split.backward_weight, params, read, pending)
    late = second(params, read, pending)

    assert {
        name for i, name in enumerate(names_of(params)) if i in split.deferred
    } & deferred == deferred
    assert_close(
        (jax.tree.map(lambda a, b: b if a is None else a, early, late, is_leaf=is_none), dx),
        whole(*args),
    )
    assert first_work + second_work <= WORK * whole_work
    assert second_work > 0.25 * whole_work
    assert [(x.shape, x.dtype) for x in pending] == [(x.shape, x.dtype) for x in split.pending]
    weights = {leaf.shape for leaf in jax.tree.leaves(params) if leaf.ndim > 1}
    assert not weights & {leaf.shape for leaf in pending}


@pytest.mark.parametrize(
    "function", [f for f, names in CASES if names is KERNELS], ids=lambda f: f.__name__
)
def test_scales_and_biases_do_not_wait(function: Function) -> None:
    _, split = split_of(function)
    names = names_of(given(function)[0])
    assert {names[i] for i in split.deferred} == KERNELS
    assert {names[i].rpartition("/")[2] for i in split.immediate} == {"bias", "scale"}
    assert split.reason == ""


@pytest.mark.parametrize(
    ("function", "handed", "from_kept"),
    [
        (block, 9, 7),
        (recomputed(block), 15, 1),
        (recomputed(block, DOTS), 10, 6),
        (scan_of_blocks, 30, 2),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_a_block_waits_with_16_activations(function: Function, handed: int, from_kept: int) -> None:
    """Inputs of its four products and gradients of their outputs.

    Inputs are 1 + 1 + 1 + 4 activations, gradients 3 + 1 + 4 + 1.
    """
    residuals, split = split_of(function)
    one = num_bytes(activations())
    small = 0.05 * (handed + from_kept)
    read = num_bytes([residuals.structs[i] for i in split.weight_reads])
    assert handed <= num_bytes(split.pending) / one <= handed + small
    assert from_kept <= read / one <= from_kept + small


def products(jaxpr: Any) -> int:
    """Floating point operations of the matrix products of a jaxpr."""
    total = 0
    for eqn in jaxpr.eqns:
        inner = [getattr(value, "jaxpr", value) for value in eqn.params.values()]
        total += sum(products(x) for x in inner if hasattr(x, "eqns")) * eqn.params.get("length", 1)
        if eqn.primitive.name == "dot_general":
            contracted = eqn.params["dimension_numbers"][0][0]
            total += (
                2 * eqn.outvars[0].aval.size * prod(eqn.invars[0].aval.shape[i] for i in contracted)
            )
    return total


@pytest.mark.parametrize("function", [block, scan], ids=lambda f: f.__name__)
def test_no_product_is_computed_twice(function: Function) -> None:
    args = struct(given(function))
    residuals, split = split_of(function)
    forward = products(jax.make_jaxpr(function)(*args).jaxpr)
    cotangents = [struct(activations())]
    first, (_, _, pending) = jax.make_jaxpr(split.backward_input, return_shape=True)(
        args[0], residuals.structs, cotangents
    )
    second = jax.make_jaxpr(split.backward_weight)(args[0], residuals.structs, pending)
    assert products(first.jaxpr) + products(second.jaxpr) == 2 * forward


@pytest.mark.parametrize(
    ("function", "times"), [(block, 1), (scan_of_blocks, 2)], ids=["block", "scan"]
)
def test_frozen_weights_have_no_product_and_keep_nothing(function: Function, times: int) -> None:
    args = struct(given(function))
    names, cotangents = names_of(args[0]), [struct(activations())]
    frozen = [i for i, name in enumerate(names) if "kernel" in name]
    whole, some = (
        Residuals(paired(function), *args),
        Residuals(paired(function), *args, frozen=frozen),
    )
    work = [
        products(jax.make_jaxpr(x.backward)(args[0], x.structs, cotangents).jaxpr)
        for x in (whole, some)
    ]
    sizes = [leaf.size for i, leaf in enumerate(jax.tree.leaves(args[0])) if i in frozen]
    assert work[0] - work[1] == 2 * times * sum(sizes) * prod(activations().shape[:-1])
    # Recomputed blocks keep their inputs alone either way.
    assert (num_bytes(some.structs) < num_bytes(whole.structs)) == (function is block)
    split = SplitBackward(some, args[0])
    assert split.is_whole
    assert split.immediate == tuple(i for i in range(len(names)) if i not in frozen)


def test_gradients_of_what_is_trained_are_those_of_all() -> None:
    params, inputs, context = given(block)
    args, names = struct((params, inputs, context)), names_of(params)
    frozen = [i for i, name in enumerate(names) if "kernel" not in name]
    found = []
    for left_out in ([], frozen):
        residuals = Residuals(paired(block), *args, frozen=left_out)
        outputs, _, kept = residuals.forward(params, inputs, context)
        grads, dx = residuals.backward(
            params, kept, [jnp.cos(leaf) for leaf in differentiable(outputs)]
        )
        found.append((jax.tree.leaves(grads, is_leaf=is_none), dx))
    (wanted, dx), (some, same) = found
    assert [i for i, leaf in enumerate(some) if leaf is None] == frozen
    trained = [i for i in range(len(names)) if i not in frozen]
    assert_close(([some[i] for i in trained], same), ([wanted[i] for i in trained], dx))


@jax.custom_vjp
def opaque(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


def opaque_backward(kept: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = kept
    dx, dw = g @ w.T, jnp.einsum("bti,btj->ij", x, g)
    return jax.lax.cond(
        g[0, 0, 0] > 1e9, lambda: (dx, dw), lambda: (g @ w.T, jnp.einsum("bti,btj->ij", x, g))
    )


opaque.defvjp(lambda x, w: (x @ w, (x, w)), opaque_backward)


@pytest.mark.parametrize("layers", [1, 2])
def test_what_comes_with_the_gradient_of_the_input_stays_whole(layers: int) -> None:
    params = {"a": normal(SIZE, SIZE), "b": normal(SIZE, SIZE)}

    def function(params: Any, x: jax.Array, context: Any) -> Any:
        return (opaque(x @ params["b"] if layers == 2 else x, params["a"]),), ()

    x = activations()
    residuals = Residuals(function, *struct((params, x, ())))
    split = SplitBackward(residuals, struct(params))
    assert split.is_whole == (layers == 1)
    assert split.inseparable == {0: "cond"}
    assert split.reason == "cond gives gradients of weights together with those of the inputs"
    kept = residuals.forward(params, x, ())[2]
    early, dx, pending = split.backward_input(params, kept, [x])
    late = split.backward_weight(params, kept, pending)
    assert (early["a"] is None, late["b"] is None) == (False, layers == 1)
    assert (pending == []) == (layers == 1)
    merged = jax.tree.map(lambda a, b: b if a is None else a, early, late, is_leaf=is_none)
    assert_close((merged, dx), residuals.backward(params, kept, [x]))


def test_where_inputs_have_no_gradient_all_waits() -> None:
    params, ids = {"table": normal(7, SIZE), "scale": normal(SIZE)}, jnp.arange(6).reshape(2, 3)

    def function(params: Any, ids: jax.Array, context: Any) -> Any:
        return (params["table"][ids] * params["scale"].reshape(1, 1, -1),), ()

    residuals = Residuals(function, *struct((params, ids, ())))
    split = SplitBackward(residuals, struct(params))
    outputs, _, kept = residuals.forward(params, ids, ())
    early, dx, pending = split.backward_input(params, kept, [*outputs])
    assert (jax.tree.leaves(early), dx, split.immediate) == ([], [], ())
    assert [leaf.shape for leaf in split.pending] == [(2, 3, SIZE)]
    assert_close(
        (split.backward_weight(params, kept, pending), []),
        residuals.backward(params, kept, [*outputs]),
    )


def test_without_products_nothing_waits() -> None:
    x = activations()
    residuals = Residuals(lambda p, x, c: ((x * p,), ()), *struct((normal(1, 1, SIZE), x, ())))
    split = SplitBackward(residuals, struct(normal(1, 1, SIZE)))
    assert split.is_whole
    assert split.reason == "no parameter is the weight of a matrix product or convolution"


def test_callbacks_run_once_and_with_the_true_values() -> None:
    seen: list[float] = []

    @jax.custom_vjp
    def watched(x: jax.Array) -> jax.Array:
        return x

    def backward(kept: None, g: jax.Array) -> tuple[jax.Array]:
        jax.debug.callback(lambda total: seen.append(float(total)), jnp.sum(g))
        return (g,)

    watched.defvjp(lambda x: (x, None), backward)

    def function(params: Any, x: jax.Array, context: Any) -> Any:
        return (jax.lax.scan(lambda x, w: (watched(x @ w), None), x, params)[0],), ()

    params, x = normal(3, SIZE, SIZE), activations()
    residuals = Residuals(function, *struct((params, x, ())))
    split = SplitBackward(residuals, struct(params))
    kept = residuals.forward(params, x, ())[2]
    _, _, pending = jax.jit(split.backward_input)(params, kept, [x])
    jax.block_until_ready(jax.jit(split.backward_weight)(params, kept, pending))
    jax.effects_barrier()
    assert len(seen) == 3
    assert seen[0] == pytest.approx(float(jnp.sum(x)), rel=1e-4)


def test_what_waits_in_host_memory_stays_on_the_device() -> None:
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["y"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def hosted(params: Any, x: jax.Array, context: Any) -> Any:
        return (jnp.sin(checkpoint_name(jnp.tanh(x @ params["a"]), "y") @ params["b"]),), ()

    args = struct(given(calls))
    residuals = Residuals(jax.checkpoint(hosted, policy=policy), *args)
    split = SplitBackward(residuals, args[0])
    assert residuals.is_hosted == [False, True]
    halves = [
        jax.make_jaxpr(split.backward_input)(args[0], residuals.structs, [args[1]]),
        jax.make_jaxpr(split.backward_weight)(args[0], residuals.structs, split.pending),
    ]
    assert not any(eqn.primitive.name == "device_put" for half in halves for eqn in half.jaxpr.eqns)


@pytest.mark.parametrize(
    ("scan_trunk", "interval"),
    sweep(2, [(False, 0), (True, 1), (False, 1), (True, 0)], unpack=True),
)
def test_the_trunk_of_a_pipeline(scan_trunk: bool, interval: int) -> None:
    case = Case(model="attention", stages=2, interval=interval, scan_trunk=scan_trunk, cut="trunk")
    program = case.pipeline().stage.trunk._program
    segment = program.segment
    split = SplitBackward(program.residuals, segment.struct)
    names = names_of(segment.struct)
    assert {names[i].rpartition("/")[2] for i in split.deferred} == {"kernel"}
    assert {names[i].rpartition("/")[2] for i in split.immediate} == {"bias"}
    weights = {leaf.shape for leaf in jax.tree.leaves(segment.struct)}
    assert not weights & {leaf.shape for leaf in split.pending}


def test_collectives_over_the_replicas_are_cut_too() -> None:
    def function(params: Any, x: jax.Array, context: Any) -> Any:
        return (jnp.sin(jax.lax.psum(jnp.tanh(x @ params["a"]) @ params["b"], "data")),), ()

    params, x = given(calls)[0], activations()

    def make() -> tuple[Residuals, SplitBackward]:
        residuals = Residuals(function, *struct((params, x, ())))
        return residuals, SplitBackward(residuals, struct(params))

    mesh = jax.make_mesh((1, 2), ("stage", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    residuals, split = on_mesh(mesh.abstract_mesh, make)
    assert len(split.deferred) == 2

    def both(params: Any, kept: Any) -> Any:
        early, dx, pending = split.backward_input(params, kept, [x])
        late = split.backward_weight(params, kept, pending)
        return jax.tree.map(lambda a, b: b if a is None else a, early, late, is_leaf=is_none), dx

    def run(function: Callable[..., Any]) -> Any:
        def on_device(x: jax.Array) -> Any:
            kept = residuals.forward(params, x, ())[2]
            return jax.tree.map(lambda leaf: leaf[None], function(params, kept))

        spec = jax.sharding.PartitionSpec("data")
        return jax.jit(
            jax.shard_map(on_device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        )(jnp.concatenate([x, x * 2.0]))

    assert_close(run(both), run(lambda params, kept: residuals.backward(params, kept, [x])))


@pytest.mark.parametrize("seed", range(20))
def test_the_cut_is_the_cheapest(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_values = 9
    others = {
        v: [int(x) for x in rng.choice(v, min(v, 2), replace=False)] for v in range(num_values)
    }
    prices = [int(price) for price in rng.integers(1, 6, num_values)]
    prices[num_values - 1] = prices[num_values - 2] = 10**6
    fixed = {v for v in range(num_values) if not others[v] or rng.random() < 0.2} - {
        num_values - 1,
        num_values - 2,
    }
    goals = [num_values - 1, num_values - 2]

    def is_known(value: int, held: Any) -> bool:
        return value in held or (
            value not in fixed and all(is_known(x, held) for x in others[value])
        )

    subsets = (
        c for n in range(num_values + 1) for c in itertools.combinations(range(num_values), n)
    )
    best = min(
        (sum(prices[v] for v in held) for held in subsets if all(is_known(g, held) for g in goals)),
        default=inf,
    )
    uses = [(x, value) for value in range(num_values) if value not in fixed for x in others[value]]
    for scale in (1, 10**10):
        held = min_cut({v: scale * price for v, price in enumerate(prices)}, fixed, uses, goals)
        assert all(is_known(g, held) for g in goals)
        assert sum(prices[v] for v in held) == best
