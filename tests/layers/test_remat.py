import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _covering import sweep
from flax import nnx

import jaxpipe
from jaxpipe import LayerSpec, PipelineModule, TiedLayerSpec
from jaxpipe.layers import layer_signatures
from jaxpipe.layers._remat import chain
from jaxpipe.layers.recompute import RecomputeSettings

DIM = 4
POLICIES = jax.checkpoint_policies


class Block(nn.Module):
    rate: float = 0.5

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        y = nn.Dropout(self.rate, deterministic=not train)(jnp.sin(jnp.tanh(nn.Dense(DIM)(x))))
        return x + nn.Dense(DIM)(jnp.sin(y))


class NNXBlock(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(DIM, DIM, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.drop(jnp.sin(jnp.tanh(self.dense(x))))


def _squares(size: int) -> Callable[[jax.Array], jax.Array]:
    return lambda x: jnp.sin(x * x) * size


def _specs() -> list[LayerSpec]:
    """One layer of each kind that a spec describes."""
    return [
        LayerSpec(Block),
        LayerSpec(NNXBlock),
        TiedLayerSpec("shared", Block, 0.3),
        LayerSpec(_squares, 1),
        TiedLayerSpec("shared", Block, 0.3, forward_fn=lambda module, x: jnp.sin(module(x))),
    ]


X = np.linspace(-1.0, 1.0, 12, dtype=np.float32).reshape(3, DIM)


def _loss(module: PipelineModule, params: Any, x: Any) -> jax.Array:
    return jnp.sum(module.apply(params, x, train=True, key=jax.random.key(5)) ** 2)


def _grads(module: PipelineModule, params: Any) -> Any:
    return jax.jit(jax.value_and_grad(functools.partial(_loss, module), argnums=(0, 1)))(
        params, jnp.asarray(X)
    )


def _residual_bytes(module: PipelineModule, params: Any) -> int:
    _, pullback = jax.vjp(functools.partial(_loss, module), params, jnp.asarray(X))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pullback))


def _assert_alike(ours: Any, theirs: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, theirs)


@pytest.fixture(scope="module")
def plain() -> tuple[Any, Any, int]:
    module = PipelineModule(_specs(), num_stages=1)
    params = module.init(jax.random.key(0), X)
    return params, _grads(module, params), _residual_bytes(module, params)


FUNCTIONS = {
    "default": None,
    "jax": jax.checkpoint,
    "with a policy": functools.partial(jax.checkpoint, policy=POLICIES.dots_saveable),
    "deepspeed's form": jaxpipe.checkpointing.checkpoint,
    "deepspeed's form, own": lambda function, *args: jax.checkpoint(function)(*args),
    "decorator, own": lambda function: jax.checkpoint(function),
}


@pytest.mark.slow
@pytest.mark.parametrize("interval", sweep(1, [2, 1, 5]))
@pytest.mark.parametrize("name", sweep(1, [*FUNCTIONS]))
def test_groups_change_no_gradient(plain: tuple[Any, Any, int], name: str, interval: int) -> None:
    params, expected, kept = plain
    module = PipelineModule(
        _specs(),
        num_stages=1,
        activation_checkpoint_interval=interval,
        activation_checkpoint_func=FUNCTIONS[name],
    )
    _assert_alike(_grads(module, params), expected)
    assert _residual_bytes(module, params) < kept


@pytest.mark.parametrize(
    "policy", sweep(1, [POLICIES.dots_saveable, None, POLICIES.save_only_these_names("none")])
)
@pytest.mark.parametrize("interval", [0, 2])
def test_marks_change_no_gradient(plain: tuple[Any, Any, int], policy: Any, interval: int) -> None:
    params, expected, kept = plain
    specs = [spec.remat(policy) for spec in _specs()]
    module = PipelineModule(specs, num_stages=1, activation_checkpoint_interval=interval)
    _assert_alike(_grads(module, params), expected)
    assert _residual_bytes(module, params) < kept


@pytest.mark.parametrize("index", sweep(2, [0, 4, 1, 2, 3]))
def test_one_mark_is_enough(plain: tuple[Any, Any, int], index: int) -> None:
    params, expected, kept = plain
    specs = _specs()
    specs[index] = specs[index].remat()
    module = PipelineModule(specs, num_stages=1)
    _assert_alike(_grads(module, params), expected)
    assert _residual_bytes(module, params) < kept


