"""DeepSpeed's transformer layer.

Values, gradients, initial weights, what it keeps, and what it refuses.
"""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _covering import sweep
from _reference import dropout_of
from _reference import layer as reference
from _refusals import check_refused
from _tolerances import assert_close
from flax.core import meta

from jaxpipe import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer, PipeDataParallelTopology
from jaxpipe.checkpointing import keep_kernels, use_settings
from jaxpipe.config import ConfigWarning
from jaxpipe.errors import LayerError
from jaxpipe.layers.recompute import RecomputeSettings
from jaxpipe.topology import make_pipeline_mesh

B, T, H, N = 2, 6, 16, 4
LENGTHS = jnp.array([6, 4])
SEEN = jnp.arange(T)[None] < LENGTHS[:, None]
X = jax.random.normal(jax.random.key(1), (B, T, H))
GRAD = jax.random.normal(jax.random.key(2), (B, T, H))


def make_config(**given: Any) -> DeepSpeedTransformerConfig:
    sizes = {"hidden_size": H, "heads": N, "num_hidden_layers": 2, "initializer_range": 0.2}
    return DeepSpeedTransformerConfig(**{**sizes, **given})


@functools.cache
def weights(seed: int = 0) -> Any:
    """All of them random: biases and norms are not left at zero and one."""
    params = meta.unbox(
        DeepSpeedTransformerLayer(make_config()).init(jax.random.key(0), X)["params"]
    )
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(
        treedef,
        [x + 0.1 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)],
    )


def run(function: Any, params: Any, x: Any = X, grad: Any = GRAD) -> Any:
    out, pullback = jax.jit(lambda *args: jax.vjp(function, *args))(params, x)
    return jax.device_get((out, pullback(grad)))


HIDDEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "mask": ({"attention_mask": SEEN}, {"seen": SEEN[:, None, None]}),
    "integers": (
        {"attention_mask": SEEN[:, None, None].astype(int)},
        {"seen": SEEN[:, None, None]},
    ),
    "added": ({"attention_mask": jnp.where(SEEN, 0.0, -2.0)[:, None, None]},) * 2,
    "lengths": ({"lengths": LENGTHS}, {"seen": SEEN[:, None, None]}),
}
HIDDEN["added"] = (HIDDEN["added"][0], {"added": jnp.where(SEEN, 0.0, -2.0)[:, None, None]})


@pytest.mark.parametrize("pre_layer_norm", [True, False])
@pytest.mark.parametrize(
    ("hidden", "causal"),
    sweep(1, [("lengths", True), *((name, False) for name in HIDDEN)], unpack=True),
)
def test_it_is_the_reference(pre_layer_norm: bool, hidden: str, causal: bool) -> None:
    config = make_config(pre_layer_norm=pre_layer_norm, causal=causal)
    given, known = HIDDEN[hidden]
    module = DeepSpeedTransformerLayer(config)
    found = run(lambda p, x: module.apply({"params": p}, x, **given, train=True), weights())
    assert_close(found, run(lambda p, x: reference(config, p, x, **known), weights()))


@pytest.mark.parametrize(
    "switches",
    sweep(1, [{}, {"recompute": "all"}, {"gelu_checkpoint": True}, {"recompute": "kernels"}]),
)
def test_dropout_is_that_of_its_key_also_where_it_recomputes(switches: dict[str, Any]) -> None:
    config = make_config(attn_dropout_ratio=0.3, hidden_dropout_ratio=0.2, seed=5, **switches)
    module, key = DeepSpeedTransformerLayer(config), jax.random.key(7)
    found = run(
        lambda p, x: module.apply({"params": p}, x, train=True, rngs={"dropout": key}), weights()
    )
    drop = dropout_of(key, config.seed)
    assert_close(found, run(lambda p, x: reference(config, p, x, drop=drop), weights()))
    plain = module.apply({"params": weights()}, X)
    assert_close(plain, reference(config, weights(), X))
    off = DeepSpeedTransformerLayer(make_config(attn_dropout_ratio=0.3, training=False))
    assert_close(off.apply({"params": weights()}, X, train=True), plain)


