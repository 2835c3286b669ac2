"""What a `config.json` says of the parts of a model, against the tensors that are written."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _refusals import check_refused

from jaxpipe.errors import ConfigError
from jaxpipe.weights import Rename, dump_config, match_renames, read_config_json


def tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


HEAD = "language_model.lm_head.weight"
TEXT = tensors(
    {
        "language_model.model.embed_tokens.weight": (32, 16),
        **{f"language_model.model.layers.{i}.mlp.up_proj.weight": (24, 16) for i in range(4)},
    }
)
IMAGES = tensors({f"vision_tower.layers.{i}.attn.out.bias": (8,) for i in range(2)})
WHOLE: dict[str, Any] = {
    "text_config": {"num_hidden_layers": 4, "vocab_size": 32, "hidden_size": 16},
    "vision_config": {"num_hidden_layers": 2, "hidden_size": 8},
}
TIED = [Rename(("language_model.model.embed_tokens.weight", HEAD), "tied/table/embedding")]
MATCHES = match_renames(TIED, {"tied/table/embedding": (32, 16)})


def test_parts_say_what_the_folder_holds() -> None:
    old = {"tie_word_embeddings": False, "torch_dtype": "bfloat16", "quantization_config": {}}
    told = {**WHOLE, "text_config": WHOLE["text_config"] | old, "torch_dtype": "a", "dtype": "b"}
    true = {"tie_word_embeddings": True, "torch_dtype": "float32"}
    wanted = {
        **{**WHOLE, "text_config": WHOLE["text_config"] | true},
        **{**true, "dtype": "float32"},
    }
    assert json.loads(dump_config(told, TEXT | IMAGES, TIED, MATCHES)) == wanted


@pytest.mark.parametrize(
    ("part", "changes", "match"),
    [
        ("text_config", {"num_hidden_layers": 2}, "num_hidden_layers=2 and tensors of 4 blocks"),
        ("text_config", {"vocab_size": 33}, r"vocab_size=33 and an embedding of shape \(32, 16\)"),
        ("vision_config", {"attention_bias": False}, "attention_bias=False and tensors with them"),
    ],
)
def test_parts_that_the_tensors_contradict(part: str, changes: dict[str, Any], match: str) -> None:
    told = {**WHOLE, part: WHOLE[part] | changes}
    with pytest.raises(ConfigError, match=match):
        dump_config(told, TEXT | IMAGES, (), ())


def test_a_part_is_not_found_within_a_word() -> None:
    near = tensors({"layers.0.supervision.weight": (2, 2), "layers.0.context.weight": (2, 2)})
    for part in WHOLE:
        with pytest.raises(ConfigError, match=f"got {part} without any tensors"):
            dump_config({part: {}}, near, (), ())


def written(config: dict[str, Any], held: dict[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    return json.loads(dump_config(config, held, (), ()))


def of_dtypes(*dtypes: Any) -> dict[str, jax.ShapeDtypeStruct]:
    return {f"t{i}": jax.ShapeDtypeStruct((2,), dtype) for i, dtype in enumerate(dtypes)}


def test_the_dtype_is_that_of_all_tensors() -> None:
    for dtypes, name in (
        ([jnp.bfloat16, jnp.bfloat16], "bfloat16"),
        ([jnp.bfloat16, jnp.float32], "float32"),
        ([jnp.int32, jnp.float16], "float16"),
    ):
        held = of_dtypes(*dtypes)
        assert written({}, held) == {"dtype": name}
        assert written({"torch_dtype": "a"}, held) == {"torch_dtype": name}
        assert written({"dtype": "a"}, held) == {"dtype": name}
        assert written({"dtype": "a", "torch_dtype": "b"}, held) == {
            "dtype": name,
            "torch_dtype": name,
        }
    assert written({"dtype": "a"}, of_dtypes(jnp.int32)) == {"dtype": "a"}


@pytest.mark.parametrize("key", ["quantization_config", "compression_config", "quantization"])
def test_plain_numbers_have_no_format(key: str) -> None:
    assert written({key: {"bits": 4}, "quantize": 1}, of_dtypes(jnp.int32)) == {"quantize": 1}


def test_a_head_is_a_module_of_its_own() -> None:
    """A name that only ends like one is none, so that nothing is said of ties."""
    table = [Rename("cxlm_head.weight", "0/kernel")]
    matches = match_renames(table, {"0/kernel": (2, 2)})
    held = tensors({"cxlm_head.weight": (2, 2)})
    assert "tie_word_embeddings" not in json.loads(dump_config({}, held, table, matches))
    table = [Rename("lm_head.weight", "0/kernel")]
    matches = match_renames(table, {"0/kernel": (2, 2)})
    held = tensors({"lm_head.weight": (2, 2)})
    assert json.loads(dump_config({}, held, table, matches))["tie_word_embeddings"] is False


PLAIN = tensors(
    {
        "embed.weight": (32, 16),
        **{f"h.{i}.mlp.up.weight": (24, 16) for i in range(4)},
        **{f"h.{i}.attn.norm.bias": (16,) for i in range(4)},
    }
)
ATTENTION = tensors({"h.0.attn.q.bias": (16,)})
MLP = tensors({"h.0.mlp.up.bias": (24,)})


@pytest.mark.parametrize(
    ("config", "held"),
    [
        ({"num_hidden_layers": 4, "n_layer": 4}, PLAIN),
        ({"num_hidden_layers": 3, "num_nextn_predict_layers": 1}, PLAIN),
        ({"num_hidden_layers": 4, "num_nextn_predict_layers": None}, PLAIN),
        ({"vocab_size": 32, "hidden_size": 16, "n_embd": 16}, PLAIN),
        ({"vocab_size": 32, "hidden_size": 64, "embedding_size": 16}, PLAIN),
        ({"attention_bias": False, "mlp_bias": False}, PLAIN),  # those of norms are always there
        ({"attention_bias": True, "mlp_bias": False}, PLAIN | ATTENTION),
        ({"attention_bias": False, "mlp_bias": True}, PLAIN | MLP),
        ({"attention_bias": None}, PLAIN | ATTENTION),
    ],
    ids=lambda value: str(value) if "embed.weight" not in value else "",
)
def test_what_tensors_agree_with(
    config: dict[str, Any], held: dict[str, jax.ShapeDtypeStruct]
) -> None:
    assert written(config, held).items() >= config.items()


def test_what_tensors_contradict() -> None:
    table = [
        ("n_layer=3 and tensors of 4 blocks", {"n_layer": 3}, PLAIN),
        (
            "num_hidden_layers=2 and tensors of 4 b",
            {"num_hidden_layers": 2, "num_nextn_predict_layers": 1},
            PLAIN,
        ),
        (
            r"embedding_size=8 and an embedding of shape \(32, 16\)",
            {"vocab_size": 32, "hidden_size": 16, "embedding_size": 8},
            PLAIN,
        ),
        ("n_embd=32 and an embedding of", {"vocab_size": 32, "n_embd": 32}, PLAIN),
        ("attention_bias=True and tensors without them", {"attention_bias": True}, PLAIN | MLP),
        ("mlp_bias=True and tensors without them", {"mlp_bias": True}, PLAIN | ATTENTION),
        ("mlp_bias=False and tensors with them", {"mlp_bias": False}, PLAIN | MLP),
        ("what JSON can, but got .*int64.* Convert it", {"a": np.int64(1)}, PLAIN),
    ]
    check_refused(
        ConfigError,
        [
            (words, lambda config=config, held=held: written(config, held))
            for words, config, held in table
        ],
    )


def test_what_is_no_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert read_config_json(tmp_path) == read_config_json(str(tmp_path / "config.json")) == {"a": 1}
    number: Any = 3
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "half.json").write_text('{"a"')
    check_refused(
        ConfigError,
        [
            ("must hold a dictionary, but got", lambda: read_config_json(tmp_path / "list.json")),
            ("must be readable, but got .*half", lambda: read_config_json(tmp_path / "half.json")),
            ("must be readable, but got .*none", lambda: read_config_json(tmp_path / "none.json")),
            ("a folder, a file or a dictionary, but got 3", lambda: read_config_json(number)),
        ],
    )
