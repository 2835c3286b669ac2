"""`PipelineModule`'s partition methods, by name."""

import re
from collections.abc import Callable, Hashable, Iterable, Sequence, Sized
from dataclasses import dataclass
from numbers import Integral
from typing import Literal, cast

from jaxpipe.errors import PartitionError, nearest, shown

from ._balanced import partition_balanced
from ._best import partition_best
from ._checks import checked_count
from ._costs import Profile
from ._table import format_layers
from ._trunk import partition_trunk
from ._uniform import partition_uniform

_TYPE = "type:"

METHOD_NAMES = "'best', 'uniform', 'parameters', 'profile', 'type:REGEX', 'trunk'"
"""The names, as errors and the configuration reference list them."""


@dataclass(frozen=True)
class _Layers:
    """Facts about the layers to cut."""

    num_stages: int
    num_parts: int
    names: Sequence[str]
    class_names: Sequence[str]
    num_params: Sequence[int] | None
    signatures: Sequence[Hashable] | None
    profile: Profile | None

    def listing(self) -> str:
        return format_layers(self.names, self.num_params)

    def asked(self) -> str:
        """The number of parts, in terms of the arguments that a user sets."""
        if self.num_parts == self.num_stages:
            return f"num_stages={self.num_stages}"
        return f"num_stages={self.num_stages} and num_chunks={self.num_parts // self.num_stages}"


def is_method(method: object, *names: str) -> bool:
    """True if a partition method is one of these names, in any letter case."""
    return isinstance(method, str) and method.lower() in names


def needs_shapes(method: str | Sequence[int]) -> bool:
    """True if a partition method needs the shapes of the model, but no measurements."""
    return is_method(method, "best", "parameters", "trunk")


def profile_source(method: str | Sequence[int]) -> Literal["times", "counts"] | None:
    """What `'profile'` cuts by: measured `"times"` or estimated `"counts"`; None for others."""
    if not isinstance(method, str):
        return None
    name, colon, source = method.lower().partition(":")
    if name != "profile":
        return None
    if not colon:
        return "times"
    if source != "flops":
        raise PartitionError(
            "partition_method must be 'profile' or 'profile:flops', but got "
            f"partition_method={method!r}. Use 'profile' for measured times, or 'profile:flops' "
            "for counted operations and bytes."
        )
    return "counts"


def partition_layers(
    method: str | Sequence[int],
    *,
    num_stages: int,
    num_parts: int | None = None,
    names: Sequence[str],
    class_names: Sequence[str],
    num_params: Sequence[int] | None = None,
    signatures: Sequence[Hashable] | None = None,
    profile: Profile | None = None,
) -> tuple[int, ...]:
    r"""Cut a list of layers into stages, or into their chunks, by a method of `PipelineModule`.

    - `'best'`: the shortest tick, from times estimated from the layers' operations and bytes, and
      from the cost of layers outside the trunk (`partition_best`).
    - `'uniform'`: equal numbers of layers (`partition_uniform`).
    - `'parameters'`: minimises the number of parameters of the largest stage
      (`partition_balanced`).
    - `'type:REGEX'`: as `'parameters'`, with weight 1 for each layer whose class name contains a
      match of the regular expression, ignoring case, and weight 0 for the others. Everything after
      the first colon is the expression, unchanged (DeepSpeed drops everything after a second colon,
      and turns `\S` into `\s`).
    - `'profile'`: as `'best'`, from measured times, and within a memory limit if there is one;
      `'profile:flops'` uses times estimated from operations and bytes instead.
    - `'trunk'`: an equal number of repeated layers in each part. Layers before them are in the
      first part, and layers after them in the last. This suits the executor best.
    - A sequence of `num_parts + 1` boundaries, such as `[0, 3, 6, 9]`.

    Method names are not case sensitive.

    Args:
        method: Name of the method, or boundaries.
        num_stages: Number of stages.
        num_parts: Number of parts to cut into, at most the number of layers: `num_stages` times the
            schedule's `num_chunks`. None makes one part per stage, or as many as the explicit
            boundaries define.
        names: One name per layer, for messages.
        class_names: One class name per layer, for `'type:'`.
        num_params: Number of parameters per layer that an optimiser updates. `'parameters'` needs
            it; for other methods it only adds detail to messages.
        signatures: One value per layer, equal for equivalent layers; `'trunk'` needs it.
        profile: Costs of the layers. `'profile'` and `'best'` need it, the latter with signatures.

    Returns:
        The boundaries: `num_parts + 1` layer indices, first 0, last the number of layers, strictly
            increasing.

    Raises:
        PartitionError: There are more parts than layers, `num_parts` is not a multiple of
            `num_stages`, the method is unknown or not available, the expression is not valid or
            matches nothing, the boundaries do not fit, `'trunk'` finds no run whose length the
            number of parts divides, no cut is within the profile's memory limit, or an argument
            that the method needs is missing or has the wrong length.
    """
    num_stages = checked_count(num_stages, "num_stages")
    num_parts = _num_parts(method, num_stages, num_parts)
    layers = _checked(
        _Layers(num_stages, num_parts, names, class_names, num_params, signatures, profile)
    )
    if not isinstance(method, str):
        return _explicit(method, layers)
    return tuple(_method(method, layers)(method, layers))


