"""DeepSpeed's transformer layer as a Flax Linen module."""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe._util.warn import warn
from jaxpipe.config import ConfigWarning
from jaxpipe.errors import LayerError
from jaxpipe.layers.recompute import is_first, traced_mesh

from ._body import Body
from ._config import DeepSpeedTransformerConfig
from ._sharding import MODEL, Divided


class DeepSpeedTransformerLayer(nn.Module):
    """A transformer layer: attention and a feed-forward network, with residual connections.

    It maps `[B, T, H]` to the same shape and dtype. Weights have DeepSpeed's names: `attn_qkvw`
    `[H, 3, N, D]`, `attn_qkvb` `[3, N, D]`, `attn_ow` `[N, D, H]`, `attn_ob`, `attn_nw`, `attn_nb`,
    `inter_w` `[H, I]`, `inter_b`, `output_w` `[I, H]`, `output_b`, `norm_w`, `norm_b`. Heads and
    the features of the feed-forward network are divided over a mesh axis `model`, with one
    reduction for each of the two. In a `PipelineModule` layers are numbered by their position in
    the list (`3_DeepSpeedTransformerLayer`). Dropout keys differ between layers, microbatches and
    replicas.

    Args:
        config: The configuration.
        initial_weights: Eight arrays of initial weights, as in DeepSpeed's tests: `[outputs,
            inputs]` for query, key, value and attention output; the attention's norm; `[outputs,
            inputs]` for the two products of the feed-forward network; the other norm.
        initial_biases: The eight biases that belong to them.

    Raises:
        LayerError: There are not eight arrays, a shape is wrong, or the input does not fit the
            configuration.

    Example:
        >>> import jax, jax.numpy as jnp, jaxpipe
        >>> sizes = dict(hidden_size=8, heads=2, num_hidden_layers=2)
        >>> config = jaxpipe.DeepSpeedTransformerConfig(**sizes, causal=True)
        >>> layer = jaxpipe.LayerSpec(jaxpipe.DeepSpeedTransformerLayer, config)
        >>> model = jaxpipe.PipelineModule([layer, layer], num_stages=1)
        >>> x = jnp.ones((1, 3, 8))
        >>> model.apply(model.init(jax.random.key(0), x), x).shape
        (1, 3, 8)

    Reference:
        DeepSpeed's `deepspeed.DeepSpeedTransformerLayer`.
    """

    config: DeepSpeedTransformerConfig
    initial_weights: Any = None
    initial_biases: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.config, DeepSpeedTransformerConfig):
            raise LayerError(
                "config must be a DeepSpeedTransformerConfig, but got a "
                f"{type(self.config).__name__}. Make one, or use "
                "DeepSpeedTransformerConfig.from_dict."
            )
        for name in ("initial_weights", "initial_biases"):
            value = getattr(self, name)
            # Flax copies modules, with arrays that have been checked and wrapped before.
            if value is not None and not isinstance(value, _Initial):
                object.__setattr__(self, name, _Initial(name, value, self.config))
        super().__post_init__()

    @property
    def layer_id(self) -> int:
        """Not supported: DeepSpeed counts layers, but Flax may copy modules at any time.

        Raises:
            LayerError: Always.
        """
        raise LayerError(
            "layer_id must be read off the model, but got no number: Flax copies modules. In a "
            "PipelineModule layers are numbered by their position in the list, as in "
            "3_DeepSpeedTransformerLayer."
        )

    @nn.compact
    def __call__(
        self,
        hidden_states: jax.Array | tuple[jax.Array],
        attention_mask: jax.Array | None = None,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        *,
        train: bool = False,
    ) -> jax.Array | tuple[jax.Array]:
        """Run the layer on `[B, T, H]`, or a tuple with only this array; `huggingface` returns one.

        `attention_mask` is `[B, T]`, true for positions that are seen, or `[B or 1, 1 or N, 1 or T,
        T]` of booleans, integers, or floats that are added to the scores. `lengths` are `[B]`;
        cuDNN supports them even where it does not support a mask. With `segment_ids`, `[B, T]`,
        positions see only positions of their own segment. In a pipeline, these are side inputs of
        the same names.
        """
        config = self.config
        x = _input(config, hidden_states)
        dtype = _compute_dtype(config, x.dtype)
        params = self._weights()
        mask = None if attention_mask is None else _mask(attention_mask, config.heads, x.shape)
        drops = train and config.drops and not self.is_initializing()
        key = self.make_rng("dropout") if drops else None
        if train:
            _warn_unused(config, dtype)
        body = Body(config, dtype)
        run = body if self.is_initializing() else body.recomputed()
        y = run(params, x.astype(dtype), mask, lengths, segment_ids, key).astype(x.dtype)
        return (y,) if config.huggingface else y

    def _weights(self) -> dict[str, Any]:
        config = self.config
        init = nn.initializers.normal
        hidden = config.hidden_size
        heads = config.heads
        inter = config.intermediate_size
        size = hidden // heads
        inner = init(config.initializer_range)
        outer = init(config.output_range)
        zeros = nn.initializers.zeros
        ones = nn.initializers.ones
        declared: dict[str, tuple[Any, tuple[int, ...], tuple[str | None, ...]]] = {
            "attn_qkvw": (inner, (hidden, 3, heads, size), (None, None, MODEL, None)),
            "attn_qkvb": (zeros, (3, heads, size), (None, MODEL, None)),
            "attn_ow": (outer, (heads, size, hidden), (MODEL, None, None)),
            "attn_ob": (zeros, (hidden,), (None,)),
            "attn_nw": (ones, (hidden,), (None,)),
            "attn_nb": (zeros, (hidden,), (None,)),
            "inter_w": (inner, (hidden, inter), (None, MODEL)),
            "inter_b": (zeros, (inter,), (MODEL,)),
            "output_w": (outer, (inter, hidden), (MODEL, None)),
            "output_b": (zeros, (hidden,), (None,)),
            "norm_w": (ones, (hidden,), (None,)),
            "norm_b": (zeros, (hidden,), (None,)),
        }
        given = {**_values(self.initial_weights, "w"), **_values(self.initial_biases, "b")}

        def weight(
            name: str, init: Any, shape: tuple[int, ...], axes: tuple[str | None, ...]
        ) -> Any:
            return self.param(
                name, Divided(_initializer(given.get(name), init), axes), shape, jnp.float32
            )

        return {name: weight(name, *said) for name, said in declared.items()}


