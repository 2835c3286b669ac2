"""The evaluation loop: every microbatch is measured once, on the stage of the last part."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _numbers import PRIMES, Gain, Numbers, Scale, Sided, on_stages

from jaxpipe import LayerSpec
from jaxpipe.core.executor._batch import WHOLE, DeviceBatch
from jaxpipe.core.executor._evaluate import EvaluateLoop
from jaxpipe.core.executor._stage import Weights
from jaxpipe.core.executor._tick_loop import Device
from jaxpipe.data import Batch
from jaxpipe.layers import VocabEmbed, VocabHead
from jaxpipe.losses import SplitLogits

STAGES, MICROBATCHES = 2, 3
INPUTS, LABELS, FACTORS = [29.0, 31.0, 37.0], [41.0, 43.0, 47.0], [53.0, 59.0, 61.0]
SIDE = {"factor": np.ones(1, np.float32)}


def flat(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    return outputs.sum() + labels.sum()


def microbatches(values: list[float]) -> jax.Array:
    return jnp.asarray(values).reshape(MICROBATCHES, 1)


def measure(outputs: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    return outputs.sum(), labels.sum()


def measure_slices(outputs: SplitLogits, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jax.lax.psum(outputs.local.sum(), "stage"), labels.sum()


def total_over_stages(outputs: jax.Array | SplitLogits, labels: jax.Array) -> jax.Array:
    return (
        jax.lax.psum(outputs.local.sum(), "stage")
        if isinstance(outputs, SplitLogits)
        else outputs.sum()
    )


def evaluate(
    numbers: Numbers, measure: Any, storages: list[Any], inputs: Any = None
) -> list[list[list[float]]]:
    """By stage what was measured, outputs and labels."""
    stage, plan = numbers.stage, numbers.pipeline.plan
    inputs = microbatches(INPUTS) if inputs is None else inputs
    leaves = Batch(inputs, microbatches(LABELS), {"factor": microbatches(FACTORS)})
    dims = jax.tree.map(lambda _: WHOLE, leaves)
    loop = EvaluateLoop(stage, plan.forward_only, sends_early=plan.sends_early)
    none: Any = None

    def device(storage: Any) -> Any:
        batch = DeviceBatch(leaves, dims, jax.random.key(0), jnp.int32(0), jnp.int32(0))
        weights = Weights(storage, stage.trunk.prepare(storage.stacked))
        collections = stage.collections.layout.zeros()
        return loop.run(
            Device(jax.lax.axis_index("stage"), weights, collections, batch, none), measure
        )

    return [[leaf.tolist() for leaf in each] for each in on_stages(device, storages)]


def test_every_microbatch_is_measured_on_the_last_stage() -> None:
    """Through both chunks of both stages, with its side inputs in a prologue and the epilogue."""
    layers = [Gain, Scale, Sided, Scale, Scale, Scale, Sided]
    numbers = Numbers(layers, [0, 2, 4, 5, 7], STAGES, schedule="interleaved", side=SIDE)
    assert [len(cut.prologue) for cut in numbers.stage.cuts] == [1, 1, 0, 0]
    first, last = evaluate(numbers, measure, [numbers.storage(s) for s in range(STAGES)])
    weight = float(np.prod(PRIMES[:7]))
    np.testing.assert_allclose(
        last[0],
        [x * weight * factor**2 for x, factor in zip(INPUTS, FACTORS, strict=True)],
        rtol=1e-6,
    )
    assert last[1] == LABELS
    assert first == [[0] * MICROBATCHES] * 2


def test_a_schedule_that_comes_back_ends_on_the_first_stage() -> None:
    numbers = Numbers([*[Scale] * 4, Gain], [0, 1, 2, 3, 5], STAGES, schedule="1f1b-v")
    assert numbers.stage.placement.locations[-1] == (0, 1)
    first, last = evaluate(numbers, measure, [numbers.storage(s) for s in range(STAGES)])
    weight = float(np.prod(PRIMES[:5]))
    assert first == [[x * weight for x in INPUTS], LABELS]
    assert last == [[0] * MICROBATCHES] * 2


def test_all_stages_run_split_last_layers_for_the_microbatch_of_the_last_part() -> None:
    """Each stage multiplies its logit by that one's side input, not by that of its own forward."""
    layers = [Scale, Scale, LayerSpec(VocabHead, STAGES, use_bias=False), Sided]
    numbers = Numbers(layers, [0, 1, 4], STAGES, side=SIDE, loss_fn=total_over_stages)
    assert numbers.stage.vocab_loss is not None
    first, last = evaluate(numbers, measure_slices, [numbers.storage(s) for s in range(STAGES)])
    weight = STAGES * float(np.prod(PRIMES[:4]))
    assert last == [
        [x * weight * factor for x, factor in zip(INPUTS, FACTORS, strict=True)],
        LABELS,
    ]
    assert first == [[0] * MICROBATCHES] * 2


def test_split_first_layers_make_the_inputs_of_the_microbatch_that_enters() -> None:
    """A table of two rows, one on each stage."""
    embed = LayerSpec(VocabEmbed, STAGES, 1)
    numbers = Numbers(
        [embed, Scale, Scale, Gain], [0, 2, 4], STAGES, example=np.zeros(1, np.int32), loss_fn=flat
    )
    assert numbers.stage.vocab_input is not None
    storages = [numbers.storage(s) for s in range(STAGES)]
    for storage, row in zip(storages, (29.0, 31.0), strict=True):
        storage.stacked["layers/0_VocabEmbed/embedding"] = jnp.asarray([[row]])
    inputs = jnp.asarray([[1], [0], [1]], jnp.int32)
    first, last = evaluate(numbers, measure, storages, inputs)
    weight = float(np.prod(PRIMES[1:4]))
    assert last == [[31 * weight, 29 * weight, 31 * weight], LABELS]
    assert first == [[0] * MICROBATCHES] * 2
