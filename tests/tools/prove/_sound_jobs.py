"""Jobs that are right, of the kinds that users have: a proof must accept them."""

import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _models import ALL_MODELS, DIM, VOCAB, Block, Embed, Head, NNXBlock, cross_entropy

import jaxpipe
from jaxpipe import LayerSpec, PipelineModule, ProcessTopology, TiedLayerSpec
from jaxpipe.layers import LORA_PARAMETERS, lora
from jaxpipe.losses import cross_entropy as token_losses
from jaxpipe.losses import multi_token_cross_entropy
from jaxpipe.models import (
    BertConfig,
    ExpertsConfig,
    GPT2Config,
    Heads,
    LatentConfig,
    LayerPattern,
    LlamaConfig,
    Norms,
    Rotary,
    RotaryScaling,
    bert,
    gpt2,
    llama,
)

Example = tuple[Any, ...]
SAMPLES, TOKENS, LENGTH = 8, 32, 8


@dataclasses.dataclass(frozen=True)
class SoundJob:
    """A job.

    Attributes:
        make: Makes the model and one entry of its data.
        config: Keys of the configuration beside sizes and optimiser.
        optimizer: Section `optimizer`, or an optax transformation.
        axes: Further axes of the mesh.
    """

    make: Callable[[], tuple[PipelineModule, Example]]
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    optimizer: Any = None
    axes: Mapping[str, int] | None = None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `prove`."""
        model, example = self.make()
        config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
        optimizer = self.optimizer or {"type": "AdamW", "params": {"lr": 1e-2}}
        is_section = isinstance(optimizer, dict)
        section = {"optimizer": optimizer} if is_section else {}
        return {
            "model": model,
            "config": {**config, **section, **self.config},
            "example_batch": example,
            "optimizer": None if is_section else optimizer,
            "axes": self.axes,
        }


def known(name: str, stages: int = 2, **how: Any) -> Callable[[], tuple[PipelineModule, Example]]:
    """A model of the other tests."""

    def make() -> tuple[PipelineModule, Example]:
        model = ALL_MODELS[name]
        example = jax.tree.map(lambda x: x[0], model.batch(np.random.default_rng(0), 1, SAMPLES))
        return model.module(stages, **how), example

    return make


def text(*, is_packed: bool = False, size: int = TOKENS, length: int = LENGTH) -> Example:
    rng = np.random.default_rng(0)
    inputs, labels = rng.integers(0, size, (2, SAMPLES, length)).astype(np.int32)
    ids = np.sort(rng.integers(0, 3, inputs.shape), axis=-1).astype(np.int32)
    return (inputs, labels, {"segment_ids": ids}) if is_packed else (inputs, labels)


def of(
    layers: Callable[[], list[Any]],
    example: Callable[[], Example] = text,
    loss_fn: Any = token_losses,
    stages: int = 2,
    **how: Any,
) -> Callable[[], tuple[PipelineModule, Example]]:
    return lambda: (PipelineModule(layers(), stages, loss_fn=loss_fn, **how), example())


LLAMA = LlamaConfig(
    vocab_size=TOKENS,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
ALTERNATING = LayerPattern(sliding_window=3, layer_types=("sliding_attention", "full_attention"))


def decoder(**changes: Any) -> Callable[[], list[Any]]:
    return lambda: llama(dataclasses.replace(LLAMA, **changes))


def gemma_2() -> list[Any]:
    return decoder(
        scale_embeddings=True,
        tie_word_embeddings=True,
        norms=Norms(zero_centered_norms=True, post_norms=True),
        hidden_act="gelu_pytorch_tanh",
        attention=Heads(query_pre_attn_scalar=9.0, attn_logit_softcapping=50.0),
        final_logit_softcapping=30.0,
        pattern=ALTERNATING,
    )()


GPT_OSS = decoder(
    attention=Heads(attention_sinks=True),
    qkv_bias=True,
    out_bias=True,
    pattern=ALTERNATING,
    rotary=Rotary(rope_scaling=RotaryScaling("yarn", 4.0, 8, truncate=False)),
    experts=ExpertsConfig(4, 2, 12, router_bias=True, expert_bias=True, activation="clamped"),
)
ROUTED = ExpertsConfig(
    4,
    2,
    12,
    gate="sigmoid",
    correction_bias=True,
    routed_scaling_factor=2.5,
    shared_size=12,
    shared_gate=False,
)
DEEPSEEK = dataclasses.replace(
    LLAMA,
    num_key_value_heads=4,
    rotary=Rotary(rope_scaling=RotaryScaling("yarn", 4.0, 8, mscale=1.0, mscale_all_dim=1.0)),
    experts=dataclasses.replace(ROUTED, dense_layers=(0,)),
    attention=LatentConfig(10, 6, 4, 8, q_lora_rank=12),
    num_nextn_predict_layers=1,
)
EXTRA_LOSS = functools.partial(multi_token_cross_entropy, extra_weight=0.3)


def numbers(width: int = DIM, out: int = DIM) -> Example:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((SAMPLES, width)).astype(np.float32)
    return x, np.sin(x.sum(1, keepdims=True) * np.arange(1, out + 1)[None]).astype(np.float32)


def squares(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    return jnp.mean((outputs - labels) ** 2)


def weighted_with_metrics(outputs: Any, labels: Any) -> tuple[Any, Any, dict[str, Any]]:
    wrong = (outputs - labels) ** 2
    return wrong.sum(), jnp.float32(wrong.size), {"worst": wrong.max(), "mean": outputs.mean()}


class Foreign(nn.Module):
    """A block whose call takes more and returns more than a pipeline hands on."""

    @nn.compact
    def __call__(self, x: jax.Array, scale: float) -> tuple[jax.Array, None]:
        return x + scale * jnp.tanh(nn.Dense(DIM)(x)), None


def foreign() -> list[Any]:
    block = LayerSpec(Foreign, forward_fn=lambda module, x: module(x, 0.5)[0])
    return [LayerSpec(Embed), *[block] * 4, LayerSpec(Head)]


class Pair(nn.Module):
    """Hands on a pair of streams."""

    @nn.compact
    def __call__(self, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, y = pair
        return x + jnp.tanh(nn.Dense(DIM)(y)), y + 0.5 * jnp.sin(nn.Dense(DIM)(x))


def of_pairs(outputs: tuple[jax.Array, jax.Array], labels: tuple[Any, Any]) -> jax.Array:
    return squares(outputs[0], labels[0]) + 0.1 * squares(outputs[1], labels[1])


def pairs() -> Example:
    x, t = numbers()
    return (x, t), (t, x)


class Patches(nn.Module):
    """Images to patches."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.Conv(DIM, (4, 4), (4, 4), padding="VALID")(images)
        x = x.reshape(x.shape[0], -1, DIM)
        return x + self.param("position", nn.initializers.normal(0.1), x.shape[1:])[None]


