"""Models whose layers say how they are sharded inside a stage.

Each stands beside the same layers that say nothing.

What is annotated must compute what is not, so the plain layers on one device are the oracle. Dims
are told apart by their sizes: 24 is an MLP's width, 32 the vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from _models import ALL_MODELS, Model, cross_entropy, weighted_loss
from _oracle import SCHEDULES, Case, make_batch
from _settings import make_settings
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpipe import LayerSpec, Pipeline, PipelineModule, ProcessTopology, TiedLayerSpec
from jaxpipe.layers import AuxLoss, VocabEmbed, VocabHead
from jaxpipe.losses import vocab_cross_entropy
from jaxpipe.topology import make_pipeline_mesh

VOCAB, DIM, HIDDEN, HEADS, HEAD_DIM, EXPERTS, LENGTH, BLOCKS = 32, 8, 24, 4, 2, 4, 4, 4

RULES = (("batch", "data"), ("vocab", "model"), ("mlp", "model"), ("embed", None))
"""As users write them: `batch` is there for activations, whose samples a stage has divided already.
"""

JOINT_RULES = (*RULES[:2], ("mlp", ("model", "expert")), ("embed", None))
"""One dim over two axes."""

Init = Callable[..., Any]
Spec = tuple[str | None | tuple[str, ...], ...]


def split(init: Init, *names: Any, said: bool) -> Init:
    return nn.with_partitioning(init, names) if said else init


def named(init: Init, *names: Any, said: bool) -> Init:
    return nn.with_logical_partitioning(init, names) if said else init


def constrain(x: jax.Array, *names: Any, said: bool) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, P(*names)) if said else x


lecun, normal, zeros = (
    nn.initializers.lecun_normal(),
    nn.initializers.normal(0.5),
    nn.initializers.zeros,
)


class Embed(nn.Module):
    """Its table is sharded by rows."""

    said: bool = True

    def setup(self) -> None:
        self.table = self.param("table", split(normal, "model", None, said=self.said), (VOCAB, DIM))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return jnp.take(self.table, tokens, axis=0)

    def attend(self, x: jax.Array) -> jax.Array:
        return x @ self.table.T


class Head(nn.Module):
    """Its logits are sharded over the vocabulary."""

    said: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = split(lecun, None, "model", said=self.said)
        logits = nn.Dense(VOCAB, use_bias=False, kernel_init=init, name="logits")(
            nn.LayerNorm(name="norm")(x)
        )
        return constrain(logits, None, None, "model", said=self.said)


class Mlp(nn.Module):
    """By columns, then by rows; nothing is said of activations."""

    said: bool = True
    rate: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        columns, rows = (
            split(lecun, *names, said=self.said) for names in ((None, "model"), ("model", None))
        )
        offset = split(nn.initializers.normal(0.1), "model", said=self.said)
        y = jnp.tanh(
            nn.Dense(HIDDEN, kernel_init=columns, bias_init=offset, name="wide")(
                nn.LayerNorm(name="norm")(x)
            )
        )
        y = nn.Dropout(self.rate, deterministic=not train)(y)
        return x + nn.Dense(DIM, kernel_init=rows, name="narrow")(y)


class Block(nn.Module):
    """Attention whose heads are sharded, with constraints, and an MLP.

    The key bias is left out: its true gradient is zero. A small share, so that rounding stays small
    too.
    """

    said: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init, h = (
            split(lecun, None, "model", None, said=self.said),
            nn.LayerNorm(name="norm_attention")(x),
        )
        weights = (
            self.param(name, init, (DIM, HEADS, HEAD_DIM)) for name in ("query", "key", "value")
        )
        q, k, v = (
            constrain(jnp.einsum("btd,dhk->bthk", h, w), None, None, "model", None, said=self.said)
            for w in weights
        )
        scores = jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", q, k) / HEAD_DIM**0.5)
        out = self.param(
            "out", split(lecun, "model", None, None, said=self.said), (HEADS, HEAD_DIM, DIM)
        )
        y = jnp.einsum("bhqs,bshk,hkd->bqd", scores, v, out)
        x = x + 0.1 * constrain(y, None, None, None, said=self.said)
        return Mlp(self.said, name="mlp")(x)


class LogicalBlock(nn.Module):
    """Logical names for weights and activations, as Flax's own examples have them."""

    said: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        columns, rows = (
            named(lecun, *names, said=self.said) for names in (("embed", "mlp"), ("mlp", "embed"))
        )
        offset = named(nn.initializers.normal(0.1), "mlp", said=self.said)
        scale = named(nn.initializers.ones, "embed", said=self.said)
        y = nn.Dense(HIDDEN, kernel_init=columns, bias_init=offset, name="wide")(
            nn.LayerNorm(scale_init=scale, name="norm")(x)
        )
        y = nn.with_logical_constraint(y, ("batch", "length", "mlp"))
        y = nn.Dense(DIM, kernel_init=rows, name="narrow")(jnp.tanh(y))
        return x + nn.with_logical_constraint(y, ("batch", "length", "embed"))


