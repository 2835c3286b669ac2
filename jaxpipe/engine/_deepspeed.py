"""Names of DeepSpeed's engine that a pipeline refuses."""

from typing import Any, NoReturn

from jaxpipe.errors import PipelineError


class EngineNames:
    """Base of `PipelineEngine` that answers to the calls of an unpipelined engine."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: a pipeline runs whole batches.

        Raises:
            PipelineError: Always.
        """
        _refuse("forward")

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: a pipeline runs whole batches.

        Raises:
            PipelineError: Always.
        """
        _refuse("backward")

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: a pipeline runs whole batches.

        Raises:
            PipelineError: Always.
        """
        _refuse("step")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: a pipeline runs whole batches.

        Raises:
            PipelineError: Always.
        """
        _refuse("__call__")


def _refuse(name: str) -> NoReturn:
    raise PipelineError(
        f"PipelineEngine.{name} must not be called: a pipeline interleaves forward, backward and step of many "
        "microbatches. Call train_batch(data_iter), or eval_batch(data_iter) to evaluate."
    )
