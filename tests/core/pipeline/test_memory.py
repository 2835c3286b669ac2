"""What a compiled step holds: bounded by the schedule, not by the number of microbatches."""

import gc
import weakref
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import sweep
from _oracle import SCHEDULES, Case
from _settings import make_settings
from _tolerances import MEMORY, STATE_BYTES

import jaxpipe
from jaxpipe import LayerSpec, PipeDataParallelTopology, Pipeline, PipelineModule
from jaxpipe.core.pipeline import describe_pipeline
from jaxpipe.core.planner import HARDWARE, Counted
from jaxpipe.programs.jaxpr import scan_form
from jaxpipe.schedules import resolve_schedule
from jaxpipe.topology import make_pipeline_mesh

STAGES = 4
ADAM = optax.adam(1e-3)
BOUNDED = [
    "1f1b",
    "train",
    "split",
    "split_at_once",
    "1f1b-v",
    "interleaved",
    "zero-bubble",
    "zero-bubble-2",
]


class Wide(nn.Module):
    size: int = 64

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dense(self.size)(nn.tanh(nn.Dense(self.size)(x)))


class Vocabulary(nn.Module):
    size: int
    dim: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        return nn.Embed(self.size, self.dim)(tokens)


def wide_pipeline(
    num_microbatches: int, schedule: str, *, skip_idle: bool = True, interval: int = 0
) -> Pipeline:
    layers = [LayerSpec(Wide)] * (STAGES * resolve_schedule(SCHEDULES[schedule]).num_chunks)
    module = PipelineModule(
        layers,
        num_stages=STAGES,
        loss_fn=lambda y, t: jnp.mean((y - t) ** 2),
        partition_method="uniform",
        activation_checkpoint_interval=interval,
    )
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    mesh = make_pipeline_mesh(PipeDataParallelTopology(STAGES, 1))
    kwargs: dict[str, Any] = {"schedule": SCHEDULES[schedule], "skip_idle": skip_idle}
    return Pipeline(module, optax.sgd(0.1), mesh, (x, x), num_microbatches, make_settings(**kwargs))


def temporary_bytes(pipeline: Pipeline) -> int:
    compiled = pipeline.step.lower(pipeline.states.struct, pipeline.batches.struct).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize("schedule", sweep(1, BOUNDED))
def test_temporary_bytes_do_not_grow_with_microbatches(schedule: str) -> None:
    """From where the steady part is long enough to have a loop of its own."""
    few, many = (temporary_bytes(wide_pipeline(factor * STAGES, schedule)) for factor in (4, 16))
    assert abs(many / few - 1) <= MEMORY


@pytest.mark.slow
@pytest.mark.parametrize(
    ("skip_idle", "interval"), sweep(1, [(False, 1), (False, 0), (True, 1)], unpack=True)
)
def test_neither_with_masked_actions_nor_with_recompute(skip_idle: bool, interval: int) -> None:
    kwargs = {"skip_idle": skip_idle, "interval": interval}
    few, many = (
        temporary_bytes(wide_pipeline(factor * STAGES, "1f1b", **kwargs)) for factor in (4, 16)
    )
    assert abs(many / few - 1) <= MEMORY


def test_gpipe_grows_with_microbatches() -> None:
    few, many = (temporary_bytes(wide_pipeline(factor * STAGES, "gpipe")) for factor in (2, 8))
    assert many > 2 * few


def slots_by_formula(schedule: str, stages: int, microbatches: int, chunks: int) -> int:
    """Slots for what waits between forward and backward, counted on each chunk."""
    return {
        "1f1b": min(microbatches, 2 * (stages - 1) + 1),
        "gpipe": microbatches,
        "train": min(microbatches, stages),
        "1f1b-v": min(2 * stages, microbatches + min(microbatches, stages)),
        "interleaved": (chunks - 1) * min(microbatches, stages)
        + min(microbatches, 2 * (stages - 1) + 1),
        "zero-bubble": min(chunks * microbatches, chunks * stages + stages - 1),
        "zero-bubble-h1": min(microbatches, stages),
        "zero-bubble-v": 2 * min(microbatches, stages),
        "dual-pipe-v": 2 * min(microbatches, stages),
    }[schedule.removesuffix("-2")]


