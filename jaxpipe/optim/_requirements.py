"""Requirements of a pipeline on an optimiser, checked on its trace.

Each device passes the optimiser a tree of only its own parameters, but the result must be the same
as for the whole tree. The optimiser must be:

- leaf-wise: each parameter is updated only from its own gradient;
- separable: the other parameters in the tree make no difference. They do if layers are counted from
  the last one, or if random numbers are drawn by a parameter's rank;
- element-wise, with ZeRO or tensor parallelism, where a device has a slice of each parameter. Other
  optimisers need whole leaves;
- uniform over the stages. This is not required, but lets one straight program update the trunks of
  all stages.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

import jax.numpy as jnp
import optax

from jaxpipe._util.typing import Path, PyTree
from jaxpipe.errors import ConfigError
from jaxpipe.layers import unflatten_dict
from jaxpipe.programs.jaxpr import output_dependence

from ._trace import OptimizerTrace, find_param, owner_of, trace_optimizer


def check_leafwise(trace: OptimizerTrace) -> None:
    """Refuse an optimiser whose update of one parameter uses another parameter's gradient."""
    # One bit per parameter, shared by its gradient. State has no bits: an update that uses the
    # state of a parameter on another device becomes a different expression in a tree without that
    # parameter, and `check_separable` refuses it.
    bits = [1 << i for i in range(len(trace.params))]
    inputs = [*bits, *([0] * len(trace.state)), *bits]
    for mixed in output_dependence(trace.update.jaxpr, inputs):
        if mixed & (mixed - 1):
            first, second = [
                "/".join(path) for i, path in enumerate(trace.params) if mixed >> i & 1
            ][:2]
            raise ConfigError(
                "the optimizer must update each parameter from its own gradient alone if "
                "num_stages > 1 or ZeRO or num_chunks > 1 divides the parameters, but got one "
                f"whose result mixes {first} and {second}. Devices do not see each other's "
                "gradients: remove the transformation that couples parameters. Instead of "
                "optax.clip_by_global_norm set gradient_clipping in the config, instead of "
                "optax.apply_if_finite set nonfinite."
            )


def check_separable(
    optimizer: optax.GradientTransformation,
    whole: OptimizerTrace,
    struct: Mapping[Path, object],
    parts: Iterable[Collection[Path]],
) -> None:
    """Refuse an optimiser whose treatment of a parameter depends on which others are in its tree.

    Every result for a part, including state, must be the same expression as in the whole tree.
    `struct` are shapes and dtypes of all parameters, `parts` those that are updated together.
    """
    table: dict[Hashable, int] = {}
    wanted = whole.number_results(_by_path, table)
    owners = {(kind, path): owner_of(path, struct) for kind, path in wanted}
    for part in dict.fromkeys(frozenset(part) for part in parts):
        if part == frozenset(struct):
            continue
        tree = unflatten_dict({path: struct[path] for path in struct if path in part})
        trace = trace_optimizer(optimizer, tree, is_part=True)
        found = trace.number_results(_by_path, table)
        structs = {**whole.state_structs(), **trace.state_structs()}
        names = [name for name, owner in owners.items() if owner is None or owner in part]
        for name in dict.fromkeys((*names, *found)):
            # optax gives some numbers the dtype of the parameters, which an empty tree does not
            # have
            is_moot = not part and jnp.issubdtype(structs[name[1]].dtype, jnp.floating)
            if found.get(name) != wanted.get(name) and not is_moot:
                raise _inseparable(*name, whole, trace)


def is_uniform_over_stages(trace: OptimizerTrace, stages: Sequence[Mapping[Path, str]]) -> bool:
    """True if an optimiser treats parameters of one name in the same way on all stages.

    `trace` is that of all parameters. `stages` has, for each stage, names of some of them by path.
    """
    names = {path: name for stage in stages for path, name in stage.items()}

    def by_name(kind: str, path: Path) -> tuple[str, Path, str | None, Path]:
        i, j = find_param(path, names) or (len(path), 0)
        return kind, path[:i], names[path[i:j]] if j else None, path[j:] if j else ()

    found: dict[Hashable, list[int]] = {}
    for (kind, path), number in trace.number_results(by_name).items():
        result = by_name(kind, path)
        if result[2] is not None:
            found.setdefault(result, []).append(number)
    return all(len(numbers) == len(stages) and len(set(numbers)) == 1 for numbers in found.values())


def params_needed_whole(
    optimizer: optax.GradientTransformation, whole: PyTree, pieces: PyTree
) -> list[Path]:
    """Find the parameters that an optimiser does not update element by element.

    Each element of a parameter, and of state with its shape, must be the same expression in the
    tree of `whole` shapes and in that of the shapes of `pieces`: of elements at its index, and of
    numbers that are the same for all.
    """
    first, second = (trace_optimizer(optimizer, tree) for tree in (whole, pieces))
    divided = dict(first.shaped_like_params().items() & second.shaped_like_params().items())
    params = dict.fromkeys(first.params)
    table: dict[Hashable, int] = {}
    wanted, found = (trace.number_results(_by_path, table, divided) for trace in (first, second))
    results = {**wanted, **found}
    changed = {
        owner_of(path, params)
        for kind, path in results
        if wanted.get((kind, path)) != found.get((kind, path))
    }
    # If state that belongs to no parameter differs, all of them.
    return [path for path in params if {path, None} & changed]


def _by_path(kind: str, path: Path) -> Hashable:
    return kind, path


def _inseparable(kind: str, path: Path, whole: OptimizerTrace, part: OptimizerTrace) -> ConfigError:
    first, second = (trace.state_structs().get(path) for trace in (whole, part))
    if first and second and first.dtype != second.dtype:
        repair = (
            f"It is {first.dtype} in the first and {second.dtype} in the second. Use one dtype for "
            "all parameters, or give optax.inject_hyperparams hyperparam_dtype=jnp.float32."
        )
    else:
        repair = (
            "Let labels and masks depend on a parameter's path, such as the number in its layer's "
            "name, and not on its rank in the tree. Instead of drawing random numbers for a whole "
            "tree, as optax.add_noise does, fold each parameter's path into the key. Otherwise use "
            "one stage and one chunk, without ZeRO."
        )
    given = f", {'/'.join(part.params[0])} to {'/'.join(part.params[-1])}" if part.params else ""
    return ConfigError(
        "the optimizer must treat a parameter the same whatever other parameters are in the tree "
        f"it is given, because each device updates only its own, but got one whose {kind} "
        f"{'/'.join(path)} differs between the tree of all {len(whole.params)} parameters and "
        f"a tree of {len(part.params)} of them{given}. {repair}"
    )
