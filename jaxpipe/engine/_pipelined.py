"""`PipelineEngine`: the engine of a `PipelineModule`, which trains whole batches."""

from typing import final

from jaxpipe.errors import refused

from ._engine import Engine
from ._turn import one_thread

_WHOLE = (
    "a pipeline interleaves forward, backward and step of many microbatches. Call "
    "train_batch(data_iter), or eval_batch(data_iter) to evaluate."
)


@final
class PipelineEngine(Engine):
    """Trains a `PipelineModule` batch by batch; made by `jaxpipe.initialize`.

    Arguments, attributes and errors are those of `Engine`. A pipeline interleaves forward, backward
    and step of many microbatches, so DeepSpeed's calls for one microbatch raise an error.

    Reference:
        DeepSpeed's `deepspeed.runtime.pipe.engine.PipelineEngine`.
    """

    def train(self, mode: bool = True) -> None:
        """Do nothing; provided for compatibility with DeepSpeed.

        `train_batch` always trains, and `eval_batch` and `predict` never do.
        """

    def eval(self) -> None:
        """Do nothing, like `train`."""

    forward = refused("PipelineEngine.forward", _WHOLE)
    backward = refused("PipelineEngine.backward", _WHOLE)
    step = refused("PipelineEngine.step", _WHOLE)
    __call__ = refused("PipelineEngine.__call__", _WHOLE)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return True, always.

        `train_batch` trains whole batches, so gradients have been reduced and applied.
        """
        return True

    @one_thread
    def reset_activation_shape(self) -> None:
        """Drop the programs of all shapes except the last batch's, to free their memory.

        The name is DeepSpeed's. Unlike in DeepSpeed, the call is never required, because the engine
        detects batches of another shape.
        """
        self._trainer.programs.clear()

    def _check_between_batches(self, call: str) -> None:
        """Do nothing, because batches are always trained whole."""

    def _begin_batch(self) -> None:
        """Do nothing, because batches are always trained whole."""
