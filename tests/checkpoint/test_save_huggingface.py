"""Checkpoints written by a table of names, as a folder that other libraries open."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from _covering import sweep
from _refusals import check_refused
from _saved import change_index, saved
from _tolerances import assert_close
from flax import nnx
from safetensors import safe_open

import jaxpipe
from jaxpipe import LayerSpec, PipeDataParallelTopology, PipelineModule
from jaxpipe.checkpoint import (
    export_safetensors,
    load_safetensors,
    rename_back,
    save_huggingface,
)
from jaxpipe.checkpoint.__main__ import main
from jaxpipe.errors import CheckpointError, ConfigError
from jaxpipe.layers import LORA_PARAMETERS, flatten_dict, lora, merge_lora
from jaxpipe.models import LlamaConfig, llama, llama_names
from jaxpipe.weights import Rename, stack

ALPHA, LIMIT = 4.0, 3000
SIZES: dict[str, Any] = {
    **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}


def config_of(*, tied: bool) -> LlamaConfig:
    return LlamaConfig(**SIZES, tie_word_embeddings=tied)


def make_engine(
    config: LlamaConfig, stages: int, *, adapters: bool = False, **sections: Any
) -> Any:
    tokens = jax.ShapeDtypeStruct((4, 6), jnp.int32)
    engine, *_ = jaxpipe.initialize(
        model=PipelineModule(
            lora(llama(config), 2, ALPHA, "query") if adapters else llama(config),
            topology=PipeDataParallelTopology(stages, 1),
            loss_fn=lambda y, t: optax.softmax_cross_entropy_with_integer_labels(y, t).mean(),
            trainable=LORA_PARAMETERS if adapters else None,
        ),
        optimizer=optax.adam(1e-2),
        example_batch=(tokens, tokens),
        config={"train_batch_size": 8, "gradient_accumulation_steps": 2, **sections},
    )
    return engine


class Runs(dict[str, tuple[Path, Any]]):
    """A checkpoint after a step, and the parameters it holds: tied, untied, or with adapters.

    Made when asked for.
    """

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        super().__init__()
        self.factory = factory

    def __missing__(self, name: str) -> tuple[Path, Any]:
        tokens = np.arange(4 * 6, dtype=np.int32).reshape(4, 6) % 32
        engine = make_engine(config_of(tied=name != "untied"), 2, adapters=name == "adapters")
        engine.train_batch(iter([(tokens, tokens)] * 2))
        path = self.factory.mktemp(name) / "run"
        engine.save_checkpoint(path)
        if name == "adapters":
            engine.save_checkpoint(
                path, tag="alone", exclude_frozen_parameters=True, save_latest=False
            )
        self[name] = path, engine.module_state_dict()
        return self[name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory)


def assert_holds(folder: Path, params: Any, config: LlamaConfig, dtype: Any = np.float32) -> None:
    """The tensors of the parameters, each once, bit for bit."""
    found = {
        "/".join(path): value for path, value in flatten_dict(load_safetensors(folder)).items()
    }
    wanted = rename_back(params, llama_names(config))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == dtype
        np.testing.assert_array_equal(found[name], value.astype(dtype))


@pytest.mark.parametrize("name", sweep(1, ["tied", "untied"]))
@pytest.mark.soak
def test_what_is_written_is_read_by_an_engine_of_other_stages(
    name: str, runs: Runs, tmp_path: Path
) -> None:
    path, params = runs[name]
    config = config_of(tied=name == "tied")
    table = llama_names(config)
    told = config.to_huggingface(64)
    *_, last = save_huggingface(path, tmp_path, table, config=told)
    assert {each.name for each in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    assert last.name == "config.json"
    assert json.loads(last.read_text()) == told | {"dtype": "float32"}
    assert LlamaConfig.from_huggingface(tmp_path) == config
    assert_holds(tmp_path, params, config)
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
        assert ("lm_head.weight" in file.keys()) == (name == "untied")  # noqa: SIM118  # no mapping
    engine = make_engine(config, 4)
    engine.load_huggingface(tmp_path, table)
    jax.tree.map(np.testing.assert_array_equal, engine.module_state_dict(), params)


@pytest.mark.soak
def test_shards_in_half_precision_over_an_earlier_folder(runs: Runs, tmp_path: Path) -> None:
    path, params = runs["tied"]
    config = config_of(tied=True)
    old = {"model_type": "llama", "torch_dtype": "float32"}
    for _ in range(2):
        written = save_huggingface(
            path, tmp_path, llama_names(config), config=old, dtype="bfloat16", max_shard_bytes=LIMIT
        )
    assert set(tmp_path.iterdir()) == set(written)
    assert sum("-of-" in each.name for each in written) > 2
    true = {"torch_dtype": "bfloat16", "tie_word_embeddings": True}
    assert json.loads((tmp_path / "config.json").read_text()) == old | true
    assert_holds(tmp_path, params, config, ml_dtypes.bfloat16)


@pytest.mark.slow
def test_adapters_are_merged(runs: Runs, tmp_path: Path) -> None:
    path, params = runs["adapters"]
    config = config_of(tied=True)
    save_huggingface(path, tmp_path, llama_names(config), tag="global_step1", lora_alpha=ALPHA)
    assert_holds(tmp_path, merge_lora(params, ALPHA), config)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", sweep(1, [ml_dtypes.bfloat16, np.float32]))
def test_adapters_of_narrow_weights_are_merged_before_rounding(dtype: Any, tmp_path: Path) -> None:
    config = config_of(tied=True)
    engine = make_engine(config, 2, adapters=True, bf16={"enabled": True})
    rng = np.random.default_rng(0)
    engine.load_module_state_dict(  # as if adapters had been trained
        jax.tree.map_with_path(
            lambda path, x: (
                rng.normal(size=x.shape).astype(x.dtype) if path[-1].key == "lora_b" else x
            ),
            engine.module_state_dict(),
        )
    )
    engine.save_checkpoint(tmp_path / "run")
    out, told = tmp_path / "out", np.dtype(dtype).name
    save_huggingface(tmp_path / "run", out, llama_names(config), lora_alpha=ALPHA, dtype=told)
    params = engine.module_state_dict()
    assert any(leaf.dtype == ml_dtypes.bfloat16 for leaf in jax.tree.leaves(params))
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), params)
    assert_holds(out, merge_lora(wide, ALPHA), config, dtype)
    found = flatten_dict(merge_lora(params, ALPHA, dtype))
    for path, leaf in flatten_dict(merge_lora(wide, ALPHA)).items():
        np.testing.assert_array_equal(found[path].astype(dtype), leaf.astype(dtype))


MISTAKES: list[tuple[type[Exception], dict[str, Any], str]] = [
    (CheckpointError, {"dtype": "int8"}, "dtype='int8'. Write for instance 'bfloat16'"),
    (CheckpointError, {"dtype": "half?"}, r"floating-point dtype, but got dtype='half\?'"),
    (CheckpointError, {"max_shard_bytes": 0}, "max_shard_bytes=0. Write for instance"),
    (CheckpointError, {"lora_alpha": 1.0}, "=1.0 and 0 leaves of adapters.*Leave lora_alpha out"),
    (CheckpointError, {"tag": "none"}, "none"),
    (ConfigError, {"config": 3}, "must be a folder, a file or a dictionary, but got 3"),
    (ConfigError, {"config": "/nowhere/config.json"}, "readable, but got /nowhere/config.json"),
    (
        *(ConfigError, {"config": {"text_config": {}, "vision_config": {"depth": 2}}}),
        "got text_config without any tensors of this part. Pass the configuration of the part",
    ),
    (ConfigError, {"config": {"num_hidden_layers": 5}}, "layers=5 and tensors of 4 blocks"),
    *(
        (ConfigError, {"config": {"vocab_size": 32, key: value}}, f"got {key}={value} and {held}")
        for key, value, held in [
            ("vocab_size", 33, r"an embedding of shape \(32, 16\)"),
            ("hidden_size", 32, r"an embedding of shape \(32, 16\)"),
            ("attention_bias", True, "tensors without them"),
            ("mlp_bias", True, "tensors without them"),
        ]
    ),
    (ConfigError, {"config": {"head_dim": np.int64(4)}}, "int64.*integer of NumPy"),
]


@pytest.mark.slow
def test_mistakes_write_nothing(runs: Runs, tmp_path: Path) -> None:
    names, untied = llama_names(config_of(tied=True)), llama_names(config_of(tied=False))
    mistakes: list[tuple[type[Exception], dict[str, Any], str]] = [
        *MISTAKES,
        (CheckpointError, {"renames": names[1:]}, "of the model without an entry: tied"),
        (CheckpointError, {"renames": (*names, names[-2])}, "each leaf once, but got '5/scale'"),
        (
            *(ConfigError, {"config": {}, "renames": untied}),
            "without 'lm_head.weight'. Make the table .* with tie_word_embeddings=True",
        ),
    ]
    save = functools.partial(save_huggingface, folder=tmp_path / "out")
    for error, changes, words in mistakes:
        call = functools.partial(save, runs["tied"][0], **{"renames": names, **changes})
        check_refused(error, [(words, call)])
    call = functools.partial(save, runs["adapters"][0], renames=names)
    table = [
        (
            "lora_alpha=None and 8 leaves.*Pass the alpha",
            functools.partial(call, tag="global_step1"),
        ),
        (
            r"without \d+ frozen ones. Load it into",
            functools.partial(call, tag="alone", lora_alpha=1.0),
        ),
    ]
    check_refused(CheckpointError, table)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_older_checkpoints_have_adapters_by_name(runs: Runs, tmp_path: Path) -> None:
    path, params = runs["adapters"]
    tag, config = tmp_path / "run" / "global_step1", config_of(tied=True)
    shutil.copytree(path / "global_step1", tag)
    change_index(tag, lambda index: index.__delitem__("adapters"))
    save_huggingface(tag, tmp_path / "out", llama_names(config), lora_alpha=ALPHA)
    assert_holds(tmp_path / "out", merge_lora(params, ALPHA), config)


class Own(nn.Module):
    """The names of an adapter, and another formula."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.lecun_normal()
        kernel, a, b = (self.param(name, init, (4, 4)) for name in ("kernel", "lora_a", "lora_b"))
        return x @ kernel + jnp.tanh(x @ a) @ b


