"""Pipelines as programs of JAX's ecosystem write them, as small as they can be.

The same model, loss and optimiser step.

- `scan_in_shard_map`: GPipe as a scan over ticks in which stages exchange by `ppermute`,
  differentiated as a whole.
- `scan_over_vmap`: the same with a dim of stages, mapped over and rolled; XLA's partitioner makes
  the exchange. MaxText and Praxis have this form. Microbatches may go round the stages several
  times, through another chunk of blocks each time: MaxText's circular pipeline.
- `program_per_stage`: 1F1B driven from Python, a jitted forward and backward for each stage. JaxPP
  has this form.

In the scans idle stages compute and drop what they computed, as they do in the originals. Where it
is a choice, the better one is taken: blocks in straight-line code, each block's weights an array of
its own, head and loss divided over the stages, and so are the parameters of embedding and head and
what the optimiser keeps of them.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.checkpointing import keep_kernels

LEARNING_RATE = 0.1
Params = dict[str, Any]
Loss = Callable[[Params, jax.Array, jax.Array], jax.Array]
"""The mean loss of a batch `[num_microbatches, microbatch_size, ...]`."""

_KEEP_PRODUCTS = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_saveable, keep_kernels
)


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
class Model:
    """The model as functions of the parameters of one layer.

    Attributes:
        embed: The first layer.
        block: The layer that is repeated.
        head: The last layer.
        loss_fn: The mean loss of the head's output and labels.
        recompute: What of a block is computed again in the backward: nothing that JAX keeps by
            itself, all but matrix products and attention (MaxText's policy `minimal`), or all.
        dtype: What layers compute in. Parameters and sums of gradients keep their own dtype.
    """

    embed: nn.Module
    block: nn.Module
    head: nn.Module
    loss_fn: Callable[[jax.Array, jax.Array], jax.Array]
    recompute: Literal["nothing", "cheap", "all"]
    dtype: Any = jnp.float32

    def enter(self, params: Params, x: jax.Array) -> jax.Array:
        """Embed tokens `[..., time]`."""
        return self._apply(self.embed, params, x)

    def blocks(
        self,
        blocks: list[Params],
        x: jax.Array,
        *,
        prevent_cse: bool,
        pick: Callable[[jax.Array], jax.Array] = lambda leaf: leaf,
    ) -> jax.Array:
        """Apply blocks one after another to `[batch, time, dim]`.

        `pick` takes the weights of the block out of each array; a backward that computes anything
        again takes them anew, so that no tick keeps a copy.
        """

        def block(params: Params, x: jax.Array) -> jax.Array:
            return self._apply(self.block, jax.tree.map(pick, params), x)

        if self.recompute != "nothing":
            policy = _KEEP_PRODUCTS if self.recompute == "cheap" else None
            block = jax.checkpoint(block, prevent_cse=prevent_cse, policy=policy)
        for params in blocks:
            x = block(params, x)
        return x

    def loss(self, params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        """Head and mean loss of `[..., time, dim]`."""
        return self.loss_fn(self._apply(self.head, params, x), y)

    def _apply(self, layer: nn.Module, params: Params, x: jax.Array) -> Any:
        return layer.apply({"params": jax.tree.map(lambda p: p.astype(self.dtype), params)}, x)


@dataclass(frozen=True)
class Form:
    """A pipeline whose training step is one program.

    Attributes:
        loss: Makes the loss of the whole batch, for stages along a mesh.
        repeats: Chunks of blocks that a stage holds.
        maps_stages: Whether stages are a dim that is mapped over. XLA's partitioner does not divide
            kernels that it does not know: layers must call them in a `shard_map`.
    """

    loss: Callable[[Model, Mesh], Loss]
    repeats: int = 1
    maps_stages: bool = False


class OneProgram:
    """The training step of a form, for devices that need not be there.

    Attributes:
        init: Makes parameters and the optimiser's state from the parameters of all layers.
        state: Shapes of what `init` makes.
        step: The jitted step of a state, tokens and labels. Gives the next state and the loss, and
            donates the state.
    """

    def __init__(
        self,
        form: Form,
        model: Model,
        devices: Sequence[Any],
        layers: Any,
        optimizer: optax.GradientTransformation,
    ) -> None:
        """`layers` are parameters, or their shapes, of embedding, blocks and head."""
        mesh = Mesh(np.array(devices), ("stage",))
        loss_fn = form.loss(model, mesh)

        def init(layers: list[Params]) -> tuple[Params, Any]:
            params = _stacked(layers, mesh.size, form.repeats)
            return params, optimizer.init(params)

        def step(state: tuple[Params, Any], x: jax.Array, y: jax.Array) -> Any:
            params, kept = state
            loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
            updates, kept = optimizer.update(grads, kept, params)
            return (optax.apply_updates(params, updates), kept), loss

        self.state = jax.eval_shape(init, layers)
        specs = _specs(self.state, mesh.size)
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        whole = NamedSharding(mesh, P())
        self.init = jax.jit(init, out_shardings=shardings)
        self.step = jax.jit(
            step,
            donate_argnums=0,
            in_shardings=(shardings, whole, whole),
            out_shardings=(shardings, whole),
        )


def _stacked(layers: list[Params], num_stages: int, repeats: int) -> Params:
    """Parameters with those of blocks `[num_stages, repeats, ...]`, one array per block of a chunk.

    Stage s has the chunks s, s + num_stages and so on.
    """
    blocks = layers[1:-1]
    chunk_size = len(blocks) // (num_stages * repeats)

    def stack(*leaves: jax.Array) -> jax.Array:
        chunks = jnp.stack(leaves)
        return chunks.reshape(repeats, num_stages, *chunks.shape[1:]).swapaxes(0, 1)

    return {
        "embed": layers[0],
        "blocks": [jax.tree.map(stack, *blocks[i::chunk_size]) for i in range(chunk_size)],
        "head": layers[-1],
    }


def _specs(tree: Any, num_stages: int) -> Any:
    """Arrays divided over the stages along their first dim, where that is possible."""

    def spec(leaf: Any) -> P:
        return P("stage") if leaf.ndim and leaf.shape[0] % num_stages == 0 else P()

    return jax.tree.map(spec, tree)


def run_one_program(
    form: Form, model: Model, num_stages: int, layers: list[Params], x: np.ndarray, y: np.ndarray
) -> Step:
    """The step of a form on this process's devices, with SGD."""
    devices, optimizer = jax.devices()[:num_stages], optax.sgd(LEARNING_RATE)
    program = OneProgram(form, model, devices, layers, optimizer)
    state, compiled = [program.init(layers)], program.step.lower(program.state, x, y).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    x, y = jax.device_put((x, y), compiled.input_shardings[0][1:])

    def run() -> float:
        state[0], loss = jax.block_until_ready(compiled(state[0], x, y))
        return float(loss)

    return Step(run, memory.temp_size_in_bytes)


def scan_in_shard_map(model: Model, mesh: Mesh) -> Loss:
    """GPipe: each stage a device in `shard_map`."""
    num_stages = mesh.size
    last = num_stages - 1

    def loss_fn(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        specs = _specs(params, num_stages)

        def gather(leaf: jax.Array, spec: P) -> jax.Array:
            return lax.all_gather(leaf, "stage", tiled=True) if spec == P("stage") else leaf

        def local_loss(local: Params, x: jax.Array, y: jax.Array) -> jax.Array:
            stage, share = lax.axis_index("stage"), len(x) // num_stages
            blocks = jax.tree.map(lambda leaf: leaf[0, 0], local["blocks"])
            embed, head = (
                jax.tree.map(gather, local[name], specs[name]) for name in ("embed", "head")
            )

            def tick(state: jax.Array, entering: jax.Array) -> tuple[jax.Array, jax.Array]:
                state = jnp.where(stage == 0, entering, state)
                state = model.blocks(blocks, state, prevent_cse=False)
                return lax.ppermute(state, "stage", [(s, s + 1) for s in range(last)]), state

            entering = model.enter(embed, x)
            entering = jnp.pad(entering, ((0, last), *((0, 0),) * (entering.ndim - 1)))
            outputs = lax.scan(tick, jnp.zeros_like(entering[0]), entering)[1][last:]
            # Of the last stage's outputs every stage takes an equal share through the head.
            outputs = jnp.where(stage == last, outputs, jnp.zeros_like(outputs))
            outputs = lax.psum_scatter(outputs, "stage", tiled=True)
            labels = lax.dynamic_slice_in_dim(y, stage * share, share)
            return lax.pmean(model.loss(head, outputs, labels), "stage")

        # Kernels do not say over which axes their results vary.
        return jax.shard_map(
            local_loss, mesh=mesh, in_specs=(specs, P(), P()), out_specs=P(), check_vma=False
        )(params, x, y)

    return loss_fn


def scan_over_vmap(model: Model, mesh: Mesh, *, repeats: int = 1) -> Loss:
    """GPipe, or with `repeats` the circular pipeline: stages a sharded dim that is mapped over.

    In tick t stage s runs its chunk (t - s) // num_microbatches. Embedded microbatches lie divided
    over the stages and move towards the first one as it takes them; outputs of the last stage come
    behind them. Between two rounds a microbatch waits on the first stage.
    """
    num_stages = mesh.size
    by_stage = NamedSharding(mesh, P("stage"))

    def loss_fn(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        count = len(x)
        share = count // num_stages
        stages = jnp.arange(num_stages)
        ends = {
            name: lax.with_sharding_constraint(params[name], NamedSharding(mesh, P()))
            for name in ("embed", "head")
        }

        def at_stage(index: int, value: jax.Array, other: jax.Array) -> jax.Array:
            is_it = (stages == index).reshape(-1, *[1] * (other.ndim - 1))
            return jnp.where(is_it, value, other)

        def run_chunks(t: jax.Array, state: jax.Array) -> jax.Array:
            def run_chunk(blocks: list[Params], x: jax.Array, chunk: jax.Array) -> jax.Array:
                if repeats == 1:
                    return model.blocks(blocks, x, prevent_cse=False, pick=lambda leaf: leaf[0])

                def pick(leaf: jax.Array) -> jax.Array:
                    return lax.dynamic_index_in_dim(leaf, chunk, keepdims=False)

                return model.blocks(blocks, x, prevent_cse=False, pick=pick)

            chunks = jnp.clip((t - stages) // count, 0, repeats - 1)
            run = jax.vmap(run_chunk, spmd_axis_name="stage")
            return lax.with_sharding_constraint(run(params["blocks"], state, chunks), by_stage)

        def tick(carry: Any, t: jax.Array) -> tuple[Any, None]:
            # `arrived` are the outputs of the tick before, each on the next stage.
            arrived, stream, waiting = carry
            slot = t % share
            moving = lax.dynamic_index_in_dim(stream, slot, 1, keepdims=False)
            entering = moving
            if repeats > 1:
                waiting = lax.dynamic_update_index_in_dim(
                    waiting, arrived, (t - num_stages) % count, 1
                )
                again = lax.dynamic_index_in_dim(waiting, t % count, 1, keepdims=False)
                entering = jnp.where(t < count, moving, again)
            state = run_chunks(t, at_stage(0, entering, arrived))
            moved = at_stage(num_stages - 1, state, jnp.roll(moving, -1, axis=0))
            stream = lax.dynamic_update_index_in_dim(stream, moved, slot, 1)
            carry = jnp.roll(state, 1, axis=0), stream, waiting
            return lax.with_sharding_constraint(carry, by_stage), None

        def divided(batch: jax.Array) -> jax.Array:
            batch = batch.reshape(num_stages, share, *batch.shape[1:])
            return lax.with_sharding_constraint(batch, by_stage)

        stream = model.enter(ends["embed"], divided(x))
        waiting = (
            jnp.zeros((num_stages, count, *stream.shape[2:]), stream.dtype) if repeats > 1 else None
        )
        start = jnp.zeros_like(stream[:, 0]), stream, waiting
        ticks = jnp.arange(count * repeats + num_stages - 1)
        outputs = lax.scan(tick, lax.with_sharding_constraint(start, by_stage), ticks)[0][1]
        # Microbatch i of a stage's share has ended in slot i + num_stages - 1.
        return model.loss(ends["head"], outputs, jnp.roll(divided(y), num_stages - 1, axis=1))

    return loss_fn


FORMS = {
    "GPipe, scan in shard_map": Form(scan_in_shard_map),
    "GPipe, scan over vmap": Form(scan_over_vmap, maps_stages=True),
    "circular, scan over vmap": Form(
        functools.partial(scan_over_vmap, repeats=2), repeats=2, maps_stages=True
    ),
}
"""Forms of one program, by what the tables call them."""


def program_per_stage(
    model: Model, num_stages: int, layers: list[Params], x: np.ndarray, y: np.ndarray
) -> Step:
    """1F1B: Python starts each forward and backward of each stage, and moves what they exchange."""
    per_stage = (len(layers) - 2) // num_stages
    parts: list[Params] = [
        {"blocks": layers[1 + s * per_stage :][:per_stage]} for s in range(num_stages)
    ]
    parts[0]["embed"] = layers[0]
    parts[-1]["head"] = layers[-1]
    stages = [
        _Stage(model, part, device, len(x))
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

    value = np.zeros(jax.eval_shape(model.enter, layers[0], x[0]).shape, np.float32)
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

    def __init__(
        self, model: Model, params: Params, device: jax.Device, num_microbatches: int
    ) -> None:
        def apply(params: Params, x: jax.Array) -> jax.Array:
            entering = model.enter(params["embed"], x) if "embed" in params else x
            return model.blocks(params["blocks"], entering, prevent_cse=True)

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
                return model.loss(params["head"], apply(params, x), y)

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
