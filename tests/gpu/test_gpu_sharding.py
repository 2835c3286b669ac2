"""The step of blocks that are split by annotation inside a stage, on 8 H200s.

What it sends, what it holds whole.
"""

import functools
import importlib.util
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from _h200 import Step, build, h200_mesh
from _hlo import dims_of
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxpipe import LayerSpec, PipelineModule

PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
pytestmark = [
    pytest.mark.gpu_aot,
    pytest.mark.skipif(
        not any(map(importlib.util.find_spec, PLUGINS)),
        reason="needs the CUDA plugin: pip install jaxpipe[cuda12]",
    ),
]
DIM, HIDDEN, TIME, SAMPLES, STAGES, PLACES, BLOCKS = 512, 1536, 256, 8, 4, 2, 8
STREAM = {"whole": P(), "sequence": P(None, "model", None)}
BLOCKS_OF_A_STAGE = BLOCKS // STAGES


class Block(nn.Module):
    """A layer split by columns and one split by rows: one split sublayer."""

    form: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init, constrain = nn.initializers.lecun_normal(), jax.lax.with_sharding_constraint
        wide = self.param("wide", nn.with_partitioning(init, (None, "model")), (DIM, HIDDEN))
        narrow = self.param("narrow", nn.with_partitioning(init, ("model", None)), (HIDDEN, DIM))
        x = constrain(x, STREAM[self.form])
        y = nn.gelu(constrain(nn.LayerNorm()(x), P()) @ wide) @ narrow
        y = checkpoint_name(constrain(constrain(y, P()), STREAM[self.form]), "reduced")
        return constrain(nn.tanh(x + y), STREAM[self.form])


class SplitStep(Step):
    """A compiled step whose blocks are split over `model`."""

    def inside_stages(self, kind: str) -> int:
        """How many arrays of the residual stream's size a steady tick exchanges so over `model`."""
        least = SAMPLES * TIME * DIM // PLACES
        return sum(
            len(line.operands)  # several may go as one
            for line in self.steady
            if line.op in (kind, f"{kind}-start")
            and len(line.group) == PLACES
            and math.prod(dims_of(line)) >= least
        )


@functools.cache
def step_of(form: str = "whole") -> SplitStep:
    kept = jax.checkpoint_policies.save_only_these_names("reduced")
    module = PipelineModule(
        [LayerSpec(Block, form).remat(kept) for _ in range(BLOCKS)],
        num_stages=STAGES,
        loss_fn=lambda y, t: jnp.mean((y - t) ** 2),
        partition_method="uniform",
        compute_dtype="bfloat16",
        auto_cast=True,
    )
    x = jax.ShapeDtypeStruct((SAMPLES, TIME, DIM), jnp.float32)
    pipeline = build(module, h200_mesh(STAGES, 1, model=PLACES), (x, x), 16)
    return SplitStep.of(pipeline)


def test_a_split_sublayer_takes_one_sum_in_each_direction() -> None:
    step = step_of()
    assert step.inside_stages("all-reduce") == 2 * BLOCKS_OF_A_STAGE, "recompute repeats none"
    others = ("all-gather", "reduce-scatter", "all-to-all")
    assert [step.inside_stages(kind) for kind in others] == [0, 0, 0]


def test_a_stream_split_along_the_sequence_is_gathered_and_scattered() -> None:
    step = step_of("sequence")
    assert step.inside_stages("reduce-scatter") == 2 * BLOCKS_OF_A_STAGE
    recomputed = BLOCKS_OF_A_STAGE  # a weight's gradient needs the gathered input again
    assert step.inside_stages("all-gather") == 2 * BLOCKS_OF_A_STAGE + recomputed
    assert step.inside_stages("all-reduce") == step.inside_stages("all-to-all") == 0


@pytest.mark.parametrize(("form", "share"), [("whole", 1), ("sequence", PLACES)])
def test_exchanges_carry_the_share_of_a_place(form: str, share: int) -> None:
    step = step_of(form)
    sent = [line for line in step.steady if line.op == "collective-permute-start"]
    assert [math.prod(dims_of(line)) for line in sent] == [SAMPLES * TIME * DIM // share] * 2


@pytest.mark.parametrize("form", ["whole", "sequence"])
def test_nothing_is_whole_or_copied_in_a_tick(form: str) -> None:
    step = step_of(form)
    shapes, slots = step.program.shapes(step.steady), step.pipeline.plan.program.residual_slots
    split = {(DIM, HIDDEN // PLACES), (HIDDEN // PLACES, DIM)}
    assert split <= shapes
    assert not {(DIM, HIDDEN), (HIDDEN, DIM)} & shapes
    ring, part = (slots, SAMPLES, TIME, DIM), (slots, SAMPLES, TIME // PLACES, DIM)
    assert shapes & {ring, part} == {ring if form == "whole" else part}
    assert not step.program.copied(step.steady) & {
        (slots, 1, SAMPLES, TIME, DIM),
        ring,
        part,
        *split,
    }


def test_masters_and_moments_are_split() -> None:
    masters_and_moments = 3 * 4 * BLOCKS_OF_A_STAGE * 2 * DIM * HIDDEN
    batch = 2 * 16 * SAMPLES * TIME * DIM * 4 / STAGES  # large inputs are held in shares
    assert step_of().memory.argument_size_in_bytes - batch == pytest.approx(
        masters_and_moments / PLACES, rel=0.02
    )
