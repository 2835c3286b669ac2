"""Muon with DeepSpeed's parameters: it orthogonalises matrices and uses Adam for the rest."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpipe._util.typing import PyTree
from jaxpipe.config import Refusal, Unused, number, one_of_exactly, optional, read_flag, setting

from ._adam import scale_by_moments
from ._check import read_betas
from ._for_model import Matrices
from ._recipe import NOT_PARAMS, Factory, Hyperparams, OptimizerParams

# Coefficients of the quintic iteration, chosen for its slope at 0: small singular values grow fast,
# and none converges to exactly 1.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NUM_ITERATIONS = 5
_NORM_EPS = 1e-7


class MuonState(NamedTuple):
    """Average gradients."""

    momentum: PyTree


def scale_by_orthogonal_momentum(momentum: Any) -> optax.GradientTransformation:
    """The nearest orthogonal matrix to a matrix's average gradient, scaled for its shape.

    The average is `m = momentum * m + (1 - momentum) * g`, for matrices `[inputs, outputs]`.
    """
    # `optax.contrib.scale_by_muon` corrects the bias of both terms of Nesterov's look-ahead, by
    # different factors, which changes the direction (by 18 % in five updates of random gradients).
    # Its Newton-Schulz iterations alone are not public.

    def init(params: PyTree) -> MuonState:
        return MuonState(optax.tree.zeros_like(params))

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None
    ) -> tuple[PyTree, MuonState]:
        del params

        def average(gradient: jax.Array, before: jax.Array) -> jax.Array:
            return (momentum * before + (1 - momentum) * gradient).astype(before.dtype)

        means = jax.tree.map(average, updates, state.momentum)
        # Nesterov's look-ahead: the gradient is averaged in a second time, and only the first
        # average is stored.
        ahead = jax.tree.map(average, updates, means)
        return jax.tree.map(_scaled_orthogonal, ahead), MuonState(means)

    return optax.GradientTransformation(init, update)


def _scaled_orthogonal(matrix: jax.Array) -> jax.Array:
    inputs, outputs = matrix.shape
    # With more outputs than inputs, the columns of an orthogonal matrix are shorter than 1. The
    # scale compensates for that.
    return orthogonalize(matrix) * max(1.0, outputs / inputs) ** 0.5


def orthogonalize(matrix: jax.Array) -> jax.Array:
    """Bring all singular values of a matrix to about 0.7 to 1.2, by Newton-Schulz iterations."""
    a, b, c = _COEFFICIENTS
    # Contract over the long side: `x @ x.T` and the products with it are then smaller.
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    # The Frobenius norm is at least the largest singular value, and the iteration needs all
    # singular values to be at most 1.
    x = x / (jnp.sqrt(jnp.sum(x * x)) + _NORM_EPS)
    for _ in range(_NUM_ITERATIONS):
        square = x @ x.T
        x = a * x + (b * square + c * (square @ square)) @ x
    return x.T if tall else x


def _have_two_dims(params: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.ndim(leaf) == 2, params)


@dataclass(frozen=True)
class Muon(OptimizerParams):
    """Muon, which orthogonalises the model's hidden matrices; Adam for all other parameters."""

    other_keys: ClassVar[Mapping[str, Unused | Refusal]] = MappingProxyType(
        {
            **NOT_PARAMS,
            "per_head_muon": Refusal("the heads in a matrix are not known", "Remove the key", ()),
        }
    )
    by_matrix: ClassVar[bool] = True

    lr: float | None = setting(None, optional(number(0.0)))
    muon_lr: float | None = setting(None, optional(number(0.0)))
    adam_lr: float | None = setting(None, optional(number(0.0)))
    momentum: float = setting(0.95, number(0.0, below=1.0))
    betas: tuple[float, float] = setting((0.9, 0.95), read_betas)
    eps: float = setting(1e-10, number(0.0))
    weight_decay: float = setting(0.0, number(0.0))
    adam_w_mode: bool = setting(True, read_flag)
    torch_adam: bool = setting(False, read_flag)
    # Both are the same iteration. DeepSpeed runs it in half precision, and we in the gradient's
    # dtype.
    ns_method: str = setting("gram", one_of_exactly("gram", "standard"))

    def build(self, matrices: Matrices = None) -> tuple[Factory, Hyperparams]:
        """See `OptimizerParams.build`."""

        def factory(
            learning_rate: Any,
            adam_learning_rate: Any,
            momentum: Any,
            b1: Any,
            b2: Any,
            weight_decay: Any,
        ) -> optax.GradientTransformation:
            decayed = optax.add_decayed_weights(weight_decay)
            direction = scale_by_moments(b1, b2, self.eps)
            of_matrices = optax.chain(
                scale_by_orthogonal_momentum(momentum),
                decayed,
                optax.scale_by_learning_rate(learning_rate),
            )
            parts = [direction, decayed] if self.adam_w_mode else [decayed, direction]
            rest = optax.chain(*parts, optax.scale_by_learning_rate(adam_learning_rate))

            # DeepSpeed recognises hidden matrices by their names. It also orthogonalises parameters
            # with more dims. In Flax these can be read as matrices in several ways, so Adam updates
            # them.
            def labels(params: PyTree) -> PyTree:
                is_matrix = (matrices or _have_two_dims)(params)
                return jax.tree.map(lambda is_one: "muon" if is_one else "adam", is_matrix)

            return optax.multi_transform({"muon": of_matrices, "adam": rest}, labels)

        rate, adam_rate = self._rates
        b1, b2 = self.betas
        hyperparams = {
            "momentum": self.momentum,
            "b1": b1,
            "b2": b2,
            "weight_decay": self.weight_decay,
        }
        return factory, {"learning_rate": rate, "adam_learning_rate": adam_rate, **hyperparams}

    @property
    def _rates(self) -> tuple[float, float]:
        """Learning rates of matrices and of all other parameters."""
        pairs = ((self.muon_lr, 0.02), (self.adam_lr, 3e-4))
        rates = [
            next(r for r in (rate, self.lr, default) if r is not None) for rate, default in pairs
        ]
        return rates[0], rates[1]
