"""The configuration on a script's command line."""

import argparse
import contextlib
from collections.abc import Mapping
from os import PathLike
from typing import Any, cast

from jaxpipe.errors import ConfigError, shown

from ._collect import Collector
from ._load import load_config
from ._train import TrainConfig

_DEPRECATED = ("deepscale", "deepscale_config")


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add DeepSpeed's arguments to a script's parser.

    `--deepspeed_config` is the path of the configuration. `--deepspeed` is a flag for the script's
    own use: jaxpipe does not read it. `--local_rank` and `--local-rank`, which DeepSpeed's launcher
    and torchrun pass, are accepted and ignored, because one process drives all devices of its host.
    A script may add its own `--local_rank` before or after this call.

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
    group.add_argument(
        "--deepspeed_config", type=str, default=None, help="path of the JSON configuration"
    )
    launcher = parser.add_argument_group("launcher", conflict_handler="error")
    parse = parser.parse_known_args

    def parse_with_local_rank(args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        default = parser.get_default("local_rank")
        options: dict[str, Any] = {
            "dest": "local_rank",
            "type": int,
            "default": -1 if default is None else default,
        }
        for name in ("--local_rank", "--local-rank"):
            with contextlib.suppress(argparse.ArgumentError):  # the script has it
                launcher.add_argument(name, **options, help="passed by launchers; not used")
        return parse(args, namespace)

    # Whether the script has the option itself is known only when it parses. argparse refuses to add
    # an option twice, so adding it now would break a script that adds its own later. Type checkers
    # see a method here, hence `setattr`.
    setattr(parser, "parse_known_args", parse_with_local_rank)  # noqa: B010
    return parser


def config_from_args(
    args: object,
    config: TrainConfig | Mapping[str, Any] | str | PathLike[str] | None = None,
    config_params: TrainConfig | Mapping[str, Any] | str | PathLike[str] | None = None,
    errors: Collector | None = None,
) -> TrainConfig:
    """Read the configuration from the one argument that gives it.

    `config_params` is DeepSpeed's older name of `config`. `deepspeed_config` in `args`, a namespace
    or a dictionary, is a path. As in DeepSpeed, the value of `args.deepspeed` does not matter.
    `errors` is as for `load_config`.
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
    return load_config(next(iter(given.values())), errors)


def _argument(args: object, name: str) -> object:
    if isinstance(args, Mapping):
        return cast("Mapping[object, object]", args).get(name)
    return getattr(args, name, None)
