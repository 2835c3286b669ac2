"""How large a batch is."""

from jaxpipe.config import BatchSizes
from jaxpipe.errors import ConfigError

from ._turn import Turn, one_thread


class BatchCounts:
    """Base of `PipelineEngine` that knows the sizes of a batch.

    Args:
        sizes: All three.
        num_replicas: Length of the `data` axis.
    """

    _turn: Turn

    def __init__(self, sizes: BatchSizes, num_replicas: int) -> None:
        self._sizes = sizes
        self._num_replicas = num_replicas

    @property
    def micro_batches(self) -> int:
        """Microbatches per batch; the same as `gradient_accumulation_steps()`."""
        return self._sizes.gradient_accumulation_steps

    @property
    def micro_batch_size(self) -> int:
        """Samples per microbatch and replica."""
        return self._sizes.train_micro_batch_size_per_gpu

    def train_batch_size(self) -> int:
        """Samples per batch over all replicas."""
        return self._sizes.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per microbatch and replica."""
        return self._sizes.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        """Microbatches per batch."""
        return self._sizes.gradient_accumulation_steps

    @one_thread
    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change how many microbatches a batch has; the size of a microbatch stays.

        Args:
            train_batch_size: Samples per batch over all replicas, from the next batch on.

        Raises:
            ConfigError: It is no positive multiple of the samples in a microbatch of all replicas.
        """
        micro, data = self.micro_batch_size, self._num_replicas
        unit = micro * data
        is_integer = isinstance(train_batch_size, int) and not isinstance(train_batch_size, bool)
        if not is_integer or train_batch_size < 1 or train_batch_size % unit:
            below = train_batch_size // unit * unit if is_integer else 0
            nearest = " or ".join(str(size) for size in (below, below + unit) if size > 0) or unit
            raise ConfigError(
                f"train_batch_size must be a multiple of train_micro_batch_size_per_gpu * data = {micro} * {data} = "
                f"{unit}, but got train_batch_size={train_batch_size!r}. Use for instance {nearest}."
            )
        self._sizes = BatchSizes(train_batch_size, micro, train_batch_size // unit)
