"""The functional core: from a model, an optimiser and a mesh to a state and a jitted step."""

from ._batch import entry_struct as entry_struct
from ._catalog import Catalog as Catalog
from ._catalog import Leaf as Leaf
from ._catalog import Span as Span
from ._catalog import read_leaf as read_leaf
from ._catalog import write_leaf as write_leaf
from ._check_params import check_params as check_params
from ._check_params import read_params as read_params
from ._choose import ChosenOptimizer as ChosenOptimizer
from ._choose import choose_optimizer as choose_optimizer
from ._describe import describe_pipeline as describe_pipeline
from ._estimate import estimate_layers as estimate_layers
from ._hyperparams import Hyperparams as Hyperparams
from ._make import ConfigLike as ConfigLike
from ._make import configure_model as configure_model
from ._make import make_pipeline as make_pipeline
from ._make import mesh_for as mesh_for
from ._make import pipeline_settings as pipeline_settings
from ._make import prepare as prepare
from ._measure import measure_layers as measure_layers
from ._model_axis import model_topology as model_topology
from ._pipeline import Pipeline as Pipeline
from ._place import own as own
from ._place import place_everywhere as place_everywhere
from ._rng import microbatch_key as microbatch_key
from ._rows import HostRows as HostRows
from ._rows import state_arrays as state_arrays
from ._rows import with_arrays as with_arrays
from ._settings import PipelineSettings as PipelineSettings
from ._state import TrainState as TrainState

__all__ = [
    "Catalog",
    "HostRows",
    "Leaf",
    "Span",
    "own",
    "place_everywhere",
    "read_leaf",
    "read_params",
    "write_leaf",
    "state_arrays",
    "with_arrays",
    "ChosenOptimizer",
    "ConfigLike",
    "Hyperparams",
    "Pipeline",
    "PipelineSettings",
    "TrainState",
    "check_params",
    "choose_optimizer",
    "configure_model",
    "describe_pipeline",
    "entry_struct",
    "estimate_layers",
    "make_pipeline",
    "measure_layers",
    "mesh_for",
    "prepare",
    "microbatch_key",
    "model_topology",
    "pipeline_settings",
]
