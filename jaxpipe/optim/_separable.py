"""A check that an optimiser is separable: that it does to a part of the parameters what it does in the whole tree.

Each device hands the optimiser a tree of its own parameters. One that counts layers from the last, or draws random
numbers by a parameter's rank, treats parameters one by one and yet not as in the whole tree.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import optax

from jaxpipe._typing import Path
from jaxpipe.errors import ConfigError
from jaxpipe.jaxpr import value_numbers
from jaxpipe.layers import unflatten_dict

from ._leafwise import OptimizerTrace, trace_part
from ._optimizer_state import find_param

_Results = dict[tuple[str, Path], int]


def check_apart(
    optimizer: optax.GradientTransformation,
    whole: OptimizerTrace,
    struct: Mapping[Path, object],
    parts: Iterable[Collection[Path]],
) -> None:
    """Refuse an optimiser whose treatment of a parameter depends on which others are in its tree.

    Every result for a part, state included, must be the same expression as in the whole. Of a part without
    parameters only counts and keys are compared.

    Args:
        optimizer: The optimiser.
        whole: Its trace on all parameters.
        struct: Shapes and dtypes of all parameters by path.
        parts: The paths of the parameters that are updated together.

    Raises:
        ConfigError: Some result differs.
    """
    table: dict[Hashable, int] = {}
    wanted = _results(whole, table)
    owners: dict[tuple[str, Path], Path | None] = {}
    for kind, path in wanted:
        i, j = find_param(path, struct) or (0, 0)
        owners[kind, path] = path[i:j] if j else None
    for part in dict.fromkeys(frozenset(part) for part in parts):
        if part == struct.keys():
            continue
        trace = trace_part(optimizer, unflatten_dict({path: struct[path] for path in struct if path in part}))
        found = _results(trace, table)
        dtypes = {**_dtypes(whole), **_dtypes(trace)}
        names = [name for name, owner in owners.items() if owner is None or owner in part]
        for name in dict.fromkeys((*names, *found)):
            # optax gives some numbers the dtype of the parameters, which an empty tree does not tell
            is_moot = not part and jnp.issubdtype(dtypes[name[1]], jnp.floating)
            if found.get(name) != wanted.get(name) and not is_moot:
                raise _refusal(*name, whole, trace)


def _results(trace: OptimizerTrace, table: dict[Hashable, int]) -> _Results:
    """Numbers of first state, next state and update, by what they are."""
    grads, state, params = (
        [(kind, path) for path in paths]
        for kind, paths in (("gradient", trace.params), ("state", trace.state), ("parameter", trace.params))
    )
    first = value_numbers(trace.init, params, table)
    after = value_numbers(trace.update, [*grads, *state, *params], table)
    names = [
        *(("first value of the state", path) for path in trace.state),
        *(("update of the parameter", path) for path in trace.params),
        *(("update of the state", path) for path in trace.state),
    ]
    return dict(zip(names, (*first, *after), strict=True))


def _dtypes(trace: OptimizerTrace) -> dict[Path, Any]:
    """The dtype of every leaf of the state."""
    return {path: aval.dtype for path, aval in zip(trace.state, trace.init.out_avals, strict=True)}


def _refusal(kind: str, path: Path, whole: OptimizerTrace, part: OptimizerTrace) -> ConfigError:
    first, second = (_dtypes(trace).get(path) for trace in (whole, part))
    if first != second and None not in (first, second):
        repair = (
            f"It is {first} in the one and {second} in the other: hold all parameters in one dtype, or give "
            "optax.inject_hyperparams hyperparam_dtype=jnp.float32."
        )
    else:
        repair = (
            "Let labels and masks look at a parameter's path, such as the number in its layer's name, and not at its "
            "rank in the tree; in place of random numbers drawn for a whole tree, as optax.add_noise draws them, fold "
            "each parameter's path into the key; else use one stage and one chunk, without ZeRO."
        )
    given = f", {'/'.join(part.params[0])} to {'/'.join(part.params[-1])}" if part.params else ""
    return ConfigError(
        "the optimizer must treat a parameter the same whatever other parameters are in the tree it is given, as each "
        f"device updates its own alone, but got one whose {kind} {'/'.join(path)} is another in the tree of all "
        f"{len(whole.params)} parameters than in that of {len(part.params)} of them{given}. {repair}"
    )
