"""The configuration on a script's command line."""

import argparse
import contextlib
from collections.abc import Mapping
from os import PathLike
from typing import Any, cast

from jaxpipe.errors import ConfigError

from ._load import load_config
from ._train import TrainConfig
from ._values import shown

_DEPRECATED = ("deepscale", "deepscale_config")


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add DeepSpeed's arguments to a script's parser.

    `--deepspeed_config` is the path of the configuration. `--deepspeed` is a flag for the script's own use: nothing
    here reads it. `--local_rank`, which DeepSpeed's launcher passes, is understood and not used, because one process
    drives all devices of its host; a script may have added it before.

    Args:
        parser: The script's parser.

    Returns:
        The same parser.

    Example:
        >>> parser = add_config_arguments(argparse.ArgumentParser())
        >>> parser.parse_args(["--deepspeed", "--deepspeed_config", "config.json"]).deepspeed_config
        'config.json'

    Reference:
        DeepSpeed's `deepspeed.add_config_arguments`.
    """
    group = parser.add_argument_group("DeepSpeed", "configuration")
    group.add_argument("--deepspeed", action="store_true", help="flag for the script's own use")
    group.add_argument("--deepspeed_config", type=str, default=None, help="path of the JSON configuration")
    with contextlib.suppress(argparse.ArgumentError):
        group.add_argument("--local_rank", type=int, default=-1, help="passed by launchers; not used")
    return parser


def config_from_args(
    args: object,
    config: TrainConfig | Mapping[str, Any] | str | PathLike[str] | None = None,
    config_params: TrainConfig | Mapping[str, Any] | str | PathLike[str] | None = None,
) -> TrainConfig:
    """Read the configuration from the one place that gives it.

    Whether `args.deepspeed` is true does not matter, as in DeepSpeed.

    Args:
        args: A namespace or dictionary whose `deepspeed_config` is the path of the configuration, or anything without
            one.
        config: A dictionary, a path, or a configuration.
        config_params: DeepSpeed's older name of `config`.

    Returns:
        The configuration.

    Raises:
        ConfigError: No place or more than one gives a configuration, `args` uses a name that DeepSpeed gave up, or the
            configuration is wrong.
    """
    for name in _DEPRECATED:
        value = _argument(args, name)
        if value:
            raise ConfigError(
                f"args.{name} must not be given, but got args.{name}={shown(value)}. "
                f"Use args.{name.replace('scale', 'speed')}."
            )
    in_args = cast("str | None", _argument(args, "deepspeed_config"))
    places = {"config": config, "config_params": config_params, "args.deepspeed_config": in_args}
    given = {name: value for name, value in places.items() if value is not None}
    if len(given) != 1:
        values = " and ".join(f"{name}={shown(value)}" for name, value in given.items())
        raise ConfigError(
            f"initialize must be given one configuration, but got {' and '.join(given) or 'none'}. "
            'Pass config={"train_batch_size": ...} or the path of a JSON file'
            + (f", and keep one of {values}." if given else ".")
        )
    return load_config(next(iter(given.values())))


def _argument(args: object, name: str) -> object:
    if isinstance(args, Mapping):
        return cast("Mapping[object, object]", args).get(name)
    return getattr(args, name, None)
