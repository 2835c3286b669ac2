"""What does XLA make of transformer blocks split by annotation inside a stage, on 64 H200s?

Compiled ahead of time, so no GPU is needed, only the CUDA plugin: 8 stages, one on each computer, x
8 GPUs in `model`, blocks at the widths of a 70B model (D 8192, SwiGLU of 28672, 64 heads and 8 of
keys and values, T 4096), bfloat16, 1f1b, one sample a microbatch, AdamW, embedding and head split
over the stages. Weights are split by columns, then by rows, by `nn.with_partitioning` alone; the
residual stream is `whole` on each place, or split over `model` along the `sequence` between the
sublayers, by `with_sharding_constraint` alone. `step`, `chunk` and `tick` have no word of sharding
in a layer: the 8 GPUs of a stage are places of `fsdp`, each with a sample of its own, and weights
are gathered once a step, or in every tick. `data` is the same blocks on 8 replicas with ZeRO-1:
weights gathered, and gradients summed, once a step.

- Collectives: of a steady tick, per block, forward, recomputed and backward.
- Memory: bytes per device, beside those that `jaxpipe.plan` counts.
- Whole: arrays in the steady tick of the whole shape of a weight, and, where the stream is split,
  ring slots and exchanges of the whole stream.

Expected per block: `whole` 2 all-reduces forward and 2 backward; `sequence` 2 all-gathers and 2
reduce-scatters forward and as many backward, and 2 recomputed all-gathers, which Megatron repeats,
too. Recompute repeats one reduction of the two (the other is not needed again) where sums are not
kept, and none where they are, for one array more a block in the ring. Two collective-permutes a
tick, of the stream, or of an eighth of it. Arguments within 1 % of the count, temporaries within 10
%. Nothing whole. With `fsdp` the six weights of a block are gathered forward and again backward
with `tick` and not at all in a tick with `step`, and their gradients are reduced and scattered, 6
in each tick.

Run: JAX_PLATFORMS=cpu python -m benchmarks.annotated [--forms whole,sequence,step,tick] [--keep
     0,1] [--blocks 2] [--chunks 1] [--attention einsum] [--dump DIRECTORY] [--smoke]
"""

import argparse
import collections
import dataclasses
import functools
import re
import time
from dataclasses import dataclass
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.lax import with_sharding_constraint
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jaxpipe
from benchmarks._table import print_head, print_row
from jaxpipe.config import PipelineConfig, TrainConfig, ZeroSection
from jaxpipe.errors import counted as in_words
from jaxpipe.forecast import HARDWARE, DeviceMemory
from jaxpipe.layers import VocabEmbed, VocabHead
from jaxpipe.losses import vocab_cross_entropy
from jaxpipe.tools.plan import compilable_devices

STAGES, PLACES, MICROBATCHES = 8, 8, 16
STREAM = {"whole": P(), "sequence": P(None, "model", None)}
AXIS = {"whole": "model", "sequence": "model", "step": "fsdp", "tick": "fsdp", "data": "data"}


@dataclass(frozen=True)
class Size:
    """Widths of the model; `blocks` on each stage, in `chunks`."""

    dim: int = 8192
    ffn: int = 28672
    heads: int = 64
    kv_heads: int = 8
    time: int = 4096
    vocab: int = 32768
    blocks: int = 2
    chunks: int = 1

    @property
    def head_dim(self) -> int:
        """Length of a head."""
        return self.dim // self.heads

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a block's split weights."""
        return {
            "query": (self.dim, self.heads, self.head_dim),
            "key_value": (self.dim, self.kv_heads, 2 * self.head_dim),
            "project": (self.heads, self.head_dim, self.dim),
            "gate": (self.dim, self.ffn),
            "up": (self.dim, self.ffn),
            "down": (self.ffn, self.dim),
        }