def test_stochastic_mode_drops_by_another_generator() -> None:
    plain, quick = (
        make_config(hidden_dropout_ratio=0.5, stochastic_mode=on) for on in (False, True)
    )
    one, two = (
        DeepSpeedTransformerLayer(config).apply(
            {"params": weights()}, X, train=True, rngs={"dropout": jax.random.key(0)}
        )
        for config in (plain, quick)
    )
    assert np.mean(np.asarray(one == two)) < 0.9
    assert "rbg" in str(
        jax.make_jaxpr(
            lambda x: DeepSpeedTransformerLayer(quick).apply(
                {"params": weights()}, x, train=True, rngs={"dropout": jax.random.key(0)}
            )
        )(X)
    )


def kept_bytes(train: bool = True, size: int = 64, **given: Any) -> int:
    """What `jax.vjp` keeps of a layer, weights included."""
    config = DeepSpeedTransformerConfig(
        hidden_size=32, heads=4, num_hidden_layers=2, causal=True, **given
    )
    module, x = DeepSpeedTransformerLayer(config), jax.ShapeDtypeStruct((2, size, 32), jnp.float32)

    def pullback(params: Any, x: Any) -> Any:
        rngs = {"dropout": jax.random.key(0)}
        return jax.vjp(lambda p, x: module.apply(p, x, train=train, rngs=rngs), params, x)[1]

    params = meta.unbox(jax.eval_shape(module.init, jax.random.key(0), x))
    return sum(
        leaf.size * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(jax.eval_shape(pullback, params, x))
    )


@pytest.mark.filterwarnings("ignore:No effect. attn_dropout_checkpoint")
@pytest.mark.parametrize(
    "given",
    sweep(1, [{}, {"attention": "xla", "pre_layer_norm": False}, {"hidden_dropout_ratio": 0.1}]),
)
def test_a_switch_never_adds_to_what_is_kept(given: dict[str, Any]) -> None:
    names = "normalize_invertible", "gelu_checkpoint", "attn_dropout_checkpoint"
    found = {
        mask: kept_bytes(**given, **{name: bool(mask >> i & 1) for i, name in enumerate(names)})
        for mask in range(8)
    }
    for mask, size in found.items():
        for i in range(3):
            assert found[mask | 1 << i] <= size, (mask, i)
    unit = 2 * 64 * 32 * 4
    assert found[2] - found[3] >= 0.9 * unit, "a norm's result or two, less its statistics"
    assert found[1] - found[3] == 4 * unit, "the activation function's result"
    with_kernels, nothing = (kept_bytes(**given, recompute=name) for name in ("kernels", "all"))
    assert nothing <= with_kernels <= found[7] - 7 * unit


def test_a_policy_of_the_users_own() -> None:
    assert kept_bytes(recompute=keep_kernels) == kept_bytes(recompute="kernels")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adjust", "share"), sweep(1, [(True, (2 * 8) ** -0.5), (False, 1.0)], unpack=True)
)
def test_initial_weights_have_the_ranges_asked_for(adjust: bool, share: float) -> None:
    config = DeepSpeedTransformerConfig(
        hidden_size=128,
        heads=2,
        num_hidden_layers=8,
        initializer_range=0.1,
        adjust_init_range=adjust,
    )
    module = DeepSpeedTransformerLayer(config)
    params = meta.unbox(module.init(jax.random.key(0), jnp.ones((1, 2, 128)))["params"])
    deviations = {name: float(value.std()) for name, value in params.items()}
    for name in ("attn_qkvw", "inter_w"):
        assert deviations[name] == pytest.approx(0.1, rel=0.02)
    for name in ("attn_ow", "output_w"):
        assert deviations[name] == pytest.approx(0.1 * share, rel=0.02)
    assert params["attn_qkvw"].shape == (128, 3, 2, 64)
    assert deviations["attn_qkvb"] == deviations["norm_w"] == 0.0
    assert params["norm_w"][0] == 1.0