class Encoder(nn.Module):
    """A block of a vision transformer."""

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        y = nn.LayerNorm()(x)
        attention = nn.MultiHeadDotProductAttention(2, dropout_rate=0.1, deterministic=not train)
        x = x + attention(y)
        y = nn.Dense(DIM)(nn.gelu(nn.Dense(2 * DIM)(nn.LayerNorm()(x))))
        return x + nn.Dropout(0.1, deterministic=not train)(y)


def vision() -> list[Any]:
    blocks = [LayerSpec(Encoder) for _ in range(4)]
    return [LayerSpec(Patches), *blocks, lambda x: x.mean(1), nn.LayerNorm(), nn.Dense(10)]


def images() -> Example:
    rng = np.random.default_rng(0)
    pictures = rng.standard_normal((SAMPLES, 12, 12, 3)).astype(np.float32)
    return pictures, rng.integers(0, 10, SAMPLES).astype(np.int32)


class Convolution(nn.Module):
    """A residual block with batch statistics."""

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        y = nn.Conv(DIM, (3, 3), use_bias=False)(x)
        return x + nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(y))


def residual() -> list[Any]:
    blocks = [LayerSpec(Convolution) for _ in range(4)]
    return [nn.Conv(DIM, (3, 3), (2, 2)), *blocks, lambda x: x.mean((1, 2)), nn.Dense(10)]


