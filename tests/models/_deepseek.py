"""DeepSeek V3 written plainly, for one device: every score, every expert, one layer after another.

Parameters are a tree of `llama`'s, and nothing else here is jaxpipe's.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def norm(x: jax.Array, params: Any) -> jax.Array:
    return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * params["scale"][None, None]


def silu(x: jax.Array) -> jax.Array:
    return x / (1 + jnp.exp(-x))


def turned(x: jax.Array, positions: jax.Array, config: Any) -> jax.Array:
    """Turn the pairs of `[B, T, N, D]` as complex numbers; they stay neighbours."""
    dim = x.shape[-1]
    turns = np.float64(config.rotary.rope_theta) ** (-np.arange(0, dim, 2) / dim)
    scaling = config.rotary.rope_scaling
    if scaling is not None:

        def border(count: float) -> float:
            waves = scaling.original_max_position_embeddings / (count * 2 * math.pi)
            return dim * math.log(waves) / (2 * math.log(config.rotary.rope_theta))

        low = max(math.floor(border(scaling.beta_fast)), 0)
        high = min(math.ceil(border(scaling.beta_slow)), dim - 1)
        ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0, 1)
        turns = turns * (1 - ramp) + turns / scaling.factor * ramp
    angles = positions[:, :, None, None] * turns.astype(np.float32)[None, None, None]
    if config.attention.rope_interleave:
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x[..., : dim // 2], x[..., dim // 2 :]
    whole = (first + 1j * second) * jnp.exp(1j * angles)
    return jnp.concatenate([whole.real, whole.imag], -1)


def attention(x: jax.Array, params: Any, config: Any, segments: jax.Array) -> jax.Array:
    sizes, heads = config.attention, config.num_attention_heads
    batch, length, _ = x.shape
    index = jnp.arange(length)
    is_same = segments[:, :, None] == segments[:, None, :]
    starts = jnp.argmax(is_same, -1)
    positions = index[None, :] - starts
    if sizes.q_lora_rank is None:
        q = x @ params["query"]["kernel"]
    else:
        latent = norm(x @ params["query_down"]["kernel"], params["query_norm"])
        q = latent @ params["query_up"]["kernel"]
    q = q.reshape(batch, length, heads, -1)
    both = x @ params["key_value_down"]["kernel"]
    latent = norm(both[..., : sizes.kv_lora_rank], params["key_value_norm"])
    kv = (latent @ params["key_value_up"]["kernel"]).reshape(batch, length, heads, -1)
    plain = sizes.qk_nope_head_dim
    of_query = turned(q[..., plain:], positions, config)
    of_key = turned(both[:, :, None, sizes.kv_lora_rank :], positions, config)
    scores = jnp.einsum("btnd,bsnd->bnts", q[..., :plain], kv[..., :plain])
    scores += jnp.einsum("btnd,bsd->bnts", of_query, of_key[:, :, 0])
    scores /= math.sqrt(plain + sizes.qk_rope_head_dim)
    if config.rotary.rope_scaling is not None:
        scores *= (
            0.1 * config.rotary.rope_scaling.mscale * math.log(config.rotary.rope_scaling.factor)
            + 1
        ) ** 2
    sees = is_same & (index[:, None] >= index[None, :])[None]
    weights = jax.nn.softmax(jnp.where(sees[:, None], scores, -jnp.inf), -1)
    y = jnp.einsum("bnts,bsnd->btnd", weights, kv[..., plain:])
    return y.reshape(batch, length, -1) @ params["out"]["kernel"]


def feed_forward(x: jax.Array, params: Any) -> jax.Array:
    gate, up, down = (params[name]["kernel"] for name in ("gate", "up", "down"))
    return (silu(x @ gate) * (x @ up)) @ down


def mixture(x: jax.Array, params: Any, config: Any) -> jax.Array:
    experts, router = config.experts, params["experts"]["router"]
    scores = 1 / (1 + jnp.exp(-(x @ router["kernel"])))
    ranks = jax.lax.stop_gradient(scores + router["correction_bias"][None, None])
    groups = ranks.reshape(*ranks.shape[:-1], experts.n_group, -1)
    of_group = jnp.sort(groups, -1)[..., -2:].sum(-1)
    worst = jnp.sort(of_group, -1)[..., -experts.topk_group]
    ranks = jnp.where((of_group >= worst[..., None])[..., None], groups, -1.0).reshape(ranks.shape)
    worst = jnp.sort(ranks, -1)[..., -experts.num_experts_per_tok]
    gates = jnp.where(ranks >= worst[..., None], scores, 0.0)
    gates *= experts.routed_scaling_factor / gates.sum(-1, keepdims=True)
    gate, up, down = (params["experts"][name] for name in ("gate", "up", "down"))
    of_expert = jnp.einsum("bth,ehi->btei", x, up)
    of_expert *= silu(jnp.einsum("bth,ehi->btei", x, gate)) * gates[..., None]
    return feed_forward(x, params["shared"]) + jnp.einsum("btei,eih->bth", of_expert, down)


def block(x: jax.Array, params: Any, config: Any, segments: jax.Array) -> jax.Array:
    x += attention(norm(x, params["attention_norm"]), params["attention"], config, segments)
    h, own = norm(x, params["feed_forward_norm"]), params["feed_forward"]
    return x + (mixture(h, own, config) if "experts" in own else feed_forward(h, own))


def logits(params: Any, config: Any, tokens: jax.Array, segments: jax.Array) -> jax.Array:
    """Logits of every depth, `[B, 1 + depths, T, V]`."""
    layers = [params["layers"][name] for name in sorted(params["layers"], key=number_of)]
    table = params["tied"]["embedding"]["embedding"]
    head = table.T if config.tie_word_embeddings else layers.pop()["kernel"]
    x = table[tokens]
    for own in layers[: config.num_hidden_layers]:
        x = block(x, own, config, segments)
    states = [norm(x, layers[config.num_hidden_layers])]
    for own in layers[config.num_hidden_layers + 1 :]:
        tokens = jnp.concatenate([tokens[:, 1:], jnp.zeros_like(tokens[:, :1])], 1)
        joined = [norm(table[tokens], own["enorm"]), norm(states[-1], own["hnorm"])]
        x = jnp.concatenate(joined, -1) @ own["eh_proj"]["kernel"]
        states.append(norm(block(x, own["block"], config, segments), own["norm"]))
    return jnp.stack(states, 1) @ head


def loss(params: Any, config: Any, batch: Any, extra_weight: float) -> jax.Array:
    """Mean over the labels of all samples, `[B, T]`; -100 does not count."""
    tokens, labels, segments = batch
    found = jax.nn.log_softmax(logits(params, config, tokens, segments))
    number, total, length = (labels >= 0).sum(), 0.0, labels.shape[1]
    for depth in range(found.shape[1]):
        # A label counts if nothing between it and the position is ignored.
        windows = [labels[:, step : length - depth + step] for step in range(depth + 1)]
        counts = jnp.stack(windows).min(0) >= 0
        label = jnp.where(counts, windows[-1], 0)[..., None]
        of_label = jnp.take_along_axis(found[:, depth, : length - depth], label, -1)[..., 0]
        share = 1.0 if depth == 0 else extra_weight / (found.shape[1] - 1)
        total -= share * jnp.where(counts, of_label, 0.0).sum()
    return total / number


def number_of(name: str) -> int:
    return int(name.partition("_")[0])