class _Initial:
    """Eight initial weights or biases; compared by identity, because arrays have no hash."""

    def __init__(self, name: str, arrays: Any, config: DeepSpeedTransformerConfig) -> None:
        hidden = config.hidden_size
        inter = config.intermediate_size
        square = (hidden, hidden)
        wide = (inter, hidden)
        norm = (hidden,)
        shapes = [square, square, square, square, norm, wide, wide[::-1], norm]
        if name == "initial_biases":
            shapes = [shape[:1] for shape in shapes]
        self.arrays = [np.asarray(x, np.float32) for x in arrays]
        given = [x.shape for x in self.arrays]
        if given != shapes:
            raise LayerError(
                f"{name} must be eight arrays of shapes {shapes} (query, key, value, attention "
                f"output, its norm, the two feed-forward products, their norm), but got {given}. "
                "Weights are [outputs, inputs], as in torch."
            )
        self._heads = config.heads

    def values(self, suffix: str) -> dict[str, np.ndarray]:
        """Return the arrays as the layer's weights (`"w"`) or biases (`"b"`)."""
        # Given as `[outputs, inputs]`, as in torch.
        *qkv, ow, nw, inter, output, norm = [x.T for x in self.arrays]
        stacked = np.stack([x.reshape(*x.shape[:-1], self._heads, -1) for x in qkv], axis=-3)
        if suffix == "w":
            ow = ow.reshape(self._heads, -1, ow.shape[-1])
        names = ("attn_qkv", "attn_o", "attn_n", "inter_", "output_", "norm_")
        return {
            f"{name}{suffix}": x
            for name, x in zip(names, (stacked, ow, nw, inter, output, norm), strict=True)
        }