class LogicalEmbed(nn.Module):
    said: bool = True

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        return nn.Embed(
            VOCAB, DIM, embedding_init=named(normal, "vocab", "embed", said=self.said), name="table"
        )(tokens)


class LogicalHead(nn.Module):
    said: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(
            VOCAB,
            use_bias=False,
            kernel_init=named(lecun, "embed", "vocab", said=self.said),
            name="logits",
        )(x)


class SequenceBlock(nn.Module):
    """Its residual stream is sharded along the sequence.

    It is gathered for what is sharded by features.
    """

    said: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = constrain(x, None, "model", None, said=self.said)
        y = Mlp(self.said, name="mlp")(x) - x
        return constrain(x + y, None, "model", None, said=self.said)


class FullyShardedBlock(nn.Module):
    """Weights sharded at rest over the axis that divides the samples too.

    Also over `model` where `inner` says so.
    """

    said: bool = True
    inner: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        inner = "model" if self.inner else None
        wide, narrow = (
            split(lecun, *names, said=self.said) for names in (("fsdp", inner), (inner, "fsdp"))
        )
        x = constrain(x, "fsdp", None, None, said=self.said)
        y = nn.Dense(HIDDEN, use_bias=False, kernel_init=wide, name="wide")(
            nn.LayerNorm(name="norm")(x)
        )
        y = nn.Dense(DIM, use_bias=False, kernel_init=narrow, name="narrow")(jnp.tanh(y))
        return constrain(x + y, "fsdp", None, None, said=self.said)


class NestedBlock(nn.Module):
    """Explicit collectives, in a `shard_map` of its own over the one axis."""

    said: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        wide = self.param("wide", split(lecun, None, "model", said=self.said), (DIM, HIDDEN))
        narrow = self.param("narrow", split(lecun, "model", None, said=self.said), (HIDDEN, DIM))

        def local(x: jax.Array, wide: jax.Array, narrow: jax.Array) -> jax.Array:
            y = jnp.tanh(x @ wide) @ narrow
            return jax.lax.psum(y, "model") if self.said else y

        if self.said:
            specs = (P(), P(None, "model"), P("model", None))
            local = jax.shard_map(
                local, in_specs=specs, out_specs=P(), axis_names={"model"}, check_vma=False
            )
        return x + local(nn.LayerNorm(name="norm")(x), wide, narrow)


class Rematted(nn.Module):
    """What a scan repeats."""

    said: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return Mlp(self.said, name="mlp")(x), None


