"""The computation of a transformer layer, and the policy that selects its residuals."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxpipe.layers.recompute import REDUCED, checkpoint, keep_kernels
from jaxpipe.programs.jaxpr import is_named

from ._attention import attention
from ._config import DeepSpeedTransformerConfig
from ._sharding import constrained, dividing_axes, stream_axes, summed

_NORM = "transformer_norm"
_GELU = "transformer_gelu"
_KEPT = "transformer_product"


@dataclass(frozen=True)
class KeepNamed:
    """A `jax.checkpoint` policy that keeps results with one of these names; equal for equal names.

    JAX's own policy of this kind is a new function each time, but layers are compared together with
    their policies.
    """

    names: frozenset[str]

    def __call__(self, primitive: Any, *inputs: Any, **params: Any) -> bool:
        return is_named(primitive, params, self.names)


@dataclass(frozen=True)
class KeepKernels(KeepNamed):
    """A policy that keeps what `keep_kernels` keeps, and results with one of these names."""

    def __call__(self, primitive: Any, *inputs: Any, **params: Any) -> bool:
        return keep_kernels(primitive, *inputs, **params) or super().__call__(
            primitive, *inputs, **params
        )


@dataclass(frozen=True)
class Body:
    """The layer as a function of weights, input, masks and a dropout key, computed in `dtype`."""

    config: DeepSpeedTransformerConfig
    dtype: Any

    def recomputed(self) -> Callable[..., jax.Array]:
        """Return this function, keeping the residuals that the switches and `recompute` allow."""
        config = self.config
        if config.recompute is None and not config.saves_memory:
            return self
        if config.recompute == "all":
            return functools.partial(checkpoint, self)
        if callable(config.recompute):
            return jax.checkpoint(self, policy=config.recompute)
        is_sharded = dividing_axes(1, config.heads)[1] is not None
        sums = frozenset({REDUCED}) if is_sharded else frozenset[str]()
        if config.recompute == "kernels":
            return jax.checkpoint(self, policy=KeepKernels(sums))
        # Scores are never kept here. Without any switch, JAX may keep them.
        switched_off = {_NORM: config.normalize_invertible, _GELU: config.gelu_checkpoint}
        switched_on = {name for name, is_off in switched_off.items() if not is_off}
        return jax.checkpoint(self, policy=KeepKernels(sums | switched_on | {_KEPT}))

    def __call__(
        self,
        params: Mapping[str, jax.Array],
        x: jax.Array,
        mask: jax.Array | None,
        lengths: jax.Array | None,
        segment_ids: jax.Array | None,
        key: jax.Array | None,
    ) -> jax.Array:
        """Run the layer on `[B, T, H]`, without dropout if there is no key."""
        config = self.config
        params = {name: value.astype(self.dtype) for name, value in params.items()}
        if key is not None:
            key = self._own(key)
        h = self._norm(params, "norm_", x) if config.pre_layer_norm else x
        h = self._attention(params, h, mask, lengths, segment_ids, key)
        x = checkpoint_name(x + self._dropped(h, key, 1), _KEPT)
        if not config.pre_layer_norm:
            x = self._norm(params, "attn_n", x)
        h = self._norm(params, "attn_n", x) if config.pre_layer_norm else x
        h = self._feed_forward(params, h)
        x = checkpoint_name(x + self._dropped(h, key, 2), _KEPT)
        return x if config.pre_layer_norm else self._norm(params, "norm_", x)

    def _attention(
        self,
        params: Mapping[str, jax.Array],
        h: jax.Array,
        mask: jax.Array | None,
        lengths: jax.Array | None,
        segment_ids: jax.Array | None,
        key: jax.Array | None,
    ) -> jax.Array:
        config = self.config
        samples, positions = stream_axes(h.shape[0], h.shape[1])
        _, heads = dividing_axes(h.shape[0], config.heads)
        qkv = (
            jnp.einsum("bth,hcnd->btcnd", h, params["attn_qkvw"]) + params["attn_qkvb"][None, None]
        )
        qkv = checkpoint_name(constrained(qkv, samples, positions, None, heads), _KEPT)
        context = attention(
            *(qkv[:, :, part] for part in range(3)),
            causal=config.causal,
            mask=mask,
            lengths=lengths,
            segment_ids=segment_ids,
            dropout_rate=0.0 if key is None else config.attn_dropout_ratio,
            key=None if key is None else jax.random.fold_in(key, 0),
            implementation=config.attention,
        )
        y = jnp.einsum("btnd,ndh->bth", context, params["attn_ow"])
        return summed(y, samples, positions) + params["attn_ob"].reshape(1, 1, -1)

    def _feed_forward(self, params: Mapping[str, jax.Array], h: jax.Array) -> jax.Array:
        samples, positions = stream_axes(h.shape[0], h.shape[1])
        _, features = dividing_axes(h.shape[0], self.config.intermediate_size)
        h = h @ params["inter_w"] + params["inter_b"].reshape(1, 1, -1)
        h = checkpoint_name(constrained(h, samples, positions, features), _KEPT)
        h = checkpoint_name(self.config.activation(h), _GELU)
        return summed(h @ params["output_w"], samples, positions) + params["output_b"].reshape(
            1, 1, -1
        )

    def _norm(self, params: Mapping[str, jax.Array], name: str, x: jax.Array) -> jax.Array:
        x = x if self.config.stochastic_mode else x.astype(np.promote_types(self.dtype, np.float32))
        # Two passes: the mean of squares minus the square of the mean loses digits if the mean is
        # large.
        x = x - x.mean(-1, keepdims=True)
        x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + self.config.layer_norm_eps)
        scales = (params[f"{name}{suffix}"].reshape(1, 1, -1) for suffix in "wb")
        weight, bias = (scale.astype(x.dtype) for scale in scales)
        return checkpoint_name((x * weight + bias).astype(self.dtype), _NORM)

    def _dropped(self, x: jax.Array, key: jax.Array | None, place: int) -> jax.Array:
        rate = self.config.hidden_dropout_ratio
        if key is None or not rate:
            return x
        keep = jax.random.bernoulli(jax.random.fold_in(key, place), 1.0 - rate, x.shape)
        return jnp.where(checkpoint_name(keep, _KEPT), x / (1.0 - rate), 0.0)

    def _own(self, key: jax.Array) -> jax.Array:
        """Return the layer's key for dropout."""
        key = key if self.config.seed < 0 else jax.random.fold_in(key, self.config.seed)
        if not self.config.stochastic_mode:
            return key
        # The device's own generator is several times faster than threefry, but its bits depend on
        # the device and the sharding.
        return jax.random.wrap_key_data(jnp.resize(jax.random.key_data(key), (4,)), impl="rbg")
