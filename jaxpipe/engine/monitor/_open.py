"""The monitors that the configuration asks for."""

import importlib.util
import logging
from collections.abc import Callable
from typing import Any

from jaxpipe.config import TrainConfig
from jaxpipe.distributed import log
from jaxpipe.errors import ConfigError

from ._comet import CometMonitor
from ._csv import CSVMonitor
from ._event import Monitor
from ._mlflow import MLflowMonitor
from ._tensorboard import TensorBoardMonitor
from ._trackio import TrackioMonitor
from ._wandb import WandbMonitor

_KINDS: dict[str, tuple[Callable[[Any], Monitor], str | None]] = {
    "tensorboard": (TensorBoardMonitor, "tensorboard"),
    "wandb": (WandbMonitor, "wandb"),
    "csv_monitor": (CSVMonitor, None),
    "comet": (CometMonitor, "comet_ml"),
    "mlflow": (MLflowMonitor, "mlflow"),
    "trackio": (TrackioMonitor, "trackio"),
}
"""Maps a section, which is also the name of its extra, to its monitor and the library it needs."""

MONITOR_SECTIONS = tuple(_KINDS)
"""The sections of the configuration that set where metrics are written."""


def asks_for_monitors(config: TrainConfig) -> bool:
    """True if the configuration enables a monitor."""
    return any(getattr(config, section).enabled for section in _KINDS)


def check_monitors(config: TrainConfig) -> None:
    """Check that the libraries of the enabled monitors are installed."""
    for section, (_, library) in _KINDS.items():
        if library is None or not getattr(config, section).enabled:
            continue
        if importlib.util.find_spec(library) is None:
            raise ConfigError(
                f"{section}.enabled must be false unless the package {library} is installed, but "
                f"got {section}.enabled=True. Run pip install 'jaxpipe[{section}]', or remove the "
                "section.",
                paths=[f"{section}.enabled"],
            )


def open_monitors(config: TrainConfig) -> list[Monitor]:
    """Start the monitors that a configuration checked by `check_monitors` enables."""
    found: list[Monitor] = []
    for name, (start, _) in _KINDS.items():
        section = getattr(config, name)
        if not section.enabled:
            continue
        try:
            found.append(start(section))
        except Exception as error:  # noqa: BLE001  # whatever these libraries raise
            # For example, its disk or its server is not available.
            log(
                logging.WARNING,
                "%s could not start and is switched off, training goes on: %s: %s",
                name,
                type(error).__name__,
                error,
            )
    return found
