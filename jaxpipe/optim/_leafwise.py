"""A check that an optimiser is leaf-wise: that it updates each parameter from its own gradient alone."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import jax
import optax
from jax.extend.core import ClosedJaxpr

from jaxpipe._typing import Path, PyTree
from jaxpipe.errors import ConfigError
from jaxpipe.jaxpr import output_dependence, value_numbers

from ._optimizer_state import apply_update, find_param, leaf_paths, refusing_parts


@dataclass(frozen=True)
class OptimizerTrace:
    """An optimiser on the parameters of a model, or of a part of it.

    Attributes:
        init: Parameters to state.
        update: Gradients, state and parameters to parameters and state.
        params: The path of each parameter.
        state: The path of each leaf of the state.
    """

    init: ClosedJaxpr
    update: ClosedJaxpr
    params: list[Path]
    state: list[Path]


def trace_optimizer(optimizer: optax.GradientTransformation, tree: PyTree) -> OptimizerTrace:
    """Trace an optimiser on all parameters of a model.

    Args:
        optimizer: The optimiser.
        tree: The parameters, as shapes and dtypes, with the paths of the model.

    Returns:
        The trace.

    Raises:
        ConfigError: It asks for more than gradients, state and parameters, or fails with them.
    """
    init, state = jax.make_jaxpr(optimizer.init, return_shape=True)(tree)
    try:
        update = _trace_update(optimizer, state, tree)
    except (TypeError, ValueError) as error:
        # What a chain asks for stands in no signature, as optax.chain takes any keyword, so it is called to find out.
        first = str(error).partition("\n")[0]
        raise ConfigError(
            "the optimizer must update parameters from gradients, state and parameters alone, as a step of a pipeline "
            f"hands it nothing else, but got one that fails with {type(error).__name__}: {first}. Remove the "
            "transformation that asks for more; in place of optax.contrib.reduce_on_plateau use a learning-rate "
            "schedule, or set the learning rate between steps with PipelineEngine.set_lr."
        ) from error
    return OptimizerTrace(init, update, leaf_paths(tree), leaf_paths(state))


def trace_part(optimizer: optax.GradientTransformation, tree: PyTree) -> OptimizerTrace:
    """Trace an optimiser on a part of the parameters; see `trace_optimizer`.

    Raises:
        ConfigError: The optimiser takes the whole model's tree only.
    """
    with refusing_parts():
        init, state = jax.make_jaxpr(optimizer.init, return_shape=True)(tree)
        update = _trace_update(optimizer, state, tree)
    return OptimizerTrace(init, update, leaf_paths(tree), leaf_paths(state))


def _trace_update(optimizer: optax.GradientTransformation, state: PyTree, params: PyTree) -> ClosedJaxpr:
    return jax.make_jaxpr(lambda g, s, p: apply_update(optimizer, g, s, p))(params, state, params)


def check_leafwise(trace: OptimizerTrace) -> None:
    """Refuse an optimiser whose update of one parameter looks at another's gradient.

    Devices update parts of the model apart, so such an update would differ from that of the unpipelined model.

    Args:
        trace: The optimiser.

    Raises:
        ConfigError: Some result depends on more than one parameter.
    """
    bits = [1 << i for i in range(len(trace.params))]
    inputs = [*bits, *([0] * len(trace.state)), *bits]
    for mixed in output_dependence(trace.update.jaxpr, inputs):
        if mixed & (mixed - 1):
            first, second = ["/".join(path) for i, path in enumerate(trace.params) if mixed >> i & 1][:2]
            raise ConfigError(
                "the optimizer must update each parameter from its own gradient alone if num_stages > 1 or ZeRO or "
                f"num_chunks > 1 divides the parameters, but got one whose result mixes {first} and {second}. Devices "
                "do not see each other's gradients: remove the transformation that couples parameters; in place of "
                "optax.clip_by_global_norm set gradient_clipping in the config, in place of optax.apply_if_finite "
                "fp16 or bf16, in place of optax.MultiSteps gradient_accumulation_steps."
            )


def updates_alike(trace: OptimizerTrace, stages: Sequence[Mapping[Path, str]]) -> bool:
    """True if an optimiser treats parameters of one name alike on all stages, with the paths they have in the model.

    Args:
        trace: The optimiser.
        stages: For each stage, names of some parameters by path.

    Returns:
        True where first state and update are the same expressions on all stages, and the state has the same form.
    """
    names = {path: name for stage in stages for path, name in stage.items()}

    def label(kind: str, path: Path) -> tuple[str, Path, str | None, Path]:
        i, j = find_param(path, names) or (len(path), 0)
        return kind, path[:i], names[path[i:j]] if j else None, path[j:] if j else ()

    grads, params = ([label(kind, path) for path in trace.params] for kind in ("gradient", "parameter"))
    state = [label("state", path) for path in trace.state]
    for closed, inputs, outputs in (
        (trace.init, params, state),
        (trace.update, [*grads, *state, *params], [*params, *state]),
    ):
        found: dict[Hashable, list[int]] = {}
        for output, number in zip(outputs, value_numbers(closed, inputs), strict=True):
            if output[2] is not None:
                found.setdefault(output, []).append(number)
        if any(len(numbers) != len(stages) or len(set(numbers)) > 1 for numbers in found.values()):
            return False
    return True
