"""Which parameters are hidden matrices, whatever they and their layers are called."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import sweep
from _tolerances import assert_close
from flax import nnx

import jaxpipe
from jaxpipe import LayerSpec, PipelineModule, ProcessTopology, TiedLayerSpec
from jaxpipe.layers import flatten_dict, hidden_matrices, unflatten_dict
from jaxpipe.models import LlamaConfig, llama
from jaxpipe.optim import make_optimizer
from jaxpipe.topology import make_pipeline_mesh

VOCABULARY, WIDTH = 16, 8
TOKENS = jax.ShapeDtypeStruct((2, 6), jnp.int32)
FEATURES = jax.ShapeDtypeStruct((2, WIDTH), jnp.float32)


class EmbedBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = nn.tanh(nn.Dense(WIDTH, name="lm_head")(x))
        return x + nn.remat(nn.Dense)(WIDTH, name="bias")(hidden)


class Rows(nn.Module):
    """An embedding by a product, and positions that are added."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        table = self.param("kernel", nn.initializers.normal(), (VOCABULARY, WIDTH))
        places = self.param("places", nn.initializers.normal(), (6, WIDTH))
        return jax.nn.one_hot(tokens, VOCABULARY) @ table + places[None]


class Table(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(rngs.normal((VOCABULARY, WIDTH)))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.kernel[...][tokens]


class Language(nn.Module):
    """A model of one layer that returns its loss."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCABULARY, WIDTH, name="table")(tokens)
        x = nn.MultiHeadDotProductAttention(2, name="attention")(EmbedBlock(name="block")(x))
        logs = nn.log_softmax(nn.Dense(VOCABULARY, name="last")(nn.LayerNorm()(x)))
        return -jnp.take_along_axis(logs[:, :-1], tokens[:, 1:, None], -1).mean()


class TwoHeads(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return nn.Dense(3, name="small")(x), nn.Dense(5, name="large")(x)


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.RNN(nn.SimpleCell(WIDTH, name="cell"))(x)


class Branched(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", nn.initializers.normal(), (WIDTH, WIDTH))
        return x + jax.lax.cond(x.sum() > 0, lambda x: x @ kernel, lambda x: x, x)


def attend(module: nn.Embed, x: jax.Array) -> jax.Array:
    return module.attend(x)


MODELS: dict[str, tuple[list[Any], Any, set[str]]] = {
    "head": (
        [LayerSpec(nn.Embed, VOCABULARY, WIDTH), EmbedBlock(), nn.LayerNorm(), nn.Dense(3)],
        TOKENS,
        {"1_EmbedBlock/lm_head/kernel", "1_EmbedBlock/bias/kernel"},
    ),
    "head under functions": (
        [Rows(), nn.Dense(WIDTH), nn.relu, nn.Dense(3), lambda x: 2 * x, nn.log_softmax],
        TOKENS,
        {"1_Dense/kernel"},
    ),
    "two heads": (
        [LayerSpec(nn.Embed, VOCABULARY, WIDTH), EmbedBlock(), nn.LayerNorm(), TwoHeads()],
        TOKENS,
        {"1_EmbedBlock/lm_head/kernel", "1_EmbedBlock/bias/kernel"},
    ),
    "no head": (
        [LayerSpec(Table), EmbedBlock(), nn.LayerNorm()],
        TOKENS,
        {"1_EmbedBlock/lm_head/kernel", "1_EmbedBlock/bias/kernel"},
    ),
    "tied": (
        [
            TiedLayerSpec("table", nn.Embed, VOCABULARY, WIDTH),
            EmbedBlock(),
            TiedLayerSpec("table", nn.Embed, VOCABULARY, WIDTH, forward_fn=attend),
        ],
        TOKENS,
        {"1_EmbedBlock/lm_head/kernel", "1_EmbedBlock/bias/kernel"},
    ),
    "loss": (
        [Language()],
        TOKENS,
        {"0_Language/block/lm_head/kernel", "0_Language/block/bias/kernel"},
    ),
    "loops": (
        [LayerSpec(Table), Scanned(), Branched(), nn.Dense(3)],
        TOKENS,
        {"1_Scanned/cell/i/kernel", "1_Scanned/cell/h/kernel", "2_Branched/kernel"},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_layers_compute_decides(name: str) -> None:
    layers, inputs, wanted = MODELS[name]
    found = hidden_matrices(PipelineModule(layers, num_stages=1).trace(inputs))
    assert {"/".join(path[1:]) for path in found} == wanted


@pytest.mark.parametrize("kind", sweep(0, ["split", "fsdp", "one", "whole leaves"]))
def test_muon_in_every_layout(kind: str) -> None:
    config = LlamaConfig(VOCABULARY, WIDTH, 12, 2, 2, initializer_range=0.3)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (2, 4, 6)).astype(np.int32)
    stages, data = {"one": (1, 1), "split": (2, 1), "whole leaves": (2, 2), "fsdp": (2, 2)}[kind]
    module = PipelineModule(llama(config), num_stages=stages, loss_fn=jaxpipe.losses.cross_entropy)
    muon = {"type": "Muon", "params": {"lr": 0.1, "adam_lr": 0.01, "weight_decay": 0.1}}
    settings = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "optimizer": muon,
        "zero_optimization": {"stage": {"whole leaves": 1, "fsdp": 3}.get(kind, 0)},
        "pipeline": {"split_vocabulary": kind == "split"},
    }
    mesh = make_pipeline_mesh(
        ProcessTopology(["pipe", "data"], [stages, data]), jax.devices()[: stages * data]
    )
    pipeline = jaxpipe.make_pipeline(module, None, settings, mesh, (tokens[0], tokens[0]))
    start = module.init(jax.random.key(0), tokens[0])
    state, _ = pipeline.step(pipeline.states.init_from(start), (tokens, tokens))

    def is_matrix(params: Any) -> Any:
        flat = flatten_dict(params)
        return unflatten_dict({p: "Block" in p[1] and x.ndim == 2 for p, x in flat.items()})

    def loss(params: Any) -> Any:
        return sum(module.loss(module.apply(params, x), x) for x in tokens) / 2

    optimizer = make_optimizer("Muon", muon["params"], matrices=is_matrix)
    updates, _ = optimizer.update(jax.grad(loss)(start), optimizer.init(start), start)
    assert_close(pipeline.params_tree(state.params), optax.apply_updates(start, updates))
