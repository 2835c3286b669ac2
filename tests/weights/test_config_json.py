"""What a `config.json` says of the parts of a model, against the tensors that are written."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxpipe.errors import ConfigError
from jaxpipe.weights import Rename, dump_config, match_renames


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