def _num_parts(method: object, num_stages: int, num_parts: int | None) -> int:
    """The number of parts to cut into, which explicit boundaries may define."""
    if num_parts is None:
        given = (
            len(method) - 1
            if isinstance(method, Sized) and not isinstance(method, str)
            else num_stages
        )
        return given if given > 0 and given % num_stages == 0 else num_stages
    num_parts = checked_count(num_parts, "num_parts")
    if num_parts % num_stages:
        raise PartitionError(
            "num_parts must be a multiple of num_stages, one part for each chunk of a stage, but "
            f"got num_parts={num_parts} and num_stages={num_stages}. Pass num_stages * num_chunks."
        )
    return num_parts


def _checked(layers: _Layers) -> _Layers:
    num_layers = len(layers.names)
    for name in ("class_names", "num_params", "signatures"):
        value: Sequence[object] | None = getattr(layers, name)
        if value is not None and len(value) != num_layers:
            raise PartitionError(
                f"{name} must have one entry per layer ({num_layers}), but got "
                f"len({name})={len(value)}. Give one entry for each of names."
            )
    if layers.num_parts > num_layers:
        has_chunks = layers.num_parts > layers.num_stages
        what, empty = (
            ("num_stages * num_chunks", "chunk") if has_chunks else ("num_stages", "stage")
        )
        most = "fewer stages or chunks" if has_chunks else f"at most {num_layers} stages"
        raise PartitionError(
            f"{what} must be at most the number of layers ({num_layers}), so that no {empty} is "
            f"empty, but got {layers.asked()}. Use {most}, or cut the model into more layers. The "
            f"layers:{layers.listing()}"
        )
    return layers


def _method(method: str, layers: _Layers) -> Callable[[str, _Layers], Sequence[int]]:
    name = method.lower()
    if name.startswith(_TYPE):
        return _type
    methods: dict[str, Callable[[str, _Layers], Sequence[int]]] = {
        "best": _best,
        "uniform": _uniform,
        "parameters": _parameters,
        "trunk": _trunk,
    }
    if name in methods:
        return methods[name]
    if profile_source(method) is not None:
        return _best
    near = nearest(name.split(":")[0], [*methods, "profile", _TYPE.rstrip(":")])
    hint = "'type:REGEX'" if near == "type" else f"{near!r}"
    raise PartitionError(
        f"partition_method must be one of {METHOD_NAMES}, or boundaries such as "
        f"{_example(layers)}, but got "
        f"partition_method={shown(method)}. "
        f"{f'Did you mean {hint}?' if near else 'Use one of these.'} "
        f"The layers:{layers.listing()}"
    )


def _example(layers: _Layers) -> list[int]:
    return partition_uniform(len(layers.names), layers.num_parts)


