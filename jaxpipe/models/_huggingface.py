"""Reading of Hugging Face's `config.json`, without ignoring any key that would change results."""

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from jaxpipe._util.warn import warn
from jaxpipe.config import (
    ConfigWarning,
    integer_of_at_least,
    optional,
    read_flag,
    read_object,
    wrong_value,
)
from jaxpipe.errors import ConfigError, nearest, shown
from jaxpipe.weights import Source, read_config_json

Computed = Mapping[str, tuple[Any, ...]]
"""Keys that change what a model computes, each with the values that our layers support."""

_COMPUTED: Computed = {
    **dict.fromkeys(
        ("attention_multiplier", "attn_logit_softcapping", "clip_qkv", "compression_config"), ()
    ),
    **dict.fromkeys(
        (
            "final_logit_softcapping",
            "quantization_config",
            "query_pre_attn_scalar",
            "scale_depth",
            "sliding_window",
        ),
        (),
    ),
    **dict.fromkeys(
        ("embedding_multiplier", "logit_scale", "logits_scaling", "partial_rotary_factor"), (1.0,)
    ),
    **dict.fromkeys(("residual_multiplier", "rotary_pct", "scale_emb"), (1.0,)),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts"), (0,)),
    **dict.fromkeys(
        (
            "add_cross_attention",
            "alibi",
            "rope_interleaved",
            "scale_embedding",
            "use_bidirectional_attention",
            "use_sliding_window",
        ),
        (False,),
    ),
    **dict.fromkeys(
        ("no_rope_layers", "per_layer_config", "pruned_heads", "rope_parameters", "rope_scaling"),
        ({}, []),
    ),
}
"""The keys of all families. A missing key, or a key with null, is always allowed."""

_NO_NUMBERS = frozenset(
    (
        # About the file and the weights' dtype, which is read from the tensors.
        *(
            "architectures",
            "dtype",
            "torch_dtype",
            "model_type",
            "transformers_version",
            "transformers.js_config",
        ),
        *("unsloth_version", "is_llama_config", "use_bfloat16", "torchscript", "tf_legacy_loss"),
        # About tokens.
        *(
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
            "sep_token_id",
            "decoder_start_token_id",
            "prefix",
        ),
        *(
            "tokenizer_class",
            "max_length",
            "max_sequence_length",
            "max_position_embeddings",
            "max_window_layers",
        ),
        # About a call, and how it is computed.
        *(
            "use_cache",
            "return_dict",
            "output_attentions",
            "output_hidden_states",
            "output_past",
            "output_scores",
        ),
        *(
            "chunk_size_feed_forward",
            "gradient_checkpointing",
            "pretraining_tp",
            "attn_implementation",
        ),
        # About heads that we do not have, and about encoder-decoder models.
        *(
            "id2label",
            "label2id",
            "num_labels",
            "problem_type",
            "finetuning_task",
            "task_specific_params",
        ),
        *(
            "classifier_dropout",
            "directionality",
            "pooler_fc_size",
            "pooler_num_attention_heads",
            "pooler_type",
        ),
        *(
            "pooler_num_fc_layers",
            "pooler_size_per_head",
            "summary_activation",
            "summary_first_dropout",
        ),
        *(
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
            "n_special",
            "predict_special_tokens",
        ),
        *("is_decoder", "is_encoder_decoder", "tie_encoder_decoder", "cross_attention_hidden_size"),
        *("tie_last_hidden_states", "router_aux_loss_coef"),
        # About text generation.
        *(
            "bad_words_ids",
            "cache_implementation",
            "begin_suppress_tokens",
            "diversity_penalty",
            "do_sample",
            "early_stopping",
        ),
        *(
            "encoder_no_repeat_ngram_size",
            "exponential_decay_length_penalty",
            "forced_bos_token_id",
        ),
        *(
            "forced_eos_token_id",
            "length_penalty",
            "min_length",
            "no_repeat_ngram_size",
            "num_beam_groups",
        ),
        *("num_beams", "num_return_sequences", "remove_invalid_values", "repetition_penalty"),
        *(
            "return_dict_in_generate",
            "suppress_tokens",
            "temperature",
            "top_k",
            "top_p",
            "typical_p",
        ),
    )
)
"""Keys that do not affect what a model computes in training, or are read with another key."""

