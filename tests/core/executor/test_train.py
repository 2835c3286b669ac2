"""The training loop: every microbatch adds once to each sum, whatever the schedule."""

import itertools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from _covering import sweep
from _numbers import PRIMES, Gain, Numbers, Reporter, Scale, on_stages
from _schedules import TurnedSchedule

from jaxpipe import LayerSpec
from jaxpipe.core.executor._batch import WHOLE, DeviceBatch
from jaxpipe.core.executor._stage import Weights
from jaxpipe.core.executor._tick_loop import Device, LossCotangents
from jaxpipe.core.executor._train import TrainLoop
from jaxpipe.core.executor._train_carry import TrainCarry
from jaxpipe.core.state import Storage
from jaxpipe.data import Batch
from jaxpipe.layers import VocabEmbed, VocabHead
from jaxpipe.losses import SplitLogits

STAGES = 2
MAIN, REPORTED = 0.5, 0.25
INPUTS, LABELS = [1.0, 2.0, 4.0, 1.0], [1.0, 3.0, 5.0, 2.0]
MICROBATCHES = len(INPUTS)
"""Twice as many as stages: then chunks that take turns have ticks with a forward of one of them and
a backward of the other.
"""
MATRIX = LayerSpec(nn.Dense, 1, use_bias=False)
"""A layer whose gradient a split backward leaves for later."""


class Sums(NamedTuple):
    """What a device holds after the last tick."""

    loss: jax.Array
    trunk: tuple[dict[str, jax.Array], ...]
    off_trunk: Any
    vocabulary: dict[str, jax.Array]
    reported: jax.Array
    collections: Any


def trained(numbers: Numbers, inputs: Any = None) -> list[Sums]:
    """By stage the sums over all microbatches."""
    stage, plan = numbers.stage, numbers.pipeline.plan
    column = (MICROBATCHES, 1)
    inputs = jnp.asarray(INPUTS).reshape(column) if inputs is None else inputs
    leaves = Batch(inputs, jnp.asarray(LABELS).reshape(column), {})
    dims = jax.tree.map(lambda _: WHOLE, leaves)
    loop = TrainLoop(stage, plan.program, sends_early=plan.sends_early)
    cotangents = LossCotangents(jnp.float32(MAIN), jnp.float32(REPORTED))

    def device(storage: Any) -> Sums:
        batch = DeviceBatch(leaves, dims, jax.random.key(0), jnp.int32(0), jnp.int32(0))
        weights = Weights(storage, stage.trunk.prepare(storage.stacked))
        collections = stage.collections.layout.zeros()
        index = jax.lax.axis_index("stage")
        carry: TrainCarry = loop.run(Device(index, weights, collections, batch, cotangents), 1)
        return Sums(
            carry.loss,
            carry.trunk_grads,
            carry.off_trunk_grads,
            carry.vocab.grads,
            carry.all_reported,
            carry.collections,
        )

    return on_stages(device, [numbers.storage(s) for s in range(STAGES)])


def product(values: Any) -> float:
    total = 1.0
    for value in values:
        total *= value
    return total


def trunk_gradients(numbers: Numbers, found: list[Sums]) -> dict[int, float]:
    """The gradient of each number in trunks, by layer."""
    grads = {}
    for virtual, cut in enumerate(numbers.stage.cuts):
        stage, chunk = numbers.stage.placement.locations[virtual]
        for position, layer in enumerate(cut.trunk):
            (grad,) = (
                leaf
                for name, leaf in found[stage].trunk[chunk].items()
                if name.startswith(f"trunk/0/{position}/")
            )
            grads[layer] = grad.item()
    return grads


def gradients(numbers: Numbers, found: list[Sums]) -> dict[int, float]:
    """The gradient of each layer's number, by layer."""
    grads = trunk_gradients(numbers, found)
    for stage, sums in enumerate(found):
        stacked = {**sums.off_trunk.stacked, **sums.vocabulary}
        grads |= numbers.grads(stage, Storage(sums.off_trunk.packed, stacked))
    return grads


@pytest.mark.parametrize(
    ("schedule", "chunks", "skip_idle"),
    sweep(
        5,
        [
            ("zero-bubble", 1, True),
            ("zero-bubble", 1, False),
            ("interleaved", 2, True),
            ("interleaved", 2, False),
            ("zero-bubble", 2, True),
            ("zero-bubble", 2, False),
            *itertools.product(["1f1b", "gpipe", "train"], [1], [True, False]),
            *itertools.product(["zero-bubble-v", "1f1b-v", "dual-pipe-v"], [2], [True, False]),
        ],
        unpack=True,
    ),
)
def test_every_microbatch_adds_once(schedule: str, chunks: int, skip_idle: bool) -> None:
    """In numbers so small that float32 has them exactly."""
    parts = [0, 3, 6] if chunks == 1 else [0, 2, 3, 4, 6]
    numbers = Numbers(
        [Gain, *[MATRIX] * 4, Gain],
        parts,
        STAGES,
        microbatches=MICROBATCHES,
        schedule=schedule,
        num_chunks=chunks,
        skip_idle=skip_idle,
    )
    found = trained(numbers)
    last = numbers.stage.placement.locations[-1][0]
    total = 100 * product(PRIMES[:6]) * sum(x * t for x, t in zip(INPUTS, LABELS, strict=True))
    assert [sums.loss.tolist() for sums in found] == [
        [total if stage == last else 0.0] for stage in range(STAGES)
    ]
    assert gradients(numbers, found) == {i: MAIN * total / PRIMES[i] for i in range(6)}


