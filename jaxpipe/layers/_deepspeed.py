"""Names of DeepSpeed's `PipelineModule` that have no meaning here: each says what takes its place."""

from typing import Any, NoReturn

from jaxpipe.errors import PipelineError


class DeepSpeedNames:
    """Base of `PipelineModule` that answers to DeepSpeed's per-process methods with a pointer to ours."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the module holds no parameters.

        Raises:
            PipelineError: Always.
        """
        _refuse("forward", "use apply(params, inputs), with the parameters that init(key, inputs) returns")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the module holds no parameters.

        Raises:
            PipelineError: Always.
        """
        _refuse("__call__", "use apply(params, inputs), with the parameters that init(key, inputs) returns")

    def parameters(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the module holds no parameters.

        Raises:
            PipelineError: Always.
        """
        _refuse("parameters", _PARAMETERS)

    def named_parameters(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the module holds no parameters.

        Raises:
            PipelineError: Always.
        """
        _refuse("named_parameters", _PARAMETERS)

    def state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the module holds no parameters.

        Raises:
            PipelineError: Always.
        """
        _refuse("state_dict", _STATE)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the module holds no parameters.

        Raises:
            PipelineError: Always.
        """
        _refuse("load_state_dict", "use the engine's load_module_state_dict(tree)")

    def get_tied_weights_and_groups(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: there are no process groups.

        Raises:
            PipelineError: Always.
        """
        _refuse("get_tied_weights_and_groups", "the shared parameters are those under 'tied' of the parameter tree")

    def allreduce_tied_weight_gradients(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: tied gradients are summed inside the compiled step.

        Raises:
            PipelineError: Always.
        """
        _refuse("allreduce_tied_weight_gradients", "train_batch sums the gradients of tied layers inside the step")

    def mpu(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: there is no model-parallel unit object.

        Raises:
            PipelineError: Always.
        """
        _refuse("mpu", "use topology(), or PipelineParallelGrid(topology, rank) for ranks and groups")

    def ckpt_prefix(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: a checkpoint is one directory of global arrays, not a file per stage.

        Raises:
            PipelineError: Always.
        """
        _refuse("ckpt_prefix", _STATE)

    def ckpt_layer_path(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: a checkpoint is one directory of global arrays, not a file per layer.

        Raises:
            PipelineError: Always.
        """
        _refuse("ckpt_layer_path", _STATE)

    def ckpt_layer_path_list(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: a checkpoint is one directory of global arrays, not files per layer.

        Raises:
            PipelineError: Always.
        """
        _refuse("ckpt_layer_path_list", _STATE)

    def save_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the module holds no parameters.

        Raises:
            PipelineError: Always.
        """
        _refuse("save_state_dict", _STATE)

    def load_state_dir(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the module holds no parameters.

        Raises:
            PipelineError: Always.
        """
        _refuse("load_state_dir", "use the engine's load_module_state_dict(tree)")


_PARAMETERS = (
    "init(key, inputs) makes them, initialize(model_parameters=...) takes them, and the engine's module_state_dict() "
    "gives the present ones"
)
_STATE = "use the engine's module_state_dict(), a tree by layer that is the same for any number of stages"


def _refuse(name: str, instead: str) -> NoReturn:
    raise PipelineError(f"PipelineModule.{name} must not be called: a compiled pipeline has no such step; {instead}.")
