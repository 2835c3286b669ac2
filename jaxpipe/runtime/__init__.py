"""The functional core: from a model, an optimiser and a mesh to a state and a jitted step."""

from ._describe import describe_pipeline as describe_pipeline
from ._make import ConfigLike as ConfigLike
from ._make import configure_model as configure_model
from ._make import make_pipeline as make_pipeline
from ._make import mesh_for as mesh_for
from ._pipeline import Pipeline as Pipeline
from ._rng import microbatch_key as microbatch_key
from ._state import TrainState as TrainState

__all__ = [
    "ConfigLike",
    "Pipeline",
    "TrainState",
    "configure_model",
    "describe_pipeline",
    "make_pipeline",
    "mesh_for",
    "microbatch_key",
]