@pytest.mark.parametrize("skip_idle", sweep(1, [False, True]))
@pytest.mark.parametrize("schedule", sweep(1, ["zero-bubble", "1f1b", "interleaved"]))
def test_idle_ticks_report_and_collect_nothing(schedule: str, skip_idle: bool) -> None:
    layers = [Reporter, Scale, Scale, Scale, Scale, Reporter]
    parts = [0, 2, 3, 4, 6] if schedule == "interleaved" else [0, 3, 6]
    numbers = Numbers(
        layers,
        parts,
        STAGES,
        microbatches=MICROBATCHES,
        schedule=schedule,
        skip_idle=skip_idle,
    )
    found = trained(numbers)
    arrived = sum(INPUTS) * product(PRIMES[:5])
    weighed = [sum(INPUTS) * PRIMES[0], arrived * PRIMES[5]]
    reported = [sorted(x for x in sums.reported.tolist() if x) for sums in found]
    assert reported == [
        sorted([weighed[0], 100 * sum(INPUTS)]),
        sorted([weighed[1], 100 * arrived]),
    ]
    collected = [[leaf.item() for leaf in jax.tree.leaves(s.collections)] for s in found]
    assert [sum(values) for values in collected] == [sum(INPUTS), arrived]
    grad = gradients(numbers, found)
    labelled = sum(x * t for x, t in zip(INPUTS, LABELS, strict=True)) * MAIN
    # The second reported loss depends on all numbers, the first on that of its layer alone.
    through = product(PRIMES[:6]) * (labelled + sum(INPUTS) * REPORTED)
    assert grad[3] == through / PRIMES[3]
    assert grad[0] == through / PRIMES[0] + sum(INPUTS) * REPORTED


def total_over_stages(outputs: jax.Array | SplitLogits, labels: jax.Array) -> jax.Array:
    local = outputs.local if isinstance(outputs, SplitLogits) else outputs
    total = local.sum()
    if isinstance(outputs, SplitLogits):
        total = jax.lax.psum(total, "stage")
    return total * labels.sum()


@pytest.mark.parametrize(
    ("schedule", "overlaps"),
    sweep(
        3,
        [
            ("zero-bubble", True),
            ("zero-bubble", False),
            (TurnedSchedule, False),
            ("1f1b", True),
            ("1f1b", False),
            (TurnedSchedule, True),
        ],
        unpack=True,
    ),
)
def test_split_first_and_last_layers_have_gradients_on_all_stages(
    schedule: str | type, overlaps: bool
) -> None:
    """A table of two rows and a head of two words, one on each stage."""
    embed, head = LayerSpec(VocabEmbed, STAGES, 1), LayerSpec(VocabHead, STAGES, use_bias=False)
    numbers = Numbers(
        [embed, Gain, MATRIX, MATRIX, head],
        [0, 3, 5],
        STAGES,
        example=jnp.zeros(1, jnp.int32),
        loss_fn=total_over_stages,
        microbatches=MICROBATCHES,
        schedule=schedule,
        overlap_vocabulary=overlaps,
    )
    assert numbers.stage.vocab_input is not None
    assert numbers.stage.vocab_loss is not None
    words = [1, 0, 0, 0]
    found = trained(numbers, jnp.asarray(words, jnp.int32).reshape(MICROBATCHES, 1))
    labels = sum(LABELS)
    middle = 10 * product(PRIMES[1:4])
    for stage, sums in enumerate(found):
        grads = {name.split("/")[1]: leaf.tolist() for name, leaf in sums.vocabulary.items()}
        of_row = sum(t for word, t in zip(words, LABELS, strict=True) if word == stage)
        # Each row goes through both words of the head.
        assert grads["0_VocabEmbed"] == [[MAIN * of_row * middle * 2 * PRIMES[4]]]
        assert grads["4_VocabHead"] == [[MAIN * labels * PRIMES[0] * middle]]
    grads = gradients(numbers, found)
    of_all = MAIN * labels * PRIMES[0] * middle * 2 * PRIMES[4]
    assert [grads[i] for i in (1, 2, 3)] == [of_all / PRIMES[i] for i in (1, 2, 3)]
