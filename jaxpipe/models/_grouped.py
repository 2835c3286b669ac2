"""Products of experts with their own tokens, which are lined up by expert.

Each expert has slots, and each choice of a token takes a slot of its expert. The products of all
experts are then one batched product over slots. Choices for which there is no slot are dropped, or
computed in blocks by a loop that runs as often as they need.

Tokens are the same on all devices of the axis `expert`, so each device takes the tokens of its own
experts, and one sum over the axis adds the results up. If samples are divided over `fsdp` or
positions over `sequence`, each device takes its own tokens, because it has the weights in any case.
So tokens are never exchanged. For N tokens of a device, c choices and P devices on the axis, a
device sends in the forward, in multiples of `N * H` values (the backward sends as many):

    sum over `expert` of tokens that it shares       2 (P - 1) / P      for N tokens of all P
    gather and scatter of divided tokens             2 (P - 1)          for N tokens of each
    all-to-all of divided tokens, one row a choice   2 c (P - 1) / P    for N tokens of each

Divided tokens would spare each device all but a share 1 / P of the attention. An all-to-all would
then send less than a gather only if c < P, into buffers for the worst case, in which all choices go
to one device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpipe.jaxpr import spec_axes
from jaxpipe.transformer import constrained

BLOCK = 256
"""Rows of a block of choices without slots. A product of fewer rows mostly waits for weights."""


class ExpertWeights(NamedTuple):
    """Weights of experts, `[E, in, out]`, and their biases, `[E, 1, out]` or None."""

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
        gate = product(rows, weights.gate, weights.gate_bias)
        up = product(rows, weights.up, weights.up_bias)
        if self.activation == "silu":
            h = nn.silu(gate) * up
        else:
            gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
            h = (up + 1) * gate * nn.sigmoid(1.702 * gate)
        h, bias = pin(h), weights.down_bias
        if self.scale_inputs:
            return product(h, weights.down, bias)
        # The gates multiply the hidden values, so that their gradient does not need the results.
        return product(h * factors, weights.down, None if bias is None else bias * factors)


class Queues(NamedTuple):
    """The choices of G groups of N tokens, lined up by expert, for each of P shards of experts.

    Choice `c * N + n` is choice c of token n, so that first choices come before second ones.

    Attributes:
        order: Choices sorted by expert, `[P, G, choices * N]`. Those of other shards come last.
        starts: Where the choices of each expert begin in `order`, `[P, G, E / P]`.
        loads: Number of choices of each expert, `[P, G, E / P]`.
        choices: The choice in each slot, `[P, E / P, G, room]`, or `choices * N` if it is empty.
        slots: The slot of each choice in its shard, `[P, G, choices * N]`, or the number of slots
            if it has none there. Slot `e * room + r` belongs to expert e of the shard.
    """

    order: jax.Array
    starts: jax.Array
    loads: jax.Array
    choices: jax.Array
    slots: jax.Array


@dataclass(frozen=True)
class Groups:
    """How groups of tokens and experts are divided over devices.

    Attributes:
        num_shards: Number P of shards of experts.
        choices: Number of choices of a token.
        expert: The automatic axis over which experts are divided, or None.
        samples: The automatic axes over which groups are divided, or None.
        features: The automatic axis over which hidden values are divided, or None.
    """

    num_shards: int
    choices: int
    expert: str | None
    samples: tuple[str, ...] | None
    features: str | None

    def on_devices(self, function: Callable[..., Any], given: Any, made: Any) -> Callable[..., Any]:
        """Run a function on each device's experts and groups.

        XLA (JAX 0.10) aborts at reads at indices if one automatic axis divides the indices and
        another the values. Here its partitioner does not see them.

        Args:
            function: The function. Its arguments must be divided over all axes that its results
                are divided over if they have gradients, because sums of gradients are left to XLA.
            given: Tree of what divides the first dims of arguments: `e` experts, `g` groups, `.`
                nothing.
            made: The same for its results.
        """
        axes = {"e": self.expert, "g": self.samples, ".": None}
        named = {axes[dim] for dims in jax.tree.leaves((given, made)) for dim in dims}
        manual = {axis for names in named for axis in spec_axes(names)}
        if not manual:
            return function
        specs = jax.tree.map(lambda dims: P(*(axes[dim] for dim in dims)), (given, made))
        return jax.shard_map(
            function, in_specs=specs[0], out_specs=specs[1], axis_names=manual, check_vma=False
        )

    def line_up(self, chosen: jax.Array, num_experts: int, room: int) -> Queues:
        """Line up the experts `[G, N, choices]` that tokens have chosen."""
        run = partial(_line_up, num_experts=num_experts // self.num_shards, room=room)
        made = Queues("eg", "eg", "eg", "e.g", "eg")  # pyright: ignore[reportArgumentType]  # dims
        return self.on_devices(run, ("g", "e"), made)(chosen, jnp.arange(self.num_shards))

    def shared(self, values: jax.Array) -> jax.Array:
        """Give each shard of experts the same values, `[G, ...]` to `[P, G, ...]`."""
        shape = self.num_shards, *values.shape
        return constrained(jnp.broadcast_to(values[None], shape), self.expert, self.samples)

    def summed(self, parts: jax.Array) -> jax.Array:
        """Sum over the shards of experts, `[P, G, ...]` to `[G, ...]`."""
        if self.num_shards == 1:
            return parts[0]
        # A product, because `jnp.sum` would send float32.
        ones = jnp.ones(self.num_shards, parts.dtype)
        return constrained(jnp.einsum("p...,p->...", parts, ones), self.samples)


def _line_up(chosen: jax.Array, shard: jax.Array, *, num_experts: int, room: int) -> Queues:
    """Line up the choices of a shard's `num_experts` experts."""
    own = chosen.swapaxes(1, 2).reshape(len(chosen), -1) - num_experts * shard[0]
    own = jnp.where((own >= 0) & (own < num_experts), own, num_experts)
    order = jnp.argsort(own, axis=-1, stable=True)
    loads = jnp.sum(own[..., None] == jnp.arange(num_experts)[None, None], axis=1)
    starts = jnp.cumsum(loads, axis=-1) - loads
    turns = jnp.arange(room)[None, None]
    found = jax.vmap(_taken)(order, starts[..., None] + turns)
    choices = jnp.where(turns < loads[..., None], found, own.shape[1]).swapaxes(0, 1)
    ranks = jnp.argsort(order, axis=-1) - jax.vmap(_taken)(starts, own)
    has_slot = (own < num_experts) & (ranks < room)
    slots = jnp.where(has_slot, own * room + ranks, num_experts * room)
    return jax.tree.map(lambda each: each[None], Queues(order, starts, loads, choices, slots))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dispatch(groups: Groups, x: jax.Array, choices: jax.Array, slots: jax.Array) -> jax.Array:
    """Copy tokens `[G, N, H]` to slots `[P, E / P, G, room, H]`. Empty slots are zero.

    It is linear and the transpose of `_combine`. Both read rows at indices, because an addition at
    indices would be in any order on GPUs.
    """
    del slots

    def run(x: jax.Array, choices: jax.Array) -> jax.Array:
        length = x.shape[1]
        # Empty slots hold a choice beyond the last; no token is at N.
        tokens = jnp.where(choices < groups.choices * length, choices % length, length)
        return jax.vmap(jax.vmap(jax.vmap(_taken), (None, 0)), (None, 0))(x, tokens)

    return groups.on_devices(run, ("g", "e.g"), "e.g")(x, choices)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _combine(groups: Groups, y: jax.Array, choices: jax.Array, slots: jax.Array) -> jax.Array:
    """Sum the slots of each token, `[P, E / P, G, room, H]` to `[G, N, H]`."""
    del choices

    def run(y: jax.Array, slots: jax.Array) -> jax.Array:
        rows = jnp.moveaxis(y, 2, 1).reshape(*slots.shape[:2], -1, y.shape[-1])
        found = jax.vmap(jax.vmap(_taken))(rows, slots)
        return found.reshape(*slots.shape[:2], groups.choices, -1, y.shape[-1]).sum(2)

    return groups.summed(groups.on_devices(run, ("e.g", "eg"), "eg")(y, slots))


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
        groups: How tokens and experts are divided. Unless it drops choices, a device has one group.
        feed_forward: What an expert computes.
        weights: The weights of all experts.
        x: Tokens `[G, N, H]`.
        gates: Gates of the choices, `[G, N, choices]`.
        queues: The tokens of each expert.
        drops: Whether choices without a slot are dropped.

    Returns:
        `[G, N, H]`.
    """
    num_groups, num_tokens, _ = x.shape
    room = queues.choices.shape[-1]
    drops = drops or room >= num_tokens
    shards = jax.tree.map(lambda w: w.reshape(groups.num_shards, -1, *w.shape[1:]), weights)

    def by_group(w: jax.Array) -> jax.Array:
        # A device adds its gradients up before they are summed over `fsdp`, once.
        ones = jnp.ones(num_groups, w.dtype)
        each = w[:, :, None] if num_groups == 1 else jnp.einsum("pehi,g->peghi", w, ones)
        return constrained(each, groups.expert, None, groups.samples)

    def pin(h: jax.Array) -> jax.Array:
        return constrained(h, groups.expert, None, groups.samples, None, groups.features)

    if drops:
        biases = (None if bias is None else bias[:, :, None] for bias in shards[3:])
        used, equation = ExpertWeights(*shards[:3], *biases), "pegch,pehi->pegci"
    else:
        used, equation = jax.tree.map(by_group, shards), "pegch,peghi->pegci"
    gates = groups.shared(gates.swapaxes(1, 2).reshape(num_groups, -1))
    of_slots = groups.on_devices(_of_slots, ("eg", "e.g"), "e.g")(gates, queues.choices)
    sent: Any = _dispatch(groups, x, queues.choices, queues.slots)
    made = feed_forward(used, sent, of_slots, equation, pin)
    made = constrained(made, groups.expert, None, groups.samples)
    y: Any = _combine(groups, made, queues.choices, queues.slots)
    if drops:
        return y
    blocks = _Blocks(feed_forward, room, min(BLOCK, room))
    return y + groups.summed(_beyond(groups, blocks, groups.shared(x), gates, used, queues))


def _of_slots(gates: jax.Array, choices: jax.Array) -> jax.Array:
    """Return the gates `[P, E / P, G, room]` of slots, from those of choices; 0 for empty slots."""
    by_choice = jax.vmap(_taken)  # over groups
    return jax.vmap(jax.vmap(by_choice, (None, 0)))(gates, choices)


@dataclass(frozen=True)
class _Blocks:
    """The choices without a slot, in blocks of rows of one expert.

    The functions see one group `x`, `[N, H]`, and one shard of experts.
    """

    feed_forward: FeedForward
    room: int
    size: int

    def forward(
        self, x: jax.Array, gates: jax.Array, weights: ExpertWeights, queues: Queues
    ) -> jax.Array:
        """Sum the results of all blocks, `[N, H]`."""

        def add(number: jax.Array, y: jax.Array) -> jax.Array:
            expert, choices, tokens = self._choose(number, queues, len(x))
            own = jax.tree.map(lambda w: w[expert], weights)
            made = self.feed_forward(own, _taken(x, tokens), _taken(gates, choices))
            return _added(y, tokens, made)

        return jax.lax.fori_loop(0, self._counts(queues).sum(), add, jnp.zeros_like(x))

    def backward(
        self,
        x: jax.Array,
        gates: jax.Array,
        weights: ExpertWeights,
        queues: Queues,
        dy: jax.Array,
    ) -> tuple[jax.Array, jax.Array, ExpertWeights]:
        """Compute the gradients of `x`, `gates` and `weights`. It runs the blocks again."""

        def add(number: jax.Array, sums: Any) -> Any:
            expert, choices, tokens = self._choose(number, queues, len(x))
            own = jax.tree.map(lambda w: w[expert], weights)
            given = own, _taken(x, tokens), _taken(gates, choices)
            down, drows, dfactors = jax.vjp(self.feed_forward, *given)[1](_taken(dy, tokens))
            dx, dgates, dweights = sums
            dweights = jax.tree.map(lambda total, part: total.at[expert].add(part), dweights, down)
            return _added(dx, tokens, drows), _added(dgates, choices, dfactors), dweights

        zeros = jax.tree.map(jnp.zeros_like, (x, gates, weights))
        return jax.lax.fori_loop(0, self._counts(queues).sum(), add, zeros)

    def _choose(
        self, number: jax.Array, queues: Queues, num_tokens: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return a block's expert, its choices and their tokens; empty rows are beyond the last."""
        counts = self._counts(queues)
        ends = jnp.cumsum(counts)
        expert = jnp.sum(number >= ends)
        turns = self.room + (number - ends[expert] + counts[expert]) * self.size
        turns += jnp.arange(self.size)
        found = _taken(queues.order, queues.starts[expert] + turns)
        is_used = turns < queues.loads[expert]
        choices = jnp.where(is_used, found, len(queues.order))
        return expert, choices, jnp.where(is_used, found % num_tokens, num_tokens)

    def _counts(self, queues: Queues) -> jax.Array:
        """Number of blocks of each expert."""
        return -(-jnp.maximum(queues.loads - self.room, 0) // self.size)


_OF_DEVICE = "eg", "eg", "e.g", ("eg", "eg", "eg")


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _beyond(
    groups: Groups,
    blocks: _Blocks,
    x: jax.Array,
    gates: jax.Array,
    weights: ExpertWeights,
    queues: Queues,
) -> Any:
    """Sum the results of each shard's choices without a slot, `[P, G, N, H]`.

    It has a derivative of its own, because JAX does not differentiate loops of unknown length in
    reverse.
    """

    def run(*given: Any) -> jax.Array:
        return blocks.forward(*_own(*given))[None, None]

    return groups.on_devices(run, _OF_DEVICE, "eg")(x, gates, weights, queues[:3])


def _beyond_forward(groups: Groups, blocks: _Blocks, *args: Any) -> tuple[Any, Any]:
    return _beyond(groups, blocks, *args), args


def _beyond_backward(groups: Groups, blocks: _Blocks, args: Any, dy: jax.Array) -> tuple[Any, ...]:
    def run(dy: jax.Array, *given: Any) -> Any:
        dx, dgates, dweights = blocks.backward(*_own(*given), dy=dy[0, 0])
        return (
            dx[None, None],
            dgates[None, None],
            jax.tree.map(lambda w: w[None, :, None], dweights),
        )

    *given, queues = args
    found = groups.on_devices(run, ("eg", *_OF_DEVICE), _OF_DEVICE[:3])(dy, *given, queues[:3])
    return *found, None


_beyond.defvjp(_beyond_forward, _beyond_backward)


def _own(x: Any, gates: Any, weights: Any, sorted_choices: Any) -> tuple[Any, ...]:
    """Drop the dims of shards and groups, of which a device has one."""
    weights = jax.tree.map(lambda w: w[0, :, 0], weights)
    order, starts, loads = (each[0, 0] for each in sorted_choices)
    return x[0, 0], gates[0, 0], weights, Queues(order, starts, loads, order, order)


def _taken(values: jax.Array, at: jax.Array) -> jax.Array:
    """Read rows at indices; beyond the last row are zeros."""
    return jnp.take(values, at, axis=0, mode="fill", fill_value=0)


def _added(values: jax.Array, at: jax.Array, rows: jax.Array) -> jax.Array:
    """Add rows at indices that differ; rows beyond the last are dropped."""
    return values.at[at].add(rows, mode="drop")
