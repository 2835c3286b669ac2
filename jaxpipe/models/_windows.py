"""Which layers see all earlier positions, and which a window or a chunk, in a `config.json`."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from jaxpipe._util.numbers import as_integer
from jaxpipe.config import wrong_value

from ._huggingface import ConfigKeys
from ._parts import CHUNKED, FULL, SLIDING


class Windows(ABC):
    """How a family says which layers have a window."""

    @abstractmethod
    def read(self, keys: ConfigKeys) -> dict[str, Any]:
        """Read the fields of a `LlamaConfig`."""

    @abstractmethod
    def write(self, config: Any) -> dict[str, Any]:
        """Return the keys of a `config.json` for a `LlamaConfig`."""


class NoWindows(Windows):
    """All layers see all earlier positions."""

    def read(self, keys: ConfigKeys) -> dict[str, Any]:
        """See `Windows`."""
        _check_kinds(keys, FULL)
        return {}

    def write(self, config: Any) -> dict[str, Any]:
        """See `Windows`."""
        del config
        return {}


@dataclass(frozen=True)
class EveryLayer(Windows):
    """All layers have `sliding_window`, by default `default`."""

    default: int | None

    def read(self, keys: ConfigKeys) -> dict[str, Any]:
        """See `Windows`."""
        window = keys.get("sliding_window", self.default)  # null means none
        keys.check("use_sliding_window", window is not None)
        _check_kinds(keys, FULL if window is None else SLIDING)
        return {"sliding_window": window}

    def write(self, config: Any) -> dict[str, Any]:
        """See `Windows`."""
        return {"sliding_window": _window_of(config)}


@dataclass(frozen=True)
class WindowPattern(Windows):
    """The layers of `layer_types` have the window; by default all but every n-th layer.

    `default` is the window and `every` is n, if their keys are missing; `key` is that of n, if any.
    """

    default: int
    every: int
    key: str | None = None

    def read(self, keys: ConfigKeys) -> dict[str, Any]:
        """See `Windows`."""
        every = self.every if self.key is None else keys.size(self.key, self.every)
        kinds = keys.get("layer_types", None)
        if kinds is None:
            numbers = range(1, keys.size("num_hidden_layers") + 1)
            kinds = [SLIDING if number % every else FULL for number in numbers]
        return {"sliding_window": keys.get("sliding_window", self.default), "layer_types": kinds}

    def write(self, config: Any) -> dict[str, Any]:
        """See `Windows`."""
        # `transformers` needs a number, even if no layer has the window.
        window = _window_of(config) or self.default
        return {"sliding_window": window, "layer_types": _kinds_of(config)}


@dataclass(frozen=True)
class OptionalWindows(Windows):
    """With `use_sliding_window`, the layers of `layer_types` have the window."""

    default: int | None
    of_unrotated: bool = False

    def read(self, keys: ConfigKeys) -> dict[str, Any]:
        """See `Windows`."""
        layers = range(keys.size("num_hidden_layers"))
        is_used = keys.flag("use_sliding_window", False)
        window = keys.get("sliding_window", self.default)
        first = keys.size("max_window_layers", 28, least=0)
        if not is_used or window is None:
            _check_kinds(keys, FULL)
            return {}
        kinds = keys.get("layer_types", None)
        if kinds is None:
            # Without `layer_types`, those from `max_window_layers` on, or those without a rotary
            # embedding.
            having = read_unrotated(keys) if self.of_unrotated else layers[first:]
            kinds = [SLIDING if layer in having else FULL for layer in layers]
        return {"sliding_window": window, "layer_types": kinds}

    def write(self, config: Any) -> dict[str, Any]:
        """See `Windows`."""
        window = _window_of(config)
        if window is None:
            return {"sliding_window": None}
        return {
            "sliding_window": window,
            "use_sliding_window": True,
            "layer_types": _kinds_of(config),
        }


@dataclass(frozen=True)
class Chunks(Windows):
    """The layers of `layer_types`, by default those with a rotary embedding, see a chunk."""

    default: int

    def read(self, keys: ConfigKeys) -> dict[str, Any]:
        """See `Windows`."""
        size = keys.get("attention_chunk_size", self.default)
        kinds = keys.get("layer_types", None)
        if kinds is None:
            layers = range(keys.size("num_hidden_layers"))
            unrotated = read_unrotated(keys)
            is_chunked = [size is not None and layer not in unrotated for layer in layers]
            kinds = [CHUNKED if each else FULL for each in is_chunked]
        return {"attention_chunk_size": size, "layer_types": kinds}

    def write(self, config: Any) -> dict[str, Any]:
        """See `Windows`."""
        return {
            "attention_chunk_size": config.pattern.attention_chunk_size,
            "layer_types": _kinds_of(config),
        }


def read_unrotated(keys: ConfigKeys) -> tuple[int, ...]:
    """Read the layers whose queries and keys are not rotated, counted from 0."""
    num_layers = keys.size("num_hidden_layers")
    every = keys.size("no_rope_layer_interval", 4)
    marks = keys.get("no_rope_layers", None)
    if marks in (None, []):
        return tuple(layer for layer in range(num_layers) if (layer + 1) % every == 0)
    if (
        not isinstance(marks, list | tuple)
        or len(marks) != num_layers
        or not all(as_integer(mark, 0) in (0, 1) for mark in marks)
    ):
        rule = f"0 or 1 for each of num_hidden_layers={num_layers}"
        raise wrong_value("no_rope_layers", rule, marks, "Copy it from the model's config.json")
    # In `no_rope_layers`, 1 means that a layer is rotated.
    return tuple(layer for layer, mark in enumerate(marks) if not mark)


def write_unrotated(config: Any) -> dict[str, Any]:
    """Return the keys that `read_unrotated` reads."""
    layers = range(config.num_hidden_layers)
    return {"no_rope_layers": [int(layer not in config.pattern.nope_layers) for layer in layers]}


def _window_of(config: Any) -> int | None:
    return config.pattern.sliding_window if SLIDING in _kinds_of(config) else None


def _kinds_of(config: Any) -> list[str]:
    # All layers by name, because defaults differ from family to family.
    return [config.pattern.kind(layer) for layer in range(config.num_hidden_layers)]


def _check_kinds(keys: ConfigKeys, kind: str) -> None:
    """Refuse layers of other kinds than `kind`."""
    num_layers = keys.size("num_hidden_layers")
    kinds = keys.get("layer_types", None)
    are_right = (
        isinstance(kinds, list | tuple)
        and len(kinds) == num_layers
        and all(each == kind for each in kinds)
    )
    if kinds is not None and not are_right:
        repair = (
            "The layers here compute nothing else with the other keys: correct these, or use a "
            "model of your own"
        )
        rule = f"{kind!r} for each of num_hidden_layers={num_layers}"
        raise wrong_value("layer_types", rule, kinds, repair)
