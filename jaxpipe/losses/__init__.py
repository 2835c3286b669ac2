"""Losses for language models, from whole logits or from logits split over the stages."""

# For users.
from ._cross_entropy import cross_entropy as cross_entropy
from ._cross_entropy import log_probs as log_probs
from ._cross_entropy import vocab_cross_entropy as vocab_cross_entropy
from ._multi_token import multi_token_cross_entropy as multi_token_cross_entropy
from ._split_logits import SplitLogits as SplitLogits

# isort: split
# For other rooms.
from ._multi_token import next_token_logits as next_token_logits
from ._split_logits import local_indices as local_indices
from ._split_logits import over_samples as over_samples
from ._split_logits import put_together as put_together
from ._split_logits import signed as signed

__all__ = [
    # For users.
    "SplitLogits",
    "cross_entropy",
    "log_probs",
    "multi_token_cross_entropy",
    "vocab_cross_entropy",
    # For other rooms.
    "local_indices",
    "next_token_logits",
    "over_samples",
    "put_together",
    "signed",
]