class ScannedBlock(nn.Module):
    """Two MLPs in a `scan` over stacked weights, recomputed in the backward.

    Flax's own models have their layers so.
    """

    said: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scanned = nn.scan(
            nn.remat(Rematted, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
            metadata_params={nn.PARTITION_NAME: None},
        )
        return scanned(self.said, name="layers")(x, None)[0]


class StatsBlock(nn.Module):
    """Keeps sharded means, a count and batch statistics, and adds to the loss."""

    said: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        init = split(lecun, None, "model", said=self.said)
        y = nn.Dense(HIDDEN, use_bias=False, kernel_init=init, name="wide")(x)
        y = jnp.tanh(nn.BatchNorm(use_running_average=not train, momentum=0.8, name="norm")(y))
        mean = self.variable(
            "means", "mean", split(lambda: jnp.zeros(HIDDEN), "model", said=self.said)
        )
        count = self.variable("means", "count", lambda: jnp.zeros((), jnp.int32))
        if train and not self.is_initializing():
            mean.value = 0.5 * mean.value + 0.5 * y.mean((0, 1))
            count.value += 1
        self.sow("losses", "size", 0.1 * jnp.mean(y**2))
        self.sow("metrics", "top", jnp.max(y))
        rows = split(lecun, "model", None, said=self.said)
        y = y - mean.value.reshape(1, 1, -1)
        return x + 0.1 * nn.Dense(DIM, use_bias=False, kernel_init=rows, name="narrow")(y)


class Experts(nn.Module):
    """Two of four experts for each token, with room for some of its tokens in each.

    A loss balances them.

    Experts lie on the axis `expert`, and the features inside each on `model` where `inner` says so.
    """

    said: bool = True
    inner: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, _ = x.shape
        tokens, inner = x.reshape(-1, DIM), "model" if self.inner else None
        room = batch * length * 2 // EXPERTS + 1
        gates = jax.nn.softmax(
            nn.Dense(EXPERTS, use_bias=False, name="router")(nn.LayerNorm(name="norm")(tokens))
        )
        best, chosen = jax.lax.top_k(gates, 2)
        choices = jax.nn.one_hot(chosen, EXPERTS, dtype=jnp.int32)
        order = (
            jnp.cumsum(choices.swapaxes(0, 1).reshape(-1, EXPERTS), 0)
            .reshape(2, -1, EXPERTS)
            .swapaxes(0, 1)
        )
        slots = jax.nn.one_hot(jnp.sum(order * choices, -1) - 1, room)
        dispatch = jnp.einsum("nce,ncr->ner", choices, slots)
        combine = jnp.einsum("nc,nce,ncr->ner", best / best.sum(-1, keepdims=True), choices, slots)
        wide = self.param(
            "wide", split(lecun, "expert", None, inner, said=self.said), (EXPERTS, DIM, HIDDEN)
        )
        narrow = self.param(
            "narrow", split(lecun, "expert", inner, None, said=self.said), (EXPERTS, HIDDEN, DIM)
        )
        y = constrain(
            jnp.einsum("ner,nd->erd", dispatch, tokens), "expert", None, None, said=self.said
        )
        y = jnp.einsum("erf,efd->erd", jnp.tanh(jnp.einsum("erd,edf->erf", y, wide)), narrow)
        y = jnp.einsum("ner,erd->nd", combine, constrain(y, "expert", None, None, said=self.said))
        self.sow(
            "losses", "balance", 0.1 * EXPERTS * jnp.sum(gates.mean(0) * choices[:, 0].mean(0))
        )
        return x + y.reshape(x.shape)


class NNXMlp(nnx.Module):
    def __init__(self, rate: float = 0.0, *, said: bool = True, rngs: nnx.Rngs) -> None:
        def sharded(*names: str | None) -> Init:
            return nnx.with_partitioning(lecun, names) if said else lecun

        self.norm = nnx.LayerNorm(DIM, rngs=rngs)
        self.wide = nnx.Linear(DIM, HIDDEN, kernel_init=sharded(None, "model"), rngs=rngs)
        self.narrow = nnx.Linear(HIDDEN, DIM, kernel_init=sharded("model", None), rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.said = said

    def __call__(self, x: jax.Array) -> jax.Array:
        y = constrain(jnp.tanh(self.wide(self.norm(x))), None, None, "model", said=self.said)
        return x + self.narrow(self.dropout(y))


class NNXLogical(nnx.Module):
    """Logical names as metadata of variables, and statistics; reports a loss."""

    def __init__(self, *, said: bool = True, rngs: nnx.Rngs) -> None:
        def param(*shape: int, names: tuple[str, ...]) -> nnx.Param:
            metadata: dict[str, Any] = {"out_sharding": names} if said else {}
            return nnx.Param(lecun(rngs.params(), shape), **metadata)

        self.wide = param(DIM, HIDDEN, names=("embed", "mlp"))
        self.narrow = param(HIDDEN, DIM, names=("mlp", "embed"))
        self.norm = nnx.BatchNorm(HIDDEN, momentum=0.8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jnp.tanh(self.norm(x @ self.wide))
        self.sow(AuxLoss, "size", 0.1 * jnp.mean(y**2))
        return x + 0.1 * (y @ self.narrow)


class NNXEmbed(nnx.Module):
    def __init__(self, *, said: bool = True, rngs: nnx.Rngs) -> None:
        init = nnx.with_partitioning(normal, ("model", None)) if said else normal
        self.table = nnx.Embed(VOCAB, DIM, embedding_init=init, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.table(tokens)

    def attend(self, x: jax.Array) -> jax.Array:
        return self.table.attend(x)


def shift(x: jax.Array) -> dict[str, jax.Array]:
    """No parameters, another form of what flows on."""
    return {"left": x[..., : DIM // 2], "right": jnp.sin(x[..., DIM // 2 :])}


def unshift(parts: Mapping[str, jax.Array]) -> jax.Array:
    return jnp.concatenate([parts["left"], parts["right"]], -1)


@dataclass(frozen=True)
class Annotated:
    """A layer list that takes `said`, and what it says.

    Attributes:
        layers: Makes the list, with annotations or without.
        specs: Leaves that are sharded, by the ends of their paths.
        loss_fn: As for `PipelineModule`.
        rules: As for `PipelineModule(sharding_rules=)`.
    """

    layers: Callable[..., list[Any]]
    specs: Mapping[str, Spec] = field(default_factory=dict)
    loss_fn: Callable[..., Any] = cross_entropy
    rules: tuple[tuple[str, Any], ...] | None = None


def vocab_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return vocab_cross_entropy(logits, labels, VOCAB).mean()


def text(rng: np.random.Generator, *lead: int) -> tuple[Any, Any, Any]:
    inputs, labels = rng.integers(0, VOCAB, (2, *lead, LENGTH)).astype(np.int32)
    return inputs, labels, {}


def tied(kind: type = Embed, block: type = Block, **kwargs: Any) -> Callable[..., list[Any]]:
    def make(*, said: bool = True) -> list[Any]:
        first = TiedLayerSpec("table", kind, said=said)
        last = TiedLayerSpec("table", kind, said=said, forward_fn=kind.attend)
        return [first, *repeated(block, said, **kwargs), nn.LayerNorm(), last]

    return make


def repeated(kind: type, said: bool, count: int = BLOCKS, **kwargs: Any) -> list[LayerSpec]:
    return [LayerSpec(kind, said=said, **kwargs) for _ in range(count)]


def between(
    kind: type, ends: tuple[type, type] = (Embed, Head), **kwargs: Any
) -> Callable[..., list[Any]]:
    return lambda *, said=True: [
        LayerSpec(ends[0], said=said),
        *repeated(kind, said, **kwargs),
        LayerSpec(ends[1], said=said),
    ]


MLP: dict[str, Spec] = {
    "wide/kernel": (None, "model"),
    "wide/bias": ("model",),
    "narrow/kernel": ("model", None),
}
ENDS: dict[str, Spec] = {"table": ("model", None), "logits/kernel": (None, "model")}
HEADED: dict[str, Spec] = dict.fromkeys(("query", "key", "value"), (None, "model", None)) | {
    "out": ("model", None, None)
}
EXPERT: dict[str, Spec] = {"wide": ("expert", None, None), "narrow": ("expert", None, None)}
INNER: dict[str, Spec] = {"wide": ("expert", None, "model"), "narrow": ("expert", "model", None)}
LOGICAL_ENDS: dict[str, Spec] = {"embedding": ("model", None), "logits/kernel": (None, "model")}

ANNOTATED = {
    "block": Annotated(between(Block), {**ENDS, **HEADED, **MLP}),
    "deep": Annotated(between(Mlp, count=8), {**ENDS, **MLP}),
    "logical": Annotated(
        between(LogicalBlock, (LogicalEmbed, LogicalHead)),
        {**LOGICAL_ENDS, **MLP},
        weighted_loss,
        RULES,
    ),
    "joint": Annotated(
        between(LogicalBlock, (LogicalEmbed, LogicalHead)),
        {
            **LOGICAL_ENDS,
            "wide/kernel": (None, ("model", "expert")),
            "narrow/kernel": (("model", "expert"), None),
        },
        cross_entropy,
        JOINT_RULES,
    ),
    "nnx": Annotated(
        between(NNXMlp), {**ENDS, **{name: MLP[name] for name in ("wide/kernel", "narrow/kernel")}}
    ),
    "nnx_logical": Annotated(
        between(NNXLogical, (LogicalEmbed, LogicalHead)),
        {**LOGICAL_ENDS, "wide": (None, "model"), "narrow": ("model", None)},
        cross_entropy,
        RULES,
    ),
    "tied": Annotated(tied(), {"table": ENDS["table"], **HEADED, **MLP}),
    "tied_nnx": Annotated(tied(NNXEmbed, NNXMlp), {"table/embedding": ("model", None)}),
    "vocab": Annotated(
        lambda *, said=True: [
            VocabEmbed(VOCAB, DIM),
            *repeated(Block, said),
            nn.LayerNorm(),
            VocabHead(VOCAB),
        ],
        {**HEADED, **MLP},
        vocab_loss,
    ),
    "dropout": Annotated(between(Mlp, rate=0.5), {**ENDS, **MLP}),
    "dropout_nnx": Annotated(between(NNXMlp, rate=0.5), ENDS),
    "stats": Annotated(
        between(StatsBlock),
        {**ENDS, "wide/kernel": (None, "model"), "narrow/kernel": ("model", None)},
        weighted_loss,
    ),
    "sequence": Annotated(between(SequenceBlock), {**ENDS, **MLP}),
    "nested": Annotated(
        between(NestedBlock), {**ENDS, "wide": (None, "model"), "narrow": ("model", None)}
    ),
    "scanned": Annotated(
        between(ScannedBlock, count=2),
        {
            **ENDS,
            "wide/kernel": (None, None, "model"),
            "wide/bias": (None, "model"),
            "narrow/kernel": (None, "model", None),
        },
    ),
    "mixed": Annotated(
        lambda *, said=True: [
            *[
                Embed(said),
                LayerSpec(NNXMlp, said=said),
                jnp.tanh,
                Block(said),
                shift,
                unshift,
                Mlp(said),
            ],
            *[lambda x: x[:, ::-1], LayerSpec(NNXMlp, said=said), Head(said)],
        ],
        {**ENDS, **HEADED},
    ),
    "experts": Annotated(
        lambda *, said=True: [nn.Embed(VOCAB, DIM), *repeated(Experts, said), nn.Dense(VOCAB)],
        EXPERT,
    ),
    "inner": Annotated(between(Experts, inner=True), {**ENDS, **INNER}),
    "fsdp": Annotated(
        lambda *, said=True: [
            nn.Embed(VOCAB, DIM),
            *repeated(FullyShardedBlock, said),
            nn.Dense(VOCAB),
        ],
        {"wide/kernel": ("fsdp", None), "narrow/kernel": (None, "fsdp")},
    ),
    "fsdp_model": Annotated(
        between(FullyShardedBlock, inner=True),
        {**ENDS, "wide/kernel": ("fsdp", "model"), "narrow/kernel": ("model", "fsdp")},
    ),
}

ALL_MODELS.update(
    (
        f"{name}, unsaid",
        Model(
            lambda model=model: model.layers(said=False),
            model.loss_fn,
            text,
            has_trunk=name != "mixed",
        ),
    )
    for name, model in ANNOTATED.items()
)
"""The oracle finds them there."""


@dataclass(frozen=True)
class Sharded(Case):
    """One pipeline of an annotated model.

    Attributes:
        annotated: Its name.
        axes: The automatic axes with their lengths.
    """

    annotated: str = "block"
    axes: tuple[tuple[str, int], ...] = (("model", 2),)

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", f"{self.annotated}, unsaid")

    def __str__(self) -> str:
        sizes = "x".join(
            str(size) for size in (self.stages, self.data, *(length for _, length in self.axes))
        )
        extras = [f"{name}={value}" for name, value in self.settings.items()]
        plain = super().__str__().removeprefix(f"{self.model}-")
        return "-".join([self.annotated, sizes, plain.partition("-")[2], *extras])

    def topology(self) -> ProcessTopology:
        names, lengths = zip(*self.axes, strict=True)
        return ProcessTopology(["pipe", "data", *names], [self.stages, self.data, *lengths])

    def module(self) -> PipelineModule:
        model = ANNOTATED[self.annotated]
        rules = {} if model.rules is None else {"sharding_rules": model.rules}
        return PipelineModule(
            model.layers(),
            topology=self.topology(),
            loss_fn=model.loss_fn,
            partition_method=self.boundaries(),
            activation_checkpoint_interval=self.interval,
            **rules,
        )

    def pipeline(self) -> Pipeline:
        module = self.module()
        example = jax.tree.map(
            lambda x: x[0], make_batch(ALL_MODELS[self.model], self.microbatches, self.data)
        )
        settings = make_settings(
            schedule=SCHEDULES[self.schedule],
            skip_idle=self.skip_idle,
            scan_trunk=self.scan_trunk,
            **self.settings,
        )
        return Pipeline(
            module,
            self.optimizer,
            make_pipeline_mesh(module.topology()),
            example,
            self.microbatches,
            settings,
        )
