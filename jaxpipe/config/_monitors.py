"""The sections that say where a run's numbers are written, with DeepSpeed's names and defaults.

`mlflow` and `trackio` are this library's own.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from ._section import Section, setting
from ._values import integer_of_at_least, one_of, optional, read_any_path, read_flag, read_text

_JOB = "DeepSpeedJobName"


@dataclass(frozen=True)
class TensorBoardSection(Section):
    """The section `tensorboard`: event files for TensorBoard.

    Attributes:
        enabled: Whether to write them; needs the extra `jaxpipe[tensorboard]`.
        output_path: The folder in which `job_name` is made, or its URL on a store; empty: the
            working directory.
        job_name: The run's folder.

    Raises:
        ConfigError: A value is of the wrong type.
    """

    path: ClassVar[str] = "tensorboard"
    switch: ClassVar[str | None] = "enabled"

    enabled: bool = setting(False, read_flag)
    output_path: str = setting("", read_any_path)
    job_name: str = setting(_JOB, read_text)


@dataclass(frozen=True)
class CSVMonitorSection(Section):
    """The section `csv_monitor`: a file of samples and values for each name.

    Attributes:
        enabled: Whether to write them.
        output_path: The folder in which `job_name` is made, or its URL on a store; empty: the
            working directory.
        job_name: The run's folder.

    Raises:
        ConfigError: A value is of the wrong type.
    """

    path: ClassVar[str] = "csv_monitor"
    switch: ClassVar[str | None] = "enabled"

    enabled: bool = setting(False, read_flag)
    output_path: str = setting("", read_any_path)
    job_name: str = setting(_JOB, read_text)


@dataclass(frozen=True)
class WandbSection(Section):
    """The section `wandb`: a run of Weights & Biases.

    The one that the program has begun, where it has.

    Attributes:
        enabled: Whether to log there; needs the extra `jaxpipe[wandb]`.
        group: The group of runs.
        team: The team or user that the project belongs to.
        project: The project.

    Raises:
        ConfigError: A value is of the wrong type.
    """

    path: ClassVar[str] = "wandb"
    switch: ClassVar[str | None] = "enabled"

    enabled: bool = setting(False, read_flag)
    group: str | None = setting(None, optional(read_text))
    team: str | None = setting(None, optional(read_text))
    project: str = setting("deepspeed", read_text)


@dataclass(frozen=True)
class CometSection(Section):
    """The section `comet`: an experiment of Comet.

    What is None is Comet's own to find, in its file or environment.

    Attributes:
        enabled: Whether to log there; needs the extra `jaxpipe[comet]`.
        samples_log_interval: Samples from one value of a name to the next that is logged.
        project: The project.
        workspace: The workspace.
        api_key: The key; it is not stored in checkpoints.
        experiment_name: The experiment's name.
        experiment_key: The experiment's key.
        online: Whether it goes to the server, or to a file.
        mode: Whether the experiment is made anew, gone on with, or either.

    Raises:
        ConfigError: A value is of the wrong type or out of range.
    """

    path: ClassVar[str] = "comet"
    switch: ClassVar[str | None] = "enabled"

    enabled: bool = setting(False, read_flag)
    samples_log_interval: int = setting(100, integer_of_at_least(1))
    project: str | None = setting(None, optional(read_text))
    workspace: str | None = setting(None, optional(read_text))
    api_key: str | None = setting(None, optional(read_text), is_secret=True)
    experiment_name: str | None = setting(None, optional(read_text))
    experiment_key: str | None = setting(None, optional(read_text))
    online: bool | None = setting(None, optional(read_flag))
    mode: Literal["get", "create", "get_or_create"] | None = setting(
        None, optional(one_of("get", "create", "get_or_create"))
    )


@dataclass(frozen=True)
class MLflowSection(Section):
    """The section `mlflow`: a run of MLflow.

    The one that the program has begun, where it has. DeepSpeed has no such section.

    Attributes:
        enabled: Whether to log there; needs the extra `jaxpipe[mlflow]`.
        tracking_uri: Where runs are kept, such as `sqlite:///runs.db` or the address of a server;
            None is MLflow's own to find, in its environment.
        experiment_name: The experiment, which is made where there is none of the name.
        run_name: The run's name; None: MLflow makes one.

    Raises:
        ConfigError: A value is of the wrong type.
    """

    path: ClassVar[str] = "mlflow"
    switch: ClassVar[str | None] = "enabled"

    enabled: bool = setting(False, read_flag)
    tracking_uri: str | None = setting(None, optional(read_text))
    experiment_name: str = setting("jaxpipe", read_text)
    run_name: str | None = setting(None, optional(read_text))


@dataclass(frozen=True)
class TrackioSection(Section):
    """The section `trackio`: a run of Trackio, on this machine or in a Hugging Face Space.

    The one that the program has begun, where it has. DeepSpeed has no such section.

    Attributes:
        enabled: Whether to log there; needs the extra `jaxpipe[trackio]`.
        project: The project.
        name: The run's name, which goes on where there is one of the name; None: Trackio makes one.
        group: The group of runs.
        space_id: The Space, `owner/name`; None: this machine, or what Trackio's environment says.

    Raises:
        ConfigError: A value is of the wrong type.
    """

    path: ClassVar[str] = "trackio"
    switch: ClassVar[str | None] = "enabled"

    enabled: bool = setting(False, read_flag)
    project: str = setting("jaxpipe", read_text)
    name: str | None = setting(None, optional(read_text))
    group: str | None = setting(None, optional(read_text))
    space_id: str | None = setting(None, optional(read_text))
