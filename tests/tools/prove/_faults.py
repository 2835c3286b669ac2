"""Faults that a proof must refuse: patches of the executor and the state, and users' mistakes."""

import contextlib
import dataclasses
import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import jaxpipe
from jaxpipe.layers import LayerSpec


def _room(name: str) -> Any:
    return importlib.import_module(f"jaxpipe.{name}")


_batch, _epilogue, _exchange, _loss, _segment_program, _step, _sums, _tick_loop, _train, _trunk = (
    _room(f"core.executor._{name}")
    for name in (
        *(
            "batch",
            "epilogue",
            "exchange",
            "loss",
            "segment_program",
            "step",
            "sums",
            "tick_loop",
            "train",
        ),
        "trunk",
    )
)
_update, _zero, _plan = (
    _room("core.state._update"),
    _room("core.state._zero"),
    _room("core.planner._plan"),
)
_vocab_ends = _room("core.executor._vocab_ends")
_load, _weights = _room("checkpoint._load"), _room("checkpoint._weights")
_evaluator, _optimizer = _room("engine._evaluator"), _room("core.pipeline._optimizer")
_sequential, _scale = _room("layers._sequential"), _room("optim._loss_scale")


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        name: What is wrong.
        model: The model, by name in `_models`, or a function that makes a module.
        patch: Applies the fault.
        where: What a finding must name.
        config: Further keys of the configuration.
        only: The claims to check. None: those of a quick proof.
    """

    name: str
    model: Any
    patch: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    where: str = ""
    config: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    only: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


def patched(target: Any, name: str, change: Callable[[Any], Any]) -> Callable[[], Any]:
    """Replace an attribute by a function of what it was."""
    return lambda: mock.patch.object(target, name, change(getattr(target, name)))


def after(target: Any, name: str, change: Callable[..., Any]) -> Callable[[], Any]:
    """Change what a function returns; the change also gets the arguments."""

    def wrap(old: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return change(old(*args, **kwargs), *args)

        return call

    return patched(target, name, wrap)


def scaled(tree: Any, factor: float) -> Any:
    return jax.tree.map(lambda x: x * factor if jnp.issubdtype(x.dtype, jnp.inexact) else x, tree)


def rounded(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(
        lambda x: x.astype(dtype).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x,
        tree,
    )


def other_tick(tick_table: str) -> Callable[..., Any]:
    """Read the slot of the neighbouring one."""

    def change(program: Any, *_: Any) -> Any:
        tables = program.tables
        changed = tuple(
            tuple((slot + 1) % 2 if slot >= 0 else slot for slot in row)
            for row in getattr(tables, tick_table)
        )
        return dataclasses.replace(program, tables=tables._replace(**{tick_table: changed}))

    return change


def cotangents(main: float, reported: float) -> Any:
    return after(
        _step.DevicePrograms,
        "_cotangents",
        lambda found, *_: _tick_loop.LossCotangents(found.main * main, found.reported * reported),
    )


def key_of(change: Callable[[jax.Array], jax.Array]) -> Any:
    def changed(found: Any, *_: Any) -> Any:
        key, side = found
        return change(key), side

    return after(_batch.DeviceBatch, "context", changed)


def on_stage(stage: int, change: Callable[[Any], Any]) -> Callable[..., Any]:
    """Change a result on one stage only."""

    def changed(found: Any, *_: Any) -> Any:
        is_there = jax.lax.axis_index("stage") == stage
        return jax.tree.map(lambda a, b: jnp.where(is_there, a, b), change(found), found)

    return changed


EXECUTOR = [
    Fault("a mean twice too large", "linen", cotangents(2.0, 2.0), "Head"),
    Fault("a mean over the microbatches lost", "linen", cotangents(4.0, 4.0), "Head"),
    Fault("reported losses scaled", "reports", cotangents(1.0, 2.0), "ReportingBlock"),
    Fault("main losses scaled beside reported ones", "reports", cotangents(1.01, 1.0), "Head"),
    Fault(
        "tied gradients not summed",
        "tied",
        patched(_step, "sum_tied", lambda _: lambda tied, layout, stage, grads: grads),
        "tied/",
    ),
    Fault(
        "keys by stage",
        "dropout",
        key_of(lambda key: jax.random.fold_in(key, jax.lax.axis_index("stage"))),
        "Block",
    ),
    Fault(
        "keys of another run", "dropout", key_of(lambda key: jax.random.fold_in(key, 1)), "Block"
    ),
    Fault(
        "keys of another microbatch",
        "dropout",
        patched(
            _batch,
            "microbatch_key",
            lambda old: lambda rng, step, m, r: old(rng, step, 0, r),
        ),
        "Block",
    ),
    Fault(
        "keys of another replica",
        "dropout",
        patched(
            _batch,
            "microbatch_key",
            lambda old: lambda rng, step, m, r: old(rng, step, m, 0),
        ),
        "Block",
    ),
    Fault(
        "collections of one replica",
        "norm",
        patched(_step, "mean_over_replicas", lambda _: lambda tree: tree),
        "batch_stats",
    ),
    Fault(
        "gradients exchanged in bfloat16",
        "linen",
        after(_exchange, "exchange", lambda found, *_: rounded(found, jnp.bfloat16)),
        where="3_Block",
    ),
    Fault(
        "gradients exchanged in float32",
        "attention",
        after(_exchange.Channel, "recv", lambda found, *_: rounded(found, jnp.float32)),
        where="3_Attention",
    ),
    Fault(
        "a received value scaled",
        "tuple",
        after(_exchange, "exchange", lambda found, *_: scaled(found, 1 + 1e-6)),
        where="3_MaskedBlock",
    ),
    Fault(
        "residuals rounded",
        "attention",
        after(_train.TrainLoop, "read_residuals", lambda found, *_: rounded(found, jnp.float32)),
        where="Attention",
    ),
    Fault(
        "gradients of the last tick lost",
        "linen",
        after(_sums.GradientSums, "add_off_trunk", lambda found, _, before, grads: before),
        "Embed",
    ),
    Fault(
        "gradients of the trunk doubled",
        "linen",
        after(_sums.GradientSums, "add_trunk", lambda found, *_: scaled(found, 2.0)),
        "Block",
    ),
    Fault(
        "not reduced over replicas",
        "linen",
        patched(
            _zero.ZeroSharding,
            "reduce_gradients",
            lambda old: lambda self, stage, kind, grads: scaled(old(self, stage, kind, grads), 0.5),
        ),
        where="gradient/",
    ),
    Fault(
        "clipped without the other stages",
        "linen",
        patched(_step, "global_norm", lambda old: lambda *args: old(*args) * 0.5),
        config={"gradient_clipping": 0.01},
        where="update/",
    ),
    Fault(
        "clipped to another norm",
        "tied",
        patched(
            _step, "clip_to", lambda old: lambda limit, norm, grads: old(limit * 1.01, norm, grads)
        ),
        config={"gradient_clipping": 0.01},
        where="update/",
    ),
    Fault(
        "tied parameters that drift apart",
        "tied",
        after(
            _step.DevicePrograms,
            "_update",
            lambda found, *_: (
                dataclasses.replace(found[0], params=scaled(found[0].params, 1 + 1e-7)),
                found[1],
            ),
        ),
        where="update/",
    ),
    Fault(
        "an update twice",
        "linen",
        after(_update.Updater, "update", lambda found, *_: (scaled(found[0], 1.001), found[1])),
        where="update/",
    ),
    Fault(
        "the optimiser's state not kept",
        "linen",
        patched(
            _update.Updater,
            "update",
            lambda old: (
                lambda self, kind, params, grads, state: (
                    old(self, kind, params, grads, state)[0],
                    state,
                )
            ),
        ),
        where="update/",
    ),
    Fault(
        "the loss of one replica",
        "weighted",
        patched(
            _step,
            "sum_over",
            lambda old: (
                lambda tree, axes: (
                    old(tree, tuple(a for a in axes if a != "data"))
                    if isinstance(axes, tuple)
                    else old(tree, axes)
                )
            ),
        ),
        where="loss",
    ),
    Fault(
        "weights of one replica",
        "weighted",
        after(_loss.Objective, "divisor", lambda found, *_: found * 0.5),
        "Head",
    ),
    Fault(
        "residuals of the wrong slot",
        "linen",
        after(_plan, "lower_schedule", other_tick("residual_read")),
        where="stage=1",
    ),
    Fault(
        "residuals written to the wrong slot",
        "linen",
        after(_plan, "lower_schedule", other_tick("residual_write")),
        where="stage=1",
    ),
    Fault(
        "operands of the wrong weight gradient",
        "linen",
        after(_plan, "lower_schedule", other_tick("pending_read")),
        config={"pipeline": {"schedule": "zero-bubble"}},
        where="stage=0",
    ),
]


def batch_part(name: str, shift: int) -> Any:
    """Take the part of the batch of another microbatch."""

    def change(old: Any) -> Any:
        def call(self: Any, index: jax.Array) -> Any:
            number = jax.tree.leaves(self.leaves.side or self.leaves.inputs)[0].shape[0]
            return old(self, (index + shift) % number)

        return call

    return patched(_batch.DeviceBatch, name, change)


def step_stands_still(found: Any, _: Any, state: Any, *__: Any) -> Any:
    return dataclasses.replace(found[0], step=state.step), found[1]


def noise(found: Any, *_: Any) -> Any:
    return scaled(found[0], 1 + 1e-6 * np.random.default_rng().standard_normal()), found[1]


ZERO_1 = {"zero_optimization": {"stage": 1}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4}}
MORE = [
    Fault("inputs of another microbatch", "linen", batch_part("inputs", 1), "Embed"),
    Fault("labels of another microbatch", "linen", batch_part("labels", 1), "Head"),
    Fault("side inputs of another microbatch", "side", batch_part("context", 1), "SideBlock"),
    Fault(
        "layers keyed by the stage's own index",
        "dropout",
        after(_segment_program.SegmentProgram, "offset", lambda found, *_: found * 0),
        "Block",
    ),
    Fault(
        "evaluation keeps dropout",
        "dropout",
        patched(
            _segment_program.SegmentProgram,
            "run",
            lambda old: (
                lambda self, params, inputs, context, *, train: old(
                    self, params, inputs, (context[0], jax.random.key(0), *context[2:]), train=True
                )
            ),
        ),
        where="evaluation/",
    ),
    Fault(
        "outputs in another order",
        "linen",
        after(
            _step.DevicePrograms,
            "outputs",
            lambda found, *_: jax.tree.map(lambda x: jnp.flip(x, 0), found),
        ),
        "outputs/",
    ),
    Fault(
        "the loss of evaluation of one replica",
        "linen",
        after(
            _loss.Objective,
            "means",
            lambda found, *_: {**found, "loss": found["microbatch_losses"][0]},
        ),
        "evaluation/",
    ),
    Fault(
        "collections not kept",
        "norm",
        patched(_step, "collections_after", lambda _: lambda metrics, old, new: old),
        "batch_stats",
    ),
    Fault(
        "collections scaled",
        "norm",
        after(_step, "collections_after", lambda found, *_: scaled(found, 1 + 1e-9)),
        "batch_stats",
    ),
    Fault(
        "the step number stands still",
        "dropout",
        after(_step.DevicePrograms, "_update", step_stands_still),
        "update/",
    ),
    Fault(
        "gradients of the loss's stage doubled",
        "linen",
        after(
            _epilogue.Epilogue,
            "loss_and_gradients",
            lambda found, *_: (
                found._replace(grads=scaled(found.grads, 2.0))
                if hasattr(found, "grads")
                else scaled(found, 2.0)
            ),
        ),
        where="5_Head",
    ),
    Fault(
        "sums rounded to float32",
        "attention",
        after(_sums.GradientSums, "_plus_trunk", lambda found, *_: rounded(found, jnp.float32)),
        where="Attention",
    ),
    Fault(
        "sums that begin with something",
        "linen",
        after(
            _sums.GradientSums,
            "zeros",
            lambda found, *_: jax.tree.map(lambda x: x + 1e-8, found),
        ),
        where="gradient/",
    ),
    Fault(
        "gradients of the vocabulary doubled",
        "split_tied",
        patched(
            _vocab_ends.VocabEnds,
            "plus",
            lambda old: lambda self, carry, grads: old(self, carry, scaled(grads, 2.0)),
        ),
        "table",
    ),
    Fault(
        "gradients of the vocabulary lost",
        "split_tied",
        patched(_vocab_ends.VocabEnds, "plus", lambda _: lambda self, carry, grads: carry),
        "table",
    ),
    Fault(
        "shards averaged over the replicas",
        "linen",
        after(_zero._Sharded, "reduce", lambda found, *_: scaled(found, 0.5)),
        config=ZERO_1,
        where="gradient/",
    ),
    Fault(
        "shards gathered in bfloat16",
        "linen",
        after(_zero._Sharded, "gather", lambda found, *_: rounded(found, jnp.bfloat16)),
        config=ZERO_1,
        where="layer",
    ),
    Fault(
        "gradients that keep the loss scale",
        "linen",
        patched(_step.DevicePrograms, "_unscale", lambda _: lambda self, state, grads: grads),
        config=FP16,
        only=("dtypes",),
        where="gradient/",
    ),
    Fault(
        "an update that is random",
        "linen",
        after(_update.Updater, "update", noise),
        only=("determinism",),
        where="params/",
    ),
    Fault(
        "a gradient of one leaf scaled by 1e-9",
        "linen",
        after(
            _sums.GradientSums,
            "add_trunk",
            lambda found, *_: jax.tree.map(lambda x: x * (1 + 1e-9) if x.ndim == 2 else x, found),
        ),
        "kernel",
    ),
    Fault(
        "the output of one stage rounded to float32",
        "tuple",
        after(_trunk.Trunk, "forward", on_stage(0, lambda found: rounded(found, jnp.float32))),
        where="3_MaskedBlock",
    ),
]


class BatchMean(nn.Module):
    """Subtracts the mean over the samples of the microbatch."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(8)(x - 0.1 * x.mean(0, keepdims=True))


