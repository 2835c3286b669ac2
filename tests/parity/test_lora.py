"""Adapters: they begin as the base, train as on one device, and merge into plain weights."""

from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import sweep
from _frozen import check
from _models import (
    ALL_MODELS,
    BLOCKS,
    DIM,
    LENGTH,
    VOCAB,
    Attention,
    Embed,
    Head,
    Model,
    NNXBlock,
    NNXEmbed,
)
from _oracle import Case
from _refusals import assert_refused
from _tolerances import assert_close
from flax import nnx

import jaxpipe
from jaxpipe import LayerSpec, PipelineModule, TiedLayerSpec, checkpoint
from jaxpipe.errors import LayerError
from jaxpipe.layers import LORA_PARAMETERS, flatten_dict, lora, merge_lora

RANK, ALPHA = 2, 6.0
ADAM = optax.adamw(1e-2, eps=1e-2, weight_decay=0.1)
"""A large eps.

B is zero at first, and of a gradient that is nothing but rounding Adam would make a whole step.
"""

IDS = np.arange(2 * LENGTH).reshape(2, LENGTH) % VOCAB


class Heads(nn.Module):
    """Of `DenseGeneral` and `Einsum`."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.DenseGeneral((2, 4), name="split")(x)
        y = nn.Einsum((DIM, 2, 4), "...d,dnh->...nh", name="einsum")(x) + jnp.tanh(y)
        return x + nn.DenseGeneral(DIM, axis=(-1, 2), name="join")(y)  # Flax sorts the axes


# One class, whose traces `nn.jit` keeps: those of the base are not those with adapters.
Jitted = nn.jit(Heads)


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def body(dense: nn.Module, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.tanh(dense(x)), None

        run = nn.scan(body, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return run(nn.Dense(DIM, name="dense"), x, None)[0]


class NNXHeads(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.split = nnx.LinearGeneral(DIM, (4, 4), rngs=rngs)
        self.einsum = nnx.Einsum("btd,dnh->btnh", (DIM, 4, 4), (4, 4), rngs=rngs)
        self.join = nnx.LinearGeneral((4, 4), DIM, axis=(-1, -2), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.join(jnp.tanh(self.split(x)) + self.einsum(x))


BASES: dict[str, Any] = {
    "linen": (
        lambda: [Embed(), *[LayerSpec(Attention)] * BLOCKS, Head()],
        ["query", "value", "Head"],
    ),
    "general": (
        lambda: [Embed(), Heads(), LayerSpec(Heads), Heads(), Heads(), nn.Dense(VOCAB)],
        ["_Heads/", "Dense"],
    ),
    "nnx": (
        lambda: [
            LayerSpec(NNXEmbed),
            *[LayerSpec(NNXBlock)] * 4,
            LayerSpec(nnx.Linear, DIM, VOCAB),
        ],
        [r"layers/"],
    ),
    "nnx_general": (
        lambda: [Embed(), *[LayerSpec(NNXHeads)] * 4, nn.Dense(VOCAB)],
        "split|join|einsum",
    ),
    "jitted": (lambda: [Embed(), *[LayerSpec(Jitted)] * 4, nn.Dense(VOCAB)], ["_JitHeads/"]),
    "scanned": (lambda: [Embed(), *[LayerSpec(Scanned)] * 4, Head()], "dense"),
    "tied": (
        lambda: [
            nn.Embed(VOCAB, DIM),
            *[TiedLayerSpec("block", Attention) for _ in range(2)],
            LayerSpec(Attention, forward_fn=lambda block, x: block(x) * 2.0),
            nn.Dense(VOCAB),
        ],
        r"tied/block/key|3_Attention/value",
    ),
    # The kernel of `value` is shared, and so is its adapter.
    "tied_in_part": (
        lambda: [
            nn.Embed(VOCAB, DIM),
            *[TiedLayerSpec("block", Attention, tied_weight_attr="value.kernel") for _ in range(2)],
            nn.Dense(VOCAB),
        ],
        ["layers/2_Attention/key/kernel", "tied/block/value/kernel"],
    ),
}


def adapted(name: str) -> list[Any]:
    layers, targets = BASES[name]
    return lora(layers(), RANK, ALPHA, targets)


ALL_MODELS.update({f"lora_{name}": Model(lambda name=name: adapted(name)) for name in BASES})


def filled(tree: Any) -> Any:
    """With a B that is not zero."""
    return jax.tree.map_with_path(
        lambda path, x: x + 0.1 if "lora_b" in jax.tree_util.keystr(path) else x, tree
    )


@pytest.mark.parametrize("name", sweep(1, sorted(BASES, key=lambda name: name != "general")))
def test_it_begins_as_the_base_and_merges_into_it(name: str) -> None:
    base = PipelineModule(BASES[name][0](), num_stages=1)
    model = PipelineModule(adapted(name), num_stages=1, trainable=LORA_PARAMETERS)
    plain, params = (each.init(jax.random.key(0), IDS) for each in (base, model))
    wanted, found = flatten_dict(plain), flatten_dict(params)
    assert {path for path in found if path[-1] not in ("lora_a", "lora_b")} == set(wanted)
    assert len(found) > len(wanted)
    for path, leaf in wanted.items():
        np.testing.assert_array_equal(found[path], leaf)
    np.testing.assert_array_equal(model.apply(params, IDS), base.apply(plain, IDS))
    changed = filled(params)
    outputs = model.apply(changed, IDS)
    assert np.abs(outputs - base.apply(plain, IDS)).max() > 1e-3
    merged = merge_lora(changed, ALPHA)
    assert jax.tree.structure(merged) == jax.tree.structure(jax.device_get(plain))
    np.testing.assert_allclose(base.apply(merged, IDS), outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            Case(
                "lora_linen",
                2,
                2,
                schedule="zero-bubble",
                optimizer=ADAM,
                settings={"zero_stage": 1},
            ),
            marks=pytest.mark.soak,
        ),
        *[
            pytest.param(
                Case(f"lora_{name}", 2, 2, schedule=schedule, optimizer=ADAM),
                marks=pytest.mark.soak,
            )
            for name, schedule in (
                ("general", "1f1b"),
                ("nnx", "zero-bubble"),
                ("nnx_general", "1f1b"),
                ("tied", "1f1b"),
                ("scanned", "1f1b"),
            )
        ],
    ],
    ids=str,
)
def test_three_steps_equal_those_of_one_device(case: Case) -> None:
    check(case, LORA_PARAMETERS)


def test_adapters_are_sharded_as_their_kernels() -> None:
    init = nn.initializers.lecun_normal()
    names = {"kernel_init": nn.with_partitioning(init, (None, "model"))}
    rows = {"kernel_init": nn.with_partitioning(init, ("model", None))}
    topology = jaxpipe.PipeModelDataParallelTopology(1, 2, 1)
    layers = [LayerSpec(nn.Dense, DIM, **names), LayerSpec(nn.Dense, DIM, **rows)]
    model = PipelineModule(lora(layers, RANK, ALPHA, "Dense"), topology=topology)
    mesh = jaxpipe.mesh_for(model, jax.devices()[:2]).abstract_mesh
    specs = {
        "/".join(path[1:]): tuple(spec)
        for path, spec in model.trace(np.ones((2, 4)), None, mesh).tree_specs().items()
    }
    assert specs == {
        "0_Dense/kernel": (None, "model"),
        "0_Dense/lora_b": (None, "model"),
        "1_Dense/kernel": ("model", None),
        "1_Dense/lora_a": ("model", None),
    }


@pytest.mark.slow
def test_a_checkpoint_may_hold_the_adapters_alone(tmp_path: Path) -> None:
    model = PipelineModule(
        adapted("tied"),
        num_stages=2,
        loss_fn=lambda y, t: jnp.mean((y - 1.0) ** 2),
        trainable="lora",
    )
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    mesh = jaxpipe.mesh_for(model, jax.devices()[:2])
    engine = jaxpipe.initialize(
        model=model, optimizer=ADAM, config=config, mesh=mesh, example_batch=(IDS, IDS)
    )[0]
    engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    saved = flatten_dict(checkpoint.load_params(tmp_path))
    assert {path[-1] for path in saved} == {"lora_a", "lora_b"}
    words = "must find a kernel and lora_b beside ... Load the checkpoint of adapters into"
    assert_refused(LayerError, words, merge_lora, checkpoint.load_params(tmp_path), ALPHA)


def test_a_pattern_finds_the_path_in_the_whole_model() -> None:
    model = [nn.Embed(VOCAB, DIM), *lora([nn.Dense(DIM), nn.Dense(DIM)], 2, 1.0, "2_Dense/kernel")]
    found = flatten_dict(PipelineModule(model, num_stages=1).init(jax.random.key(0), IDS))
    assert [path[1] for path in found if path[-1] == "lora_a"] == ["2_Dense"]


class Own(nn.Dense):
    """A kernel, and parameters with the names of its adapter."""

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        init = nn.initializers.lecun_normal()
        kernel, a, b = (
            self.param(name, init, (DIM, DIM)) for name in ("kernel", "lora_a", "lora_b")
        )
        return inputs @ kernel + jnp.tanh(inputs @ a) @ b


class OwnNNX(nnx.Linear):
    def __init__(self, *args: Any, rngs: nnx.Rngs) -> None:
        super().__init__(*args, rngs=rngs)
        self.lora_b = nnx.Param(jnp.ones((DIM, DIM)))


def test_a_parameter_with_the_name_of_an_adapter_is_not_shared_as_one() -> None:
    own = TiedLayerSpec("own", Own, DIM, tied_weight_attr="kernel")
    model = PipelineModule([*lora([nn.Dense(DIM)], 2, ALPHA, "kernel"), own, own], num_stages=1)
    x = np.asarray(jax.random.normal(jax.random.key(0), (2, DIM)))
    params = model.init(jax.random.key(1), x)
    assert params["tied"]["own"].keys() == {"kernel"}
    module = {
        name: {**leaves, **params["tied"]["own"]} for name, leaves in params["layers"].items()
    }
    wanted = nn.Dense(DIM).apply({"params": params["layers"]["0_Dense"]}, x)
    for name in ("1_Own", "2_Own"):
        wanted = Own(DIM).apply({"params": module[name]}, wanted)
    assert_close(model.apply(params, x), wanted)
    assert {path[1] for path in model.trace(x).adapters} == {"0_Dense"}


def test_what_cannot_have_adapters_is_refused() -> None:
    refused = partial(assert_refused, LayerError)
    refused("rank must be an integer >= 1, but got rank=0", lora, [nn.Dense(3)], 0, 1.0, "a")
    refused("rank must be an integer >= 1, but got rank=2.0", lora, [nn.Dense(3)], 2.0, 1.0, "a")
    words = "targets must be a pattern or a list of patterns, but got targets=[]"
    refused(words, lora, [nn.Dense(3)], 2, 1.0, [])
    words = "kernels that can have adapters, but got 2 layers"
    refused(words, lora, [nn.Embed(3, 3), jnp.tanh], 2, 1.0, "kernel")
    tied = [TiedLayerSpec("t", nn.Dense, DIM, tied_weight_attr="kernel") for _ in range(2)]
    model = PipelineModule([*lora(tied[:1], 2, 1.0, "kernel"), tied[1]], num_stages=1)
    words = "adapter in every layer that uses it ... 'tied/t/kernel' without it in layer 1_Dense"
    refused(words, model.trace, np.ones((2, DIM), np.float32))

    def trace(layers: list[Any], targets: Any, *shape: int) -> None:
        model = PipelineModule(lora(layers, 2, ALPHA, targets), num_stages=1)
        model.trace(np.ones(shape, np.float32))

    for layer in (LayerSpec(Own, DIM), LayerSpec(OwnNNX, DIM, DIM)):
        words = "no parameters lora_a and lora_b of their own, ... Own"
        refused(words, trace, [layer], "kernel", 2, DIM)
    pair = [nn.Dense(3), nn.Dense(3)]
    for layer in (nn.Sequential(pair), LayerSpec(nn.Sequential, pair), LayerSpec(NNXBlock)):
        targets = ["1_.*kernel", "qery/kernel"]
        words = "must each find a kernel ... but got 'qery/kernel', which ... nearest are: layers/"
        refused(words, trace, [nn.Dense(DIM), layer], targets, 2, LENGTH, DIM)
    for equation, kernel, shape in (
        ("bd,ndh->bnh", (2, 4, 3), (2, 4)),
        ("bdd,dnh->bnh", (4, 2, 3), (2, 4, 4)),
    ):
        words = f"Einsum with the equation '{equation}'. Leave it out of targets, or write"
        refused(words, trace, [nn.Einsum(kernel, equation)], "Einsum", *shape)


class ScaledDense(nn.Dense):
    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        return super().__call__(2 * super().__call__(3 * inputs))


@pytest.mark.parametrize(
    "layer",
    [LayerSpec(nn.Einsum, (4, 4, 3), "b...d,bdf->...f"), LayerSpec(ScaledDense, 4)],
    ids=["letters-before-an-ellipsis", "calls-of-the-base-class"],
)
def test_the_adapter_is_that_of_the_merged_kernel(layer: LayerSpec) -> None:
    x = jax.random.normal(jax.random.key(0), (4, 4, 4))
    model = PipelineModule(lora([layer], 2, ALPHA, "kernel"), num_stages=1)
    params = jax.tree.map(lambda leaf: leaf + 0.1 * x.ravel()[0], model.init(jax.random.key(1), x))
    merged = PipelineModule([layer], num_stages=1).apply(merge_lora(params, ALPHA), x)
    assert_close(model.apply(params, x), merged)


def test_adapters_of_two_calls_have_their_own_ranks() -> None:
    for block in (LayerSpec(Attention), LayerSpec(NNXBlock)):
        kernels = {path[-2] for path in flatten_dict(params_of([block])) if path[-1] == "kernel"}
        first, second = sorted(kernels)[:2]
        adapted = lora(lora([block], 2, ALPHA, f"/{first}/"), 3, ALPHA, f"/{second}/")
        made = flatten_dict(params_of(adapted))
        ranks = {path[-2]: leaf.shape[-1] for path, leaf in made.items() if path[-1] == "lora_a"}
        assert ranks == {first: 2, second: 3}
        adapted = lora(lora([block], 2, ALPHA, first), 3, ALPHA, f"{first}|{second}")
        words = "one adapter, but got targets of 2 calls of lora that find 'layers/0_"
        assert_refused(LayerError, words, params_of, adapted)


def params_of(layers: list[Any]) -> Any:
    model = PipelineModule(layers, num_stages=1)
    return jax.eval_shape(
        lambda: model.init(jax.random.key(0), np.ones((2, LENGTH, DIM), np.float32))
    )


class Twice(nnx.Module):
    """Of a list, of one projection under two names, and of what Flax wrote."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(DIM, DIM, rngs=rngs)
        self.again = self.first
        self.several = nnx.List([nnx.Linear(DIM, DIM, use_bias=False, rngs=rngs)])
        self.attention = nnx.MultiHeadAttention(2, DIM, decode=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        assert self.first.out_features == self.several[0].out_features == DIM
        return self.again(x) + self.first(jnp.tanh(self.several[0](x))) + self.attention(x)


@pytest.mark.slow
def test_an_adapter_of_nnx_is_wherever_its_projection_is() -> None:
    x = np.asarray(jax.random.normal(jax.random.key(1), (2, LENGTH, DIM)))
    base, model = (
        PipelineModule(each, 1)
        for each in ([LayerSpec(Twice)], lora([LayerSpec(Twice)], 2, ALPHA, ""))
    )
    plain, params = (filled(each.init(jax.random.key(0), x)) for each in (base, model))
    named = flatten_dict(plain)
    assert {path for path in flatten_dict(params) if path[-1] not in ("lora_a", "lora_b")} == set(
        named
    )
    assert sum(path[-1] == "lora_a" for path in flatten_dict(params)) == 6
    np.testing.assert_allclose(
        base.apply(merge_lora(params, ALPHA), x), model.apply(params, x), rtol=1e-4, atol=1e-5
    )
