"""The functional core: turns a model, an optimiser and a mesh into a state and a jitted step."""

from ._batch_io import BatchIO
from ._describe import describe_pipeline
from ._hyperparams import Hyperparams
from ._make import ConfigLike, Prepared, configure_model, make_pipeline, mesh_for, prepare
from ._optimizer import ChosenOptimizer, choose_optimizer
from ._pipeline import Pipeline
from ._programs import Programs
from ._sizes import Sizes
from ._state_io import StateIO
from ._traced import running_mesh, trace_model
from ._validate import (
    check_mesh,
    check_opt_state,
    check_params,
    check_params_name,
    entry_struct,
    read_params,
)
