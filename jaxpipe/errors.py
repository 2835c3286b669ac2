"""Every exception the library raises on purpose, under one base class."""


class JaxpipeError(Exception):
    """Base class of all errors raised by jaxpipe."""


class ConfigError(JaxpipeError, ValueError):
    """A configuration value is unknown, missing, or contradicts another."""


class TopologyError(JaxpipeError, ValueError):
    """Stages, replicas and devices do not fit together."""


class PartitionError(JaxpipeError, ValueError):
    """The layers cannot be cut into the stages that were asked for."""


class ScheduleError(JaxpipeError, ValueError):
    """A pipeline schedule is unsound or cannot be executed."""


class LayerError(JaxpipeError, TypeError):
    """A layer is of an unsupported kind, or does not fit its neighbour."""


class DataError(JaxpipeError, ValueError):
    """A batch does not have the structure, shapes or dtypes the engine was built for."""


class CheckpointError(JaxpipeError, RuntimeError):
    """A checkpoint cannot be written or read."""


class LaunchError(JaxpipeError, RuntimeError):
    """Processes or hosts could not be started or joined."""


class PipelineError(JaxpipeError, RuntimeError):
    """An engine method that has no meaning in a pipeline was called; DeepSpeed's name."""
