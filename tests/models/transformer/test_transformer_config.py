"""Fields of the transformer layer's configuration: defaults, files, and what each refuses."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest
from _refusals import check_refused

from jaxpipe import DeepSpeedTransformerConfig
from jaxpipe.config import ConfigWarning
from jaxpipe.errors import ConfigError

NAMES = [
    "batch_size",
    "hidden_size",
    "intermediate_size",
    "heads",
    "attn_dropout_ratio",
    "hidden_dropout_ratio",
    "num_hidden_layers",
    "initializer_range",
    "local_rank",
    "seed",
    "fp16",
    "pre_layer_norm",
    "normalize_invertible",
    "gelu_checkpoint",
    "adjust_init_range",
    "attn_dropout_checkpoint",
    "stochastic_mode",
    "huggingface",
    "training",
]
SIZES = {"hidden_size": 12, "heads": 3, "num_hidden_layers": 2}


def test_the_manuals_arguments_come_first_in_its_order() -> None:
    fields = [field.name for field in dataclasses.fields(DeepSpeedTransformerConfig)]
    assert fields[: len(NAMES) + 1] == [*NAMES, "max_seq_length"]


def test_what_is_not_given_has_a_default() -> None:
    config = DeepSpeedTransformerConfig(**SIZES)
    assert (config.intermediate_size, config.initializer_range, config.attn_dropout_ratio) == (
        48,
        0.02,
        0.0,
    )
    assert config == DeepSpeedTransformerConfig(**SIZES, intermediate_size=0)
    assert config.output_range == pytest.approx(0.01)
    assert hash(config) == hash(dataclasses.replace(config))


def test_files_and_dictionaries(tmp_path: Path) -> None:
    path = tmp_path / "layer.json"
    path.write_text(json.dumps({**SIZES, "seed": 4}))
    assert DeepSpeedTransformerConfig.from_json_file(path) == DeepSpeedTransformerConfig(
        **SIZES, seed=4
    )
    with pytest.raises(
        ConfigError, match="hiden_size is not a known key. Did you mean hidden_size"
    ):
        DeepSpeedTransformerConfig.from_dict({"hiden_size": 3})


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": -1}, "hidden_size must be given and >= 1, but got hidden_size=-1"),
    ({"heads": 0}, "heads must be given and >= 1, but got heads=0"),
    ({"heads": 5}, "a multiple of heads=5, but got hidden_size=12. Use 15, 3 a head"),
    ({"heads": 1.5}, "heads must be an integer .*, but got heads=1.5"),
    ({"seed": True}, "seed must be an integer .*, but got seed=True"),
    ({"num_hidden_layers": -1}, "given with adjust_init_range, but got num_hidden_layers=-1"),
    ({"attn_dropout_ratio": 1}, "a finite number below 1, but got attn_dropout_ratio=1"),
    ({"hidden_dropout_ratio": "0.1"}, "finite number below 1, .* hidden_dropout_ratio='0.1'"),
    ({"batch_size": 0}, ">= 1, or -1 for any number, but got batch_size=0"),
    ({"max_seq_length": -3}, "but got max_seq_length=-3"),
    ({"fp16": 1}, "true or false, but got fp16=1"),
    ({"fp16": True, "dtype": "bfloat16"}, "float16 or None with fp16=True, .* dtype='bfloat16'"),
    ({"dtype": "int32"}, "a floating-point dtype or None, but got dtype='int32'"),
    ({"attention": "flash"}, "'auto', 'blocked', 'cudnn', 'splash', 'xla', .*='flash'"),
    ({"attention": "cudnn", "attn_dropout_ratio": 0.1}, "0 with attention='cudnn', which does not"),
    ({"activation": "gelu"}, "activation must be a function of .*, but got activation='gelu'"),
    ({"recompute": "some"}, "or a jax.checkpoint policy, but got recompute='some'"),
]


def test_what_does_not_fit_is_refused() -> None:
    make = partial(DeepSpeedTransformerConfig, **SIZES)
    check_refused(ConfigError, [(words, partial(make, **given)) for given, words in REFUSED])


def test_stochastic_mode_is_refused_where_determinism_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    with pytest.raises(ConfigError, match="False where XLA_FLAGS asks for deterministic"):
        DeepSpeedTransformerConfig(**SIZES, stochastic_mode=True)


@pytest.mark.parametrize("given", [{"local_rank": 0}, {"attn_dropout_checkpoint": True}])
def test_what_has_no_effect_is_said(given: dict[str, Any]) -> None:
    with pytest.warns(ConfigWarning, match=f"No effect: {next(iter(given))}"):
        DeepSpeedTransformerConfig(**SIZES, **given)


def test_probabilities_are_kept_by_jax_own_attention() -> None:
    config = DeepSpeedTransformerConfig(**SIZES, attn_dropout_checkpoint=True, attention="xla")
    assert config.saves_memory
    assert config.activation is jax.nn.gelu