def _values(initial: _Initial | None, suffix: str) -> dict[str, np.ndarray]:
    return {} if initial is None else initial.values(suffix)


def _initializer(
    value: np.ndarray | None, default: Callable[..., jax.Array]
) -> Callable[..., jax.Array]:
    return (
        default
        if value is None
        else lambda key, shape, dtype: jnp.asarray(value, dtype).reshape(shape)
    )


def _input(config: DeepSpeedTransformerConfig, given: Any) -> jax.Array:
    x = given[0] if isinstance(given, (tuple, list)) and len(given) == 1 else given
    if isinstance(x, (tuple, list)) or x.ndim != 3 or x.shape[2] != config.hidden_size:
        found = f"{len(x)} arrays" if isinstance(x, (tuple, list)) else f"{x.dtype}{list(x.shape)}"
        raise LayerError(
            f"hidden_states must be [B, T, hidden_size={config.hidden_size}], but got {found}. "
            "Pass masks as side inputs, in a dictionary that is the batch's third entry."
        )
    for name, size, what in (
        ("batch_size", x.shape[0], "samples"),
        ("max_seq_length", x.shape[1], "positions"),
    ):
        limit = getattr(config, name)
        if limit != -1 and size > limit:
            raise LayerError(
                f"a call must have at most {name}={limit} {what}, but got {size}. Leave {name} out."
            )
    return x


def _compute_dtype(config: DeepSpeedTransformerConfig, given: Any) -> Any:
    if config.fp16 and given == jnp.bfloat16:
        raise LayerError(
            "with fp16=True hidden_states must be float16 or float32, but got bfloat16, in which "
            "the model computes. Leave fp16 out: the layer then computes in the dtype of its input."
        )
    return jnp.dtype(
        jnp.float16 if config.fp16 else given if config.dtype is None else config.dtype
    )


def _mask(given: jax.Array, heads: int, shape: Sequence[int]) -> jax.Array:
    """Convert a mask to the form that `attention` takes."""
    batch, length, _ = shape
    mask = jnp.asarray(given)
    is_added = jnp.issubdtype(mask.dtype, jnp.floating)
    if mask.ndim == 2 and not is_added:
        mask = mask[:, None, None, :]
    sizes = ((1, batch), (1, heads), (1, length), (length,))
    if mask.ndim != 4 or not all(
        size in allowed for size, allowed in zip(mask.shape, sizes, strict=True)
    ):
        raise LayerError(
            f"attention_mask must be booleans or integers [B, T]={[batch, length]}, or [B or 1, N "
            "or 1, T or 1, T] of these or of floats that are added, but got "
            f"{given.dtype}{list(given.shape)}. Compare a float mask of ones and zeros first: mask "
            "> 0."
        )
    return mask if is_added else mask != 0


def _warn_unused(config: DeepSpeedTransformerConfig, dtype: Any) -> None:
    """Warn about switches that have no effect here, once per trace of a model."""
    unused: dict[str, str] = {}
    if traced_mesh() is not None and config.recompute is None:
        why = "a pipeline never keeps results that are cheap to recompute"
        unused = {
            name: why
            for name in ("normalize_invertible", "gelu_checkpoint")
            if getattr(config, name)
        }
    if config.stochastic_mode and not config.drops and dtype == jnp.float32:
        unused["stochastic_mode"] = "there is no dropout, and float32 is what norms are computed in"
    for name, why in unused.items():
        message = f"No effect: {name} of DeepSpeedTransformerConfig, because {why}."
        # A model traces equal layers many times.
        if is_first(message):
            warn(message, ConfigWarning)
