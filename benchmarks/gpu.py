"""What does a pipeline stage cost on a real GPU, and how long would a step on eight of them take?

- Stage: seconds of the forward (F) and of input and weight gradient (I, W) of a stage of
  transformer blocks in bfloat16, and its share of the device's peak (`mfu`): 72 D^2 + 12 T D
  floating-point operations a token and block, all of the attention's square counted, over the peak.
- Branch: the same work in a loop over ticks, straight and behind a branch on the device's table of
  actions.
- Tick: what a step of a model that computes next to nothing takes longer for each microbatch more.
- One stage: jaxpipe's step on one device beside a hand-written one that sums gradients over
  microbatches.
- Projection: the step on `--stages` devices from F, I, W, the tick and the branch, per schedule,
  without exchanges.
- With two devices or more also the real pipeline over all of them, idle actions skipped and
  computed.

Expected on one H200: a branch 10 to 30 us, a tick below 100 us, one stage at most 1.03 of the
hand-written step, mfu of the larger stage above 0.45.

Run: python -m benchmarks.gpu [--dims 2048,4096] [--blocks 4] [--tokens 2048] [--microbatch 2]
     [--microbatches 8] [--attention cudnn] [--stages 8] [--repeats 10] [--peak-tflops N] [--smoke]
"""

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxpipe
from benchmarks._gpt import Embed, Head, cross_entropy, tokens
from benchmarks._table import print_head, print_row
from jaxpipe.config import PipelineConfig, TrainConfig
from jaxpipe.pipeline import Pipeline, mesh_for
from jaxpipe.schedules import lower_schedule, makespan, resolve_schedule, schedule_names

PEAK_TFLOPS = {
    "H200": 989,
    "H100": 989,
    "GH200": 989,
    "B200": 2250,
    "A100": 312,
    "L40S": 362,
    "L4": 121,
    "V100": 125,
}
"""Dense bfloat16 (V100: float16) peak, by a part of the device's name."""


@dataclass(frozen=True)
class Size:
    """A stage: blocks of width `dim`, and the batch."""

    dim: int
    num_blocks: int
    time: int
    microbatch: int
    num_microbatches: int
    vocab: int = 50304
    attention: str = "xla"

    @property
    def stage_flops(self) -> float:
        """Operations of a microbatch's forward and backward through the blocks."""
        each = 72 * self.dim**2 + 12 * self.time * self.dim
        return each * self.num_blocks * self.microbatch * self.time

    def step_flops(self, num_stages: int) -> float:
        """Operations of a step of the whole model on each of `num_stages` devices.

        Their share of the head is included.
        """
        head = 6 * self.dim * self.vocab * self.microbatch * self.time
        return (self.stage_flops + head / num_stages) * self.num_microbatches