class Recurrent(nn.Module):
    """A recurrent layer over time."""

    @nn.compact
    def __call__(self, x: jax.Array) -> Any:
        return nn.RNN(nn.GRUCell(DIM))(x)


def equinox() -> list[Any]:
    import equinox as eqx

    layers = [LayerSpec(eqx.nn.Linear, DIM, DIM), jnp.tanh]
    return [*layers * 3, LayerSpec(eqx.nn.LayerNorm, DIM), LayerSpec(eqx.nn.Linear, DIM, DIM)]


def quickstart() -> list[Any]:
    """The layers of the README."""
    hidden = LayerSpec(nn.Dense, 64)
    return [hidden, nn.tanh, hidden, nn.tanh, LayerSpec(nn.Dense, 1)]


def example(name: str) -> Any:
    """Import one of the examples."""
    path = Path(__file__).parents[3] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"_example_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def of_example(name: str, axis: str, **block: Any) -> Callable[[], tuple[PipelineModule, Example]]:
    """The layers of an example that trains on text, and divides layers over an axis."""

    def make() -> tuple[PipelineModule, Example]:
        module = example(name)
        blocks = [LayerSpec(module.Block, **block) for _ in range(4)]
        layers = [LayerSpec(module.Embed), *blocks, LayerSpec(module.Head)]
        batch = text(size=module.VOCAB_SIZE, length=module.LENGTH)
        topology = ProcessTopology(["pipe", "data", axis], [2, 2, 2])
        return PipelineModule(layers, topology=topology, loss_fn=cross_entropy), batch

    return make


def gaps() -> tuple[PipelineModule, Example]:
    """The model of `examples/linen_and_nnx.py`."""
    module = example("linen_and_nnx")
    table = functools.partial(TiedLayerSpec, "table", nn.Embed, module.VOCAB_SIZE, module.DIM)
    block = [LayerSpec(module.Attention, 4), LayerSpec(module.Feedforward, module.DIM)]
    layers = [
        table(forward_fn=module.embed),
        *block * 2,
        module.normalize,
        table(forward_fn=module.unembed),
    ]
    (inputs, hidden), labels = next(module.batches())
    return PipelineModule(layers, 2, loss_fn=module.loss_fn), ((inputs, hidden), labels)


def dpo() -> tuple[PipelineModule, Example]:
    """The model of `examples/dpo.py`."""
    module = example("dpo")
    layers = lora(llama(module.MODEL), 4, 8.0, module.TARGETS)
    tokens, following, text_of, answer_of = module.make_pairs(SAMPLES, 0)
    rng = np.random.default_rng(0)
    labels = following, answer_of, -rng.random((SAMPLES, 2), np.float32) * 10
    model = PipelineModule(layers, 2, loss_fn=module.dpo_loss, trainable=LORA_PARAMETERS)
    return model, (tokens, labels, {"segment_ids": text_of})


def schedule(name: Any, **more: Any) -> dict[str, Any]:
    return {"pipeline": {"schedule": name, **more}}


def optimizer(name: str, **params: Any) -> dict[str, Any]:
    return {"type": name, "params": params}


BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True}}


def zero(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}}


