"""Results of a forward, a backward and a loss: of a segment, and of a virtual stage."""

from typing import NamedTuple

import jax

from jaxpipe._typing import PyTree


class ForwardResult(NamedTuple):
    """A forward in training.

    Attributes:
        output: What it hands over.
        residuals: What its backward needs.
        collections: The collections after it.
        reported: Values that its layers report.
    """

    output: PyTree
    residuals: PyTree
    collections: PyTree
    reported: jax.Array


class BackwardResult(NamedTuple):
    """A backward of a segment, the prologue or the trunk.

    Attributes:
        grads: Gradients of parameters; None, leaf by leaf or at all, where they are left for later.
        input_grad: That of the differentiable inputs.
        pending: What the weight gradient of a split backward needs; zero of a whole one.
    """

    grads: PyTree
    input_grad: PyTree
    pending: PyTree


class StageBackwardResult(NamedTuple):
    """A backward of a virtual stage.

    Attributes:
        trunk: Gradients of the trunk; None for leaves that wait for the weight gradient.
        off_trunk: Those of the stage's other parameters, zero where they wait; None if all do.
        input_grad: That of what arrived, in common form.
        pending: What the weight gradient of a split backward needs; zero of a whole one.
    """

    trunk: PyTree
    off_trunk: PyTree
    input_grad: PyTree
    pending: PyTree


class LossResult(NamedTuple):
    """The last layers and the loss.

    Attributes:
        sums: Those of `LossTerms.sums`.
        grads: Gradients of trained parameters.
        output_grad: That of the last virtual stage's output, in common form.
        collections: The stage's collections after it.
        reported: Values that its layers report.
    """

    sums: jax.Array
    grads: PyTree
    output_grad: PyTree
    collections: PyTree = ()
    reported: PyTree = ()
