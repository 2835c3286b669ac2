"""Hugging Face's `config.json`, read so that nothing that would change numbers is passed over."""

from collections.abc import Sequence
from typing import Any

from jaxpipe.checkpoint import Source, read_config_json
from jaxpipe.errors import ConfigError, shown

_NO_NUMBERS = (
    *("architectures", "auto_map", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label"),
    *("is_encoder_decoder", "is_llama_config", "label2id", "max_position_embeddings", "max_window_layers"),
    *("model_type", "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp", "problem_type"),
    *("return_dict", "sep_token_id", "task_specific_params", "tokenizer_class", "torch_dtype", "torchscript"),
    *("transformers.js_config", "transformers_version", "unsloth_version", "use_cache", "use_bfloat16"),
)
"""Keys that say nothing of what a model computes in training, or are read with another key."""


class ConfigKeys:
    """The keys of a `config.json`, each of which must be asked for before `finish`.

    Args:
        source: Where it is.
        model_types: Those that the caller knows.

    Raises:
        ConfigError: There is no such file, or it is of another type of model.
    """

    def __init__(self, source: Source, model_types: Sequence[str]) -> None:
        self._values = read_config_json(source)
        self._asked: set[str] = set()
        self.model_type: str = self.get("model_type", None)
        if self.model_type not in model_types:
            raise ConfigError(
                f"model_type must be one of {', '.join(model_types)}, but got model_type={self.model_type!r}. Use the "
                "configuration of that family in jaxpipe.models, if there is one.",
                paths=["model_type"],
            )

    def get(self, key: str, default: Any) -> Any:
        """A value; the default where there is none."""
        self._asked.add(key)
        return self._values.get(key, default)

    def required(self, key: str) -> Any:
        """A value.

        Raises:
            ConfigError: There is none.
        """
        value = self.get(key, None)
        if value is None:
            raise ConfigError(f"{key} must be given, but got {key}=None. Add it to config.json.", paths=[key])
        return value

    def check(self, key: str, *allowed: Any) -> None:
        """Refuse all but some values; no value is allowed always.

        Raises:
            ConfigError: It has another.
        """
        value = self.get(key, None)
        if value is not None and value not in allowed:
            rule = " or ".join(repr(each) for each in allowed) or "left out"
            raise ConfigError(
                f"{key} must be {rule}, but got {key}={shown(value)}. The layers here compute nothing else: use a "
                "model of your own, or weights that were made so.",
                paths=[key],
            )

    def finish(self) -> None:
        """Refuse keys that nobody has asked for, if they have a value that may mean something.

        Raises:
            ConfigError: There is one.
        """
        for key, value in self._values.items():
            if value and key not in self._asked and key not in _NO_NUMBERS and not key.startswith("_"):
                raise ConfigError(
                    f"{key} is no known key of a config.json with model_type={self.model_type!r}, and may change what "
                    f"the model computes: {key}={shown(value)}. If it does not, pass the file's contents without it.",
                    paths=[key],
                )