class OwnNNX(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.lecun_normal()
        drawn = [nnx.Param(init(rngs.params(), (4, 4))) for _ in range(3)]
        self.kernel, self.lora_a, self.lora_b = drawn

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.kernel[...] + jnp.tanh(x @ self.lora_a[...]) @ self.lora_b[...]


@pytest.mark.slow
@pytest.mark.parametrize(("own", "alpha"), sweep(1, [(OwnNNX, ALPHA), (Own, None)], unpack=True))
def test_a_layer_may_have_the_names_of_adapters(
    own: type, alpha: float | None, tmp_path: Path
) -> None:
    layers = [LayerSpec(each, *args) for each, args in ((nn.Dense, [4]), (own, [])) * 2]
    x = np.asarray(jax.random.normal(jax.random.key(0), (2, 4)))

    def engine_of(layers: list[Any]) -> Any:
        return jaxpipe.initialize(
            model=PipelineModule(
                layers,
                topology=PipeDataParallelTopology(2, 1),
                loss_fn=lambda y, t: jnp.mean((y - t) ** 2),
            ),
            optimizer=optax.adam(1e-1),
            config={"train_batch_size": 4, "gradient_accumulation_steps": 2},
            example_batch=(x, x),
        )[0]

    plain = engine_of(layers)
    engine = plain if alpha is None else engine_of(lora(layers, 2, alpha, "kernel"))
    engine.train_batch(iter([(x, 3 * x)] * 2))
    params, outputs = engine.module_state_dict(), engine.predict(x)
    run, out = tmp_path / "run", tmp_path / "out"
    engine.save_checkpoint(run)
    [file] = export_safetensors(run, tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, load_safetensors(file), params)

    # Also in one tensor with leaves that have adapters.
    paths = ["/".join(path[1:]) for path in flatten_dict(plain.module_state_dict())]
    ours = [re.sub("_[A-Za-z]+", "", path, count=1) for path in paths]
    square = tuple(path for path in ours if not path.endswith("bias"))
    table = [Rename(path, path) for path in ours if path not in square]
    table.append(Rename("square", square, stack()))
    save_huggingface(run, out, table, lora_alpha=alpha)
    plain.load_module_state_dict(plain.module.init(jax.random.key(1), x))
    plain.load_huggingface(out, table)
    assert_close(plain.predict(x), outputs)
    engine.load_huggingface(out, table)
    for path, leaf in flatten_dict(engine.module_state_dict()).items():
        if own.__name__ in path[1]:
            np.testing.assert_array_equal(leaf, flatten_dict(params)[path])


def test_collections_have_no_names(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"collections such as .*batch_stats.*export_safetensors"
    ):
        save_huggingface(saved(tmp_path), tmp_path / "out", ())


@pytest.mark.slow
@pytest.mark.parametrize("at", ["out", "out/model.safetensors"])
def test_a_file_where_a_folder_should_be_and_a_folder_for_a_file(
    at: str, runs: Runs, tmp_path: Path
) -> None:
    if at == "out":
        (tmp_path / "out").write_text("mine")
    else:
        (tmp_path / at).mkdir(parents=True)
    with pytest.raises(CheckpointError, match="out must be a file that can be written"):
        save_huggingface(
            runs["tied"][0], tmp_path / "out", llama_names(config_of(tied=True)), config={}
        )
    assert not (tmp_path / "out" / "config.json").exists()


def test_the_command(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, params = runs["adapters"]
    config = config_of(tied=True)
    told, out = tmp_path / "config.json", tmp_path / "out"
    told.write_text(json.dumps(config.to_huggingface(64)))
    asked = [
        "export",
        str(path),
        "--tag",
        "global_step1",
        "--out",
        str(out),
        "--format",
        "huggingface",
    ]
    names = [
        "--renames",
        "jaxpipe.models:llama_names",
        "--config",
        str(told),
        "--lora-alpha",
        str(ALPHA),
    ]
    assert main([*asked, *names, "--dtype", "float16", "--max-shard-bytes", "1GB"]) == 0
    assert "model.safetensors" in capsys.readouterr().out
    assert_holds(out, merge_lora(params, ALPHA), config, np.float16)
    for words, match in (
        (asked, "Add for instance --renames jaxpipe.models:llama_names"),
        (
            [*asked, "--renames", "llama_names"],
            "--renames must be module:name or file.py:name, but got 'llama_names'",
        ),
        ([*asked, "--renames", "no_such.module:x"], "must be importable from here"),
        (
            [*asked, "--renames", "jaxpipe.models:lama_names"],
            "something in jaxpipe.models, but got 'lama_names'",
        ),
        ([*asked, "--renames", "jaxpipe:__version__"], "sequence of jaxpipe.weights.Rename"),
        ([*asked[:-2], "--dtype", "float16"], "--dtype must be used with --format huggingface"),
    ):
        assert main(words) == 1
        assert match in capsys.readouterr().err


@pytest.mark.slow
def test_another_process_does_not_write_into_what_one_is_writing(
    runs: Runs, tmp_path: Path
) -> None:
    path, params = runs["tied"]
    config = config_of(tied=True)
    told = config.to_huggingface(64)
    arguments = (
        f"{str(path)!r}, {str(tmp_path / 'out')!r}, "
        f"llama_names(LlamaConfig.from_huggingface({told!r}))"
    )
    code = f"""
from pathlib import Path
import time
from jaxpipe.checkpoint import _weights, save_huggingface
from jaxpipe.models import LlamaConfig, llama_names
write = _weights._Tensors.values
def values(self):
    for number, value in enumerate(write(self)):
        if number == 5:
            Path({str(tmp_path / "begun")!r}).touch()
            while not Path({str(tmp_path / "go")!r}).exists():
                time.sleep(0.05)
        yield value
_weights._Tensors.values = values
save_huggingface({arguments}, config={told!r})
"""
    with subprocess.Popen([sys.executable, "-c", code], env=environment()) as one:
        while not (tmp_path / "begun").exists():
            assert one.poll() is None
            time.sleep(0.05)
        try:
            for limit in (None, LIMIT):
                with pytest.raises(
                    CheckpointError,
                    match="written by one process at a time.*which another is writing",
                ):
                    save_huggingface(
                        path,
                        tmp_path / "out",
                        llama_names(config),
                        config=told,
                        dtype="float16",
                        max_shard_bytes=limit,
                    )
        finally:
            (tmp_path / "go").touch()
        assert one.wait(120) == 0
    assert_holds(tmp_path / "out", params, config)
    assert {each.name for each in (tmp_path / "out").iterdir()} == {
        "config.json",
        "model.safetensors",
    }
    save_huggingface(path, tmp_path / "out", llama_names(config), config=told, dtype="float16")
    assert_holds(tmp_path / "out", params, config, np.float16)


def environment() -> dict[str, str]:
    """Of a process that finds the package where it is here."""
    paths = [str(Path(jaxpipe.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.mark.slow
@pytest.mark.parametrize("num_values", sweep(1, [1, 0, 20]))
def test_killed_while_it_writes(num_values: int, runs: Runs, tmp_path: Path) -> None:
    """What was there before stays whole.

    Nothing that is half written has a name that is looked for.
    """
    path, params = runs["tied"]
    config = config_of(tied=True)
    save_huggingface(path, tmp_path, llama_names(config), config=config.to_huggingface(64))
    code = f"""
import os, signal, sys
from jaxpipe.checkpoint import _weights, save_huggingface
from jaxpipe.models import llama_names
write = _weights._Tensors.values
def values(self):
    for number, value in enumerate(write(self)):
        if number == {num_values}:
            os.kill(os.getpid(), signal.SIGKILL)
        yield value
_weights._Tensors.values = values
folder = {str(tmp_path)!r}
save_huggingface({str(path)!r}, folder, llama_names(folder), config=folder, dtype="float16")
"""
    done = subprocess.run([sys.executable, "-c", code], env=environment(), timeout=300, check=False)
    assert done.returncode == -9
    assert_holds(tmp_path, params, config)
    save_huggingface(path, tmp_path, llama_names(config), config=tmp_path, dtype="float16")
    assert_holds(tmp_path, params, config, np.float16)
    assert {each.name for each in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
