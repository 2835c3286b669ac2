"""`prove_peer`: a pipelined step that somebody wrote by hand, against its sequential form."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxpipe._util.imports import raised
from jaxpipe._util.typing import PyTree
from jaxpipe.errors import ConfigError, shown
from jaxpipe.programs.jaxpr import arithmetic_of

from ._bound import bounds, differences_of
from ._claims import judged, run_claims
from ._job import DOUBLE, as_double, is_key
from ._proof import Claim, Finding, Proof, versions
from ._shake import Shaking, shaken

_SHAKES = (1, 2)


def prove_peer(
    pipelined: Callable[..., PyTree],
    sequential: Callable[..., PyTree],
    arguments: Sequence[PyTree],
    *,
    num_terms: int = 64,
    when_checked: Callable[[Claim], None] = lambda claim: None,
) -> Proof:
    """Prove that a pipelined step computes what its sequential form computes.

    Neither needs to use jaxpipe. Both take the same arguments and return the same tree, such as a
    loss and gradients. They run in float64 and in their own dtypes. Results may differ by what
    rounding explains: the sequential form also runs on arguments that are moved by one rounding.

    Args:
        pipelined: The step over several devices. Devices can be simulated.
        sequential: The same step without a pipeline.
        arguments: Their arguments: trees of arrays.
        num_terms: The number of microbatches times replicas, whose gradients are summed.
        when_checked: Called with each claim as soon as it has been checked.

    Returns:
        The claims, with findings that name the leaf.

    Raises:
        ConfigError: `arguments` is not a sequence, or the two return different trees.

    Example:
        >>> import jax.numpy as jnp, jaxpipe
        >>> x = jnp.arange(8.0).reshape(4, 2)
        >>> def whole(x):
        ...     return jnp.mean(x**2)
        >>> def in_microbatches(x):
        ...     return jnp.mean(jnp.stack([jnp.mean(part**2) for part in jnp.split(x, 2)]))
        >>> jaxpipe.proof.prove_peer(in_microbatches, whole, (x,)).holds
        True
    """
    if not isinstance(arguments, tuple | list):
        raise ConfigError(
            f"arguments must be a tuple of the functions' arguments, but got {shown(arguments)}. "
            "Write (params, batch)."
        )
    for name, function in (("pipelined", pipelined), ("sequential", sequential)):
        if not callable(function):
            raise ConfigError(f"{name} must be a function, but got {shown(function)}. Pass one.")
    # Not on a device: a function may donate its arguments.
    held = jax.tree.map(lambda x: x if is_key(x) else np.asarray(x), tuple(arguments))
    pair = _Pair(pipelined, sequential, held, num_terms)
    claims = run_claims(
        {
            "numbers": ("The results are the sequential ones, in float64.", pair.in_float64),
            "dtypes": ("The results are the sequential ones, in their own dtypes.", pair.as_given),
            "determinism": ("Two runs give the same bits.", pair.twice),
        },
        when_checked,
    )
    return Proof(claims, {"compared": _name(pipelined), "with": _name(sequential), **versions()})


class _Pair:
    def __init__(self, pipelined: Any, sequential: Any, arguments: Any, num_terms: int) -> None:
        self._pipelined = pipelined
        self._sequential = sequential
        self._arguments = arguments
        self._num_terms = num_terms

    def in_float64(self) -> Iterator[Any]:
        with DOUBLE.enabled():
            yield from self._compare(jax.tree.map(as_double, self._arguments))

    def as_given(self) -> Iterator[Any]:
        yield from self._compare(self._arguments)

    def twice(self) -> Iterator[Any]:
        first, second = (_results(self._pipelined, self._arguments) for _ in range(2))
        for name, value in first.items():
            if not np.array_equal(value, second[name], equal_nan=True):
                yield Finding(name, "two runs give different bits.")

    def _compare(self, arguments: Any) -> Iterator[Any]:
        wanted, found = (_results(f, arguments) for f in (self._sequential, self._pipelined))
        shapes = [{name: np.shape(x) for name, x in each.items()} for each in (wanted, found)]
        if shapes[0] != shapes[1]:
            # The names of all leaves that only one has, or that have another shape in each.
            unlike = sorted(dict(shapes[0].items() ^ shapes[1].items()))
            raise ConfigError(
                "both functions must return the same tree of shapes, but got different ones at "
                f"{', '.join(unlike[:5])}. Return the same results from both."
            )
        moved = [
            _results(self._sequential, shaken(arguments, Shaking(jax.random.key(seed))))
            for seed in _SHAKES
        ]
        traced = jax.make_jaxpr(self._sequential)(*arguments)
        # Losses of a jaxpipe pipeline are added up in float32. These need not be.
        limits = bounds(wanted, moved, arithmetic_of([traced]), self._num_terms, loss_unit=0.0)
        yield from judged(differences_of(wanted, found, limits))


def _results(function: Callable[..., PyTree], arguments: Any) -> dict[str, Any]:
    """Return the leaves of a function's results, by name."""
    try:
        tree = jax.device_get(function(*arguments))
    except Exception as error:
        raise ConfigError(
            f"{_name(function)} must run on the given arguments, but got {raised(error)}. Fix it; "
            "it also runs on arguments in float64."
        ) from error
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path) or "the result": np.asarray(x) for path, x in found}


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", type(function).__qualname__)
