"""What the rest of the library knows of a layer: how to make its variables and how to call it."""

import abc
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxpipe._typing import PyTree
from jaxpipe.errors import LayerError

Rngs = Mapping[str, jax.Array]
Applied = tuple[PyTree, dict[str, PyTree], dict[str, PyTree]]


class Layer(abc.ABC):
    """One step of the sequential model, of whatever kind the user wrote it in.

    Variables come in two parts: `params` (what an optimiser updates) and `collections` (state that the layer itself
    changes, such as batch statistics), both nested dictionaries with string keys.
    """

    class_name: str

    @abc.abstractmethod
    def init(self, key: jax.Array, inputs: PyTree, *, side: Mapping[str, PyTree]) -> tuple[PyTree, dict, dict]:
        """Make the variables.

        Args:
            key: A key of this layer's own.
            inputs: What the layer before hands over; only shapes and dtypes matter.
            side: Side inputs by name.

        Returns:
            `(outputs, params, collections)`.
        """

    @abc.abstractmethod
    def apply(
        self,
        params: PyTree,
        collections: Mapping[str, PyTree],
        inputs: PyTree,
        *,
        rngs: Rngs | None,
        train: bool,
        side: Mapping[str, PyTree],
    ) -> Applied:
        """Call the layer.

        Args:
            params: As made by `init`.
            collections: As made by `init`.
            inputs: What the layer before hands over.
            rngs: Random keys by stream, from `layer_rngs`; None where nothing random may happen.
            train: Whether this is training.
            side: Side inputs by name.

        Returns:
            `(outputs, collections, aux)`: the collections after the call, and auxiliary values.
        """


def layer_rngs(key: jax.Array | None) -> Rngs | None:
    """Split a layer's key into the streams that layers ask for; a Linen layer derives any other from `"params"`."""
    if key is None:
        return None
    return {"params": jax.random.fold_in(key, 0), "dropout": jax.random.fold_in(key, 1)}


class CallArguments:
    """The keyword arguments a callable takes beside its inputs, found once from its signature.

    A callable receives `train`, `deterministic`, `rngs` or a side input only if its signature names it.

    Args:
        function: The layer's call, or a tied layer's `forward_fn`.
        num_leading: How many parameters come first and are passed by position (a module, the inputs).
        label: How errors name the layer.
    """

    def __init__(self, function: Callable[..., Any], num_leading: int, label: str) -> None:
        self._label = label
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):  # builtins without a signature take their inputs alone
            parameters = []
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        self._required = {
            p.name: p.default is inspect.Parameter.empty for p in parameters[num_leading:] if p.kind in named
        }

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all parameters that can be passed by keyword."""
        return tuple(self._required)

    def select(self, *, rngs: Rngs | None, train: bool, side: Mapping[str, PyTree]) -> dict[str, Any]:
        """Pick from what there is what the signature names.

        Raises:
            LayerError: A parameter without default that is neither a standard argument nor a side input.
        """
        offered = {"train": train, "deterministic": not train, "rngs": rngs, **side}
        missing = [name for name, required in self._required.items() if required and name not in offered]
        if missing:
            raise LayerError(
                f"{self._label} must find its argument {missing[0]!r} among the side inputs, but got "
                f"side={sorted(side)}. Give the batch a third entry {{{missing[0]!r}: array}}, or the argument a default."
            )
        return {name: offered[name] for name in self._required if name in offered}
