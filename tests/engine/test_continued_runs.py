"""A run that began in another program continues with that program's losses."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from _small import ADAM, FEATURES, MICROBATCHES, SIZES, build, build_alone, entries, entry, module
from _tolerances import ROUNDING, assert_close, assert_loss
from flax.serialization import from_bytes, msgpack_restore, to_bytes, to_state_dict

import jaxpipe
from jaxpipe import LayerSpec, PipelineModule
from jaxpipe.core.pipeline import make_pipeline
from jaxpipe.errors import ConfigError, LayerError
from jaxpipe.layers import LORA_PARAMETERS, flatten_dict, lora, unflatten_dict
from jaxpipe.losses import vocab_cross_entropy

STEPS, VOCABULARY = 3, 8
SCHEDULED = optax.adamw(optax.cosine_decay_schedule(0.05, 8))


def layers() -> list[Any]:
    return [LayerSpec(nn.Dense, 4), LayerSpec(nn.Dense, 4), LayerSpec(nn.Dense, 1)]


def dense(stages: int, data: int) -> PipelineModule:
    return module(*layers(), stages=stages, data=data)


def frozen(stages: int, data: int) -> PipelineModule:
    return module(*layers(), stages=stages, data=data, trainable="0_Dense|kernel")


def adapted(stages: int, data: int) -> PipelineModule:
    with_adapters = lora(layers(), rank=2, alpha=4.0, targets="kernel")
    return module(*with_adapters, stages=stages, data=data, trainable=LORA_PARAMETERS)


def language(stages: int, data: int) -> PipelineModule:
    return module(
        nn.Embed(VOCABULARY, 4),
        LayerSpec(nn.Dense, 4),
        LayerSpec(nn.Dense, 4),
        nn.Dense(VOCABULARY),
        stages=stages,
        data=data,
        loss_fn=lambda logits, labels: vocab_cross_entropy(logits, labels).mean(),
    )


def batch(step: int, make: Callable[..., Any]) -> list[Any]:
    if make is not language:
        return [*entries(seed=2 * step, samples=4)]
    tokens = np.random.default_rng(step).integers(0, VOCABULARY, (MICROBATCHES, 2, 4, 5), np.int32)
    return [tuple(microbatch) for microbatch in tokens]


class PlainLoop:
    """optax on the sequential model, on one device."""

    def __init__(self, make: Callable[[int, int], PipelineModule], optimizer: Any) -> None:
        self.make = make
        self.model = make(1, 1)
        self.params = self.model.init(jax.random.key(0), batch(0, make)[0][0])
        self.optimizer = optimizer
        pipeline = make_pipeline(make(1, 1), optimizer, sizes(1), None, batch(0, make)[0])
        self._trained = flatten_dict(pipeline.states.opt_state_struct[0].mu).keys()
        self.state = optimizer.init(self._part(self.params))
        self._differentiate = jax.jit(jax.value_and_grad(self._loss))

    def _part(self, tree: Any) -> Any:
        flat = flatten_dict(tree)
        return unflatten_dict({path: flat[path] for path in self._trained})

    def _loss(self, part: Any, params: Any, entries: Any) -> jax.Array:
        params = unflatten_dict({**flatten_dict(params), **flatten_dict(part)})
        losses = [
            self.model.loss_fn(self.model.apply(params, x), y)  # pyright: ignore
            for x, y in entries
        ]
        return jax.numpy.stack(losses).mean()

    def train_batch(self, step: int) -> float:
        part = self._part(self.params)
        loss, grads = self._differentiate(part, self.params, batch(step, self.make))
        updates, self.state = self.optimizer.update(grads, self.state, part)
        part = optax.apply_updates(part, updates)
        self.params = unflatten_dict({**flatten_dict(self.params), **flatten_dict(part)})
        return float(loss)


def sizes(replicas: int) -> dict[str, Any]:
    return {**SIZES, "train_micro_batch_size_per_gpu": 4 // replicas}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "stages", "data", "config"),
    [
        (dense, 2, 2, {"zero_optimization": {"stage": 1}}),
        pytest.param(
            language, 2, 1, {"pipeline": {"split_vocabulary": True}}, marks=pytest.mark.soak
        ),
        pytest.param(dense, 1, 1, {}, marks=pytest.mark.soak),
        pytest.param(dense, 2, 2, {"zero_optimization": {"stage": 3}}, marks=pytest.mark.soak),
        pytest.param(frozen, 2, 1, {}, marks=pytest.mark.soak),
        pytest.param(adapted, 2, 1, {}, marks=pytest.mark.soak),
    ],
)
def test_it_has_the_losses_of_the_loop(
    make: Callable[[int, int], PipelineModule], stages: int, data: int, config: dict[str, Any]
) -> None:
    loop = PlainLoop(make, SCHEDULED)
    for step in range(STEPS):
        loop.train_batch(step)
    # As from a file: tuples have become dictionaries.
    stored = msgpack_restore(to_bytes(loop.state))
    engine = jaxpipe.initialize(
        model=make(stages, data),
        optimizer=SCHEDULED,
        config={**sizes(data), **config},
        example_batch=batch(0, make)[0],
    )[0]
    engine.load_module_state_dict(loop.params)
    engine.load_opt_state_tree(stored, global_steps=STEPS)
    assert (engine.global_steps, engine.global_samples) == (STEPS, STEPS * MICROBATCHES * 4)
    assert int(engine.state.step) == STEPS
    assert_close(engine.opt_state_tree(), jax.device_get(loop.state))
    for step in range(STEPS, 2 * STEPS):
        found = engine.train_batch(iter(batch(step, make)))
        assert_loss(found, loop.train_batch(step), ROUNDING)
    # And back into the loop.
    loop.params = engine.module_state_dict()
    loop.state = from_bytes(loop.state, to_bytes(to_state_dict(engine.opt_state_tree())))
    found = engine.train_batch(iter(batch(6, make)))
    assert_loss(found, loop.train_batch(6), ROUNDING)


@pytest.mark.soak
@pytest.mark.parametrize(
    "config",
    [
        {
            "optimizer": ADAM,
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}},
            "ema": {"decay": 0.9},
            "fp16": {"enabled": True, "initial_scale_power": 4},
            "zero_optimization": {"stage": 1},
        },
        {"optimizer": {"type": "Muon", "params": {"lr": 0.01}}},
    ],
)
def test_it_is_the_inverse_of_what_an_engine_returns(config: dict[str, Any]) -> None:
    first, second = (build(dense(2, 2), config, example_batch=entry(samples=4)) for _ in range(2))
    for step in range(STEPS):
        first.train_batch(entries(seed=step, samples=4))
    second.train_batch(entries(seed=7, samples=4))
    second.load_module_state_dict(first.module_state_dict())
    second.load_opt_state_tree(first.opt_state_tree(), global_steps=STEPS)
    jax.tree.map(np.testing.assert_array_equal, second.opt_state_tree(), first.opt_state_tree())
    assert second.get_lr() == first.get_lr()
    for step in range(STEPS, 2 * STEPS):
        losses = [engine.train_batch(entries(seed=step, samples=4)) for engine in (first, second)]
        assert losses[0] == losses[1]


def test_a_plain_models_own_tree() -> None:
    options: dict[str, Any] = {"config": SIZES, "optimizer": optax.adam(0.1), "reporter": None}
    engine = jaxpipe.initialize(
        model=nn.Dense(1),
        loss_fn=lambda y, t: ((y - t) ** 2).mean(),
        example_batch=entry(samples=16),
        **options,
    )[0]
    params = engine.module_state_dict()
    state: Any = optax.adam(0.1).init(params)
    moments = jax.tree.map(lambda x: np.full(x.shape, 0.5, np.float32), params)
    given = optax.tree.set(state, mu=moments, count=3)
    engine.load_opt_state_tree(given)
    assert engine.opt_state_tree()[0].mu["kernel"].shape == (FEATURES, 1)
    jax.tree.map(np.testing.assert_array_equal, engine.opt_state_tree(), given)


def test_a_tree_that_does_not_fit_is_refused_with_its_leaves() -> None:
    engine = build_alone(
        config={"optimizer": ADAM}, optimizer=optax.adam(0.1), example_batch=entry()
    )
    present: Any = jax.device_get(engine.opt_state_tree())
    leaves: Any = to_state_dict(present)
    kernel = ("0", "mu", "layers", "0_Dense", "kernel")
    changes: list[tuple[tuple[str, ...], Any, str]] = [
        (kernel, None, "missing 0/mu/layers/0_Dense/kernel"),
        (("0", "other"), np.zeros(2, np.float32), "unexpected 0/other"),
        (kernel, np.zeros((3, 4), np.float32), r"0_Dense/kernel is float32\[3, 4\], not "),
        (kernel, np.zeros((4, 3), np.complex64), r"kernel is complex64\[4, 3\], not float32"),
        (("0", "count"), 1.5, "0/count is float64.*not int32"),
        (("0", "count"), 2**31, "0/count is int64.*not int32"),
        (("0", "count"), "three", "0/count = "),
    ]
    for path, value, match in changes:
        flat = {**flatten_dict(leaves), path: value}
        with pytest.raises(LayerError, match=match):
            engine.load_opt_state_tree(
                unflatten_dict({k: v for k, v in flat.items() if v is not None})
            )
    numbers: list[Any] = [-1, 2.5, True, 2**31]
    for number in numbers:
        with pytest.raises(ConfigError, match=rf"global_steps must be an integer.*got .*={number}"):
            engine.load_opt_state_tree(present, global_steps=number)
    assert engine.global_steps == 0
    jax.tree.map(np.testing.assert_array_equal, engine.opt_state_tree(), present)
    engine.load_opt_state_tree(present, global_samples=5)
    assert (engine.global_steps, engine.global_samples) == (0, 5)
