"""The parts of the benchmark: what each asks of one GPU, and the rows that answer it."""

import logging
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import SingleDeviceSharding

import jaxpipe
from benchmarks._compiled import GRAPHS, GRAPHS_OPTION, first_line, planned_bytes
from benchmarks._launches import steady_launches
from benchmarks.gpu_program._jobs import JOBS, SMOKE, Job
from benchmarks.gpu_program._models import HEAD_DIM
from jaxpipe.core.executor import without_cache
from jaxpipe.core.planner import named_hardware
from jaxpipe.forecast import HARDWARE, Hardware
from jaxpipe.programs.compiled import DUMP_OPTION, Module
from jaxpipe.tools.plan import compilable_devices

from ._one_stage import OneStage

_SETTLED_S = 0.5
"""A GPU needs some of it for the clock that it keeps under load."""


class Row(NamedTuple):
    """An answer.

    Attributes:
        what: What was measured.
        found: What this device says.
        expected: What was written down for an H100 before any device was asked.
    """

    what: str
    found: str
    expected: str


Rows = Iterator[Row]

VARIANTS: Mapping[str, dict[str, Any]] = {
    "as it is": {},
    "loops in graphs": {GRAPHS_OPTION: f"{GRAPHS},WHILE"},
    "conditionals outside graphs": {GRAPHS_OPTION: GRAPHS.removesuffix(",CONDITIONAL")},
    "no graphs": {GRAPHS_OPTION: ""},
}
"""Options of a compilation."""


@dataclass(frozen=True)
class Sizes:
    """How large everything is, and how often it is measured.

    Attributes:
        dim: Width of products and attention.
        hidden: Width of the feed-forward layer.
        time: Tokens of a sample.
        repeats: Calls of each kernel.
        steps: Steps of each program.
        jobs: The jobs whose stages run, by name.
        stages: The stages of each.
        compiled: The job whose compilation is timed.
        alone: The job that runs on a single stage.
        variants: Compilations of the first job.
    """

    dim: int = 4096
    hidden: int = 11008
    time: int = 4096
    repeats: int = 20
    steps: int = 5
    jobs: Mapping[str, Job] = field(default_factory=lambda: JOBS)
    stages: Mapping[str, tuple[int, ...]] = field(
        default_factory=lambda: {
            "1f1b": (3, 7),
            "1f1b-split": (3,),
            "interleaved-split": (3,),
            "zero-bubble-split": (3,),
        }
    )
    compiled: Job = Job("1f1b", blocks=80, dim=8192, hidden=28672, split_vocab=True, interval=1)
    alone: Job = Job("1f1b", blocks=4, stages=1, num_microbatches=8)
    variants: Mapping[str, dict[str, Any]] = field(default_factory=lambda: VARIANTS)

    def cases(self, part: str) -> list[str]:
        """What a part measures one after another, each of it in a process of its own."""
        if part == "tick":
            return [f"{job}:{stage}" for job, stages in self.stages.items() for stage in stages]
        listed = {"variants": self.variants, "beside": self.stages}
        return list(listed.get(part, [""]))


_TINY = replace(SMOKE["1f1b"], num_microbatches=4)
TINY = Sizes(
    *(128, 256, 128, 2, 1),
    jobs={"1f1b": _TINY},
    stages={"1f1b": (1,)},
    compiled=_TINY,
    alone=replace(_TINY, stages=1),
    variants={"as it is": {}},
)
"""For `--smoke`."""


def hardware() -> Hardware:
    """This device, if it is known, else an H100."""
    return named_hardware(jax.devices()[0].device_kind) or HARDWARE["h100"]


def env(sizes: Sizes, _: str) -> Rows:
    """What runs here, and what a tick of it launches."""
    device = jax.devices()[0]
    yield Row("devices", f"{jax.device_count()} x {device.device_kind}", "1")
    yield Row("JAX", jax.__version__, "0.10 to 0.12")
    platform = " ".join(device.client.platform_version.split())
    yield Row("platform", platform, "CUDA 12.3 or later, with its driver")
    limit = (device.memory_stats() or {}).get("bytes_limit", 0)
    yield Row("memory of JAX's pool, GB", f"{limit / 1e9:.1f}", "three quarters of the device's")


