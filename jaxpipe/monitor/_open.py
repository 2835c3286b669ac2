"""The monitors that the configuration asks for."""

import importlib.util
import logging
from collections.abc import Callable

from jaxpipe.config import TrainConfig
from jaxpipe.distributed import log
from jaxpipe.errors import ConfigError

from ._comet import CometMonitor
from ._csv import CSVMonitor
from ._event import Monitor
from ._tensorboard import TensorBoardMonitor
from ._wandb import WandbMonitor

_LIBRARIES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
"""By the section and extra, what is imported."""


def check_monitors(config: TrainConfig) -> None:
    """Make sure that the libraries are there which the configuration asks for.

    Raises:
        ConfigError: One is not installed.
    """
    wanted = {
        "tensorboard": config.tensorboard.enabled,
        "wandb": config.wandb.enabled,
        "comet": config.comet.enabled,
    }
    for section, library in _LIBRARIES.items():
        if wanted[section] and importlib.util.find_spec(library) is None:
            raise ConfigError(
                f"{section}.enabled must be false unless the package {library} is installed, but "
                f"got {section}.enabled=True. Run pip install 'jaxpipe[{section}]', or remove the "
                "section.",
                paths=[f"{section}.enabled"],
            )


def open_monitors(config: TrainConfig) -> list[Monitor]:
    """Begin to write what the configuration asks for.

    A monitor that cannot begin, because there is no disk or no server, is left out with a warning
    in the log.

    Args:
        config: The configuration, its libraries checked by `check_monitors`.

    Returns:
        The monitors.
    """
    asked: list[tuple[str, bool, Callable[[], Monitor]]] = [
        ("tensorboard", config.tensorboard.enabled, lambda: TensorBoardMonitor(config.tensorboard)),
        ("wandb", config.wandb.enabled, lambda: WandbMonitor(config.wandb)),
        ("csv_monitor", config.csv_monitor.enabled, lambda: CSVMonitor(config.csv_monitor)),
        ("comet", config.comet.enabled, lambda: CometMonitor(config.comet)),
    ]
    found: list[Monitor] = []
    for section, enabled, start in asked:
        if not enabled:
            continue
        try:
            found.append(start())
        except Exception as error:  # noqa: BLE001  # whatever these libraries raise
            log(
                logging.WARNING,
                "%s could not begin and is switched off, training goes on: %s: %s",
                section,
                type(error).__name__,
                error,
            )
    return found
