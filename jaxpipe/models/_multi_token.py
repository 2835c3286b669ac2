"""Layers that predict more than the next token, as in DeepSeek V3.

With such layers, the blocks of a pipeline carry the tokens along with the residual stream. The last
stage needs them to look up the embedding of the next token.
"""

from collections.abc import Iterable

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxpipe.models.transformer import Divided, constrained, stream_axes
from jaxpipe.weights import Rename, transpose

from ._dense import dense, norm
from ._llama_config import LlamaConfig

Carried = dict[str, jax.Array]
"""The residual stream `x`, `[B, T, H]`, and the `tokens`, `[B, T]`."""


class MultiToken(nn.Module):
    """A layer that predicts one token further ahead than the layers before it.

    At each position it joins the state of the depth before with the embedding of the token that
    this depth predicted, and runs one more block:

        norm(block(eh_proj(concat(enorm(embedding[next token]), hnorm(state)))))

    States are `[B, 1 + depths, T, H]`, with the main model's normalised output first. The
    `embedding` table is tied to the model's. With `is_last` the states are returned alone, for the
    head.
    """

    config: LlamaConfig
    block: nn.Module
    embedding: Divided
    is_last: bool

    @nn.compact
    def __call__(
        self,
        carried: Carried,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        *,
        train: bool = False,
    ) -> Carried | jax.Array:
        """Append the states of one more depth."""
        config = self.config
        states = carried["x"]
        tokens = carried["tokens"]
        shape = config.vocab_size, config.hidden_size
        table = self.param("embedding", self.embedding, shape)
        table = table if config.dtype is None else table.astype(config.dtype)

        # Whole along the positions: the next token may be on another device.
        stream = stream_axes(tokens.shape[0], tokens.shape[1])
        tokens = constrained(tokens, stream[0])
        # The last positions have no next token in the sequence; theirs is 0, and the loss ignores
        # them.
        tokens = constrained(jnp.pad(tokens[:, 1:], ((0, 0), (0, 1))), stream[0])
        rows = constrained(jnp.take(table, tokens, axis=0), *stream)
        joined = [norm(config, "enorm")(rows), norm(config, "hnorm")(states[:, -1])]
        project = dense(config, config.hidden_size, (None, None), "eh_proj", use_bias=False)
        x = project(jnp.concatenate(joined, axis=-1))
        x = norm(config, "norm")(self.block(x, positions, segment_ids, train=train))
        states = jnp.concatenate([states, x[:, None].astype(states.dtype)], axis=1)
        states = constrained(states, stream[0], None, stream[1])
        return states if self.is_last else {"x": states, "tokens": tokens}


def embed_and_carry(embed: nn.Module, tokens: jax.Array) -> Carried:
    """Look up tokens, and carry them along."""
    return {"x": embed(tokens), "tokens": tokens}


def block_and_carry(
    block: nn.Module,
    carried: Carried,
    positions: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    *,
    train: bool = False,
) -> Carried:
    """Run a block on the residual stream."""
    return {**carried, "x": block(carried["x"], positions, segment_ids, train=train)}


def norm_and_carry(norm: nn.Module, carried: Carried) -> Carried:
    """Normalise the residual stream: the states of depth 0, `[B, 1, T, H]`."""
    # A dim for depths, to which `MultiToken` appends.
    return {**carried, "x": norm(carried["x"])[:, None]}


def multi_token_names(
    names: Iterable[Rename], num_hidden_layers: int, num_extra: int
) -> tuple[Rename, ...]:
    """The table of Hugging Face's names for the layers that predict several tokens."""
    # The norm lies between the blocks and these layers.
    own = [
        Rename("model.layers.{i}.eh_proj.weight", "{i+2}/eh_proj/kernel", transpose),
        Rename("model.layers.{i}.shared_head.norm.weight", "{i+2}/norm/scale"),
        *(
            Rename(f"model.layers.{{i}}.{x}.weight", f"{{i+2}}/{x}/scale")
            for x in ("enorm", "hnorm")
        ),
        *(
            Rename(
                rename.theirs,
                tuple(path.replace("{i+1}/", "{i+2}/block/") for path in rename.our_paths),
                rename.transform,
            )
            for rename in names
        ),
    ]
    # In files they are the layers after the last block. Models without them skip their tensors.
    layers = range(num_hidden_layers, num_hidden_layers + num_extra)
    in_files = [name for rename in own for name in rename.their_names]
    in_files += [f"model.layers.{{i}}.{name}" for name in _COPIES]
    skipped = [
        Rename(name.replace("{i}", str(layer)), None) for layer in layers for name in in_files
    ]
    return (*own, *skipped) if num_extra else ()


def with_copies(name: str, copy: int, num_hidden_layers: int, num_extra: int) -> tuple[str, ...]:
    """The names of the embedding (`copy` 0) or head (1), which files may repeat in extra layers."""
    layers = range(num_hidden_layers, num_hidden_layers + num_extra)
    return name, *(f"model.layers.{layer}.{_COPIES[copy]}" for layer in layers)


_COPIES = "embed_tokens.weight", "shared_head.head.weight"