class FusedBlock(nn.Module):
    """The block of the other benchmarks with fused attention."""

    dim: int
    attention: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[batch, time, dim]` to the same shape."""
        batch, time, dim = x.shape
        qkv = nn.Dense(3 * dim, use_bias=False)(nn.LayerNorm()(x)).reshape(
            batch, time, 3, max(1, dim // 128), -1
        )
        q, k, v = (qkv[:, :, i] for i in range(3))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=self.attention)
        x = x + nn.Dense(dim, use_bias=False)(mixed.reshape(batch, time, dim))
        return x + nn.Dense(dim)(nn.gelu(nn.Dense(4 * dim)(nn.LayerNorm()(x))))


def seconds(run: Callable[[], Any], repeats: int) -> float:
    """Median seconds of a call whose result is waited for, after two more to warm up."""
    found = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - start)
    return statistics.median(found[2:])


def stage_of(size: Size) -> tuple[Callable[..., jax.Array], Any, jax.Array]:
    """A stage's blocks as one function, its bfloat16 parameters and an input."""
    block = FusedBlock(size.dim, size.attention)
    x = jnp.ones((size.microbatch, size.time, size.dim), jnp.bfloat16)
    keys = jax.random.split(jax.random.key(0), size.num_blocks)
    params = [
        jax.tree.map(lambda p: p.astype(jnp.bfloat16), jax.jit(block.init)(key, x)) for key in keys
    ]

    def run(params: list, x: jax.Array) -> Any:
        return functools.reduce(lambda y, p: block.apply(p, y), params, x)

    return run, params, x


def stage_costs(size: Size, repeats: int) -> tuple[float, float, float]:
    """Seconds of F, I and W."""
    run, params, x = stage_of(size)
    forward = jax.jit(run)
    to_input = jax.jit(lambda p, x, dy: jax.vjp(lambda x: run(p, x), x)[1](dy))
    whole = jax.jit(lambda p, x, dy: jax.vjp(run, p, x)[1](dy))
    forward_s = seconds(lambda: forward(params, x), repeats)
    with_input_s = seconds(lambda: to_input(params, x, x), repeats)
    whole_s = seconds(lambda: whole(params, x, x), repeats)
    return forward_s, max(with_input_s - forward_s, 0.0), max(whole_s - with_input_s, 0.0)


def branch_costs(size: Size, repeats: int) -> tuple[float, float]:
    """Seconds of a tick (forward and backward) straight, and behind a branch always taken."""
    run, params, x = stage_of(size)

    def loop(active: jax.Array, *, skips: bool) -> Any:
        def action(x: jax.Array) -> tuple:
            y, pullback = jax.vjp(run, params, x)
            grads, dx = pullback(y)
            return y + dx, grads

        def tick(carry: tuple, is_active: jax.Array) -> tuple:
            x, total = carry
            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(action, x))
            y, grads = jax.lax.cond(is_active, action, lambda _: zeros, x) if skips else action(x)
            return (y / 2, jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads)), None

        total = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        return jax.lax.scan(tick, (x, total), active)[0]

    active = jnp.ones((size.num_microbatches,), bool)
    found = []
    for skips in (False, True):
        compiled = jax.jit(functools.partial(loop, skips=skips))
        found.append(
            seconds(lambda compiled=compiled: compiled(active), repeats) / size.num_microbatches
        )
    return found[0], found[1]


def model_of(size: Size, num_stages: int) -> jaxpipe.PipelineModule:
    """Embedding, the stage's blocks once for each stage, and head, computing in bfloat16."""
    blocks = [jaxpipe.LayerSpec(FusedBlock, size.dim, size.attention)] * (
        size.num_blocks * num_stages
    )
    ends = jaxpipe.LayerSpec(Embed, size.vocab, size.dim), jaxpipe.LayerSpec(Head, size.vocab)
    layers, cut = [ends[0], *blocks, ends[1]], "trunk" if num_stages > 1 else "uniform"
    module = jaxpipe.PipelineModule
    return module(
        layers, num_stages, loss_fn=cross_entropy, partition_method=cut, compute_dtype=jnp.bfloat16
    )


def pipelined_s(
    size: Size, num_stages: int, repeats: int, *, skips: bool | Literal["auto"] = "auto"
) -> float:
    """Seconds of jaxpipe's step."""
    model = model_of(size, num_stages)
    batch = tokens(size.num_microbatches, size.microbatch, size.time, size.vocab)
    example = jax.tree.map(lambda a: a[0], batch)
    mesh, settings = (
        mesh_for(model, jax.devices()[:num_stages]),
        TrainConfig(pipeline=PipelineConfig(skip_idle=skips)),
    )
    pipeline = Pipeline(model, optax.adam(1e-4), mesh, example, size.num_microbatches, settings)
    held, placed = [pipeline.init()], pipeline.place_batch(batch)

    def run() -> Any:
        held[0], metrics = pipeline.step(held[0], placed)
        return metrics["loss"]

    return seconds(run, repeats)


def hand_written_s(size: Size, repeats: int) -> float:
    """Seconds of a plain step.

    Masters in float32, cast once, gradients summed in float32, Adam, the state donated.
    """
    model, optimizer = model_of(size, 1), optax.adam(1e-4)
    x, y, _ = jax.tree.map(
        jnp.asarray, tokens(size.num_microbatches, size.microbatch, size.time, size.vocab)
    )
    params = jax.tree.map(
        lambda p: p.astype(jnp.float32), jax.jit(model.init)(jax.random.key(0), x[0])
    )

    def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return cross_entropy(model.apply(params, x, train=True), y).astype(jnp.float32)

    def step(state: tuple, x: jax.Array, y: jax.Array) -> tuple:
        params, moments = state
        narrow = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)

        def accumulate(total: tuple, xy: tuple) -> tuple:
            return jax.tree.map(
                lambda t, g: t + g.astype(t.dtype), total, jax.value_and_grad(loss_fn)(narrow, *xy)
            ), 0

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        (loss, grads), _ = jax.lax.scan(accumulate, zeros, (x, y))
        updates, moments = optimizer.update(
            jax.tree.map(lambda g: g / len(x), grads), moments, params
        )
        return (optax.apply_updates(params, updates), moments), loss / len(x)

    jitted, held = jax.jit(step, donate_argnums=0), [(params, optimizer.init(params))]

    def run() -> Any:
        held[0], loss = jitted(held[0], x, y)
        return loss

    return seconds(run, repeats)


def tick_s(repeats: int) -> float:
    """Seconds that one microbatch more costs where a stage does next to nothing."""
    small = Size(dim=128, num_blocks=1, time=16, microbatch=1, num_microbatches=4, vocab=256)
    large = replace(small, num_microbatches=36)
    extra = pipelined_s(large, 1, repeats) - pipelined_s(small, 1, repeats)
    return extra / (large.num_microbatches - small.num_microbatches)


def peak_flops(given: float | None) -> float | None:
    """The device's peak in operations a second; None where it is not known."""
    kind = jax.devices()[0].device_kind.upper()
    peak = given or next((known for name, known in PEAK_TFLOPS.items() if name in kind), None)
    return None if peak is None else peak * 1e12


def report(size: Size, num_stages: int, repeats: int, peak: float | None) -> None:
    """Measure one size and print its tables."""

    def mfu(flops: float, taken_s: float) -> str:
        return "-" if peak is None else f"{flops / taken_s / peak:.3f}"

    forward_s, input_s, weight_s = stage_costs(size, repeats)
    straight_s, branched_s = branch_costs(size, repeats)
    overhead_s = max(tick_s(repeats), 0.0)
    whole_s = forward_s + input_s + weight_s
    print(
        f"\nD = {size.dim}, {size.num_blocks} blocks, T = {size.time}, microbatch "
        f"{size.microbatch}\n"
    )
    print_head("what", "ms", "mfu")
    print_row("F", f"{forward_s * 1e3:.3f}", mfu(size.stage_flops / 3, forward_s))
    print_row("I", f"{input_s * 1e3:.3f}", "")
    print_row("W", f"{weight_s * 1e3:.3f}", "")
    print_row("F + I + W", f"{whole_s * 1e3:.3f}", mfu(size.stage_flops, whole_s))
    print_row("tick, straight", f"{straight_s * 1e3:.3f}", mfu(size.stage_flops, straight_s))
    print_row("tick, behind a branch", f"{branched_s * 1e3:.3f}", mfu(size.stage_flops, branched_s))
    print_row("tick of a stage that does next to nothing", f"{overhead_s * 1e3:.3f}", "")
    plain_s, ours_s = hand_written_s(size, repeats), pipelined_s(size, 1, repeats)
    flops = size.step_flops(1)
    print_row(
        f"hand-written step, M = {size.num_microbatches}",
        f"{plain_s * 1e3:.2f}",
        mfu(flops, plain_s),
    )
    print_row(
        f"jaxpipe, S = 1 ({ours_s / plain_s:.3f} of it)", f"{ours_s * 1e3:.2f}", mfu(flops, ours_s)
    )
    for name, skips in (("computed", False), ("skipped", True)):
        if (count := jax.device_count()) > 1:
            taken_s = pipelined_s(size, count, repeats, skips=skips)
            share = mfu(size.step_flops(count), taken_s)
            print_row(f"jaxpipe, S = {count}, idle actions {name}", f"{taken_s * 1e3:.2f}", share)
    num_microbatches = 4 * num_stages
    print(
        f"\nProjected on {num_stages} stages of {size.num_blocks} blocks, M = {num_microbatches}, "
        "without exchanges:\n"
    )
    print_head(
        "schedule",
        "chunks",
        "idle actions",
        "step ms",
        "of ideal",
        "mfu of the blocks",
        "in flight",
    )
    counts = {
        n: n * -(-size.num_blocks // n) / size.num_blocks for n in (1, 2, 4) if n <= size.num_blocks
    }
    branch_s = max(branched_s - straight_s, 0.0)
    names = [name for name, kind in schedule_names().items() if kind.is_auto_candidate]
    for name, count in itertools.product(names, counts):
        if not schedule_names()[name].can_have(count):
            continue
        program = lower_schedule(resolve_schedule(name, count), num_microbatches, num_stages)
        for skips in (False, True):
            span_s = makespan(
                program, forward_s, input_s + weight_s, weight_s=weight_s, skip_idle=skips
            )
            kinds = [
                (run.has_forward + run.has_backward + run.has_weight, run.stop - run.start)
                for run in program.runs
            ]
            branches = skips * sum(kind * num_ticks for kind, num_ticks in kinds)
            step_s = counts[count] * span_s + program.num_ticks * overhead_s + branches * branch_s
            idle, ideal = "skipped" if skips else "computed", num_microbatches * whole_s / step_s
            share, slots = (
                mfu(size.stage_flops * num_microbatches, step_s),
                program.residual_slots / count,
            )
            print_row(name, count, idle, f"{step_s * 1e3:.2f}", f"{ideal:.3f}", share, slots)


def main() -> None:
    """Measure every size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dims", default="2048,4096")
    parser.add_argument("--blocks", type=int, default=4, help="blocks of a stage")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--microbatch", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--stages", type=int, default=8, help="stages of the projection")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument(
        "--peak-tflops", type=float, help="the device's bfloat16 peak where its name does not tell"
    )
    parser.add_argument(
        "--attention", choices=("cudnn", "xla"), default="cudnn", help="which fused attention"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny size on any device; its figures mean nothing"
    )
    options = parser.parse_args()
    backend, repeats = jax.default_backend(), options.repeats
    if backend != "gpu" and not options.smoke:
        raise SystemExit(
            f"the default backend must be a GPU, but got {backend!r}. Use --smoke to try it "
            "without one."
        )
    print(f"{jax.device_count()} x {jax.devices()[0].device_kind}, JAX {jax.__version__}")
    sizes = [
        Size(
            dim,
            options.blocks,
            options.tokens,
            options.microbatch,
            options.microbatches,
            attention=options.attention,
        )
        for dim in map(int, options.dims.split(","))
    ]
    if options.smoke:
        sizes, repeats = [Size(128, 2, 32, 1, 2, vocab=256)], 2
    for size in sizes:
        report(size, options.stages, repeats, peak_flops(options.peak_tflops))


if __name__ == "__main__":
    main()
