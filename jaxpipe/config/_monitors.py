"""The sections that set where a run's metrics are written, with DeepSpeed's names and defaults.

`mlflow` and `trackio` are specific to jaxpipe.
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
        enabled: Whether to write event files. Requires the extra `jaxpipe[tensorboard]`.
        output_path: Folder, or URL of a folder on a store, in which the folder `job_name` is
            created. The default is the working directory.
        job_name: Name of the run's folder.

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
    """The section `csv_monitor`: one file of sample counts and values for each metric.

    Attributes:
        enabled: Whether to write CSV files.
        output_path: Folder, or URL of a folder on a store, in which the folder `job_name` is
            created. The default is the working directory.
        job_name: Name of the run's folder.

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
    """The section `wandb`: a run in Weights & Biases.

    If the program has already started a run, that run is used.

    Attributes:
        enabled: Whether to log to Weights & Biases. Requires the extra `jaxpipe[wandb]`.
        group: Name of the group of runs.
        team: Name of the team or user that owns the project.
        project: Name of the project.

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
    """The section `comet`: an experiment in Comet.

    Comet reads settings that are not given here from its own file or environment variables.

    Attributes:
        enabled: Whether to log to Comet. Requires the extra `jaxpipe[comet]`.
        samples_log_interval: Number of samples between logged values of a metric.
        project: Name of the project.
        workspace: Name of the workspace.
        api_key: The API key. It is not stored in checkpoints.
        experiment_name: Name of the experiment.
        experiment_key: Key of the experiment.
        online: Whether to log to the server. If false, the experiment is written to a file.
        mode: Whether to continue an existing experiment (`'get'`), create a new one (`'create'`),
            or allow both (`'get_or_create'`).

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
    """The section `mlflow`: a run in MLflow.

    If the program has already started a run, that run is used. DeepSpeed has no such section.

    Attributes:
        enabled: Whether to log to MLflow. Requires the extra `jaxpipe[mlflow]`.
        tracking_uri: Where runs are stored, such as `sqlite:///runs.db` or the address of a server.
            By default MLflow reads it from its environment variables.
        experiment_name: Name of the experiment. It is created if it does not exist.
        run_name: Name of the run. By default MLflow generates one.

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
    """The section `trackio`: a run in Trackio, on this machine or in a Hugging Face Space.

    If the program has already started a run, that run is used. DeepSpeed has no such section.

    Attributes:
        enabled: Whether to log to Trackio. Requires the extra `jaxpipe[trackio]`.
        project: Name of the project.
        name: Name of the run. An existing run of this name is continued. By default Trackio
            generates a name.
        group: Name of the group of runs.
        space_id: The Space, as `owner/name`. By default runs are stored on this machine, unless
            Trackio's environment variables name a Space.

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