class Counting(nn.Module):
    """Computes something else each time it is traced."""

    counts: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        CALLS.append(1)
        return nn.Dense(8)(x) * (1.0 + 0.001 * len(CALLS))


CALLS: list[int] = []


class Calling(nn.Module):
    """Calls the host."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda y: None, x)
        return nn.Dense(8)(x)


def squares(y: jax.Array, t: jax.Array) -> jax.Array:
    return jnp.mean((y - t) ** 2)


def summed(y: jax.Array, t: jax.Array) -> jax.Array:
    return jnp.sum((y - t) ** 2)


def ranked(y: jax.Array, t: jax.Array) -> jax.Array:
    return jnp.mean(jnp.abs(jnp.sort(y, 0) - jnp.sort(t, 0)))


def module_of(layer: Any, loss_fn: Any = squares) -> Callable[[], Any]:
    def make() -> Any:
        layers = [LayerSpec(nn.Dense, 8), layer, *[LayerSpec(nn.Dense, 8) for _ in range(3)]]
        return jaxpipe.PipelineModule(layers, num_stages=2, loss_fn=loss_fn)

    return make


USER = [
    Fault("a layer with a batch mean", module_of(LayerSpec(BatchMean)), where="1_BatchMean"),
    Fault("a layer with state", module_of(LayerSpec(Counting)), where="1_Counting"),
    Fault("a layer that calls the host", module_of(LayerSpec(Calling)), where="1_Calling"),
    Fault("a loss that is a sum", module_of(LayerSpec(nn.Dense, 8), summed), where="loss_fn"),
    Fault("a loss over ranks", module_of(LayerSpec(nn.Dense, 8), ranked), where="loss_fn"),
    Fault(
        "a function that mixes samples",
        module_of(lambda x: x - 0.1 * jnp.flip(x, 0)),
        where="layer 1",
    ),
    Fault(
        "a function that normalises over the batch",
        module_of(lambda x: x / (1 + jnp.linalg.norm(x))),
        where="layer 1",
    ),
]


def of_leaves(change: Callable[[str, np.ndarray], np.ndarray]) -> Callable[..., Any]:
    """Change the leaves that are read from a checkpoint."""

    def changed(found: Any, *_: Any) -> Any:
        return ((key, change(key, value)) for key, value in found)

    return changed


def narrow(_: str, value: np.ndarray) -> np.ndarray:
    is_float = np.issubdtype(value.dtype, np.floating)
    return value.astype(jnp.bfloat16).astype(value.dtype) if is_float else value


def without_moments(key: str, value: np.ndarray) -> np.ndarray:
    return np.zeros_like(value) if "/nu/" in key or ".nu" in key else value


def transposed(_: str, value: np.ndarray) -> np.ndarray:
    is_square = value.ndim > 1 and value.shape[-1] == value.shape[-2]
    return value.swapaxes(-1, -2) if is_square else value


def without_nan(found: Any, *_: Any) -> Any:
    floats = lambda x: jnp.nan_to_num(x) if jnp.issubdtype(x.dtype, jnp.floating) else x  # noqa: E731
    return jax.tree.map(floats, found)


def power_of_two(x: Any) -> Any:
    """What is right where a number is a power of two."""
    return 2.0 ** jnp.round(jnp.log2(x))


def of_two_replicas(tree: Any, *_: Any) -> Any:
    """A sum over two replicas, however many there are."""
    is_summed = jax.lax.axis_index("data") < 2
    return jax.tree.map(lambda x: jax.lax.psum(jnp.where(is_summed, x, 0), "data"), tree)


def other_average(change: Callable[[Any, Any], tuple[Any, Any]]) -> Any:
    """Change the state that an average starts from, and the one after it."""

    def wrap(old: Any) -> Any:
        def with_average(*args: Any, **kwargs: Any) -> Any:
            right = old(*args, **kwargs)

            def update(updates: Any, state: Any, params: Any) -> Any:
                updates, found = right.update(updates, change(state, state)[0], params)
                return updates, change(state, found)[1]

            return right._replace(update=update)

        return with_average

    return patched(_optimizer, "with_average", wrap)


def without_first(state: Any, found: Any) -> tuple[Any, Any]:
    def late(before: Any, after: Any) -> Any:
        return jnp.where(state.ema_updates == 0, before, after)

    average = jax.tree.map(late, state.params_ema, found.params_ema)
    return state, found._replace(params_ema=average)


def counted_twice(state: Any, found: Any) -> tuple[Any, Any]:
    return state._replace(ema_updates=state.ema_updates + 1), found


def other_scale(change: Callable[[Any, Any], Any]) -> Any:
    return after(
        _scale.LossScaler,
        "update",
        lambda found, _, state, *__: dataclasses.replace(
            found, scale=change(found.scale, state.scale)
        ),
    )


def without_last(old: Any) -> Any:
    def groups(*args: Any) -> Any:
        found = [*old(*args)]
        return iter(found[:-1] if len(found) > 1 else found)

    return groups


def weighed_equally(old: Any) -> Any:
    def add(self: Any, sums: Any, weights: Any) -> None:
        if weights.size:
            old(self, sums.sum(0, keepdims=True) / weights.sum(), np.ones(1))

    return add


EMA = {"ema": {"decay": 0.9}}
NUMBERS, EVALUATE, DTYPES = ("numbers",), ("evaluate",), ("dtypes",)
OF_SIZES = [
    Fault(
        "a divisor that is right for powers of two",
        "linen",
        after(_loss.Objective, "divisor", lambda found, *_: power_of_two(found)),
        "Head",
        only=NUMBERS,
    ),
    Fault(
        "a divisor of reported losses that is right for powers of two",
        "reports",
        after(
            _step.DevicePrograms,
            "_cotangents",
            lambda found, *_: found._replace(reported=power_of_two(found.reported)),
        ),
        "ReportingBlock",
        only=NUMBERS,
    ),
    Fault(
        "a mean of evaluation that is right for powers of two",
        "linen",
        patched(_loss, "loss_divisor", lambda _: power_of_two),
        "loss",
        only=NUMBERS,
    ),
    Fault(
        "gradients of two replicas of three",
        "linen",
        patched(
            _zero.Replicated, "reduce", lambda _: lambda self, _, grads: of_two_replicas(grads)
        ),
        "gradient/",
        only=NUMBERS,
    ),
    Fault(
        "collections of two replicas of three",
        "norm",
        patched(
            _step,
            "mean_over_replicas",
            lambda _: lambda tree: scaled(of_two_replicas(tree), 0.5),
        ),
        "batch_stats",
        only=NUMBERS,
    ),
    Fault(
        "keys of two replicas of three",
        "dropout",
        patched(
            _batch, "microbatch_key", lambda old: lambda rng, step, m, r: old(rng, step, m, r % 2)
        ),
        "Block",
        only=NUMBERS,
    ),
    Fault(
        "an average that misses the first update",
        "linen",
        other_average(without_first),
        "average/",
        EMA,
        NUMBERS,
    ),
    Fault(
        "a warm-up that counts from two",
        "linen",
        other_average(counted_twice),
        "average/",
        EMA,
        NUMBERS,
    ),
    Fault(
        "an average that does not warm up",
        "linen",
        patched(
            _optimizer,
            "with_average",
            lambda old: lambda *args, warms_up: old(*args, warms_up=not warms_up),
        ),
        "average/",
        EMA,
        NUMBERS,
    ),
    Fault(
        "a parameter that is frozen",
        "linen",
        after(_sequential, "frozen_paths", lambda found, _, paths: found | {paths[-1]}),
        "Head",
        only=NUMBERS,
    ),
    Fault(
        "a dataset without its last group",
        "linen",
        patched(_evaluator, "_groups", without_last),
        "evaluate",
        only=EVALUATE,
    ),
    Fault(
        "groups of a dataset that weigh the same",
        "linen",
        patched(_evaluator._Sums, "_add", weighed_equally),
        "evaluate",
        only=EVALUATE,
    ),
    Fault(
        "padding that counts",
        "linen",
        after(_evaluator, "_counted", lambda found, *_: np.ones_like(found)),
        "evaluate",
        only=EVALUATE,
    ),
    Fault(
        "a loss scale that never grows",
        "linen",
        other_scale(jnp.minimum),
        "scale/after step 2",
        FP16,
        DTYPES,
    ),
    Fault(
        "a loss scale that is not halved",
        "linen",
        other_scale(jnp.maximum),
        "scale/after step 4",
        FP16,
        DTYPES,
    ),
    Fault(
        "a loss scale without hysteresis",
        "linen",
        after(
            _scale.LossScaler,
            "update",
            lambda found, *_: dataclasses.replace(found, hysteresis=jnp.int32(1)),
        ),
        "scale/after step 3",
        FP16,
        DTYPES,
    ),
    Fault(
        "an overflow that is applied",
        "linen",
        patched(_step, "select", lambda _: lambda overflow, old, new: new),
        "update/",
        FP16,
        DTYPES,
    ),
]


ONLY_STATE = ("state",)
DENSE = module_of(LayerSpec(nn.Dense, 8))
OF_STATE = [
    Fault(
        "a checkpoint read in bfloat16",
        DENSE,
        after(_load, "_cast_leaves", of_leaves(narrow)),
        "params/",
        only=ONLY_STATE,
    ),
    Fault(
        "moments not read",
        DENSE,
        after(_load, "_cast_leaves", of_leaves(without_moments)),
        "opt_state",
        only=ONLY_STATE,
    ),
    Fault(
        "leaves read transposed",
        DENSE,
        after(_load, "_cast_leaves", of_leaves(transposed)),
        "kernel",
        only=ONLY_STATE,
    ),
    Fault(
        "the step not read",
        "dropout",
        patched(_load, "_load_scalars", lambda _: lambda *args, **kwargs: {}),
        "next loss",
        only=ONLY_STATE,
    ),
    Fault(
        "an export in bfloat16",
        DENSE,
        after(_weights, "read_leaves", of_leaves(narrow)),
        "export_safetensors",
        only=ONLY_STATE,
    ),
    Fault(
        "a NaN that becomes zero",
        DENSE,
        after(_exchange.Channel, "recv", without_nan),
        "loss of microbatch",
        only=("nan",),
    ),
]
OF_EXECUTOR = [*EXECUTOR, *MORE, *OF_SIZES, *OF_STATE]
ALL = [*OF_EXECUTOR, *USER]