PLAIN, CHUNKED = (
    ("1f1b", "gpipe", "train"),
    ("1f1b-v", "interleaved", "zero-bubble", "zero-bubble-2"),
)
RINGS = [
    *(
        (schedule, stages, microbatches)
        for schedule in PLAIN
        for stages in (2, 4, 8)
        for microbatches in (1, 3, 8)
    ),
    *((schedule, *sizes) for schedule in CHUNKED for sizes in ((2, 2), (4, 8))),
]
RINGS.sort(key=lambda ring: ring[1:] != (2, 3))  # each schedule once, and then the rest


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches"), sweep(len(PLAIN), RINGS, unpack=True)
)
def test_rings_are_as_deep_as_the_formula(schedule: str, stages: int, microbatches: int) -> None:
    case = Case(
        stages=stages,
        microbatches=microbatches,
        schedule=schedule,
        model="functions",
        cut="uniform",
    )
    pipeline = case.pipeline()
    program = pipeline.plan.program
    deepest = slots_by_formula(schedule, stages, microbatches, program.num_chunks)
    assert program.peak_in_flight == deepest
    spill = program.residual_slots - deepest
    assert spill == int(program.needs_spill)
    assert _ring_depths(pipeline) == {deepest + spill}


def _ring_depths(pipeline: Pipeline) -> set[int]:
    """Leading sizes of what the loops carry in the shape of a residual."""
    jaxpr = jax.make_jaxpr(pipeline.gradients)(pipeline.states.struct, pipeline.batches.struct)
    kept = {(tuple(x.shape), x.dtype) for x in jax.tree.leaves(pipeline.stage.residuals) if x.ndim}
    travelling = {
        (tuple(x.shape), x.dtype)
        for packing in (pipeline.stage.activations, pipeline.stage.gradients)
        for x in jax.tree.leaves(packing.struct)
    }
    found = set()
    for scan in _scans(jaxpr.jaxpr):
        form = scan_form(scan)
        assert form is not None
        consts, carry = form.num_consts, form.num_carry
        for var in scan.invars[consts : consts + carry]:
            if (var.aval.shape[1:], var.aval.dtype) in kept - travelling:
                found.add(var.aval.shape[0])
    return found


def _scans(jaxpr: Any) -> list[Any]:
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            found.append(eqn)
        else:
            inner = [
                getattr(p, "jaxpr", p)
                for p in eqn.params.values()
                if hasattr(p, "eqns") or hasattr(p, "jaxpr")
            ]
            found += [scan for one in inner for scan in _scans(one)]
    return found


@pytest.fixture(scope="module")
def large_vocabulary() -> Pipeline:
    vocabulary, dim = 50_000, 16
    layers = [
        LayerSpec(Vocabulary, vocabulary, dim),
        *[LayerSpec(Wide, dim)] * 6,
        LayerSpec(nn.Dense, vocabulary),
    ]
    module = PipelineModule(
        layers,
        num_stages=STAGES,
        loss_fn=lambda y, t: optax.softmax_cross_entropy_with_integer_labels(y, t).mean(),
        partition_method="uniform",
    )
    tokens = jax.ShapeDtypeStruct((2, 3), jnp.int32)
    mesh = make_pipeline_mesh(PipeDataParallelTopology(STAGES, 2))
    return Pipeline(module, optax.adam(1e-3), mesh, (tokens, tokens), 2)


def largest_stage_bytes(pipeline: Pipeline) -> int:
    """Parameters and both Adam moments of the stage with most."""
    counts = pipeline.trace.num_params()
    parts = pipeline.plan.parts
    return 3 * 4 * max(sum(counts[a:b]) for a, b in zip(parts, parts[1:], strict=False))


def test_state_bytes_on_every_device(large_vocabulary: Pipeline) -> None:
    state = large_vocabulary.init()
    used: dict[Any, int] = {}
    for leaf in jax.tree.leaves((state.params, state.opt_state)):
        for shard in leaf.addressable_shards:
            used[shard.device] = used.get(shard.device, 0) + shard.data.nbytes
    assert len(used) == STAGES * 2
    assert max(used.values()) <= STATE_BYTES * largest_stage_bytes(large_vocabulary)


