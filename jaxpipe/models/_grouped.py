"""Products of experts with their own tokens, which are lined up by expert and sent to it.

Each device has a group of tokens and lines up their choices for all experts. Each expert has slots,
and each choice takes a slot of its expert. An all-to-all over the axis `expert` sends the slots to
the devices with the experts. The products of all experts are then one batched product over slots,
and a second all-to-all sends the results back. Choices for which there is no slot follow in rounds
of a loop: in each, a device sends one block of rows to each device. The loop runs as often as any
device of the axis needs.

For N tokens of a device, c choices and P devices on the axis, a device sends in the forward, in
multiples of `N * H` values (the backward sends as many):

    slots for 1.25 times the mean load, there and back    2.5 c (P - 1) / P
    `ragged_all_to_all`, one row a choice                 2 c (P - 1) / P
    gather of all tokens, and scatter of results          2 (P - 1)

A ragged exchange would send a fifth less, but into buffers for the worst case, in which all choices
of all devices go to one, and XLA (JAX 0.10) has none for CPUs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpipe.models.transformer import Axes, constrained

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
        """Map rows `[..., C, H]`, with gates `[..., C]`; `pin` constrains the hidden values."""
        factors = gates[..., None]

        def product(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
            y = jnp.einsum(equation, x, kernel)
            return y if bias is None else y + bias

        # As in Llama 4. In other families, gates scale what comes out.
        rows = rows * factors if self.scale_inputs else rows
        gate = product(rows, weights.gate, weights.gate_bias)
        up = product(rows, weights.up, weights.up_bias)
        if self.activation == "silu":
            h = nn.silu(gate) * up
        else:
            # gpt-oss clamps before the activation; 7 and 1.702 are `swiglu_limit` and
            # `swiglu_alpha`.
            gate = jnp.minimum(gate, 7.0)
            up = jnp.clip(up, -7.0, 7.0)
            h = (up + 1) * gate * nn.sigmoid(1.702 * gate)
        h = pin(h)
        bias = weights.down_bias
        if self.scale_inputs:
            return product(h, weights.down, bias)
        # The gates multiply the hidden values, so that their gradient does not need the results.
        return product(h * factors, weights.down, None if bias is None else bias * factors)


class Queue(NamedTuple):
    """The choices of N tokens, lined up by expert.

    Choice `c * N + n` is choice c of token n, so that first choices come before second ones.

    Attributes:
        order: Choices sorted by expert, `[choices * N]`. Those of no expert come last.
        starts: Where the choices of each expert begin in `order`, `[E]`.
        loads: Number of choices of each expert, `[E]`.
        ranks: Turn of each choice at its expert, `[choices * N]`.
    """

    order: jax.Array
    starts: jax.Array
    loads: jax.Array
    ranks: jax.Array

    @classmethod
    def of(cls, chosen: jax.Array, num_experts: int) -> "Queue":
        """Line up the experts `[choices * N]`; `num_experts` stands for none."""
        # Stable, so that choices of one expert stay in the order of their turns.
        order = jnp.argsort(chosen, stable=True)
        loads = jnp.sum(chosen[:, None] == jnp.arange(num_experts)[None], axis=0)
        starts = jnp.cumsum(loads) - loads
        # The second sort inverts the first: the position of each choice in `order`.
        return cls(order, starts, loads, jnp.argsort(order) - _taken(starts, chosen))


class Routes(NamedTuple):
    """Which choices have which slots. In all groups, it begins with a dim G."""

    # The choice in each slot, `[E, room]`, or `choices * N` if it is empty.
    choices: jax.Array
    # The slot of each choice, `[choices * N]`, or `E * room` if it has none. Slot `e * room + r`
    # belongs to expert e.
    slots: jax.Array


@dataclass(frozen=True)
class Groups:
    """How G groups of tokens, one for each device, and E experts are divided over devices.

    Rows of experts are `[E, G / P, P * C, ...]`, in which the P devices of the axis `expert` have
    sent C rows each. `axes` divide groups, `expert` among them; `features` divides hidden values.
    """

    num_shards: int
    expert: str | None
    axes: tuple[str, ...]
    features: str | None

    @property
    def others(self) -> Axes:
        """The axes over which the groups are divided of which an expert has rows."""
        return tuple(axis for axis in self.axes if axis != self.expert) or None

    def on_devices(self, function: Callable[..., Any], given: Any, made: Any) -> Callable[..., Any]:
        """Run a function on each device's group and experts, without the dim of groups.

        `given` and `made` are trees of the first dims of arguments and results: `g` is `[G, ...]`,
        and `eg` is `[E, G / P, ...]`.
        """

        def run(*args: Any) -> Any:
            found = function(*_over(given, jnp.squeeze, args))
            return _over(made, jnp.expand_dims, found)

        if not self.axes:
            return run
        specs = {"g": P(self.axes), "eg": P(self.expert, self.others)}
        given_specs, made_specs = jax.tree.map(specs.__getitem__, (given, made))
        # XLA (JAX 0.10) aborts at reads at indices if one automatic axis divides the indices and
        # another the values. Here its partitioner does not see them. Sums of gradients are left to
        # XLA, so an argument with a gradient must be divided over all axes of the results.
        return jax.shard_map(
            run,
            in_specs=given_specs,
            out_specs=made_specs,
            axis_names=set(self.axes),
            check_vma=False,
        )

    def exchanged(self, values: Any) -> Any:
        """Send row p of each array `[P, ...]` to device p of the axis, inside `on_devices`."""
        # All experts are here, and P is 1.
        if self.expert is None:
            return values
        return jax.tree.map(lambda x: jax.lax.all_to_all(x, self.expert, 0, 0), values)

    def sent(self, rows: jax.Array) -> jax.Array:
        """Send slots `[E, room, H]` to their experts, `[E / P, P * room, H]`."""
        rows = self.exchanged(rows.reshape(self.num_shards, -1, *rows.shape[1:]))
        return rows.swapaxes(0, 1).reshape(rows.shape[1], -1, rows.shape[-1])

    def returned(self, rows: jax.Array) -> jax.Array:
        """Send the results in slots back; the transpose of `sent`."""
        rows = rows.reshape(rows.shape[0], self.num_shards, -1, rows.shape[-1])
        return self.exchanged(rows.swapaxes(0, 1)).reshape(-1, *rows.shape[2:])

    def pinned(self, rows: jax.Array, features: str | None = None) -> jax.Array:
        """Constrain rows of experts, or their hidden values."""
        return constrained(rows, self.expert, self.others, None, features)


_DIM = {"g": 0, "eg": 1}
"""The dim of groups, of which a device has one."""


def _over(dims: Any, change: Callable[[jax.Array, int], jax.Array], values: Any) -> Any:
    """Change the dim of groups of all arrays of a tree, of which `dims` is a prefix."""
    return jax.tree.map(
        lambda dim, part: jax.tree.map(lambda x: change(x, _DIM[dim]), part), dims, values
    )


def within_capacity(chosen: jax.Array, num_experts: int, capacity: int, samples: Axes) -> jax.Array:
    """Return which choices `[B, T, choices]` are among the first of their expert in a sequence."""

    def run(chosen: jax.Array) -> jax.Array:
        ranks = jax.vmap(lambda each: Queue.of(each, num_experts).ranks)(_by_choice(chosen))
        return (ranks < capacity).reshape(len(chosen), chosen.shape[2], -1).swapaxes(1, 2)

    # Below, sequences are lined up on their own devices, as in `Groups.on_devices`.
    if samples is None:
        return run(chosen)
    names = {samples} if isinstance(samples, str) else set(samples)
    spec = P(samples)
    return jax.shard_map(run, in_specs=spec, out_specs=spec, axis_names=names, check_vma=False)(
        chosen
    )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _dispatch(groups: Groups, num_rows: int, x: jax.Array, routes: Routes) -> jax.Array:
    """Copy rows `[G, num_rows, H]` of tokens or choices to slots `[E, G / P, P * room, H]`."""

    # Linear, and the transpose of `_combine`. Both read rows at indices, because an addition at
    # indices would be in any order on GPUs.
    def run(x: jax.Array, routes: Routes) -> jax.Array:
        # Empty slots hold a choice beyond the last.
        is_used = routes.choices < len(routes.slots)
        return groups.sent(_taken(x, jnp.where(is_used, routes.choices % num_rows, num_rows)))

    return groups.on_devices(run, ("g", "g"), "eg")(x, routes)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _combine(groups: Groups, num_rows: int, y: jax.Array, routes: Routes) -> jax.Array:
    """Sum the slots of each row, `[E, G / P, P * room, H]` to `[G, num_rows, H]`."""

    def run(y: jax.Array, routes: Routes) -> jax.Array:
        rows = groups.returned(y).reshape(-1, y.shape[-1])
        return _taken(rows, routes.slots).reshape(-1, num_rows, y.shape[-1]).sum(0)

    return groups.on_devices(run, ("eg", "g"), "g")(y, routes)


def _derive(linear: Any, transpose: Any) -> None:
    """Give a linear function of rows its transpose as derivative; routes have none."""

    def forward(groups: Groups, num_rows: int, rows: Any, routes: Any) -> tuple[Any, Any]:
        return linear(groups, num_rows, rows, routes), routes

    def backward(groups: Groups, num_rows: int, routes: Any, rows: Any) -> tuple[Any, None]:
        return transpose(groups, num_rows, rows, routes), None

    linear.defvjp(forward, backward)


_derive(_dispatch, _combine)
_derive(_combine, _dispatch)


def mixture(
    groups: Groups,
    feed_forward: FeedForward,
    weights: ExpertWeights,
    x: jax.Array,
    gates: jax.Array,
    chosen: jax.Array,
    room: int,
    *,
    has_rest: bool,
) -> jax.Array:
    """Sum the results of each token's experts, `[G, N, H]`, for tokens of the same shape.

    `gates` and `chosen` are `[G, N, choices]`; the expert E means none. `room` is the number of
    slots of an expert for each group. With `has_rest`, choices may have no slot.
    """
    (num_experts, *_), num_tokens = weights.gate.shape, x.shape[1]

    def line_up(chosen: jax.Array) -> tuple[Queue, Routes]:
        return _line_up(chosen, num_experts, room)

    chosen = _by_choice(chosen)
    gates = _by_choice(gates)
    queue, routes = groups.on_devices(line_up, ("g",), ("g", "g"))(chosen)

    def by_group(w: jax.Array) -> jax.Array:
        # A device adds its gradients up before they are summed over `fsdp`, once.
        num_groups = len(x) // groups.num_shards
        ones = jnp.ones(num_groups, w.dtype)
        each = w[:, None] if num_groups == 1 else jnp.einsum("ehi,g->eghi", w, ones)
        return groups.pinned(each)

    # The rounds read single experts on each device, so weights need the dim of groups.
    if has_rest:
        weights = jax.tree.map(by_group, weights)
        equation = "egch,eghi->egci"
    else:
        biases = (None if bias is None else bias[:, None] for bias in weights[3:])
        weights = ExpertWeights(*weights[:3], *biases)
        equation = "egch,ehi->egci"
    sent: Any = _dispatch(groups, num_tokens, x, routes)
    # By choice and not by token, because each choice has its own gate.
    factors: Any = _dispatch(groups, chosen.shape[1], gates[..., None], routes)
    pin = partial(groups.pinned, features=groups.features)
    made = feed_forward(weights, sent, factors[..., 0], equation, pin)
    y: Any = _combine(groups, num_tokens, groups.pinned(made), routes)
    if not has_rest:
        return y
    rounds = _Rounds(groups, feed_forward, room, min(BLOCK, room))
    return y + _beyond(rounds, x, gates, weights, queue)


def _by_choice(values: jax.Array) -> jax.Array:
    """Order values of choices `[G, N, choices]` as in `Queue`, `[G, choices * N]`."""
    return values.swapaxes(1, 2).reshape(len(values), -1)


def _line_up(chosen: jax.Array, num_experts: int, room: int) -> tuple[Queue, Routes]:
    queue = Queue.of(chosen, num_experts)
    turns = jnp.arange(room)[None]
    found = _taken(queue.order, queue.starts[:, None] + turns)
    # Beyond the last choice: `_taken` reads zeros there.
    choices = jnp.where(turns < queue.loads[:, None], found, len(chosen))
    has_slot = (chosen < num_experts) & (queue.ranks < room)
    slots = jnp.where(has_slot, chosen * room + queue.ranks, num_experts * room)
    return queue, Routes(choices, slots)


@dataclass(frozen=True)
class _Rounds:
    """The choices without a slot, in blocks of rows of one expert.

    In each round, a device sends one block to each device of the axis, so that all must take part
    in all rounds. The functions run in `Groups.on_devices`, on one group `[N, H]` and its experts.
    """

    groups: Groups
    feed_forward: FeedForward
    room: int
    size: int

    def forward(
        self, x: jax.Array, gates: jax.Array, weights: ExpertWeights, queue: Queue
    ) -> jax.Array:
        """Sum the results of all blocks, `[N, H]`."""

        def compute(block: Any) -> jax.Array:
            expert, rows, factors = block
            return self.feed_forward(jax.tree.map(lambda w: w[expert], weights), rows, factors)

        def add(number: jax.Array, y: jax.Array) -> jax.Array:
            experts, choices, tokens = self._choose(number, queue, len(x))
            # The expert goes along with its rows, because each device chooses in its own order.
            given = experts, _taken(x, tokens), _taken(gates, choices)
            made = jax.lax.map(compute, self.groups.exchanged(given))
            return _added(y, tokens, self.groups.exchanged(made))

        return jax.lax.fori_loop(0, self._number(queue), add, jnp.zeros_like(x))

    def backward(
        self,
        x: jax.Array,
        gates: jax.Array,
        weights: ExpertWeights,
        queue: Queue,
        dy: jax.Array,
    ) -> tuple[jax.Array, jax.Array, ExpertWeights]:
        """Compute the gradients of `x`, `gates` and `weights`. It runs the rounds again."""

        def compute(dweights: ExpertWeights, block: Any) -> tuple[ExpertWeights, Any]:
            expert, rows, factors, drows = block
            own = jax.tree.map(lambda w: w[expert], weights)
            down, *back = jax.vjp(self.feed_forward, own, rows, factors)[1](drows)
            return jax.tree.map(lambda w, part: w.at[expert].add(part), dweights, down), back

        def add(number: jax.Array, sums: Any) -> Any:
            experts, choices, tokens = self._choose(number, queue, len(x))
            given = experts, _taken(x, tokens), _taken(gates, choices), _taken(dy, tokens)
            dx, dgates, dweights = sums
            dweights, back = jax.lax.scan(compute, dweights, self.groups.exchanged(given))
            drows, dfactors = self.groups.exchanged(back)
            return _added(dx, tokens, drows), _added(dgates, choices, dfactors), dweights

        # The forward's values are not stored: their number is not known.
        zeros = jax.tree.map(jnp.zeros_like, (x, gates, weights))
        return jax.lax.fori_loop(0, self._number(queue), add, zeros)

    def _choose(
        self, number: jax.Array, queue: Queue, num_tokens: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """A round's experts `[P]`, counted on each device, and choices and tokens `[P, size]`."""
        counts = self._counts(queue)
        ends = jnp.cumsum(counts, axis=1)
        # Devices without a further block get an empty one of their last expert.
        experts = jnp.minimum(jnp.sum(number >= ends, axis=1), counts.shape[1] - 1)
        every = jnp.arange(len(counts)) * counts.shape[1] + experts
        first = number - (ends - counts).reshape(-1)[every]
        turns = self.room + first[:, None] * self.size + jnp.arange(self.size)[None]
        found = _taken(queue.order, queue.starts[every][:, None] + turns)
        is_used = turns < queue.loads[every][:, None]
        # Empty rows are beyond the last.
        choices = jnp.where(is_used, found, len(queue.order))
        return experts, choices, jnp.where(is_used, found % num_tokens, num_tokens)

    def _counts(self, queue: Queue) -> jax.Array:
        """Number of blocks of each expert, `[P, E / P]`."""
        counts = -(-jnp.maximum(queue.loads - self.room, 0) // self.size)
        return counts.reshape(self.groups.num_shards, -1)

    def _number(self, queue: Queue) -> jax.Array:
        most = jnp.max(self._counts(queue).sum(1))
        expert = self.groups.expert
        # All devices of the axis must run the same number of exchanges.
        return most if expert is None else jax.lax.pmax(most, expert)


_OF_ROUNDS: tuple[Literal["g", "eg"], ...] = ("g", "g", "eg", "g")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _beyond(
    rounds: _Rounds, x: jax.Array, gates: jax.Array, weights: ExpertWeights, queue: Queue
) -> Any:
    """Sum the results of each token's choices without a slot, `[G, N, H]`."""
    # With a derivative of its own, because JAX does not differentiate loops of unknown length in
    # reverse.
    return rounds.groups.on_devices(rounds.forward, _OF_ROUNDS, "g")(x, gates, weights, queue)


def _beyond_forward(rounds: _Rounds, *args: Any) -> tuple[Any, Any]:
    return _beyond(rounds, *args), args


def _beyond_backward(rounds: _Rounds, args: Any, dy: jax.Array) -> tuple[Any, ...]:
    run = rounds.groups.on_devices(rounds.backward, (*_OF_ROUNDS, "g"), _OF_ROUNDS[:3])
    return *run(*args, dy), None


_beyond.defvjp(_beyond_forward, _beyond_backward)


def _taken(values: jax.Array, at: jax.Array) -> jax.Array:
    """Read rows at indices; beyond the last row are zeros."""
    return jnp.take(values, at, axis=0, mode="fill", fill_value=0)


def _added(values: jax.Array, at: jax.Array, rows: jax.Array) -> jax.Array:
    """Add blocks of rows at indices `[blocks, size]`, distinct in a block; others are dropped."""

    def add(values: jax.Array, block: Any) -> tuple[jax.Array, None]:
        at, rows = block
        return values.at[at].add(rows, mode="drop"), None

    # In turn, because a sum of all would be in any order on GPUs.
    return jax.lax.scan(add, values, (at, rows))[0]
