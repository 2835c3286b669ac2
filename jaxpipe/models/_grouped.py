"""Products of experts with their own tokens: tokens are lined up by expert.

Each expert has a fixed number of slots, its room, and each choice of a token takes a slot of its
expert. The products of all experts are then one batched product over slots. Choices beyond the room
are computed after it, in blocks, by a loop that runs as often as the busiest device needs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpipe.transformer import constrained

_BLOCK = 256
"""Rows of a block beyond the room. With fewer, a product would read weights longer than compute."""


class ExpertWeights(NamedTuple):
    """Weights of experts, `[..., in, out]`, and their biases, `[..., 1, out]` or None."""

    gate: jax.Array
    up: jax.Array
    down: jax.Array
    gate_bias: jax.Array | None
    up_bias: jax.Array | None
    down_bias: jax.Array | None


@dataclass(frozen=True)
class FeedForward:
    """The function that each expert computes; see `ExpertsConfig`."""

    activation: str
    scale_inputs: bool

    def __call__(
        self,
        weights: ExpertWeights,
        rows: jax.Array,
        gates: jax.Array,
        equation: str = "ch,hi->ci",
        pin: Callable[[jax.Array], jax.Array] = lambda h: h,
    ) -> jax.Array:
        """Map rows `[..., C, H]`, whose gates are `[..., C]`, to the same shape.

        `equation` is that of the first product, and `pin` constrains the hidden values.
        """
        factors = gates[..., None]

        def product(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
            y = jnp.einsum(equation, x, kernel)
            return y if bias is None else y + bias

        rows = rows * factors if self.scale_inputs else rows
        gate, up = (
            product(rows, kernel, bias)
            for kernel, bias in ((weights.gate, weights.gate_bias), (weights.up, weights.up_bias))
        )
        if self.activation == "silu":
            h = nn.silu(gate) * up
        else:
            gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
            h = (up + 1) * gate * nn.sigmoid(1.702 * gate)
        # The gates multiply the hidden values, so that their gradient does not need the results.
        h, bias = pin(h), weights.down_bias
        if self.scale_inputs:
            return product(h, weights.down, bias)
        return product(h * factors, weights.down, None if bias is None else bias * factors)


class Queues(NamedTuple):
    """The choices of G groups of N tokens, lined up by expert.

    Choice `c * N + n` is choice c of token n, so that first choices are served before second ones.

    Attributes:
        order: Choices sorted by expert, `[G, choices * N]`.
        starts: Where the choices of each expert begin in `order`, `[G, E]`.
        loads: Number of choices of each expert, `[G, E]`.
        choices: The choice in each slot, `[G, E, room]`, or `choices * N` if the slot is empty.
        slots: The slot of each choice, `[G, choices * N]`, or `E * room` if it has none. Slot
            `e * room + r` belongs to expert e.
    """

    order: jax.Array
    starts: jax.Array
    loads: jax.Array
    choices: jax.Array
    slots: jax.Array


@dataclass(frozen=True)
class Groups:
    """How groups of tokens and experts are divided over devices, and the number of choices.

    `dispatch` and `combine` are linear, and each is the transpose of the other. Both read rows at
    indices, because an addition at indices would be in any order on GPUs.

    Attributes:
        num_shards: Number P of shards of experts.
        expert: The automatic axis over which experts are divided, or None.
        samples: The automatic axis over which groups are divided, or None.
        features: The automatic axis over which hidden values are divided, or None.
        choices: Number of choices of a token.
    """

    num_shards: int
    expert: str | None
    samples: str | None
    features: str | None
    choices: int

    def dispatch(self, x: jax.Array, queues: Queues) -> jax.Array:
        """Copy tokens `[G, N, H]` to slots `[P, E / P, G, room, H]`; empty slots are zero."""
        return _dispatch(self, x, queues.choices, queues.slots)

    def combine(self, y: jax.Array, queues: Queues) -> jax.Array:
        """Sum the slots of each token, which is the inverse of shapes of `dispatch`."""
        return _combine(self, y, queues.choices, queues.slots)

    def local(self, choices: jax.Array) -> jax.Array:
        """Divide `[G, E, ...]` into shards of experts, `[P, E / P, G, ...]`."""
        shards = choices.reshape(choices.shape[0], self.num_shards, -1, *choices.shape[2:])
        return constrained(jnp.moveaxis(shards, 0, 2), self.expert, None, self.samples)

    def on_devices(
        self, function: Callable[..., Any], given: Sequence[Any], made: str
    ) -> Callable[..., Any]:
        """Run a function on each device's experts and groups.

        XLA (JAX 0.10) aborts at reads at indices if one automatic axis divides the indices and
        another the values, so no partitioner may see them.

        Args:
            function: The function.
            given: A tree with what divides the first dims of each argument: `e` experts, `g`
                groups, `.` nothing.
            made: The same for all results.
        """
        axes = {"e": self.expert, "g": self.samples, ".": None}
        named = set("".join(jax.tree.leaves((tuple(given), made))))
        manual = {axis for name in named if (axis := axes[name]) is not None}
        if not manual:
            return function
        specs = jax.tree.map(lambda dims: P(*(axes[dim] for dim in dims)), (tuple(given), made))
        return jax.shard_map(
            function,
            in_specs=specs[0],
            out_specs=specs[1],
            axis_names=manual,
            check_vma=False,
        )

    def summed(self, parts: jax.Array) -> jax.Array:
        """Sum over the shards of experts, `[P, G, N, H]` to `[G, N, H]`."""
        if self.num_shards == 1:
            return parts[0]
        # A product, not a sum: `jnp.sum` would send float32.
        ones = jnp.ones(self.num_shards, parts.dtype)
        return constrained(jnp.einsum("pgnh,p->gnh", parts, ones), self.samples)


def line_up(groups: Groups, chosen: jax.Array, num_experts: int, room: int) -> Queues:
    """Line up the experts `[G, N, choices]` that tokens have chosen."""
    function = partial(_line_up, num_experts=num_experts, room=room)
    return groups.on_devices(function, ["g"], "g")(chosen)


def _line_up(chosen: jax.Array, num_experts: int, room: int) -> Queues:
    experts = chosen.swapaxes(1, 2).reshape(chosen.shape[0], -1)
    num_choices = experts.shape[1]
    order = jnp.argsort(experts, axis=-1, stable=True)
    loads = jnp.sum(experts[..., None] == jnp.arange(num_experts)[None, None], axis=1)
    starts = jnp.cumsum(loads, axis=-1) - loads
    turns = jnp.arange(room)[None, None]
    at = starts[..., None] + turns
    found = jax.vmap(partial(_taken, fill=num_choices))(order, at)
    choices = jnp.where(turns < loads[..., None], found, num_choices)
    ranks = jnp.argsort(order, axis=-1) - jax.vmap(_taken)(starts, experts)
    slots = jnp.where(ranks < room, experts * room + ranks, num_experts * room)
    return Queues(order, starts, loads, choices, slots)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dispatch(groups: Groups, x: jax.Array, choices: jax.Array, slots: jax.Array) -> jax.Array:
    length = x.shape[1]
    local = groups.local(choices)
    # Empty slots are at `choices * N`, and no token is at N.
    tokens = jnp.where(local < groups.choices * length, local % length, length)
    take = jax.vmap(jax.vmap(jax.vmap(_taken), (None, 0)), (None, 0))
    return groups.on_devices(take, ["g", "e.g"], "e.g")(x, tokens)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _combine(groups: Groups, y: jax.Array, choices: jax.Array, slots: jax.Array) -> jax.Array:
    del choices
    shards, experts, _, room, _ = y.shape
    # In the order of a shard's slots. Slots of other shards are beyond the last.
    local = slots[None] - (experts * room * jnp.arange(shards))[:, None, None]
    local = jnp.where((local >= 0) & (local < experts * room), local, experts * room)

    def take(y: jax.Array, local: jax.Array) -> jax.Array:
        rows = jnp.moveaxis(y, 2, 1).reshape(*local.shape[:2], -1, y.shape[-1])
        found = jax.vmap(jax.vmap(_taken))(rows, local)
        return found.reshape(*local.shape[:2], groups.choices, -1, y.shape[-1]).sum(2)

    return groups.summed(groups.on_devices(take, ["e.g", "eg"], "eg")(y, local))


def _dispatch_forward(groups: Groups, x: Any, choices: Any, slots: Any) -> tuple[Any, Any]:
    return _dispatch(groups, x, choices, slots), (choices, slots)


def _dispatch_backward(groups: Groups, indices: Any, sent: jax.Array) -> tuple[Any, None, None]:
    return _combine(groups, sent, *indices), None, None


def _combine_forward(groups: Groups, y: Any, choices: Any, slots: Any) -> tuple[Any, Any]:
    return _combine(groups, y, choices, slots), (choices, slots)


def _combine_backward(groups: Groups, indices: Any, y: jax.Array) -> tuple[Any, None, None]:
    return _dispatch(groups, y, *indices), None, None


_dispatch.defvjp(_dispatch_forward, _dispatch_backward)
_combine.defvjp(_combine_forward, _combine_backward)


def mixture(
    groups: Groups,
    feed_forward: FeedForward,
    weights: ExpertWeights,
    x: jax.Array,
    gates: jax.Array,
    queues: Queues,
    *,
    drops: bool,
) -> jax.Array:
    """Sum the results of each token's experts.

    Args:
        groups: How tokens and experts are divided.
        feed_forward: What an expert computes.
        weights: The weights of all experts.
        x: Tokens `[G, N, H]`.
        gates: Gates of the choices, `[G, N, choices]`.
        queues: The tokens of each expert.
        drops: Whether choices beyond the room are left out.

    Returns:
        `[G, N, H]`.
    """
    shards = groups.num_shards
    weights = jax.tree.map(lambda w: w.reshape(shards, -1, *w.shape[1:]), weights)
    flat = gates.swapaxes(1, 2).reshape(gates.shape[0], -1)
    of_slots = groups.on_devices(jax.vmap(_taken), ["g", "g"], "g")(flat, queues.choices)

    def pin(h: jax.Array) -> jax.Array:
        return constrained(h, groups.expert, None, groups.samples, None, groups.features)

    wide = weights._replace(
        **{
            name: bias[:, :, None]
            for name in ("gate_bias", "up_bias", "down_bias")
            if (bias := getattr(weights, name)) is not None
        }
    )
    sent = groups.dispatch(x, queues)
    made = feed_forward(wide, sent, groups.local(of_slots), "pegch,pehi->pegci", pin)
    y = groups.combine(constrained(made, groups.expert, None, groups.samples), queues)
    room, num_tokens = queues.choices.shape[-1], x.shape[1]
    if drops or room >= num_tokens:
        return y
    starts, loads = (
        jnp.moveaxis(groups.local(each), 1, 2) for each in (queues.starts, queues.loads)
    )
    blocks = _Blocks(feed_forward, room, min(_BLOCK, room))
    beyond: Any = _beyond(groups, blocks, x, flat, weights, _Beyond(queues.order, starts, loads))
    return y + beyond


@dataclass(frozen=True)
class _Blocks:
    """The choices beyond the room, in blocks of rows of one expert.

    The functions see one group `x`, `[N, H]`, and one shard of experts.
    """

    feed_forward: FeedForward
    room: int
    size: int

    def forward(
        self, x: jax.Array, gates: jax.Array, weights: ExpertWeights, at: "_Beyond"
    ) -> jax.Array:
        """Sum the results of all blocks, `[N, H]`."""

        def add(number: jax.Array, y: jax.Array) -> jax.Array:
            expert, choices, tokens = self._choose(number, at, len(x))
            own = jax.tree.map(lambda w: w[expert], weights)
            made = self.feed_forward(own, _taken(x, tokens), _taken(gates, choices))
            return _added(y, tokens, made)

        return jax.lax.fori_loop(0, self._counts(at).sum(), add, jnp.zeros_like(x))

    def backward(
        self,
        x: jax.Array,
        gates: jax.Array,
        weights: ExpertWeights,
        at: "_Beyond",
        dy: jax.Array,
    ) -> tuple[jax.Array, jax.Array, ExpertWeights]:
        """Compute the gradients of `x`, `gates` and `weights`. It runs the blocks again."""

        def add(number: jax.Array, sums: Any) -> Any:
            expert, choices, tokens = self._choose(number, at, len(x))
            own = jax.tree.map(lambda w: w[expert], weights)
            given = own, _taken(x, tokens), _taken(gates, choices)
            down, drows, dfactors = jax.vjp(self.feed_forward, *given)[1](_taken(dy, tokens))
            dx, dgates, dweights = sums
            dweights = jax.tree.map(lambda total, part: total.at[expert].add(part), dweights, down)
            return _added(dx, tokens, drows), _added(dgates, choices, dfactors), dweights

        zeros = jax.tree.map(jnp.zeros_like, (x, gates, weights))
        return jax.lax.fori_loop(0, self._counts(at).sum(), add, zeros)

    def _choose(
        self, number: jax.Array, at: "_Beyond", num_tokens: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return a block's expert, its choices and their tokens; rows that are empty are beyond."""
        counts = self._counts(at)
        ends = jnp.cumsum(counts)
        expert = jnp.sum(number >= ends)
        turns = self.room + (number - ends[expert] + counts[expert]) * self.size
        turns += jnp.arange(self.size)
        found = _taken(at.order, at.starts[expert] + turns)
        is_used = turns < at.loads[expert]
        choices = jnp.where(is_used, found, len(at.order))
        return expert, choices, jnp.where(is_used, found % num_tokens, num_tokens)

    def _counts(self, at: "_Beyond") -> jax.Array:
        """Number of blocks of each expert."""
        return -(-jnp.maximum(at.loads - self.room, 0) // self.size)


class _Beyond(NamedTuple):
    """Fields of `Queues`, of the experts of a shard, or how they are divided."""

    order: Any
    starts: Any
    loads: Any


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _beyond(
    groups: Groups,
    blocks: _Blocks,
    x: jax.Array,
    gates: jax.Array,
    weights: ExpertWeights,
    at: _Beyond,
) -> jax.Array:
    """Sum the results of the choices beyond the room, `[G, N, H]`.

    It has a derivative of its own, because JAX does not differentiate loops of unknown length in
    reverse.
    """

    def run(x: Any, gates: Any, weights: Any, at: _Beyond) -> Any:
        return _as_parts(blocks.forward(*_of_device(x, gates, weights, at)))

    return groups.summed(groups.on_devices(run, _GIVEN, "eg")(x, gates, weights, at))


_GIVEN = "g", "g", "e", _Beyond("g", "eg", "eg")


def _beyond_forward(groups: Groups, blocks: _Blocks, *args: Any) -> tuple[jax.Array, Any]:
    return _beyond(groups, blocks, *args), args


def _beyond_backward(groups: Groups, blocks: _Blocks, args: Any, dy: jax.Array) -> tuple[Any, ...]:
    def run(x: Any, gates: Any, weights: Any, at: _Beyond, dy: Any) -> Any:
        return _as_parts(blocks.backward(*_of_device(x, gates, weights, at), dy=dy[0]))

    found = groups.on_devices(run, (*_GIVEN, "g"), "eg")(*args, dy)
    dx, dgates, dweights = found
    return groups.summed(dx), dgates.sum(0), jax.tree.map(lambda w: w.sum(1), dweights), None


_beyond.defvjp(_beyond_forward, _beyond_backward)


def _of_device(x: Any, gates: Any, weights: Any, at: _Beyond) -> tuple[Any, ...]:
    """Drop the dims of groups and shards, of which a device has one."""
    own = jax.tree.map(lambda w: w[0], weights)
    return x[0], gates[0], own, _Beyond(at.order[0], at.starts[0, 0], at.loads[0, 0])


def _as_parts(tree: Any) -> Any:
    """Restore the dims that `_of_device` drops."""
    return jax.tree.map(lambda leaf: leaf[None, None], tree)


def _taken(values: jax.Array, at: jax.Array, fill: int = 0) -> jax.Array:
    """Read rows at indices; indices beyond the last row give `fill`."""
    return jnp.take(values, at, axis=0, mode="fill", fill_value=fill)


def _added(values: jax.Array, at: jax.Array, rows: jax.Array) -> jax.Array:
    """Add rows at indices that differ; rows beyond the last are dropped."""
    return values.at[at].add(rows, mode="drop")
