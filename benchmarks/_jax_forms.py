"""Pipelines as programs of JAX's ecosystem write them, as small as they can be.

The same GPT, loss and SGD step.

- `scan_in_shard_map`: GPipe as a scan over ticks in which stages exchange by `ppermute`,
  differentiated as a whole.
- `scan_over_vmap`: the same with a dim of stages, mapped over and rolled; XLA's partitioner makes
  the exchange. MaxText and Praxis have this form.
- `program_per_stage`: 1F1B driven from Python, a jitted forward and backward for each stage. JaxPP
  has this form.

In the scans idle stages compute and drop what they computed, as they do in the originals. Where it
is a choice, what is faster here is taken: blocks in straight-line code, each block's weights an
array of its own, head and loss divided over the stages.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks._gpt import Block, Embed, Head, cross_entropy

LEARNING_RATE = 0.1
Params = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """A training step that goes on from its own last parameters.

    Attributes:
        run: One step, which all devices have ended when it returns; gives its loss.
        temporary_bytes: Bytes on the device with most, beside parameters and batch.
    """

    run: Callable[[], float]
    temporary_bytes: int


@dataclass(frozen=True)
class Gpt:
    """The model as functions of the parameters of one layer.

    Attributes:
        dim: Width.
        heads: Attention heads.
        vocab: Tokens.
        remat: Whether each block is computed again in the backward.
    """

    dim: int
    heads: int
    vocab: int
    remat: bool

    def embed(self, params: Params, x: jax.Array) -> jax.Array:
        """Map `[..., time]` to `[..., time, dim]`."""
        return Embed(self.vocab, self.dim).apply({"params": params}, x)

    def blocks(self, blocks: list[Params], x: jax.Array, *, prevent_cse: bool) -> jax.Array:
        """Apply blocks one after another to `[batch, time, dim]`."""

        def block(params: Params, x: jax.Array) -> jax.Array:
            return Block(self.dim, self.heads).apply({"params": params}, x)

        for params in blocks:
            x = (jax.checkpoint(block, prevent_cse=prevent_cse) if self.remat else block)(params, x)
        return x

    def loss(self, params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        """Head and mean loss of `[..., time, dim]`."""
        return cross_entropy(Head(self.vocab).apply({"params": params}, x), y)


def scan_in_shard_map(
    gpt: Gpt, num_stages: int, layers: list[Params], x: np.ndarray, y: np.ndarray
) -> Step:
    """GPipe: each stage a device in `shard_map`."""
    mesh = jax.make_mesh((num_stages,), ("stage",), devices=jax.devices()[:num_stages])
    count, last = len(x), num_stages - 1

    def loss_fn(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        stage = lax.axis_index("stage")
        blocks = jax.tree.map(lambda leaf: leaf[0], params["blocks"])

        def tick(state: jax.Array, t: jax.Array) -> tuple[jax.Array, jax.Array]:
            entering = gpt.embed(params["embed"], x[jnp.minimum(t, count - 1)])
            state = gpt.blocks(blocks, jnp.where(stage == 0, entering, state), prevent_cse=False)
            return lax.ppermute(state, "stage", [(s, s + 1) for s in range(last)]), state

        start = lax.pcast(jnp.zeros((*x.shape[1:], gpt.dim)), "stage", to="varying")
        outputs = lax.scan(tick, start, jnp.arange(count + last))[1][last:]
        # Of the last stage's outputs every stage takes an equal share through the head.
        outputs = lax.psum_scatter(jnp.where(stage == last, outputs, 0.0), "stage", tiled=True)
        labels = lax.dynamic_slice_in_dim(y, stage * (count // num_stages), count // num_stages)
        return lax.pmean(gpt.loss(params["head"], outputs, labels), "stage")

    specs = {"embed": P(), "blocks": P("stage"), "head": P()}
    return _one_program(
        jax.shard_map(loss_fn, mesh=mesh, in_specs=(specs, P(), P()), out_specs=P()),
        mesh,
        layers,
        x,
        y,
    )


def scan_over_vmap(
    gpt: Gpt, num_stages: int, layers: list[Params], x: np.ndarray, y: np.ndarray
) -> Step:
    """GPipe: stages a sharded dim that is mapped over."""
    mesh = jax.make_mesh(
        (num_stages,),
        ("stage",),
        devices=jax.devices()[:num_stages],
        axis_types=(jax.sharding.AxisType.Auto,),
    )
    by_stage, last = NamedSharding(mesh, P("stage")), num_stages - 1

    def loss_fn(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        def tick(state: jax.Array, entering: jax.Array) -> tuple[jax.Array, jax.Array]:
            state = lax.with_sharding_constraint(
                jnp.roll(state, 1, axis=0).at[0].set(entering), by_stage
            )
            state = jax.vmap(lambda blocks, x: gpt.blocks(blocks, x, prevent_cse=False))(
                params["blocks"], state
            )
            return lax.with_sharding_constraint(state, by_stage), state[-1]

        entering = jnp.pad(gpt.embed(params["embed"], x), ((0, last), (0, 0), (0, 0), (0, 0)))
        start = jnp.zeros((num_stages, *entering.shape[1:]))
        outputs = lax.with_sharding_constraint(lax.scan(tick, start, entering)[1][last:], by_stage)
        return gpt.loss(params["head"], outputs, lax.with_sharding_constraint(y, by_stage))

    return _one_program(loss_fn, mesh, layers, x, y)


def _one_program(
    loss_fn: Callable[..., jax.Array],
    mesh: jax.sharding.Mesh,
    layers: list[Params],
    x: np.ndarray,
    y: np.ndarray,
) -> Step:
    """The step of a loss of the whole batch, its parameters on the mesh."""

    def step(params: Params, x: jax.Array, y: jax.Array) -> tuple[Params, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads), loss

    num_stages = mesh.size
    blocks = layers[1:-1]
    per_stage = len(blocks) // num_stages
    stacked = [
        jax.tree.map(lambda *leaves: np.stack(leaves), *blocks[i::per_stage])
        for i in range(per_stage)
    ]
    params: Params = {"embed": layers[0], "blocks": stacked, "head": layers[-1]}
    specs = {"embed": P(), "blocks": P("stage"), "head": P()}
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    # A copy: the step donates its parameters, and on CPU an array may share the host's memory.
    held = [
        jax.tree.map(
            jnp.copy, {name: jax.device_put(params[name], shardings[name]) for name in params}
        )
    ]
    x, y = jax.device_put((x, y), NamedSharding(mesh, P()))
    out_shardings = (jax.tree.map(lambda leaf: leaf.sharding, held[0]), NamedSharding(mesh, P()))
    compiled = (
        jax.jit(step, donate_argnums=0, out_shardings=out_shardings).lower(held[0], x, y).compile()
    )

    def run() -> float:
        held[0], loss = jax.block_until_ready(compiled(held[0], x, y))
        return float(loss)

    return Step(run, compiled.memory_analysis().temp_size_in_bytes)


def program_per_stage(
    gpt: Gpt, num_stages: int, layers: list[Params], x: np.ndarray, y: np.ndarray
) -> Step:
    """1F1B: Python starts each forward and backward of each stage, and moves what they exchange."""
    per_stage = (len(layers) - 2) // num_stages
    parts: list[Params] = [
        {"blocks": layers[1 + s * per_stage :][:per_stage]} for s in range(num_stages)
    ]
    parts[0]["embed"] = layers[0]
    parts[-1]["head"] = layers[-1]
    stages = [
        _Stage(gpt, part, device, len(x))
        for part, device in zip(parts, jax.devices(), strict=False)
    ]
    xs, ys = jax.device_put(list(x), stages[0].device), jax.device_put(list(y), stages[-1].device)
    order = list(_one_f_one_b(num_stages, len(x)))

    def run() -> float:
        activations, gradients = (
            {(0, m): value for m, value in enumerate(xs)},
            dict[tuple[int, int], jax.Array](),
        )
        losses: list[jax.Array] = []
        for s, m, is_forward in order:
            stage, before = stages[s], stages[s - 1]
            if is_forward and s + 1 < num_stages:
                out = stage.run_forward(m, activations.pop((s, m)))
                activations[s + 1, m] = jax.device_put(out, stages[s + 1].device)
                continue
            if s + 1 < num_stages:
                dx = stage.run_backward(m, gradients.pop((s, m)))
            else:
                dx, loss = stage.run_both(activations.pop((s, m)), ys[m])
                losses.append(loss)
            if s > 0:
                gradients[s - 1, m] = jax.device_put(dx, before.device)
        # The last loss is there before the other stages' last backwards, which nobody else's time
        # may hold.
        jax.block_until_ready([stage.run_update() for stage in stages])
        return float(sum(losses)) / len(x)

    value = np.zeros((*x.shape[1:], gpt.dim), np.float32)
    num_bytes = [stage.last_bytes(value, y[0]) if stage is stages[-1] else 0 for stage in stages]
    for s, stage in enumerate(stages[:-1]):
        num_bytes[s] = stage.num_bytes(value if s else x[0], min(len(x), num_stages - s))
    return Step(run, max(num_bytes))


def _one_f_one_b(num_stages: int, num_microbatches: int) -> Iterator[tuple[int, int, bool]]:
    """Stage, microbatch and whether it is a forward.

    The last stage's backwards come with their forwards.
    """
    last = num_stages - 1
    for half_tick in range(2 * (num_microbatches + last)):
        for s in range(num_stages):
            for is_forward, start in ((True, s), (False, 2 * num_stages - s - 1)):
                m, odd = divmod(half_tick - start, 2)
                if not odd and 0 <= m < num_microbatches and (is_forward or s < last):
                    yield s, m, is_forward


class _Stage:
    """A stage's programs, parameters and gradient sums, and the backwards that wait."""

    def __init__(self, gpt: Gpt, params: Params, device: jax.Device, num_microbatches: int) -> None:
        def apply(params: Params, x: jax.Array) -> jax.Array:
            entering = gpt.embed(params["embed"], x) if "embed" in params else x
            return gpt.blocks(params["blocks"], entering, prevent_cse=True)

        def forward(params: Params, x: jax.Array) -> tuple[jax.Array, Any]:
            # The backward as a value: an array for each residual. Tokens have no gradient.
            if "embed" in params:
                return jax.vjp(lambda params: apply(params, x), params)
            return jax.vjp(apply, params, x)

        def backward(sums: Params, vjp: Any, dy: jax.Array) -> tuple[Params, list[jax.Array]]:
            grads, *dx = vjp(dy)
            return jax.tree.map(jnp.add, sums, grads), dx

        def both(
            sums: Params, params: Params, x: jax.Array, y: jax.Array
        ) -> tuple[Params, jax.Array, jax.Array]:
            def loss_fn(params: Params, x: jax.Array) -> jax.Array:
                return gpt.loss(params["head"], apply(params, x), y)

            loss, (grads, dx) = jax.value_and_grad(loss_fn, argnums=(0, 1))(params, x)
            return jax.tree.map(jnp.add, sums, grads), dx, loss

        def update(params: Params, sums: Params) -> tuple[Params, Params]:
            rate = LEARNING_RATE / num_microbatches
            return jax.tree.map(lambda p, g: p - rate * g, params, sums), jax.tree.map(
                jnp.zeros_like, sums
            )

        self.device = device
        self._forward, self._backward = jax.jit(forward), jax.jit(backward, donate_argnums=0)
        self._both, self._update = (
            jax.jit(both, donate_argnums=0),
            jax.jit(update, donate_argnums=(0, 1)),
        )
        self._params = jax.tree.map(jnp.copy, jax.device_put(params, device))
        self._sums = jax.tree.map(jnp.zeros_like, self._params)
        self._vjps: dict[int, Any] = {}

    def run_forward(self, microbatch: int, x: jax.Array) -> jax.Array:
        out, self._vjps[microbatch] = self._forward(self._params, x)
        return out

    def run_backward(self, microbatch: int, dy: jax.Array) -> Any:
        self._sums, dx = self._backward(self._sums, self._vjps.pop(microbatch), dy)
        return dx[0] if dx else None

    def run_both(self, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        self._sums, dx, loss = self._both(self._sums, self._params, x, y)
        return dx, loss

    def run_update(self) -> Params:
        self._params, self._sums = self._update(self._params, self._sums)
        return self._params

    def num_bytes(self, value: np.ndarray, num_waiting: int) -> int:
        """Gradient sums, residuals in flight and the larger program's temporaries.

        Residuals are those of the microbatches in flight.
        """
        x = jax.device_put(value, self.device)
        out, vjp = self._forward(self._params, x)
        # Weights among the residuals are the parameters themselves.
        weights = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(self._params)}
        fresh = [
            leaf.nbytes
            for leaf in jax.tree.leaves(vjp)
            if leaf.unsafe_buffer_pointer() not in weights
        ]
        programs = (
            _temporaries(self._forward, self._params, x),
            _temporaries(self._backward, self._sums, vjp, out),
        )
        return self._sum_bytes() + num_waiting * sum(fresh) + max(programs)

    def last_bytes(self, x: np.ndarray, y: np.ndarray) -> int:
        """Gradient sums and temporaries of the last stage, where nothing waits."""
        return self._sum_bytes() + _temporaries(self._both, self._sums, self._params, x, y)

    def _sum_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._sums))


def _temporaries(function: Any, *args: Any) -> int:
    return function.lower(*args).compile().memory_analysis().temp_size_in_bytes