_SHOWN = 12


class ConfigKeys:
    """The keys of a `config.json`. `finish` checks all keys that were not read before.

    `families` maps each supported `model_type` to the values that it supports, and `sizes` some of
    them to sizes that their files leave out.
    """

    def __init__(
        self,
        source: Source,
        families: Mapping[str, Computed],
        sizes: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        self._values = read_config_json(source)
        self._asked: set[str] = set()
        self.model_type: str = self.get("model_type", None)
        if not isinstance(self.model_type, str) or self.model_type not in families:
            raise ConfigError(
                f"model_type must be one of {', '.join(families)}, but got "
                f"model_type={shown(self.model_type)}. Use the configuration of that family in "
                "jaxpipe.models, if there is one.",
                paths=["model_type"],
            )
        # A family's own entry wins: it may support values that others do not.
        self._computed = {**_COMPUTED, **families[self.model_type]}
        self._sizes = sizes.get(self.model_type, {})

    def get(self, key: str, default: Any) -> Any:
        """Return a value, or the default if it is missing."""
        self._asked.add(key)
        return self._values.get(key, default)

    def required(self, key: str) -> Any:
        """Return a value that must exist."""
        value = self.get(key, None)
        if value is None:
            raise ConfigError(
                f"{key} must be given, but got {key}=None. Add it to config.json.", paths=[key]
            )
        return value

    def size(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Return an integer of at least `least`; it must exist if there is no default."""
        value = self.get(key, None)
        # A null counts as missing.
        value = self._sizes.get(key, default) if value is None else value
        if value is None:
            return self.required(key)
        return integer_of_at_least(least, below=2**31)(value, key)

    def flag(self, key: str, default: bool) -> bool:  # noqa: FBT001  # the value of a switch
        """Return a boolean."""
        return read_flag(self.get(key, default), key)

    def mapping(self, key: str) -> dict[str, Any]:
        """Return an object, or an empty one if it is missing."""
        return dict(optional(read_object)(self.get(key, None), key) or {})

    def check(self, key: str, *allowed: Any) -> None:
        """Refuse all but some values of a key; None is always allowed."""
        check_value(key, self.get(key, None), *allowed)

    def finish(self) -> None:
        """Refuse unsupported values of keys that were not read; name unknown keys in a warning."""
        for key in self._computed.keys() - self._asked:
            self.check(key, *self._computed[key])
        # Keys with an underscore, such as `_name_or_path`, are about the file.
        unknown = [
            key
            for key, value in self._values.items()
            if value is not None
            and key not in self._asked | _NO_NUMBERS
            and not str(key).startswith("_")
        ]
        if not unknown:
            return
        # Only a key that is not in the file can have been meant.
        absent = {key for key in self._asked | set(self._computed) if key not in self._values}
        meant = {key: nearest(str(key), absent, 0.8) for key in unknown[:_SHOWN]}
        listed = ", ".join(
            f"{key}={shown(self._values[key])}"
            + (f" (did you mean {meant[key]}?)" if meant[key] else "")
            for key in unknown[:_SHOWN]
        )
        more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        warn(
            f"config.json has keys that are not known with model_type={self.model_type!r} and are "
            f"ignored: {listed}{more}. If one of them changes what the model computes, use your "
            "own model; otherwise pass the file's contents without them to silence this warning.",
            ConfigWarning,
        )


def shared_fields(config: Any) -> list[str]:
    """Return the fields of a configuration that have Hugging Face's names: all but `dtype`."""
    return [field.name for field in fields(config) if field.name != "dtype"]


def read_fields(keys: ConfigKeys, kind: Any) -> dict[str, Any]:
    """Read the shared fields of a `config.json`; missing keys get their defaults."""
    return {name: keys.get(name, getattr(kind, name)) for name in shared_fields(kind)}


def check_value(key: str, value: Any, *allowed: Any) -> None:
    """Refuse all but some values of a key; None is always allowed."""
    # In Python 1 == True and 0 == False.
    if value is None or any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed
    ):
        return
    repair = (
        "The layers here compute nothing else: use your own model, or weights that were made "
        "with this value"
    )
    raise wrong_value(key, " or ".join(map(shown, allowed)) or "left out", value, repair)