def test_marked_layers_keep_in_host_memory_what_is_configured(plain: tuple[Any, Any, int]) -> None:
    params, expected, _ = plain
    module = PipelineModule([spec.remat() for spec in _specs()], num_stages=1)
    with jaxpipe.checkpointing.use_settings(RecomputeSettings(checkpoint_in_cpu=True)):
        _assert_alike(_grads(module, params), expected)
        _, pullback = jax.vjp(functools.partial(_loss, module), params, jnp.asarray(X))
    hosted = [
        leaf.shape
        for leaf in jax.tree.leaves(pullback)
        if leaf.sharding.memory_kind == "pinned_host"
    ]
    assert hosted == [X.shape] * 5


def test_a_policy_keeps_what_it_says() -> None:
    def kept(policy: Any) -> int:
        module = PipelineModule([LayerSpec(Block).remat(policy)], num_stages=1)
        return _residual_bytes(module, module.init(jax.random.key(0), X))

    assert kept(None) < kept(POLICIES.dots_saveable) < kept(POLICIES.everything_saveable)


def test_evaluation_recomputes_nothing() -> None:
    module = PipelineModule(
        [LayerSpec(Block).remat()], num_stages=1, activation_checkpoint_interval=1
    )
    params = module.init(jax.random.key(0), X)
    assert "remat" not in str(jax.make_jaxpr(module.apply)(params, X))


def test_a_mark_leaves_the_spec_and_the_parameters() -> None:
    spec = TiedLayerSpec(
        "shared", Block, forward_fn=lambda module, x: module(x), tied_weight_attr="Dense_0"
    )
    marked = spec.remat()
    assert spec.remat_mark is None
    assert isinstance(marked, TiedLayerSpec)
    assert (marked.key, marked.forward_fn, marked.tied_weight_attr) == (
        spec.key,
        spec.forward_fn,
        ("Dense_0",),
    )
    shapes = [
        jax.tree.map(jnp.shape, PipelineModule([s], num_stages=1).init(jax.random.key(0), X))
        for s in (spec, marked)
    ]
    assert shapes[0] == shapes[1]


def test_a_mark_shows() -> None:
    assert repr(LayerSpec(Block, rate=0.1).remat()) == "Block(rate=0.1).remat()"
    marked = LayerSpec(Block).remat(
        POLICIES.save_from_both_policies(POLICIES.dots_saveable, POLICIES.dots_saveable)
    )
    assert repr(marked) == "Block().remat(policy=save_from_both_policies)"


def _own_policy(name: str) -> Callable[..., bool]:
    kept = [name]

    def policy(primitive: Any, *args: Any, limit: int = 3, **params: Any) -> bool:
        return primitive.name in kept

    return policy


@pytest.mark.parametrize("kind", sweep(1, [NNXBlock, Block]))
def test_layers_are_alike_where_their_marks_are(kind: type) -> None:
    def both(*names: str) -> Callable[..., Any]:
        return POLICIES.save_from_both_policies(*map(POLICIES.save_only_these_names, names))

    makers: list[Callable[[], LayerSpec]] = [
        lambda: LayerSpec(kind),
        lambda: LayerSpec(kind).remat(),
        lambda: LayerSpec(kind).remat(POLICIES.dots_saveable),
        lambda: LayerSpec(kind).remat(POLICIES.save_only_these_names("a")),
        lambda: LayerSpec(kind).remat(POLICIES.save_only_these_names("b")),
        lambda: LayerSpec(kind).remat(both("a", "b")),
        lambda: LayerSpec(kind).remat(both("a", "c")),
        lambda: LayerSpec(kind).remat(_own_policy("sin")),
        lambda: LayerSpec(kind).remat(_own_policy("tanh")),
        lambda: LayerSpec(kind).remat(functools.partial(POLICIES.dots_saveable)),
    ]
    module = PipelineModule([make() for _ in range(2) for make in makers], num_stages=1)
    trace = module.trace(X)
    n = len(makers)
    assert trace.firsts == tuple(range(n)) * 2
    assert layer_signatures(module.layers, trace) == tuple(range(n)) * 2