def test_initialising_the_optimizer_holds_no_more(large_vocabulary: Pipeline) -> None:
    spec = jax.sharding.PartitionSpec("stage")

    def make(params: Any) -> Any:
        made = large_vocabulary.states._updater.init(
            jax.lax.axis_index("stage"), jax.tree.map(lambda x: x[0], params)
        )
        return jax.tree.map(lambda x: x[None], made)

    mapped = jax.shard_map(
        make, mesh=large_vocabulary.mesh, in_specs=(spec,), out_specs=spec, check_vma=False
    )
    memory = (
        jax.jit(mapped).lower(large_vocabulary.states.struct.params).compile().memory_analysis()
    )
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert peak <= STATE_BYTES * largest_stage_bytes(large_vocabulary)


def test_no_stage_holds_another_stages_parameters(large_vocabulary: Pipeline) -> None:
    struct = large_vocabulary.states.struct
    for leaf in jax.tree.leaves((struct.params, struct.opt_state)):
        assert leaf.sharding.shard_shape(leaf.shape) == (1, *leaf.shape[1:])
    rows = large_vocabulary.init().params.packed["float32"]
    owned = np.count_nonzero(np.asarray(rows), axis=1)
    assert owned[1] < owned[0] / 10
    assert owned[2] < owned[3] / 10


def zero_pipeline(zero_stage: int, optimizer: optax.GradientTransformation = ADAM) -> Pipeline:
    module = PipelineModule(
        [LayerSpec(Wide, 128) for _ in range(2)],
        num_stages=1,
        loss_fn=lambda y, t: jnp.mean((y - t) ** 2),
        compute_dtype="bfloat16",
    )
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    mesh = make_pipeline_mesh(PipeDataParallelTopology(1, 8))
    return Pipeline(module, optimizer, mesh, (x, x), 2, make_settings(zero_stage=zero_stage))


def bytes_per_device(tree: Any) -> int:
    shapes = [
        (leaf.sharding.shard_shape(leaf.shape), leaf.dtype.itemsize)
        for leaf in jax.tree.leaves(tree)
    ]
    return sum(int(np.prod(shape)) * size for shape, size in shapes)


@pytest.mark.parametrize("optimizer", sweep(1, [ADAM, optax.lamb(1e-3)]), ids=["adam", "lamb"])
def test_zero_divides_optimizer_state_and_masters_by_the_replicas(
    optimizer: optax.GradientTransformation,
) -> None:
    whole, divided = (zero_pipeline(stage, optimizer) for stage in (0, 1))
    for name in ("opt_state", "params"):
        before, after = (bytes_per_device(getattr(p.states.struct, name)) for p in (whole, divided))
        # LAMB: four kernels are dealt out to eight replicas, whole.
        share = 1 / 8 if optimizer is ADAM else 1 / 4
        assert after <= share * before * STATE_BYTES + 256
    held = [
        p.step.lower(p.states.struct, p.batches.struct)
        .compile()
        .memory_analysis()
        .argument_size_in_bytes
        for p in (whole, divided)
    ]
    state = bytes_per_device((whole.states.struct.params, whole.states.struct.opt_state))
    assert held[0] - held[1] >= (1 - share) * state / STATE_BYTES


def test_recompute_keeps_the_inputs_of_groups_alone() -> None:
    def kept(interval: int) -> int:
        pipeline = wide_pipeline(8, "1f1b", interval=interval)
        return sum(
            leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pipeline.stage.residuals)
        )

    stage_input = 64 * 64 * 4
    assert kept(1) <= stage_input * 1.02 + 64
    assert kept(0) >= 2 * stage_input


