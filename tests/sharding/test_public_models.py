"""Blocks that others have written and annotated, unchanged.

They are in a pipeline over stage x data x model.

Their files are fetched from the package registry when the tests run, and none is part of this
repository.
"""

import importlib
import importlib.util
import subprocess
import sys
import tarfile
import types
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _covering import sweep
from _models import cross_entropy
from _settings import make_settings
from _tolerances import assert_close, assert_loss
from jax.sharding import PartitionSpec as P

from jaxpipe import LayerSpec, Pipeline, PipelineModule, ProcessTopology, TiedLayerSpec
from jaxpipe.topology import make_pipeline_mesh

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # in their code, not in ours
]

VOCAB, DIM, HIDDEN, HEADS, LENGTH, BLOCKS, MICROBATCHES, MICROBATCH = 16, 16, 32, 4, 6, 2, 2, 2
RATE = 0.1


def fetch(package: str, directory: Path, *, source: bool = False) -> Path:
    """The file of a package in the registry, without what it depends on."""
    kind = ["--no-binary", ":all:"] if source else ["--only-binary", ":all:"]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--quiet",
        *kind,
        "-d",
        str(directory),
        package,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode and "Retrying" in done.stderr:
        pytest.skip(f"the package registry cannot be reached: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    name = package.partition("=")[0].replace("-", "_")
    return next(path for path in directory.iterdir() if path.name.startswith(f"{name}-"))


@pytest.fixture(scope="session")
def annotations(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the others' files import besides jax and flax: a package of type annotations."""
    directory = tmp_path_factory.mktemp("annotations")
    for package in ("jaxtyping", "wadler-lindig"):
        with zipfile.ZipFile(fetch(package, directory)) as wheel:
            wheel.extractall(directory)
    sys.path.append(str(directory))
    yield
    sys.path.remove(str(directory))


@pytest.fixture(scope="session")
def flax_examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples in the sources of the Flax that is installed."""
    directory = tmp_path_factory.mktemp("flax")
    with tarfile.open(fetch(f"flax=={version('flax')}", directory, source=True)) as archive:
        members = [
            m for m in archive if "/examples/lm1b/" in m.name or "/examples/gemma/" in m.name
        ]
        archive.extractall(directory, members, filter="data")
    return next(directory.glob("flax-*/examples"))


@pytest.fixture
def lm1b(flax_examples: Path) -> types.ModuleType:
    """Linen, logical names."""
    spec = importlib.util.spec_from_file_location("lm1b_models", flax_examples / "lm1b/models.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def gemma(
    flax_examples: Path, annotations: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[types.ModuleType]:
    """NNX, partition specs as metadata of kernels; its files name each other without a package."""
    known = set(sys.modules)
    monkeypatch.syspath_prepend(str(flax_examples / "gemma"))
    yield importlib.import_module("modules")
    for name in set(sys.modules) - known:
        del sys.modules[name]


@pytest.fixture
def llama(
    tmp_path_factory: pytest.TempPathFactory, annotations: None
) -> Iterator[types.ModuleType]:
    """NNX, names `fsdp` and `tp`.

    The packages around the file are empty: its own import the world.
    """
    directory, always_shard = (
        tmp_path_factory.mktemp("tunix"),
        flax.config.flax_always_shard_variable,
    )
    with zipfile.ZipFile(fetch("google-tunix", directory)) as wheel:
        wheel.extractall(directory)
    packages = [
        "tunix",
        *(f"tunix.{name}" for name in ("generate", "utils", "models", "models.llama3")),
    ]
    for name in packages:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(directory.joinpath(*name.split(".")))]
    yield importlib.import_module("tunix.models.llama3.model")
    for name in [name for name in sys.modules if name.partition(".")[0] == "tunix"]:
        del sys.modules[name]
    flax.config.update("flax_always_shard_variable", always_shard)


@pytest.fixture(autouse=True)
def promotion() -> Iterator[None]:
    """Their code adds arrays of different ranks."""
    with jax.numpy_rank_promotion("allow"):
        yield


@dataclass(frozen=True)
class Public:
    """A layer list of public blocks.

    Attributes:
        layers: The list.
        rules: Rules for its names.
        sharded: The end of a leaf's path, and its spec.
        side: Side inputs of a batch.
    """

    layers: list[Any]
    rules: tuple[tuple[str, Any], ...]
    sharded: Mapping[str, P]
    side: Mapping[str, Any] = field(default_factory=dict)


def lm1b_model(lm1b: types.ModuleType) -> Public:
    config = lm1b.TransformerConfig(
        vocab_size=VOCAB,
        output_vocab_size=VOCAB,
        emb_dim=DIM,
        num_heads=HEADS,
        qkv_dim=DIM,
        mlp_dim=HIDDEN,
        max_len=LENGTH,
        deterministic=True,
    )
    init = nn.with_logical_partitioning(nn.initializers.normal(1.0), ("vocab", "embed"))
    head = nn.with_logical_partitioning(config.kernel_init, ("embed", "vocab"))
    layers = [
        LayerSpec(nn.Embed, VOCAB, DIM, embedding_init=init),
        LayerSpec(lm1b.AddPositionEmbs, config),
        *[LayerSpec(lm1b.EncoderDecoder1DBlock, config) for _ in range(BLOCKS)],
        LayerSpec(nn.LayerNorm),
        LayerSpec(nn.Dense, VOCAB, kernel_init=head),
    ]
    # Those of the example's configuration, with `model` for its `tensor`; and one for the heads.
    rules = (("mlp", "model"), ("vocab", "model"), ("embed", None), ("kv", "model"))
    sharded = {
        "MlpBlock_0/Dense_0/kernel": P(None, "model"),
        "query/kernel": P(None, "model", None),
    }
    causal = np.tril(np.ones((LENGTH, LENGTH), bool))[None, None, None]
    return Public(layers, rules, sharded, {"decoder_mask": causal})


def block_alone(block: type, *args: Any) -> LayerSpec:
    """A block that is called with positions, cache and mask, as a layer that makes them."""

    class Block(block):
        def __call__(self, x: jax.Array) -> jax.Array:
            batch, length, _ = x.shape
            positions = jnp.broadcast_to(jnp.arange(length)[None], (batch, length))
            mask = jnp.broadcast_to(
                jnp.tril(jnp.ones((length, length), bool))[None], (batch, length, length)
            )
            return super().__call__(x, positions, None, mask)[1]

    return LayerSpec(Block, *args)


def gemma_model(gemma: types.ModuleType) -> Public:
    settings = sys.modules["transformer_cfg"]
    shardings = settings.ShardingConfig.fsdp_tp_sharding(
        fsdp_axis_name=None, tensor_parallel_axis_name="model"
    )
    # Its shardings of activations are for axes of type Explicit.
    shardings = replace(shardings, act_btd=None, act_btf=None, act_btnh=None, act_sbtnh=None)
    config = settings.TransformerConfig(
        num_layers=BLOCKS,
        num_embed=VOCAB,
        embed_dim=DIM,
        hidden_dim=HIDDEN,
        num_heads=HEADS,
        head_dim=DIM // HEADS,
        num_kv_heads=HEADS // 2,
        final_logit_softcap=None,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attention_types=(settings.AttentionType.GLOBAL,) * BLOCKS,
        shd_config=shardings,
    )
    blocks = [
        block_alone(gemma.Block, config, settings.AttentionType.GLOBAL) for _ in range(BLOCKS)
    ]
    layers = [LayerSpec(nn.Embed, VOCAB, DIM), *blocks, LayerSpec(nn.Dense, VOCAB)]
    return Public(
        layers,
        (),
        {"gate_proj/kernel": P(None, "model"), "q_einsum/kernel": P("model", None, None)},
    )


def llama_model(llama: types.ModuleType) -> Public:
    config = llama.ModelConfig(
        num_layers=BLOCKS,
        vocab_size=VOCAB,
        embed_dim=DIM,
        hidden_dim=HIDDEN,
        num_heads=HEADS,
        head_dim=DIM // HEADS,
        num_kv_heads=HEADS // 2,
        rope_theta=10_000,
        norm_eps=1e-5,
    )

    def table(forward_fn: Any) -> TiedLayerSpec:
        return TiedLayerSpec("embedder", llama.Embedder, VOCAB, DIM, forward_fn=forward_fn)

    blocks = [block_alone(llama.DecoderLayer, config) for _ in range(BLOCKS)]
    norm = LayerSpec(llama.RMSNorm, DIM)
    layers = [table(llama.Embedder.encode), *blocks, norm, table(llama.Embedder.decode)]
    sharded = {"gate_proj/kernel": P(None, "model"), "input_embedding": P("model", None)}
    return Public(layers, (("tp", "model"), ("fsdp", None)), sharded)


def make_batch(public: Public, data: int) -> tuple[Any, Any, dict[str, Any]]:
    shape = (MICROBATCHES, data * MICROBATCH)
    inputs, labels = (
        np.random.default_rng(0).integers(0, VOCAB, (2, *shape, LENGTH)).astype(np.int32)
    )
    return (
        inputs,
        labels,
        {name: np.broadcast_to(x, shape + x.shape[2:]) for name, x in public.side.items()},
    )


def check(public: Public, stages: int, data: int, size: int) -> None:
    batch = make_batch(public, data)
    module = PipelineModule(public.layers, num_stages=1, loss_fn=cross_entropy)

    def loss_of(params: Any, inputs: Any, labels: Any, side: Any) -> jax.Array:
        return module.loss(
            module.apply(params, inputs, train=True, key=jax.random.key(0), side=side), labels
        )

    first = jax.tree.map(lambda x: x[0, :MICROBATCH], batch)
    params = module.init(jax.random.key(0), first[0], side=first[2])
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    # Some begin with weights of zero, through which no gradient passes.
    noisy = [x + 0.2 * jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=True)]
    params = jax.device_get(jax.tree.unflatten(treedef, noisy))
    gradient, found = jax.jit(jax.value_and_grad(loss_of)), []
    for m in range(MICROBATCHES):
        for r in range(data):
            block = jax.tree.map(
                lambda x, m=m, r=r: x[m, MICROBATCH * r : MICROBATCH * (r + 1)], batch
            )
            found.append(jax.device_get(gradient(params, *block)))
    loss, grads = jax.tree.map(
        lambda *xs: np.mean(np.asarray(xs, np.float64), 0).astype(np.float32), *found
    )

    topology = ProcessTopology(["pipe", "data", "model"], [stages, data, size])
    rules = {"sharding_rules": public.rules} if public.rules else {}
    sharded = PipelineModule(public.layers, topology=topology, loss_fn=cross_entropy, **rules)
    example = jax.tree.map(lambda x: x[0], batch)
    mesh = make_pipeline_mesh(topology)
    pipeline = Pipeline(
        sharded, optax.sgd(RATE), mesh, example, MICROBATCHES, make_settings(skip_idle=True)
    )
    state = pipeline.states.init_from(params)
    metrics, storage, _ = pipeline.gradients(state, batch)
    assert_loss(metrics["loss"], loss)
    assert_close(pipeline.params_tree(storage), grads)
    check_sharded(public, params, state.params, size)
    state, _ = pipeline.step(state, batch)
    assert_close(
        pipeline.params_tree(state.params),
        jax.tree.map(lambda x, g: x - np.float32(RATE) * g, params, grads),
    )


def check_sharded(public: Public, params: Any, storage: Any, size: int) -> None:
    """Weights that say so lie in shares: no array holds more of them on a device."""
    paths = {
        jax.tree_util.keystr(k, simple=True, separator="/"): x
        for k, x in jax.tree.leaves_with_path(params)
    }
    for end, spec in public.sharded.items():
        shape = next(leaf.shape for path, leaf in paths.items() if path.endswith(end))
        share = tuple(n // size if name else n for n, name in zip(shape, spec, strict=True))
        alike = [x for x in jax.tree.leaves(storage) if x.shape[-len(shape) :] == shape]
        assert alike, end
        assert share in {x.sharding.shard_shape(x.shape)[-len(shape) :] for x in alike}, end


MESHES = pytest.mark.parametrize(
    ("stages", "data", "size"), sweep(1, [(2, 2, 2), (1, 2, 2)], unpack=True)
)


@MESHES
@pytest.mark.soak
def test_flax_lm1b(lm1b: types.ModuleType, stages: int, data: int, size: int) -> None:
    check(lm1b_model(lm1b), stages, data, size)


@MESHES
@pytest.mark.soak
def test_flax_gemma(gemma: types.ModuleType, stages: int, data: int, size: int) -> None:
    check(gemma_model(gemma), stages, data, size)


@MESHES
def test_tunix_llama(llama: types.ModuleType, stages: int, data: int, size: int) -> None:
    check(llama_model(llama), stages, data, size)
