"""Sizes of multi-head latent attention."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from jaxpipe.config import Section, optional, read_flag, required, setting
from jaxpipe.errors import ConfigError

from ._huggingface import ConfigKeys
from ._readers import read_size


@dataclass(frozen=True)
class LatentConfig(Section):
    """Sizes of multi-head latent attention, with Hugging Face's names.

    Keys and values of all heads are computed from one small vector per token, the latent, and from
    one rotary key that all heads share. The queries of a head, and its keys, have
    `qk_nope_head_dim + qk_rope_head_dim` dims.

    Attributes:
        kv_lora_rank: Size of the latent of keys and values.
        qk_nope_head_dim: Dims of a head's queries and keys without positions.
        qk_rope_head_dim: Dims of a head's queries, and of the shared key, that positions rotate.
        v_head_dim: Dims of a head's values.
        q_lora_rank: Size of the latent of queries. None means that queries are computed from the
            residual stream.
        rope_interleave: Whether positions rotate pairs of neighbouring dims of the projections.
            Otherwise, a pair consists of the i-th dim of the first half and of the second half.

    Raises:
        ConfigError: A value has a wrong type or is out of range.

    Reference:
        DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1.
    """

    kv_lora_rank: int = required(read_size)
    qk_nope_head_dim: int = required(read_size)
    qk_rope_head_dim: int = required(read_size)
    v_head_dim: int = required(read_size)
    q_lora_rank: int | None = setting(None, optional(read_size))
    rope_interleave: bool = setting(True, read_flag)

    @property
    def head_dim(self) -> int:
        """Dims of a head's queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def check(self) -> Iterable[ConfigError]:
        """Refuse an odd number of rotated dims."""
        if self.qk_rope_head_dim % 2:
            yield self._wrong("qk_rope_head_dim", "even", "Positions turn pairs of dims")

    def to_dict(self) -> dict[str, Any]:
        """Return the keys and values of a `config.json`."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


def read_latent(keys: ConfigKeys) -> LatentConfig:
    """Read the sizes from a `config.json`; missing keys get the defaults of `transformers`."""
    found = LatentConfig(
        keys.get("kv_lora_rank", 512),
        keys.get("qk_nope_head_dim", 128),
        keys.get("qk_rope_head_dim", 64),
        keys.get("v_head_dim", 128),
        keys.get("q_lora_rank", 1536),  # null means none
        keys.flag("rope_interleave", default=True),
    )
    keys.check("qk_head_dim", found.head_dim)
    return found
