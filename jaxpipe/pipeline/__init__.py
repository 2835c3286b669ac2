"""The functional core: turns a model, an optimiser and a mesh into a state and a jitted step."""

from ._describe import describe_pipeline as describe_pipeline
from ._hyperparams import Hyperparams as Hyperparams
from ._make import ConfigLike as ConfigLike
from ._make import Prepared as Prepared
from ._make import configure_model as configure_model
from ._make import make_pipeline as make_pipeline
from ._make import mesh_for as mesh_for
from ._make import prepare as prepare
from ._optimizer import ChosenOptimizer as ChosenOptimizer
from ._optimizer import choose_optimizer as choose_optimizer
from ._pipeline import Pipeline as Pipeline
from ._traced import running_mesh as running_mesh
from ._traced import trace_model as trace_model
from ._validate import check_mesh as check_mesh
from ._validate import check_opt_state as check_opt_state
from ._validate import check_params as check_params
from ._validate import check_params_name as check_params_name
from ._validate import entry_struct as entry_struct
from ._validate import read_params as read_params

__all__ = [
    "make_pipeline",
    "ChosenOptimizer",
    "ConfigLike",
    "Hyperparams",
    "Pipeline",
    "Prepared",
    "check_mesh",
    "check_opt_state",
    "check_params",
    "check_params_name",
    "choose_optimizer",
    "configure_model",
    "describe_pipeline",
    "entry_struct",
    "mesh_for",
    "prepare",
    "read_params",
    "running_mesh",
    "trace_model",
]
