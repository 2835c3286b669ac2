"""The instructions of a schedule, independent of devices and arrays."""

from typing import Any


class PipeInstruction:
    """One instruction of a stage in one step of a schedule.

    Keyword arguments become attributes. Instructions are values: two instructions of the same class
    with the same arguments are equal and have the same hash. They may be shared between steps, so
    do not modify an instruction after you create it.

    Args:
        **kwargs: The instruction's arguments, stored as attributes.

    Example:
        >>> ForwardPass(buffer_id=3)
        ForwardPass(buffer_id=3)
        >>> ForwardPass(3, micro_batch_id=7).kwargs
        {'buffer_id': 3, 'micro_batch_id': 7}
    """

    def __init__(self, **kwargs: Any) -> None:
        self.__dict__.update(kwargs)

    @property
    def name(self) -> str:
        """The class name, such as `ForwardPass`."""
        return type(self).__name__

    @property
    def kwargs(self) -> dict[str, Any]:
        """The arguments, as a new dictionary."""
        return dict(self.__dict__)

    def __repr__(self) -> str:
        arguments = ", ".join(f"{key}={value!r}" for key, value in self.__dict__.items())
        return f"{self.name}({arguments})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PipeInstruction):
            return NotImplemented
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((type(self), frozenset(self.__dict__.items())))


class OptimizerStep(PipeInstruction):
    """Update the stage's parameters and clear its gradients.

    This is the last instruction of a batch on every stage.
    """


class ReduceGrads(PipeInstruction):
    """Sum the stage's gradients over the data replicas, after the stage's last backward."""


class ReduceTiedGrads(PipeInstruction):
    """Sum the gradients of tied layers over the stages that hold a copy.

    Stages wait for each other here, so it must be in the same step on all of them.
    """


class BufferOpInstruction(PipeInstruction):
    """An instruction that works on one buffer, that is, on the microbatch in the buffer.

    A microbatch enters a buffer with its first `LoadMicroBatch`, `RecvActivation` or `ForwardPass`.
    It leaves the buffer when this stage no longer needs any of its values.

    Args:
        buffer_id: The buffer, in `[0, num_pipe_buffers())`.
        **kwargs: `micro_batch_id` and `chunk_id` name the microbatch and the model chunk. Without
            them the microbatches enter in numerical order, and later instructions on the buffer
            work on the microbatch in it. With several chunks per stage, the instruction with which
            a microbatch enters a buffer must name its chunk.
    """

    buffer_id: int
    micro_batch_id: int | None = None
    chunk_id: int | None = None

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        self.buffer_id = buffer_id
        if kwargs:
            self.__dict__.update(kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Load the next microbatch of the batch into a buffer.

    The first stage loads inputs, the last stage loads labels.

    Roughly:
        inputs[buffer_id] = next(data_iter)
    """


class ForwardPass(BufferOpInstruction):
    """Run the stage's layers on a buffer.

    Roughly:
        outputs[buffer_id], residuals[buffer_id] = forward(params, inputs[buffer_id])
    """


class BackwardPass(BufferOpInstruction):
    """Run the whole backward of a buffer.

    It computes the gradient of the input and accumulates the gradient of the weights.

    Roughly:
        weight_grad, input_grads[i] = backward(residuals[i], output_grads[i])  # i = buffer_id
        grads += weight_grad
    """


class BackwardInput(BufferOpInstruction):
    """Run the input gradient, which the previous stage needs.

    `BackwardWeight` completes the backward.

    Roughly:
        input_grads[i], pending[i] = backward_input(residuals[i], output_grads[i])  # i = buffer_id
    """


class BackwardWeight(BufferOpInstruction):
    """Run the weight gradient that `BackwardInput` left, and accumulate it.

    Roughly:
        grads += backward_weight(residuals[buffer_id], pending[buffer_id])
    """


class SendActivation(BufferOpInstruction):
    """Send a buffer's output, computed in an earlier step, to the stage of the following layers.

    Roughly:
        send(outputs[buffer_id])

    The matching `RecvActivation` is in the same step.
    """


class RecvActivation(BufferOpInstruction):
    """Receive a buffer's input from the stage that runs the preceding layers.

    Roughly:
        inputs[buffer_id] = recv()

    The matching `SendActivation` is in the same step.
    """


class SendGrad(BufferOpInstruction):
    """Send the gradient of a buffer's input to the stage that sent the input.

    The gradient was computed in an earlier step.

    Roughly:
        send(input_grads[buffer_id])

    The matching `RecvGrad` is in the same step. Integer and boolean leaves have no gradient and are
    not sent.
    """


class RecvGrad(BufferOpInstruction):
    """Receive the gradient of a buffer's output from the stage that received the output.

    Roughly:
        output_grads[buffer_id] = recv()

    The matching `SendGrad` is in the same step.
    """
