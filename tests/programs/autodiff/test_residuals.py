"""A backward from what was kept, and that no more is kept than depends on the inputs."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _covering import sweep
from _models import BLOCKS, DIM
from _oracle import Case
from _tolerances import assert_close
from jax.ad_checkpoint import checkpoint_name

from jaxpipe.programs.autodiff._residuals import Residuals, differentiable, replace_differentiable
from jaxpipe.programs.jaxpr._dependence import output_dependence

SIZE = 5


def plain(params: Any, inputs: Any, context: Any) -> Any:
    x, mask = inputs
    causal = jnp.tril(jnp.ones((SIZE, SIZE))) * params["w"]
    return jnp.tanh(x @ causal) * mask, mask


def with_dropout(params: Any, inputs: Any, context: Any) -> Any:
    x, mask = inputs
    key, scale = context
    keep = jax.random.bernoulli(key, 0.5, x.shape)
    return jnp.where(keep, jnp.sin(x @ params["w"]), 0.0) * scale, mask


def with_keys_inside(params: Any, inputs: Any, context: Any) -> Any:
    x, mask = inputs
    noisy = jax.checkpoint(lambda x, key: x * jax.random.normal(key, x.shape))
    return noisy(jnp.sin(x @ params["w"]), jax.random.fold_in(context[0], 3)), mask


def with_scan(params: Any, inputs: Any, context: Any) -> Any:
    x, mask = inputs
    weights = jnp.stack([params["w"], params["w"] * 2.0])
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0], mask


def with_remat_in_scan(params: Any, inputs: Any, context: Any) -> Any:
    x, mask = inputs
    body = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w) * context[1], None))
    return jax.lax.scan(body, x, jnp.stack([params["w"]] * 3))[0], mask


def with_custom_rule(params: Any, inputs: Any, context: Any) -> Any:
    x, mask = inputs

    @jax.custom_vjp
    def double(x: jax.Array) -> jax.Array:
        return x * 2.0

    double.defvjp(lambda x: (x * 2.0, x), lambda x, g: (g * 2.0 + 0.0 * x,))
    return jax.nn.relu(double(x) @ params["w"]), mask


def with_nested_remat(params: Any, inputs: Any, context: Any) -> Any:
    x, mask = inputs
    inner = jax.checkpoint(lambda x: jnp.sin(x @ params["w"]) * context[1])
    outer = jax.checkpoint(lambda x: jnp.tanh(inner(x) @ params["w"]))
    return outer(jnp.cos(x @ params["w"])) + jnp.sin(x @ params["w"]), mask


def with_offload(params: Any, inputs: Any, context: Any) -> Any:
    x, mask = inputs
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["y"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    hosted = jax.checkpoint(
        lambda x: jnp.sin(checkpoint_name(x @ params["w"], "y")) @ params["w"], policy=policy
    )
    return jnp.tanh(hosted(jnp.sin(x @ params["w"])) @ params["w"]), mask


FUNCTIONS = [plain, with_dropout, with_keys_inside, with_scan, with_remat_in_scan, with_custom_rule]
FUNCTIONS += [with_nested_remat, with_offload]


def arguments() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    w = rng.normal(size=(SIZE, SIZE)).astype(np.float32)
    x = rng.normal(size=(3, SIZE)).astype(np.float32)
    mask = np.array([[True], [False], [True]])
    return (
        {"w": jnp.asarray(w)},
        (jnp.asarray(x), jnp.asarray(mask)),
        (jax.random.key(4), jnp.asarray(1.5)),
    )


def with_others(function: Callable[..., Any]) -> Callable[..., Any]:
    """The form that `Residuals` takes, with something that has no gradient beside the outputs."""
    return lambda params, inputs, context: (function(params, inputs, context), jnp.int32(7))


def structs(args: Any) -> Any:
    return jax.eval_shape(lambda: args)


@pytest.mark.parametrize("function", sweep(4, [*FUNCTIONS]), ids=lambda f: f.__name__)
def test_the_backward_is_that_of_autodiff(function: Callable[..., Any]) -> None:
    params, inputs, context = arguments()
    residuals = Residuals(with_others(function), *structs((params, inputs, context)))
    outputs, others, kept = jax.jit(residuals.forward)(params, inputs, context)
    assert [(x.shape, x.dtype) for x in kept] == [(x.shape, x.dtype) for x in residuals.structs]
    cotangent = jnp.ones_like(outputs[0])
    grads, dx = jax.jit(residuals.backward)(params, kept, [cotangent])
    wanted, pullback = jax.vjp(
        lambda p, x: function(p, (x, inputs[1]), context)[0], params, inputs[0]
    )
    assert_close(outputs[0], wanted)
    assert int(others) == 7
    assert_close((grads, dx), (lambda pair: (pair[0], [pair[1]]))(pullback(cotangent)))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_no_weights_and_no_constants_are_kept(function: Callable[..., Any]) -> None:
    residuals = Residuals(with_others(function), *structs(arguments()))
    assert all(leaf.shape[-2:] != (SIZE, SIZE) for leaf in residuals.structs)


@pytest.mark.parametrize("scanned", [False, True], ids=["plain", "scanned"])
def test_a_layer_that_prints_does_so_in_the_forward_alone(scanned: bool) -> None:
    seen: list[float] = []

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        y = x @ w
        jax.debug.callback(lambda total: seen.append(float(total)), jnp.sum(y))
        return jnp.tanh(y), None

    def function(params: Any, x: jax.Array, context: Any) -> jax.Array:
        return jax.lax.scan(layer, x, params["w"][None])[0] if scanned else layer(x, params["w"])[0]

    params, (x, _), _ = arguments()
    residuals = Residuals(with_others(function), *structs((params, x, ())))
    y, _, kept = jax.jit(residuals.forward)(params, x, ())
    jax.block_until_ready(jax.jit(residuals.backward)(params, kept, [jnp.ones_like(y)]))
    jax.effects_barrier()
    assert seen == pytest.approx([float(jnp.sum(x @ params["w"]))], rel=1e-4)


def test_what_one_layer_offloads_waits_in_host_memory_and_the_rest_does_not() -> None:
    residuals = Residuals(with_others(with_offload), *structs(arguments()))
    assert sum(residuals.is_hosted) == 1
    assert len(residuals.structs) > 2


def test_a_rematerialised_function_keeps_its_inputs_alone() -> None:
    args = structs(arguments())
    kept = Residuals(with_others(jax.checkpoint(lambda p, x, c: plain(p, x, c))), *args).structs
    assert sorted(leaf.shape for leaf in kept) == [(3, 1), (3, SIZE)]


@pytest.mark.parametrize(("dtype", "times"), [("float32", 0), ("bfloat16", 1)])
def test_nothing_is_rounded_that_has_no_excess_precision(dtype: str, times: int) -> None:
    def function(params: Any, x: jax.Array, context: Any) -> jax.Array:
        return jnp.sin(x @ params)

    w, x = jax.ShapeDtypeStruct((SIZE, SIZE), dtype), jax.ShapeDtypeStruct((3, SIZE), dtype)
    forward = jax.make_jaxpr(Residuals(with_others(function), w, x, ()).forward)(w, x, ())
    assert str(forward).count("reduce_precision") == times


def test_an_array_that_is_needed_twice_is_kept_once() -> None:
    def twice(params: Any, x: jax.Array, context: Any) -> jax.Array:
        y = jnp.sin(x)
        return (y @ params) * (y @ (params * 2.0))

    w, x = jax.ShapeDtypeStruct((4, 4), jnp.float32), jax.ShapeDtypeStruct((2, 4), jnp.float32)
    assert [leaf.shape for leaf in Residuals(with_others(twice), w, x, ()).structs].count(
        (2, 4)
    ) <= 4


def test_only_floating_leaves_have_gradients() -> None:
    tree = {
        "a": jnp.ones(2),
        "b": (jnp.arange(3), jnp.ones(1, bool)),
        "c": jnp.ones(1, jnp.complex64),
    }
    assert [leaf.dtype.name for leaf in differentiable(tree)] == ["float32", "complex64"]
    new = replace_differentiable(tree, [jnp.zeros(2), jnp.zeros(1, jnp.complex64)])
    assert float(new["a"].sum()) == 0.0
    np.testing.assert_array_equal(new["b"][0], tree["b"][0])


@pytest.mark.parametrize("interval", [0, 1])
@pytest.mark.parametrize("scan_trunk", sweep(1, [False, True]))
@pytest.mark.parametrize("model", sweep(2, ["nnx", "attention", "dropout", "linen", "side"]))
def test_rings_hold_no_weights(model: str, scan_trunk: bool, interval: int) -> None:
    pipeline = Case(
        model=model, stages=2, interval=interval, scan_trunk=scan_trunk, cut="trunk"
    ).pipeline()
    weights = {(DIM, DIM), (DIM, 12), (12, DIM), (12,), (DIM,)}
    for leaf in jax.tree.leaves(pipeline.stage.residuals):
        assert tuple(leaf.shape) not in weights
        assert leaf.shape[:1] != (BLOCKS // 2,) or tuple(leaf.shape[1:]) not in weights
    bits = {f"{leaf.dtype}" for leaf in jax.tree.leaves(pipeline.stage.residuals)}
    assert not any(dtype.startswith("key") for dtype in bits)


def test_recompute_shrinks_what_is_kept() -> None:
    def residual_bytes(interval: int) -> int:
        stages = Case(stages=2, interval=interval, cut="trunk").pipeline().stage
        return sum(
            leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(stages.trunk.residuals)
        )

    everything, per_layer, per_pair = residual_bytes(0), residual_bytes(1), residual_bytes(2)
    assert everything > per_layer > per_pair


LAYERS: dict[str, Callable[..., jax.Array]] = {
    "dense": lambda p, x, key: x @ p,
    "gelu": lambda p, x, key: jax.nn.gelu(x),
    "relu": lambda p, x, key: jax.nn.relu(x),
    "softmax": lambda p, x, key: jax.nn.softmax(x),
    "dropout": lambda p, x, key: jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x * 2.0, 0.0),
    "perceptron": lambda p, x, key: x + jax.nn.gelu(x @ p) @ p,
    "inner": lambda p, x, key: x + jax.checkpoint(jax.nn.gelu)(x @ p) @ p,
    "attention": lambda p, x, key: (
        x + jax.nn.softmax((x @ p) @ (x @ p).swapaxes(-1, -2)) @ (x @ p.T)
    ),
    "frozen": lambda p, x, key: jax.nn.relu(x @ jnp.ones((SIZE, SIZE))),
    "narrow": lambda p, x, key: (x.astype(jnp.bfloat16) @ p.astype(jnp.bfloat16)).astype(
        jnp.float32
    ),
    "fourier": lambda p, x, key: jnp.real(jnp.fft.ifft(jnp.fft.fft(x) * p[:1])),
    "branch": lambda p, x, key: jax.lax.cond(
        x[0, 0] > 0, lambda x: x + jax.nn.gelu(x @ p), lambda x: x, x
    ),
    "loop": lambda p, x, key: jax.lax.scan(
        lambda x, _: (x + jnp.tanh(x @ p), None), x, None, length=3
    )[0],
}


def kept_by(names: tuple[str, ...], marked: tuple[int, ...]) -> int:
    """Bytes that a chain of layers keeps, some of them marked to be recomputed."""

    def function(params: Any, x: jax.Array, key: jax.Array) -> Any:
        for i, name in enumerate(names):
            layer = jax.checkpoint(LAYERS[name]) if i in marked else LAYERS[name]
            x = layer(params[i], x, jax.random.fold_in(key, i))
        return (x,), ()

    p, x = (
        jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32),
        jax.ShapeDtypeStruct((8, SIZE), jnp.float32),
    )
    residuals = Residuals(function, [p] * len(names), x, jax.eval_shape(lambda: jax.random.key(0)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in residuals.structs)


def check_marks(names: tuple[str, ...]) -> None:
    places = range(len(names))
    kept = {
        m: kept_by(names, m)
        for n in range(len(names) + 1)
        for m in itertools.combinations(places, n)
    }
    for fewer, more in itertools.permutations(kept, 2):
        if set(fewer) < set(more):
            assert kept[more] <= kept[fewer], f"{names}: {more} marked keep more than {fewer}"


@pytest.mark.parametrize("first", sweep(1, ["perceptron", "narrow", "inner"]))
@pytest.mark.parametrize(
    "second", ["dense", "softmax", "perceptron", "frozen", "branch", "fourier"]
)
def test_to_ask_for_recompute_never_keeps_more(first: str, second: str) -> None:
    check_marks((first, second))


@pytest.mark.soak
@pytest.mark.parametrize("first", LAYERS)
def test_to_ask_for_recompute_never_keeps_more_in_any_pair(first: str) -> None:
    for second in LAYERS:
        check_marks((first, second))


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [("narrow", "frozen", "narrow"), ("frozen", "dropout", "narrow"), ("branch",) * 3]
)
def test_to_ask_for_recompute_never_keeps_more_in_threes(names: tuple[str, ...]) -> None:
    check_marks(names)


@pytest.mark.parametrize("is_worth_it_first", [True, False])
def test_of_two_kinds_of_recompute_one_may_be_worth_it(is_worth_it_first: bool) -> None:
    """One keeps 4 x 8 inputs of what is 64 wide; the other would keep its wide input."""
    out = jnp.ones((64, 8))
    worth_it = jax.checkpoint(lambda x, up, across: jnp.tanh(jnp.tanh(x @ up) @ across))
    not_worth_it = jax.checkpoint(lambda y: jnp.tanh(y @ out))

    def function(params: Any, x: jax.Array, _: Any) -> Any:
        if not is_worth_it_first:
            x = not_worth_it(x @ params[0])
        y = worth_it(x, *params)
        return (not_worth_it(y) if is_worth_it_first else y,), ()

    args = (jnp.ones((8, 64)), jnp.ones((64, 64))), jnp.ones((4, 8)), ()
    kept = Residuals(function, *structs(args)).structs
    assert [leaf.shape for leaf in kept] == [(4, 8)] * 2


def test_recompute_of_arithmetic_alone_changes_nothing() -> None:
    assert kept_by(("inner",) * 3, ()) == kept_by(("perceptron",) * 3, ())
    assert kept_by(("dense", "softmax", "dense"), (1,)) == kept_by(
        ("dense", "softmax", "dense"), ()
    )


def test_layers_that_do_not_recompute_keep_as_little_beside_one_that_does() -> None:
    plain, one, every = (
        kept_by(("perceptron",) * 4, marked) for marked in ((), (1,), (0, 1, 2, 3))
    )
    inputs = 8 * SIZE * 4
    assert (plain, one, every) == (8 * inputs, 7 * inputs, 4 * inputs)


def test_a_branch_keeps_no_weights_and_one_with_recompute_its_inputs_alone() -> None:
    def branching(inner: Callable[..., Any]) -> Callable[..., Any]:
        def function(params: Any, x: jax.Array, context: Any) -> Any:
            return (
                jax.lax.cond(x[0, 0] > 0, lambda x: x + inner(x @ params) @ params, lambda x: x, x),
            ), ()

        return function

    w, x = (
        jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32),
        jax.ShapeDtypeStruct((3, SIZE), jnp.float32),
    )
    dear = jax.checkpoint(lambda x: jnp.sort(jnp.sin(x), -1))
    kept = [
        [leaf.shape for leaf in Residuals(branching(f), w, x, ()).structs]
        for f in (jax.nn.gelu, dear)
    ]
    assert kept == [[(3, SIZE), (3, SIZE)], [(3, SIZE)]]


@pytest.mark.parametrize("marked", sweep(1, [(0, 1), (), (0,), (1,)]))
@pytest.mark.parametrize(
    "names",
    [
        ("inner", "perceptron"),
        ("dense", "attention"),
        ("branch", "frozen"),
        ("loop", "dropout"),
        ("softmax", "fourier"),
    ],
    ids="-".join,
)
def test_gradients_with_marks(names: tuple[str, ...], marked: tuple[int, ...]) -> None:
    def function(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        for i, name in enumerate(names):
            layer = jax.checkpoint(LAYERS[name]) if i in marked else LAYERS[name]
            x = layer(params[i], x, jax.random.fold_in(key, i))
        return x

    rng = np.random.default_rng(1)
    params = [jnp.asarray(rng.normal(size=(SIZE, SIZE)) * 0.5, jnp.float32) for _ in names]
    args = params, jnp.asarray(rng.normal(size=(8, SIZE)), jnp.float32), jax.random.key(3)
    residuals = Residuals(lambda *args: ((function(*args),), ()), *structs(args))
    outputs, _, kept = jax.jit(residuals.forward)(*args)
    wanted, pullback = jax.vjp(lambda params, x: function(params, x, args[2]), params, args[1])
    assert_close(outputs[0], wanted)
    grads, dx = jax.jit(residuals.backward)(params, kept, [jnp.cos(wanted)])
    assert_close((grads, dx[0]), pullback(jnp.cos(wanted)))


def test_dependence_follows_calls_scans_and_conditionals() -> None:
    def function(a: jax.Array, b: jax.Array, c: jax.Array) -> tuple[jax.Array, ...]:
        inner = jax.jit(lambda x, y: (x * 2.0, y + 1.0))(a, b)
        carried, stacked = jax.lax.scan(
            lambda carry, x: ((carry[1], carry[0]), x * 2.0), (b, c), jnp.ones(4) * a
        )
        chosen = jax.lax.cond(a > 0, lambda: b, lambda: c)
        pair = jax.lax.cond(a > 0, lambda: (b, a, c), lambda: (b + 1.0, c, c + a))
        return *inner, *carried, stacked, chosen, *pair, jnp.zeros(3)

    closed = jax.make_jaxpr(function)(1.0, 2.0, 3.0)
    assert output_dependence(closed.jaxpr, [1, 2, 4]) == [1, 2, 6, 6, 1, 7, 3, 5, 5, 0]


def test_rotary_by_split_keeps_the_product_and_no_float32_halves() -> None:
    """Halves in float32 follow from the product by cheap equations, and take twice its bytes."""

    def function(params: Any, x: jax.Array, context: Any) -> Any:
        q = x @ params
        a, b = jnp.split(q.astype(jnp.float32), 2, axis=-1)
        turned = jnp.concatenate([a * 0.6 - b * 0.8, b * 0.6 + a * 0.8], -1).astype(q.dtype)
        return (jnp.einsum("ik,jk->ij", turned, turned),), ()

    structs = (
        jax.ShapeDtypeStruct((8, 8), jnp.bfloat16),
        jax.ShapeDtypeStruct((16, 8), jnp.bfloat16),
        (),
    )
    found = Residuals(function, *structs).structs
    assert sorted((str(s.dtype), s.shape) for s in found) == [("bfloat16", (16, 8))] * 2


def test_gradients_are_reduced_beside_one_that_is_a_constant_zero() -> None:
    def scaled(params: Any, x: jax.Array, context: Any) -> Any:
        return x @ params["w"] * params["s"] + jax.lax.stop_gradient(params["unused"]), ()

    params = {"s": jnp.float32(2), "unused": jnp.float32(1), "w": jnp.ones((3, 3))}
    x = jnp.arange(6.0).reshape(2, 3)
    run = Residuals(scaled, params, x, None)
    *_, kept = run.forward(params, x, None)
    found, _ = run.backward(params, kept, [jnp.ones((2, 3))], [(0, 1, 2)], lambda _, grad: 2 * grad)
    expected = jax.grad(lambda p: scaled(p, x, None)[0].sum())(params)
    assert_close(found, jax.tree.map(lambda grad: 2 * grad, expected))
