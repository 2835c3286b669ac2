import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from jaxpipe.config import TrainConfig, add_config_arguments, config_from_args
from jaxpipe.errors import ConfigError

CONFIG = {"train_batch_size": 8}


def _parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser()


def test_arguments() -> None:
    parser = _parser()
    assert add_config_arguments(parser) is parser
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "x.json", "--local_rank=3"])
    assert vars(args) == {"deepspeed": True, "deepspeed_config": "x.json", "local_rank": 3}
    assert vars(parser.parse_args([])) == {"deepspeed": False, "deepspeed_config": None, "local_rank": -1}


def test_a_script_may_have_its_own_local_rank() -> None:
    parser = _parser()
    parser.add_argument("--local_rank", type=int, default=-1)
    assert add_config_arguments(parser).parse_args(["--local_rank", "2"]).local_rank == 2


@pytest.mark.parametrize("deepspeed", [[], ["--deepspeed"]])
@pytest.mark.parametrize("as_dict", [False, True])
def test_the_path_in_the_arguments(tmp_path: Path, deepspeed: list[str], as_dict: bool) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    args = add_config_arguments(_parser()).parse_args([*deepspeed, "--deepspeed_config", str(file)])
    assert config_from_args(vars(args) if as_dict else args) == TrainConfig(8)


@pytest.mark.parametrize("args", [None, argparse.Namespace(), {}, {"deepspeed_config": None}, 3])
def test_arguments_without_a_path(args: object) -> None:
    assert config_from_args(args, CONFIG) == config_from_args(args, None, CONFIG) == TrainConfig(8)
    with pytest.raises(
        ConfigError, match=r"one configuration, but got none\. Pass config=.* the path of a JSON file\."
    ):
        config_from_args(args)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (
            {"args": {"deepspeed_config": "x.json"}, "config": CONFIG},
            r"but got config and args\.deepspeed_config\. Pass .*"
            r"keep one of config=\{'train_batch_size': 8\} and args\.deepspeed_config='x\.json'\.",
        ),
        (
            {"args": None, "config": CONFIG, "config_params": "y.json"},
            r"but got config and config_params\. Pass .*keep one of config=\{.*\} and config_params='y\.json'\.",
        ),
    ],
)
def test_two_configurations_are_both_printed(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        config_from_args(**given)


@pytest.mark.parametrize(
    ("args", "match"),
    [
        ({"deepscale_config": "x.json"}, r"args.deepscale_config='x.json'. Use args.deepspeed_config"),
        (argparse.Namespace(deepscale=True), r"args.deepscale=True. Use args.deepspeed"),
    ],
)
def test_names_that_deepspeed_gave_up(args: object, match: str) -> None:
    with pytest.raises(ConfigError, match=rf"must not be given, but got {match}\."):
        config_from_args(args, CONFIG)