def test_only_alike_layers_are_cut_as_a_trunk() -> None:
    specs = [LayerSpec(Block).remat(POLICIES.save_only_these_names("a")) for _ in range(4)]
    module = PipelineModule([LayerSpec(Block), *specs], num_stages=2, partition_method="trunk")
    trace = module.trace(X)
    assert module.partition(trace) == (0, 3, 5)
    assert layer_signatures(module.layers, trace) == (0, 1, 1, 1, 1)


def _wrap(log: list[str]) -> tuple[list[Callable[[list[str]], list[str]]], Callable[..., Any]]:
    """Five calls that say their letter, and a function that says where a group begins and ends."""
    calls: list[Callable[[list[str]], list[str]]] = [
        lambda x, c=c: log.append(c) or x for c in "abcde"
    ]

    def remat(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(x: Any) -> Any:
            log.append("(")
            x = function(x)
            log.append(")")
            return x

        return run

    return calls, remat


@pytest.mark.parametrize(
    ("interval", "marked", "expected"),
    [
        (0, None, "abcde"),
        (0, "b", "abcde"),
        (1, None, "(a)(b)(c)(d)(e)"),
        (2, None, "(ab)(cd)(e)"),
        (5, None, "(abcde)"),
        (2, "b", "(a)b(cd)(e)"),
        (2, "cd", "(ab)cd(e)"),
        (5, "c", "(ab)c(de)"),
        (3, "ae", "a(bc)(d)e"),
        (5, "abcde", "abcde"),
    ],
)
@pytest.mark.parametrize("at_once", [False, True])
def test_marked_calls_stand_outside_groups(
    interval: int, marked: str | None, expected: str, at_once: bool
) -> None:
    log: list[str] = []
    calls, remat = _wrap(log)
    marks = None if marked is None else [c in marked for c in "abcde"]
    wrap = (lambda function, *args: remat(function)(*args)) if at_once else remat
    assert chain(calls, interval, wrap, marks)("x") == "x"
    assert "".join(log) == expected


@pytest.mark.parametrize(
    ("interval", "may", "marked", "expected"),
    [
        (1, "abd", "", "(a)(b)c(d)e"),
        (2, "abd", "", "(ab)cde"),
        (2, "abde", "c", "(ab)c(d)(e)"),
        (5, "abcd", "", "abcde"),
        (0, "abcde", "", "abcde"),
        (2, "", "", "abcde"),
    ],
)
def test_groups_hold_what_may_be_recomputed_alone(
    interval: int, may: str, marked: str, expected: str
) -> None:
    log: list[str] = []
    calls, remat = _wrap(log)
    chosen = [[c in names for c in "abcde"] for names in (marked, may)]
    assert chain(calls, interval, remat, *chosen)("x") == "x"
    assert "".join(log) == expected


@pytest.mark.slow
def test_checkpointable_layers_are_recomputed_alone() -> None:
    module = PipelineModule([LayerSpec(Block), LayerSpec(NNXBlock), LayerSpec(Block)], num_stages=1)
    params = module.init(jax.random.key(0), X)
    every = module.replace(activation_checkpoint_interval=1)
    chosen = every.replace(checkpointable_layers=["NNXBlock"])
    kept = [_residual_bytes(each, params) for each in (module, chosen, every)]
    assert kept[0] > kept[1] > kept[2]
    assert (
        _residual_bytes(every.replace(checkpointable_layers=["NNXBlock", "Block"]), params)
        == kept[2]
    )
    _assert_alike(_grads(chosen, params), _grads(module, params))


def _at_once(function: Callable[..., Any], x: Any) -> Any:
    return function(x)


class _Callable:
    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


@pytest.mark.parametrize(
    "remat",
    [_at_once, _Callable(), functools.partial(_at_once)],
    ids=["function", "object", "partial"],
)
def test_functions_that_call_at_once_are_told(remat: Callable[..., Any]) -> None:
    assert chain([lambda x: x + 1], 1, remat)(1) == 2


@pytest.mark.parametrize(
    "remat",
    [
        lambda function, policy=None: function,
        lambda function, *, policy=None: function,
        nnx.remat,
        jax.checkpoint,
    ],
)
def test_functions_that_wrap_are_told(remat: Callable[..., Any]) -> None:
    assert chain([lambda x: x + 1], 1, remat)(jnp.ones(())) == 2


class _Opaque:
    __signature__ = "unknown"

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function


def test_a_function_without_a_signature_wraps() -> None:
    assert chain([lambda x: x + 1], 1, _Opaque())(1) == 2
