"""Arguments of an evaluation."""

from typing import Any

from jaxpipe.errors import ConfigError


def check_evaluation(reduce_output: Any, num_micro_batches: Any) -> None:
    """Check what `eval_batch` is asked for.

    Args:
        reduce_output: `"avg"` or None.
        num_micro_batches: A positive integer or None.

    Raises:
        ConfigError: One is something else.
    """
    if reduce_output not in ("avg", None):
        raise ConfigError(
            f"reduce_output must be 'avg' or None, but got reduce_output={reduce_output!r}. Use None for the losses of "
            "all microbatches, and reduce them."
        )
    count = num_micro_batches
    if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
        raise ConfigError(
            f"num_micro_batches must be an integer of at least 1, but got num_micro_batches={count!r}. Leave it out "
            "for as many as in training."
        )
