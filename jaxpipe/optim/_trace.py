"""An optimiser on a tree of parameters: its state, one update, and the trace of both."""

import contextlib
import functools
from collections.abc import Callable, Collection, Generator, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import optax

from jaxpipe._util.typing import Path, PyTree
from jaxpipe.errors import ConfigError
from jaxpipe.layers import flatten_dict, join_path, unflatten_dict
from jaxpipe.programs.jaxpr import ClosedJaxpr, value_numbers

from ._average import AVERAGED
from ._optax import REJECTIONS


@dataclass(frozen=True)
class OptimizerTrace:
    """An optimiser traced on the parameters of a model, or of a part of it.

    `init` maps parameters to state; `update` maps gradients, state and parameters to parameters
    and state. `params` and `state` are the paths of the leaves.
    """

    init: ClosedJaxpr
    update: ClosedJaxpr
    params: list[Path]
    state: list[Path]

    def state_structs(self) -> dict[Path, Any]:
        """The shape and dtype of every leaf of the state."""
        return dict(zip(self.state, self.init.out_avals, strict=True))

    def shaped_like_params(self) -> dict[Path, Path]:
        """The leaves of the state that have their parameter's shape, and the parameter."""
        params = dict(zip(self.params, self.init.in_avals, strict=True))
        return {
            path: owner
            for path, struct in self.state_structs().items()
            if (owner := owner_of(path, params)) and params[owner].shape == struct.shape
        }

    def number_results(
        self,
        label: Callable[[str, Path], Hashable],
        table: dict[Hashable, int] | None = None,
        divided: Mapping[Path, Path] | None = None,
    ) -> dict[tuple[str, Path], int]:
        """Numbers for the results of the initial state and one update, equal for equal expressions.

        Results are keyed by their kind, worded as in an error message, and their path. Inputs with
        the same `label` count as equal. Traces that share a `table` can be compared. `divided` maps
        the leaves of the state that are cut like a parameter to it, if the tree may hold pieces.
        """
        table = {} if table is None else table
        params, grads = (
            [label(kind, path) for path in self.params] for kind in ("parameter", "gradient")
        )
        state = [label("state", path) for path in self.state]
        owners = [None if divided is None else path for path in self.params]
        cut = [(divided or {}).get(path) for path in self.state]
        first = value_numbers(self.init, params, table, (owners, cut))
        leaves = [*owners, *cut, *owners], [*owners, *cut]
        after = value_numbers(self.update, [*grads, *state, *params], table, leaves)
        names = [
            *(("first value of the state", path) for path in self.state),
            *(("update of the parameter", path) for path in self.params),
            *(("update of the state", path) for path in self.state),
        ]
        return dict(zip(names, (*first, *after), strict=True))


def trace_optimizer(
    optimizer: optax.GradientTransformation, tree: PyTree, *, is_part: bool = False
) -> OptimizerTrace:
    """Trace an optimiser on parameters, given as shapes and dtypes, with the paths of the model.

    `is_part` means that they are part of a model whose whole tree the optimiser accepts.
    """
    # If the model's tree is accepted, a part cannot be refused because of a single parameter.
    refused = (lambda: None) if is_part else functools.partial(_refused_param, optimizer, tree)
    with _refusing(*_ANY_PART, refused):
        init, state = jax.make_jaxpr(optimizer.init, return_shape=True)(tree)
    with _refusing(*(_ANY_PART if is_part else _NOTHING_ELSE), refused):
        update = jax.make_jaxpr(lambda g, s, p: apply_update(optimizer, g, s, p))(tree, state, tree)
    return OptimizerTrace(init, update, leaf_paths(tree), leaf_paths(state))


def state_struct(optimizer: optax.GradientTransformation, tree: PyTree) -> PyTree:
    """Shapes and dtypes of an optimiser's state for a part of a model's parameters."""
    with _refusing(*_ANY_PART):
        return jax.eval_shape(optimizer.init, tree)


def apply_update(
    optimizer: optax.GradientTransformation, grads: PyTree, state: PyTree, params: PyTree
) -> tuple[Any, Any]:
    """Apply one update to some parameters; return `(parameters, state)`."""
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def leaf_paths(tree: PyTree) -> list[Path]:
    """The path of every leaf of a tree, as the names of its keys, attributes and indices."""
    # An optimiser's state has the same paths with and without an average.
    paths = [path for path, _ in jax.tree.leaves_with_path(tree)]
    named = [tuple(jax.tree_util.keystr((key,), simple=True) for key in path) for path in paths]
    return [path[1:] if path[:1] == (AVERAGED,) else path for path in named]


def find_param(state_path: Path, known: Collection[Path]) -> tuple[int, int] | None:
    """Start and end of a parameter's path inside the path of a leaf of the state."""
    # Optax wraps trees of parameters in its own states, so the path of a moment contains its
    # parameter's path between keys of the optimiser.
    size = len(state_path)
    runs = ((i, j) for i in range(size) for j in range(i + 1, size + 1) if state_path[i:j] in known)
    return next(runs, None)


def owner_of(state_path: Path, known: Collection[Path]) -> Path | None:
    """The parameter that a leaf of the state belongs to; None if it belongs to none."""
    i, j = find_param(state_path, known) or (0, 0)
    return state_path[i:j] or None


_ANY_PART = (
    "accept any part of the parameters, because each device updates its own",
    "Give masks and labels as functions of a tree, not as trees. If the optimizer fails without "
    "parameters, as optax.contrib.galore does, every stage must train some, and with ZeRO every "
    "replica.",
)
_NOTHING_ELSE = (
    "update parameters from gradients, state and parameters alone, because a step has nothing else",
    # The signature does not show what a chain needs: optax.chain accepts any keyword.
    "Remove the transformation that needs more. Instead of optax.contrib.reduce_on_plateau use a "
    "learning-rate schedule, or set the learning rate between steps with PipelineEngine.set_lr. "
    "Instead of optax.lookahead, whose parameters are pairs, pass its fast optimizer.",
)


@contextlib.contextmanager
def _refusing(
    rule: str, repair: str, find_refused: Callable[[], tuple[str, Any] | None] = lambda: None
) -> Generator[None]:
    """Explain a failure inside the block: the rule that the optimiser breaks, or the parameter."""
    try:
        yield
    except ConfigError:
        raise
    except REJECTIONS as error:
        if refused := find_refused():
            rule = "take every parameter of the model"
            repair = (
                "It fails with {} of shape {}, but not with others. Update that parameter with "
                "another optimizer, as optax.multi_transform does, and give labels and masks as "
                "functions of a tree."
            ).format(*refused)
        first = str(error).partition("\n")[0].removesuffix(".")
        failure = f"{type(error).__name__}: {first}"
        message = f"the optimizer must {rule}, but got one that fails with {failure}. {repair}"
        raise ConfigError(message) from error


def _refused_param(optimizer: optax.GradientTransformation, tree: PyTree) -> tuple[str, Any] | None:
    """Path and shape of the first parameter that an optimiser fails on, unless it fails on all."""
    leaves = flatten_dict(tree)
    refused: list[tuple[str, Any]] = []
    for path, leaf in leaves.items():
        try:
            trace = jax.make_jaxpr(lambda x: apply_update(optimizer, x, optimizer.init(x), x))
            trace(unflatten_dict({path: leaf}))
        except REJECTIONS:
            refused.append((join_path(path), leaf.shape))
    return refused[0] if 0 < len(refused) < len(leaves) else None
