"""Names of DeepSpeed's `PipelineModule` that have no meaning here; each names its replacement."""

from collections.abc import Callable
from typing import NoReturn

from jaxpipe.errors import refused


def _refused(name: str, instead: str) -> Callable[..., NoReturn]:
    return refused(f"PipelineModule.{name}", f"a compiled pipeline has no such step; {instead}.")


_CALL = "use apply(params, inputs), with the parameters that init(key, inputs) returns"
_PARAMETERS = (
    "init(key, inputs) makes them, initialize(model_parameters=...) takes them, and the engine's "
    "module_state_dict() returns the current ones"
)
_STATE = (
    "use the engine's module_state_dict(), a tree by layer that is the same for any number of "
    "stages"
)
_LOAD = "use the engine's load_module_state_dict(tree)"
_WEIGHTS = "the shared parameters are those under 'tied' of the parameter tree"
_SUM = "train_batch sums the gradients of tied layers inside the step"
_GRID = "use topology(), or PipelineParallelGrid(topology, rank) for ranks and groups"


class DeepSpeedNames:
    """Base of `PipelineModule` whose DeepSpeed per-process methods point to their replacements."""

    forward = _refused("forward", _CALL)
    __call__ = _refused("__call__", _CALL)
    parameters = _refused("parameters", _PARAMETERS)
    named_parameters = _refused("named_parameters", _PARAMETERS)
    state_dict = _refused("state_dict", _STATE)
    load_state_dict = _refused("load_state_dict", _LOAD)
    get_tied_weights_and_groups = _refused("get_tied_weights_and_groups", _WEIGHTS)
    allreduce_tied_weight_gradients = _refused("allreduce_tied_weight_gradients", _SUM)
    mpu = _refused("mpu", _GRID)
    ckpt_prefix = _refused("ckpt_prefix", _STATE)
    ckpt_layer_path = _refused("ckpt_layer_path", _STATE)
    ckpt_layer_path_list = _refused("ckpt_layer_path_list", _STATE)
    save_state_dict = _refused("save_state_dict", _STATE)
    load_state_dir = _refused("load_state_dir", _LOAD)
