"""`PipelineModule`'s partition methods, by name."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Integral
from typing import cast

from jaxpipe.errors import PartitionError

from ._balanced import partition_balanced
from ._checks import checked_count
from ._table import format_layers
from ._trunk import partition_trunk
from ._uniform import partition_uniform

_PROFILE = "profile"
_TYPE = "type:"


@dataclass(frozen=True)
class _Layers:
    """What is known of the layers to cut."""

    num_stages: int
    names: Sequence[str]
    class_names: Sequence[str]
    num_params: Sequence[int] | None
    repeated: Sequence[int | None] | None

    def listing(self) -> str:
        return format_layers(self.names, self.num_params)


def needs_params(method: str | Sequence[int]) -> bool:
    """Whether a partition method cannot do without the number of parameters per layer.

    Args:
        method: As for `partition_layers`.

    Returns:
        True for `'parameters'`, in any case of letters.
    """
    return isinstance(method, str) and method.lower() == "parameters"


def partition_layers(
    method: str | Sequence[int],
    *,
    num_stages: int,
    names: Sequence[str],
    class_names: Sequence[str],
    num_params: Sequence[int] | None = None,
    repeated: Sequence[int | None] | None = None,
) -> tuple[int, ...]:
    r"""Cut a list of layers into stages by one of the methods of `PipelineModule`.

    - `'uniform'`: equal numbers of layers (`partition_uniform`).
    - `'parameters'`: the lightest possible heaviest stage by number of parameters (`partition_balanced`).
    - `'type:REGEX'`: the same with weight 1 for each layer whose class name the regular expression matches anywhere,
      whatever the case of letters, and weight 0 for the others. All that follows the first colon is the expression,
      taken as it is (DeepSpeed drops what follows a second colon, and turns `\S` into `\s`).
    - `'trunk'`: equally many of the repeated layer on each stage, what stands before it on the first stage and what
      follows on the last; this suits the executor best.
    - A sequence of `num_stages + 1` boundaries, such as `[0, 3, 6, 9]`.

    Names of methods may be written in any case of letters.

    Args:
        method: Name of the method, or boundaries.
        num_stages: Number of stages, at most the number of layers.
        names: One name per layer, for messages.
        class_names: One class name per layer, for `'type:'`.
        num_params: Number of parameters per layer that an optimiser updates; `'parameters'` needs it, else it only
            makes messages fuller.
        repeated: Per layer, an id shared by all layers that are alike, or None; `'trunk'` needs it.

    Returns:
        The boundaries: `num_stages + 1` layer indices, first 0, last the number of layers, strictly increasing.

    Raises:
        PartitionError: There are more stages than layers, the method is unknown or not available, the expression is
            not valid or matches nothing, the boundaries do not fit, `'trunk'` finds no run that divides by the number
            of stages, or an argument that the method needs is missing or of the wrong length.
    """
    layers = _checked(_Layers(num_stages, names, class_names, num_params, repeated))
    if not isinstance(method, str):
        return _explicit(method, layers)
    return tuple(_method(method, layers)(method, layers))


def _checked(layers: _Layers) -> _Layers:
    num_layers = len(layers.names)
    for name in ("class_names", "num_params", "repeated"):
        value: Sequence[object] | None = getattr(layers, name)
        if value is not None and len(value) != num_layers:
            raise PartitionError(
                f"{name} must have one entry per layer ({num_layers}), but got len({name})={len(value)}. "
                "Give one entry for each of names."
            )
    num_stages = checked_count(layers.num_stages, "num_stages")
    if num_stages > num_layers:
        raise PartitionError(
            f"num_stages must be at most the number of layers ({num_layers}), so that no stage is empty, but got "
            f"num_stages={num_stages}. Use at most {num_layers} stages, or cut the model into more layers. "
            f"The layers:{layers.listing()}"
        )
    return layers


def _method(method: str, layers: _Layers) -> Callable[[str, _Layers], Sequence[int]]:
    name = method.lower()
    if name.startswith(_TYPE):
        return _type
    methods: dict[str, Callable[[str, _Layers], Sequence[int]]] = {
        "uniform": _uniform,
        "parameters": _parameters,
        "trunk": _trunk,
    }
    if name in methods:
        return methods[name]
    if name == _PROFILE:
        raise PartitionError(
            "partition_method must not depend on measured times, which is not available, but got "
            f"partition_method={method!r}. Use 'parameters', or explicit boundaries from your own measurements, such "
            f"as {_example(layers)}. The layers:{layers.listing()}"
        )
    near = get_close_matches(name.split(":")[0], [*methods, _TYPE.rstrip(":")], n=1)
    known = "'uniform', 'parameters', 'type:REGEX', 'trunk', or boundaries"
    hint = ("'type:REGEX'" if near[0] == "type" else f"{near[0]!r}") if near else ""
    raise PartitionError(
        f"partition_method must be one of {known} such as {_example(layers)}, but got partition_method={method!r}. "
        f"{f'Did you mean {hint}?' if near else 'Use one of these.'} The layers:{layers.listing()}"
    )


def _example(layers: _Layers) -> list[int]:
    return partition_uniform(len(layers.names), layers.num_stages)


def _uniform(method: str, layers: _Layers) -> Sequence[int]:
    del method
    return partition_uniform(len(layers.names), layers.num_stages)


def _parameters(method: str, layers: _Layers) -> Sequence[int]:
    if layers.num_params is None:
        raise _missing(method, "num_params")
    return partition_balanced(layers.num_params, layers.num_stages)


def _trunk(method: str, layers: _Layers) -> Sequence[int]:
    if layers.repeated is None:
        raise _missing(method, "repeated")
    return partition_trunk(layers.repeated, layers.num_stages, layers.names, layers.listing())


def _missing(method: str, name: str) -> PartitionError:
    return PartitionError(
        f"partition_method={method!r} must be given {name}, but got {name}=None. Pass one entry per layer."
    )


def _type(method: str, layers: _Layers) -> Sequence[int]:
    pattern = method[len(_TYPE) :]
    try:
        regex = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise PartitionError(
            f"partition_method='type:REGEX' must hold a valid regular expression, but got {pattern!r}: {error}. "
            f"Correct the expression after 'type:'. The layers:{layers.listing()}"
        ) from error
    weights = [int(bool(pattern) and regex.search(name) is not None) for name in layers.class_names]
    if not any(weights):
        classes = ", ".join(dict.fromkeys(layers.class_names))
        raise PartitionError(
            f"partition_method='type:REGEX' must match the class name of at least one layer, but got {pattern!r}. "
            f"The classes are {classes}. The layers:{layers.listing()}"
        )
    return partition_balanced(weights, layers.num_stages)


def _explicit(boundaries: Sequence[int], layers: _Layers) -> tuple[int, ...]:
    num_layers, num_stages = len(layers.names), layers.num_stages
    values = _integers(boundaries, layers)
    problem = ""
    if len(values) != num_stages + 1:
        problem = f"must be num_stages + 1 = {num_stages + 1} boundaries"
    elif values[0] != 0 or values[-1] != num_layers:
        problem = f"must begin with 0 and end with the number of layers ({num_layers})"
    elif any(a >= b for a, b in zip(values, values[1:], strict=False)):
        problem = "must increase from boundary to boundary, so that no stage is empty"
    if problem:
        raise PartitionError(
            f"partition_method {problem}, but got partition_method={list(values)}. Use for instance "
            f"{_example(layers)}. The layers:{layers.listing()}"
        )
    return values


def _integers(boundaries: object, layers: _Layers) -> tuple[int, ...]:
    """The boundaries as `int`s, or an error that shows what they are instead."""
    values = list(cast("Iterable[object]", boundaries)) if isinstance(boundaries, Iterable) else []
    integers = tuple(int(v) for v in values if not isinstance(v, bool) and isinstance(v, Integral))
    if not values or len(integers) != len(values):
        raise PartitionError(
            f"partition_method must be a name or a sequence of integers, but got partition_method={boundaries!r}. "
            f"Use for instance 'parameters' or {_example(layers)}. The layers:{layers.listing()}"
        )
    return integers
