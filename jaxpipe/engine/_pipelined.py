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
    and step of many microbatches, so DeepSpeed's calls for one microbatch are refused.

    Reference:
        DeepSpeed's `deepspeed.runtime.pipe.engine.PipelineEngine`.
    """

    def train(self, mode: bool = True) -> None:
        """Accepted and changes nothing.

        `train_batch` always trains, `eval_batch` and `predict` never do.
        """

    def eval(self) -> None:
        """As `train`."""

    forward = refused("PipelineEngine.forward", _WHOLE)
    backward = refused("PipelineEngine.backward", _WHOLE)
    step = refused("PipelineEngine.step", _WHOLE)
    __call__ = refused("PipelineEngine.__call__", _WHOLE)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Always true.

        Gradients have been reduced and applied, as `train_batch` runs whole batches only.
        """
        return True

    @one_thread
    def reset_activation_shape(self) -> None:
        """Drop the programs of all shapes but the last batch's; DeepSpeed's name.

        Never needed: unlike there, a batch of another shape is seen by itself. It frees the
        programs' memory.
        """
        self._trainer.programs.clear()

    def _check_between_batches(self, call: str) -> None:
        """Nothing: batches are trained whole."""

    def _begin_batch(self) -> None:
        """Nothing: batches are trained whole."""