class Block(nn.Module):
    """A pre-norm block of attention and SwiGLU, as for one device, with annotations."""

    size: Size
    form: str
    attention: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[batch, time, dim]` to the same shape."""
        x = self._constrain(x)
        h = self._constrain(nn.RMSNorm()(x), P())
        q = jnp.einsum("btd,dhk->bthk", h, self._weight("query", (None, "model", None)))
        kv = jnp.einsum("btd,dhk->bthk", h, self._weight("key_value", (None, "model", None)))
        h = self._mix(q, *jnp.split(kv, 2, axis=-1))
        h = jnp.einsum("bthk,hkd->btd", h, self._weight("project", ("model", None, None)))
        x = x + self._reduced(h)
        h = self._constrain(nn.RMSNorm()(x), P())
        h = nn.silu(h @ self._weight("gate", (None, "model"))) * (
            h @ self._weight("up", (None, "model"))
        )
        return self._constrain(x + self._reduced(h @ self._weight("down", ("model", None))))

    def _constrain(self, x: jax.Array, spec: P | None = None) -> jax.Array:
        """Sharded so, or as the stream is, where `model` is an axis."""
        if AXIS[self.form] != "model":
            return x
        return with_sharding_constraint(x, STREAM[self.form] if spec is None else spec)

    def _weight(self, name: str, axes: tuple[str | None, ...]) -> jax.Array:
        init = nn.initializers.normal(0.02)
        if AXIS[self.form] == "model":
            init = nn.with_partitioning(init, axes)
        return self.param(name, init, self.size.weights[name])

    def _reduced(self, y: jax.Array) -> jax.Array:
        """The sum of what the places have, which recompute may keep."""
        if AXIS[self.form] != "model":
            return y
        # Whole first: in the backward both products then take one gathered gradient. Without it XLA
        # gathers it twice.
        y = self._constrain(y, P())
        return checkpoint_name(self._constrain(y), "reduced")

    def _mix(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Causal attention with fewer heads of keys than of queries."""
        if self.attention != "einsum":
            # Where parameters are made, all is in float32.
            q, k, v = (a.astype(jnp.bfloat16) for a in (q, k, v))
            mix = functools.partial(
                jax.nn.dot_product_attention, is_causal=True, implementation=self.attention
            )
            # JAX (0.10) cannot partition cuDNN's attention where some axes are manual; each place
            # has its own heads, or samples.
            axis = AXIS[self.form]
            if axis == "data":  # manual already
                return mix(q, k, v)
            own = P(None, None, "model", None) if axis == "model" else P(axis)
            return jax.shard_map(
                mix, in_specs=(own,) * 3, out_specs=own, axis_names={axis}, check_vma=False
            )(q, k, v)
        batch, length, heads, width = q.shape
        q = q.reshape(batch, length, k.shape[2], heads // k.shape[2], width)
        scores = jnp.einsum("btngk,bsnk->bngts", q, k) / width**0.5
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
        return jnp.einsum("bngts,bsnk->btngk", nn.softmax(scores), v).reshape(
            batch, length, heads, width
        )


def build(size: Size, form: str, attention: str, *, keep: bool) -> jaxpipe.Pipeline:
    """The pipeline on a mesh of GPUs that are not there."""
    model, settings, example = job(size, form, attention, keep=keep)
    shape = {"stage": STAGES, "data": 1, AXIS[form]: PLACES}
    devices = np.array(compilable_devices(HARDWARE["h200"], STAGES * PLACES)).reshape(
        *shape.values()
    )
    mesh = Mesh(devices, tuple(shape), axis_types=(AxisType.Auto,) * len(shape))
    return jaxpipe.Pipeline(
        model, optax.adamw(1e-4), mesh, (example, example), MICROBATCHES, settings
    )


def job(
    size: Size, form: str, attention: str, *, keep: bool
) -> tuple[jaxpipe.PipelineModule, TrainConfig, jax.ShapeDtypeStruct]:
    """The model, its settings, and inputs of a microbatch."""
    axis = AXIS[form]
    kept = jax.checkpoint_policies.save_only_these_names("reduced") if keep else None
    layers = [
        VocabEmbed(size.vocab, size.dim),
        *[
            jaxpipe.LayerSpec(Block, size, form, attention).remat(kept)
            for _ in range(STAGES * size.blocks)
        ],
        nn.RMSNorm(),
        VocabHead(size.vocab, use_bias=False),
    ]
    model = jaxpipe.PipelineModule(
        layers,
        STAGES,
        loss_fn=lambda logits, labels: vocab_cross_entropy(logits, labels, size.vocab).mean(),
        partition_method="trunk",
        compute_dtype="bfloat16",
    )
    example = jax.ShapeDtypeStruct((1 if axis == "model" else PLACES, size.time), jnp.int32)
    gather = form if axis == "fsdp" else "auto"
    schedule = "1f1b" if size.chunks == 1 else "interleaved"
    section = PipelineConfig(schedule=schedule, num_chunks=size.chunks, gather_weights=gather)
    zero = ZeroSection(stage=1 if axis == "data" else 0)
    settings = TrainConfig(
        train_micro_batch_size_per_gpu=1,
        gradient_accumulation_steps=MICROBATCHES,
        pipeline=section,
        zero_optimization=zero,
    )
    return model, settings, example


@dataclass(frozen=True)
class Line:
    """One instruction of scheduled HLO."""

    name: str
    shape: str
    op: str
    rest: str

    @property
    def arrays(self) -> list[tuple[int, ...]]:
        """Dims of its arrays."""
        return [
            tuple(int(n) for n in dims.split(",") if n)
            for dims in re.findall(r"[a-z]+\d+\[([\d,]*)\]", self.shape)
        ]

    @property
    def operands(self) -> list[str]:
        """Names of what it takes."""
        return re.findall(r"%([\w.\-]+)", self.rest.split(")")[0])

    @property
    def origin(self) -> str:
        """Where in the program XLA says that it comes from; nothing where it does not know."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found.group(1) if found else ""


class Tick:
    """The body of the loop over ticks in which most is done.

    Args:
        text: Scheduled HLO of a step.
    """

    def __init__(self, text: str) -> None:
        computations: dict[str, list[Line]] = {}
        current: list[Line] = []
        for raw in re.sub(r"/\*index=\d+\*/", "", text).splitlines():
            if head := re.match(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$", raw):
                current = computations.setdefault(head.group(1), [])
            elif found := re.match(
                r"^(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$", raw.strip()
            ):
                current.append(Line(*found.groups()))
        bodies = [computations[name] for name in set(re.findall(r"body=%?([\w.\-]+)", text))]
        self._computations = computations
        self._body = max(bodies, key=len)
        self._by_name = {line.name: line for line in self._body}

    def lines(self) -> list[Line]:
        """All that runs in it, in branches, too."""

        def inside(body: list[Line]) -> list[Line]:
            called = [re.search(r"branch_computations=\{([^}]*)\}", line.rest) for line in body]
            names = [
                name.strip().lstrip("%")
                for found in called
                if found
                for name in found.group(1).split(",")
            ]
            return [*body, *(line for name in names for line in inside(self._computations[name]))]

        return inside(self._body)

    def collectives(self) -> dict[tuple[str, str, str], list[int]]:
        """By kind, axis and part of the block: elements of what each of them leaves on a device."""
        found: dict[tuple[str, str, str], list[int]] = collections.defaultdict(list)
        for line in self.lines():
            kind = re.match(
                r"(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(-start)?$",
                line.op,
            )
            if kind:
                # A start gives its operands, then its results; one may carry several, each for
                # itself.
                num = len(line.operands)
                results = line.arrays if kind[1] == "all-reduce" else line.arrays[num:]
                for dims in results[:num]:
                    found[kind[1], _axis(line), self._part(line)].append(int(np.prod(dims)))
        # Loops in a tick have one round or none; those that gather run when a stage turns to
        # another chunk.
        loops = [
            re.search(r"body=%?([\w.\-]+)", line.rest)
            for line in self.lines()
            if line.op == "while"
        ]
        for line in (line for loop in loops if loop for line in self._computations[loop.group(1)]):
            if re.match(r"all-gather(-start)?$", line.op):
                num = len(line.operands) if line.op.endswith("start") else 0
                for dims in line.arrays[num:]:
                    found["all-gather", _axis(line), "a turn to another chunk"].append(
                        int(np.prod(dims))
                    )
        return found

    def whole(self, shapes: set[tuple[int, ...]]) -> list[str]:
        """Arrays of these shapes, whatever the order of their dims and however many are 1."""
        wanted = {_plain(dims) for dims in shapes}
        return sorted(
            {
                f"{line.op} {dims}"
                for line in self.lines()
                for dims in line.arrays
                if _plain(dims) in wanted
            }
        )

    def _part(self, line: Line) -> str:
        origin, seen = line.origin, line
        # What XLA has made itself names no origin: that of what it takes counts.
        while not origin and (
            taken := [self._by_name[name] for name in seen.operands if name in self._by_name]
        ):
            seen = taken[0]
            origin = seen.origin
        if "Block" not in origin and line.op.startswith("collective-permute"):
            return "exchange"
        if (
            "rematted" in origin
            and "transpose" in origin
            and "Block._reduced/sharding" not in origin
        ):
            return "recomputed"
        if "Block" not in origin:
            return "weights, embedding, head, loss"
        return "backward" if "transpose" in origin else "forward"


def _axis(line: Line) -> str:
    groups = re.search(
        r"(?:replica_groups|source_target_pairs)=\{?\{?(\[[\d,]+\]<=\[[\d,]+\]\S*?|[\d,]+)[},]",
        line.rest,
    )
    text = groups.group(1) if groups else ""
    if text.startswith(f"[{STAGES},{PLACES}]<=") and "T(" not in text:
        return "inside a stage"
    members = [int(n) for n in text.split(",")] if "[" not in text else []
    return "inside a stage" if len(members) > 1 and members[1] - members[0] == 1 else "stages"


def _plain(dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(n for n in dims if n != 1))


def count(size: Size, form: str, attention: str, *, keep: bool) -> DeviceMemory:
    """Bytes per device that `jaxpipe.plan` counts."""
    model, settings, example = job(size, form, attention, keep=keep)
    axis = AXIS[form]
    return (
        jaxpipe.plan(
            *(model, settings, (example, example), f"h200:{STAGES * PLACES}"),
            optimizer=optax.adamw(1e-4),
            axes=None if axis == "data" else {axis: PLACES},
            schedules=[str(settings.pipeline.schedule)],
            num_chunks=[size.chunks],
            partition=["trunk"],
            recompute=[0],
            alternatives=False,
        )
        .candidates[0]
        .memory
    )


def measure(size: Size, form: str, attention: str, *, keep: bool, dump: Path | None) -> None:
    """Compile, and print the rows of one form."""
    start = time.monotonic()
    built = build(size, form, attention, keep=keep)
    compiled = built.step.lower(built.states.struct, built.batches.struct).compile()
    seconds, text, memory = time.monotonic() - start, compiled.as_text(), compiled.memory_analysis()
    label = f"{form}, {'sums kept' if keep else 'recomputed'}"
    if dump:
        dump.mkdir(parents=True, exist_ok=True)
        (dump / f"{form}_{int(keep)}.txt").write_text(text)
    tick = Tick(text)
    blocks = f"{size.blocks} blocks a stage in {in_words(size.chunks, 'chunk')}"
    print(f"\n### {label}: {blocks}, {attention}, compiled in {seconds:.0f} s\n")
    print_head("collective of a tick", "over", "of", "number", "per block", "largest, elements")
    found = tick.collectives()
    scattered = sum(len(sizes) for (kind, *_), sizes in found.items() if kind == "reduce-scatter")
    for (kind, axis, part), sizes in sorted(found.items()):
        per_block = (
            f"{len(sizes) / size.blocks:g}" if part in ("forward", "backward", "recomputed") else ""
        )
        print_row(kind, axis, part, len(sizes), per_block, max(sizes))
    reductions = re.findall(r" reduce-scatter(?:-start)?\(", text)
    print(f"\nReduce-scatters in the whole program: {len(reductions)}, in a tick {scattered}.\n")
    counted = count(size, form, attention, keep=keep)
    lasting, own = counted.held - counted.masters, counted.temporaries
    print_head(
        "GB per device", "found", "counted", "ratio", "a tick's own, counted", "ratio with it"
    )
    arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    print_row(
        *("arguments", f"{arguments / 1e9:.2f}", f"{counted.masters / 1e9:.2f}"),
        *(f"{arguments / counted.masters:.3f}", "", f"{arguments / counted.masters:.3f}"),
    )
    print_row(
        *(
            "temporaries",
            f"{temporaries / 1e9:.2f}",
            f"{lasting / 1e9:.2f}",
            f"{temporaries / lasting:.3f}",
        ),
        *(f"{own / 1e9:.2f}", f"{temporaries / (lasting + own):.3f}"),
    )
    if AXIS[form] != "model":
        print("\n".join(["", *jaxpipe.describe_pipeline(built).splitlines()[-2:]]), flush=True)
        return  # weights are to be whole in a tick
    shapes: set[tuple[int, ...]] = {
        *size.weights.values(),
        *(_merged(dims) for dims in size.weights.values()),
    }
    if form == "sequence":
        shapes.add((built.plan.program.residual_slots, size.time, size.dim))
    print(f"\nWhole in a tick: {', '.join(tick.whole(shapes)) or 'nothing'}.", flush=True)


def _merged(dims: tuple[int, ...]) -> tuple[int, ...]:
    """The same weight as a matrix."""
    if len(dims) < 3:
        return dims
    return (dims[0], dims[1] * dims[2]) if dims[0] > dims[1] else (dims[0] * dims[1], dims[2])


def main() -> None:
    """Compile each form."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--forms", default="whole,sequence", help="how the residual stream lies over `model`"
    )
    parser.add_argument(
        "--keep", default="0,1", help="whether recompute keeps what reductions give"
    )
    parser.add_argument("--blocks", type=int, default=2, help="on each stage; 10 are a 70B model")
    parser.add_argument("--chunks", type=int, default=1, help="of a stage, interleaved")
    parser.add_argument("--attention", default="einsum", choices=("einsum", "xla", "cudnn"))
    parser.add_argument("--dump", type=Path, help="folder for the scheduled HLO")
    parser.add_argument("--smoke", action="store_true", help="small widths")
    options = parser.parse_args()
    size = Size(1024, 4096, 16, 8, 512, 1024) if options.smoke else Size()
    size = dataclasses.replace(size, blocks=options.blocks, chunks=options.chunks)
    for form in options.forms.split(","):
        for keep in map(int, options.keep.split(",")):
            measure(size, form, options.attention, keep=bool(keep), dump=options.dump)


if __name__ == "__main__":
    main()