def test_given_weights_are_laid_out_as_torch_lays_them_out() -> None:
    rng = np.random.default_rng(0)
    shapes = [(H, H)] * 4 + [(H,), (4 * H, H), (H, 4 * H), (H,)]
    ws, bs = (
        [rng.normal(size=shape[:dims]).astype(np.float32) for shape in shapes] for dims in (2, 1)
    )
    module = DeepSpeedTransformerLayer(make_config(), ws, bs)
    params = meta.unbox(module.init(jax.random.key(0), X)["params"])
    qkv = jnp.einsum("bth,hcnd->btcnd", X, params["attn_qkvw"]) + params["attn_qkvb"][None, None]
    wanted = np.stack(
        [X @ w.T + b[None, None] for w, b in zip(ws[:3], bs[:3], strict=True)], axis=2
    )
    np.testing.assert_allclose(qkv.reshape(B, T, 3, H), wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(params["attn_ow"].reshape(H, H), ws[3].T)
    np.testing.assert_array_equal(params["output_w"], ws[6].T)
    np.testing.assert_array_equal(params["norm_b"], bs[7])
    assert hash(module) == hash(module.clone())
    with pytest.raises(
        LayerError, match=r"initial_biases must be eight arrays of shapes \[\(16,\), .*but got \[\]"
    ):
        DeepSpeedTransformerLayer(make_config(), initial_biases=[])


@pytest.mark.slow
def test_tuples_of_one() -> None:
    module = DeepSpeedTransformerLayer(make_config(huggingface=True))
    (found,) = module.apply({"params": weights()}, (X,))
    assert_close(found, reference(make_config(), weights(), X))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "coming", "computed"),
    sweep(
        2,
        [
            ({"dtype": "bfloat16"}, "float32", "bfloat16"),
            ({}, "float16", "float16"),
            ({"fp16": True}, "float32", "float16"),
        ],
        unpack=True,
    ),
)
def test_it_computes_in_the_dtype_asked_for(
    given: dict[str, Any], coming: str, computed: str
) -> None:
    module = DeepSpeedTransformerLayer(make_config(**given))
    x = X.astype(coming)
    assert module.apply({"params": weights()}, x).dtype == coming
    text = str(jax.make_jaxpr(lambda x: module.apply({"params": weights()}, x))(x))
    assert (
        f"{jnp.dtype(computed).name.replace('bfloat', 'bf').replace('float', 'f')}[2,6,3,4,4] = "
        "dot_general" in text
    )


def test_no_effect_is_said() -> None:
    module = DeepSpeedTransformerLayer(make_config(gelu_checkpoint=True, stochastic_mode=True))
    mesh = make_pipeline_mesh(PipeDataParallelTopology(1, 1))
    with warnings.catch_warnings(record=True) as found, use_settings(RecomputeSettings(), mesh):
        warnings.simplefilter("always")
        for _ in range(2):
            module.apply({"params": weights()}, X, train=True)
    messages = [str(each.message) for each in found if each.category is ConfigWarning]
    assert len(messages) == 2
    assert "gelu_checkpoint" in messages[0]
    assert "stochastic_mode" in messages[1]


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"hidden_states": X[0]}, r"\[B, T, hidden_size=16\], but got float32\[6, 16\]"),
    ({}, {"hidden_states": (X, X)}, "but got 2 arrays. Pass masks as side inputs"),
    ({"batch_size": 1}, {}, "at most batch_size=1 samples, but got 2"),
    ({"max_seq_length": 5}, {}, "at most max_seq_length=5 positions, but got 6"),
    (
        *({"fp16": True}, {"hidden_states": X.astype("bfloat16")}),
        "but got bfloat16, in which .* Leave fp16 out",
    ),
    ({}, {"attention_mask": SEEN.astype(float)}, r"got float32\[2, 6\]. Compare a float mask"),
    ({}, {"attention_mask": SEEN[:, :5]}, r"attention_mask must .*\[2, 6\].* got bool\[2, 5\]"),
    ({}, {"lengths": jnp.ones(3, int)}, r"lengths .* of shape \[2\], but got int32\[3\]"),
]


def test_what_does_not_fit_is_refused() -> None:
    for config, given, words in REFUSED:
        module = DeepSpeedTransformerLayer(make_config(**config))
        call = functools.partial(module.apply, {"params": weights()})
        call = functools.partial(call, **{"hidden_states": X, **given})
        check_refused(LayerError, [(words, call)])


def test_what_is_no_configuration_or_number_is_refused() -> None:
    with pytest.raises(LayerError, match="DeepSpeedTransformerConfig, but got a dict"):
        DeepSpeedTransformerLayer({"hidden_size": 8})  # type: ignore
    with pytest.raises(LayerError, match="numbered by their position in the list"):
        _ = DeepSpeedTransformerLayer(make_config()).layer_id