def _uniform(method: str, layers: _Layers) -> Sequence[int]:
    del method
    return partition_uniform(len(layers.names), layers.num_parts)


def _parameters(method: str, layers: _Layers) -> Sequence[int]:
    if layers.num_params is None:
        raise _missing(method, "num_params")
    return partition_balanced(layers.num_params, layers.num_parts)


def _trunk(method: str, layers: _Layers) -> Sequence[int]:
    if layers.signatures is None:
        raise _missing(method, "signatures")
    return partition_trunk(
        layers.signatures, layers.num_parts, layers.names, layers.listing(), layers.asked()
    )


def _best(method: str, layers: _Layers) -> Sequence[int]:
    return partition_best(_known_profile(method, layers), layers.num_parts)


def _known_profile(method: str, layers: _Layers) -> Profile:
    if layers.profile is None:
        raise PartitionError(
            f"partition_method={method!r} must be given the costs of the layers, but got "
            "profile=None. An engine or a Pipeline finds them when it is built; elsewhere pass a "
            "Profile with one LayerCost per layer."
        )
    if len(layers.profile.layers) != len(layers.names):
        raise PartitionError(
            f"profile must have one cost per layer ({len(layers.names)}), but got "
            f"{len(layers.profile.layers)}. Measure this list of layers."
        )
    return layers.profile


def _missing(method: str, name: str) -> PartitionError:
    return PartitionError(
        f"partition_method={method!r} must be given {name}, but got {name}=None. Pass one entry "
        "per layer."
    )


def _type(method: str, layers: _Layers) -> Sequence[int]:
    pattern = method[len(_TYPE) :]
    try:
        regex = re.compile(pattern, re.IGNORECASE)
    except (re.error, RecursionError, OverflowError) as error:  # nested or repeated too much
        raise PartitionError(
            "partition_method='type:REGEX' must hold a valid regular expression, but got "
            f"{shown(pattern)}: {error}. Correct the expression after 'type:'. The "
            f"layers:{layers.listing()}"
        ) from error
    weights = [int(bool(pattern) and regex.search(name) is not None) for name in layers.class_names]
    if not any(weights):
        classes = ", ".join(dict.fromkeys(layers.class_names))
        raise PartitionError(
            "partition_method='type:REGEX' must match the class name of at least one layer, but "
            f"got {shown(pattern)}. The classes are {classes}. The layers:{layers.listing()}"
        )
    return partition_balanced(weights, layers.num_parts)


def _explicit(boundaries: Sequence[int], layers: _Layers) -> tuple[int, ...]:
    num_layers = len(layers.names)
    num_parts = layers.num_parts
    values = _integers(boundaries, layers)
    problem = ""
    if len(values) != num_parts + 1:
        what = "num_stages" if num_parts == layers.num_stages else "num_stages * num_chunks"
        problem = f"must be {what} + 1 = {num_parts + 1} boundaries"
    elif values[0] != 0 or values[-1] != num_layers:
        problem = f"must begin with 0 and end with the number of layers ({num_layers})"
    elif any(a >= b for a, b in zip(values, values[1:], strict=False)):
        problem = "must increase from boundary to boundary, so that no part is empty"
    if problem:
        raise PartitionError(
            f"partition_method {problem}, but got partition_method={shown(list(values))}. Use for "
            f"instance {_example(layers)}. The layers:{layers.listing()}"
        )
    return values


def _integers(boundaries: object, layers: _Layers) -> tuple[int, ...]:
    """The boundaries as `int`s; raises an error that shows any other value."""
    values = list(cast("Iterable[object]", boundaries)) if isinstance(boundaries, Iterable) else []
    integers = tuple(int(v) for v in values if not isinstance(v, bool) and isinstance(v, Integral))
    if not values or len(integers) != len(values):
        raise PartitionError(
            "partition_method must be a name or a sequence of integers, but got "
            f"partition_method={shown(cast('object', boundaries))}. Use for instance 'parameters' "
            f"or {_example(layers)}. The layers:{layers.listing()}"
        )
    return integers
