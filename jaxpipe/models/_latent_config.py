"""Sizes of multi-head latent attention."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ._huggingface import ConfigKeys
from ._rules import Rule, are_flags, are_sizes, check_fields, is_size


@dataclass(frozen=True)
class LatentConfig:
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

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    rope_interleave: bool = True

    def __post_init__(self) -> None:
        check_fields(self, self._rules())

    @property
    def head_dim(self) -> int:
        """Dims of a head's queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def _rules(self) -> Iterator[Rule]:
        sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        yield from are_sizes(self, sizes)
        is_even = self.qk_rope_head_dim % 2 == 0
        yield "qk_rope_head_dim", is_even, "even", "Positions turn pairs of dims."
        is_rank = self.q_lora_rank is None or is_size(self.q_lora_rank)
        yield "q_lora_rank", is_rank, "an integer >= 1 or None", "None has no latent of queries."
        yield from are_flags(self, ("rope_interleave",))

    def to_dict(self) -> dict[str, Any]:
        """Return the keys and values of a `config.json`."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


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
