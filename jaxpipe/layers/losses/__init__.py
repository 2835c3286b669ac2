"""Losses for language models, from whole logits or from logits split over the stages."""

# For users.
from ._cross_entropy import cross_entropy, log_probs, vocab_cross_entropy
from ._multi_token import multi_token_cross_entropy
from ._split_logits import SplitLogits

# isort: split
# For other rooms.
from ._multi_token import next_token_logits
from ._split_logits import local_indices, over_samples, put_together, signed

__all__ = [
    "SplitLogits",
    "cross_entropy",
    "log_probs",
    "multi_token_cross_entropy",
    "vocab_cross_entropy",
]
