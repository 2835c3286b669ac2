import argparse
import json
from pathlib import Path

import pytest

from jaxpipe.config import Collector, TrainConfig, add_config_arguments, config_from_args
from jaxpipe.errors import ConfigError

CONFIG = {"train_batch_size": 8}


def _parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser()


def test_arguments() -> None:
    parser = _parser()
    assert add_config_arguments(parser) is parser
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "x.json", "--local_rank=3"])
    assert vars(args) == {"deepspeed": True, "deepspeed_config": "x.json", "local_rank": 3}
    assert vars(parser.parse_args([])) == {
        "deepspeed": False,
        "deepspeed_config": None,
        "local_rank": -1,
    }


SPELLINGS = ["--local_rank", "--local-rank"]


@pytest.mark.parametrize("handler", ["error", "resolve"])
def test_a_script_may_have_its_own_local_rank(handler: str) -> None:
    for passed in SPELLINGS:
        for own in [None, *SPELLINGS]:
            for is_first in [True, False]:
                parser = argparse.ArgumentParser(conflict_handler=handler)
                if not is_first:
                    add_config_arguments(parser)
                if own:
                    parser.add_argument(own, type=int, default=7, help="rank of mine")
                if is_first:
                    add_config_arguments(parser)
                for _ in range(2):
                    assert parser.parse_args([passed, "2"]).local_rank == 2
                    assert parser.parse_args([f"{passed}=3"]).local_rank == 3
                    assert parser.parse_known_args([f"{passed}=4", "--other"])[0].local_rank == 4
                    assert parser.parse_args([]).local_rank == (7 if own else -1)
                assert ("rank of mine" in parser.format_help()) == bool(own)


def test_two_options_of_the_script_are_still_in_conflict() -> None:
    parser = add_config_arguments(_parser())
    parser.add_argument("--lr")
    with pytest.raises(argparse.ArgumentError, match="--lr"):
        parser.add_argument("--lr")


def test_errors_of_a_configuration_may_be_gathered() -> None:
    errors = Collector()
    assert config_from_args(None, {"train_batch_size": 4, "zzz": 1}, errors=errors) == TrainConfig(
        4
    )
    with pytest.raises(ConfigError, match=r"^zzz is not a known key"):
        errors.raise_all()


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
        ConfigError,
        match=r"one configuration, but got none\. Pass config=.* the path of a JSON file\.",
    ):
        config_from_args(args)
