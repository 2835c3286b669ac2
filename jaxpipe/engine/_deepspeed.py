"""Names of DeepSpeed's engine that mean nothing in a pipeline."""

from typing import Any, NoReturn

from jaxpipe.errors import PipelineError


class EngineNames:
    """Base of `PipelineEngine` that answers to the calls of an unpipelined engine."""

    def train(self, mode: bool = True) -> None:
        """Accepted and changes nothing: `train_batch` always trains, `eval_batch` and `predict` never do."""

    def eval(self) -> None:
        """As `train`."""

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