@pytest.mark.parametrize(("schedule", "slots"), [("1f1b", 7), ("interleaved", 6)])
def test_a_cut_by_profile_plans_for_the_ring_that_every_device_has(
    schedule: str, slots: int
) -> None:
    pipeline = Case(
        model="deep", stages=4, cut="profile:flops", microbatches=8, schedule=schedule
    ).pipeline()
    assert pipeline.plan.profile is not None
    memory = pipeline.plan.profile.memory
    assert memory is not None
    assert memory.in_flight == (slots,) * len(pipeline.plan.parts[1:])
    assert slots == -(-pipeline.plan.program.residual_slots // pipeline.plan.program.num_chunks)


class Perceptron(nn.Module):
    """Recomputes its arithmetic by itself where asked to."""

    inner: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = nn.Dense(256)(nn.LayerNorm()(x))
        return x + nn.Dense(64)(jax.checkpoint(nn.gelu)(y) if self.inner else nn.gelu(y))


def planned(layers: list[LayerSpec | Any], *, scan_trunk: bool = False) -> tuple[int, Pipeline]:
    """Bytes that the plan of a cut in two counts for each microbatch, and the pipeline."""
    module = PipelineModule(
        layers * 2,
        2,
        loss_fn=lambda y, t: jnp.mean((y - t) ** 2),
        partition_method=[0, len(layers), 2 * len(layers)],
    )
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    mesh = make_pipeline_mesh(PipeDataParallelTopology(2, 1))
    pipeline = Pipeline(
        module, optax.sgd(0.1), mesh, (x, x), 4, make_settings(scan_trunk=scan_trunk)
    )
    counted = Counted(module, pipeline.trace, x)
    return counted.costs(HARDWARE["h200"]).part_sizes(pipeline.plan.parts)[0][1], pipeline


BLOCK, INNER, DENSE = (
    LayerSpec(Perceptron),
    LayerSpec(Perceptron, inner=True),
    LayerSpec(nn.Dense, 64),
)


@pytest.mark.parametrize(
    "layers",
    sweep(
        3,
        [
            [BLOCK, BLOCK.remat(), BLOCK, BLOCK],
            [INNER, BLOCK.remat()],
            [DENSE, jnp.tanh, DENSE, nn.gelu, nn.softmax],
            [BLOCK] * 4,
            [INNER] * 4,
            [BLOCK.remat()] * 4,
            [DENSE.remat(), nn.relu, DENSE, jnp.tanh],
        ],
    ),
    ids=["one", "inner and one", "functions", "none", "inner", "all", "functions and one"],
)
def test_the_plan_counts_what_is_kept(layers: list[Any]) -> None:
    count, pipeline = planned(layers)
    assert [len(cut.trunk) for cut in pipeline.stage.cuts] == [len(layers)] * 2
    assert count == sum(pipeline.sizes.residual_bytes)
    size = f"{count / 2**10:,.1f} KiB" if count >= 2**10 else f"{count} B"
    assert f"residuals of each microbatch: {size}; slots: 3" in describe_pipeline(pipeline)


@pytest.mark.slow
def test_a_layer_that_recomputes_leaves_the_others_alone() -> None:
    def kept(layers: list[Any], **settings: bool) -> int:
        return planned(layers, **settings)[1].sizes.residual_bytes[0]

    none, one = kept([BLOCK] * 4), kept([BLOCK, BLOCK.remat(), BLOCK, BLOCK])
    assert kept([BLOCK.remat()] * 4) < one < none == kept([INNER] * 4)
    assert kept([INNER] * 4, scan_trunk=True) == kept([BLOCK] * 4, scan_trunk=True)


@pytest.mark.soak
def test_one_layer_that_recomputes_takes_no_more_memory() -> None:
    assert temporary_bytes(planned([BLOCK, BLOCK.remat()])[1]) <= temporary_bytes(
        planned([BLOCK] * 2)[1]
    )


@pytest.mark.slow
def test_a_pipeline_that_is_dropped_is_freed() -> None:
    """An engine makes one for each shape of batch."""
    case = Case(data=4)
    example = jax.tree.map(lambda x: x[0], case.batch())
    config = {
        "train_micro_batch_size_per_gpu": len(example[0]) // case.data,
        "gradient_accumulation_steps": case.microbatches,
        "ema": {"decay": 0.9},
    }
    pipeline = jaxpipe.make_pipeline(case.module(), optax.sgd(0.1), config, None, example)
    average = pipeline.states.with_params(pipeline.init(), "ema")
    pipeline.evaluate(average, case.batch())
    alive = weakref.ref(pipeline.stage), weakref.ref(pipeline.states)
    del pipeline, average
    jax.clear_caches()
    gc.collect()
    assert [each() for each in alive] == [None, None]