def peaks(sizes: Sizes, _: str) -> Rows:
    """Shares of the data sheet's peaks, which `jaxpipe.plan` assumes."""
    kind, dim, hidden, rows = hardware(), sizes.dim, sizes.hidden, sizes.time
    for wide, deep in ((dim, dim), (dim, hidden), (hidden, dim), (2 * dim, 7 * dim)):
        x, w = _random((rows, wide)), _random((wide, deep))
        taken = _call_s(jax.jit(jnp.matmul), (x, w), sizes.repeats)
        share = 2 * rows * wide * deep / taken / kind.flops_per_s
        yield Row(f"product {rows} x {wide} x {deep}, share", f"{share:.3f}", "0.65 to 0.80")
    q = _random((1, rows, dim // HEAD_DIM, HEAD_DIM))
    forward, backward = _attention_calls("auto")
    flops = 2 * rows * rows * dim  # the causal half of two products
    forward_s = _call_s(forward, (q, q, q), sizes.repeats)
    both_s = _call_s(backward, (q, q, q), sizes.repeats)
    share = flops / forward_s / kind.flops_per_s
    yield Row("attention forward, causal half, share", f"{share:.3f}", "0.53")
    share = 3.5 * flops / both_s / kind.flops_per_s
    yield Row("attention forward and backward, share", f"{share:.3f}", "0.45")
    total = jnp.zeros((rows, 16 * dim), jnp.float32)
    sum_s = _call_s(jax.jit(jnp.add), (total, total.astype(jnp.bfloat16)), sizes.repeats)
    share = 10 * total.size / sum_s / kind.bytes_per_s
    yield Row("sum of a gradient, share of the memory's bandwidth", f"{share:.3f}", "0.85 to 0.90")
    copy_s = _call_s(jax.jit(jnp.copy), (total,), sizes.repeats)
    share = 8 * total.size / copy_s / kind.bytes_per_s
    yield Row("copy, share of the memory's bandwidth", f"{share:.3f}", "0.90")


_TICK_MS = {
    "1f1b:3": "40 (35 to 51)",
    "1f1b:7": "48",
    "1f1b-split:3": "41.5",
    "interleaved-split:3": "44",
    "zero-bubble-split:3": "44",
}


def tick(sizes: Sizes, case: str) -> Rows:
    """A microbatch of a stage: what twice as many microbatches take longer."""
    name, stage = case.split(":")
    job = sizes.jobs[name]
    whole = _Measured(job, int(stage), sizes.steps, {})
    half_job = replace(job, num_microbatches=job.num_microbatches // 2)
    half = _Measured(half_job, int(stage), sizes.steps, {})
    more = job.num_microbatches - half_job.num_microbatches
    label = f"{name}, stage {stage} of {job.stages}"
    each_ms = 1e3 * (whole.step_s - half.step_s) / more
    yield Row(f"{label}: a microbatch, ms", f"{each_ms:.2f}", _TICK_MS.get(case, "-"))
    step_ms = f"{1e3 * whole.step_s:.1f}"
    yield Row(f"{label}: {job.num_microbatches} microbatches, ms", step_ms, "-")
    returns = f"{1e3 * whole.return_s:.1f}"
    yield Row(f"{label}: the call returns after, ms", returns, _RETURNS.get(case, "below 50"))
    yield Row(f"{label}: memory planned, GB", f"{whole.planned_bytes / 1e9:.2f}", "-")
    peak = f"{whole.peak_bytes / 1e9:.2f}"
    yield Row(f"{label}: most memory in use, GB", peak, "within 3 % of planned, and 1 GB")
    yield Row(f"{label}: compile time with dumps, s", f"{whole.compile_s:.0f}", "-")
    yield Row(f"{label}: what a tick launches", whole.launches, _LAUNCHES.get(name, "-"))


_LAUNCHES = {
    "1f1b": "1 graph of 292 kernels, no waits",
    "1f1b-split": "1 graph of 275 kernels, no waits",
    "interleaved-split": "5 graphs of 356 kernels, 3 waits",
    "zero-bubble-split": "1 graph of 301 kernels, no waits",
}
"""As compiled without a GPU."""
_RETURNS = {"interleaved-split:3": "the step's time"}
"""Where a steady tick waits for the device."""
_VARIANT_MS = {
    "loops in graphs": "within 1 %",
    "conditionals outside graphs": "within 1 %",
    "no graphs": "0.5 to 2 % more",
}


def variants(sizes: Sizes, case: str) -> Rows:
    """The first job's first stage, compiled with other options."""
    name, (stage, *_) = next(iter(sizes.stages.items()))
    found = _Measured(sizes.jobs[name], stage, sizes.steps, sizes.variants[case])
    step_ms, expected = f"{1e3 * found.step_s:.1f}", _VARIANT_MS.get(case, "-")
    yield Row(f"{name}, stage {stage}, {case}: step ms", step_ms, expected)
    yield Row(f"{name}, stage {stage}, {case}: what a tick launches", found.launches, "-")


def attention(sizes: Sizes, _: str) -> Rows:
    """The attention that is chosen here beside the blocked form, in numbers and in time."""
    shape = (1, sizes.time, sizes.dim // HEAD_DIM, HEAD_DIM)
    q, k, v = (_random(shape, seed) for seed in range(3))
    logging.getLogger("jaxpipe").setLevel(logging.INFO)  # says which attention was chosen, and why
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), (q, k, v))
    reference = _attention_calls("blocked")
    chosen = _attention_calls("auto")
    for what, found, asked in zip(("output", "gradients"), chosen, reference, strict=True):
        error = max(jax.tree.leaves(jax.tree.map(_difference, found(q, k, v), asked(*exact))))
        yield Row(f"attention: relative error of {what}", f"{error:.1e}", "below 1e-2")
    for what, found, asked in zip(("forward", "both ways"), chosen, reference, strict=True):
        taken, blocked = (_call_s(call, (q, k, v), sizes.repeats) for call in (found, asked))
        yield Row(f"attention: {what}, ms", f"{1e3 * taken:.3f}", "-")
        yield Row(f"attention: {what} in blocks, times as long", f"{blocked / taken:.1f}", "3 to 8")


def compile_twice(sizes: Sizes, _: str) -> Rows:
    """Seconds to compile a stage of 70 billion parameters' widths, and to read it from a cache."""
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        for what, expected in (("first", "120 to 360"), ("from JAX's cache", "below half")):
            one = OneStage(sizes.compiled, hardware())
            lowered = one.step.lower(*one.structs)
            start = time.perf_counter()
            lowered.compile()
            yield Row(f"compile, {what}, s", f"{time.perf_counter() - start:.1f}", expected)
            jax.clear_caches()
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()


def offload(sizes: Sizes, _: str) -> Rows:
    """Copies to the host's memory, alone and beside products."""
    x, w = _random((sizes.time, sizes.dim)), _random((sizes.dim, sizes.dim))
    held = _random((sizes.repeats * sizes.time, 4 * sizes.dim))
    host = held.sharding.with_memory_kind("pinned_host")

    def copied() -> None:
        # One at a time: the next copy takes the pinned memory of the last.
        jax.device_put(held, host).block_until_ready()

    @jax.jit
    def products(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 10 * sizes.repeats, lambda _, y: jnp.tanh(y @ w), x)

    copy_s = _call_s(copied, (), 3)
    yield Row("to pinned memory, GB/s", f"{held.nbytes / copy_s / 1e9:.1f}", "50")
    alone_s = _call_s(products, (x, w), 3)

    def both() -> None:
        found = products(x, w)
        copied()
        found.block_until_ready()

    both_s = _call_s(both, (), 3)
    slower = 100 * (both_s / alone_s - 1)
    yield Row("products beside it, % slower", f"{slower:.1f}", "5")


def step(sizes: Sizes, _: str) -> Rows:
    """The whole step on one stage beside a plain one, and on all devices where there are more."""
    plain_s = _plain_s(sizes.alone, sizes.steps)
    ours_s = _pipeline_s(sizes.alone, sizes.steps)
    yield Row("plain step, ms", f"{1e3 * plain_s:.1f}", "-")
    yield Row("jaxpipe's on one stage, times as long", f"{ours_s / plain_s:.3f}", "at most 1.03")
    if (count := jax.device_count()) > 1:
        many = replace(sizes.alone, blocks=4 * count, stages=count, num_microbatches=4 * count)
        taken = _pipeline_s(many, sizes.steps)
        mfu = many.flops / count / hardware().flops_per_s / taken
        yield Row(f"jaxpipe's on {count} stages, ms", f"{1e3 * taken:.1f}", "-")
        yield Row(f"jaxpipe's on {count} stages, MFU", f"{mfu:.3f}", "0.36 to 0.45")


def beside(sizes: Sizes, case: str) -> Rows:
    """A stage's program beside the pipeline's, both compiled for H200s that are not there."""
    job = sizes.jobs[case]
    (device,) = compilable_devices(HARDWARE["h200"], 1)
    one = OneStage(job, HARDWARE["h200"])

    def placed(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(device))

    pipeline = job.pipeline()
    found = _read(one.step.lower(*jax.tree.map(placed, one.structs)))
    asked = _read(pipeline.step.lower(pipeline.states.struct, pipeline.batches.struct))
    for what in found:
        yield Row(f"{case}: {what}", found[what], asked[what])


def _read(lowered: jax.stages.Lowered) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder, without_cache():
        compiled = lowered.compile(compiler_options={DUMP_OPTION: folder})
        launches = _launches(compiled, Path(folder))
    memory, text = compiled.memory_analysis(), compiled.as_text() or ""
    assert memory is not None
    return {
        "products": str(text.count(" dot(")),
        "attentions": str(text.count('custom_call_target="__cudnn$fmha')),
        "temporaries, GB": f"{memory.temp_size_in_bytes / 1e9:.2f}",
        "what a tick launches": launches,
    }


PARTS: Mapping[str, Callable[[Sizes, str], Rows]] = {
    "env": env,
    "peaks": peaks,
    "tick": tick,
    "variants": variants,
    "attention": attention,
    "compile": compile_twice,
    "offload": offload,
    "step": step,
    "beside": beside,
}
"""In the order in which they run; the last needs no GPU, and runs where it is asked for."""


def measure(part: str, case: str, sizes: Sizes) -> list[Row]:
    """The rows of a case; an error is one, too."""
    try:
        return list(PARTS[part](sizes, case))
    except Exception as error:  # noqa: BLE001 - the other cases go on; this one's end is told
        traceback.print_exc()
        text = f"failed: {type(error).__name__}: {first_line(error, 200)}"
        return [Row(f"{part} {case}", text, "-")]


class _Measured:
    """A stage's program, compiled and run.

    Attributes:
        compile_s: Seconds to compile it.
        step_s: Seconds of a step.
        return_s: Seconds after which the call of a step returns.
        planned_bytes: Memory that XLA planned for.
        peak_bytes: Most memory that this process has had in use.
        launches: What the host does in a tick.
    """

    def __init__(self, job: Job, stage: int, steps: int, options: dict[str, Any]) -> None:
        is_gpu = jax.default_backend() == "gpu"
        one = OneStage(job, hardware())
        lowered = one.step.lower(*one.structs)
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            with without_cache():
                dumped = {DUMP_OPTION: folder} if is_gpu else {}
                compiled = lowered.compile(compiler_options={**options, **dumped})
            self.compile_s = time.perf_counter() - start
            self.launches = _launches(compiled, Path(folder)) if is_gpu else "-"
        self.planned_bytes = planned_bytes(compiled)
        state, batch = one.example(job.vocab)
        number, found = jnp.int32(stage), []
        for _ in range(steps + 2):
            start = time.perf_counter()
            state, metrics = compiled(number, state, batch)
            returned = time.perf_counter() - start
            jax.block_until_ready((state, metrics))
            found.append((time.perf_counter() - start, returned))
        self.step_s, self.return_s = map(statistics.median, zip(*found[2:], strict=True))
        stats = jax.devices()[0].memory_stats() or {}
        self.peak_bytes = stats.get("peak_bytes_in_use", 0)


def _launches(compiled: jax.stages.Compiled, folder: Path) -> str:
    try:
        found = steady_launches(folder, Module(compiled.as_text() or ""))
    except Exception as error:  # noqa: BLE001 - another XLA may list its thunks in another way
        return f"cannot be read: {first_line(error)}"
    return (
        f"{found.graphs} graphs of {found.in_graphs} kernels, {found.alone} kernels, "
        f"{found.waits} waits"
    )


def _random(shape: tuple[int, ...], seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def _call_s(call: Callable[..., Any], args: tuple, repeats: int) -> float:
    """Seconds of a call among several that follow each other, for half a second or longer."""
    jax.block_until_ready(call(*args))
    start = time.perf_counter()
    jax.block_until_ready(call(*args))
    repeats = max(repeats, int(_SETTLED_S / (time.perf_counter() - start)))
    start = time.perf_counter()
    for _ in range(repeats):
        found = call(*args)
    jax.block_until_ready(found)
    return (time.perf_counter() - start) / repeats


def _attention_calls(implementation: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Causal attention, and it with its gradients."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jaxpipe.attention(q, k, v, causal=True, implementation=implementation)

    def grads(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        out, pullback = jax.vjp(run, q, k, v)
        return pullback(jnp.sin(out.astype(jnp.float32)).astype(out.dtype))

    return jax.jit(run), jax.jit(grads)


def _difference(found: jax.Array, asked: jax.Array) -> float:
    asked = asked.astype(jnp.float32)
    return float(jnp.linalg.norm(found.astype(jnp.float32) - asked) / jnp.linalg.norm(asked))


def _pipeline_s(job: Job, steps: int) -> float:
    """Seconds of jaxpipe's step on devices that are here."""
    pipeline = job.pipeline(jax.devices()[: job.num_devices])
    held, batch = [pipeline.init()], pipeline.batches.place(_tokens(job))

    def run() -> Any:
        held[0], metrics = pipeline.step(held[0], batch)
        return metrics["loss"]

    return _step_s(run, steps)


def _plain_s(job: Job, steps: int) -> float:
    """Seconds of a step without jaxpipe.

    Masters in float32, cast once, gradients summed in float32, AdamW, the state donated.
    """
    module, optimizer = job.module, optax.adamw(1e-4)
    x, y, _ = _tokens(job)
    params = jax.jit(module.init)(jax.random.key(0), x[0])

    def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        assert module.loss_fn is not None
        return module.loss_fn(module.apply(params, x, train=True), y)

    def train_step(state: tuple, x: jax.Array, y: jax.Array) -> tuple:
        params, moments = state
        narrow = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)

        def accumulate(total: tuple, entry: tuple) -> tuple:
            found = jax.value_and_grad(loss_fn)(narrow, *entry)
            return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, found), None

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        (loss, grads), _ = jax.lax.scan(accumulate, zeros, (x, y))
        grads = jax.tree.map(lambda g: g / len(x), grads)
        grads, _ = optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), loss / len(x)

    jitted, held = jax.jit(train_step, donate_argnums=0), [(params, optimizer.init(params))]

    def run() -> Any:
        held[0], loss = jitted(held[0], x, y)
        return loss

    return _step_s(run, steps)


def _tokens(job: Job) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Random inputs and labels of a step."""
    shape = (job.num_microbatches, job.samples * job.data, job.time)
    drawn = np.random.default_rng(0).integers(0, job.vocab, (2, *shape), np.int32)
    return drawn[0], drawn[1], {}


def _step_s(run: Callable[[], Any], steps: int) -> float:
    """Median seconds of a step, after two to warm up."""
    found = []
    for _ in range(steps + 2):
        start = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - start)
    return statistics.median(found[2:])
