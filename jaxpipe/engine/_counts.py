"""How large a batch is."""

from typing import NoReturn

from jaxpipe.config import BatchSizes
from jaxpipe.errors import ConfigError, PipelineError

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

    def get_batch_info(self) -> tuple[int, int, int]:
        """`train_batch_size`, `train_micro_batch_size_per_gpu` and `gradient_accumulation_steps`; DeepSpeed's name."""
        sizes = self._sizes
        return sizes.train_batch_size, sizes.train_micro_batch_size_per_gpu, sizes.gradient_accumulation_steps

    def set_train_micro_batch_size(self, micro_batch_size: int) -> NoReturn:
        """Refused: the samples of a microbatch are what data are cut into and programs are made for.

        Raises:
            PipelineError: Always.
        """
        raise PipelineError(
            "train_micro_batch_size_per_gpu must stay as it is while an engine runs, but got "
            f"micro_batch_size={micro_batch_size!r} in place of {self.micro_batch_size}. Call set_train_batch_size, "
            "which changes how many microbatches a batch has, or load a checkpoint into an engine of that size."
        )

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