JOBS: dict[str, SoundJob] = {
    # Schedules and cuts.
    "gpipe": SoundJob(known("linen"), schedule("gpipe")),
    "1f1b, three stages": SoundJob(known("linen", 3), schedule("1f1b")),
    "one stage": SoundJob(known("attention", 1)),
    "an uneven cut": SoundJob(known("linen", partition_method=[0, 2, 10]), schedule("1f1b")),
    "a cut in the configuration": SoundJob(
        known("linen"), {"pipeline": {"stages": 2, "partition": [0, 2, 10]}}
    ),
    "a cut by parameters": SoundJob(known("mixed", 3, partition_method="parameters")),
    "interleaved, two chunks": SoundJob(known("dropout"), schedule("interleaved", num_chunks=2)),
    "zero-bubble": SoundJob(known("nnx"), schedule("zero-bubble")),
    "zero-bubble-h1": SoundJob(known("tied_nnx", 3), schedule("zero-bubble-h1")),
    "zero-bubble-v": SoundJob(known("noise"), schedule("zero-bubble-v")),
    "dual-pipe-v": SoundJob(known("linen"), schedule("dual-pipe-v")),
    "1f1b-v": SoundJob(known("tied"), schedule("1f1b-v")),
    "DeepSpeed's schedule": SoundJob(known("side"), schedule("train")),
    "a scanned trunk": SoundJob(known("deep"), schedule("1f1b", scan_trunk=True)),
    # Dtypes.
    "bfloat16": SoundJob(known("linen"), BF16),
    "bfloat16, sums in bfloat16": SoundJob(
        known("attention"), {**BF16, "data_types": {"grad_accum_dtype": "bf16"}}
    ),
    "bfloat16 and clipping": SoundJob(known("tied"), {**BF16, "gradient_clipping": 0.1}),
    "float16, dynamic scale": SoundJob(known("linen"), FP16),
    "float16, static scale": SoundJob(
        known("weighted"), {"fp16": {"enabled": True, "loss_scale": 128.0, "auto_cast": True}}
    ),
    "float16, a scale that overflows": SoundJob(
        known("tied"), {"fp16": {"enabled": True, "initial_scale_power": 28}}
    ),
    "float32, sums in bfloat16": SoundJob(
        known("linen"), {"data_types": {"grad_accum_dtype": "bf16"}}
    ),
    "bfloat16 and ZeRO 3": SoundJob(of(decoder()), {**BF16, **zero(3)}),
    # ZeRO.
    "ZeRO 1": SoundJob(known("tuple"), {**zero(1), **schedule("1f1b")}),
    "ZeRO 2": SoundJob(known("linen"), {**zero(2), "gradient_clipping": 0.1}),
    "ZeRO 3, zero-bubble": SoundJob(known("attention"), {**zero(3), **schedule("zero-bubble")}),
    "ZeRO 2 and batch statistics": SoundJob(known("norm"), zero(2)),
    "ZeRO 3 and dropout": SoundJob(known("dropout"), zero(3)),
    "one sample a microbatch": SoundJob(
        known("side"), {"train_micro_batch_size_per_gpu": 1, **zero(1)}
    ),
    # Layers and losses.
    "split vocabulary, tied": SoundJob(known("split_tied")),
    "split vocabulary, weighted": SoundJob(known("split")),
    "tied leaves": SoundJob(known("tied_leaves"), schedule("interleaved")),
    "tied many times": SoundJob(known("tied_many")),
    "many shapes": SoundJob(known("shapes", 3)),
    "batch statistics": SoundJob(known("norm")),
    "reported losses and metrics": SoundJob(known("reports")),
    "reports and statistics in NNX": SoundJob(known("norm_reports")),
    "recompute by the layers": SoundJob(known("marked")),
    "recompute groups": SoundJob(
        known("dropout"), {"pipeline": {"activation_checkpoint_interval": 2}}
    ),
    "a loss as the last layer": SoundJob(known("no_loss")),
    "a loss of pairs": SoundJob(of(lambda: [LayerSpec(Pair)] * 4, pairs, of_pairs)),
    "a weighted loss with metrics": SoundJob(
        of(lambda: [LayerSpec(nn.Dense, DIM), jnp.tanh] * 3, numbers, weighted_with_metrics)
    ),
    "foreign blocks": SoundJob(of(foreign, lambda: text(size=VOCAB))),
    "Equinox": SoundJob(of(equinox, numbers, squares)),
    "frozen layers": SoundJob(
        of(
            lambda: [LayerSpec(Embed), *[LayerSpec(Block)] * 4, LayerSpec(Head)],
            lambda: text(size=VOCAB),
            trainable=".*(Block|Head).*",
        )
    ),
    "an average of parameters": SoundJob(known("linen"), {"ema": {"decay": 0.9}}),
    "recurrent layers": SoundJob(
        of(lambda: [Embed(), *[LayerSpec(Recurrent)] * 2, Head()], lambda: text(size=VOCAB))
    ),
    "a convolutional network": SoundJob(of(residual, images, cross_entropy)),
    "a vision transformer": SoundJob(of(vision, images, cross_entropy)),
    "a mixture of kinds": SoundJob(
        of(
            lambda: [Embed(), LayerSpec(NNXBlock, 0.2), LayerSpec(Block), jnp.tanh, Head()],
            lambda: text(size=VOCAB),
        )
    ),
    # Optimisers.
    "SGD with momentum": SoundJob(
        known("linen"), optimizer=optimizer("SGD", lr=0.1, momentum=0.9, nesterov=True)
    ),
    "Lion": SoundJob(known("linen"), optimizer=optimizer("Lion", lr=1e-3)),
    "Lamb": SoundJob(known("linen"), optimizer=optimizer("Lamb", lr=1e-2)),
    "Adagrad": SoundJob(known("linen"), optimizer=optimizer("Adagrad", lr=1e-2)),
    "Muon and ZeRO 1": SoundJob(known("linen"), zero(1), optimizer("Muon", lr=1e-2)),
    "adafactor": SoundJob(known("linen"), optimizer=optimizer("adafactor", learning_rate=1e-2)),
    "optax, clipping and a schedule of rates": SoundJob(
        known("linen"),
        {
            "gradient_clipping": 0.5,
            "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 10}},
        },
    ),
    # Axes.
    "model=2": SoundJob(of_example("tensor_parallel", "model"), axes={"model": 2}),
    "model=2 with positions divided": SoundJob(
        of_example("tensor_parallel", "model", sequence=True), axes={"model": 2}
    ),
    "fsdp=2": SoundJob(of(decoder()), axes={"fsdp": 2}),
    "expert=2": SoundJob(of_example("mixture_of_experts", "expert"), axes={"expert": 2}),
    "sequence=2": SoundJob(of(decoder(), lambda: text(is_packed=True)), axes={"sequence": 2}),
    # Families.
    "GPT-2": SoundJob(of(lambda: gpt2(GPT2Config(TOKENS, LENGTH, 16, 2, 4)))),
    "Llama, packed": SoundJob(of(decoder(), lambda: text(is_packed=True)), BF16),
    "Llama with adapters": SoundJob(
        of(
            lambda: lora(decoder()(), 2, 4.0, ["query/kernel", "value/kernel"]),
            trainable=LORA_PARAMETERS,
        )
    ),
    "Gemma 2": SoundJob(of(gemma_2)),
    "gpt-oss": SoundJob(of(GPT_OSS)),
    "Mixtral with losses and capacity": SoundJob(
        of(
            decoder(
                experts=ExpertsConfig(4, 2, 12, capacity_factor=1.25, balance=0.01, z_loss=1e-3)
            )
        ),
        {"gradient_clipping": 1.0},
    ),
    "DeepSeek with an extra head": SoundJob(
        of(lambda: llama(DEEPSEEK, multi_token=True), loss_fn=EXTRA_LOSS)
    ),
    "biases of routers": SoundJob(
        of(decoder(experts=ROUTED)), {"pipeline": {"router_bias_update_rate": 0.001}}
    ),
    "BERT": SoundJob(of(lambda: bert(BertConfig(TOKENS, 16, 2, 4, 24)))),
    # The examples and the README.
    "README": SoundJob(
        of(quickstart, lambda: numbers(8, 1), squares, 4), optimizer=optax.adam(3e-3)
    ),
    "linen_and_nnx.py": SoundJob(gaps),
    "dpo.py": SoundJob(dpo, {"ema": {"decay": 0.9}}),
}


def train_gpt() -> tuple[PipelineModule, Example]:
    """The model of `examples/train_gpt.py`."""
    module = example("train_gpt")
    settings = module.Settings()
    layers = module.make_layers(settings, 64)
    return PipelineModule(layers, 4, loss_fn=cross_entropy), text(size=64, length=32)


def own_schedule() -> type[jaxpipe.schedules.PipeSchedule]:
    """The schedule of `examples/custom_schedule.py`."""
    return example("custom_schedule").LastInFirstOut


JOBS["custom_schedule.py"] = SoundJob(
    of(lambda: [LayerSpec(nn.Dense, DIM), jnp.tanh] * 3, numbers, squares, 3),
    schedule(own_schedule()),
)
JOBS["train_gpt.py"] = SoundJob(train_gpt)
