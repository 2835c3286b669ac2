"""Results of a forward, a backward and a loss, for a segment and for a virtual stage."""

from typing import NamedTuple

import jax

from jaxpipe._util.typing import PyTree
from jaxpipe.core.state import Storage

from ._arrays import Packed, Pending, Prepared, Residuals


class ForwardResult(NamedTuple):
    """Result of a forward in training; `residuals` are the values that the backward needs."""

    output: PyTree
    residuals: Residuals
    collections: PyTree
    reported: jax.Array


class BackwardResult(NamedTuple):
    """Result of the backward of a segment, of the prologue or of the trunk.

    Attributes:
        grads: Gradients of the parameters. Leaves whose gradients are deferred are None, as is the
            whole tree if all are deferred.
        input_grad: Gradient of the differentiable inputs.
        pending: The values that a split backward keeps for its weight gradient; zero if the
            backward is not split.
    """

    grads: PyTree
    input_grad: PyTree
    pending: Pending


class StageBackwardResult(NamedTuple):
    """Result of the backward of a virtual stage.

    Attributes:
        trunk: Gradients of the trunk; None for leaves that the weight gradient computes.
        off_trunk: Gradients of the stage's other parameters; zero for those that the weight
            gradient computes, None if it computes all of them.
        input_grad: Gradient of the input that arrived, in common form.
        pending: The values that a split backward keeps for its weight gradient; zero if the
            backward is not split.
    """

    trunk: Prepared
    off_trunk: Storage | None
    input_grad: Packed
    pending: Pending


class LossResult(NamedTuple):
    """Result of the last layers and the loss.

    Attributes:
        sums: The sums that `LossTerms.sums` returns.
        grads: Gradients of the trained parameters.
        output_grad: Gradient of the last virtual stage's output, in common form.
        collections: The stage's collections afterwards.
    """

    sums: jax.Array
    grads: PyTree
    output_grad: Packed
    collections: PyTree = ()
    reported: PyTree = ()
