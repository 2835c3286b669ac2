"""Running layers one after another, with their collections and reports."""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from jaxpipe._util.typing import PyTree

from ._build import NamedLayer
from ._protocol import LayerCall, layer_rngs
from ._remat import chain
from ._sharding import Rules, rules_in_force
from ._structs import as_arrays

Extras = tuple[tuple[PyTree, PyTree], ...]
"""For each layer, its collections after the call, and what it reported.

The reports are `{"losses": {...}, "metrics": {...}}`.
"""

Runner = Callable[
    [PyTree, jax.Array | None, Mapping[str, PyTree], Sequence[PyTree]], tuple[PyTree, Extras]
]
"""A function of `(inputs, key, side, collections of each layer)` to `(outputs, extras)`."""


def compose_layers(  # noqa: PLR0913  # one setting each
    layers: Sequence[NamedLayer],
    views: Sequence[PyTree],
    *,
    train: bool,
    offset: jax.Array | int,
    interval: int,
    remat: Callable[..., Any],
    checkpointable: Collection[str] | None = None,
    rules: Rules = (),
    labels: Sequence[str] | None = None,
) -> Runner:
    """The composition of some layers; `remat` wraps each group of `interval` layers in training.

    `views` are their parameters, with the paths inside each layer. `checkpointable` names the
    classes whose layers may be in a recomputed group; None allows all. `labels` name layers in
    profiles.
    """

    def run(
        inputs: PyTree,
        key: jax.Array | None,
        side: Mapping[str, PyTree],
        collections: Sequence[PyTree],
    ) -> tuple[PyTree, Extras]:
        def call(
            named: NamedLayer,
            label: str,
            view: PyTree,
            collections: PyTree,
            carried: tuple[PyTree, Extras],
        ) -> tuple[Any, ...]:
            x, extras = carried
            with jax.named_scope(label):
                # The offset makes one program serve equivalent layers of other stages, each with
                # its own key.
                own = None if key is None else jax.random.fold_in(key, named.index + offset)
                rngs = layer_rngs(own)
                outputs, collections, aux = named.layer.apply(
                    LayerCall(x, side, view, collections, rngs, train)
                )
            return as_arrays(outputs), (*extras, (as_arrays(collections), aux))

        names = [named.name for named in layers] if labels is None else labels
        calls = [
            functools.partial(call, *each)
            for each in zip(layers, names, views, collections, strict=True)
        ]
        marked = [named.is_marked for named in layers]
        may = [
            checkpointable is None or named.layer.class_name in checkpointable for named in layers
        ]
        with rules_in_force(rules):
            # Extras go through the chain as part of the carry, so a recomputed group returns them
            # too.
            return chain(calls, interval if train else 0, remat, marked, may)((inputs, ()))

    return run
