"""Parameters and collections of an engine's model, out and in."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping

import jax
import numpy as np

from jaxpipe._typing import PyTree
from jaxpipe.layers import flatten_dict, unflatten_dict
from jaxpipe.pipeline import Pipeline, read_params
from jaxpipe.state import TrainState

from ._turn import Turn, one_thread


class ModuleState(ABC):
    """Base of `PipelineEngine` that gives out the model's parameters and takes others."""

    _state: TrainState | None
    _model_parameters: PyTree | None
    _turn: Turn

    @property
    @abstractmethod
    def pipeline(self) -> Pipeline:
        """The functional form."""

    @property
    @abstractmethod
    def _has_shapes(self) -> bool:
        """Whether shapes are known."""

    @property
    @abstractmethod
    def state(self) -> TrainState:
        """The present state."""

    @one_thread
    def module_state_dict(self) -> PyTree:
        """The present parameters as numpy arrays, in the form of `PipelineModule.init`.

        Before the first batch they are `model_parameters` as they were given; where there are none, shapes are needed.

        Raises:
            PipelineError: No shapes are known yet, and no parameters.
        """
        if self._model_parameters is not None and not self._has_shapes:
            return jax.tree.map(np.array, self._model_parameters)
        return self.pipeline.params_tree(self.state.params)

    @one_thread
    def module_collections(self) -> dict[str, PyTree]:
        """What layers keep beside parameters, as numpy arrays in the form of `PipelineModule.init_collections`.

        Raises:
            PipelineError: No shapes are known yet.
        """
        return self.pipeline.collections_tree(self.state.collections)

    @one_thread
    def load_module_state_dict(
        self, state_dict: PyTree, strict: bool = True, *, collections: Mapping[str, PyTree] | None = None
    ) -> None:
        """Set the parameters; optimiser state and counters stay.

        Args:
            state_dict: A tree in the form of `PipelineModule.init`.
            strict: Refuse a tree that is not exactly the model's. Otherwise what fits is taken and a warning names
                the rest.
            collections: What `module_collections` returned; None: they stay.

        Raises:
            LayerError: Parameters are missing, unexpected or of another shape, and `strict` is true; or one is no array
                of floating-point numbers. Nothing changed.
            PipelineError: No shapes are known yet.
        """
        tree = state_dict if strict else merge_state_dict(self.module_state_dict(), state_dict)
        state = self.pipeline.replace_params(self.state, tree)
        if collections is not None:
            state = self.pipeline.replace_collections(state, collections)
        self._state = state


def merge_state_dict(present: PyTree, given: PyTree) -> PyTree:
    """Take from a tree what fits, and warn of the rest.

    Args:
        present: The model's parameters.
        given: A tree that may lack some, hold others, or have other shapes.

    Returns:
        The present tree with every parameter replaced that `given` has in the same shape.

    Raises:
        LayerError: A leaf is no array of floating-point numbers.
    """
    now, new = flatten_dict(present), flatten_dict(read_params(given))
    fits = {
        path: new[path] for path, leaf in now.items() if path in new and tuple(new[path].shape) == tuple(leaf.shape)
    }
    left = ["/".join(path) for path in (*now, *(p for p in new if p not in now)) if path not in fits]
    if left:
        warnings.warn(
            f"load_module_state_dict(strict=False) left out {len(left)} parameters that are missing, unexpected or of "
            f"another shape: {', '.join(left[:8])}{', ...' if len(left) > 8 else ''}",
            stacklevel=4,
        )
    return unflatten_dict({**now, **fits})
